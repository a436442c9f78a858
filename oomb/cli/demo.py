"""Define `oomb demo`: train the built-in example, then compare it with standard training on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from oomb.cli.errors import EXIT_NOT_TRUSTED, one_clear_message, quiet, warnings_as_lines
from oomb.cli.options import DATA, checked, train_options, with_options
from oomb.cli.report.comparison import COLUMNS, conclusions, memory_meaning, read_rows, table_rows
from oomb.cli.report.events import COMPARISON
from oomb.utils.units import gib, parse_list, parse_tokens, seconds, short_tokens

if TYPE_CHECKING:
    from oomb.cli.train.settings import TrainSettings
    from oomb.eval.comparison import Measurement

CONTEXTS = "2K,4K,8K,16K"
TIMES = (" and takes about 5 minutes on two CPU cores", " (3 minutes)", " (2 minutes)")
"""Durations of the demo and of its parts, with default settings."""


@with_options("train", train_options("output_dir", "max_length", "max_steps", "device"))
def demo(
    contexts: Annotated[
        str, typer.Option("--contexts", help="Contexts to compare at, in tokens.", rich_help_panel=DATA)
    ] = CONTEXTS,
    chunk_size: Annotated[
        str, typer.Option("--chunk_size", help="Tokens per chunk in the comparison.", rich_help_panel=DATA)
    ] = "1024",
    *,
    train: dict[str, Any],
) -> None:
    """Train the built-in example, then compare a step of oomb with standard training: time, memory, gradients.

    [bold]oomb demo[/] takes a few minutes on two CPU cores and needs no download.

    First it runs [bold]oomb train[/] with default settings: a small byte-level model, from scratch, on the source of
    Python's standard library, at a 16K-token context. Then it measures one training step of that model with standard
    training (checkpointed layers, the fastest attention in PyTorch) and with oomb, at each context, each measurement in
    its own process. A context that would not fit in memory is skipped, and the table says why.

    The results go to OUTPUT_DIR/comparison.json, and the table and a chart into OUTPUT_DIR/report.html. For your own
    model use [bold]oomb bench[/] (time and memory) and [bold]oomb verify[/] (gradients).
    """
    with one_clear_message():
        lengths = sorted(set(parse_list(contexts, parse_tokens)))
        if lengths[0] < 2:
            raise ValueError(f"--contexts is {contexts!r}; each context must be 2 tokens or more")
        chunk = parse_tokens(chunk_size, "--chunk_size")
        quiet()
        from oomb.cli.report.page import write_report
        from oomb.cli.train.output_dir import MODEL, output_dir_of
        from oomb.cli.train.run import run
        from oomb.cli.train.settings import TrainSettings
        from oomb.eval.comparison import compare_steps

        settings = TrainSettings(**checked(train))
        settings = replace(settings, output_dir=str(output_dir_of(settings)))
        run_dir = Path(str(settings.output_dir))
        console = Console()
        _announce(console, settings, lengths, run_dir)
        console.print("[bold]Part 1: training[/]", highlight=False)
        with warnings_as_lines(console):
            code = run(settings, console)
    if code:
        raise typer.Exit(code)
    with one_clear_message():
        console.print("\n[bold]Part 2: comparing[/]", highlight=False)
        with _progress(console) as (on_progress, on_result):
            found = compare_steps(
                str(run_dir / MODEL),
                lengths,
                chunk_size=chunk,
                device=settings.device,
                on_progress=on_progress,
                on_result=on_result,
            )
        path = found.save(run_dir / COMPARISON)
        page = write_report(run_dir)
        comparison = asdict(found)
        console.print()
        console.print(table(comparison))
        console.print(memory_meaning(comparison), style="dim", highlight=False, soft_wrap=True)
        for line in (*conclusions(comparison), f"The table as JSON: {path}", f"The report page: {page}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not found.is_right:
        raise typer.Exit(EXIT_NOT_TRUSTED)


def _announce(console: Console, settings: TrainSettings, lengths: list[int], run_dir: Path) -> None:
    is_default = settings.max_steps is None and max(lengths) <= 1 << 14 and settings.max_length <= 1 << 14
    total, training, comparing = TIMES if is_default else ("", "", "")
    for line in (
        f"This demo has two parts{total}.",
        f"1. Train a small model from scratch at {settings.max_length:,} tokens of context{training}.",
        f"2. Compare one training step of oomb with standard training at {_names(lengths)} tokens: time, peak",
        f"   memory and gradients{comparing}.",
        f"Everything goes to {run_dir}. Ctrl-C stops the demo.\n",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _names(lengths: list[int]) -> str:
    names = [short_tokens(length) for length in lengths]
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


@contextmanager
def _progress(
    console: Console,
) -> Iterator[tuple[Callable[[str, int, int, int], None] | None, Callable[[str, int, Measurement], None]]]:
    """Yield functions that show the progress and the result of each measurement: a bar on a terminal, else a line."""
    if not console.is_terminal:
        yield (
            None,
            lambda mode, context, found: console.print(
                f"{mode} at {context:,} tokens: {_result(found)}", highlight=False, markup=False, soft_wrap=True
            ),
        )
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[result]}"),
        console=console,
    )
    tasks: dict[tuple[str, int], TaskID] = {}

    def task(mode: str, context: int) -> TaskID:
        if (mode, context) not in tasks:
            name = f"{mode} at {short_tokens(context)} tokens"
            tasks[mode, context] = bar.add_task(f"{name:<26}", total=None, result="[dim]starting")
        return tasks[mode, context]

    def on_progress(mode: str, context: int, done: int, total: int) -> None:
        shown = task(mode, context)
        if total:
            bar.update(shown, completed=done, total=total, result="")

    def on_result(mode: str, context: int, found: Measurement) -> None:
        bar.update(task(mode, context), completed=1, total=1, result=escape(_result(found)))
        bar.stop_task(task(mode, context))

    with bar:
        yield on_progress, on_result


def _result(found: Measurement) -> str:
    if found.problem is not None:
        return found.problem
    return f"{seconds(found.seconds or 0.0)}, {gib(found.peak_bytes or 0)}"


def table(comparison: dict[str, Any]) -> Table:
    """Return the comparison as a table, one row per context; the report page shows the same cells."""
    shown = Table(title="One training step on this machine", title_justify="left")
    for name in COLUMNS:
        shown.add_column(name, justify="right")
    for cells in table_rows(read_rows(comparison)):
        shown.add_row(*map(escape, cells))
    return shown
