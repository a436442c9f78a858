"""Time and memory of a step over the context, from files that plan_check.py wrote: a table, a picture, and a JSON of
what they show beside it.

    python benchmarks/plan_check.py --cases lora-8bit --places host-brim --optimizer adamw \\
        --contexts 64K,128K,256K,512K,1M,2M --out benchmarks/results/curve_host.json       # about 12 minutes, H200
    python benchmarks/plan_check.py --cases lora-8bit --places brim --optimizer adamw \\
        --contexts 4M --out benchmarks/results/curve_brim.json                             # about 15 minutes
    python benchmarks/curve.py                  # or: curve.py FILE FILE ... --out PICTURE

Exit code 1 if GPU memory grows by more than was asked for where all pages lie on the host. Counted from where the
staging buffers have reached their size: they hold as many pages as a chunk can choose, or all there are if those are
fewer. What it is up to there is said beside it.
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
"""MB of GPU memory per 10,000 tokens, at the most."""
OFFLOADED = ("host", "host-brim")
"""Places where no page is on the GPU."""
STYLES = {
    "host-brim": ("all pages on the host", "tab:blue", "o"),
    "host": ("all pages on the host, as many as the plan allows", "tab:green", "^"),
    "brim": ("as many on the GPU as fit, the rest on the host", "tab:orange", "s"),
    "gpu": ("all pages on the GPU", "tab:red", "D"),
}
"""By place: what it is called, its colour and its marker."""
SETTLED = 0.95
"""Staging buffers of so much of those at the longest context have reached their size."""
KIND = ("model", "case", "optimizer", "layers")
"""What all points of a curve have in common. `layers`: of a rehearsal."""


def style(place: str) -> tuple[str, str | None, str]:
    return STYLES.get(place, (place, None, "x"))


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Rows of all files, those that were measured, by place and context; each says which model and file it is of."""
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
                    f"{row['place']} at {row['context']:,} tokens is in {other['file']} and in {row['file']}; name the "
                    "files whose points are meant"
                )
    if not rows:
        raise ValueError(f"no step was measured in {', '.join(map(str, paths))}; no curve")
    if len(ways := {row["place"] for row in rows.values() if row["place"] in OFFLOADED}) > 1:
        raise ValueError(
            f"all pages are on the host in {len(ways)} ways ({', '.join(sorted(ways))}), which is no curve"
        )
    kinds = {tuple(row[name] for name in KIND) for row in rows.values()}
    if len(kinds) > 1:
        raise ValueError(f"these files are of different steps ({', '.join(KIND)}), no curve: {sorted(kinds, key=str)}")
    return sorted(rows.values(), key=lambda row: (row["place"] not in OFFLOADED, row["place"], row["context"]))


def offloaded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with all pages on the host, the shortest context first."""
    return sorted((row for row in rows if row["place"] in OFFLOADED), key=lambda row: row["context"])


def settled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of them from which growth is counted: their staging buffers are nearly as large as at the longest context.
    All, if there would be too few."""
    mine = offloaded(rows)
    staged = [term_bytes(row, "staging buffers") for row in mine]
    large = [row for row, num_bytes in zip(mine, staged, strict=True) if num_bytes >= SETTLED * staged[-1]]
    return large if len(large) > 1 else mine


def unsettled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those up to there, its first among them."""
    mine, counted = offloaded(rows), settled(rows)
    return mine[: len(mine) - len(counted) + 1]


def growth(rows: list[dict[str, Any]]) -> float | None:
    """MB of GPU memory per 10,000 tokens, from the shortest of these contexts to the longest."""
    if len(rows) < 2:
        return None
    tokens = rows[-1]["context"] - rows[0]["context"]
    return (rows[-1]["measured_gpu_bytes"] - rows[0]["measured_gpu_bytes"]) / tokens * 10_000 / 1e6


def table(rows: list[dict[str, Any]]) -> Table:
    layers = rows[0]["layers"]
    shown = Table(title="a step over the context" + ("" if layers is None else f", a rehearsal with {layers} layers"))
    for name in ("context", "pages", "time", "ms per 1,000 tokens", "of it optimizer", "GPU", "host"):
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
    """Time per token, GPU memory and host memory, one below the other."""
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
    panels[-1].set_xlabel("tokens of context")
    panels[0].legend(frameon=False, loc="lower right")
    save_figure(figure, path)


def record(rows: list[dict[str, Any]], paths: list[Path]) -> dict[str, Any]:
    """What is drawn, in numbers."""
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
    files: Annotated[list[Path] | None, typer.Argument(help="What plan_check.py wrote.")] = None,
    out: Annotated[Path, typer.Option(help="The picture; its numbers go beside it, in .json.")] = OUT / "curve.png",
) -> None:
    console = Console(width=120)
    paths, numbers = files or FILES, out.with_suffix(".json")
    try:
        if numbers.resolve() in [path.resolve() for path in paths]:
            raise ValueError(f"{numbers} is one of the files that are read; name another picture with --out")
        rows = read(paths)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print(table(rows))
    counted, before = settled(rows), unsettled(rows)
    grown, sooner = growth(counted), growth(before)
    if grown is not None:
        verdict = "met" if grown <= ASKED else "NOT MET"
        console.print(
            f"GPU memory per 10,000 tokens, all pages on the host, from {counted[0]['context']:,} to "
            f"{counted[-1]['context']:,} tokens: {grown:.2f} MB, asked for {ASKED}: {verdict}"
        )
    if sooner is not None:
        console.print(f"from {before[0]['context']:,} on, while staging buffers grow: {sooner:.2f} MB")
    plot(rows, out)
    save(record(rows, paths), numbers)
    console.print(f"drawn in {out}, in numbers in {numbers}")
    raise typer.Exit(0 if grown is None or grown <= ASKED else 1)


if __name__ == "__main__":
    typer.run(main)
