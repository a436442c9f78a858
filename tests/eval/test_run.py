"""Evaluation: loss by position, needles with known models, samples, and the whole `oomb eval`."""

from __future__ import annotations

import io
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from command import invoke
from rich.console import Console
from torch import Tensor

from oomb.cli.eval.tables import needle_table
from oomb.config import Config
from oomb.data.dataset import load
from oomb.engine.engine import Engine
from oomb.engine.head import TokenHead
from oomb.eval.needles import LEAD, NeedleSettings, build_haystacks, needle_scores
from oomb.eval.perplexity import perplexity_by_position
from oomb.eval.run import tokenizer_for
from oomb.eval.samples import decode, sample_text
from oomb.models import load as load_module
from oomb.models import presets

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
PROBE = NeedleSettings(lengths=(2048,), num_depths=3, num_candidates=4, num_haystacks=2)


@pytest.fixture
def engine() -> Engine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(presets.preset_config("demo", **SMALL), dtype=torch.float32)
    return Engine(model, Config(chunk_size=100, page_size=20))


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Lines of text as bytes."""
    return torch.tensor(list(b"the quick brown fox jumps over the lazy dog\n" * 200))


class Reader:
    """What the evaluation needs of an engine, with a rule in place of a model: `rule(ids)` are the logits [T, V] that
    predict the next token at each position."""

    class Model:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.lm = torch.nn.Identity()

        vocab_size = 264

        def logits(self, hidden_ND: Tensor) -> Tensor:
            return hidden_ND

    def __init__(self, rule: Any) -> None:
        self.rule, self.model = rule, self.Model()

    def pack(self, input_ids: Tensor) -> Tensor:
        return input_ids

    def forward(self, input_ids: Tensor, head: Any) -> dict[str, list[Tensor]]:
        """Hand the head logits instead of hidden states, in two chunks."""
        logits = self.rule(input_ids[0].tolist())[None]
        targets = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
        middle = input_ids.shape[1] // 3
        chunks = [
            head.forward(logits[:, a:b], targets[:, a:b], fused=False)[0] for a, b in ((0, middle), (middle, None))
        ]
        return {"logprob": [torch.cat(chunks, 1)]}

    def logprobs(self, input_ids: Tensor) -> Tensor:
        [logp] = self.forward(input_ids, TokenHead(self.model))["logprob"]
        return logp


def finder(ids: list[int]) -> Tensor:
    """Return logits that repeat what followed the last 16 tokens earlier in the text."""
    logits = torch.zeros(len(ids), 264)
    seen: dict[tuple[int, ...], int] = {}
    for at in range(16, len(ids) - 1):
        before = tuple(ids[at - 15 : at + 1])
        if before in seen:
            logits[at, seen[before]] = 20.0
        seen[before] = ids[at + 1]
    return logits


def blind(ids: list[int]) -> Tensor:
    """Return logits that prefer the latest codes and ignore names."""
    logits = torch.zeros(len(ids), 264)
    for at, (before, token) in enumerate(pairwise(ids), start=1):
        if before == ord(" ") and ord("0") <= token <= ord("9"):
            logits[at:, token] = 0.01 * at
    return logits


def test_losses_by_position_match_the_models_own_forward(engine: Engine) -> None:
    windows = [torch.randint(256, (length,)) for length in (700, 450)]
    found = perplexity_by_position(engine, windows, first_bucket=128)
    by_position: dict[int, list[float]] = {}
    for ids in windows:
        with torch.no_grad():
            logits = engine.model.lm(ids[None]).logits[0].double()
        losses = -logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        for position, loss in enumerate(losses.tolist(), start=1):
            by_position.setdefault(position, []).append(loss)
    assert [(bucket.start, bucket.end) for bucket in found.buckets] == [(0, 128), (128, 256), (256, 512), (512, 700)]
    for bucket in found.buckets:
        expected = [loss for at in range(bucket.start, bucket.end) for loss in by_position.get(at, [])]
        assert bucket.count == len(expected)
        assert bucket.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.count == 699 + 449
    everything = [loss for losses in by_position.values() for loss in losses]
    assert found.loss == pytest.approx(sum(everything) / len(everything), rel=1e-5)
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["buckets"][2]["perplexity"] == pytest.approx(math.exp(found.buckets[2].loss))


def test_ignored_labels_do_not_count(engine: Engine) -> None:
    ids = torch.randint(256, (300,))
    labels = ids.clone()
    labels[: 2 * 64] = -100
    found = perplexity_by_position(engine, [{"input_ids": ids, "labels": labels}], first_bucket=64)
    assert [(bucket.start, bucket.count) for bucket in found.buckets] == [(128, 128), (256, 44)]
    whole = perplexity_by_position(engine, [ids], first_bucket=64)
    assert found.buckets == whole.buckets[2:]
    with pytest.raises(ValueError, match="no token counts"):
        perplexity_by_position(engine, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
    with pytest.raises(ValueError, match="no examples"):
        perplexity_by_position(engine, [])


def test_the_standard_error_matches_repeated_texts() -> None:
    """Runs of tokens are easy or hard together, so an error over tokens would be several times too small."""
    generator = torch.Generator().manual_seed(0)

    def rule(ids: list[int]) -> Tensor:
        # Each run of 256 tokens has its own level.
        level = torch.randn(math.ceil(len(ids) / 256) + 1, generator=generator).repeat_interleave(256)[1 : len(ids) + 1]
        logits = torch.zeros(len(ids), 264)
        logits[:, 0] = level
        return logits

    reader: Any = Reader(rule)
    zeros = torch.zeros(2049, dtype=torch.int64)
    found = [perplexity_by_position(reader, [zeros]).buckets[1] for _ in range(200)]
    losses = torch.tensor([bucket.loss for bucket in found])
    claimed = torch.tensor([bucket.standard_error for bucket in found]).square().mean().sqrt()
    assert float(claimed) == pytest.approx(float(losses.std()), rel=0.2)


def test_a_model_that_looks_back_finds_every_needle(text: Tensor) -> None:
    reader: Any = Reader(finder)
    found = needle_scores(reader, build_haystacks(text, None, PROBE), PROBE).as_dict()
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
    probe = NeedleSettings(lengths=(4096,), num_haystacks=1)
    found = needle_scores(reader, build_haystacks(text, None, probe), probe).as_dict()
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
    probe = NeedleSettings(lengths=(1024,), num_depths=3, num_candidates=3, num_haystacks=150)
    reader: Any = Reader(blind)
    found = needle_scores(reader, build_haystacks(text, None, probe), probe)
    error = math.sqrt(found.chance * (1 - found.chance) / len(found.answers))
    assert abs(found.accuracy - found.chance) < 3 * error
    shares = torch.tensor([answer.share for answer in found.answers])
    assert float(abs(shares.mean() - found.chance)) < 3 * float(shares.std()) / math.sqrt(len(shares))
    low, high = found.as_dict()["interval"]
    assert low < found.chance < high


def test_haystacks_have_their_needles_and_questions(text: Tensor) -> None:
    probe = NeedleSettings(lengths=(2048, 3000), num_depths=4, num_candidates=3, num_haystacks=3, seed=5)
    haystacks = build_haystacks(text, None, probe)
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
    again = build_haystacks(text, None, probe)
    assert all(torch.equal(a.ids_T, b.ids_T) for a, b in zip(haystacks, again))
    other = build_haystacks(text, None, NeedleSettings(lengths=(2048,), num_depths=4, num_candidates=3, seed=6))
    assert not torch.equal(haystacks[0].ids_T, other[0].ids_T)


def test_needle_scores_match_the_models_own_forward(engine: Engine, text: Tensor) -> None:
    """Compare the engine, in chunks, with the model's own forward over the whole haystack."""
    [haystack, _] = build_haystacks(text, None, PROBE)
    answers = needle_scores(engine, [haystack], PROBE).answers
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


def test_evaluation_has_no_dropout_and_leaves_the_model_unchanged(engine: Engine) -> None:
    module = engine.model.lm
    module.model.embed_tokens.register_forward_hook(lambda m, i, out: torch.nn.functional.dropout(out, 0.5, m.training))
    module.train()
    ids = torch.randint(256, (64,))
    first, second = (perplexity_by_position(engine, [ids]).loss for _ in range(2))
    assert first == second
    assert module.training
    assert all(p.grad is None for p in module.parameters())


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
    for haystack in build_haystacks(ids, tokenizer, PROBE):
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
        build_haystacks(text, blunt, PROBE)


def test_a_sample_is_repeatable_and_restores_the_random_state(engine: Engine, text: Tensor) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (sample_text(engine, text[:20], None, num_tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first == second != other
    assert first["prompt"] == "the quick brown fox "
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_tokenizer_that_is_too_large_is_refused(saved_model: Path) -> None:
    config = load_module.load_config(str(saved_model))
    assert tokenizer_for(str(saved_model), config) is None
    config.vocab_size = 200
    with pytest.raises(ValueError, match="vocabulary of 200 and bytes need 258 ids"):
        tokenizer_for("demo", config)


def test_oomb_eval(tmp_path: Path, saved_model: Path) -> None:
    output = tmp_path / "deep" / "eval.json"
    options = ["--max_length", "1500", "--chunk_size", "512", "--device", "cpu", "--max_eval_samples", "2"]
    probe = ["--needle_lengths", "1K,2K", "--needle_depths", "2", "--needle_candidates", "3", "--needle_haystacks", "1"]
    result = invoke("eval", saved_model, *options, *probe, "--sample_tokens", "5", "--output", output)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert found["perplexity"]["num_windows"] == 2
    assert [bucket["count"] for bucket in found["perplexity"]["buckets"]] == [2 * 1023, 2 * 476]
    assert [row["length"] for row in found["needle"]["lengths"]] == [1024, 2048]
    assert found["needle"]["count"] == 4
    assert found["sample"]["prompt"] and found["machine"]["cpu"]
    assert f"{found['perplexity']['loss']:.4f}" in result.output
    assert "needles found" in result.output and "chance 33%" in result.output
    # The examples are those that training would hold out.
    held_out = load("stdlib", max_length=1500, num_train=1, num_held_out=2).held_out
    assert held_out is not None and len(held_out) >= 1
    model = load_module.load_model(str(saved_model), device="cpu", dtype="float32")
    own = perplexity_by_position(Engine(model, Config(chunk_size=512)), [held_out[i]["input_ids"] for i in range(2)])
    assert found["perplexity"]["loss"] == pytest.approx(own.loss, rel=1e-6)


def test_train_and_eval_read_records_in_the_same_order(tmp_path: Path, saved_model: Path) -> None:
    """Otherwise `oomb eval` would evaluate on lines that `oomb train` trained on."""
    lines = [json.dumps({"text": f"{index} " * 200}) for index in range(40)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    given = ["--dataset", str(tmp_path / "lines.jsonl"), "--max_length", "256", "--device", "cpu"]
    run = ["--max_steps", "1", "--sample_tokens", "0", "--no_report", "--output_dir", str(tmp_path / "out")]
    trained = invoke("train", "--model", str(saved_model), *given, *run)
    assert trained.exit_code == 0, trained.output
    events = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    before = next(event["loss"] for event in events if event["event"] == "held_out")
    tokens = ["--output", str(tmp_path / "tokens"), "--num_proc", "1"]
    assert invoke("tokenize", *given[:2], *tokens).exit_code == 0
    for dataset in ("lines.jsonl", "tokens"):
        output = tmp_path / f"{dataset}.json"
        found = invoke(
            "eval", str(saved_model), "--dataset", str(tmp_path / dataset), *given[2:], "--output", str(output)
        )
        assert found.exit_code == 0, found.output
        assert json.loads(output.read_text())["perplexity"]["loss"] == pytest.approx(before, rel=1e-5)


def test_the_documented_example_runs(engine: Engine, text: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    for large, small in (("lengths=(4096, 65536)", "lengths=(2048,)"),):
        assert large in example
        example = example.replace(large, small)
    exec(example, {"engine": engine, "examples": [text[:1500]], "text_ids": text, "tokenizer": None})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["0", "1024"], ["1024", "1500"]]
    assert lines[2].split()[1] == "0.25"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demmo"], "did you mean 'demo'"),
        (["demo", "--dataset", "nowhere"], "the dataset 'nowhere' does not exist"),
        (["demo", "--needle_lengths", "4X"], "--needle_lengths '4X' is not a number of tokens"),
        (["demo", "--needle_lengths", "512"], "too short"),
        (["demo", "--max_eval_samples", "0"], "--max_eval_samples is 0; it must be 1 or more"),
        (["demo", "--needle_lengths", "4K", "--needle_candidates", "1"], "needle_candidates is 1"),
        (["demo", "--output", "."], "--output . is a folder"),
    ],
)
def test_oomb_eval_refuses(arguments: list[str], message: str) -> None:
    result = invoke("eval", *arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
