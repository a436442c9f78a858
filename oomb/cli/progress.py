"""Show progress as a bar on a terminal, and as an occasional line in plain output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from oomb.utils.units import gib

PLAIN_INTERVAL_S = 30.0
"""Seconds between progress lines in plain output. A step of a million tokens takes minutes, and silence looks like a
crash."""


class PlainTimer:
    """Timer that says when plain output is due for another progress line."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start a new interval. Call it after every line that is printed."""
        self._last = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._last > PLAIN_INTERVAL_S


@contextmanager
def bytes_bar(
    console: Console, doing: str, done_so_far: str, *, transient: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and the total, and shows progress from its first call on.

    Args:
        doing: Label of the bar, as in "tokenizing".
        done_so_far: The same as a participle, for plain lines: "tokenized 25% of 4 MiB".
        transient: Remove the bar at the end.
    """
    if not console.is_terminal:
        timer = PlainTimer()

        def line(done: int, total: int) -> None:
            if timer.is_due:
                timer.restart()
                console.print(f"{done_so_far} {done / max(total, 1):.0%} of {gib(total)}", highlight=False)

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
