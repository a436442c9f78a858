"""Render the sections of the page as HTML. A section without data is an empty string."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from oomb.cli.report.chart import Chart, plain, svg
from oomb.cli.report.charts import WHEN, needle_cells, needle_chart, position_buckets, position_chart
from oomb.cli.report.comparison import COLUMNS, conclusions, memory_meaning, read_rows, table_rows
from oomb.cli.report.comparison import charts as comparison_charts
from oomb.cli.report.events import Run, dictionary, number
from oomb.utils.units import gib, short_tokens

MAX_ROWS = 200
"""Rows in the table of steps; a longer run is sampled at equal distances."""

STEP_COLUMNS = {
    "loss": ("loss", plain),
    "learning_rate": ("learning rate", plain),
    "grad_norm": ("gradient norm", plain),
    "step_s": ("seconds", plain),
    "tokens_per_s": ("tokens/s", plain),
    "peak_memory_bytes": ("peak memory", gib),
    "gpu_page_bytes": ("pages", gib),
    "host_page_bytes": ("host pages", gib),
    "waited_s": ("stall, s", plain),
}


class Html(str):
    """Text that is already HTML and must not be escaped."""


def charts(drawn: Iterable[Chart]) -> str:
    """Return the charts in two columns."""
    figures = "\n".join(_figure(chart) for chart in drawn)
    return f'<div class="grid-of-two">\n{figures}\n</div>' if figures else ""


def _figure(chart: Chart) -> str:
    shown = [series for series in chart.series if series.shown]
    legend = "".join(
        f'<li class="c{series.color}{" is-dots" if series.dots else ""}">{escape(series.name)}</li>' for series in shown
    )
    parts = [f"<h3>{escape(chart.title)}</h3>"]
    if chart.about:
        parts.append(f'<p class="about">{escape(chart.about)}</p>')
    if len(shown) > 1:
        parts.append(f'<ul class="legend">{legend}</ul>')
    return f'<figure id="chart-{escape(chart.key)}">{"".join(parts)}{svg(chart)}</figure>'


def table(head: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]], *, caption: str = "", kind: str = "") -> str:
    """Return a table whose rows start with a name. A cell is text, or a whole <td> as `Html`."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(cell if isinstance(cell, Html) else f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    thead = f"<thead><tr>{columns}</tr></thead>" if columns else ""
    label = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{label}>{top}{thead}<tbody>{body}</tbody></table></div>'


def compared(run: Run) -> str:
    """Return the comparison of `oomb demo`: conclusions, table and charts."""
    rows = read_rows(run.comparison)
    if not rows:
        return ""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in conclusions(run.comparison))
    body = table(COLUMNS, ((head, cells) for head, *cells in table_rows(rows)), caption=memory_meaning(run.comparison))
    return f'{sentences}<div class="card spaced">{body}</div>{charts(comparison_charts(rows))}'


def tiers(run: Run) -> str:
    """Return the peak use of each memory tier against what was available."""
    device = "GPU" if run.on_gpu else "CPU"
    rows: list[tuple[str, list[str]]] = []
    for name, field, limit in (
        ("peak GPU memory" if run.on_gpu else "process (RSS)", "peak_memory_bytes",
         run.memory("gpu" if run.on_gpu else "host")),
        (f"pages on the {device}", "gpu_page_bytes", run.budget("gpu")),
        ("pages on the host", "host_page_bytes", run.budget("host")),
    ):  # fmt: skip
        values = [value for _, value in run.series(field) if number(value) is not None]
        if not values or (field == "host_page_bytes" and not max(values)):
            continue
        used = max(values)
        if limit is None:
            rows.append((name, [gib(used), ""]))
            continue
        share = used / limit[0] if limit[0] else 1.0
        bar = f'<div><div style="--share:{min(max(share, 0.0), 1.0):.4f}"></div></div>'
        of = f"<td>{gib(used)}<small>of {gib(limit[0])}, {escape(limit[1])}</small></td>"
        rows.append((name, [Html(of), Html(f'<td class="bar">{share:.1%}{bar}</td>')]))
    head = ("memory", "peak", "share of the available memory")
    return f'<div class="card">{table(head, rows)}</div>' if rows else ""


def evaluation(run: Run) -> str:
    """Return charts and tables of perplexity and needles."""
    parts = [_figure(chart) for chart in (position_chart(run), needle_chart(run)) if chart is not None]
    positions = _position_table(run)
    card = [f'<div class="card"><h3>Perplexity by position</h3>{positions}</div>'] if positions else []
    needles = [_needles(when, run.evals[when]) for when in WHEN if needle_cells(run.evals.get(when, {}))]
    # Two columns: "before" next to "after", and the long table where it leaves no gap.
    parts += needles + card if len(parts) == 2 else card + needles
    return f'<div class="grid-of-two top">{"".join(parts)}</div>' if parts else ""


def _position_table(run: Run) -> str:
    found = {
        when: {(bucket["start"], bucket["end"]): bucket for bucket in position_buckets(run.evals[when])}
        for when in WHEN
        if when in run.evals
    }
    spans = sorted({span for buckets in found.values() for span in buckets})
    rows = []
    for start, end in spans:
        cells = []
        for buckets in found.values():
            bucket = buckets.get((start, end))
            if bucket is None:
                cells.append("")
                continue
            error = bucket["standard_error"]
            loss = f"{bucket['loss']:.3f}" if error is None else f"{bucket['loss']:.3f} ± {error:.3f}"
            high = "" if bucket["perplexity"] is None else f"{bucket['perplexity']:,.2f}"
            cells.append(Html(f"<td>{high}<small>{loss}</small></td>"))
        rows.append((f"{short_tokens(start)} to {short_tokens(end)}", cells))
    head = ("positions", *(WHEN[when] for when in found))
    return table(head, rows, caption="perplexity, and below it the loss in nats ± its standard error") if rows else ""


def _needles(when: str, event: dict[str, Any]) -> str:
    cells, found = needle_cells(event), dictionary(event.get("needle"))
    lengths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
    rows = []
    for length in lengths:
        row = [cells.get((length, depth)) for depth in depths]
        heat = (
            Html("<td></td>" if v is None else f'<td class="heat" style="--share:{v:.4f}">{v:.0%}</td>') for v in row
        )
        rows.append((f"{short_tokens(length)} tokens", list(heat)))
    figures = []
    for name, template in (
        ("accuracy", "found {:.0%}"),
        ("chance", "chance {:.0%}"),
        ("control_accuracy", "without needles {:.0%}"),
        ("share", "share of the right code {:.0%}"),
        ("exact", "written exactly {:.0%}"),
        ("gain", "gain {:+.2f} nats per answer"),
    ):
        if (value := number(found.get(name))) is not None:
            figures.append(template.format(value))
    head = ("depth", *(f"{depth:.0%}" for depth in depths))
    body = table(head, rows, caption=", ".join(figures))
    return f'<div class="card"><h3>Needles found {WHEN[when]}</h3>{body}</div>'


def samples(run: Run) -> str:
    """Return the text samples from before and after training, side by side."""
    cards = []
    for when, name in WHEN.items():
        sample = run.samples.get(when)
        if sample is None or not isinstance(sample.get("text"), str):
            continue
        prompt = sample.get("prompt") if isinstance(sample.get("prompt"), str) else ""
        written = f'<span class="prompt">{_printable(str(prompt))}</span>{_printable(sample["text"])}'
        cards.append(f'<div class="card"><h3>{escape(name.capitalize())}</h3><pre tabindex="0">{written}</pre></div>')
    if not cards:
        return ""
    about = '<p class="about">The prompt is gray; the model wrote the rest.</p>'
    return f'{about}<div class="grid-of-two">{"".join(cards)}</div>'


def _printable(text: str) -> str:
    """Escape text and replace control characters: untrained models produce bytes that HTML does not allow."""
    return escape("".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text))


def settings(run: Run) -> str:
    """Return settings, machine and versions of the last start."""
    chosen = {key: value for key, value in run.settings.items() if key != "engine"}
    machine = {key: value for key, value in run.machine.items() if not isinstance(value, dict)}
    gpu = {f"gpu {key}": value for key, value in dictionary(run.machine.get("gpu")).items()}
    machine = {key: value for key, value in {**gpu, **machine}.items() if value is not None}
    cards = []
    for title, values in (
        ("Settings", chosen),
        ("Engine", run.engine),
        ("Machine", machine),
        ("Versions", dictionary(run.machine.get("versions"))),
    ):
        if values:
            rows = [(str(key), [_setting_text(value)]) for key, value in values.items()]
            cards.append(f'<div class="card"><h3>{title}</h3>{table((), rows, kind="words")}</div>')
    return f'<div class="grid-of-two">{"".join(cards)}</div>' if cards else ""


def _setting_text(value: Any) -> str:
    if value is None:
        return "not set"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def steps(run: Run) -> str:
    """Return the table of steps, collapsed."""
    if not run.steps:
        return ""
    columns = {key: STEP_COLUMNS[key] for key in STEP_COLUMNS if run.series(key)}
    every = -(-len(run.steps) // MAX_ROWS)
    chosen = [step for i, step in enumerate(run.steps) if i % every == 0 or i == len(run.steps) - 1]
    rows = []
    for step in chosen:
        values = ((number(step.get(key), finite=False), form) for key, (_, form) in columns.items())
        rows.append((f"{step['step']:,}", ["" if value is None else form(value) for value, form in values]))
    head = ("step", *(name for name, _ in columns.values()))
    what = "All steps" if every == 1 else f"{len(chosen):,} of {len(run.steps):,} steps"
    return f'<details class="card"><summary>{what} as a table</summary>{table(head, rows)}</details>'
