"""What `oomb train` shows and logs: a live bar on a terminal, plain lines elsewhere, JSON lines on disk."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.metrics import JsonLines, MemoryMeter, gib, seconds

# Between two plain lines within one step: a step of a million tokens takes minutes, and silence looks like a crash.
PLAIN_INTERVAL_S = 30.0


class StopRequested(Exception):
    """Raised between two chunks after Ctrl-C, where weights and optimizer are whole."""


class TrainingDisplay(TrainerCallback):
    """Follows steps through the callbacks and chunks through `engine.progress` (pass `self.chunk_done` as that)."""

    def __init__(self, console: Console, log: JsonLines, meter: MemoryMeter, tokens_per_step: int) -> None:
        self.console = console
        self.log = log
        self.meter = meter
        self.tokens_per_step = tokens_per_step
        self.stop_requested = False
        self.losses: list[float] = []
        self.step_times: list[float] = []
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
        if self._bar is not None:
            self._bar.update(self._task, chunk=f"{phase[:4]} {done}/{total}")
        elif self._max_steps and time.monotonic() - self._last_line > PLAIN_INTERVAL_S:
            self._print_line(f"step {self._step + 1}/{self._max_steps}  {phase} pass, chunk {done}/{total}")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._max_steps = state.max_steps
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
            )
            self._task = self._bar.add_task(
                "train", total=state.max_steps, completed=state.global_step, status="", chunk=""
            )
            self._bar.start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step_started = time.monotonic()

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
        peak = self.meter.peak_bytes
        self.log.write(
            event="step",
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            step_s=round(step_time, 4),
            tokens_per_s=round(speed, 1),
            peak_memory_bytes=peak,
        )
        if self._bar is not None:
            status = f"loss [bold]{logs['loss']:.3f}[/] {speed:,.0f} tok/s {gib(peak)}"
            self._bar.update(self._task, completed=state.global_step, status=status, chunk="")
        else:
            self._print_line(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {speed:,.0f} tok/s  "
                f"{self.meter.label} {gib(peak)}  {seconds(step_time)}"
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

    def _print_line(self, line: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
