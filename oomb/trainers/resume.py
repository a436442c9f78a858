"""A `transformers.Trainer` that writes checkpoints whole or not at all, and resumes as if it had never stopped.

Most of what a run needs to go on is in transformers' checkpoints. The rest is here: what happens where the disk is full
or the process is killed, saving in the middle of a step, and the few things on which a resumed run would differ.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from oomb.models.weight_files import find_broken_file
from oomb.trainers import checkpoints
from oomb.trainers.finite import FiniteSteps
from oomb.trainers.step_state import SeededByEpoch, StepSnapshot, random_state, set_random_state
from oomb.utils import files
from oomb.utils.lock import locked

EXTRA_STATE = "oomb_state.json"
"""What a run needs to go on as it was and transformers does not save: the seed of the data's order, and the loss of the
steps since the last logged one."""
ADAPTER = "adapter_model.*"
"""Weights of an adapter, as PEFT calls the file."""


class ResumableTrainer(FiniteSteps):
    """A `transformers.Trainer` whose checkpoints are whole or not there, and from which a run goes on as if it had
    never stopped. Put it before another trainer of the same family among the bases of a class, and that one's are."""

    control: TrainerControl
    _tr_loss: Tensor

    def __init__(self, *positional: Any, **options: Any) -> None:
        self.holds_lock = False
        """Whether whoever made the trainer keeps other runs out of `output_dir` already."""
        self._staging: Path | None = None
        self._step_end: StepSnapshot | None = None
        self._newest: Path | None = None
        """The checkpoint that was last written, resumed from or loaded."""
        self._saved_step: int | None = None
        self._resumed: Path | None = None
        """The checkpoint that was resumed from."""
        self._rest: dict[str, Any] = {}
        """What `oomb_state.json` of that checkpoint holds."""
        self._has_saved = False
        """Whether this call of `train` has written a checkpoint."""
        self._data_seed: int | None = None
        self.is_stepping = False
        """From the beginning of an optimizer's step until all that belongs to it is on record."""
        self.keep_free_bytes = 0
        """What every checkpoint must leave free on its disk, for what is saved at the end."""
        self.about_to_delete: Callable[[], list[Path]] = list
        """Asked for checkpoints that a callback deletes as soon as the next one is written."""
        super().__init__(*positional, **options)
        self.add_callback(_Steps(self))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *positional: Any, **options: Any) -> Any:
        """Train, as in transformers. `True` resumes from the newest whole checkpoint in `output_dir`. A damaged
        checkpoint that is named is refused before anything is loaded; the error names the file."""
        output_dir = Path(self.args.output_dir)
        with ExitStack() as stack:
            if self.args.should_save and not self.holds_lock:
                stack.enter_context(locked(output_dir))
            folder = self._folder_to_resume(output_dir, resume_from_checkpoint)
            return super().train(None if folder is None else str(folder), *positional, **options)

    def _folder_to_resume(self, output_dir: Path, resume_from_checkpoint: str | Path | bool | None) -> Path | None:
        """Return the checkpoint to start from, verified."""
        if self.args.should_save:
            files.remove_leftovers(output_dir)
        folder: Path | None = None
        if resume_from_checkpoint is True:
            folder = checkpoints.latest(output_dir)
            if folder is None:
                raise ValueError(
                    f"there is no whole checkpoint in {output_dir} to resume from: "
                    f"{', '.join(path.name for path in checkpoints.find(output_dir)) or 'none'} found"
                )
        elif resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            checkpoints.check(folder)
        if folder is not None and not (folder / "optimizer.pt").is_file():
            warnings.warn(
                f"{folder} holds weights alone (save_only_model=True): the optimizer, the schedule and the random "
                "numbers start anew, so the losses will not be those of a run that was never stopped",
                stacklevel=3,
            )
        self._step_end, self._newest, self._saved_step, self.is_stepping = None, folder, None, False
        self._resumed, self._has_saved = folder, False
        rest = None if folder is None else folder / EXTRA_STATE
        self._rest = json.loads(rest.read_text()) if rest is not None and rest.is_file() else {}
        self.num_skipped_steps = self._rest.get("num_skipped_steps", 0)
        return folder

    def save_checkpoint(self) -> Path | None:
        """A checkpoint of the last step that was finished, now: also when the step after it has been broken off, by
        Ctrl-C or a signal. Returns its folder, or None where no step has been done yet. Raises `NotSaved`."""
        if self.is_stepping:
            kept = f"the newest checkpoint is {self._newest}" if self._newest else "there is no earlier checkpoint"
            raise RuntimeError(f"the optimizer was stopped in the middle of its step, which cannot be saved; {kept}")
        if self._step_end is None:
            return self._newest
        is_saved = self._newest is not None and self._newest.is_dir() and self._saved_step == self.state.global_step
        if not is_saved:
            with self._step_end.restored(self):
                self._save_checkpoint(self.model, None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return self._newest

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Raises `NotSaved`."""
        run_dir = Path(self._get_output_dir(trial))
        folder = run_dir / f"checkpoint-{self.state.global_step}"
        if not self._has_saved:
            # Not before: a run that never saves has nothing to put in their place.
            try:
                checkpoints.set_aside(run_dir, self._resumed, self._to_keep(folder) - {folder})
            except OSError as error:
                raise checkpoints.CheckpointNotSaved(
                    f"{folder} was not written: checkpoints of an earlier run could not be moved out of its way "
                    f"({error.strerror or error})"
                ) from error
        keep_free_bytes = self._still_to_keep_free(run_dir, folder)
        with checkpoints.write(folder, self._checkpoint_bytes(), keep_free_bytes=keep_free_bytes) as partial:
            self._staging = partial.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            if self.state.best_model_checkpoint == str(partial):
                self.state.best_model_checkpoint = str(folder)
                self.state.save_to_json(str(partial / checkpoints.STATE))
            rest = {"data_seed": self._data_seed, "last_logged_step": self._globalstep_last_logged}
            rest["num_skipped_steps"] = self.num_skipped_steps
            (partial / EXTRA_STATE).write_text(json.dumps({**rest, "loss_since": float(self._tr_loss)}))
        self._newest, self._saved_step, self._has_saved = folder, self.state.global_step, True
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        checkpoints.rotate(run_dir, self.args.save_total_limit, self._to_keep(folder))

    def _to_keep(self, newest: Path) -> set[Path]:
        best = self.state.best_model_checkpoint
        return {newest} | ({Path(best)} if best else set())

    def _still_to_keep_free(self, run_dir: Path, folder: Path) -> int:
        """`keep_free_bytes` but for what older checkpoints give back when they go, right after this one."""
        if not self.keep_free_bytes:
            return 0
        going: set[Path] = set()
        with suppress(OSError):  # a disk that does not say what is there gives nothing back
            going |= set(checkpoints.surplus(run_dir, self.args.save_total_limit, self._to_keep(folder), num_new=1))
            going |= set(self.about_to_delete())
        return max(0, self.keep_free_bytes - sum(map(files.folder_bytes, going)))

    def _get_output_dir(self, trial: Any) -> str:
        # While a checkpoint is written, the run is elsewhere.
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Not before it has its name.
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _checkpoint_bytes(self) -> int:
        """What a checkpoint takes, about, and not more: it is refused where there is less."""
        states = [] if self.args.save_only_model else [s for s in self.optimizer.state.values() if isinstance(s, dict)]
        tensors = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return checkpoints.weight_bytes(self.model) + sum(x.numel() * x.element_size() for x in tensors)

    def _run_epoch(self, *positional: Any, **options: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            # A finished run that is resumed: transformers counts steps only after the next one.
            self.control.should_training_stop = True
            return
        super()._run_epoch(*positional, **options)

    def _maybe_log_save_evaluate(self, *positional: Any, **options: Any) -> None:
        """All that follows a step. A checkpoint that cannot be written is no reason to lose hours of training: it is
        said aloud and training goes on, unless it was to be the last one."""
        self.is_stepping = False
        self._step_end = StepSnapshot.of(self)
        try:
            super()._maybe_log_save_evaluate(*positional, **options)
        except checkpoints.CheckpointNotSaved as error:
            if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
                raise
            self.control.should_save = False
            warnings.warn(f"{error}. TRAINING GOES ON WITHOUT THIS CHECKPOINT.", stacklevel=2)
        self._step_end = StepSnapshot.of(self)

    def _evaluate(self, *positional: Any, **options: Any) -> Any:
        # How often a run is evaluated must not decide what it learns, nor must an evaluation that a stop cuts short.
        before = random_state()
        try:
            return super()._evaluate(*positional, **options)
        finally:
            set_random_state(before)

    def get_train_dataloader(self) -> Any:
        # Where no data_seed is given, whatever seeded torch last decides the order, and need not do so again.
        config = self.accelerator.dataloader_config
        given, resumed = config.data_seed, self._rest.get("data_seed")
        self._data_seed = next(seed for seed in (given, resumed, torch.initial_seed()) if seed is not None)
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
        # Of several adapters "default" lies in the folder itself, the others in folders within, and some releases of
        # transformers then read those alone. TRL makes a second one of an adapter that DPO trains.
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
        told = json.loads(state.read_text())
        if (recorded := told.get("best_model_checkpoint")) is None:
            return result
        here = self._resumed.parent / Path(recorded).name
        found = next((path for path in (here, Path(recorded)) if _is_earlier_in(path, told)), None)
        self.state.best_model_checkpoint = None if found is None else str(found)
        if found is None:
            score = f" ({self.args.metric_for_best_model} {self.state.best_metric})" if self.state.best_metric else ""
            warnings.warn(
                f"the best checkpoint so far, {here.name}{score}, is neither in {here.parent} nor at {recorded}: from "
                "here on the best is chosen among the steps to come",
                stacklevel=2,
            )
            self.state.best_metric = self.state.best_global_step = None
        return result

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        try:
            # The optimizer's states are not loaded, and no byte of them is worth a run that has come to its end.
            checkpoints.check(best, only=lambda name: name.endswith((".safetensors", ".bin", ".json")))
        except checkpoints.BrokenCheckpoint as error:
            warnings.warn(f"{error}. The model keeps the weights of the last step", stacklevel=2)
            self.state.best_model_checkpoint = None
            return
        super()._load_best_model()
        # The optimizer's states are those of the last step: together they are no step's.
        self._step_end, self._newest = None, best

    def _finalize_training(self, *positional: Any, **options: Any) -> Any:
        # With a limit of 1, transformers deletes every checkpoint that is not the best, also where that lies elsewhere.
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
            _check_shapes(self.optimizer, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._reading(checkpoint):
            super()._load_rng_state(checkpoint)

    @contextmanager
    def _reading(self, folder: Path | str | None) -> Iterator[None]:
        """Where a file of a checkpoint cannot be read, say which and what to resume from instead."""
        try:
            yield
        except Exception as error:
            file = None if folder is None else _unreadable(Path(folder))
            if file is None:
                error.add_note(f"while reading {folder}: does it belong to this model, adapters and arguments?")
                raise
            raise checkpoints.BrokenCheckpoint(
                f"{folder} is damaged: {file}; {checkpoints.instead_of(Path(str(folder)))}"
            ) from error

    def _resume_logging(self) -> None:
        """The next logged loss is the mean over all steps since the last one, those before the stop too."""
        if "loss_since" in self._rest:
            loss = self._rest["loss_since"]
            self._tr_loss = torch.tensor(loss, dtype=self._tr_loss.dtype, device=self._tr_loss.device)
            # What is summed up for the mean of this call of `train` are its own steps alone.
            self._total_loss_scalar -= loss
            self._globalstep_last_logged = self._rest["last_logged_step"]


class _Steps(TrainerCallback):
    """Tells a trainer what only callbacks are told."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer._resume_logging()
        self.trainer.note_weights()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.is_stepping = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.check_weights_finite()


def _is_earlier_in(folder: Path, told: dict[str, Any]) -> bool:
    """Return whether a checkpoint is an earlier one of the run whose trainer state this is."""
    try:
        history = json.loads((folder / checkpoints.STATE).read_text())["log_history"]
    except (OSError, ValueError, KeyError):
        return False
    return history == told["log_history"][: len(history)]


def _unreadable(folder: Path) -> str | None:
    """Return which file of a checkpoint is damaged, and how, where one is."""
    for path in sorted(folder.glob("*.pt*")):
        # torch.save writes an archive with a checksum for each of its parts.
        try:
            with zipfile.ZipFile(path) as archive:
                part = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            return f"{path.name} cannot be read ({error})"
        if part is not None:
            return f"{path.name} cannot be read (the checksum of {part} differs)"
    return find_broken_file(folder)


def _check_shapes(optimizer: Any, folder: Path) -> None:
    """Raise if a loaded moment is not of its parameter's shape. torch loads it, and its step may then crash."""
    plain = getattr(optimizer, "optimizer", optimizer)
    if type(plain) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return  # others may keep projections of a smaller shape
    for parameter, state in plain.state.items():
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
            moment = state.get(name)
            if isinstance(moment, Tensor) and moment.shape != parameter.shape:
                raise checkpoints.BrokenCheckpoint(
                    f"{folder} is damaged or belongs to another model: {name} in optimizer.pt has shape "
                    f"{tuple(moment.shape)}, its parameter {tuple(parameter.shape)}; {checkpoints.instead_of(folder)}"
                )
