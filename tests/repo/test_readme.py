"""The README's plot and its table of cards show what the result files and the planner say."""

from __future__ import annotations

import json
import re

import pytest
from documents import ROOT

from oomb.config import Config
from oomb.planner.forecast import forecast_step
from oomb.planner.hardware import machine_named
from oomb.planner.plan import shape_for
from oomb.utils.units import GIB

README = (ROOT / "README.md").read_text()


def test_the_readme_stays_short_and_shows_the_plot() -> None:
    assert README.count("\n") < 200
    assert "](benchmarks/results/memory.png)" in README


def test_the_plot_has_the_measured_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_plot

    bench = json.loads((ROOT / "benchmarks/results/exact_qwen2.5-7b_standard.json").read_text())["rows"]
    series = memory_plot.series()
    standard = {row["context"]: row["peak_bytes"] / GIB for row in bench if row["mode"] == "standard"}
    assert dict(series["standard training"]) == standard
    exact = dict(series["oomb, exact, all weights"])
    assert exact == {context: pytest.approx(32.47, abs=0.01) for context in (1 << 15, 1 << 16, 1 << 18)}
    assert max(context for context, _ in series["oomb, sparse, LoRA, int8 pages"]) == 1 << 21


def test_the_table_of_cards_is_the_planners() -> None:
    [line] = re.findall(r"^\| RTX 4090 \| 64 GiB \| (.*) \|$", README, re.MULTILINE)
    lora, _, full = line.split(" | ")
    machine = machine_named("RTX 4090", 64 * GIB)
    forecast = forecast_step(shape_for("qwen2.5-7b", lora=True), Config(), machine, length=1 << 16)
    assert lora == f"{round(forecast.longest_context or 0, -3):,}"
    assert full == "does not fit"
