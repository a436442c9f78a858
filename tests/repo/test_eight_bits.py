"""benchmarks/eight_bits.py on small models: results, targets, input errors and the table in the documents."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import eight_bits
import pytest
import smollm2
import torch
import update_tables
from families import build
from letters import Letters
from scripts import run_benchmark


def call(model: str, out: Path, *more: str, chunk_size: str = "128") -> Any:
    shape = ["--tokens", "384", "--chunk-size", chunk_size, "--device", "cpu", "--out", str(out)]
    return run_benchmark(eight_bits.main, model, *shape, *more)


def test_cosines_are_measured_and_shown_in_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert update_tables.eight_bits() == ""
    monkeypatch.setattr(smollm2, "load", lambda gguf, device: (build("llama").float(), Letters()))
    out = tmp_path / "eight_bits_smollm2.json"
    done = call("smollm2", out)
    record = json.loads(out.read_text())
    assert done.exit_code == 0 and record["is_right"], done.output
    # Both texts; other variants have no target.
    assert done.output.count("0.999: reached") == done.output.count("0.995: reached") == 2
    assert done.output.count("reached") == 4
    found = {(row["text"], row["variant"]): row for row in record["rows"]}
    assert len(found) == 2 * (len(eight_bits.VARIANTS) + len(eight_bits.WIDE))
    assert all(row["num_chunks"] == 3 for row in found.values())
    for text in ("source", "prose"):
        assert found[text, "bfloat16 again"]["error"] == 0.0, "a step is deterministic on a CPU"
        errors = [found[text, name]["error"] for name in ("K and V in int8", "all in int8")]
        # Rounding gradients adds to rounding K and V.
        assert 1e-4 < errors[0] < errors[1] < 0.1
    [line] = [line for line in update_tables.eight_bits().splitlines() if "| prose |" in line]
    cosines = [f"{found['prose', name]['cosine']:.5f}" for name in ("K and V in int8", "all in int8")]
    assert line == f"| SmolLM2-135M | prose | dense | 384, 3 | {cosines[0]} | {cosines[1]} |"


def test_a_preset_has_dense_and_sparse_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert done.exit_code == 1 and "1.000001: NOT REACHED" in done.output and ": reached" not in done.output
    assert not json.loads((tmp_path / "report.json").read_text())["is_right"]
    monkeypatch.setattr(
        eight_bits.fidelity, "compare", lambda *_: dict.fromkeys(("cosine", "error", "qk_cosine"), torch.nan)
    )
    assert call("any", tmp_path / "report.json").exit_code == 1, "NaN is wrong"


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    done = call("no-such-model", tmp_path / "report.json")
    assert done.exit_code == 2 and "no-such-model" in done.output


def test_chunks_that_are_not_whole_pages_are_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bits, "load_model", lambda name, device: build("qwen2").float())
    monkeypatch.setattr(eight_bits, "measure", lambda *_: pytest.fail("this takes long"))
    done = call("any", tmp_path / "report.json", chunk_size="64")
    assert done.exit_code == 2 and "128" in done.output


def test_random_weights_of_several_deviations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = [], eight_bits.measure

    def note(network: Any, *args: Any) -> Any:
        layers = [p for name, p in network.named_parameters() if "layers" in name and p.ndim == 2]
        measured.append({round(float(p.detach().std()), 2) for p in [network.get_input_embeddings().weight, *layers]})
        return measure(network, *args)

    monkeypatch.setattr(eight_bits, "measure", note)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(update_tables, "EIGHT_BITS", {"report.json": "demo shape"})
    done = call("demo", tmp_path / "report.json", "--stds", "0.1,0.008")
    record = json.loads((tmp_path / "report.json").read_text())
    assert done.exit_code == 0 and record["settings"]["stds"] == [0.1, 0.008], done.output
    assert measured == [{0.1}, {0.01}], "all layers follow"
    for std in (0.1, 0.008):
        rows = [row for row in record["rows"] if row["std"] == std]
        assert len(rows) == 2 * len(eight_bits.VARIANTS)
        assert f"random, std {std}" in done.output
        lines = [
            line for line in update_tables.eight_bits().splitlines() if f"| random, weights with std {std} |" in line
        ]
        assert len(lines) == 2 and f"{rows[1]['cosine']:.5f}" in lines[0]
    by_std = [[row["loss"] for row in record["rows"] if row["std"] == std] for std in (0.1, 0.008)]
    assert set(by_std[0]).isdisjoint(by_std[1])


def test_what_was_measured_is_there_if_a_later_deviation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = eight_bits.random_network

    def fails(model: str, std: float, device: str) -> Any:
        if std == 0.01:
            raise RuntimeError("out of memory")
        return real(model, std, device)

    monkeypatch.setattr(eight_bits, "random_network", fails)
    assert call("demo", tmp_path / "report.json", "--stds", "0.02,0.01").exit_code == 1
    assert {row["std"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]} == {0.02}


@pytest.mark.parametrize(
    ("model", "stds", "message"),
    [
        ("smollm2", "0.02", "smollm2 has its own"),
        ("demo", "0.02,-1", "--stds has -1"),
        ("demo", "nan", "a standard deviation is a number above 0"),
        ("demo", "wide", "could not convert"),
    ],
)
def test_bad_deviations_are_refused(tmp_path: Path, model: str, stds: str, message: str) -> None:
    done = call(model, tmp_path / "report.json", "--stds", stds)
    assert done.exit_code == 2 and message in done.output


class OnGpu:
    """Stands for a gradient in GPU memory."""

    def cpu(self) -> str:
        return "on the CPU"


@pytest.mark.parametrize("free_bytes, stays", [(1051, True), (1049, False)])
def test_the_reference_stays_on_the_gpu_if_a_step_fits_beside_it(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, stays: bool
) -> None:
    grad = OnGpu()
    network = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    monkeypatch.setattr(eight_bits.fidelity, "gradient", lambda *_: (2.5, {"a": grad}))
    answers = {"memory_allocated": 500, "max_memory_allocated": 1500, "mem_get_info": (free_bytes, 10_000)}
    for name, answer in {**answers, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = eight_bits.reference_gradient(network, torch.zeros(1), eight_bits.Config())
    assert found == (2.5, {"a": grad if stays else "on the CPU"})
