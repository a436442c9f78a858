"""Write checkpoints by the clock, so that a run without --save_steps loses little if it is killed."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from oomb.distributed import watch
from oomb.trainers import checkpoints

MARK = "oomb_by_time"
"""Empty file in a checkpoint that only the clock asked for. Without --save_total_limit, only these are deleted."""
KEPT = 2
"""Number of them to keep without --save_total_limit."""


class SaveTimer(TrainerCallback):
    """Callback that asks for a checkpoint at the end of a step if enough time has passed since the last one.

    Args:
        minutes: Minutes between checkpoints.
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60
        self._last = monotonic()
        self._is_ours = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last = monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = monotonic()
        # After the last step, the model itself is saved.
        is_due = now - self._last >= self.seconds and state.global_step < state.max_steps
        is_due = watch.on_first_rank(lambda: is_due)
        self._is_ours = is_due and not control.should_save
        if self._is_ours:
            control.should_save = True
            # Not only in on_save: without space for a checkpoint, try again after another interval, not every step.
            self._last = now

    def about_to_delete(self, output_dir: Path) -> list[Path]:
        """Return the checkpoints that will be deleted once the requested one is written."""
        if not self._is_ours:
            return []
        return _marked(output_dir)[: 1 - KEPT]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._last = monotonic()
        is_ours, self._is_ours = self._is_ours, False
        if (
            not is_ours
            or not state.is_world_process_zero
            or args.output_dir is None
            or args.save_total_limit is not None
        ):
            return
        newest = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        try:
            (newest / MARK).touch()
        except OSError as error:
            warnings.warn(
                f"{newest} could not be marked ({error.strerror or error}), so it will not be deleted automatically",
                stacklevel=2,
            )
        for folder in _marked(Path(args.output_dir))[:-KEPT]:
            checkpoints.remove_or_warn(folder)


def _marked(output_dir: Path) -> list[Path]:
    return [folder for folder in checkpoints.find(output_dir) if (folder / MARK).is_file()]
