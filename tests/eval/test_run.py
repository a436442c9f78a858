"""`oomb eval` as a whole, samples, and the tokenizer of a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import invoke
from torch import Tensor

from oomb.config import Config
from oomb.data.dataset import load
from oomb.engine.engine import Engine
from oomb.eval.perplexity import perplexity_by_position
from oomb.eval.run import tokenizer_for
from oomb.eval.samples import sample_text
from oomb.models import load as load_module


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


@pytest.mark.slow
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
