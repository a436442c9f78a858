"""Progress for work on a terminal and for plain output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

PLAIN_INTERVAL_S = 30.0
"""Between two plain lines, where the output is no terminal. Steps of a million tokens take minutes, and silence looks
like a crash."""


@contextmanager
def bytes_bar(
    console: Console, doing: str, done_so_far: str, *, transient: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and the total. It draws a bar on a terminal; elsewhere it prints a
    line now and then. Nothing is shown before the first call. A `transient` bar goes away at the end."""
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last > PLAIN_INTERVAL_S:
                last = time.monotonic()
                share = done / max(total, 1)
                console.print(f"{done_so_far} {share:.0%} of {total / 2**20:,.0f} MiB", highlight=False)

        yield line
        return
    with Progress(
        TextColumn(doing),
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]left"),
        console=console,
        transient=transient,
    ) as bar:
        task = bar.add_task(doing, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
