"""benchmarks/plan_check.py on a tiny model, with the CPU's clock: input errors, failing steps and rehearsals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import plan_check
import pytest
import update_tables
from families import build
from scripts import run_benchmark

from oomb.config import Config
from oomb.models import load
from oomb.models.probe import model_shape
from oomb.planner.forecast import forecast_step
from oomb.planner.hardware import Machine
from oomb.utils.units import GIB

STEP = ("--cases", "lora-8bit", "--contexts", "8K", "--places", "auto")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machine that is found, in a list so that a test can replace it."""
    found = [Machine(gpu_bytes=24 * GIB, host_bytes=32 * GIB, gpu_name="NVIDIA H200")]
    monkeypatch.setattr(plan_check, "find_machine", lambda *_: found[0])
    monkeypatch.setattr(plan_check, "load_model", lambda name, num_layers: build("qwen2").float())
    monkeypatch.setattr(plan_check, "clear", lambda: None)

    def timed(step: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    monkeypatch.setattr(plan_check, "timed", timed)
    # Warm up with 4096 tokens instead of 65,536.
    monkeypatch.setattr(plan_check, "WARM_UP_CHUNKS", {"dense": 1, "sparse": 1})
    return found


def call(out: Path, *arguments: str) -> Any:
    return run_benchmark(plan_check.main, *arguments, "--out", out)


def rows(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text())["rows"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, machine: list[Machine]) -> None:
    """Load models by name."""
    monkeypatch.setattr(plan_check, "load_model", load.load_model)


@pytest.mark.timing
def test_a_step_is_predicted_and_measured(machine: list[Machine], tmp_path: Path) -> None:
    done = call(tmp_path / "report.json", *STEP, "--optimizer", "adamw")
    [row] = rows(tmp_path / "report.json")
    assert row["problem"] is None, done.output
    assert row["predicted_gpu_bytes"] > 0 < row["measured_gpu_bytes"]
    assert row["measured_seconds"] > 0 < row["optimizer_seconds"]
    # On a CPU the memory of the whole process is measured, which is far from a GPU's.
    assert done.exit_code == 1 and not plan_check.Row(**row).is_right


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--contexts", "3.7M"), "'3.7M' is not a number of tokens"),
        (("--contexts", "8K", "--places", "moon"), "unknown moon; use some of gpu, half"),
        (("--contexts", "8K", "--cases", "lora,laura"), "unknown laura; use some of full"),
        (("--contexts", "8K", "--optimizer", "sgd"), "unknown sgd; use some of none, adamw, offloaded_adamw"),
    ],
)
def test_bad_arguments_are_refused_before_loading_a_model(
    machine: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(plan_check, "load_model", lambda *_, **__: pytest.fail("this takes long"))
    done = call(tmp_path / "report.json", *arguments)
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("part, method", [("pinning host memory", "reserve"), ("taking the step", "loss")])
def test_a_failing_step_leaves_its_stage_as_the_problem(
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
    assert calls[-1] == f"stopped while {part}", "the file had the stage before"


def test_a_step_predicted_not_to_fit_is_not_taken(machine: list[Machine], tmp_path: Path) -> None:
    machine[0] = Machine(gpu_bytes=GIB, host_bytes=0, gpu_name="NVIDIA H200")
    done = call(tmp_path / "report.json", "--cases", "full", "--contexts", "64M", "--places", "gpu")
    [row] = rows(tmp_path / "report.json")
    assert row["problem"].startswith("predicted not to fit") and "tokens would" in row["problem"]
    assert done.exit_code == 0 and row["measured_seconds"] == 0


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("optimizer", ["offloaded_adamw_8bit", "adamw"])
def test_int8_pages_in_full_memory_with_either_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    for case in ("full-8bit", "lora-8bit"):
        lora, settings = plan_check.CASES[case]
        monkeypatch.setitem(plan_check.CASES, case, (lora, {**settings, "chunk_size": 256}))
    done = call(
        tmp_path / "deep" / "report.json", "--model", "demo", "--cases", "full-8bit,lora-8bit",
        "--places", "brim,host-brim", "--contexts", "1K", "--optimizer", optimizer,
    )  # fmt: skip
    report = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert report["model"] == "demo" and report["layers"] is None
    found = {(row["case"], row["place"]): row for row in report["rows"]}
    assert len(found) == 4, done.output
    for (_, place), row in found.items():
        assert row["problem"] is None and row["optimizer"] == optimizer and row["layers"] is None
        assert row["settings"]["kv_dtype"] == row["settings"]["grad_dtype"] == "int8"
        assert row["settings"]["gpu_memory"] == ("1TiB" if place == "brim" else 0)
        assert row["optimizer_seconds"] > 0
        terms = {(term["name"], term["tier"]): term["num_bytes"] for term in row["terms"]}
        has_host_states, has_host_pages = optimizer != "adamw", place == "host-brim"
        assert (("optimizer states", "host") in terms) is has_host_states
        assert (("pages of K and V", "host") in terms) is has_host_pages
        # The host holds optimizer states and pages only, so its memory is known exactly.
        assert row["measured_host_bytes"] == pytest.approx(row["predicted_host_bytes"], rel=plan_check.TOLERANCE)
        assert (row["measured_host_bytes"] > 0) is (has_host_states or has_host_pages)


def test_every_context_has_a_row(machine: list[Machine], tmp_path: Path) -> None:
    machine[0] = Machine(gpu_bytes=2**20, host_bytes=0, gpu_name="NVIDIA H200")
    done = call(tmp_path / "report.json", "--cases", "full-8bit", "--contexts", "64K,128K,1M,4M", "--places", "gpu")
    assert done.exit_code == 0
    assert [row["context"] for row in rows(tmp_path / "report.json")] == [2**16, 2**17, 2**20, 2**22]


@pytest.mark.usefixtures("loads")
def test_a_rehearsal_has_fewer_layers_and_says_so(machine: list[Machine], tmp_path: Path) -> None:
    step = ("--model", "demo", "--cases", "full-8bit", "--places", "host", "--contexts", "8K")
    done = call(tmp_path / "report.json", *step, "--layers", "1")
    report = json.loads((tmp_path / "report.json").read_text())
    [row] = report["rows"]
    assert report["layers"] == row["layers"] == 1 and "a rehearsal: --layers 1" in done.output
    plans = [
        forecast_step(
            model_shape(load.load_model("demo", num_layers=num_layers)), Config(**row["settings"]), machine[0],
            length=8192, optimizer="none",
        )
        for num_layers in (1, 2)
    ]  # fmt: skip
    assert row["predicted_gpu_bytes"] == plans[0].peak_gpu_bytes < plans[1].peak_gpu_bytes
    assert row["predicted_host_bytes"] == row["measured_host_bytes"] == plans[0].host_bytes == plans[1].host_bytes / 2


@pytest.mark.usefixtures("loads")
def test_a_rehearsal_leaves_the_file_of_whole_steps_alone(
    machine: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine[0] = Machine(gpu_bytes=2**20, host_bytes=0)
    step = ["--model", "demo", "--cases", "full", "--places", "gpu", "--contexts", "8K"]
    for more, name in (([], "plan_check.json"), (["--layers", "1"], "plan_check_rehearsal.json")):
        assert run_benchmark(plan_check.main, *step, *more).exit_code == 0
        path = tmp_path / "benchmarks" / "results" / name
        assert rows(path)
        path.unlink()
        assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("loads")
def test_too_many_layers_are_refused(tmp_path: Path) -> None:
    done = call(tmp_path / "report.json", "--model", "demo", "--cases", "full", "--contexts", "8K", "--layers", "3")
    assert done.exit_code == 2 and "--layers 3 is out of range; this model has 2 layers" in done.output


def test_tables_ignore_rehearsals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [row for row in common.load("plan_check.json")["rows"] if row["case"] == "full-lean-kept"]
    rehearsed = {**whole[-1], "context": 2**24, "layers": 2}
    (tmp_path / "plan_check.json").write_text(json.dumps({"rows": [*whole, rehearsed]}))
    before = update_tables.tiers()
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert update_tables.tiers() == before
    assert [row["context"] for row in common.steps("plan_check.json")] == [row["context"] for row in whole]
