"""Show the comparison with standard training that `oomb demo` measured: the table, two charts, the conclusions.

The input is the content of `comparison.json` (`oomb.eval.comparison`). Missing or malformed values leave out their row
or cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomb.cli.report.chart import Chart, Series
from oomb.cli.report.charts import chart_by_length
from oomb.cli.report.events import dictionary, number
from oomb.utils.units import GIB, seconds

UNITS = {"MiB": 1 << 20, "GiB": GIB}
MODES = {"standard": "standard training", "oomb": "oomb"}
COLUMNS = ("context", "standard: time", "oomb: time", "standard: memory", "oomb: memory", "gradient difference")


@dataclass(frozen=True)
class Step:
    """One measured step; `problem` says why there are no numbers."""

    seconds: float | None
    num_bytes: float | None
    problem: str | None


@dataclass(frozen=True)
class Row:
    """Both modes at one context."""

    context: int
    steps: dict[str, Step]
    grad_difference: float | None


def read_rows(comparison: dict[str, Any]) -> list[Row]:
    """Return the valid rows, by context."""
    found = comparison.get("rows")
    rows = []
    for row in found if isinstance(found, list) else []:
        context = number(row.get("context")) if isinstance(row, dict) else None
        if context is not None and 1 <= context < 2**53:
            steps = {mode: _step(dictionary(row.get(mode))) for mode in MODES}
            rows.append(Row(int(context), steps, number(row.get("grad_difference"), finite=False)))
    return sorted(rows, key=lambda row: row.context)


def table_rows(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells of each row, in the order of COLUMNS. A problem stands where the time would be."""
    unit = _unit(rows)
    found = []
    for row in rows:
        steps = row.steps.values()
        times = [step.problem or ("" if step.seconds is None else seconds(step.seconds)) for step in steps]
        sizes = ["" if step.num_bytes is None else _size(step.num_bytes, unit) for step in steps]
        difference = "" if row.grad_difference is None else f"{row.grad_difference:.1e}"
        found.append((f"{row.context:,}", *times, *sizes, difference))
    return found


def charts(rows: list[Row]) -> list[Chart]:
    """Return memory and time against context, each if it has points."""
    unit = _unit(rows)
    memory = "What one training step adds to the memory in use before it."
    time = "One training step, forward and backward."
    found = [
        _chart("memory", unit, memory, rows, lambda s: None if s.num_bytes is None else s.num_bytes / UNITS[unit]),
        _chart("time", "seconds", time, rows, lambda s: s.seconds),
    ]
    return [chart for chart in found if chart is not None]


def conclusions(comparison: dict[str, Any]) -> list[str]:
    """Return one sentence about memory and one about gradients, each at the longest context that has the numbers. If
    gradients are wrong at any context, the second sentence is about that one."""
    rows = read_rows(comparison)
    tolerance = number(dictionary(comparison.get("settings")).get("tolerance")) or 0.0
    sentences = [sentence for row in reversed(rows) if (sentence := _memory_sentence(row, _unit(rows)))][:1]
    compared = [(row.context, row.grad_difference) for row in rows if row.grad_difference is not None]
    wrong = [(context, difference) for context, difference in compared if not difference <= tolerance]
    for context, difference in (wrong or compared)[-1:]:
        meaning = "WRONG, do not trust them" if wrong else "the same up to float32 rounding"
        sentences.append(
            f"The gradients differ by {difference:.1e} at {context:,} tokens (relative error over all parameters): "
            f"{meaning}."
        )
    return sentences


def _memory_sentence(row: Row, unit: str) -> str | None:
    standard, oomb = (row.steps[mode].num_bytes for mode in MODES)
    if standard is None or oomb is None or min(standard, oomb) <= 0:
        return None
    ratio = f"{standard / oomb:.1f}x less" if standard >= oomb else f"{oomb / standard:.1f}x more"
    return (
        f"At {row.context:,} tokens a step adds {_size(standard, unit)} of memory with standard training and "
        f"{_size(oomb, unit)} with oomb: {ratio}."
    )


def memory_meaning(comparison: dict[str, Any]) -> str:
    """Return what the memory columns mean on the device of the comparison."""
    on_gpu = str(dictionary(comparison.get("settings")).get("device")).startswith("cuda")
    what = "peak GPU memory" if on_gpu else "the process's peak memory (RSS)"
    return f"memory: {what} during the step, minus what was in use before it (PyTorch, model)"


def _unit(rows: list[Row]) -> str:
    """Return one unit for all sizes, so that they can be compared at a glance."""
    most = max((step.num_bytes or 0 for row in rows for step in row.steps.values()), default=0)
    return "GiB" if most >= GIB else "MiB"


def _size(num_bytes: float, unit: str) -> str:
    return f"{num_bytes / UNITS[unit]:,.{2 if unit == 'GiB' else 1}f} {unit}"


def _step(values: dict[str, Any]) -> Step:
    problem = values.get("problem")
    return Step(
        seconds=number(values.get("seconds")),
        num_bytes=number(values.get("peak_bytes")),
        problem=problem if isinstance(problem, str) else None,
    )


def _chart(key: str, unit: str, about: str, rows: list[Row], value: Callable[[Step], float | None]) -> Chart | None:
    series = []
    for color, (mode, name) in zip((2, 1), MODES.items()):
        points = [(float(row.context), y) for row in rows if (y := value(row.steps[mode])) is not None]
        series.append(Series(name=name, points=points, color=color))
    return chart_by_length(
        f"compared-{key}", f"{key.capitalize()} by context", ("tokens", unit), series, about, from_zero=True
    )
