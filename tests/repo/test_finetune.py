"""benchmarks/finetune.py at toy size: its model, command, results, screenshot and section of the documents."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import common
import finetune
import pytest
import smollm2
import torch
import update_tables
from browser import browse, find_browser, picture
from scripts import run_benchmark
from tokenizer import small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from oomb.models import presets
from oomb.utils.units import parse_tokens

LENGTH = 2048


def call(*words: str | Path) -> Any:
    return run_benchmark(finetune.main, *words)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 256 positions with its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "tiny", small_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        eos_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "code"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.py", "b.py", "deep/c.py"):
        (folder / name).write_text(Path(argparse.__file__).read_text())
    return folder


@pytest.fixture(scope="module")
def out(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the whole script."""
    folder = tmp_path_factory.mktemp("out") / "run"
    toy = ["--length", LENGTH, "--steps", 6, "--learning-rate", 0.01, "--chunk-size", 512, "--page-budget", 4]
    probe = ["--held-out", 1, "--needle-lengths", "2K", "--needle-haystacks", 1, "--device", "cpu"]
    done = call("--out", folder, "--model", tiny, "--dataset", text, *map(str, toy + probe))
    assert done.exit_code == 0, done.output
    assert "has fallen" in done.output and "needles found in 2,048 tokens" in done.output
    return folder


def test_a_model_with_extended_rope_loads_as_saved(tiny: Path, tmp_path: Path) -> None:
    name, facts = finetune.write_model(tiny, None, LENGTH, tmp_path)
    assert name == "tiny-2K" and facts["learned_positions"] == 256 and facts["rope"]["factor"] == 8.0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert again.config.max_position_embeddings == LENGTH and again.config.rope_parameters["rope_type"] == "yarn"
    stretched = AutoModelForCausalLM.from_pretrained(tiny)
    ids_T = torch.arange(300)[None] % 300
    plain = stretched(ids_T).logits
    smollm2.stretch_rope(stretched, LENGTH)
    assert torch.equal(again(ids_T).logits, stretched(ids_T).logits)
    assert not torch.allclose(again(ids_T).logits, plain)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
    assert tokenizer("def f(x): pass")["input_ids"] == small_tokenizer()("def f(x): pass")["input_ids"]
    # A model that reaches far enough stays unchanged.
    name, facts = finetune.write_model(tiny, None, 256, tmp_path)
    assert name == "tiny-unstretched" and facts["rope"] is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.max_position_embeddings == 256
    # With the name of a preset, training would start from random weights.
    assert not presets.is_preset(name)


def test_a_model_from_a_gguf_can_be_saved(tiny: Path, tmp_path: Path) -> None:
    """transformers marks it as quantized and refuses to save it."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "x.gguf"}
    smollm2.save(model, small_tokenizer(), tmp_path / "plain")
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in written and "quantization_config" in model.config.to_dict()
    ids_T = torch.arange(50)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")(ids_T).logits, model(ids_T).logits)


def test_the_library_is_copied_without_its_tables(tmp_path: Path) -> None:
    facts = finetune.write_text(tmp_path)
    copied = [path for path in (tmp_path / finetune.TEXT).rglob("*") if path.is_file()]
    assert len(copied) == facts["num_files"] > 300
    assert sum(path.stat().st_size for path in copied) == facts["num_bytes"] > 3e6
    assert (tmp_path / finetune.TEXT / "argparse.py").read_text() == Path(argparse.__file__).read_text()
    assert not (tmp_path / finetune.TEXT / "encodings").exists() and not list(tmp_path.rglob("__pycache__"))


@pytest.mark.timing
def test_the_results_match_the_metrics(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == [
        "finetune_smollm2.html", "finetune_smollm2.json", "finetune_smollm2.log", "finetune_smollm2_metrics.jsonl",
    ]  # fmt: skip
    record = json.loads((out / "finetune_smollm2.json").read_text())
    events = [json.loads(line) for line in (out / "finetune_smollm2_metrics.jsonl").read_text().splitlines()]
    assert events[0]["settings"]["dataset_join"] == "repository" and events[0]["engine"]["page_budget"] == 4
    losses = [event["loss"] for event in events if event["event"] == "held_out"]
    assert [record["held_out"]["before"], record["held_out"]["after"]] == losses and losses[1] < losses[0]
    evals = {event["when"]: event for event in events if event["event"] == "eval"}
    for when in ("before", "after"):
        assert record["needle"][when] == evals[when]["needle"] and evals[when]["needle"]["count"] == 5
        assert record["positions"][when] == evals[when]["perplexity"]["buckets"]
    assert len(record["losses"]) == len(record["step_seconds"]) == record["settings"]["steps"] == 6
    assert record["tokens"] == 6 * LENGTH and record["tokens_per_second"] > 0
    assert record["peak_bytes"]["process"] > record["peak_bytes"]["gpu_pages"] > 0
    assert 0 < record["seconds"]["steps"] < record["seconds"]["command"] < record["seconds"]["all"]
    assert record["machine"]["versions"]["torch"] == torch.__version__
    assert record["settings"]["command"].startswith("oomb train --model_name_or_path tiny-2K --dataset ")
    page = (out / "finetune_smollm2.html").read_text()
    assert len(page) < 1_000_000 and "tiny-2K on " in page and "Needles found after training" in page
    log = (out / "finetune_smollm2.log").read_text()
    assert "$ oomb train " in log and "$ oomb report " in log and "needles found after training: " in log


def test_the_documents_show_the_command_that_runs() -> None:
    document = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    [shown] = re.findall(r"^oomb train .*$", document, re.MULTILINE)
    defaults = {name: value.default for name, value in inspect.signature(finetune.main).parameters.items()}
    chosen = {name: defaults[name] for name in inspect.signature(finetune.arguments).parameters if name != "dataset"}
    chosen |= {"model": "SmolLM2-135M-128K", "length": parse_tokens(defaults["length"])}
    assert shown == "oomb " + shlex.join(finetune.arguments(dataset=finetune.TEXT, **chosen))
    dense = shlex.join(finetune.arguments(dataset="x", **chosen | {"page_budget": 0, "seed": 1, "device": "cpu"}))
    assert "page_budget" not in dense and "--seed 1 --device cpu" in dense


@pytest.mark.timing
def test_a_failing_command_is_an_error(tiny: Path, text: Path, tmp_path: Path) -> None:
    record: dict[str, Any] = {"status": "finished", "held_out": {"before": 2.0, "after": 1.9}}
    assert finetune.has_improved(record)
    for wrong in ({"status": "stopped early and saved"}, {"held_out": {}}, {"held_out": {"before": 2.0, "after": 2.1}},
                  {"held_out": {"before": 2.0, "after": float("nan")}}):  # fmt: skip
        assert not finetune.has_improved(record | wrong)
    # A text shorter than the example: the exit code of `oomb train`, and its message in the log.
    done = call("--out", tmp_path, "--model", tiny, "--dataset", text, "--length", "1M", "--device", "cpu")
    assert done.exit_code == 2
    assert "one example needs 1048576" in (tmp_path / "finetune_smollm2.log").read_text()
    assert not (tmp_path / "finetune_smollm2.json").exists()
    assert call("--out", tmp_path, "--dataset", "nowhere").exit_code == 2


@pytest.mark.timing
def test_the_section_of_the_documents(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, docs = tmp_path / "benchmarks" / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir(parents=True)
    monkeypatch.setattr(common, "RESULTS", results)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert update_tables.finetune() == ""
    record = json.loads((out / "finetune_smollm2.json").read_text())
    record["needle"]["after"] |= {"accuracy": 0.625, "share": 0.5}
    record["needle"]["after"]["lengths"][0]["accuracy"] = 0.625
    (results / "finetune_smollm2.json").write_text(json.dumps(record))
    section = update_tables.finetune()
    before, after = (record["held_out"][when] for when in ("before", "after"))
    assert f"| loss on held-out text | {before:.3f} | {after:.3f} |" in section
    was, control = (record["needle"][when]["lengths"][0]["control_accuracy"] for when in ("before", "after"))
    found = f"{record['needle']['before']['accuracy']:.0%} ({was:.0%}) | 62% ({control:.0%})"
    assert f"| needles found in 2,048 tokens (control) | {found} |" in section
    assert "6 steps of 2,048 tokens on code (3 files, 0.3 MB)" in section and "4 pages of 128 tokens" in section
    assert "a CPU with PyTorch" in section
    assert ".html" not in section and ".png" not in section
    for name in ("finetune_smollm2.html", "finetune_smollm2.png"):
        (docs / name).write_text("")
        assert f"]({name})" in update_tables.finetune()


def test_accuracy_above_chance_must_be_significant() -> None:
    def sentence(*found: float) -> str:
        lengths = [{"length": 2**n, "accuracy": accuracy, "count": 40} for n, accuracy in enumerate(found, 12)]
        return update_tables.beyond_luck({"chance": 0.25, "lengths": lengths})

    assert (
        sentence(0.56, 0.35) == "The accuracy is significantly above chance at 4,096 tokens, not at the other lengths."
    )
    assert sentence(0.56, 0.5) == "Every length is significantly above chance."
    assert sentence(0.3).startswith("No length")


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome on PATH")
def test_the_screenshot_of_the_page(out: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    page = out / "finetune_smollm2.html"
    done = call("--picture-from", page, "--out", tmp_path / "deep" / "page.png")
    assert done.exit_code == 0, done.output
    shown = image.imread(tmp_path / "deep" / "page.png")[..., :3]
    height, width = shown.shape[:2]
    assert f"{width} x {height}" in done.output and width == 1120 and 1500 < height < 6000
    # Light colors, with curves, and cropped at the end.
    assert shown[0, 0].min() > 0.9
    blue = abs(shown - [11 / 255, 107 / 255, 184 / 255]).max(-1) < 0.1
    assert blue.sum() > 1000
    assert (abs(shown[-60:] - shown[0, 0]).max(-1) > 0.02).any()
    whole = picture(page, tmp_path / "whole.png")
    assert whole[1] > height + 500, "without cuts, the tables of settings are included"
    with pytest.raises(ValueError, match="has no section 'appendix'"):
        picture(page, tmp_path / "x.png", without=("appendix",))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match="chromium"):
            browse(page, tmp_path / "profile")
