"""Build the charts of a run from its events."""

from __future__ import annotations

import math
from typing import Any

from oomb.cli.report.chart import Chart, Series, percent
from oomb.cli.report.events import Run, dictionary, number
from oomb.utils.units import GIB, short_tokens

STEP = "step"
WHEN = {"before": "before training", "after": "after training"}
COLORS = {"before": 2, "after": 1}


def training_charts(run: Run) -> list[Chart]:
    """Return the charts of training that have data."""
    marks = [(step, f"resumed at step {step}") for step in run.resumed_at]
    peak = "peak GPU memory" if run.on_gpu else "process memory (RSS)"
    pages = "pages on the GPU" if run.on_gpu else "pages"
    budgets = [("gpu", run.budget("gpu")), ("host", run.budget("host"))]
    limits = {limit for _, limit in budgets if limit is not None}
    moved = [
        Series(name="into the GPU", points=_scaled(run, "loaded_bytes", GIB), color=1),
        Series(name="out of the GPU", points=_scaled(run, "stored_bytes", GIB), color=2),
    ]
    charts = [
        Chart(
            key="loss",
            title="Loss",
            x_label=STEP,
            y_label="nats per token",
            series=[
                Series(name="training", points=run.series("loss"), color=1),
                Series(name="held-out", points=run.held_out, color=2, dots=True),
            ],
            about="Training text at each step, and text the model never trains on.",
            marks=marks,
        ),
        _one(run, "learning_rate", "Learning rate", "", marks=marks),
        _one(run, "grad_norm", "Gradient norm", "before clipping", marks=marks),
        _one(run, "tokens_per_s", "Throughput", "tokens per second", from_zero=True, marks=marks),
        _one(run, "step_s", "Step time", "seconds", from_zero=True, marks=marks),
        _one(run, "mfu", "Model FLOPs utilization", "MFU", from_zero=True, format_y=percent, marks=marks),
        Chart(
            key="memory",
            title="Memory",
            x_label=STEP,
            y_label="GiB",
            series=[
                Series(name=peak, points=_scaled(run, "peak_memory_bytes", GIB), color=1),
                Series(name=pages, points=_scaled(run, "gpu_page_bytes", GIB), color=2),
                Series(name="pages on the host", points=_scaled(run, "host_page_bytes", GIB, zeros=False), color=3),
            ],
            about="Pages hold what grows with the context: K, V, their gradients and saved attention outputs.",
            from_zero=True,
            limits=[(num_bytes / GIB, label) for num_bytes, label in sorted(limits)],
            marks=marks,
        ),
        Chart(
            key="transfers",
            title="Transfers between GPU and host",
            x_label=STEP,
            y_label="GiB per step",
            series=moved if any(y > 0 for series in moved for _, y in series.points) else [],
            from_zero=True,
            marks=marks,
        ),
        Chart(
            key="waited",
            title="Transfer stalls",
            x_label=STEP,
            y_label="seconds per step",
            series=[Series(name="stall", points=_scaled(run, "waited_s", 1, zeros=False), color=4)],
            about="Time the computation waited for a copy.",
            from_zero=True,
            marks=marks,
        ),
    ]
    return [chart for chart in charts if not chart.is_empty]


def position_chart(run: Run) -> Chart | None:
    """Return loss by position before and after training, or None without data."""
    series = []
    for when, name in WHEN.items():
        buckets = position_buckets(run.evals.get(when, {}))
        # The middle of a bucket, on a scale of powers of two.
        points = [(math.sqrt(max(b["start"], b["end"] / 4, 1) * b["end"]), b["loss"]) for b in buckets]
        errors = [b["standard_error"] for b in buckets]
        if points:
            series.append(Series(name=name, points=points, color=COLORS[when], errors=errors))
    return chart_by_length(
        "positions",
        "Loss by position",
        ("tokens before", "nats per token"),
        series,
        "A model that uses its context predicts late tokens better than early ones. Bars are standard errors.",
    )


def needle_chart(run: Run) -> Chart | None:
    """Return needles found by text length before and after training, or None if there is only one length."""
    series, chances = [], set()
    for when, name in WHEN.items():
        found = dictionary(run.evals.get(when, {}).get("needle"))
        rows = found.get("lengths")
        points = []
        for row in rows if isinstance(rows, list) else []:
            length, accuracy = (number(dictionary(row).get(key)) for key in ("length", "accuracy"))
            if length is not None and length >= 1 and accuracy is not None:
                points.append((length, min(max(accuracy, 0.0), 1.0)))
        if len(points) > 1:
            series.append(Series(name=name, points=sorted(points), color=COLORS[when]))
            chance = number(found.get("chance"))
            chances |= {chance} if chance is not None else set()
    return chart_by_length(
        "needles",
        "Needles found",
        ("tokens of text", "share of questions"),
        series,
        "How often the model recognizes the code in a hidden sentence among several candidates.",
        format_y=percent,
        from_zero=True,
        limits=[(chance, "chance") for chance in sorted(chances)],
    )


def chart_by_length(
    key: str, title: str, labels: tuple[str, str], series: list[Series], about: str, **options: Any
) -> Chart | None:
    """Return a chart over token counts on a log scale, or None if it would be empty."""
    x_label, y_label = labels
    chart = Chart(
        key=key,
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=series,
        about=about,
        format_x=short_tokens,
        log_x=True,
        **options,
    )
    return None if chart.is_empty else chart


def position_buckets(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the valid buckets of an `eval` event."""
    found = event.get("perplexity")
    buckets = found.get("buckets") if isinstance(found, dict) else None
    valid = []
    for bucket in buckets if isinstance(buckets, list) else []:
        if isinstance(bucket, dict):
            values = {name: number(bucket.get(name)) for name in ("start", "end", "count", "loss", "perplexity")}
            start, end = values["start"], values["end"]
            if start is not None and end is not None and 0 <= start < end and values["loss"] is not None:
                valid.append({**values, "standard_error": number(bucket.get("standard_error"))})
    return valid


def needle_cells(event: dict[str, Any]) -> dict[tuple[float, float], float]:
    """Return the accuracy by (length, depth) from an `eval` event."""
    found = event.get("needle")
    cells = found.get("cells") if isinstance(found, dict) else None
    valid = {}
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict):
            length, depth, accuracy = (number(cell.get(name)) for name in ("length", "depth", "accuracy"))
            if length is not None and depth is not None and accuracy is not None:
                valid[length, depth] = min(max(accuracy, 0.0), 1.0)
    return valid


def _one(run: Run, name: str, title: str, y_label: str, **options: Any) -> Chart:
    """Return the chart of a single field."""
    series = [Series(name=title.lower(), points=run.series(name))]
    return Chart(key=name, title=title, x_label=STEP, y_label=y_label, series=series, **options)


def _scaled(run: Run, name: str, unit: float, *, zeros: bool = True) -> list[tuple[float, float]]:
    """Return the values of a field in `unit`. Without `zeros`, return nothing if all are zero."""
    points = [(float(step), value / unit) for step, value in run.series(name)]
    return points if zeros or any(value != 0 for _, value in points) else []
