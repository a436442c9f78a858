"""Save the trained model, elsewhere if the disk is full."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from oomb.cli.train.output_dir import MODEL, newest_checkpoint
from oomb.trainers.checkpoints import weight_bytes
from oomb.utils import files
from oomb.utils.units import gib

EXTRA_BYTES = 32 << 20
"""Saved with a model besides its weights: a tokenizer of a large vocabulary, settings, metrics."""


class ModelNotSaved(ValueError):
    """A trained model could not be written. What was in its place before is still there."""


def check_room(model: Any, output_dir: Path) -> None:
    """Raise ValueError if there is no space for the trained model, before hours of training."""
    try:
        free = files.free_bytes(output_dir)
    except OSError as error:
        raise ValueError(f"--output_dir {output_dir} cannot be created: {error.strerror}; name another") from error
    needed = weight_bytes(model)
    if needed > free:
        raise ValueError(
            f"the trained model needs {gib(needed)}, but only {gib(free)} are free in --output_dir {output_dir}: free "
            "some space, or name a folder on another disk"
        )


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Save a model and its tokenizer in a folder, all of it or nothing, and return the folder.

    Raises:
        ModelNotSaved: It cannot be written.
    """
    try:
        with files.atomic_folder(folder) as partial:
            model.save_pretrained(partial)
            if tokenizer is not None:
                _save_tokenizer(tokenizer, partial)
    except Exception as error:
        if not files.is_write_error(error):
            raise
        kept = "the one saved there before is unchanged" if folder.exists() else "nothing of it was kept"
        raise ModelNotSaved(f"the trained model could not be saved in {folder} ({_reason(error)}): {kept}") from error
    return folder


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer. An error is only a warning: its files exist elsewhere, the trained model does not."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        warnings.warn(
            f"the tokenizer could not be saved with the model ({type(error).__name__}: {_reason(error)}): copy its "
            f"files from {tokenizer.name_or_path or 'where it was loaded from'} before using the model",
            stacklevel=2,
        )


def save_somewhere(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path, warn: Callable[[str], None]
) -> Path:
    """Save the model in the run's folder, or in a new folder elsewhere if that cannot be written. Return where.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer, if it has one.
        output_dir: Folder of the run.
        warn: Called with a warning if the model is saved elsewhere.

    Raises:
        ModelNotSaved: It cannot be written anywhere.
    """
    needed = weight_bytes(model)
    name = f"oomb-{output_dir.absolute().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    failed: list[str] = []
    for place in chain([output_dir], _other_places()):
        try:
            # Do not fill up a disk that is too small: other programs need it.
            free = files.free_bytes(place)
        except OSError as error:
            failed.append(f"{place} ({_reason(error)})")
            continue
        if needed > free:
            failed.append(f"{place} ({gib(free)} free)")
            continue
        try:
            if place == output_dir:
                saved_to = save(model, tokenizer, output_dir / MODEL)
            else:
                saved_to = _save_in_new(place / name, model, tokenizer)
        except (ModelNotSaved, OSError) as error:
            failed.append(f"{place} ({_reason(error.__cause__ or error)}; {gib(free)} were free)")
            continue
        if failed:
            warn(f"THE MODEL IS NOT IN {output_dir}, BUT IN {saved_to}. It could not be saved in {', '.join(failed)}")
        return saved_to
    newest = newest_checkpoint(output_dir)
    rest = (
        f"free some space and resume from {newest}, which from_pretrained can load too"
        if newest
        else "free some space or name an --output_dir on another disk, and train again: there is no checkpoint"
    )
    raise ModelNotSaved(
        f"the trained model needs {gib(needed)} and could not be saved in any of {', '.join(failed)}: {rest}"
    )


def _other_places() -> Iterator[Path]:
    """Yield other folders to save a model in. The one for temporary files comes last: it may be in memory."""
    seen: set[Path] = set()
    for find in (Path.home, Path.cwd, lambda: Path(tempfile.gettempdir())):
        try:
            place = find()
            exists = place.is_dir()
        except (OSError, RuntimeError):  # no home, deleted, not accessible
            continue
        if exists and place not in seen:
            seen.add(place)
            yield place


def _save_in_new(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Save a model in a new folder. Delete the folder again if that fails."""
    folder.mkdir()
    try:
        return save(model, tokenizer, folder / MODEL)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
