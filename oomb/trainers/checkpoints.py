"""Checkpoints as folders on disk. What bears a checkpoint's name is whole, whatever ends the process that wrote it.

    .checkpoint-6.partial-4711/checkpoint-6    being written by process 4711
    checkpoint-6                               whole: its manifest, written last, lists every file
    .checkpoint-6.old-4711                     an earlier one of that name, until the new one is in its place
    .checkpoint-2.gone-4711                    being deleted

Files reach the disk before the folder gets its name, and a folder loses its name before its files are deleted. So a
kill leaves hidden folders at most, and the next run clears them away.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from oomb.utils import files
from oomb.utils.checksums import SignedJson, file_crc32, sampled_crc32
from oomb.utils.units import exact_bytes

MANIFEST = "oomb_manifest.json"
STATE = "trainer_state.json"
"""What transformers writes last, and so the sign of a whole checkpoint where there is no manifest."""
SIGNED = SignedJson("crc32", crc32, indent=1)
VERSION = 2
"""Of the manifest. In version 1, checksums of files above 64 MiB cover a sample of them (`sampled_crc32`)."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
STEADY_NS = 2 * 10**9
_verified: set[tuple[Path, tuple[Any, ...]]] = set()
"""Checkpoints that this process has read in full, with the state of their files then: a resume checks more than once
and reads once."""


class BrokenCheckpoint(ValueError):
    """A folder that is to be loaded is no checkpoint, or not all of one."""


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written. Nothing of it is left, and what was there before is still there."""


@contextmanager
def write(folder: Path, needed_bytes: int = 0, keep_free_bytes: int = 0) -> Iterator[Path]:
    """Yields a new place of the same name to write to; it becomes `folder` at the end of the `with`, all of it or
    nothing. What cannot be written raises `NotSaved`; where `needed_bytes` are not free, or `keep_free_bytes` would not
    be afterwards, before anything is."""
    folder = folder.absolute()
    try:
        if needed_bytes + keep_free_bytes > files.free_bytes(folder.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with files.atomic_folder(folder) as partial:
            yield partial
            seal(partial)
    except Exception as error:
        # What was written of it is deleted by now, and does not count as taken.
        if not files.is_write_error(error):
            raise
        raise CheckpointNotSaved(_what_failed(folder, needed_bytes, keep_free_bytes, error)) from error


def check(folder: Path | str, only: Callable[[str], bool] = lambda name: True) -> None:
    """Raise `BrokenCheckpoint`, naming the file and an older checkpoint, unless the folder is a whole checkpoint.

    Of ours every file is read in full and compared with the manifest, or those whose names `only` picks. One of
    transformers counts once it is finished.
    """
    folder = Path(folder)
    problem = _problem(folder, only=only)
    if problem is not None:
        raise BrokenCheckpoint(f"{problem}; {instead_of(folder)}")


def instead_of(folder: Path) -> str:
    """Return what to do when a checkpoint cannot be used: the newest whole one before it, by name."""
    match = _CHECKPOINT.fullmatch(folder.name)
    older = [other for other in find(folder.parent) if match is None or step_of(other) < int(match[1])]
    for other in reversed(older):
        if other != folder and _problem(other) is None:
            return f"resume from {other} instead"
    return f"there is no older whole checkpoint in {folder.parent}"


def _problem(folder: Path, *, in_full: bool = True, only: Callable[[str], bool] = lambda name: True) -> str | None:
    """Return what is wrong with a checkpoint, or None. Without `in_full` its files are not read."""
    if not folder.is_dir():
        return f"{folder} is no checkpoint: there is no such folder"
    try:
        entries = _manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is damaged: {MANIFEST} cannot be read ({error})"
    if entries is None:
        try:
            int(json.loads((folder / STATE).read_text())["global_step"])
        except FileNotFoundError:
            return f"{folder} is no whole checkpoint: it holds no {STATE}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{folder} is damaged: {STATE} cannot be read ({error})"
        return None
    try:
        return _difference(folder, {name: entry for name, entry in entries.items() if only(name)}, in_full)
    except OSError as error:
        return f"{folder} is damaged: {error.filename or 'a file'} cannot be read ({error.strerror or error})"


def _difference(folder: Path, entries: dict[str, tuple[int, int, bool]], in_full: bool) -> str | None:
    """Return how the files differ from their manifest, or None."""
    for name, (size, _, _) in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{folder} is damaged: {name} is missing"
        if path.stat().st_size != size:
            return f"{folder} is damaged: {name} has {path.stat().st_size:,} bytes and {size:,} were written"
    if not in_full:
        return None
    now, seen = time.time_ns(), _seen(folder, entries)
    if (folder.absolute(), seen) in _verified:
        return None
    for name, (_, checksum, is_sampled) in entries.items():
        if (sampled_crc32 if is_sampled else file_crc32)(folder / name) != checksum:
            return f"{folder} is damaged: {name} is not what was written (its checksum differs)"
    # A file that has just been written can be written again without a change of its time stamp.
    if all(now - stat[2] > STEADY_NS for stat in seen):
        _verified.add((folder.absolute(), seen))
    return None


def _seen(folder: Path, names: Iterable[str]) -> tuple[Any, ...]:
    """Return what changes when a file of a checkpoint is written to, as far as the file system tells."""
    stats = [(folder / name).stat() for name in (MANIFEST, *names)]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)


def find(output_dir: Path | str) -> list[Path]:
    """What bears a checkpoint's name in a run's folder, by step, the newest last."""
    if not Path(output_dir).is_dir():
        return []
    found = [path for path in Path(output_dir).iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path | str) -> int:
    """The step in the name of a checkpoint."""
    match = _CHECKPOINT.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"{folder} is not named like a checkpoint: checkpoint-100, for example")
    return int(match[1])


def latest(output_dir: Path | str, *, in_full: bool = True) -> Path | None:
    """The newest whole checkpoint of a run, or None. Damaged ones are passed over with a warning. Without `in_full`
    only names and sizes of files are looked at: enough for a message."""
    for folder in reversed(find(output_dir)):
        problem = _problem(folder, in_full=in_full)
        if problem is None:
            return folder
        warnings.warn(f"{problem}. Looking for an older one.", stacklevel=2)
    return None


def set_aside(output_dir: Path, resumed: Path | None, keep: set[Path] | None = None) -> None:
    """Move the checkpoints of an earlier run out of the way of one that started from `resumed`, or from the first step:
    it would resume from them as the newest, and delete its own in their favor. Those in `keep` stay."""
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
    # A name that `push_to_hub` leaves out.
    numbered = (output_dir / f"_replaced-{number}" for number in range(1, 1_000_000))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    # The newest last: if this process is killed in between, the earlier run can still be resumed from its newest one.
    for folder in folders:
        if folder.is_symlink():
            # Its target may be relative to the folder that it is in.
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
    """Deletes the oldest checkpoints above the limit, those to keep excepted."""
    for folder in surplus(output_dir, limit, keep):
        remove_or_warn(folder)


def surplus(output_dir: Path, limit: int | None, keep: set[Path], num_new: int = 0) -> list[Path]:
    """The oldest checkpoints above the limit, those to keep excepted, once there are `num_new` more."""
    if limit is None or limit <= 0:
        return []
    kept = {path.resolve() for path in keep}
    # One that lies elsewhere, the best of another run for example, takes no place here.
    num_kept = sum(path.parent.resolve() == output_dir.resolve() for path in keep)
    folders = find(output_dir)
    num_surplus = len(folders) + num_new - max(limit, num_kept)
    return [folder for folder in folders if folder.resolve() not in kept][: max(num_surplus, 0)]


def remove_or_warn(folder: Path) -> None:
    """A checkpoint that cannot be deleted takes room, and is no reason to end the run that has just written another."""
    try:
        files.remove_folder(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be deleted ({error.strerror or error})", stacklevel=3)


def seal(folder: Path) -> None:
    """Write the manifest: the list of all files with their sizes and checksums."""
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": file_crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_bytes(SIGNED.dumps({"version": VERSION, "files": entries}).encode())


def weight_bytes(model: Any) -> int:
    """Return about how many bytes the weights of a model take when it is saved; of adapters, theirs alone."""
    is_adapter = hasattr(model, "peft_config")
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not is_adapter)


def _what_failed(folder: Path, needed_bytes: int, keep_free_bytes: int, error: Exception) -> str:
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    else:
        reason = f"the disk is full or cannot be written; {type(error).__name__}: {error}"
    try:
        free = f"{exact_bytes(files.free_bytes(folder.parent))} are free in {folder.parent}"
    except OSError as second:
        free = f"{folder.parent} cannot be asked for its free space ({second})"
    needed = f"it takes about {exact_bytes(needed_bytes)}, " if needed_bytes else ""
    needed += (
        f"{exact_bytes(keep_free_bytes)} are to stay free for what is saved at the end, " if keep_free_bytes else ""
    )
    try:
        there = find(folder.parent)
        before = (
            f"the other checkpoints are as they were, the newest is {there[-1].name}" if there else "there is no other"
        )
    except OSError as second:
        before = f"what else is there cannot be listed ({second.strerror or second})"
    return f"{folder} was not written ({reason.splitlines()[0]}): {needed}{free}. Nothing of it is left; {before}"


def _manifest(folder: Path) -> dict[str, tuple[int, int, bool]] | None:
    """Return bytes and checksum of every file, and whether that covers a sample of it; None where there is no manifest.
    Raises where it is not as it was written."""
    path = folder / MANIFEST
    try:
        # Editors and copies may change how its lines end, and nothing else.
        text = path.read_bytes().decode().replace("\r\n", "\n").rstrip("\n")
    except FileNotFoundError:
        return None
    manifest = json.loads(text)
    version = manifest["version"]
    if version not in (1, VERSION):
        raise ValueError(f"its version is {version!r}; this release of oomb reads {VERSION}")
    if version == VERSION and text != SIGNED.dumps(manifest):
        raise ValueError("its checksum differs")
    entries: dict[str, Any] = manifest["files"]
    return {name: (int(entry["bytes"]), int(entry["crc32"]), version == 1) for name, entry in entries.items()}
