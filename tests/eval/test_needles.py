"""Needles in a haystack, with models that find them or cannot."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
import torch
from readers import Reader, blind, finder
from rich.console import Console
from torch import Tensor

from oomb.cli.eval.tables import needle_table
from oomb.engine.engine import Engine
from oomb.eval.needles import LEAD, NeedleSettings, build_haystacks, needle_scores
from oomb.eval.samples import decode

SETTINGS = NeedleSettings(lengths=(2048,), num_depths=3, num_candidates=4, num_haystacks=2)


def test_a_model_that_looks_back_finds_every_needle(text: Tensor) -> None:
    reader: Any = Reader(finder)
    found = needle_scores(reader, build_haystacks(text, None, SETTINGS), SETTINGS).as_dict()
    assert found["accuracy"] == found["exact"] == 1.0
    assert found["gain"] > 10
    assert found["share"] > 0.999
    # Without needles all candidates are equally likely, and a tie counts 1/n.
    assert found["control_accuracy"] == found["chance"] == 0.25
    assert found["count"] == 2 * 3
    assert [(cell["length"], cell["depth"], cell["count"]) for cell in found["cells"]] == [
        (2048, pytest.approx(depth), 2) for depth in (1 / 6, 1 / 2, 5 / 6)
    ]
    low, high = found["interval"]
    assert 0.5 < low < 1.0 == pytest.approx(high)


def test_the_needle_table_fits_80_columns(text: Tensor) -> None:
    reader: Any = Reader(finder)
    settings = NeedleSettings(lengths=(4096,), num_haystacks=1)
    found = needle_scores(reader, build_haystacks(text, None, settings), settings).as_dict()
    found["lengths"][0] |= {"length": 131072, "gain": -11.25}
    for cell in found["cells"]:
        cell["length"] = 131072
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(needle_table(found))
    shown = console.export_text()
    assert "…" not in shown
    [row] = [line for line in shown.splitlines() if "131,072" in line]
    assert re.findall(r"[-+.,\d]+%?", row) == ["131,072", *["100%"] * 8, "-11.25"]


def test_a_model_that_ignores_names_is_at_chance_level(text: Tensor) -> None:
    """It prefers late codes, so an order that is not random would show."""
    settings = NeedleSettings(lengths=(1024,), num_depths=3, num_candidates=3, num_haystacks=150)
    reader: Any = Reader(blind)
    found = needle_scores(reader, build_haystacks(text, None, settings), settings)
    error = math.sqrt(found.chance * (1 - found.chance) / len(found.answers))
    assert abs(found.accuracy - found.chance) < 3 * error
    shares = torch.tensor([answer.share for answer in found.answers])
    assert float(abs(shares.mean() - found.chance)) < 3 * float(shares.std()) / math.sqrt(len(shares))
    low, high = found.as_dict()["interval"]
    assert low < found.chance < high


def test_haystacks_have_their_needles_and_questions(text: Tensor) -> None:
    settings = NeedleSettings(lengths=(2048, 3000), num_depths=4, num_candidates=3, num_haystacks=3, seed=5)
    haystacks = build_haystacks(text, None, settings)
    assert [haystack.length for haystack in haystacks] == [2048] * 3 + [3000] * 3
    for haystack in haystacks:
        assert len(haystack.ids_T) == len(haystack.control_T) == haystack.length
        written, control = decode(haystack.ids_T, None), decode(haystack.control_T, None)
        lead = LEAD.split("{")[0]
        assert written.count(lead) == 4 * 3 + 4
        assert control.count(lead) == 4
        assert sorted(question.depth for question in haystack.questions) == [0, 1, 2, 3]
        codes = set()
        for question in haystack.questions:
            end = question.start + len(question.answer)
            answer = decode(torch.tensor(question.answer), None)
            assert tuple(haystack.ids_T[question.start : end].tolist()) == question.answer
            assert tuple(haystack.control_T[question.start : end].tolist()) == question.answer
            # Once in its part of the text, and once in the question.
            assert written.count(answer) == 2
            share = written.index(answer) / (question.start - 1)
            assert question.depth / 4 - 0.1 < share < (question.depth + 1) / 4 + 0.1
            assert len(set(question.candidates)) == 3
            assert question.candidates[0] == question.answer[question.differ_at]
            codes.add(answer)
            # Needles are between lines.
            at = written.index(answer)
            assert written[: written.rindex("\nThe code", 0, at)].endswith(("dog\n", ".\n"))
        assert len(codes) == 4
    again = build_haystacks(text, None, settings)
    assert all(torch.equal(a.ids_T, b.ids_T) for a, b in zip(haystacks, again))
    other = build_haystacks(text, None, NeedleSettings(lengths=(2048,), num_depths=4, num_candidates=3, seed=6))
    assert not torch.equal(haystacks[0].ids_T, other[0].ids_T)


def test_needle_scores_match_the_models_own_forward(engine: Engine, text: Tensor) -> None:
    """Compare the engine, in chunks, with the model's own forward over the whole haystack."""
    [haystack, _] = build_haystacks(text, None, SETTINGS)
    answers = needle_scores(engine, [haystack], SETTINGS).answers
    for ids_T, name in ((haystack.ids_T, "found"), (haystack.control_T, "control")):
        with torch.no_grad():
            logp = engine.model.lm(ids_T[None]).logits[0].log_softmax(-1)
        for question, answer in zip(haystack.questions, answers):
            row = logp[question.start + question.differ_at - 1]
            best = max(range(4), key=lambda i: float(row[question.candidates[i]]))
            likely = [float(row[token].exp()) for token in question.candidates]
            if name == "found":
                assert answer.share == pytest.approx(likely[0] / sum(likely), rel=1e-4)
            assert (best == 0) == (answer.is_right if name == "found" else answer.control_is_right)
    for question, answer in zip(haystack.questions, answers):
        both = []
        for ids_T in (haystack.ids_T, haystack.control_T):
            logp = engine.model.lm(ids_T[None]).logits[0].log_softmax(-1).detach()
            both.append(sum(float(logp[question.start + i - 1, token]) for i, token in enumerate(question.answer)))
        assert answer.gain == pytest.approx(both[0] - both[1], abs=1e-3)


def test_needles_with_a_tokenizer(text: Tensor) -> None:
    """Numbers of three digits are one token, so codes of a group share their first token or not."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(i): i for i in range(32, 127)} | {"\n": 127}
    words |= {f"{i:03d}": 1000 + i for i in range(1000)} | {f"{i:02d}": 2000 + i for i in range(100)} | {"?": 1}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}|[^\d]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    ids = torch.tensor(tokenizer(decode(text, None))["input_ids"])
    for haystack in build_haystacks(ids, tokenizer, SETTINGS):
        for question in haystack.questions:
            assert (len(question.answer), question.differ_at) == (3, 1)
            assert all(1000 <= token < 2000 for token in question.candidates)
        assert tokenizer.decode(haystack.ids_T.tolist()).replace(" ", "").count("Thecodeof") == 3 * 4 + 3


def test_bad_needles_are_refused(text: Tensor) -> None:
    with pytest.raises(ValueError, match="8,800 tokens, too few"):
        build_haystacks(text, None, NeedleSettings(lengths=(9000,)))
    with pytest.raises(ValueError, match=r"too short: .* Use 1,\d\d\d tokens"):
        build_haystacks(text, None, NeedleSettings(lengths=(500,), num_depths=3))
    for wrong in ({"num_depths": 0}, {"num_candidates": 1}, {"num_candidates": 10}, {"num_haystacks": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            NeedleSettings(lengths=(4096,), **wrong)
    with pytest.raises(ValueError, match="lengths is empty"):
        NeedleSettings(lengths=())

    class Same:
        """A tokenizer that maps every number to the same token."""

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1]}

        def decode(self, ids: list[int]) -> str:
            return ""

    blunt: Any = Same()
    with pytest.raises(ValueError, match="cannot distinguish 4"):
        build_haystacks(text, blunt, SETTINGS)
