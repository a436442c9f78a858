"""benchmarks/plan_check.py on a tiny model, its clock taken for that of a GPU: what it refuses, and what it leaves when
a step comes to nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import build
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import plan_check
import typer

from oomb.forecast import Machine
from oomb.metrics import GIB

STEP = ("--cases", "lora-8bit", "--contexts", "8K", "--places", "auto")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machine that is found; a test may put another in its place."""
    found = [Machine(gpu_bytes=24 * GIB, host_bytes=32 * GIB, gpu_name="NVIDIA H200")]
    monkeypatch.setattr(plan_check, "find_machine", lambda *_: found[0])
    monkeypatch.setattr(plan_check, "load_model", lambda name: build("qwen2").float())
    monkeypatch.setattr(plan_check, "clear", lambda: None)

    def timed(step: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    monkeypatch.setattr(plan_check, "timed", timed)
    # A warm-up of 4096 tokens and not of 65,536.
    monkeypatch.setattr(plan_check, "WARM_UP_CHUNKS", {"dense": 1, "chosen": 1})
    return found


def call(out: Path, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(plan_check.main)
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, [*arguments, "--out", str(out)])


def rows(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text())["rows"]


def test_a_step_is_predicted_and_measured(machine: list[Machine], tmp_path: Path) -> None:
    done = call(tmp_path / "report.json", *STEP, "--optimizer", "adamw")
    [row] = rows(tmp_path / "report.json")
    assert row["problem"] is None, done.output
    assert row["predicted_gpu_bytes"] > 0 < row["measured_gpu_bytes"]
    assert row["measured_seconds"] > 0 < row["optimizer_seconds"]
    # On a CPU the process is measured, which is far from what a GPU would hold.
    assert done.exit_code == 1 and not plan_check.Row(**row).is_right


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--contexts", "3.7M"), "'3.7M' is not a number of tokens"),
        (("--contexts", "8K", "--places", "moon"), "there is no moon; there are gpu, half"),
        (("--contexts", "8K", "--cases", "lora,laura"), "there is no laura; there are full"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_made(
    machine: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(plan_check, "load_model", lambda name: pytest.fail("this takes long"))
    done = call(tmp_path / "report.json", *arguments)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize("part, method", [("pinning host memory", "reserve"), ("taking the step", "loss")])
def test_a_step_that_comes_to_nothing_says_how_far_it_came(
    machine: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    calls, real = [], getattr(plan_check.Engine, method)

    def fails(self: Any, *args: Any) -> Any:
        calls.append(rows(tmp_path / "report.json")[-1]["problem"])
        if calls[-1] == f"stopped while {part}":
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nand more")
        return real(self, *args)

    monkeypatch.setattr(plan_check.Engine, method, fails)
    done = call(tmp_path / "report.json", *STEP)
    [row] = rows(tmp_path / "report.json")
    assert row["problem"] == f"stopped while {part}: RuntimeError: CUBLAS_STATUS_ALLOC_FAILED"
    assert done.exit_code == 1, "it was predicted to fit"
    assert calls[-1] == f"stopped while {part}", "the file said so before"


def test_a_step_that_is_not_planned_is_not_taken(machine: list[Machine], tmp_path: Path) -> None:
    machine[0] = Machine(gpu_bytes=GIB, host_bytes=0, gpu_name="NVIDIA H200")
    done = call(tmp_path / "report.json", "--cases", "full", "--contexts", "64M", "--places", "gpu")
    [row] = rows(tmp_path / "report.json")
    assert row["problem"].startswith("predicted not to fit") and "tokens would" in row["problem"]
    assert done.exit_code == 0 and row["measured_seconds"] == 0
