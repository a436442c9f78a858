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
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

from oomb.utils.units import exact_bytes

MANIFEST = "oomb_manifest.json"
STATE = "trainer_state.json"
"""What transformers writes last, and so the sign of a whole checkpoint where there is no manifest."""
VERSION = 2
"""Of the manifest. In version 1, checksums of files above 64 MiB cover a sample of them (`_sample_checksum`)."""
PIECE = 2**26
"""Files are read in pieces of this size, several at a time: a CRC-32 of one piece runs at about 1 GB/s per core."""
NUM_READERS = min(8, os.cpu_count() or 1)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|gone)-(?P<pid>\d+)")
_ours: set[Path] = set()
"""The hidden folders that this process is at work on. A process in a container often has the number of the one before
it, so the number alone does not tell."""
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
        raise CheckpointNotSaved(_what_failed(folder, needed_bytes, keep_free_bytes, error)) from error
    try:
        sync_folder(folder.parent)
    except OSError as error:
        warnings.warn(
            f"{folder} is written, but a power cut may take its name away ({error.strerror or error})", stacklevel=3
        )


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
        files = _manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is damaged: {MANIFEST} cannot be read ({error})"
    if files is None:
        try:
            int(json.loads((folder / STATE).read_text())["global_step"])
        except FileNotFoundError:
            return f"{folder} is no whole checkpoint: it holds no {STATE}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{folder} is damaged: {STATE} cannot be read ({error})"
        return None
    try:
        return _difference(folder, {name: entry for name, entry in files.items() if only(name)}, in_full)
    except OSError as error:
        return f"{folder} is damaged: {error.filename or 'a file'} cannot be read ({error.strerror or error})"


def _difference(folder: Path, files: dict[str, tuple[int, int, bool]], in_full: bool) -> str | None:
    """Return how the files differ from their manifest, or None."""
    for name, (size, _, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder} is damaged: {name} is missing"
        if path.stat().st_size != size:
            return f"{folder} is damaged: {name} has {path.stat().st_size:,} bytes and {size:,} were written"
    if not in_full:
        return None
    now, seen = time.time_ns(), _seen(folder, files)
    if (folder.absolute(), seen) in _verified:
        return None
    for name, (_, checksum, is_sampled) in files.items():
        if (_sample_checksum if is_sampled else fingerprint)(folder / name) != checksum:
            return f"{folder} is damaged: {name} is not what was written (its checksum differs)"
    # A file that has just been written can be written again without a change of its time stamp.
    if all(now - stat[2] > STEADY_NS for stat in seen):
        _verified.add((folder.absolute(), seen))
    return None


def _seen(folder: Path, files: Any) -> tuple[Any, ...]:
    """Return what changes when a file of a checkpoint is written to, as far as the file system tells."""
    stats = [(folder / name).stat() for name in (MANIFEST, *files)]
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
    sync_folder(aside)
    sync_folder(output_dir)
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


def remove_leftovers(output_dir: Path | str) -> None:
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
    manifest.write_bytes(_signed({"version": VERSION, "files": files}).encode())
    _sync(manifest)
    sync_folder(folder)


def _signed(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest, which ends with a checksum of all before it."""
    return json.dumps({**manifest, "crc32": crc32(json.dumps(manifest).encode())}, indent=1)


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
    """Return a CRC-32 of a whole file: the plain one up to one piece, above that the CRC-32 of those of its pieces.
    Pieces are read side by side."""

    def of_piece(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return crc32(file.read(PIECE))

    starts = range(0, path.stat().st_size, PIECE)
    if len(starts) <= 1:
        return of_piece(0)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return crc32(b"".join(checksum.to_bytes(4, "little") for checksum in readers.map(of_piece, starts)))


def _sample_checksum(path: Path, piece: int = 2**20, num_pieces: int = 64) -> int:
    """Return the checksum of manifests of version 1: of 64 pieces of 1 MiB spread over a large file."""
    size = path.stat().st_size
    starts = list(range(0, size, piece))
    if len(starts) > num_pieces:
        starts = [index * (size - piece) // (num_pieces - 1) for index in range(num_pieces)]
    checksum = 0
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            checksum = crc32(file.read(piece), checksum)
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
        free = f"{exact_bytes(free_bytes(folder.parent))} are free in {folder.parent}"
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
    unsigned = {key: value for key, value in manifest.items() if key != "crc32"}
    if version == VERSION and text != _signed(unsigned):
        raise ValueError("its checksum differs")
    files: dict[str, Any] = manifest["files"]
    return {name: (int(entry["bytes"]), int(entry["crc32"]), version == 1) for name, entry in files.items()}


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
    if folder.is_symlink():
        # A checkpoint that somebody keeps elsewhere and has linked here: the link goes, the checkpoint stays.
        folder.unlink(missing_ok=True)
        return
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
