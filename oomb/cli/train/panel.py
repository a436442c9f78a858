"""Draw the live panel of a run at the bottom of a terminal of any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.live_render import LiveRender
from rich.panel import Panel
from rich.segment import ControlType
from rich.text import Text

from oomb.utils.units import gib, seconds

LABEL_SIZE = 7
SHORTEST_BAR, LONGEST_BAR = 8, 40
NUM_LOSSES = 24
"""Losses in the sparkline."""
WIDEST = 120
"""Columns of the panel at most: longer lines are hard to read."""
MARGIN = 4
"""Free columns on the right. The terminal echoes ^C at the cursor, which is at the end of the panel. In the last column
the echo would start a new line, and the next frame would be drawn one line too low."""
LEVELS, BAR = "▁▂▃▄▅▆▇█", ("━", "─")
PLAIN_LEVELS, PLAIN_BAR = "_.-=*#", ("#", "-")
"""For terminals without Unicode."""


@dataclass
class PanelState:
    """Values that the panel shows. None or empty: not known yet, or not applicable."""

    title: str = ""
    doing: str = "step"
    """"step", or the name of the evaluation."""
    step: int = 0
    """Completed steps."""
    max_steps: int = 0
    phase: str = ""
    chunk: int = 0
    num_chunks: int = 0
    batch: int = 1
    """The current batch, of those in a step or an evaluation."""
    num_batches: int = 1
    pass_done: float = 0.0
    """Share of the current pass."""
    done: float = 0.0
    """Share of the step or evaluation."""
    left_s: float | None = None
    """Seconds left of the step or evaluation."""
    run_elapsed_s: float = 0.0
    run_left_s: float | None = None
    losses: list[float] = field(default_factory=list)
    held_out: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    step_s: float | None = None
    memory: list[tuple[str, int, int | None]] = field(default_factory=list)
    """(tier, bytes used, total bytes)"""
    waited_s: float = 0.0
    rank_wait: str | None = None


def lines_of(view: PanelState, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return the panel's lines, none wider than `width`. Items that do not fit on a line start a new one."""
    left = None if view.left_s is None else f"{seconds(view.left_s)} left"
    lines = []
    if view.doing == "step":
        step_left = None if left is None else f"step {left}"
        run_left = None if view.run_left_s is None else f"run {seconds(view.run_left_s)} left"
        share = (view.step + min(view.done, 1.0)) / max(view.max_steps, 1)
        shown = f"{min(view.step + 1, view.max_steps)}/{view.max_steps}"
        lines += _with_bar("step", shown, share, [f"{share:.0%}", run_left], width, ascii_only)
    else:
        step_left = None
        lines += _with_bar(view.doing, "", view.done, [f"{view.done:.0%}", left], width, ascii_only)
    if view.phase:
        chunk = f"{view.phase}, chunk {view.chunk}/{view.num_chunks}"
        batch = f"batch {view.batch}/{view.num_batches}" if view.num_batches > 1 else None
        lines += _with_bar("pass", chunk, view.pass_done, [batch, step_left], width, ascii_only)
    lines += _flow("loss", [*_loss(view, ascii_only)], width)
    lines += _flow("speed", [*_speed(view)], width)
    lines += _flow("memory", [f"{name} {_of(used, limit)}" for name, used, limit in view.memory], width)
    return lines


def _loss(view: PanelState, ascii_only: bool) -> list[str]:
    items = []
    if view.losses:
        items.append(f"{view.losses[-1]:.4f}")
        items.append(sparkline(view.losses[-NUM_LOSSES:], PLAIN_LEVELS if ascii_only else LEVELS))
    if view.held_out is not None:
        items.append(f"held out {view.held_out:.4f}")
    if view.grad_norm is not None:
        items.append(f"gradient norm {view.grad_norm:.3g}")
    if view.learning_rate is not None:
        items.append(f"lr {view.learning_rate:.2e}")
    return items


def _speed(view: PanelState) -> list[str]:
    items = []
    if view.tokens_per_s is not None:
        items.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.mfu is not None:
        items.append(f"MFU {view.mfu:.1%}")
    if view.step_s is not None:
        items.append(f"last step {seconds(view.step_s)}")
    if view.waited_s:
        items.append(f"waited {seconds(view.waited_s)}")
    if view.rank_wait:
        items.append(view.rank_wait)
    items.append(f"running {seconds(view.run_elapsed_s)}")
    return items


def _of(used: int, limit: int | None) -> str:
    if limit is None:
        return gib(used)
    number, unit = gib(used).split()
    total, total_unit = gib(limit).split()
    return f"{number} of {total} {unit}" if unit == total_unit else f"{number} {unit} of {total} {total_unit}"


def sparkline(values: Sequence[float], levels: str = LEVELS) -> str:
    """Return a curve as one line of text, with gaps for NaN and infinity.

    >>> sparkline([3.0, 2.0, 1.0], PLAIN_LEVELS)
    '#-_'
    """
    known = [value for value in values if value - value == 0]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    span = (high - low) or 1.0
    top = len(levels) - 1
    return "".join(levels[round((value - low) / span * top)] if value - value == 0 else " " for value in values)


def _with_bar(label: str, text: str, share: float, items: list[str | None], width: int, ascii_only: bool) -> list[Text]:
    """Return `label text ━━━━──── item item`, with the items on a line of their own if the bar would be too short."""
    shown = [item for item in items if item]
    head = _head(label)
    if text:
        head.append(f"{text}  ")
    tail = "".join(f"  {item}" for item in shown)
    room = width - head.cell_len - len(tail)
    is_short = room < SHORTEST_BAR
    if is_short:
        room = width - head.cell_len
    room = min(room, LONGEST_BAR)
    if room < SHORTEST_BAR:
        return _flow(label, [text, *shown], width)
    full, empty = PLAIN_BAR if ascii_only else BAR
    filled = round(min(max(share, 0.0), 1.0) * room)
    head.append(full * filled, style="green").append(empty * (room - filled), style="dim")
    if is_short:
        return [head, *_flow("", shown, width)]
    return [head.append(tail)]


def _flow(label: str, items: Sequence[str], width: int) -> list[Text]:
    """Return the items as lines, as many per line as fit, after the label."""
    lines: list[Text] = []
    line = _head(label)
    is_bare = True
    for item in filter(None, items):
        gap = "" if is_bare else "   "
        if not is_bare and line.cell_len + len(gap) + len(item) > width:
            lines.append(line)
            line, gap = _head(""), ""
        line.append(gap + item)
        is_bare = False
    if not is_bare:
        lines.append(line)
    for text in lines:
        text.truncate(width)
    return lines


def _head(label: str) -> Text:
    # The name of an evaluation is longer than the other labels.
    return Text(f"{label:<{LABEL_SIZE}}" if len(label) < LABEL_SIZE else f"{label} ")


class LivePanel(Live):
    """Panel at the bottom of a terminal, redrawn four times a second by a thread of its own.

    When a window gets narrower, terminals differ in what they do with lines that no longer fit, so the panel cannot be
    drawn over. The screen is then cleared, and the last printed lines are printed again.

    Args:
        console: Console to draw on.
        view: Returns what to show.
        printed: The last printed lines.
    """

    def __init__(self, console: Console, view: Callable[[], PanelState], printed: Sequence[RenderableType]) -> None:
        self._view, self._printed = view, printed
        self._drawn_width = 0
        super().__init__(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def _width(self) -> int:
        return max(20, min(self.console.width - MARGIN, WIDEST))

    def _draw(self) -> RenderableType:
        view = self._view()
        width = self._width()
        ascii_only = self.console.options.ascii_only
        # Two columns for the frame and two for spaces.
        lines = lines_of(view, width - 4, ascii_only=ascii_only)
        # A longer title would widen the frame beyond the window.
        title = Text(view.title)
        title.truncate(width - 6, overflow="crop" if ascii_only else "ellipsis")
        return Panel(Group(*lines), title=title, title_align="left", width=width, border_style="dim")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Add the panel to whatever is printed. rich calls this with the console's lock held."""
        width = self._width()
        is_narrower, self._drawn_width = width < self._drawn_width, width
        if is_narrower and not self._alt_screen:
            self._live_render = LiveRender(self.get_renderable(), vertical_overflow=self.vertical_overflow)
            cleared = Control(ControlType.CLEAR, ControlType.HOME)
            again = [Group(*self._printed)] if self._printed else []
            return [cleared, *again, *super().process_renderables(renderables)]
        return super().process_renderables(renderables)
