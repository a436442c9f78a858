"""Write, verify, find and delete checkpoint folders.

A folder named `checkpoint-6` is complete, whatever ended the process that wrote it: `oomb.utils.files` renames it into
place after its files, the manifest among them, have reached the disk.

    model.safetensors or adapter_model.safetensors, config.json    transformers, PEFT
    optimizer.pt, scheduler.pt, rng_state.pth, trainer_state.json  transformers
    oomb_state.json                                                `resume`: what transformers does not restore
    oomb_manifest.json                                             `seal`, last: sizes and checksums of the others
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from oomb.models.weight_files import find_broken_file
from oomb.utils import files
from oomb.utils.checksums import SignedJson, file_crc32, sampled_crc32
from oomb.utils.units import exact_bytes

MANIFEST = "oomb_manifest.json"
"""Sizes and checksums of all other files."""
STATE = "trainer_state.json"
"""transformers writes this file last, so a checkpoint without a manifest counts as complete if it has it."""
SIGNED = SignedJson("crc32", crc32, indent=1)
VERSION = 2
"""Version of the manifest. In version 1, checksums of files above 64 MiB cover only samples (`sampled_crc32`)."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STEADY_NS = 2 * 10**9
"""Minimum age at which an unchanged timestamp proves that a file is unchanged. Timestamps of FAT have steps of 2 s."""
_verified: set[tuple[Path, tuple[Any, ...]]] = set()
"""Checkpoints that this process has read in full, with the state of their files at that time. A resume verifies a
checkpoint more than once and reads it once."""


class BrokenCheckpoint(ValueError):
    """The folder to load is not a checkpoint, or is a damaged one."""


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written. No partial files are left, and earlier checkpoints are intact."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    num_bytes: int
    checksum: int
    is_sampled: bool
    """Whether the checksum covers only samples of the file."""


@contextmanager
def write(folder: Path, needed_bytes: int = 0, keep_free_bytes: int = 0) -> Iterator[Path]:
    """Yield an empty folder to write to that becomes `folder` at the end of the `with`, or vanishes if that raises.

    Raises `CheckpointNotSaved` if the files cannot be written, and before any is written if fewer than `needed_bytes`
    plus `keep_free_bytes` are free.
    """
    folder = folder.absolute()
    try:
        if needed_bytes + keep_free_bytes > files.free_bytes(folder.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with files.atomic_folder(folder) as partial:
            yield partial
            seal(partial)
    except Exception as error:
        # The partial folder is deleted by now, so the message reports the space without it.
        if not files.is_write_error(error):
            raise
        raise CheckpointNotSaved(_describe_failure(folder, needed_bytes, keep_free_bytes, error)) from error


def check(folder: Path | str, only: Callable[[str], bool] = lambda name: True) -> None:
    """Raise `BrokenCheckpoint` unless the folder is a complete checkpoint. The error names the file and an older
    checkpoint to resume from.

    Every file is read and compared with the manifest, or only those whose names `only` accepts. A checkpoint that
    transformers wrote has no manifest; it passes if it is complete.
    """
    folder = Path(folder)
    problem = _problem(folder, only=only)
    if problem is not None:
        raise BrokenCheckpoint(f"{problem}; {resume_advice(folder)}")


def resume_advice(folder: Path) -> str:
    """Return what to do when a checkpoint cannot be used: resume from the newest complete one before it."""
    match = _CHECKPOINT.fullmatch(folder.name)
    older = [other for other in find(folder.parent) if match is None or step_of(other) < int(match[1])]
    for other in reversed(older):
        if other != folder and _problem(other) is None:
            return f"resume from {other} instead"
    return f"there is no older complete checkpoint in {folder.parent}"


def _problem(folder: Path, *, in_full: bool = True, only: Callable[[str], bool] = lambda name: True) -> str | None:
    """Return what is wrong with a checkpoint, or None. Does not read the files unless `in_full`."""
    if not folder.is_dir():
        return f"{folder} is not a checkpoint: no such folder"
    try:
        records = _read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is damaged: {MANIFEST} cannot be read ({error})"
    if records is None:
        try:
            int(json.loads((folder / STATE).read_text())["global_step"])
        except FileNotFoundError:
            return f"{folder} is not a complete checkpoint: it has no {STATE}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{folder} is damaged: {STATE} cannot be read ({error})"
        return None
    try:
        return _difference(folder, {name: record for name, record in records.items() if only(name)}, in_full)
    except OSError as error:
        return f"{folder} is damaged: {error.filename or 'a file'} cannot be read ({error.strerror or error})"


def _difference(folder: Path, records: dict[str, FileRecord], in_full: bool) -> str | None:
    """Return how the files differ from the manifest, or None."""
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            return f"{folder} is damaged: {name} is missing"
        if (size := path.stat().st_size) != record.num_bytes:
            return f"{folder} is damaged: {name} has {size:,} bytes, but {record.num_bytes:,} were written"
    if not in_full:
        return None
    now, stats = time.time_ns(), _stats(folder, records)
    if (folder.absolute(), stats) in _verified:
        return None
    for name, record in records.items():
        if (sampled_crc32 if record.is_sampled else file_crc32)(folder / name) != record.checksum:
            return f"{folder} is damaged: the checksum of {name} differs"
    # A file that was written just now can be overwritten without a change of its timestamp.
    if all(now - stat[2] > STEADY_NS for stat in stats):
        _verified.add((folder.absolute(), stats))
    return None


def _stats(folder: Path, names: Iterable[str]) -> tuple[Any, ...]:
    """Return what the file system changes when a file of a checkpoint is written to."""
    stats = [(folder / name).stat() for name in (MANIFEST, *names)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)


def find(output_dir: Path | str) -> list[Path]:
    """Return the folders named like checkpoints in a run's folder, sorted by step."""
    if not Path(output_dir).is_dir():
        return []
    found = [path for path in Path(output_dir).iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path | str) -> int:
    """Return the step in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"{folder} is not named like a checkpoint, such as checkpoint-100")
    return int(match[1])


def latest(output_dir: Path | str, *, in_full: bool = True) -> Path | None:
    """Return the newest complete checkpoint of a run, or None. Skips damaged ones with a warning.

    Without `in_full` it compares only names and sizes of files, which is enough for a message.
    """
    for folder in reversed(find(output_dir)):
        problem = _problem(folder, in_full=in_full)
        if problem is None:
            return folder
        warnings.warn(f"{problem}. Looking for an older one.", stacklevel=2)
    return None


def set_aside(output_dir: Path, resumed: Path | None, keep: set[Path] | None = None) -> None:
    """Move an earlier run's checkpoints to a subfolder, except those in `keep`.

    A run that starts from `resumed`, or from scratch, must not resume later from checkpoints of an abandoned run, nor
    rotate its own away because those have higher steps.
    """
    kept = {path.resolve() for path in [*(keep or ()), *([resumed] if resumed is not None else [])]}
    is_here = resumed is not None and resumed.parent.resolve() == output_dir.resolve()
    match = _CHECKPOINT.fullmatch(resumed.name) if resumed is not None and is_here else None
    folders = [
        folder
        for folder in find(output_dir)
        if folder.resolve() not in kept and (match is None or step_of(folder) > int(match[1]))
    ]
    if not folders:
        return
    # `push_to_hub` skips names that begin with an underscore.
    numbered = (output_dir / f"_replaced-{number}" for number in range(1, 1_000_000))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    # The newest last: if this process is killed meanwhile, the earlier run can still resume from its newest one.
    for folder in folders:
        if folder.is_symlink():
            # The target of a link may be relative to the folder of the link.
            (aside / folder.name).symlink_to(folder.resolve())
            folder.unlink()
        else:
            folder.rename(aside / folder.name)
    files.sync_folder(aside)
    files.sync_folder(output_dir)
    warnings.warn(
        f"{output_dir} held checkpoints of an earlier run, the newest of step {step_of(folders[-1]):,}. They were "
        f"moved to {aside}: resume from one of them by its path, or delete them",
        stacklevel=2,
    )


def rotate(output_dir: Path, limit: int | None, keep: set[Path]) -> None:
    """Delete the oldest checkpoints above the limit, except those to keep."""
    for folder in surplus(output_dir, limit, keep):
        remove_or_warn(folder)


def surplus(output_dir: Path, limit: int | None, keep: set[Path], num_new: int = 0) -> list[Path]:
    """Return which checkpoints `rotate` would delete if there were `num_new` more."""
    if limit is None or limit <= 0:
        return []
    kept = {path.resolve() for path in keep}
    # A checkpoint elsewhere, such as the best one of another run, does not count against the limit.
    num_kept = sum(path.parent.resolve() == output_dir.resolve() for path in keep)
    folders = find(output_dir)
    num_surplus = len(folders) + num_new - max(limit, num_kept)
    return [folder for folder in folders if folder.resolve() not in kept][: max(num_surplus, 0)]


def remove_or_warn(folder: Path) -> None:
    """Delete a checkpoint. A failure is only a warning: it must not end the run that has just written another one."""
    try:
        files.remove_folder(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be deleted ({error.strerror or error})", stacklevel=3)


def seal(folder: Path) -> None:
    """Write the manifest of a folder."""
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": file_crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_bytes(SIGNED.dumps({"version": VERSION, "files": entries}).encode())


def weight_bytes(model: Any) -> int:
    """Return about how many bytes `save_pretrained` writes: all weights, or only the adapters of a PEFT model."""
    is_adapter = hasattr(model, "peft_config")
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not is_adapter)


def _describe_failure(folder: Path, needed_bytes: int, keep_free_bytes: int, error: Exception) -> str:
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    else:
        reason = f"the disk is full or cannot be written; {type(error).__name__}: {error}"
    try:
        free = f"{exact_bytes(files.free_bytes(folder.parent))} are free in {folder.parent}"
    except OSError as second:
        free = f"the free space in {folder.parent} is unknown ({second})"
    needed = f"it takes about {exact_bytes(needed_bytes)}, " if needed_bytes else ""
    if keep_free_bytes:
        needed += f"{exact_bytes(keep_free_bytes)} must stay free for the final save, "
    try:
        others = find(folder.parent)
        rest = f"the other checkpoints are intact, the newest is {others[-1].name}" if others else "there is no other"
    except OSError as second:
        rest = f"the other checkpoints cannot be listed ({second.strerror or second})"
    return f"{folder} was not written ({reason.splitlines()[0]}): {needed}{free}. No partial files are left; {rest}"


def _read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Return the record of every file, or None if there is no manifest. Raises if the manifest was changed."""
    path = folder / MANIFEST
    try:
        # Editors and copies may change line endings, and nothing else.
        text = path.read_bytes().decode().replace("\r\n", "\n").rstrip("\n")
    except FileNotFoundError:
        return None
    manifest = json.loads(text)
    version = manifest["version"]
    if version not in (1, VERSION):
        raise ValueError(f"its version is {version!r}, but this release of oomb reads 1 and {VERSION}")
    if version == VERSION and text != SIGNED.dumps(manifest):
        raise ValueError("its checksum differs")
    entries: dict[str, Any] = manifest["files"]
    return {
        name: FileRecord(int(entry["bytes"]), int(entry["crc32"]), is_sampled=version == 1)
        for name, entry in entries.items()
    }


def is_earlier(folder: Path, state: dict[str, Any]) -> bool:
    """Return whether a checkpoint is an earlier one of the run with this trainer state."""
    try:
        history = json.loads((folder / STATE).read_text())["log_history"]
    except (OSError, ValueError, KeyError):
        return False
    return history == state["log_history"][: len(history)]


def unreadable_file(folder: Path) -> str | None:
    """Return which file of a checkpoint is damaged and how, or None."""
    for path in sorted(folder.glob("*.pt*")):
        # torch.save writes a zip archive with a checksum per part.
        try:
            with zipfile.ZipFile(path) as archive:
                part = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            return f"{path.name} cannot be read ({error})"
        if part is not None:
            return f"{path.name} cannot be read (the checksum of {part} differs)"
    return find_broken_file(folder)


def check_optimizer_shapes(optimizer: Any, folder: Path) -> None:
    """Raise if a loaded moment does not have its parameter's shape. torch loads it anyway, and may crash in `step`."""
    plain = getattr(optimizer, "optimizer", optimizer)
    if type(plain) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return  # other optimizers may keep smaller projections
    for parameter, state in plain.state.items():
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"):
            moment = state.get(name)
            if isinstance(moment, torch.Tensor) and moment.shape != parameter.shape:
                raise BrokenCheckpoint(
                    f"{folder} is damaged or belongs to another model: {name} in optimizer.pt has shape "
                    f"{tuple(moment.shape)}, but its parameter {tuple(parameter.shape)}; "
                    f"{resume_advice(folder)}"
                )
