"""Score needles in a haystack: sentences like "The code of amber falcon is 48213." hidden in real text.

    part 0 of the text        part 1                       ...  the questions
    ... [a] ... [A] . [b] ..  .. [c] ..... [d] .. [C] ...       [C with its code] [A with its code]

Questions about some of the codes follow the text, and one pass scores all of them. Each question is a choice between
the codes in its part of the text. Only one code per part is ever asked for, and the order within a part is random, so a
model that does not connect codes with names gets one in `num_candidates` right, whatever other habits it has: repeating
codes, preferring late ones, or avoiding those already answered. A second pass over the same text and questions without
needles is the control. T tokens, V vocabulary.
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

from oomb.engine.head import VocabRowsHead
from oomb.eval.samples import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oomb.engine.engine import Engine

LINE_SEARCH = 256
"""A needle moves to the next line end if there is one within this many tokens."""

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
    """Settings of a needle-in-a-haystack evaluation."""

    lengths: tuple[int, ...]
    """Tokens of a haystack, including its needles and questions."""
    num_depths: int = 5
    """Number of equal parts of the text, with one question about each."""
    num_candidates: int = 4
    """Needles in each part. The model chooses between their codes, so chance level is 1 / num_candidates."""
    num_haystacks: int = 4
    """Haystacks of each length. Each takes two passes: with needles and without."""
    seed: int = 0
    """Seed for names, codes and positions."""

    def __post_init__(self) -> None:
        for name, low, high in (("num_depths", 1, 100), ("num_candidates", 2, 9), ("num_haystacks", 1, 10_000)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between {low} and {high}")
        if not self.lengths:
            raise ValueError("lengths is empty: pass at least one haystack length, for example lengths=(4096,)")

    @property
    def num_passes(self) -> int:
        return 2 * self.num_haystacks * len(self.lengths)


@dataclass(frozen=True)
class Question:
    """A question about one needle."""

    depth: int
    start: int
    """Position of the answer's first token, the same with and without needles."""
    answer: tuple[int, ...]
    differ_at: int
    """Index of the first token in which the candidates differ; they all differ there."""
    candidates: tuple[int, ...]
    """That token of each candidate, the right one first."""


@dataclass(frozen=True)
class Haystack:
    """A text with needles and the questions about them."""

    length: int
    ids_T: Tensor
    control_T: Tensor
    """The control: the same questions after more of the same text, without needles."""
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question."""

    length: int
    depth: int
    is_right: float
    """1 if the right code is the most likely candidate, 1/n if n candidates tie for it."""
    share: float
    """Probability of the right code, normalized over the candidates."""
    is_exact: bool
    """Greedy decoding would write the code: each of its tokens is the most likely of the whole vocabulary."""
    gain: float
    """Log-probability of the code with needles minus that without, in nats."""
    control_is_right: float
    """`is_right` for the control, where the text has no needles."""


@dataclass(frozen=True, kw_only=True)
class NeedleScores:
    """Answers to all questions."""

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
        """Return Wilson's 95% interval of the accuracy, which unlike a standard error is meaningful at 0 and 1."""
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
    """Build haystacks of all lengths, and check that lengths, text and tokenizer suit them.

    The same seed gives the same haystacks.

    Args:
        text_ids: Tokens of real text, at least as many as the longest haystack has.
        tokenizer: The model's tokenizer; None for models that read bytes.
        settings: Lengths and number of haystacks, depths and candidates.

    Examples:
        >>> text_ids = torch.tensor(list(b"the quick brown fox jumps over the lazy dog" * 30))
        >>> settings = NeedleSettings(lengths=(1024,), num_depths=2, num_haystacks=1)
        >>> [haystack] = build_haystacks(text_ids, None, settings)
        >>> len(haystack.ids_T), len(haystack.questions)
        (1024, 2)
    """
    text_T = torch.as_tensor(text_ids).flatten().to("cpu", torch.int64)
    writer = _Writer(tokenizer)
    haystacks = []
    for length in settings.lengths:
        if length > len(text_T):
            raise ValueError(
                f"the text has {len(text_T):,} tokens, too few for a haystack of {length:,}: use more text or a lower "
                "needle length"
            )
        for index in range(settings.num_haystacks):
            offset = (len(text_T) - length) * index // max(1, settings.num_haystacks - 1)
            rng = random.Random(f"{settings.seed} {length} {index}")
            haystacks.append(_haystack(text_T[offset : offset + length], writer, settings, rng))
    return haystacks


def _haystack(text_T: Tensor, writer: _Writer, settings: NeedleSettings, rng: random.Random) -> Haystack:
    length = len(text_T)
    num_needles = settings.num_depths * settings.num_candidates
    names = [f"{a} {n}" for a in ADJECTIVES for n in NOUNS]
    leads = [tuple(writer.ids(LEAD.format(name))) for name in rng.sample(names, num_needles)]
    tail = tuple(writer.ids(TAIL))
    used: set[int] = set()
    # The first needle of each part is asked for; the others are decoys.
    groups = [writer.values(settings.num_candidates, used, rng) for _ in range(settings.num_depths)]
    needles = [
        [(*leads[depth * settings.num_candidates + i], *value, *tail) for i, value in enumerate(values)]
        for depth, values in enumerate(groups)
    ]
    question_order = rng.sample(range(settings.num_depths), settings.num_depths)
    suffix_size = sum(len(needles[depth][0]) for depth in question_order)
    needle_size = sum(len(needle) for group in needles for needle in group)
    if 2 * (needle_size + suffix_size) > length:
        raise ValueError(
            f"a haystack of {length:,} tokens is too short: {num_needles} needles and {settings.num_depths} questions "
            f"take {needle_size + suffix_size:,} tokens, which must be at most half. Use "
            f"{2 * (needle_size + suffix_size):,} tokens or more, fewer depths or fewer candidates"
        )
    body = length - suffix_size
    kept = body - needle_size
    places: list[tuple[int, int, tuple[int, ...]]] = []
    for depth, group in enumerate(needles):
        start, end = (kept * d // settings.num_depths for d in (depth, depth + 1))
        for needle in group:
            place = writer.line_end(text_T, rng.randrange(start, end), end)
            # Shuffle needles that share a line end: their order must not reveal which one is asked for.
            places.append((place, rng.randrange(1 << 30), needle))
    text, pieces, done = text_T.tolist(), [], 0
    for place, _, needle in sorted(places):
        pieces += [*text[done:place], *needle]
        done = place
    suffix: list[int] = []
    questions = []
    for depth in question_order:
        values, lead = groups[depth], leads[depth * settings.num_candidates]
        at = next(i for i, tokens in enumerate(zip(*values)) if len(set(tokens)) > 1)
        candidates = tuple(value[at] for value in values)
        questions.append(Question(depth, body + len(suffix) + len(lead), values[0], at, candidates))
        suffix += needles[depth][0]
    ids_T = torch.tensor(pieces + text[done:kept] + suffix)
    return Haystack(length, ids_T, torch.tensor(text[:body] + suffix), tuple(questions))


class _Writer:
    """Needles as tokens. Their parts are tokenized separately, so a question has the same tokens as its needle."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.ends_line = cache(self._ends_line)

    def ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def values(self, number: int, used: set[int], rng: random.Random) -> list[tuple[int, ...]]:
        """Return unused codes of equal token length that all differ in the first token that is not common to all."""
        for _ in range(1000):
            codes = [10_000 * first + rng.randrange(10_000) for first in rng.sample(range(1, 10), number)]
            values = [tuple(self.ids(VALUE.format(code))) for code in codes]
            if used.isdisjoint(codes) and len({len(value) for value in values}) == 1:
                differing = [len(set(tokens)) for tokens in zip(*values) if len(set(tokens)) > 1]
                if differing and differing[0] == number:
                    used.update(codes)
                    return values
        raise ValueError(
            f"the tokenizer cannot distinguish {number} five-digit numbers, which needles need: check that it is the "
            "model's own"
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
    """Score all questions, in two passes over each haystack: with needles and without.

    Args:
        engine: The engine to evaluate.
        haystacks: What `build_haystacks` returned.
        settings: The settings the haystacks were built with.
    """
    answers: list[Answer] = []
    for haystack in haystacks:
        scores = _ask(engine, haystack.ids_T, haystack.questions)
        controls = _ask(engine, haystack.control_T, haystack.questions)
        for question, score, control in zip(haystack.questions, scores, controls):
            answers.append(
                Answer(
                    length=haystack.length,
                    depth=question.depth,
                    is_right=score.is_right,
                    share=score.share,
                    is_exact=score.is_exact,
                    gain=score.logp - control.logp,
                    control_is_right=control.is_right,
                )
            )
    return NeedleScores(settings=settings, answers=tuple(answers))


class _Score(NamedTuple):
    """Scores of one question in one pass."""

    is_right: float
    share: float
    is_exact: bool
    logp: float


def _ask(engine: Engine, ids_T: Tensor, questions: Sequence[Question]) -> list[_Score]:
    # Row t - 1 predicts token t.
    rows = [question.start + i - 1 for question in questions for i in range(len(question.answer))]
    head = VocabRowsHead(engine.model, rows)
    with eval_mode(engine):
        engine.forward(engine.pack(ids_T[None]), head)
    results = []
    for question in questions:
        logp = [head.logprobs_V[question.start + i - 1] for i in range(len(question.answer))]
        scores = logp[question.differ_at][list(question.candidates)]
        best = scores == scores.max()
        right = float(best[0]) / max(1, int(best.sum()))
        share = float(scores.softmax(0)[0])
        exact = all(int(row.argmax()) == token for row, token in zip(logp, question.answer))
        results.append(_Score(right, share, exact, sum(float(row[token]) for row, token in zip(logp, question.answer))))
    return results
