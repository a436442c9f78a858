"""`oomb demo`: one table, in the terminal, in comparison.json and on the report page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from report_pages import Tree

from oomb.cli.train import run as run_module
from oomb.eval import comparison
from oomb.eval.comparison import ContextResult, Measurement, StepComparison
from oomb.utils.units import seconds

RUN = Path("runs/demo")
TOY = ["--max_length", "256", "--max_steps", "2", "--contexts", "1K", "--chunk_size", "128", "--device", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.timing
def test_the_demo_trains_and_compares() -> None:
    result = invoke("demo", *TOY)
    assert result.exit_code == 0, result.output
    output = result.output
    # First the plan, then the training, then the comparison.
    order = ["This demo has two parts", "Part 1", "step 2/2", "Part 2", "standard at 1,024", "oomb at 1,024", "JSON"]
    assert sorted(order, key=output.index) == order
    found = json.loads((RUN / "comparison.json").read_text())
    assert [row["context"] for row in found["rows"]] == [1024]
    assert found["model"] == str(RUN / "model")
    assert found["settings"]["chunk_size"] == 128
    assert found["machine"]["cpu"]

    tree = Tree((RUN / "report.html").read_text())
    page = [row["text"] for row in tree.all("tr")]
    for row in found["rows"]:
        assert row["grad_difference"] < 1e-4
        steps = row["standard"], row["oomb"]
        cells = [f"{row['context']:,}", *(seconds(step["seconds"]) for step in steps)]
        cells += [*(f"{step['peak_bytes'] / 2**20:,.1f} MiB" for step in steps), f"{row['grad_difference']:.1e}"]
        [line] = [line for line in output.splitlines() if line.startswith("│") and cells[-1] in line]
        assert [cell.strip() for cell in line.strip("│").split("│")] == cells
        assert "".join(cells) in page
    for chart in ("compared-memory", "compared-time"):
        assert {name: len(points) for name, points in tree.paths(chart).items()} == {"standard training": 1, "oomb": 1}
    assert f"{found['rows'][0]['grad_difference']:.1e} at 1,024 tokens" in output


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """In the place of training: a folder that looks like a run, and the exit code to return."""
    ending = {"code": 0}

    def run(settings: Any, console: Any) -> int:
        folder = Path(settings.output_dir)
        (folder / "model").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"event": "start"}\n')
        return ending["code"]

    monkeypatch.setattr(run_module, "run", run)
    return ending


def measured(monkeypatch: pytest.MonkeyPatch, *rows: ContextResult) -> list[tuple[Any, ...]]:
    """In the place of the measurements: these."""
    calls: list[tuple[Any, ...]] = []

    def compare_steps(model: str, contexts: list[int], **options: Any) -> StepComparison:
        calls.append((model, contexts))
        return StepComparison(model, {"tolerance": 1e-3, "device": options["device"]}, {}, list(rows))

    monkeypatch.setattr(comparison, "compare_steps", compare_steps)
    return calls


def test_wrong_gradients_are_not_hidden(trained: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Measurement(seconds=1.0, peak_bytes=1 << 20, loss=1.0)
    calls = measured(monkeypatch, ContextResult(64, step, step, grad_difference=0.5))
    result = invoke("demo", "--contexts", "64")
    assert result.exit_code == 1
    assert calls == [("runs/demo/model", [64])]
    assert "differ by 5.0e-01" in result.output and "WRONG" in result.output
    assert "WRONG" in (RUN / "report.html").read_text()


def test_a_skipped_context_has_its_reason_in_the_table(
    trained: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Measurement(seconds=75.0, peak_bytes=3 << 30, loss=1.0)
    # Not markup, although it looks like it.
    skipped = Measurement(problem="[enforce fail at alloc_cpu.cpp] no memory")
    measured(monkeypatch, ContextResult(2048, step, step, 1e-7), ContextResult(4096, skipped, step))
    result = invoke("demo")
    assert result.exit_code == 0
    assert "takes about 5 minutes" in result.output
    reason = "[enforce fail at alloc_cpu.cpp] no memory"
    assert reason in result.output
    rows = [row["text"] for row in Tree((RUN / "report.html").read_text()).all("tr")]
    assert f"4,096{reason}1 m 15 s3.00 GiB" in rows


def test_nothing_is_compared_after_a_stop(trained: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(monkeypatch)
    trained["code"] = 130
    assert invoke("demo").exit_code == 130
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--contexts", "2X"], "2X"), (["--contexts", "1"], "2 tokens"), (["--chunk_size", "0"], "--chunk_size")],
)
def test_bad_arguments_are_refused_before_training(arguments: list[str], word: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert word in result.output
    assert not RUN.exists()
