"""`oomb plan` as a person meets it: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from command import invoke


def test_the_command_says_that_it_fits(tmp_path: Path) -> None:
    picture, figures = tmp_path / "deep" / "plan.png", tmp_path / "new" / "plan.json"
    arguments = ["--model", "qwen2.5-7b", "--context", "256K", "--gpu", "H200", "--host", "64GiB"]
    result = invoke("plan", *arguments, "--chunk_size", "8K", "--output", figures, "--plot", picture)
    assert result.exit_code == 0, result.output
    for words in ("weights", "14.19 GiB", "optimizer states", "grows with the context", "GPU in all", "host in all"):
        assert words in result.output
    assert "longest context that fits" in result.output and "262,144 tokens" in result.output
    assert "time of a step: about" in result.output and "not measured" not in result.output
    assert "made for 131,072 positions" in result.output and result.output.count("written to") == 2
    written = json.loads(figures.read_text())
    assert written["fits"] and written["context"] == 262144 and written["settings"]["chunk_size"] == 8192
    assert written["peak_gpu_bytes"] == sum(term["num_bytes"] for term in written["terms"] if term["tier"] == "gpu")
    assert written["placement"]["capacity"] == 262144 - 8192 and written["facts"]["hidden_size"] == 3584
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and 10_000 < len(data) < 500_000
    assert "matplotlib.pyplot" not in sys.modules


def test_the_command_says_that_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--model", "qwen2.5-7b", "--context", "64K", "--host", "32GiB"]
    result = invoke("plan", *small, "--gpu", "24GiB")
    assert result.exit_code == 1
    assert "does not fit" in result.output and "It fits with LoRA instead of full training" in result.output
    lora = invoke("plan", *small, "--gpu", "24GiB", "--lora")
    assert lora.exit_code == 0 and "not predicted" in lora.output
    assert "scaled from an H200" in invoke("plan", *small, "--gpu", "rtx 4090", "--lora").output

    def complaint(*arguments: str) -> str:
        result = invoke("plan", "--model", "demo", "--gpu", "24GiB", *arguments)
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "--gpu is '24 apples'" in complaint("--gpu", "24 apples")
    assert "no GPU called 'Voodoo'" in complaint("--gpu", "Voodoo")
    assert "--host is '64 pages'" in complaint("--host", "64 pages")
    assert "unknown optimizer 'lion'" in complaint("--optimizer", "lion")
    assert "--context 'long' is not a number of tokens" in complaint("--context", "long")
    assert "keep_attention is 'maybe'" in complaint("--keep_attention", "maybe")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'oomb[plot]'" in complaint("--plot", "plan.png")
    if not torch.cuda.is_available():
        result = invoke("plan", "--model", "demo")
        assert result.exit_code == 2 and "--gpu 24GiB" in result.stderr


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=50).save_pretrained(tmp_path)
    result = invoke("plan", "--model", tmp_path, "--gpu", "24GiB")
    assert result.exit_code == 2 and "computes attention in its own code" in result.stderr
