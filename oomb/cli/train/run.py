"""Run `oomb train`: prepare, train, save, summarize."""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.markup import escape

from oomb.cli.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED
from oomb.cli.report.events import METRICS
from oomb.cli.report.page import write_report
from oomb.cli.train import output_dir as folders
from oomb.cli.train import prepare, ranks, save, summary, yaml_file
from oomb.cli.train.describe import describe
from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.prepare import PreparedRun
from oomb.cli.train.recorder import StepRecorder
from oomb.cli.train.settings import AUTO, TrainSettings
from oomb.cli.train.signals import SignalHandler, StopRequested
from oomb.cli.train.state import RunInfo, RunState
from oomb.cli.train.yaml_file import CONFIG
from oomb.config import Config
from oomb.distributed import watch
from oomb.distributed.watch import RankFailed
from oomb.trainers import checkpoints
from oomb.trainers.finite import NonFiniteError
from oomb.utils import files
from oomb.utils.metrics import JsonLines, MemoryMeter, machine

T = TypeVar("T")


def run(settings: TrainSettings, console: Console) -> int:
    """Train, and return the exit code.

    Args:
        settings: Settings of the run.
        console: Console to print on.

    Raises:
        ValueError: A setting, the data or the model is wrong. Raised before the first step.
    """
    config = Config.from_dict(settings.engine)
    ranks.check_parallel(settings.parallel)
    device = prepare.check_settings(settings)
    with ranks.joined(settings, device) as settings:
        return _run_joined(settings, config, device, ranks.own_console(console))


def _run_joined(settings: TrainSettings, config: Config, device: torch.device, console: Console) -> int:
    is_auto = settings.resume_from_checkpoint == AUTO
    checkpoint = watch.on_first_rank(lambda: folders.checkpoint_of(settings))
    settings = replace(settings, resume_from_checkpoint=checkpoint)
    first_step = watch.on_first_rank(lambda: folders.first_step(settings))
    output_dir = watch.on_first_rank(lambda: folders.output_dir_of(settings))
    with ranks.locked_by_first(output_dir):
        watch.on_first_rank(lambda: folders.check_unused(settings, output_dir, ignore_metrics=is_auto))
        if is_auto:
            found = f"no checkpoint in {output_dir}: starting from scratch"
            found = f"resuming from {settings.resume_from_checkpoint}" if first_step else found
            _print_plain(console, found)
        started = time.monotonic()
        try:
            prepared = prepare.prepare(settings, config, device, output_dir, first_step, console)
        except prepare.AlreadyComplete as done:
            _print_plain(console, str(done))
            return 0
        info = prepared.info()
        config_text = watch.on_first_rank(lambda: _claim_folder(prepared, console))
        exit_code = Run(prepared, info, config_text, console, started).execute()
        ranks.part()
        return exit_code


def _claim_folder(prepared: PreparedRun, console: Console) -> str:
    """Replace what an earlier run left in the folder by the settings of this one, and return their text."""
    output_dir = prepared.output_dir
    if prepared.settings.resume_from_checkpoint is None:
        if folders.never_started(output_dir):
            _print_plain(console, f"overwriting {output_dir}: the run in it ended before its first step")
        # Checkpoints go first: with new settings they would look like those of this run.
        checkpoints.set_aside(output_dir, None)
    config_text = yaml_file.write(folders.with_absolute_paths(prepared.resolved))
    files.write_text(output_dir / CONFIG, config_text)
    return config_text


def _print_plain(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class Run:
    """One run, from its first line to its summary.

    Args:
        prepared: The run.
        info: Facts about it that do not change.
        config_text: Its settings, as they are in the output folder.
        console: Console to print on.
        started: `time.monotonic()` at its start.
    """

    def __init__(
        self, prepared: PreparedRun, info: RunInfo, config_text: str, console: Console, started: float
    ) -> None:
        self.prepared, self.info, self.config_text = prepared, info, config_text
        self.console, self.started = console, started
        self.trainer, self.output_dir = prepared.trainer, prepared.output_dir
        engine = prepared.trainer.engine
        is_resumed = prepared.settings.resume_from_checkpoint is not None
        self.state = RunState(first_step=prepared.first_step, max_steps=prepared.max_steps)
        self.meter = MemoryMeter(prepared.device)
        # The other ranks keep no metrics, and neither save nor summarize.
        self.is_first = ranks.is_first()
        self.log = JsonLines(self.output_dir / METRICS if self.is_first else Path(os.devnull), append=is_resumed)
        self.recorder = StepRecorder(self.state, self.log, self.meter, engine, self.info)
        self.display = TrainingDisplay(console, self.state, self.meter, engine, self.info)
        self.signals = SignalHandler(self.display.print_line, self.state)
        # Before the trackers, which report what the recorder adds.
        self.trainer.callback_handler.callbacks[:0] = [self.recorder, self.display]
        engine.progress = self._chunk_done
        self.held_out_before: float | None = None
        self.held_out_after: float | None = None
        self.saved_to: Path | None = None

    def _chunk_done(self, phase: str, done: int, total: int) -> None:
        self.meter.sample()
        self.display.chunk_done(phase, done, total)
        self.signals.check()

    def execute(self) -> int:
        """Train, save and summarize. Return the exit code."""
        with self.signals:
            try:
                with self.log:
                    self.begin()
                    if not self.state.terminated:
                        self.train()
                    if self.state.has_trained and self.is_first:
                        self.save()
                    self.finish()
            except KeyboardInterrupt:
                self.display.close()
                return self.interrupted()
            self.signals.release()
            if self.is_first:
                self.summarize()
        return self.exit_code

    def begin(self) -> None:
        """Write the first event, describe the run, and evaluate the model as it is."""
        prepared = self.prepared
        self.log.write(
            event="start",
            settings=asdict(prepared.settings),
            engine=asdict(prepared.config),
            machine=machine(),
            output_dir=os.path.abspath(self.output_dir),
            budget={"gpu_bytes": prepared.placement.gpu_bytes, "host_bytes": prepared.host_limit},
        )
        self.display.print(describe(prepared))
        self.held_out_before = self.held_out_loss()
        if self.held_out_before is not None:
            is_resumed = prepared.settings.resume_from_checkpoint is not None
            when = f"of the checkpoint, step {self.state.step}" if is_resumed else "before training"
            self.display.print(f"held-out loss {when}: {self.held_out_before:.4f}")
        if prepared.settings.resume_from_checkpoint is None:
            self.before_after("before")

    def train(self) -> None:
        """Train until the last step, a signal or an error. Signals stop it between two chunks, never in the optimizer.

        Errors before the first step are raised. Later ones are recorded, so that what is trained can be saved.
        """
        self.signals.stop("stopping at the next chunk and saving; Ctrl-C again exits without saving")
        try:
            self.trainer.train(resume_from_checkpoint=self.prepared.settings.resume_from_checkpoint)
        except StopRequested:
            pass
        except checkpoints.CheckpointNotSaved as error:
            # It is the last one: all steps are done. The model takes a third of the space and may still fit.
            self.warn(str(error))
            self.state.is_complete = True
        except NonFiniteError as error:
            self.fail(error, are_weights_lost=error.weights_lost)
        except Exception as error:
            if self.trainer.is_stepping or not self.state.step_times:
                raise
            self.fail(error, are_weights_lost=False)
        else:
            self.state.is_complete = not self.state.stop_requested or self.state.step >= self.state.max_steps
        finally:
            self.state.is_training = False
            self.display.close()
            if (others := watch.current()) is not None:
                if self.state.stop_requested:
                    others.request_stop()
                others.note()

    def fail(self, error: Exception, *, are_weights_lost: bool) -> None:
        """Record and print the error that ended training."""
        self.display.close()
        is_expected = isinstance(error, ValueError | OSError | ArithmeticError | RankFailed)
        if not is_expected:
            traceback.print_exception(error)
        text = str(error) or type(error).__name__
        text = text if is_expected else f"{type(error).__name__}: {text}".splitlines()[0]
        self.recorder.fail(text, are_weights_lost=are_weights_lost)
        self.display.print(f"[bold red]error:[/] {escape(text)}")

    def save(self) -> None:
        """Save the model, and a checkpoint first if training has not reached its last step."""
        self.signals.protect("saving, then exiting; press Ctrl-C again to exit without saving")
        if not self.state.is_complete:
            try:
                self.trainer.save_checkpoint()
            except OSError as error:  # CheckpointNotSaved, or a tracker's
                self.warn(str(error))
        model, tokenizer = self.prepared.model, self.prepared.tokenizer
        self.saved_to = save.save_somewhere(model, tokenizer, self.output_dir, self.warn)
        if self.is_saved_elsewhere:
            self._move_log(self.saved_to.parent)

    @property
    def is_saved_elsewhere(self) -> bool:
        return self.saved_to is not None and self.saved_to.parent != self.output_dir

    def _move_log(self, folder: Path) -> None:
        """Copy settings and metrics to the folder that the model had to be saved in."""
        with suppress(OSError):
            files.write_text(folder / CONFIG, self.config_text)
        try:
            self.log.move_to(folder / METRICS)
        except OSError as error:
            self.warn(f"{self.log.path} could not be copied to {folder} ({error.strerror or error})")

    def finish(self) -> None:
        """Evaluate the trained model if training is complete, and write the last event."""
        state = self.state
        self.held_out_after = state.held_out.get(state.step)
        if state.is_complete:
            if self.held_out_after is None:
                self.held_out_after = self.held_out_loss()
            self.before_after("after")
        self.log.write(
            event="end",
            stopped=not state.is_complete,
            steps=state.step,
            tokens=state.num_tokens,
            tokens_per_s=round(state.tokens_per_second, 1) if state.step_times else None,
            peak_memory_bytes=self.meter.peak_bytes,
            wall_s=round(time.monotonic() - self.started, 2),
            **({} if state.error is None else {"error": state.error}),
        )

    def held_out_loss(self) -> float | None:
        """Return the held-out loss, or None if there is none."""
        held_out = self.prepared.split.held_out
        if held_out is None:
            return None

        def compute() -> float:
            with self.display.evaluating("held-out loss", self.info.num_eval_batches):
                return float(self.trainer.evaluate(held_out)["eval_loss"])

        loss = self.skippable("the held-out loss", compute)
        if loss is not None:
            self.log.write(event="held_out", step=self.state.step, loss=loss)
        return loss

    def before_after(self, when: str) -> None:
        """Look for needles and write a sample, if the settings ask for it."""
        evaluation, step = self.prepared.before_after, self.state.step
        # Needles and samples need one rank that has all tokens of a chunk.
        if self.is_first and self.trainer.engine.shards.size == 1:
            with self.trainer.engine.replicas.alone():
                self.skippable(
                    "the evaluation", lambda: evaluation.run(when, step, self.trainer, self.display, self.log)
                )

    def skippable(self, what: str, evaluate: Callable[[], T]) -> T | None:
        """Evaluate. Ctrl-C skips it. After training, an error skips it too, so that it does not fail the run."""
        if self.state.terminated:
            return None
        self.signals.stop(f"skipping {what} at the next chunk; Ctrl-C again exits")
        try:
            with watch.together():
                return evaluate()
        except StopRequested:
            # The other ranks may be at another chunk, and cannot go on without this one.
            self.state.terminated |= watch.current() is not None
            return None
        except Exception as error:
            if not self.state.step_times:
                raise
            self.warn(f"{what} failed and is left out ({_first_line(error)})")
            return None

    def warn(self, line: str) -> None:
        self.display.close()
        self.display.print(f"[yellow]{escape(line)}[/]")

    def interrupted(self) -> int:
        """Say what is left after a second Ctrl-C. Return the exit code."""
        files.remove_leftovers(self.output_dir)
        what = f"the trained model is in {self.saved_to}" if self.saved_to else self._nothing_saved()
        self.console.print(f"[bold red]interrupted by Ctrl-C[/]; {escape(what)}", highlight=False, soft_wrap=True)
        self._print_resume_hint()
        return EXIT_INTERRUPTED

    def summarize(self) -> None:
        """Print results, places, and what to do next."""
        state = self.state
        if not state.is_complete:
            where = f"the model after that step is in {self.saved_to}" if self.saved_to else self._nothing_saved()
            text = escape(f"stopped after step {state.step} of {state.max_steps}; {where}")
            self.console.print(f"[yellow]{text}[/]", highlight=False, soft_wrap=True)
        if self.saved_to is not None:
            places = {"model": self.saved_to, "metrics": self.log.path, "settings": self.output_dir / CONFIG}
            table = summary.results_table(
                state,
                self.info,
                self.meter,
                held_out=(self.held_out_before, self.held_out_after),
                wall_s=time.monotonic() - self.started,
                places=places | self._report(),
            )
            self.console.print(table)
        if state.is_complete and self.saved_to is not None:
            prepared = self.prepared
            hints = summary.what_next(prepared.settings, prepared.split.num_tokens, prepared.model, self.saved_to)
            _print_plain(self.console, hints)
        elif self.saved_to is not None or state.are_weights_lost:
            self._print_resume_hint()

    def _report(self) -> dict[str, Path]:
        """Write the report. An error in it does not fail the run."""
        if not self.prepared.settings.report:
            return {}
        run_dir = self.log.path.parent
        try:
            return {"report": write_report(run_dir)}
        except Exception as error:
            again = f"{summary.program()} report {shlex.quote(str(run_dir))}"
            self.warn(f"the report was not written ({_first_line(error)}); to try again: {again}")
            return {}

    def _nothing_saved(self) -> str:
        again = "; the same command starts again" if folders.never_started(self.output_dir) else ""
        return f"nothing was saved{again}"

    def _print_resume_hint(self) -> None:
        if folders.newest_checkpoint(self.output_dir) is not None:
            _print_plain(self.console, summary.resume_hint(self.output_dir))

    @property
    def exit_code(self) -> int:
        if self.state.error is not None or self.is_saved_elsewhere:
            return EXIT_INCOMPLETE
        return 0 if self.state.is_complete and not self.state.terminated else self.signals.exit_code


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
