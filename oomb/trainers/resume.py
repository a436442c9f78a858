"""Extend `transformers.Trainer` with complete checkpoints and with resumes that continue bit for bit.

transformers' checkpoints hold most of what a run needs. This module adds the rest: full disks, killed processes, saving
between steps, and the few states that transformers does not restore.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from oomb.distributed import watch
from oomb.ops.rounding import mix
from oomb.trainers import checkpoints
from oomb.trainers.finite import FiniteSteps
from oomb.trainers.step_state import SeededByEpoch, StepSnapshot, random_state, set_random_state
from oomb.utils import files
from oomb.utils.lock import locked

EXTRA_STATE = "oomb_state.json"
"""What transformers does not save: the seed of the data order, the loss since the last log, and skipped steps."""
ADAPTER = "adapter_model.*"
"""PEFT's file name for adapter weights."""


class ResumableTrainer(FiniteSteps):
    """A `transformers.Trainer` whose checkpoints are complete or absent, and from which a run continues bit for bit.

    As a mixin, it goes before another transformers trainer in the list of base classes.
    """

    control: TrainerControl
    _tr_loss: Tensor

    def __init__(self, *positional: Any, **options: Any) -> None:
        self.holds_lock = False
        """Whether the caller has locked `output_dir` already."""
        self._staging: Path | None = None
        self._step_end: StepSnapshot | None = None
        self._newest: Path | None = None
        """The checkpoint that was written, resumed from or loaded last."""
        self._saved_step: int | None = None
        self._resumed: Path | None = None
        """The checkpoint that was resumed from."""
        self._extra_state: dict[str, Any] = {}
        """The contents of its `oomb_state.json`."""
        self._has_saved = False
        """Whether this call of `train` has written a checkpoint."""
        self._data_seed: int | None = None
        self.is_stepping = False
        """Whether the optimizer is stepping, so weights and states may belong to different steps."""
        self.keep_free_bytes = 0
        """Disk space that every checkpoint must leave for the final save."""
        self.about_to_delete: Callable[[], list[Path]] = list
        """Returns checkpoints that a callback will delete once the next one is written."""
        super().__init__(*positional, **options)
        self.add_callback(_Steps(self))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *positional: Any, **options: Any) -> Any:
        """Train as `transformers.Trainer.train` does.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete checkpoint in `output_dir`. A
                damaged folder raises `BrokenCheckpoint` before anything is loaded; the error names the file.
        """
        output_dir = Path(self.args.output_dir)
        with watch.together(), ExitStack() as stack:
            if self.args.should_save and not self.holds_lock:
                stack.enter_context(locked(output_dir))
            folder = self._folder_to_resume(output_dir, resume_from_checkpoint)
            return super().train(None if folder is None else str(folder), *positional, **options)

    def _folder_to_resume(self, output_dir: Path, resume_from_checkpoint: str | Path | bool | None) -> Path | None:
        """Return the checkpoint to start from, verified."""
        folder = watch.on_first_rank(lambda: self._find_and_check(output_dir, resume_from_checkpoint))
        if folder is not None and not (folder / "optimizer.pt").is_file():
            warnings.warn(
                f"{folder} has only weights (save_only_model=True): optimizer, schedule and random numbers start from "
                "scratch, so the losses will differ from those of an uninterrupted run",
                stacklevel=3,
            )
        self._step_end, self._newest, self._saved_step, self.is_stepping = None, folder, None, False
        self._resumed, self._has_saved = folder, False
        path = None if folder is None else folder / EXTRA_STATE
        self._extra_state = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        self.num_skipped_steps = self._extra_state.get("num_skipped_steps", 0)
        return folder

    def _find_and_check(self, output_dir: Path, resume_from_checkpoint: str | Path | bool | None) -> Path | None:
        if self.args.should_save:
            files.remove_leftovers(output_dir)
        folder: Path | None = None
        if resume_from_checkpoint is True:
            folder = checkpoints.latest(output_dir)
            if folder is None:
                raise ValueError(
                    f"there is no complete checkpoint in {output_dir} to resume from: "
                    f"{', '.join(path.name for path in checkpoints.find(output_dir)) or 'none'} found"
                )
        elif resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            checkpoints.check(folder)
        return folder

    def save_checkpoint(self) -> Path | None:
        """Save a checkpoint of the last finished step and return its folder, or None before the first step.

        Works after an interrupt within the next step, by Ctrl-C or a signal, unless the optimizer was stepping. Raises
        `CheckpointNotSaved` if the checkpoint cannot be written. With several ranks the first one saves, and needs
        nothing from the others, which may have failed.
        """
        if not self.args.should_save:
            return self._newest
        if self.is_stepping:
            newest = f"the newest checkpoint is {self._newest}" if self._newest else "there is no earlier checkpoint"
            raise RuntimeError(f"cannot save a checkpoint: the optimizer was interrupted within its step; {newest}")
        if self._step_end is None:
            return self._newest
        is_saved = self._newest is not None and self._newest.is_dir() and self._saved_step == self.state.global_step
        if not is_saved:
            with self._step_end.restored(self):
                self._write_checkpoint(self.model, None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return self._newest

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let the first rank write a checkpoint while the others wait. An error is raised on all."""
        if self.args.world_size > 1:
            super().store_flos()

        def write() -> tuple[Path | None, str | None]:
            self._write_checkpoint(model, trial)
            return self._newest, self.state.best_model_checkpoint

        self._newest, self.state.best_model_checkpoint = watch.on_first_rank(write)
        self._saved_step, self._has_saved = self.state.global_step, True

    def store_flos(self) -> None:
        # transformers sums them over ranks, also in the middle of writing a checkpoint, which is done by one.
        if self.args.world_size == 1 or self._staging is None:
            super().store_flos()

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"checkpoint-{self.state.global_step}"
        if not self._has_saved:
            # Not earlier: a run that never saves has nothing to replace them with.
            try:
                checkpoints.set_aside(run_dir, self._resumed, self._to_keep(folder) - {folder})
            except OSError as error:
                raise checkpoints.CheckpointNotSaved(
                    f"{folder} was not written: checkpoints of an earlier run could not be moved aside "
                    f"({error.strerror or error})"
                ) from error
        keep_free_bytes = self._still_to_keep_free(run_dir, folder)
        with checkpoints.write(folder, self._checkpoint_bytes(), keep_free_bytes=keep_free_bytes) as partial:
            self._staging = partial.parent
            try:
                with self._without_barrier():
                    super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            if self.args.world_size > 1:
                # What a run on one rank continues with. Several ranks seed themselves in every step.
                (partial / "rng_state_0.pth").rename(partial / "rng_state.pth")
                if self.state.best_global_step == self.state.global_step:
                    self.state.best_model_checkpoint = str(partial)
            if self.state.best_model_checkpoint == str(partial):
                self.state.best_model_checkpoint = str(folder)
            if self.args.world_size > 1 or self.state.best_model_checkpoint == str(folder):
                self.state.save_to_json(str(partial / checkpoints.STATE))
            extra_state = {
                "data_seed": self._data_seed,
                "last_logged_step": self._globalstep_last_logged,
                "num_skipped_steps": self.num_skipped_steps,
                "loss_since": float(self._tr_loss),
            }
            (partial / EXTRA_STATE).write_text(json.dumps(extra_state))
        self._newest, self._saved_step, self._has_saved = folder, self.state.global_step, True
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        checkpoints.rotate(run_dir, self.args.save_total_limit, self._to_keep(folder))

    @contextmanager
    def _without_barrier(self) -> Iterator[None]:
        """Keep transformers from waiting for other ranks before it looks for the best checkpoint."""
        best = self.state.best_global_step
        if self.args.world_size > 1:
            self.state.best_global_step = None
        try:
            yield
        finally:
            self.state.best_global_step = best

    def _to_keep(self, newest: Path) -> set[Path]:
        best = self.state.best_model_checkpoint
        return {newest} | ({Path(best)} if best else set())

    def _still_to_keep_free(self, run_dir: Path, folder: Path) -> int:
        """Return `keep_free_bytes` less the size of the checkpoints that this one will replace."""
        if not self.keep_free_bytes:
            return 0
        deleted: set[Path] = set()
        with suppress(OSError):  # if the disk cannot be listed, count on nothing
            deleted |= set(checkpoints.surplus(run_dir, self.args.save_total_limit, self._to_keep(folder), num_new=1))
            deleted |= set(self.about_to_delete())
        return max(0, self.keep_free_bytes - sum(map(files.folder_bytes, deleted)))

    def _get_output_dir(self, trial: Any) -> str:
        # transformers writes the checkpoint into the hidden folder.
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Push after the folder has its final name.
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _checkpoint_bytes(self) -> int:
        """Return a lower bound of a checkpoint's size, close to it. With less space none is written."""
        states = [] if self.args.save_only_model else [s for s in self.optimizer.state.values() if isinstance(s, dict)]
        tensors = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return checkpoints.weight_bytes(self.model) + sum(x.numel() * x.element_size() for x in tensors)

    def _run_epoch(self, *positional: Any, **options: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # A finished run was resumed. transformers would notice only after one more step.
            self.control.should_training_stop = True
            return
        super()._run_epoch(*positional, **options)

    def _maybe_log_save_evaluate(self, *positional: Any, **options: Any) -> None:
        """Warn and train on if a checkpoint cannot be written, unless it is the last one: hours of training are worth
        more than a checkpoint."""
        self.is_stepping = False
        self._step_end = StepSnapshot.of(self)
        try:
            super()._maybe_log_save_evaluate(*positional, **options)
        except checkpoints.CheckpointNotSaved as error:
            if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
                raise
            self.control.should_save = False
            warnings.warn(f"{error}. TRAINING CONTINUES WITHOUT THIS CHECKPOINT.", stacklevel=2)
        self._step_end = StepSnapshot.of(self)

    def _evaluate(self, *positional: Any, **options: Any) -> Any:
        # Evaluating more often, or interrupting an evaluation, must not change the training result.
        before = random_state()
        try:
            return super()._evaluate(*positional, **options)
        finally:
            set_random_state(before)

    def get_train_dataloader(self) -> Any:
        # Without a data_seed the order depends on whatever seeded torch last, which a resumed run need not repeat.
        config = self.accelerator.dataloader_config
        given, resumed = config.data_seed, self._extra_state.get("data_seed")
        own = watch.on_first_rank(torch.initial_seed)
        self._data_seed = next(seed for seed in (given, resumed, own) if seed is not None)
        config.data_seed = self._data_seed
        try:
            return super().get_train_dataloader()
        finally:
            config.data_seed = given

    def _get_train_sampler(self, *positional: Any, **options: Any) -> Any:
        sampler = super()._get_train_sampler(*positional, **options)
        return SeededByEpoch(sampler, self._data_seed) if isinstance(sampler, LengthGroupedSampler) else sampler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._reading(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        # PEFT saves the adapter "default" in the folder itself and others in subfolders. Some releases of transformers
        # then load only the subfolders. TRL adds a second adapter, the reference, when DPO trains one.
        folder, model = Path(resume_from_checkpoint), self.model if model is None else model
        if hasattr(model, "get_base_model") and all(any(folder.glob(f"{at}{ADAPTER}")) for at in ("", "*/")):
            active = model.active_adapters[0]
            model.load_adapter(str(folder), "default", is_trainable=active == "default")
            model.set_adapter(active)

    def _init_training_state(self, max_steps: int, *positional: Any, **options: Any) -> Any:
        """Initialize as transformers does, but look for the best checkpoint next to the resumed one. The recorded path
        is absolute: after a move it is wrong, and after a copy it belongs to another run."""
        result = super()._init_training_state(max_steps, *positional, **options)
        state = self._resumed / checkpoints.STATE if self._resumed is not None else None
        if self._resumed is None or state is None or not state.is_file():
            return result
        saved = json.loads(state.read_text())
        if (recorded := saved.get("best_model_checkpoint")) is None:
            return result
        here = self._resumed.parent / Path(recorded).name
        found = next((path for path in (here, Path(recorded)) if checkpoints.is_earlier(path, saved)), None)
        self.state.best_model_checkpoint = None if found is None else str(found)
        if found is None:
            score = f" ({self.args.metric_for_best_model} {self.state.best_metric})" if self.state.best_metric else ""
            warnings.warn(
                f"the best checkpoint so far, {here.name}{score}, is neither in {here.parent} nor at {recorded}: "
                "the best one will be chosen among the steps from here on",
                stacklevel=2,
            )
            self.state.best_metric = self.state.best_global_step = None
        return result

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        try:
            # Only the files that are loaded: damaged optimizer states must not fail a run that is finished.
            checkpoints.check(best, only=lambda name: name.endswith((".safetensors", ".bin", ".json")))
        except checkpoints.BrokenCheckpoint as error:
            warnings.warn(f"{error}. The model keeps the weights of the last step.", stacklevel=2)
            self.state.best_model_checkpoint = None
            return
        super()._load_best_model()
        # The optimizer states are still those of the last step, so there is nothing consistent to save any more.
        self._step_end, self._newest = None, best

    def _finalize_training(self, *positional: Any, **options: Any) -> Any:
        # With a limit of 1, transformers deletes all but the best checkpoint, even if that is in another folder.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result = super()._finalize_training(*positional, **options)
        finally:
            self.args.save_total_limit = limit
        best = self.state.best_model_checkpoint
        if self.args.should_save and limit == 1 and best is not None:
            output_dir = Path(self.args.output_dir)
            if Path(best).resolve().parent == output_dir.resolve():
                checkpoints.rotate(output_dir, 1, {Path(best)})
        return result

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            checkpoints.check_optimizer_shapes(self.optimizer, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._reading(checkpoint):
            super()._load_rng_state(checkpoint)

    @contextmanager
    def _reading(self, folder: Path | str | None) -> Iterator[None]:
        """Turn a failure to read a checkpoint into `BrokenCheckpoint` if one of its files is damaged."""
        try:
            yield
        except Exception as error:
            file = None if folder is None else checkpoints.unreadable_file(Path(folder))
            if file is None:
                error.add_note(f"while reading {folder}: was it written with this model, adapters and arguments?")
                raise
            raise checkpoints.BrokenCheckpoint(
                f"{folder} is damaged: {file}; {checkpoints.resume_advice(Path(str(folder)))}"
            ) from error

    def _resume_logging(self) -> None:
        """Let the next logged loss cover all steps since the last log, including those before the checkpoint."""
        if "loss_since" in self._extra_state:
            loss = self._extra_state["loss_since"]
            self._tr_loss = torch.tensor(loss, dtype=self._tr_loss.dtype, device=self._tr_loss.device)
            # The mean loss that `train` returns covers only the steps of this call.
            self._total_loss_scalar -= loss
            self._globalstep_last_logged = self._extra_state["last_logged_step"]


class _Steps(TrainerCallback):
    """Forwards events to the trainer that transformers sends only to callbacks."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._resume_logging()
        self.trainer.note_weights()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            # Each replica and step draws its own random numbers, so a checkpoint need not have those of every rank.
            set_seed(mix(args.seed, state.global_step, args.process_index // self.trainer.ranks_per_example))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.is_stepping = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.check_weights_finite()
