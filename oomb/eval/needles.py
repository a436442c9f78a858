"""Needles in a haystack: sentences like "The code of amber falcon is 48213." are hidden in real text, and the codes of
some are asked for at its end.

    part 0 of the text        part 1                       ...  the questions
    ... [a] ... [A] . [b] ..  .. [c] ..... [d] .. [C] ...       [C with its code] [A with its code]

One pass scores all questions of a haystack. Each is a choice between the codes of the needles in its part of the text,
of which only one is ever asked for, and which lie there in an order of chance. So a model that does not connect a code
with its name, whatever else it has learned (to repeat codes, to prefer late ones, not to repeat what has been
answered), is right one time in as many as there are candidates. A second pass, over the same text and questions without
needles, is the control. T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from oomb.eval.passes import noting
from oomb.eval.samples import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oomb.engine.engine import Engine

LINE_SEARCH = 256
"""Tokens within which a needle looks for the end of a line to be put at."""

LEAD, VALUE, TAIL = "\nThe code of {} is", " {}", ".\n"
ADJECTIVES = (
    "amber", "azure", "bold", "brave", "bright", "calm", "clever", "coral", "crimson", "eager", "gentle", "golden",
    "happy", "ivory", "jolly", "kind", "little", "lucky", "misty", "noble", "olive", "proud", "quiet", "rapid",
    "rusty", "silent", "silver", "sunny", "tiny", "violet", "wild", "young",
)  # fmt: skip
NOUNS = (
    "badger", "beaver", "bison", "camel", "crane", "donkey", "eagle", "falcon", "ferret", "finch", "gecko", "heron",
    "ibis", "jackal", "koala", "lemur", "lizard", "magpie", "marten", "mole", "otter", "panda", "parrot", "pelican",
    "pigeon", "rabbit", "raven", "salmon", "tiger", "turtle", "walrus", "zebra",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NeedleSettings:
    """A needle-in-a-haystack probe."""

    lengths: tuple[int, ...]
    """Tokens of a haystack, its needles and questions included."""
    num_depths: int = 5
    """The haystack is cut into so many parts of equal length, and one question is about each."""
    num_candidates: int = 4
    """Needles in each part. Their codes are what the model chooses from, so the chance level is one in so many."""
    num_haystacks: int = 4
    """Of each length. Each takes two passes: with its needles, and without."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("num_depths", 1, 100), ("num_candidates", 2, 9), ("num_haystacks", 1, 10_000)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between {least} and {most}")
        if not self.lengths:
            raise ValueError("a needle probe needs the length of a haystack, as in lengths=(4096,)")
        if self.num_depths * self.num_candidates > len(ADJECTIVES) * len(NOUNS):
            most = len(ADJECTIVES) * len(NOUNS)
            raise ValueError(f"{self.num_depths} depths x {self.num_candidates} candidates need more than {most} names")

    @property
    def num_passes(self) -> int:
        return 2 * self.num_haystacks * len(self.lengths)


@dataclass(frozen=True)
class Question:
    depth: int
    start: int
    """Position of the answer's first token, the same with needles and without."""
    answer: tuple[int, ...]
    differ_at: int
    """The token of the answer in which all candidates differ; those before it are the same."""
    candidates: tuple[int, ...]
    """That token of each candidate, the right one first."""


@dataclass(frozen=True)
class Haystack:
    length: int
    ids_T: Tensor
    control_T: Tensor
    """The same text and questions without needles; there is more of the text instead."""
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Answer:
    """How one question was answered."""

    length: int
    depth: int
    is_right: float
    """1 where the right code is the likeliest of the candidates; a part of it where several are equally likely."""
    share: float
    """Probability of the right code among the candidates: their own, divided by the sum."""
    is_exact: bool
    """Whether greedy decoding would have written the code: each token of it is the likeliest of the vocabulary."""
    gain: float
    """Log-probability of the code with the needle in the text, less that without, in nats."""
    control_is_right: float


@dataclass(frozen=True, kw_only=True)
class NeedleScores:
    """What `needle_scores` returns."""

    settings: NeedleSettings
    answers: tuple[Answer, ...]

    @property
    def accuracy(self) -> float:
        return _mean([answer.is_right for answer in self.answers])

    @property
    def chance(self) -> float:
        return 1 / self.settings.num_candidates

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: overall, by length, and by length and depth."""
        settings = self.settings
        by_length = [
            {"length": length, **_score([a for a in self.answers if a.length == length])} for length in settings.lengths
        ]
        cells = [
            {"length": length, "depth": (depth + 0.5) / settings.num_depths, **_score(answers)}
            for length in settings.lengths
            for depth in range(settings.num_depths)
            if (answers := [a for a in self.answers if (a.length, a.depth) == (length, depth)])
        ]
        whole = {"chance": self.chance, **_score(list(self.answers)), "interval": self._interval()}
        return {**whole, "settings": asdict(settings), "lengths": by_length, "cells": cells}

    def _interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy; unlike a standard error it is honest at 0 and 1."""
        n, p, z = len(self.answers), self.accuracy, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)


def _score(answers: list[Answer]) -> dict[str, Any]:
    return {
        "count": len(answers),
        "accuracy": _mean([answer.is_right for answer in answers]),
        "share": _mean([answer.share for answer in answers]),
        "exact": _mean([float(answer.is_exact) for answer in answers]),
        "control_accuracy": _mean([answer.control_is_right for answer in answers]),
        "gain": _mean([answer.gain for answer in answers]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def build_haystacks(
    text_ids: Tensor, tokenizer: PreTrainedTokenizerBase | None, settings: NeedleSettings
) -> list[Haystack]:
    """Haystacks cut from `text_ids`, one long run of tokens; without a tokenizer a token is a byte. Everything that can
    be wrong with lengths and text is raised here, before the first pass. The same seed gives the same haystacks."""
    text_T = torch.as_tensor(text_ids).flatten().to("cpu", torch.int64)
    writer = _Writer(tokenizer)
    haystacks = []
    for length in settings.lengths:
        if length > len(text_T):
            raise ValueError(
                f"a haystack of {length:,} tokens needs as much text and there are {len(text_T):,} tokens: give more "
                "text, or lower the needle lengths"
            )
        for index in range(settings.num_haystacks):
            offset = (len(text_T) - length) * index // max(1, settings.num_haystacks - 1)
            chance = random.Random(f"{settings.seed} {length} {index}")
            haystacks.append(_haystack(text_T[offset : offset + length], writer, settings, chance))
    return haystacks


def _haystack(text_T: Tensor, writer: _Writer, settings: NeedleSettings, chance: random.Random) -> Haystack:
    length = len(text_T)
    num_needles = settings.num_depths * settings.num_candidates
    names = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    leads = [tuple(writer.ids(LEAD.format(name))) for name in chance.sample(names, num_needles)]
    tail = tuple(writer.ids(TAIL))
    used: set[int] = set()
    # Of each part, the first needle is the one that is asked for; the others are decoys.
    groups = [writer.values(settings.num_candidates, used, chance) for _ in range(settings.num_depths)]
    needles = [
        [(*leads[depth * settings.num_candidates + i], *value, *tail) for i, value in enumerate(values)]
        for depth, values in enumerate(groups)
    ]
    asked = chance.sample(range(settings.num_depths), settings.num_depths)
    suffix_size = sum(len(needles[depth][0]) for depth in asked)
    needle_size = sum(len(needle) for group in needles for needle in group)
    if 2 * (needle_size + suffix_size) > length:
        raise ValueError(
            f"a haystack of {length:,} tokens is too short: {num_needles} needles and {len(asked)} questions take "
            f"{needle_size + suffix_size:,} of them, and half should be text. Use {2 * (needle_size + suffix_size):,} "
            "tokens or more, fewer depths or fewer candidates"
        )
    body = length - suffix_size
    kept = body - needle_size
    places: list[tuple[int, int, tuple[int, ...]]] = []
    for depth, group in enumerate(needles):
        start, end = (kept * d // settings.num_depths for d in (depth, depth + 1))
        for needle in group:
            place = writer.line_end(text_T, chance.randrange(start, end), end)
            # Those that meet at the end of one line lie in an order of chance: no order may tell which one is asked.
            places.append((place, chance.randrange(1 << 30), needle))
    text, pieces, done = text_T.tolist(), [], 0
    for place, _, needle in sorted(places):
        pieces += [*text[done:place], *needle]
        done = place
    suffix: list[int] = []
    questions = []
    for depth in asked:
        values, lead = groups[depth], leads[depth * settings.num_candidates]
        at = next(i for i, tokens in enumerate(zip(*values)) if len(set(tokens)) > 1)
        candidates = tuple(value[at] for value in values)
        questions.append(Question(depth, body + len(suffix) + len(lead), values[0], at, candidates))
        suffix += needles[depth][0]
    ids_T = torch.tensor(pieces + text[done:kept] + suffix)
    return Haystack(length, ids_T, torch.tensor(text[:body] + suffix), tuple(questions))


class _Writer:
    """Needles as tokens. Their parts are tokenised one by one, so that they are the same tokens in the question."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.ends_line = cache(self._ends_line)

    def ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def values(self, number: int, used: set[int], chance: random.Random) -> list[tuple[int, ...]]:
        """Codes of equally many tokens, all different in the first token that is not common to all."""
        for _ in range(1000):
            codes = [10_000 * first + chance.randrange(10_000) for first in chance.sample(range(1, 10), number)]
            values = [tuple(self.ids(VALUE.format(code))) for code in codes]
            if used.isdisjoint(codes) and len({len(value) for value in values}) == 1:
                differing = [len(set(tokens)) for tokens in zip(*values) if len(set(tokens)) > 1]
                if differing and differing[0] == number:
                    used.update(codes)
                    return values
        raise ValueError(
            f"the tokenizer does not tell {number} numbers apart, as a needle probe needs: is it the model's own?"
        )

    def line_end(self, text_T: Tensor, place: int, end: int) -> int:
        for at in range(place, min(end, place + LINE_SEARCH)):
            if self.ends_line(int(text_T[at])):
                return at + 1
        return place

    def _ends_line(self, token: int) -> bool:
        if self.tokenizer is None:
            return token == ord("\n")
        return str(self.tokenizer.decode([token])).endswith("\n")


def needle_scores(engine: Engine, haystacks: Sequence[Haystack], settings: NeedleSettings) -> NeedleScores:
    """Two passes over each haystack: with its needles, and without."""
    answers: list[Answer] = []
    for haystack in haystacks:
        found = _ask(engine, haystack.ids_T, haystack.questions)
        blind = _ask(engine, haystack.control_T, haystack.questions)
        for question, seen, unseen in zip(haystack.questions, found, blind):
            gain = seen.logp - unseen.logp
            answers.append(
                Answer(haystack.length, question.depth, seen.is_right, seen.share, seen.is_exact, gain, unseen.is_right)
            )
    return NeedleScores(settings=settings, answers=tuple(answers))


class _Read(NamedTuple):
    """What one pass makes of one question."""

    is_right: float
    share: float
    is_exact: bool
    logp: float


def _ask(engine: Engine, ids_T: Tensor, questions: Sequence[Question]) -> list[_Read]:
    # What predicts token t is the row before it.
    rows = [question.start + i - 1 for question in questions for i in range(len(question.answer))]
    with eval_mode(engine), noting(engine, rows) as notes:
        engine.logprobs(ids_T[None])
    results = []
    for question in questions:
        logp = [notes[question.start + i - 1] for i in range(len(question.answer))]
        scores = logp[question.differ_at][list(question.candidates)]
        best = scores == scores.max()
        right = float(best[0]) / max(1, int(best.sum()))
        share = float(scores.softmax(0)[0])
        exact = all(int(row.argmax()) == token for row, token in zip(logp, question.answer))
        results.append(_Read(right, share, exact, sum(float(row[token]) for row, token in zip(logp, question.answer))))
    return results
