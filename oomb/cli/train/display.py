"""Show a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.cli.progress import PlainTimer
from oomb.cli.train.clock import Clock
from oomb.cli.train.panel import LivePanel, PanelState
from oomb.cli.train.state import RunInfo, RunState
from oomb.engine.engine import Engine
from oomb.memory.pool import GPU, HOST
from oomb.utils.metrics import MemoryMeter
from oomb.utils.units import gib, seconds

NUM_PRINTED = 40
"""Lines to print again after a narrower window has been cleared."""


class TrainingDisplay(TrainerCallback):
    """Display of a run. It follows steps as a callback, after `StepRecorder`, and chunks through `chunk_done`.

    Args:
        console: Console to draw on.
        state: State of the run.
        meter: Meter of peak memory.
        engine: Engine that trains.
        info: Facts about the run.
    """

    def __init__(self, console: Console, state: RunState, meter: MemoryMeter, engine: Engine, info: RunInfo) -> None:
        self.console, self.state, self.meter, self.engine, self.info = console, state, meter, engine, info
        self.clock = Clock()
        self._panel: LivePanel | None = None
        self._printed: deque[RenderableType] = deque(maxlen=NUM_PRINTED)
        self._view = PanelState(title=info.title)
        self._evaluation: str | None = None
        self._num_batches = 1
        self._timer = PlainTimer()

    @property
    def is_live(self) -> bool:
        """Whether the terminal can show a panel. A dumb one cannot move its cursor."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def chunk_done(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a pass, as `engine.progress` reports it."""
        view, is_evaluating = self._view, self._is_evaluating()
        if self.state.is_training and is_evaluating != (view.doing != "step"):
            self._switch(is_evaluating)
        self.clock.chunk_done(phase, done, total)
        view.phase, view.chunk, view.num_chunks, view.pass_done = phase, done, total, done / total
        view.batch = min(self.clock.batch + 1, self.clock.num_batches)
        view.num_batches, view.done = self.clock.num_batches, self.clock.done
        if done == total and (phase == "gradient" or is_evaluating):
            self.clock.batch += 1
        self._sample_memory()
        if self._panel is None and self._timer.is_due:
            left = self.clock.left_s()
            rest = "" if left is None else f", {seconds(left)} left"
            if is_evaluating:
                self.print_line(f"{view.doing}  chunk {done}/{total}, {view.done:.0%}{rest}")
            elif self.state.is_training:
                self.print_line(
                    f"step {view.step + 1}/{view.max_steps}  {phase} pass, chunk {done}/{total}, {view.done:.0%}{rest}"
                )

    def _is_evaluating(self) -> bool:
        return self._evaluation is not None or not self.engine.model.lm.training

    def _switch(self, to_evaluation: bool) -> None:
        """Follow the trainer from training to an evaluation between two steps, or back."""
        self._view.doing = "held-out loss" if to_evaluation else "step"
        num_batches = self.info.num_eval_batches if to_evaluation else self._num_batches
        self.clock.begin(num_batches, forward_only=to_evaluation)

    @contextmanager
    def evaluating(self, what: str, num_batches: int) -> Iterator[None]:
        """Show the chunks of an evaluation before or after training.

        Args:
            what: What the panel calls it.
            num_batches: Forward passes it takes.
        """
        self._evaluation = what
        self._view = PanelState(title=self.info.title, doing=what, losses=self.state.losses)
        self.clock.begin(num_batches, forward_only=True)
        self._open()
        try:
            yield
        finally:
            self._evaluation = None
            self.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._num_batches = args.gradient_accumulation_steps
        self._view = PanelState(
            title=self.info.title, step=state.global_step, max_steps=state.max_steps, losses=self.state.losses
        )
        self._open()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._view.doing = "step"
        self.clock.begin(args.gradient_accumulation_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._view.step, self._view.done = state.global_step, 0.0
        self.clock.step_done(self.state.step_times[-1])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs or not self.state.step_times:
            return
        step_time, speed, view = self.state.step_times[-1], self.state.last_speed, self._view
        mfu, stats = self.info.mfu(speed), self.engine.stats
        view.grad_norm, view.learning_rate = logs.get("grad_norm"), logs.get("learning_rate")
        view.tokens_per_s, view.mfu, view.step_s = speed, mfu, step_time
        view.waited_s = stats.waited_seconds if stats.waited_seconds > 0.01 * step_time else 0.0
        view.rank_wait = self._rank_wait(step_time)
        if self._panel is None:
            host = f" + {gib(stats.host_peak_bytes)} host" if stats.host_peak_bytes else ""
            waited = f" waited {seconds(view.waited_s)}" if view.waited_s else ""
            waited += f"  {view.rank_wait}" if view.rank_wait else ""
            used = "" if mfu is None else f"  MFU {mfu:.1%}"
            left = self._run_left()
            rest = f"  {seconds(left)} left" if left else ""
            self.print_line(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {speed:,.0f} tok/s{used}  "
                f"{self.meter.label} {gib(self.meter.peak_bytes)}{host}  {seconds(step_time)}{waited}{rest}"
            )

    def _rank_wait(self, step_s: float) -> str | None:
        """Return the slowest rank if others spend more than 1% of the step waiting for it."""
        rank, wait_s = self.state.slowest_rank, self.state.longest_wait_s
        return None if rank is None or wait_s < 0.01 * step_s else f"up to {seconds(wait_s)} waiting for rank {rank}"

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = kwargs.get("metrics", {}).get("eval_loss")
        if self.state.is_training and loss is not None:
            self._view.held_out = float(loss)
            if self._panel is None:
                self.print_line(f"step {state.global_step}/{state.max_steps}  held-out loss {loss:.4f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the panel. Call it too if training ends with an exception."""
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def print_line(self, line: str) -> None:
        """Print a line of plain text above the panel."""
        self._timer.restart()
        self._print(Text(line))

    def print(self, markup: str) -> None:
        """Print lines with markup of rich above the panel."""
        self._print(Text.from_markup(markup))

    def _print(self, text: Text) -> None:
        self._printed.append(text)
        self.console.print(text, highlight=False, soft_wrap=True)

    def _open(self) -> None:
        self._timer.restart()
        self._sample_memory()
        if self.is_live:
            self._panel = LivePanel(self.console, self._now, self._printed)
            self._panel.start(refresh=True)

    def _sample_memory(self) -> None:
        """Read memory use here, because the panel draws from a thread of its own."""
        info, pages = self.info, self.engine.allocator.tiers.peak_bytes
        tier = "GPU" if self.meter.on_gpu else "RAM"
        memory: list[tuple[str, int, int | None]] = [(f"{tier} peak", self.meter.peak_bytes, info.device_bytes)]
        if info.gpu_page_bytes:
            memory.append((f"{tier} pages", pages[GPU], info.gpu_page_bytes))
        if self.meter.on_gpu or pages[HOST]:
            memory.append(("host pages", pages[HOST], info.host_page_bytes))
        self._view.memory = memory

    def _now(self) -> PanelState:
        """Return the view with its clocks set. The panel's thread calls it for each frame."""
        view = self._view
        view.left_s, view.run_left_s = self.clock.left_s(), self._run_left()
        view.run_elapsed_s = self.state.elapsed_s
        return view

    def _run_left(self) -> float | None:
        """Return the seconds left of the run, or None if they are not known."""
        view = self._view
        if not self.state.is_training or view.doing != "step":
            return None
        step_s, left = self.clock.mean_step_s(), self.clock.left_s()
        if step_s is None:
            return None
        num_left = view.max_steps - view.step
        # Between two steps, the last one is over and the next has not begun.
        return num_left * step_s if left is None else max(0, num_left - 1) * step_s + left
