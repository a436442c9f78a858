"""Draw the main charts of a run as one picture, for a README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomb.cli.plotting import check_picture
from oomb.cli.report.chart import Chart
from oomb.cli.report.charts import needle_chart, position_chart, training_charts
from oomb.cli.report.page import load

COLORS = {1: "#0b6bb8", 2: "#c8500a", 3: "#15803d", 4: "#8b3fb0"}
MAIN = ("loss", "positions", "needles", "memory", "tokens_per_s")
MAX_CHARTS = 4
"""The picture has the first four charts of MAIN that have data."""


def write_picture(
    run_dir: str | Path, path: str | Path, *, before: str | Path | None = None, after: str | Path | None = None
) -> Path:
    """Draw loss, loss by position, needles found and memory of a run into a file; throughput if one is missing.

    Raises:
        ValueError: The file is not a picture, matplotlib is not installed, or the run has no data yet.
    """
    check_picture(path, "--png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run, path = load(run_dir, before=before, after=after), Path(path).expanduser()
    evaluated = (position_chart(run), needle_chart(run))
    found = {chart.key: chart for chart in (*training_charts(run), *evaluated) if chart is not None}
    charts = [found[key] for key in MAIN if key in found][:MAX_CHARTS]
    if not charts:
        raise ValueError(f"{run_dir} has no finished step yet: nothing to draw")
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.4 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for index, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, columns, index + 1), chart)
    figure.suptitle(f"{run.settings.get('model_name_or_path', '?')} on {run.settings.get('dataset', '?')}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Any, chart: Chart) -> None:
    shown = [series for series in chart.series if series.shown]
    for series in shown:
        errors = list(series.errors) or [None] * len(series.points)
        bars = [error or 0.0 for point, error in zip(series.points, errors) if point in series.shown]
        xs, ys = zip(*series.shown)
        style = {"marker": "o", "linestyle": "none"} if series.dots else {"marker": "." if len(xs) < 40 else ""}
        axes.errorbar(xs, ys, yerr=bars if any(bars) else None, color=COLORS[series.color], label=series.name, **style)
    for value, name in chart.drawn_limits:
        axes.axhline(value, color="black", linestyle="--", linewidth=1, label=name)
    for at, _ in chart.marks:
        axes.axvline(at, color="gray", linestyle=":", linewidth=1)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: chart.format_x(x))
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    if len(shown) + len(chart.drawn_limits) > 1:
        axes.legend(fontsize="small", frameon=False)
