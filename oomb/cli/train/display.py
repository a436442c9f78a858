"""What `oomb train` shows and logs: a live panel on a terminal, plain lines elsewhere, JSON lines on disk."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.cli.progress import PlainTimer
from oomb.cli.train.clock import Clock
from oomb.cli.train.panel import LivePanel, PanelState
from oomb.cli.train.signals import SignalHandler
from oomb.engine.engine import Engine
from oomb.memory.pool import GPU, HOST
from oomb.utils.metrics import JsonLines, MemoryMeter
from oomb.utils.units import gib, seconds

NUM_PRINTED = 40
"""Lines that are printed again when a window that got narrower has been cleared."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What the display is told of a run before it starts."""

    title: str
    tokens_per_step: int
    num_eval_batches: int = 1
    flops_per_step: float | None = None
    peak_flops: float | None = None
    """Of the GPU, where it is known."""
    device_bytes: int | None = None
    """Memory there is: on the GPU, or of the machine where there is none."""
    gpu_page_bytes: int | None = None
    """Memory set aside for pages there."""
    host_page_bytes: int | None = None
    """Host memory that pages may take."""

    def mfu(self, tokens_per_s: float) -> float | None:
        if not self.flops_per_step or not self.peak_flops:
            return None
        return tokens_per_s / self.tokens_per_step * self.flops_per_step / self.peak_flops


class TrainingDisplay(TrainerCallback):
    """Follows steps through the callbacks and chunks through `engine.progress` (pass `self.chunk_done` as that)."""

    def __init__(self, console: Console, log: JsonLines, meter: MemoryMeter, engine: Engine, facts: RunInfo) -> None:
        self.console, self.log, self.meter, self.engine, self.facts = console, log, meter, engine, facts
        self.interrupts = SignalHandler(self.print_line)
        self.losses: list[float] = []
        self.step_times: list[float] = []
        self.step_tokens: list[int] = []
        self.held_out: dict[int, float] = {}
        """Held-out losses that were computed while training, by step."""
        self.error: str | None = None
        """What ended training early."""
        self.clock = Clock()
        self._panel: LivePanel | None = None
        self._printed: deque[RenderableType] = deque(maxlen=NUM_PRINTED)
        self._view = PanelState(title=facts.title)
        self._evaluation: str | None = None
        self._in_training = False
        self._first_step = 0
        self._num_batches = 1
        self._tokens_seen: int = 0
        self._timer = PlainTimer()
        self._started = time.monotonic()

    @property
    def is_live(self) -> bool:
        """Whether a panel can stand on the terminal; a dumb one cannot move its cursor."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @property
    def tokens_per_second(self) -> float:
        """Over all steps but the first, which may compile; over the first where there is no other."""
        times, tokens = self.step_times[1:] or self.step_times, self.step_tokens[1:] or self.step_tokens
        return sum(tokens) / max(sum(times), 1e-9)

    def chunk_done(self, phase: str, done: int, total: int) -> None:
        self.meter.sample()
        self.interrupts.check()
        view, is_evaluating = self._view, self._is_evaluating()
        if self._in_training and is_evaluating != (view.doing != "step"):
            self._turn(is_evaluating)
        self.clock.chunk_done(phase, done, total)
        view.phase, view.chunk, view.num_chunks, view.pass_done = phase, done, total, done / total
        view.batch = min(self.clock.batch + 1, self.clock.num_batches)
        view.num_batches, view.done = self.clock.num_batches, self.clock.done
        if done == total and (phase == "gradient" or is_evaluating):
            self.clock.batch += 1
        self._sample()
        if self._panel is None and self._timer.is_due:
            left = self.clock.left_s()
            rest = "" if left is None else f", {seconds(left)} left"
            if is_evaluating:
                self._print_line(f"{view.doing}  chunk {done}/{total}, {view.done:.0%}{rest}")
            elif self._in_training:
                self._print_line(
                    f"step {view.step + 1}/{view.max_steps}  {phase} pass, chunk {done}/{total}, {view.done:.0%}{rest}"
                )

    def _is_evaluating(self) -> bool:
        return self._evaluation is not None or not self.engine.model.lm.training

    def _turn(self, to_evaluation: bool) -> None:
        """The trainer has begun to evaluate between two steps, or has gone back to training."""
        self._view.doing = "held-out loss" if to_evaluation else "step"
        num_batches = self.facts.num_eval_batches if to_evaluation else self._num_batches
        self.clock.begin(num_batches, forward_only=to_evaluation)

    @contextmanager
    def evaluating(self, what: str, num_batches: int) -> Iterator[None]:
        """Shows the chunks of an evaluation outside training."""
        self._evaluation = what
        self._view = PanelState(title=self.facts.title, doing=what, losses=self.losses)
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
        self._tokens_seen = state.num_input_tokens_seen
        self._view = PanelState(
            title=self.facts.title, step=state.global_step, max_steps=state.max_steps, losses=self.losses
        )
        self._in_training = True
        self._first_step = state.global_step
        self._open()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._view.doing = "step"
        self.clock.begin(args.gradient_accumulation_steps)
        self.engine.reset_stats()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._view.step, self._view.done = state.global_step, 0.0
        self.step_times.append(self.clock.step_done())
        # Counted by the trainer, if it was told to.
        seen, self._tokens_seen = self._tokens_seen, state.num_input_tokens_seen
        self.step_tokens.append(int(self._tokens_seen - seen) or self.facts.tokens_per_step)
        if self.interrupts.stop_requested:
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
        step_time, tokens, view = self.step_times[-1], self.step_tokens[-1], self._view
        speed = tokens / max(step_time, 1e-9)
        mfu, peak, stats = self.facts.mfu(speed), self.meter.peak_bytes, self.engine.stats
        view.grad_norm, view.learning_rate = logs.get("grad_norm"), logs.get("learning_rate")
        view.tokens_per_s, view.mfu, view.step_s = speed, mfu, step_time
        view.waited_s = stats.waited_seconds if stats.waited_seconds > 0.01 * step_time else 0.0
        self.log.write(
            event="step",
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            step_s=round(step_time, 4),
            tokens=tokens,
            tokens_per_s=round(speed, 1),
            mfu=None if mfu is None else round(mfu, 4),
            peak_memory_bytes=peak,
            gpu_page_bytes=stats.gpu_peak_bytes,
            host_page_bytes=stats.host_peak_bytes,
            loaded_bytes=stats.loaded_bytes,
            stored_bytes=stats.stored_bytes,
            waited_s=round(stats.waited_seconds, 4),
            wall_s=round(time.monotonic() - self._started, 2),
        )
        # What trackers get: they come after us in the list of callbacks.
        logs["tokens_per_second"] = round(speed, 1)
        if mfu is not None:
            logs["mfu"] = round(mfu, 4)
        if self._panel is None:
            beside = f" + {gib(stats.host_peak_bytes)} host" if stats.host_peak_bytes else ""
            waited = f" waited {seconds(view.waited_s)}" if view.waited_s else ""
            used = "" if mfu is None else f"  MFU {mfu:.1%}"
            left = self._run_left()
            rest = f"  {seconds(left)} left" if left else ""
            self._print_line(
                f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {speed:,.0f} tok/s{used}  "
                f"{self.meter.label} {gib(peak)}{beside}  {seconds(step_time)}{waited}{rest}"
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = kwargs.get("metrics", {}).get("eval_loss")
        if self._in_training and loss is not None:
            self.held_out[state.global_step] = self._view.held_out = float(loss)
            self.log.write(event="held_out", step=state.global_step, loss=float(loss))
            if self._panel is None:
                self._print_line(f"step {state.global_step}/{state.max_steps}  held-out loss {loss:.4f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the panel off the screen. Also called when training stops by an exception."""
        self._in_training = False
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def _open(self) -> None:
        self._timer.restart()
        self._sample()
        if self.is_live:
            self._panel = LivePanel(self.console, self._now, self._printed)
            self._panel.start(refresh=True)

    def _sample(self) -> None:
        """Memory as it is, for the panel's thread to show."""
        facts, pages = self.facts, self.engine.allocator.tiers.peak_bytes
        tier = "GPU" if self.meter.on_gpu else "RAM"
        memory: list[tuple[str, int, int | None]] = [(f"{tier} peak", self.meter.peak_bytes, facts.device_bytes)]
        if facts.gpu_page_bytes:
            memory.append((f"{tier} pages", pages[GPU], facts.gpu_page_bytes))
        if self.meter.on_gpu or pages[HOST]:
            memory.append(("host pages", pages[HOST], facts.host_page_bytes))
        self._view.memory = memory

    def _now(self) -> PanelState:
        """The view with its clocks set; the panel's thread asks for it."""
        view = self._view
        view.left_s, view.run_left_s = self.clock.left_s(), self._run_left()
        view.run_elapsed_s = time.monotonic() - self._started
        return view

    def _run_left(self) -> float | None:
        view = self._view
        if not self._in_training or view.doing != "step":
            return None
        pace, left = self.clock.pace_s(), self.clock.left_s()
        if pace is None:
            return None
        steps = view.max_steps - view.step
        # Between two steps nothing is left of the last one, and the next has not begun.
        return steps * pace if left is None else max(0, steps - 1) * pace + left

    def summary(
        self, title: str, held_out: tuple[float | None, float | None], wall_s: float, places: dict[str, Path]
    ) -> Table:
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        last = self.losses[-5:]
        if last:
            table.add_row("training loss", f"{self.losses[0]:.4f} → {mean(last):.4f} (mean of the last {len(last)})")
        before, after = ("not computed" if loss is None else f"{loss:.4f}" for loss in held_out)
        if held_out != (None, None):
            table.add_row("held-out loss", f"{before} → {after}")
        # Not the view's step: the held-out loss at the end has put a view of its own in its place.
        num_steps, step = len(self.step_times), self._first_step + len(self.step_times)
        table.add_row("steps", f"{num_steps}, up to step {step}" if self._first_step else f"{num_steps}")
        tokens, mfu = sum(self.step_tokens), self.facts.mfu(self.tokens_per_second)
        table.add_row("tokens", f"{tokens:,} ({round(tokens / max(num_steps, 1)):,} a step)")
        table.add_row("speed", f"{self.tokens_per_second:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}"))
        table.add_row("time", seconds(wall_s))
        table.add_row(self.meter.label, gib(self.meter.peak_bytes))
        for name, path in places.items():
            table.add_row(name, str(path))
        return table

    def fail(self, error: Exception) -> None:
        """Tell of an error that ended training: on the screen, and in the metrics at once, whatever comes after it."""
        self.close()
        is_expected = isinstance(error, ValueError | OSError | ArithmeticError)
        if not is_expected:
            traceback.print_exception(error)
        text = str(error) or type(error).__name__
        self.error = text if is_expected else f"{type(error).__name__}: {text}".splitlines()[0]
        self.log.write(event="error", step=self._first_step + len(self.step_times), error=self.error)
        self.print(f"[bold red]error:[/] {escape(self.error)}")

    def print_line(self, line: str) -> None:
        self._print_line(line)

    def print(self, markup: str) -> None:
        """Lines that are the run's own; they are there again after a narrower window has been cleared."""
        text = Text.from_markup(markup)
        self._printed.append(text)
        self.console.print(text, highlight=False, soft_wrap=True)

    def _print_line(self, line: str) -> None:
        self._timer.restart()
        text = Text(line)
        self._printed.append(text)
        self.console.print(text, highlight=False, soft_wrap=True)
