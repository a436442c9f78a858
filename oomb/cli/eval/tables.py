"""Format the results of an evaluation as terminal tables."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table


def position_table(found: dict[str, Any], title: str) -> Table:
    """Return loss and perplexity by position."""
    table = Table(title=escape(title), title_justify="left")
    for column in ("positions", "tokens", "loss, nats", "standard error", "perplexity"):
        table.add_column(column, justify="right")
    for bucket in found["buckets"]:
        error = bucket["standard_error"]
        table.add_row(
            f"{bucket['start']:,} to {bucket['end']:,}",
            f"{bucket['count']:,}",
            f"{bucket['loss']:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{bucket['perplexity']:,.2f}",
        )
    table.add_section()
    table.add_row("all", f"{found['count']:,}", f"{found['loss']:.4f}", "", f"{found['perplexity']:,.2f}")
    return table


def needle_table(found: dict[str, Any]) -> Table:
    """Return accuracy by length and depth ("at 10%" is near the beginning of the text), in at most 80 columns."""
    low, high = found["interval"]
    table = Table(
        title=f"needles found: {found['accuracy']:.0%} (95% interval {low:.0%} to {high:.0%})\n"
        f"chance {found['chance']:.0%}, control without needles {found['control_accuracy']:.0%}",
        title_justify="left",
    )
    depths = sorted({cell["depth"] for cell in found["cells"]})
    for column in ("tokens", *(f"at\n{depth:.0%}" for depth in depths), "all", "share", "exact", "gain,\nnats"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["lengths"]:
        cells = {cell["depth"]: cell for cell in found["cells"] if cell["length"] == row["length"]}
        table.add_row(
            f"{row['length']:,}",
            *(f"{cells[depth]['accuracy']:.0%}" for depth in depths),
            f"[bold]{row['accuracy']:.0%}[/]",
            f"{row['share']:.0%}",
            f"{row['exact']:.0%}",
            f"{row['gain']:+.2f}",
        )
    return table
