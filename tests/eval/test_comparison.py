"""The comparison of standard training and oomb: what is measured, what is skipped, and what a failed process says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.eval import comparison
from oomb.eval.comparison import ContextResult, Measurement, StepComparison, compare_steps


@pytest.mark.timing
def test_both_modes_are_measured_in_their_own_processes(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int, int]] = []
    results: list[tuple[str, int, Measurement]] = []
    found = compare_steps(
        "demo",
        [2048],
        chunk_size=256,
        device="cpu",
        on_progress=lambda *event: progress.append(event),
        on_result=lambda *event: results.append(event),
    )
    [row] = found.rows
    assert results == [("standard", 2048, row.standard), ("oomb", 2048, row.oomb)]
    assert row.standard.problem is None and row.oomb.problem is None
    assert row.standard.seconds and row.oomb.seconds
    assert row.standard.loss == pytest.approx(row.oomb.loss, rel=1e-5)
    assert row.grad_difference is not None and 0 < row.grad_difference < 1e-4
    assert found.is_right
    # Activations of 256 tokens and the pages of 2,048 against activations of 2,048.
    assert row.standard.peak_bytes and row.oomb.peak_bytes
    assert 2 * row.oomb.peak_bytes < row.standard.peak_bytes < 1 << 30
    # By layer, forward and recomputed; by chunk, in both passes.
    assert ("standard", 2048, 3, 4) in progress
    assert ("oomb", 2048, 16, 16) in progress
    written = json.loads(found.save(tmp_path / "deep" / "comparison.json").read_text())
    assert written["rows"][0]["oomb"]["peak_bytes"] == row.oomb.peak_bytes
    assert written["machine"]["versions"]["torch"] == torch.__version__


def test_what_would_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard training takes a MiB per token here, oomb always the same."""
    asked: list[tuple[str, int]] = []

    def measure(request: dict[str, Any], on_progress: Any) -> Measurement:
        asked.append((request["mode"], request["context"]))
        torch.save({"weight": torch.ones(2)}, request["gradients"])
        size = request["context"] if request["mode"] == "standard" else 10
        return Measurement(seconds=1.0, peak_bytes=size << 20, loss=1.0)

    monkeypatch.setattr(comparison, "_in_own_process", measure)
    monkeypatch.setattr(comparison, "free_host_bytes", lambda: 300 << 20)
    found = compare_steps("demo", [512, 64, 128, 256], device="cpu")
    assert [row.context for row in found.rows] == [64, 128, 256, 512]
    # 256 MiB are free, but not with the safety factor.
    problems = [row.standard.problem for row in found.rows]
    assert problems[:2] == [None, None]
    assert problems[2:] == ["skipped: needs about 0.25 GiB, 0.29 GiB free", "skipped: no result at 256 tokens"]
    assert [row.grad_difference for row in found.rows] == [0.0, 0.0, None, None]
    assert all(row.oomb.problem is None for row in found.rows)
    assert asked.count(("standard", 256)) == asked.count(("standard", 512)) == 0


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo a library says hello; echo 12; kill -9 $$", "out of memory: the system ended the process"),
        ("echo Traceback >&2; echo 'ValueError: no such model' >&2; exit 1", "ValueError: no such model"),
        ("exit 3", "the process ended with exit code 3"),
        ("""echo '{"result": {"problem": "out of memory: 1 GiB"}}'""", "out of memory: 1 GiB"),
    ],
)
def test_a_failed_process_says_why(script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    [row] = compare_steps("demo", [64], device="cpu").rows
    assert row.standard.problem == row.oomb.problem == problem
    assert row.grad_difference is None


def test_a_step_that_runs_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: Any, ids: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(comparison.StandardStep, "__call__", too_much)
    request = {"mode": "standard", "model": "demo", "context": 64, "chunk_size": 32, "device": "cpu", "gradients": "x"}
    found = comparison._measure(request, lambda **event: None)
    assert found.problem == "out of memory: tried to allocate 9 GiB"


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_gradients_that_are_apart_are_wrong(difference: float) -> None:
    rows = [ContextResult(64, grad_difference=1e-6), ContextResult(128, grad_difference=difference)]
    assert not StepComparison("demo", {}, {}, rows).is_right
    assert StepComparison("demo", {}, {}, rows[:1]).is_right


@pytest.mark.parametrize("contexts", [[], [1]])
def test_contexts_are_checked(contexts: list[int]) -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        compare_steps("demo", contexts)
