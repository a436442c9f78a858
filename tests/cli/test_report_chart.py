"""The charts of the report: ticks, numbers on the axes, long series, limits."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from report_pages import Tree, start, step, write_run

from oomb.cli.report.chart import Chart, Series, nice_ticks, plain, svg, thin
from oomb.cli.report.events import run_from_lines
from oomb.cli.report.page import page, write_report


@pytest.mark.timing
def test_a_long_run_is_thinned_and_keeps_its_extremes() -> None:
    values = [(float(i), math.sin(i / 50) + (100.0 if i == 31_234 else 0.0)) for i in range(50_000)]
    kept = thin(values)
    assert len(kept) <= 1002
    assert kept[0] == values[0] and kept[-1] == values[-1]
    assert max(kept, key=lambda point: point[1])[0] == 31_234
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    run = run_from_lines(map(json.dumps, (step(n) for n in range(1, 5001))), "long")
    # The time of this thread alone: other programs on the machine do not count.
    began = time.thread_time()
    text = page(run)
    assert time.thread_time() - began < 10
    assert len(text) < 1_000_000
    assert "200 of 5,000 steps as a table" in text or "201 of 5,000 steps as a table" in text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.6, 5.6, [2, 3, 4, 5, 6]), (0, 4e-5, [0, 1e-5, 2e-5, 3e-5, 4e-5])],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(ticks)


def test_a_loss_that_is_not_finite_breaks_the_line(tmp_path: Path) -> None:
    events = [start(), step(1), step(2), step(3, loss=math.nan), step(4, loss=math.inf), step(5), step(6, loss=1e300)]
    text = write_report(write_run(tmp_path / "run", events)).read_text()
    tree = Tree(text)
    assert len(tree.paths("loss")["training"]) == 3
    [path] = [path for path in tree.all("path") if path["data-name"] == "training"]
    assert path["d"].count("M") == 2
    assert "The loss was not a finite number in 2 of 6 steps" in text


def test_limits_far_from_the_data_are_not_drawn() -> None:
    series = [Series(name="a", points=[(1, 1.0), (9, 2.0)])]
    lines = {"limits": [(4.0, "near"), (400.0, "far")], "marks": [(5, "here")]}
    chart = Chart(key="k", title="T", x_label="x", y_label="y", series=series, **lines)
    drawn = svg(chart)
    assert ">near<" in drawn and ">far<" not in drawn
    assert drawn.count('class="limit"') == drawn.count('class="mark"') == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (2e-4, "2e-4"),
        (1.5e-4, "1.5e-4"),
        (-1e-7, "-1e-7"),
        (1e-3, "0.001"),
        (1234.5, "1,234"),
        (2.5e7, "2.5e7"),
    ],
)
def test_numbers_fit_on_an_axis(value: float, text: str) -> None:
    assert plain(value) == text
