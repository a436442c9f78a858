"""Plot time and memory of a step over the context, from files of plan_check.py.

    python benchmarks/plan_check.py --cases lora-8bit --places host-brim --optimizer adamw \\
        --contexts 64K,128K,256K,512K,1M,2M --out benchmarks/results/curve_host.json       # about 12 minutes, H200
    python benchmarks/plan_check.py --cases lora-8bit --places brim --optimizer adamw \\
        --contexts 4M --out benchmarks/results/curve_brim.json                             # about 15 minutes
    python benchmarks/curve.py                  # or: curve.py FILE FILE ... --out PLOT

Prints a table and writes curve.png and its numbers in curve.json. Exit code 1 if GPU memory grows faster than the
target with all pages on the host. Growth counts from the context at which the staging buffers reach their full size,
which is the number of pages a chunk can select; growth below that context is reported separately.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from common import OUT, new_figure, save, save_figure, seconds, term_bytes
from rich.console import Console
from rich.table import Table

from oomb.utils.units import short_tokens

FILES = [OUT / "curve_host.json", OUT / "curve_brim.json"]
ASKED = 5.0
"""Target: at most this many MB of GPU memory per 10,000 tokens."""
OFFLOADED = ("host", "host-brim")
"""Places that keep no page on the GPU."""
STYLES = {
    "host-brim": ("all pages on the host", "tab:blue", "o"),
    "host": ("all pages on the host, within the default limit", "tab:green", "^"),
    "brim": ("as many pages on the GPU as fit, the rest on the host", "tab:orange", "s"),
    "gpu": ("all pages on the GPU", "tab:red", "D"),
}
"""Label, color and marker of each place."""
SETTLED = 0.95
"""Staging buffers have reached their full size at this fraction of the size at the longest context."""
KIND = ("model", "case", "optimizer", "layers")
"""What all points of a curve must share. `layers` is set by rehearsals only."""


def style(place: str) -> tuple[str, str | None, str]:
    return STYLES.get(place, (place, None, "x"))


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the measured rows of all files by place and context, each with its model and file."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        report = json.loads(path.read_text())
        for found in report["rows"]:
            if found["problem"] is not None:
                continue
            row = {"layers": None, **found, "model": report.get("model"), "file": path.name}
            other = rows.setdefault((row["place"], row["context"]), row)
            if other is not row:
                raise ValueError(
                    f"{row['place']} at {row['context']:,} tokens is in {other['file']} and in {row['file']}: pass "
                    "only one of them"
                )
    if not rows:
        raise ValueError(f"there is no measured step in {', '.join(map(str, paths))}")
    if len(ways := {row["place"] for row in rows.values() if row["place"] in OFFLOADED}) > 1:
        raise ValueError(
            f"the files put all pages on the host in {len(ways)} ways ({', '.join(sorted(ways))}): pass files of one"
        )
    kinds = {tuple(row[name] for name in KIND) for row in rows.values()}
    if len(kinds) > 1:
        raise ValueError(f"the files differ in {', '.join(KIND)}: {sorted(kinds, key=str)}")
    return sorted(rows.values(), key=lambda row: (row["place"] not in OFFLOADED, row["place"], row["context"]))


def offloaded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with all pages on the host, shortest context first."""
    return sorted((row for row in rows if row["place"] in OFFLOADED), key=lambda row: row["context"])


def settled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the offloaded rows that growth is counted from; see `SETTLED`. All of them if there are too few."""
    mine = offloaded(rows)
    staged = [term_bytes(row, "staging buffers") for row in mine]
    large = [row for row, num_bytes in zip(mine, staged, strict=True) if num_bytes >= SETTLED * staged[-1]]
    return large if len(large) > 1 else mine


def unsettled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the offloaded rows up to the first settled one."""
    mine, counted = offloaded(rows), settled(rows)
    return mine[: len(mine) - len(counted) + 1]


def growth(rows: list[dict[str, Any]]) -> float | None:
    """Return MB of GPU memory per 10,000 tokens, from the shortest of these contexts to the longest."""
    if len(rows) < 2:
        return None
    tokens = rows[-1]["context"] - rows[0]["context"]
    return (rows[-1]["measured_gpu_bytes"] - rows[0]["measured_gpu_bytes"]) / tokens * 10_000 / 1e6


def table(rows: list[dict[str, Any]]) -> Table:
    layers = rows[0]["layers"]
    shown = Table(title="one step by context" + ("" if layers is None else f", a rehearsal with {layers} layers"))
    for name in ("context", "pages", "time", "ms per 1,000 tokens", "optimizer", "GPU", "host"):
        shown.add_column(name, justify="left" if name == "pages" else "right")
    for row in rows:
        shown.add_row(
            f"{row['context']:,}",
            style(row["place"])[0],
            f"{seconds(row):.1f} s",
            f"{seconds(row) / row['context'] * 1e6:.1f}",
            "" if row["optimizer_seconds"] is None else f"{row['optimizer_seconds']:.2f} s",
            f"{row['measured_gpu_bytes'] / 2**30:.2f} GiB",
            f"{row['measured_host_bytes'] / 2**30:.2f} GiB",
        )
    return shown


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot time per token, GPU memory and host memory in three panels."""
    figure = new_figure(7, 8)
    panels = figure.subplots(3, 1, sharex=True)
    for place in dict.fromkeys(row["place"] for row in rows):
        mine = [row for row in rows if row["place"] == place]
        contexts = [row["context"] for row in mine]
        lines = (
            [seconds(row) / row["context"] * 1e6 for row in mine],
            [row["measured_gpu_bytes"] / 2**30 for row in mine],
            [row["measured_host_bytes"] / 2**30 for row in mine],
        )
        label, color, marker = style(place)
        for axes, values in zip(panels, lines, strict=True):
            axes.plot(contexts, values, marker=marker, color=color, label=label)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.12 * max(values)))
    for axes, name in zip(panels, ("ms per 1,000 tokens", "GPU memory, GiB", "host memory, GiB"), strict=True):
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    contexts = sorted({row["context"] for row in rows})
    panels[-1].set_xscale("log", base=2)
    panels[-1].set_xticks(contexts, [short_tokens(n) for n in contexts])
    panels[-1].set_xlabel("context, tokens")
    panels[0].legend(frameon=False, loc="lower right")
    save_figure(figure, path)


def record(rows: list[dict[str, Any]], paths: list[Path]) -> dict[str, Any]:
    """Return the plotted numbers."""
    counted = settled(rows)
    grown = growth(counted)
    return {
        **{name: rows[0][name] for name in KIND},
        "growth": {
            "mb_per_10_000_tokens": grown,
            "asked": ASKED,
            "is_met": None if grown is None else grown <= ASKED,
            "contexts": [row["context"] for row in counted],
            "before": {
                "mb_per_10_000_tokens": growth(unsettled(rows)),
                "contexts": [row["context"] for row in unsettled(rows)],
            },
        },
        "points": [
            {
                "context": row["context"],
                "place": row["place"],
                "seconds": seconds(row),
                "optimizer_seconds": row["optimizer_seconds"],
                "ms_per_1_000_tokens": seconds(row) / row["context"] * 1e6,
                "gpu_bytes": row["measured_gpu_bytes"],
                "host_bytes": row["measured_host_bytes"],
                "activation_bytes": term_bytes(row, "activations of a chunk"),
                "file": row["file"],
            }
            for row in rows
        ],
        "machines": {path.name: json.loads(path.read_text()).get("machine") for path in paths},
    }


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="Files written by plan_check.py.")] = None,
    out: Annotated[Path, typer.Option(help="The plot; its numbers go to .json.")] = OUT / "curve.png",
) -> None:
    console = Console(width=120)
    paths, numbers = files or FILES, out.with_suffix(".json")
    try:
        if numbers.resolve() in [path.resolve() for path in paths]:
            raise ValueError(f"{numbers} is one of the input files: pass another --out")
        rows = read(paths)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(table(rows))
    counted, before = settled(rows), unsettled(rows)
    grown, earlier = growth(counted), growth(before)
    if grown is not None:
        verdict = "met" if grown <= ASKED else "NOT MET"
        console.print(
            f"GPU memory per 10,000 tokens, all pages on the host, from {counted[0]['context']:,} to "
            f"{counted[-1]['context']:,} tokens: {grown:.2f} MB, target {ASKED}: {verdict}"
        )
    if earlier is not None:
        console.print(f"from {before[0]['context']:,} on, while staging buffers grow: {earlier:.2f} MB")
    plot(rows, out)
    save(record(rows, paths), numbers)
    console.print(f"written to {out} and {numbers}")
    raise typer.Exit(0 if grown is None or grown <= ASKED else 1)


if __name__ == "__main__":
    typer.run(main)
