"""Choose and check the folder of a run, and find what earlier runs left in it."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomb.cli.report.events import METRICS, metrics_lines, parse_event
from oomb.cli.train import yaml_file
from oomb.cli.train.schema import TYPES
from oomb.cli.train.settings import AUTO, LATEST, TrainSettings
from oomb.cli.train.yaml_file import CONFIG
from oomb.data.discover import STDLIB
from oomb.models import load, presets
from oomb.trainers import checkpoints


def output_dir_of(settings: TrainSettings) -> Path:
    """Return the folder that the run writes to.

    Raises:
        ValueError: The folder cannot be written.
    """
    if settings.output_dir is not None:
        folder = Path(settings.output_dir).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output_dir {folder} is a file; name a folder")
        parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not parent.is_dir():
            raise ValueError(f"--output_dir {folder} cannot be created: {parent} is a file; name another")
        if not os.access(parent, os.W_OK):
            raise ValueError(f"--output_dir {folder} cannot be written: you have no write permission for {parent}")
        return folder
    if settings.resume_from_checkpoint is not None:
        return Path(settings.resume_from_checkpoint).parent
    source = Path(settings.model_name_or_path)
    # `oomb train` saves to a folder called model; the folder of its run says more.
    name = source.parent.name if source.name == MODEL else source.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or MODEL
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


def check_unused(settings: TrainSettings, output_dir: Path, *, ignore_metrics: bool = False) -> None:
    """Raise ValueError if the folder holds another run.

    Args:
        settings: Settings of the run.
        output_dir: Its folder.
        ignore_metrics: Accept a folder with metrics but nothing to resume from.
    """
    if settings.overwrite_output_dir or settings.resume_from_checkpoint is not None:
        return
    newest = checkpoints.latest(output_dir, in_full=False)
    if newest is not None:
        raise ValueError(
            f"{output_dir} already holds checkpoints; resume with --resume_from_checkpoint {shlex.quote(str(newest))}, "
            "name another --output_dir, or pass --overwrite_output_dir"
        )
    remedy = "name another --output_dir, or pass --overwrite_output_dir"
    if (output_dir / MODEL).exists():
        raise ValueError(f"{output_dir} already holds a trained model; {remedy}")
    if checkpoints.find(output_dir):
        raise ValueError(f"{output_dir} already holds checkpoints, none of them complete; {remedy}")
    if (output_dir / METRICS).exists() and not never_started(output_dir) and not ignore_metrics:
        raise ValueError(f"{output_dir} already holds the metrics of a run; {remedy}")


def never_started(output_dir: Path) -> bool:
    """Return whether the run in this folder ended before its first step, so that nothing in it is worth keeping."""
    if (output_dir / MODEL).exists() or checkpoints.find(output_dir):
        return False
    events = _events(output_dir)
    return bool(events) and not any(map(_follows_a_step, events))


def _events(output_dir: Path) -> list[dict[str, Any] | None]:
    """Return the events of a run's metrics; None for a line that cannot be read."""
    lines = metrics_lines(output_dir)
    events = [parse_event(line) for line in lines]
    if events and events[-1] is None and '"step"' not in lines[-1]:
        events[-1] = {}  # empty, or cut off by a kill
    return events


def _follows_a_step(event: dict[str, Any] | None) -> bool:
    if event is None:
        return True  # it may be a step
    # With --logging_steps, only later events may show that there was a step: a held-out loss, the end.
    return event.get("event") == "step" or any(event.get(name, 0) != 0 for name in ("step", "steps"))


def checkpoint_of(settings: TrainSettings) -> str | None:
    """Return the path of the checkpoint to resume from, or None to start from scratch.

    Raises:
        ValueError: There is no checkpoint, and the settings ask for one.
    """
    checkpoint = settings.resume_from_checkpoint
    if checkpoint not in (LATEST, AUTO):
        return checkpoint
    if settings.output_dir is None:
        raise ValueError("--resume_from_checkpoint without a path needs --output_dir, to find its latest checkpoint")
    newest = checkpoints.latest(Path(settings.output_dir).expanduser())
    if newest is None and checkpoint == AUTO:
        return None
    if newest is None:
        raise ValueError(
            f"--output_dir {settings.output_dir} holds no checkpoint to resume from: leave out "
            "--resume_from_checkpoint to start from scratch, or pass --resume_from_checkpoint auto"
        )
    return str(newest)


def first_step(settings: TrainSettings) -> int:
    """Return the step of the checkpoint to resume from, or 0.

    Raises:
        ValueError: The checkpoint is damaged, or does not fit the settings.
    """
    if settings.resume_from_checkpoint is None:
        return 0
    folder = Path(settings.resume_from_checkpoint)
    try:
        checkpoints.check(folder)
    except checkpoints.BrokenCheckpoint as error:
        raise ValueError(f"--resume_from_checkpoint {error}") from error
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter != settings.use_peft:
        what = "adapters: add --use_peft" if is_adapter else "full weights: leave out --use_peft"
        raise ValueError(f"--resume_from_checkpoint {folder} holds {what}")
    if not is_adapter:
        load.check_model_name(settings.resume_from_checkpoint)
    return int(json.loads((folder / checkpoints.STATE).read_text())["global_step"])


def with_absolute_paths(settings: TrainSettings) -> TrainSettings:
    """Return the settings with absolute paths, so that config.yaml works from any folder."""
    # Presets and stdlib stay words even if there is a folder of that name.
    is_word = {"model_name_or_path": presets.is_preset, "dataset": lambda name: name == STDLIB}
    paths: dict[str, Any] = {}
    for key in ("model_name_or_path", "tokenizer_name", "dataset", "output_dir"):
        path = getattr(settings, key)
        if path is not None and Path(path).expanduser().exists() and not is_word.get(key, lambda _: False)(path):
            paths[key] = os.path.abspath(Path(path).expanduser())
    return replace(settings, **paths)


DATA_KEYS = (
    "dataset", "dataset_join", "packing", "max_length", "seed", "per_device_train_batch_size",
    "gradient_accumulation_steps",
)  # fmt: skip
"""Settings that decide which tokens a step reads. A checkpoint stores its position as a number of batches."""


def data_changes(settings: TrainSettings) -> list[str]:
    """Return a warning for each setting that changes the position in the data of a resumed run.

    Call it before config.yaml is overwritten.

    Args:
        settings: Resolved settings, with the checkpoint to resume from.
    """
    if settings.resume_from_checkpoint is None:
        return []
    path = Path(settings.resume_from_checkpoint).parent / CONFIG
    try:
        stored = with_absolute_paths(
            TrainSettings(**{key: value for key, value in yaml_file.read(path).values.items() if key in TYPES})
        )
    except ValueError:
        return []  # no file, or one from another version
    if stored.parallel == "auto":
        stored = replace(stored, parallel="dp=1")
    now = with_absolute_paths(settings)
    keys = [key for key in DATA_KEYS if getattr(now, key) != getattr(stored, key)]
    if stored.packing == "auto":
        keys = [key for key in keys if key != "packing"]
    if now.examples_per_step == stored.examples_per_step:
        # Four examples at once read the same as two times two.
        keys = [key for key in keys if key not in DATA_KEYS[-2:]]
    return [
        f"{key} is {_shown(getattr(now, key))} but the checkpoint was trained with {_shown(getattr(stored, key))}: "
        "training will not resume at the same position in the data"
        for key in keys
    ]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def newest_checkpoint(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, or None if there is none or the disk fails."""
    try:
        return checkpoints.latest(output_dir, in_full=False)
    except OSError:
        return None


MODEL = "model"
"""Folder of the trained model within that of the run."""
