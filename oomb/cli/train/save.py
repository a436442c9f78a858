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

EXTRA_BYTES = 32 << 20
"""Saved with a model besides its weights: a tokenizer of a large vocabulary, settings, metrics."""


class ModelNotSaved(ValueError):
    """A trained model could not be written. Nothing of it is left, and what was there before is still there."""


def check_room(model: Any, output_dir: Path) -> None:
    """Before training: a model that cannot be saved is found out now and not after hours."""
    try:
        free = files.free_bytes(output_dir)
    except OSError as error:
        raise ValueError(f"--output_dir {output_dir} cannot be made: {error.strerror}; name another") from error
    needed = weight_bytes(model)
    if needed > free:
        raise ValueError(
            f"the trained model takes {needed:,} bytes and {free:,} are free in --output_dir {output_dir}: make room, "
            "or name a folder on another disk"
        )


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Save a model in a folder that is complete or absent. Raises `ModelNotSaved` if it cannot be written."""
    try:
        with files.atomic_folder(folder) as partial:
            model.save_pretrained(partial)
            if tokenizer is not None:
                _save_tokenizer(tokenizer, partial)
    except Exception as error:
        if not files.is_write_error(error):
            raise
        kept = "the one that was there before is as it was" if folder.exists() else "nothing of it is left"
        raise ModelNotSaved(f"the trained model could not be saved in {folder} ({_reason(error)}): {kept}") from error
    return folder


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save it with a model. Its files can be had again; the model that was trained cannot."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        warnings.warn(
            f"the tokenizer could not be saved with the model ({type(error).__name__}: {_reason(error)}): copy its "
            f"files from {tokenizer.name_or_path or 'where it was loaded from'} before you use the model",
            stacklevel=2,
        )


def save_somewhere(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, output_dir: Path, say: Callable[[str], None]
) -> Path:
    """Saves the model in the run's folder, or, where that cannot be written, in a new folder at another place that has
    room. Returns where; `say` is told of what failed. Raises `CannotSave` where no place takes it."""
    needed = weight_bytes(model)
    name = f"oomb-{output_dir.absolute().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    failed: list[str] = []
    for place in chain([output_dir], _other_places()):
        try:
            # A disk that is known to be too small is not filled first, to the harm of others.
            free = files.free_bytes(place)
        except OSError as error:
            failed.append(f"{place} ({_reason(error)})")
            continue
        if needed > free:
            failed.append(f"{place} ({free:,} bytes are free)")
            continue
        try:
            if place == output_dir:
                saved_to = save(model, tokenizer, output_dir / MODEL)
            else:
                saved_to = _save_in_new(place / name, model, tokenizer)
        except (ModelNotSaved, OSError) as error:
            failed.append(f"{place} ({_reason(error.__cause__ or error)}; {free:,} bytes were free)")
            continue
        if failed:
            say(f"THE MODEL IS NOT IN {output_dir}, BUT IN {saved_to}. It could not be saved in {', '.join(failed)}")
        return saved_to
    newest = newest_checkpoint(output_dir)
    rest = (
        f"make room and go on from the newest checkpoint, {newest}, which from_pretrained reads as well"
        if newest
        else "make room, or name an --output_dir on another disk, and train again: there is no checkpoint"
    )
    raise ModelNotSaved(
        f"the trained model takes {needed:,} bytes and could not be saved anywhere, in {', '.join(failed)}: {rest}"
    )


def _other_places() -> Iterator[Path]:
    """Where a model may be put for once. The folder for temporary files comes last: it may be in memory."""
    seen: set[Path] = set()
    for find in (Path.home, Path.cwd, lambda: Path(tempfile.gettempdir())):
        try:
            place = find()
            is_there = place.is_dir()
        except (OSError, RuntimeError):  # none that can be written or asked, deleted, no home
            continue
        if is_there and place not in seen:
            seen.add(place)
            yield place


def _save_in_new(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """The folder is taken away again if the model does not come into it."""
    folder.mkdir()
    try:
        return save(model, tokenizer, folder / MODEL)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
