"""benchmarks/eight_bits.py on small models: what it measures, that it can fail, and what the documents make of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from test_fidelity import Letters
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import eight_bits
import smollm2
import typer
import update_tables


def call(model: str, out: Path, chunk_size: str = "128") -> Any:
    app = typer.Typer()
    app.command()(eight_bits.main)
    shape = ["--tokens", "384", "--chunk-size", chunk_size, "--device", "cpu", "--out", str(out)]
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, [model, *shape])


def test_cosines_are_measured_and_documents_say_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_tables, "RESULTS", tmp_path)
    assert update_tables.eight_bits() == ""
    monkeypatch.setattr(smollm2, "load", lambda gguf, device: (build("llama").float(), Letters()))
    out = tmp_path / "eight_bits_smollm2.json"
    done = call("smollm2", out)
    record = json.loads(out.read_text())
    assert done.exit_code == 0 and record["is_right"], done.output
    found = {(row["text"], row["variant"]): row for row in record["rows"]}
    assert len(found) == 2 * (len(eight_bits.VARIANTS) + len(eight_bits.WIDE))
    assert all(row["num_chunks"] == 3 for row in found.values())
    for text in ("source", "prose"):
        assert found[text, "bfloat16 again"]["error"] == 0.0, "on a CPU a step gives the same bits again"
        errors = [found[text, name]["error"] for name in ("K and V in int8", "all in int8")]
        # Rounding gradients comes on top of rounding K and V.
        assert 1e-4 < errors[0] < errors[1] < 0.1
    [line] = [line for line in update_tables.eight_bits().splitlines() if "| prose |" in line]
    cosines = [f"{found['prose', name]['cosine']:.5f}" for name in ("K and V in int8", "all in int8")]
    assert line == f"| SmolLM2-135M | prose | dense | 384, 3 | {cosines[0]} | {cosines[1]} |"


def test_a_preset_is_read_densely_and_by_chosen_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "load_model", lambda name, device: build("qwen2").float())
    out = tmp_path / "report.json"
    assert call("any", out).exit_code == 0
    record = json.loads(out.read_text())
    assert {row["attention"] for row in record["rows"]} == {"dense", "64 pages of 128"}
    assert all(row["num_chunks"] == 3 for row in record["rows"])


def test_too_low_a_cosine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "load_model", lambda name, device: build("qwen2").float())
    monkeypatch.setattr(eight_bits, "ASKED", {"K and V in int8": 1.0 + 1e-6})
    done = call("any", tmp_path / "report.json")
    assert done.exit_code == 1 and "BELOW" in done.output
    assert not json.loads((tmp_path / "report.json").read_text())["is_right"]
    monkeypatch.setattr(
        eight_bits.fidelity, "compare", lambda *_: dict.fromkeys(("cosine", "error", "qk_cosine"), torch.nan)
    )
    assert call("any", tmp_path / "report.json").exit_code == 1, "NaN is wrong"


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    done = call("no-such-model", tmp_path / "report.json")
    assert done.exit_code == 2 and "no-such-model" in done.output


def test_chunks_that_are_no_pages_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bits, "load_model", lambda name, device: build("qwen2").float())
    monkeypatch.setattr(eight_bits, "measure", lambda *_: pytest.fail("this takes long"))
    done = call("any", tmp_path / "report.json", chunk_size="64")
    assert done.exit_code == 2 and "take chunk_size=128" in done.output
