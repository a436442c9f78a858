"""What `oomb train` shows and logs: a live bar on a terminal, plain lines elsewhere, JSON lines on disk."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.engine import Engine
from oomb.metrics import JsonLines, MemoryMeter, gib, seconds

# Between two plain lines within one step: a step of a million tokens takes minutes, and silence looks like a crash.
PLAIN_INTERVAL_S = 30.0

# Of a step's time, about: the gradient pass computes every chunk again and then its backward, twice the work of that.
FILL_SHARE = 0.25

# rich estimates speed from what was done in this time, half a minute by default; a single chunk can take longer.
SPEED_PERIOD_S = 3600.0


class StopRequested(Exception):
    """Raised between two chunks after Ctrl-C, where weights and optimizer are whole."""


class TrainingDisplay(TrainerCallback):
    """Follows steps through the callbacks and chunks through `engine.progress` (pass `self.chunk_done` as that)."""

    def __init__(
        self, console: Console, log: JsonLines, meter: MemoryMeter, tokens_per_step: int, engine: Engine
    ) -> None:
        self.console = console
        self.log = log
        self.meter = meter
        self.tokens_per_step = tokens_per_step
        self.engine = engine
        self.stop_requested = False
        self.losses: list[float] = []
        self.step_times: list[float] = []
        self._evaluation: str | None = None
        self._num_batches = 1
        self._batch = 0
        self._bar: Progress | None = None
        self._task: Any = None
        self._step = 0
        self._max_steps = 0
        self._step_started = 0.0
        self._last_line = 0.0
        self._status = ""

    @property
    def tokens_per_second(self) -> float:
        """Over all steps but the first, which may compile; over the first where there is no other."""
        times = self.step_times[1:] or self.step_times
        return self.tokens_per_step * len(times) / max(sum(times), 1e-9)

    def chunk_done(self, phase: str, done: int, total: int) -> None:
        self.meter.sample()
        if self.stop_requested:
            raise StopRequested
        share = done / total
        if self._evaluation is None:
            share = FILL_SHARE * share if phase == "fill" else FILL_SHARE + (1 - FILL_SHARE) * share
        finished = (self._batch + share) / self._num_batches
        if done == total and (phase == "gradient" or self._evaluation is not None):
            self._batch += 1
        if self._bar is not None:
            completed = finished if self._evaluation is not None else self._step + min(finished, 1.0)
            self._bar.update(self._task, completed=completed, chunk=f"{phase[:4]} {done}/{total}")
        elif time.monotonic() - self._last_line > PLAIN_INTERVAL_S:
            if self._evaluation is not None:
                self._print_line(f"{self._evaluation}  chunk {done}/{total}, {finished:.0%}")
            elif self._max_steps:
                self._print_line(f"step {self._step + 1}/{self._max_steps}  {phase} pass, chunk {done}/{total}")

    @contextmanager
    def evaluating(self, what: str, num_batches: int) -> Iterator[None]:
        """Shows the chunks of an evaluation outside training."""
        self._evaluation, self._num_batches, self._batch = what, num_batches, 0
        self._last_line = time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("[dim]{task.fields[chunk]}"),
                TimeRemainingColumn(),
                TextColumn("[dim]left"),
                console=self.console,
                transient=True,
                speed_estimate_period=SPEED_PERIOD_S,
            )
            self._task = self._bar.add_task(what, total=1, chunk="")
            self._bar.start()
        try:
            yield
        finally:
            self._evaluation = None
            self.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._max_steps = state.max_steps
        self._num_batches = args.gradient_accumulation_steps
        self._step = state.global_step
        self._last_line = time.monotonic()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=8),
                TextColumn("{task.fields[status]}"),
                TextColumn("[dim]{task.fields[chunk]}"),
                TimeRemainingColumn(),
                TextColumn("[dim]left"),
                # Everything must fit into 80 columns, or rich cuts the figures short.
                console=self.console,
                speed_estimate_period=SPEED_PERIOD_S,
            )
            self._task = self._bar.add_task(
                "train", total=state.max_steps, completed=state.global_step, status="", chunk=""
            )
            self._bar.start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_started = time.monotonic()
        self._batch = 0
        self.engine.reset_stats()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        self.step_times.append(time.monotonic() - self._step_started)
        if self.stop_requested:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or not self.step_times:
            return
        self.losses.append(float(logs["loss"]))
        step_time = self.step_times[-1]
        speed = self.tokens_per_step / max(step_time, 1e-9)
        peak, stats = self.meter.peak_bytes, self.engine.stats
        # On a terminal everything must fit into 80 columns: what is on the host, and only what was waited for.
        beside = f" + {gib(stats.host_peak_bytes)} host" if stats.host_peak_bytes else ""
        waited = f" waited {seconds(stats.waited_seconds)}" if stats.waited_seconds > 0.01 * step_time else ""
        self.log.write(
            event="step",
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            step_s=round(step_time, 4),
            tokens_per_s=round(speed, 1),
            peak_memory_bytes=peak,
            gpu_page_bytes=stats.gpu_peak_bytes,
            host_page_bytes=stats.host_peak_bytes,
            loaded_bytes=stats.loaded_bytes,
            stored_bytes=stats.stored_bytes,
            waited_s=round(stats.waited_seconds, 4),
        )
        if self._bar is not None:
            status = f"loss [bold]{logs['loss']:.3f}[/] {speed:,.0f} tok/s {gib(peak)}{beside}{waited}"
            self._bar.update(self._task, completed=state.global_step, status=status, chunk="")
        else:
            self._print_line(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {speed:,.0f} tok/s  "
                f"{self.meter.label} {gib(peak)}{beside}  {seconds(step_time)}{waited}"
            )

    def close(self) -> None:
        """Takes the bar off the screen. Also called when training stops by an exception."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._max_steps = 0
        self.close()

    def summary(
        self, title: str, held_out: tuple[float | None, float | None], wall_s: float, places: dict[str, Path]
    ) -> Table:
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        last = self.losses[-5:]
        if last:
            mean = sum(last) / len(last)
            table.add_row("training loss", f"{self.losses[0]:.4f} → {mean:.4f} (mean of the last {len(last)})")
        before, after = ("not computed" if loss is None else f"{loss:.4f}" for loss in held_out)
        if held_out != (None, None):
            table.add_row("held-out loss", f"{before} → {after}")
        num_steps = len(self.step_times)
        table.add_row("steps", f"{num_steps}" if self._step == num_steps else f"{num_steps}, up to step {self._step}")
        table.add_row("tokens", f"{num_steps * self.tokens_per_step:,} ({self.tokens_per_step:,} a step)")
        table.add_row("speed", f"{self.tokens_per_second:,.0f} tokens/s")
        table.add_row("time", seconds(wall_s))
        table.add_row(self.meter.label, gib(self.meter.peak_bytes))
        for name, path in places.items():
            table.add_row(name, str(path))
        return table

    def say(self, line: str) -> None:
        """From a signal handler, which may have interrupted the very printing of another line."""
        try:
            self._print_line(line)
        except RuntimeError:
            os.write(2, f"{line}\n".encode())

    def _print_line(self, line: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class Interrupts:
    """What Ctrl-C means during a run. Within `with`: by default it ends the program, as ever."""

    def __init__(self, display: TrainingDisplay) -> None:
        self.display = display
        self._notice: str | None = None
        self._ignored: str | None = None
        self._previous: Any = None

    def stop(self, notice: str) -> None:
        """From here on the first Ctrl-C says `notice` and stops at the next chunk, the second ends the program."""
        self._notice, self._ignored = notice, None
        self.display.stop_requested = False

    def ignore(self, notice: str) -> None:
        """From here on Ctrl-C says `notice` and does nothing."""
        self._ignored = notice

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        if self._ignored is not None:
            self.display.say(self._ignored)
        elif self._notice is None or self.display.stop_requested:
            raise KeyboardInterrupt
        else:
            self.display.stop_requested = True
            self.display.say(self._notice)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
