"""`oomb plan` on the command line: what it prints, what it writes, and its errors."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from command import invoke
from hypothesis import given
from hypothesis import strategies as st

from oomb.models import presets
from oomb.planner.plan import shape_for
from oomb.planner.step_time import _tokens_read


def test_a_page_budget_is_suggested_for_unknown_gpus_too(tmp_path: Path) -> None:
    """Its speed is not known, but a step of a day takes long on any GPU."""
    suggested = {}
    for context in ("64K", "8M"):
        figures = tmp_path / f"{context}.json"
        machine = ["--gpu", "24GiB", "--host", "999GiB"]
        result = invoke("plan", "--model", "smollm2-135m", "--context", context, *machine, "--output", figures)
        suggested[context] = json.loads(figures.read_text())["faster"]
    assert suggested["64K"] is None
    assert suggested["8M"] is not None and "--page_budget 64" in suggested["8M"]["command"]
    assert "--page_budget 64 it is more than 3 times as fast" in result.output


def test_a_plan_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # pyplot would take over the windows of a program that uses it.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    picture, figures = tmp_path / "deep" / "plan.png", tmp_path / "new" / "plan.json"
    arguments = ["--model", "qwen2.5-7b", "--context", "256K", "--gpu", "H200", "--host", "64GiB"]
    result = invoke("plan", *arguments, "--chunk_size", "8K", "--output", figures, "--plot", picture)
    assert result.exit_code == 0, result.output
    for words in ("weights", "14.19 GiB", "optimizer states", "grows with the context", "GPU total", "host total"):
        assert words in result.output
    assert "longest context that fits" in result.output and "262,144 tokens" in result.output
    assert "time of a step: about" in result.output and "not measured" not in result.output
    assert "made for 131,072 positions" in result.output and result.output.count("written to") == 2
    written = json.loads(figures.read_text())
    assert written["fits"] and written["context"] == 262144 and written["settings"]["chunk_size"] == 8192
    assert written["peak_gpu_bytes"] == sum(term["num_bytes"] for term in written["terms"] if term["tier"] == "gpu")
    assert written["placement"]["capacity"] == 262144 - 8192 and written["facts"]["hidden_size"] == 3584
    assert {layer["itemsize"] for layer in written["facts"]["layers"]} == {2}
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and 10_000 < len(data) < 500_000


def test_a_plan_that_does_not_fit_and_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--model", "qwen2.5-7b", "--context", "64K", "--host", "32GiB"]
    result = invoke("plan", *small, "--gpu", "24GiB")
    assert result.exit_code == 1
    assert "65,536 tokens do not fit" in result.output and "It fits with:\n  --lora  train adapters" in result.output
    lora = invoke("plan", *small, "--gpu", "24GiB", "--lora")
    assert lora.exit_code == 0 and "not predicted" in lora.output
    assert "scaled from an H200" in invoke("plan", *small, "--gpu", "rtx 4090", "--lora").output
    wide = invoke("plan", "--model", "qwen2.5-0.5b", "--context", "64K", "--gpu", "H200", "--dtype", "float32")
    assert "time of a step: not predicted, because the speed of float32 is not known" in wide.output

    def complaint(*arguments: str) -> str:
        result = invoke("plan", "--model", "demo", "--gpu", "24GiB", *arguments)
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "--gpu is '24 apples'" in complaint("--gpu", "24 apples")
    assert "GPU 'Voodoo' is unknown" in complaint("--gpu", "Voodoo")
    assert "--host is '64 pages'" in complaint("--host", "64 pages")
    assert "unknown optimizer 'lion'" in complaint("--optimizer", "lion")
    assert "--context 'long' is not a number of tokens" in complaint("--context", "long")
    assert "keep_attention is 'maybe'" in complaint("--keep_attention", "maybe")
    assert '--gpu is 24, a number of bytes; did you mean "24GiB"?' in complaint("--gpu", "24")
    assert 'did you mean "RTX 4090"?' in complaint("--gpu", "4090")
    assert '--host is 64, a number of bytes; did you mean "64GiB"?' in complaint("--host", "64")
    assert "--host is '0.5'" in complaint("--host", "0.5")
    assert "--batch_size is 0" in complaint("--batch_size", "0")
    assert "must end in .png" in complaint("--plot", "plan.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib: pip install matplotlib" in complaint("--plot", "plan.png")
    if not torch.cuda.is_available():
        result = invoke("plan", "--model", "demo")
        assert result.exit_code == 2 and "--gpu 24GiB" in result.stderr


def test_the_machine_and_the_limits_are_shown() -> None:
    arguments = ["--model", "demo", "--context", "16K", "--gpu", "NVIDIA H100 80GB HBM3"]
    output = invoke("plan", *arguments, "--host", "64GiB", "--gpu_memory", "200GiB", "--host_memory", "99GiB").output
    words = " ".join(output.split())
    assert "on H100 (79.1 GiB, 76.2 usable), 64.00 GiB of host memory free" in words
    assert "gpu_memory=200GiB: only 76" in words and "host_memory=99GiB: only 64.00 GiB are free" in words
    assert " ms, " in words
    assert "of 57.60 GiB, 90%" in invoke("plan", *arguments, "--host", "64GiB").output
    assert invoke("plan", *arguments, "--host", "auto").exit_code == 0


@pytest.mark.timing
def test_a_longer_context_takes_no_longer_to_plan(tmp_path: Path) -> None:
    picture = tmp_path / "long.svg"

    def seconds(context: str) -> float:
        # Only this thread's time, so that other programs do not count.
        started = time.thread_time()
        arguments = ["--model", "demo", "--gpu", "NVIDIA H100 80GB HBM3", "--host", "64GiB", "--plot", picture]
        assert invoke("plan", *arguments, "--context", context).exit_code == 1
        assert picture.read_text().startswith("<?xml")
        return time.thread_time() - started

    # The first call imports matplotlib, which may build its font cache.
    seconds("1000M")
    assert seconds("100000M") < 10 * seconds("1000M")


def test_learned_positions_are_a_limit(tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 1000}
    AutoConfig.for_model("gpt2", **sizes).save_pretrained(tmp_path)
    result = invoke("plan", "--model", tmp_path, "--gpu", "24GiB", "--host", "8GiB", "--context", "2K")
    assert result.exit_code == 1 and "has learned 1,000 positions" in result.output and "RoPE" not in result.output
    assert "longest context that fits: 1,000 tokens" in result.output
    assert invoke("plan", "--model", tmp_path, "--gpu", "24GiB", "--host", "8GiB", "--context", "1000").exit_code == 0


def test_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=50).save_pretrained(tmp_path)
    result = invoke("plan", "--model", tmp_path, "--gpu", "24GiB")
    assert result.exit_code == 2 and "computes attention in its own code" in result.stderr


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 200), st.none() | st.integers(1, 60))
def test_tokens_read_match_a_sum_over_chunks(chunk: int, num_chunks: int, first: int, window: int | None) -> None:
    capacity = chunk * num_chunks
    first = min(first, capacity)
    starts = [start for start in range(chunk, capacity + 1, chunk) if start > first]
    seen = sum(start - max(first, start - window if window is not None else 0) for start in starts)
    assert _tokens_read(chunk, capacity, first, window) == seen


def test_presets_plan_without_weights() -> None:
    for name in presets.PRESETS:
        shape = shape_for(name)
        assert shape.layers and shape.weight_bytes > 0
