"""Describe charts as data and draw them as SVG, in the colors and the width of the page around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 34, 46
"""Margins around the plot, in units of the view box. A unit is about 0.7 pixels on a phone, hence text of 14 units."""

MAX_POINTS = 1000
"""Points in a path. A longer series is drawn as the lowest and highest point of each interval."""
MAX_TOOLTIPS = 200
"""Points that show their value when the pointer is over them."""
MAX_DOTS = 24
"""Points that are also drawn as dots. Without its dot, a series of one point would be invisible."""
MAX_VALUE = 1e15
"""A larger value means that the run diverged; it is left out, as NaN is."""

Format = Callable[[float], str]


def plain(value: float) -> str:
    """Format a number with up to four digits.

    >>> plain(1234.5), plain(0.5), plain(1.5e-4)
    ('1,234', '0.5', '1.5e-4')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    # Not .3g: it would print 1.5e-4 as 0.00015, too wide for an axis.
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.3g}%"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 1
    """A color of the page, 1 to 4."""
    dots: bool = False
    """Draw dots without a line, for sparse values."""
    errors: Sequence[float | None] = ()
    """Half the height of the error bar at each point, or None."""

    @property
    def shown(self) -> list[tuple[float, float]]:
        return [point for point in self.points if _is_valid(point[1])]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of one or more series over a common x axis."""

    key: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    about: str = ""
    """A sentence that explains the chart."""
    format_x: Format = plain
    format_y: Format = plain
    log_x: bool = False
    """Put powers of two at equal distances."""
    from_zero: bool = False
    whole_x: bool = True
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines with their names, drawn unless they would flatten the data."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines with their names."""
    points: list[tuple[float, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.points.extend(point for series in self.series for point in series.shown)

    @property
    def is_empty(self) -> bool:
        return not self.points

    @property
    def drawn_limits(self) -> list[tuple[float, str]]:
        highest = max((abs(y) for _, y in self.points), default=0.0)
        return [(value, name) for value, name in self.limits if 0 < value <= 2.5 * highest]

    def summary(self) -> str:
        """Describe the chart in words, for screen readers."""
        words = []
        for series in self.series:
            if series.shown:
                (first, start), (last, end) = series.shown[0], series.shown[-1]
                low, high = (f(y for _, y in series.shown) for f in (min, max))
                words.append(
                    f"{series.name}: {self.format_y(start)} at {self.format_x(first)}, {self.format_y(end)} at "
                    f"{self.format_x(last)}, between {self.format_y(low)} and {self.format_y(high)}"
                )
        return f"{self.title}, {self.y_label} by {self.x_label}. " + "; ".join(words)


def svg(chart: Chart) -> str:
    """Return the chart, which must not be empty, as an SVG element."""
    x, x_ticks = _x_axis(chart)
    y, y_ticks = _y_axis(chart)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.summary())}">']
    for value in y_ticks:
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 7, at + 4.5, chart.format_y(value), "end"))
    for value in x_ticks:
        at = x(value)
        parts.append(f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_text(at, bottom + 19, chart.format_x(value), "middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    if chart.y_label:
        parts.append(_text(4, 16, chart.y_label, "start", "name"))
    parts.append(_text((LEFT + right) / 2, bottom + 38, chart.x_label, "middle", "name"))
    for value, name in chart.drawn_limits:
        at = y(value)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(right, at - 4, name, "end", "name"))
    for value, name in chart.marks:
        at = x(value)
        if LEFT <= at <= right:
            parts.append(
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}">'
                f"<title>{escape(name)}</title></line>"
            )
    parts += [_draw(series, chart, x, y) for series in chart.series if series.shown]
    return "".join(parts) + "</svg>"


def _draw(series: Series, chart: Chart, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the path, broken at missing values, with error bars, dots and tooltips."""
    segments: list[list[tuple[float, float]]] = [[]]
    for point in thin(series.points):
        if _is_valid(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    path = "".join(
        f"{'L' if i else 'M'}{x(px):.1f} {y(py):.1f}" for segment in segments for i, (px, py) in enumerate(segment)
    )
    name = escape(series.name)
    kind = "dots" if series.dots else "line"
    parts = [f'<g class="series c{series.color}"><path class="{kind}" data-name="{name}" d="{path}"/>']
    for (px, py), error in zip(series.points, series.errors):
        if error is not None and _is_valid(py) and _is_valid(error):
            at, top, end = x(px), y(py + error), y(py - error)
            parts.append(f'<line class="error" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{end:.1f}"/>')
    shown = series.shown
    visible = series.dots or len(shown) <= MAX_DOTS
    # A single value between two gaps needs a dot too.
    alone = {segment[0] for segment in segments if len(segment) == 1}
    for px, py in shown if len(shown) <= MAX_TOOLTIPS or visible else sorted(alone):
        words = f"{series.name}, {chart.x_label} {chart.format_x(px)}: {chart.format_y(py)}"
        dot = 'class="dot" r="3.5"' if visible or (px, py) in alone else 'class="hint" r="7"'
        parts.append(f'<circle {dot} cx="{x(px):.1f}" cy="{y(py):.1f}"><title>{escape(words)}</title></circle>')
    return "".join(parts) + "</g>"


def thin(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return about `max_points` points that look the same: the lowest and the highest of each interval."""
    if len(points) <= max_points:
        return list(points)
    kept: list[tuple[float, float]] = []
    size = math.ceil(len(points) / (max_points // 2))
    for start in range(0, len(points), size):
        interval = [i for i in range(start, min(start + size, len(points))) if _is_valid(points[i][1])]
        if not interval:
            kept.append(points[start])
            continue
        low, high = (pick(interval, key=lambda i: points[i][1]) for pick in (min, max))
        kept += [points[i] for i in sorted({low, high})]
    # Keep both ends of the curve.
    return [points[0], *kept[kept[0] == points[0] :], *([] if kept[-1] == points[-1] else [points[-1]])]


def _is_valid(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_VALUE


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _x_axis(chart: Chart) -> tuple[Callable[[float], float], list[float]]:
    values = [x for x, _ in chart.points]
    low, high = min(values), max(values)
    start, end = LEFT + 6, WIDTH - RIGHT - 6
    if chart.log_x:
        low = max(low, 1.0)
        high = max(high, 2 * low)
        first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
        # At most six labels fit side by side.
        powers = range(first, last + 1, max(1, -(-(last - first + 1) // 6)))
        scale = (end - start) / math.log2(high / low)
        return lambda x: start + scale * math.log2(max(x, low) / low), [2.0**power for power in powers]
    ticks = [low]
    if low == high:
        around = max(0.5, 1e-9 * abs(low))
        low, high = low - around, high + around
    else:
        ticks = nice_ticks(low, high, 6, whole=chart.whole_x)
    scale = (end - start) / (high - low)
    return lambda x: start + scale * (x - low), [tick for tick in ticks if low <= tick <= high]


def _y_axis(chart: Chart) -> tuple[Callable[[float], float], list[float]]:
    values = [y for _, y in chart.points] + [value for value, _ in chart.drawn_limits]
    for series in chart.series:
        bars = [(y, error) for (_, y), error in zip(series.points, series.errors) if error is not None]
        values += [y + sign * error for y, error in bars for sign in (-1, 1) if _is_valid(y) and _is_valid(error)]
    low, high = min(values), max(values)
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-30):
        around = size / 2 if size > 1e-30 else 1.0
        low, high = low - around * (not chart.from_zero), high + around
    ticks = nice_ticks(low, high, 5)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    scale = (HEIGHT - BOTTOM - TOP) / (high - low)
    return lambda y: HEIGHT - BOTTOM - scale * (y - low), ticks


def nice_ticks(low: float, high: float, num_ticks: int, *, whole: bool = False) -> list[float]:
    """Return about `num_ticks` multiples of 1, 2 or 5 times a power of ten that span [low, high].

    >>> nice_ticks(2.6, 5.6, 5)
    [2.0, 3.0, 4.0, 5.0, 6.0]
    """
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]
