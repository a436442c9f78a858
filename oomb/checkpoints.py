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
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

MANIFEST = "oomb_manifest.json"
STATE = "trainer_state.json"
"""What transformers writes last, and so the sign of a whole checkpoint where there is no manifest."""
PIECE = 2**20
NUM_PIECES = 64
"""A checksum reads a file whole up to 64 MiB, above that 64 pieces spread over it: it finds what a crash leaves (files
cut short, pages of zeros) and costs the same for a hundred gigabytes."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|gone)-(?P<pid>\d+)")
_ours: set[Path] = set()
"""The hidden folders that this process is at work on. A process in a container often has the number of the one before
it, so the number alone does not tell."""


class BrokenCheckpoint(ValueError):
    """A folder that is to be loaded is no checkpoint, or not all of one."""


class NotSaved(OSError):
    """A checkpoint could not be written. Nothing of it is left, and what was there before is still there."""


@contextmanager
def written(folder: Path, needed_bytes: int = 0, keep_free_bytes: int = 0) -> Iterator[Path]:
    """Yields a new place of the same name to write to; it becomes `folder` at the end of the `with`, all of it or
    nothing. What cannot be written raises `NotSaved`; where `needed_bytes` are not free, or `keep_free_bytes` would not
    be afterwards, before anything is."""
    folder = folder.absolute()
    hidden = _hidden(folder, "partial")
    try:
        try:
            if needed_bytes + keep_free_bytes > free_bytes(folder.parent):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _delete(hidden)
            _ours.add(hidden)
            (hidden / folder.name).mkdir(parents=True)
            yield hidden / folder.name
            seal(hidden / folder.name)
            _put(hidden / folder.name, folder)
        finally:
            # Before the error is described: what was written of it must not count as taken.
            _delete(hidden)
            _ours.discard(hidden)
    except Exception as error:
        if not is_failure_to_write(error):
            raise
        raise NotSaved(_what_failed(folder, needed_bytes, keep_free_bytes, error)) from error
    try:
        sync_folder(folder.parent)
    except OSError as error:
        warnings.warn(
            f"{folder} is written, but a power cut may take its name away ({error.strerror or error})", stacklevel=3
        )


def check(folder: Path | str) -> None:
    """Raises `BrokenCheckpoint`, naming the file, unless the folder is a whole checkpoint: one of ours with every file
    that its manifest lists, or one that transformers finished."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BrokenCheckpoint(f"{folder} is no checkpoint: there is no such folder")
    files = _manifest(folder)
    if files is None:
        try:
            int(json.loads((folder / STATE).read_text())["global_step"])
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{folder} is no whole checkpoint: it holds no {STATE}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BrokenCheckpoint(f"{folder} is broken: {STATE} cannot be read ({error})") from error
        return
    for name, (size, checksum) in files.items():
        path = folder / name
        remedy = "resume from another checkpoint, or delete this one"
        if not path.is_file():
            raise BrokenCheckpoint(f"{folder} is broken: {name} is missing; {remedy}")
        if path.stat().st_size != size:
            raise BrokenCheckpoint(
                f"{folder} is broken: {name} has {path.stat().st_size:,} bytes and {size:,} were written; {remedy}"
            )
        if fingerprint(path) != checksum:
            raise BrokenCheckpoint(f"{folder} is broken: {name} is not what was written (its checksum); {remedy}")


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


def latest(output_dir: Path | str) -> Path | None:
    """The newest whole checkpoint of a run, or None. Broken ones are passed over with a warning."""
    for folder in reversed(find(output_dir)):
        try:
            check(folder)
        except BrokenCheckpoint as error:
            warnings.warn(f"{error}. Looking for an older one.", stacklevel=2)
        else:
            return folder
    return None


def rotate(output_dir: Path, limit: int | None, keep: set[Path]) -> None:
    """Deletes the oldest checkpoints above the limit, those to keep excepted."""
    for folder in surplus(output_dir, limit, keep):
        remove_or_warn(folder)


def surplus(output_dir: Path, limit: int | None, keep: set[Path], num_new: int = 0) -> list[Path]:
    """The oldest checkpoints above the limit, those to keep excepted, once there are `num_new` more."""
    if limit is None or limit <= 0:
        return []
    kept = {path.absolute() for path in keep}
    folders = find(output_dir)
    num_surplus = len(folders) + num_new - max(limit, len(kept))
    return [folder for folder in folders if folder.absolute() not in kept][: max(num_surplus, 0)]


def remove_or_warn(folder: Path) -> None:
    """A checkpoint that cannot be deleted takes room, and is no reason to end the run that has just written another."""
    try:
        remove(folder)
    except OSError as error:
        warnings.warn(f"{folder} could not be deleted ({error.strerror or error})", stacklevel=3)


def remove(folder: Path) -> None:
    """Takes the name away first: a checkpoint that is deleted in part is no checkpoint."""
    hidden = _hidden(folder.absolute(), "gone")
    _delete(hidden)
    _ours.add(hidden)
    try:
        folder.rename(hidden)
        sync_folder(hidden.parent)
        _delete(hidden)
    finally:
        _ours.discard(hidden)


def clean(output_dir: Path | str) -> None:
    """Clears away what processes that are no more have left half done in a run's folder."""
    if not Path(output_dir).is_dir():
        return
    for path in Path(output_dir).absolute().iterdir():
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not path.is_dir() or _is_at_work(int(match["pid"]), path):
            continue
        folder = path.with_name(match["name"])
        if match["kind"] == "old" and not folder.exists():
            # Killed between two renames. It is whole, for nothing of it is deleted before the new one is in place.
            path.rename(folder)
        else:
            _delete(path)


def seal(folder: Path) -> None:
    """Brings all files of a folder to the disk, and last the list of them."""
    sync_files(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": fingerprint(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"version": 1, "files": files}, indent=1))
    _sync(manifest)
    sync_folder(folder)


def sync_files(folder: Path) -> None:
    """Waits until all that is in a folder is on the disk. Some disks say only now that they are full."""
    for path in [*sorted(folder.rglob("*")), folder]:
        if path.is_file():
            _sync(path)
        elif path.is_dir():
            sync_folder(path)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, as far as they can be asked."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


def fingerprint(path: Path) -> int:
    """A CRC-32 of a file, of pieces of it where it is large."""
    size = path.stat().st_size
    starts = list(range(0, size, PIECE))
    if len(starts) > NUM_PIECES:
        starts = [index * (size - PIECE) // (NUM_PIECES - 1) for index in range(NUM_PIECES)]
    checksum = 0
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            checksum = crc32(file.read(PIECE), checksum)
    return checksum


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left for this user; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free


def is_failure_to_write(error: BaseException) -> bool:
    """Also as safetensors and torch.save report it, which lose the system's number for it."""
    if isinstance(error, OSError):
        return True
    if type(error).__name__ == "SafetensorError":
        return "os error" in str(error) or "I/O" in str(error)
    # The zip writer of torch, whose message is of positions, and the stream below it.
    signs = ("inline_container", "PytorchStreamWriter", "iostream")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _what_failed(folder: Path, needed_bytes: int, keep_free_bytes: int, error: Exception) -> str:
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    else:
        reason = f"the disk is full or cannot be written; {type(error).__name__}: {error}"
    try:
        free = f"{_size(free_bytes(folder.parent))} are free in {folder.parent}"
    except OSError as second:
        free = f"{folder.parent} cannot be asked for its free space ({second})"
    needed = f"it takes about {_size(needed_bytes)}, " if needed_bytes else ""
    needed += f"{_size(keep_free_bytes)} are to stay free for what is saved at the end, " if keep_free_bytes else ""
    try:
        there = find(folder.parent)
        before = (
            f"the other checkpoints are as they were, the newest is {there[-1].name}" if there else "there is no other"
        )
    except OSError as second:
        before = f"what else is there cannot be listed ({second.strerror or second})"
    return f"{folder} was not written ({reason.splitlines()[0]}): {needed}{free}. Nothing of it is left; {before}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes" if num_bytes < 2**20 else f"{num_bytes:,} bytes ({num_bytes / 2**30:.2f} GiB)"


def _manifest(folder: Path) -> dict[str, tuple[int, int]] | None:
    path = folder / MANIFEST
    try:
        files: dict[str, Any] = json.loads(path.read_text())["files"]
        return {name: (int(entry["bytes"]), int(entry["crc32"])) for name, entry in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpoint(f"{folder} is broken: {MANIFEST} cannot be read ({error})") from error


def _put(new: Path, folder: Path) -> None:
    """Renames; what bears the name already makes room first, and comes back if that fails."""
    old = _hidden(folder, "old")
    if not folder.exists():
        new.rename(folder)
        return
    _ours.add(old)
    try:
        folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
        sync_folder(folder.parent)
        _delete(old)
    finally:
        _ours.discard(old)


def _hidden(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}-{os.getpid()}")


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _is_at_work(pid: int, path: Path) -> bool:
    """Whether the process that made a hidden folder still runs. One that started after the folder was last written to
    is another one with the same number; a clock may be off by a second or two."""
    if pid == os.getpid():
        return path in _ours
    try:
        process = psutil.Process(pid)
        is_there = process.status() != psutil.STATUS_ZOMBIE
        return is_there and process.create_time() <= path.stat().st_mtime + 2
    except (psutil.Error, OSError):
        return False


def _sync(path: Path) -> None:
    """Waits until a file's bytes are on the disk, where the file system knows of it. Without it a name can outlive a
    power cut and the bytes not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """The same of the names in a folder."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
