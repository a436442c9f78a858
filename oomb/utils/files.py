"""Write files and folders so that they are complete or absent, whatever ends the process.

    .report.html.partial-4711                    a file being written by process 4711
    .checkpoint-6.partial-4711/checkpoint-6      a folder being written
    .checkpoint-6.old-4711                       the folder it replaces, until the new one has the name
    .checkpoint-2.gone-4711                      a folder being deleted

Bytes reach the disk before the name appears, and a folder loses its name before its files are deleted. A kill leaves
hidden files and folders at most; `remove_leftovers` deletes them.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old|gone)-(?P<pid>\d+)")
_in_use: set[Path] = set()
"""Hidden paths that this process works on. In a container the next process often gets the same number, so the number
alone does not identify the owner."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a hidden file next to `path` that replaces it at the end of the `with`, unless that raises.

    Links, devices and pipes (`/dev/stdout`) are written directly.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
        return
    with _claimed(_hidden(path.absolute(), "partial")) as partial:
        with partial.open("wb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, all of it or nothing."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder of the same name that takes the place of `folder` at the end of the `with`, unless that
    raises. What was at `folder` before stays there until then."""
    folder = folder.absolute()
    with _claimed(_hidden(folder, "partial")) as partial:
        (partial / folder.name).mkdir(parents=True)
        yield partial / folder.name
        sync_files(partial / folder.name)
        _replace(partial / folder.name, folder)
    try:
        sync_folder(folder.parent)
    except OSError as error:
        warnings.warn(
            f"{folder} is written, but its name may be lost in a power cut ({error.strerror or error})", stacklevel=3
        )


def remove_folder(folder: Path) -> None:
    """Delete a folder, its name first: a folder that is deleted in part must not be mistaken for a complete one."""
    with _claimed(_hidden(folder.absolute(), "gone")) as gone:
        folder.rename(gone)
        sync_folder(gone.parent)


def remove_leftovers(folder: Path | str) -> None:
    """Delete what processes that no longer run left half done in a folder, and restore what they were replacing."""
    if not Path(folder).is_dir():
        return
    for path in Path(folder).absolute().iterdir():
        match = _HIDDEN.fullmatch(path.name)
        if match is None or _is_in_use(int(match["pid"]), path):
            continue
        replaced = path.with_name(match["name"])
        if match["kind"] == "old" and not replaced.exists():
            # Killed between two renames. It is complete: it is deleted only after the new one is in place.
            path.rename(replaced)
        else:
            _delete(path)


def sync_files(folder: Path) -> None:
    """Wait until everything in a folder is on the disk. Some disks report only now that they are full."""
    for path in [*sorted(folder.rglob("*")), folder]:
        if path.is_file():
            _sync_path(path)
        elif path.is_dir():
            sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    try:
        _sync_path(folder)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise


def free_bytes(folder: Path) -> int:
    """Return the disk space that is free for this user in a folder. Creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, or 0 if the disk does not tell."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


def is_write_error(error: BaseException) -> bool:
    """Return whether a file could not be written. safetensors and torch.save lose the system's error number, so their
    errors are recognized by their texts."""
    if isinstance(error, OSError):
        return True
    if type(error).__name__ == "SafetensorError":
        return "os error" in str(error) or "I/O" in str(error)
    # torch's zip writer, which reports positions in the archive, and the stream below it.
    signs = ("inline_container", "PytorchStreamWriter", "iostream")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}")


@contextmanager
def _claimed(hidden: Path) -> Iterator[Path]:
    """Mark a hidden path as this process's own. Nothing is at the path before, and nothing is left there afterwards."""
    _delete(hidden)
    _in_use.add(hidden)
    try:
        yield hidden
    finally:
        _delete(hidden)
        _in_use.discard(hidden)


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. An existing folder makes room first, and returns if the rename fails."""
    if not folder.exists():
        new.rename(folder)
        return
    old = _hidden(folder, "old")
    _in_use.add(old)
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
        _in_use.discard(old)


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        # A symbolic link to a folder that is kept elsewhere: the link goes, the folder stays.
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)


def _is_in_use(pid: int, path: Path) -> bool:
    """Return whether the process that made a hidden path still runs. A process that started after the last write to the
    path is another one with the same number; clocks may be off by a second or two."""
    if pid == os.getpid():
        return path in _in_use
    try:
        process = psutil.Process(pid)
        is_running = process.status() != psutil.STATUS_ZOMBIE
        return is_running and process.create_time() <= path.stat().st_mtime + 2
    except (psutil.Error, OSError):
        return False


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """Wait until a file's bytes are on the disk, if the file system can tell. Otherwise its name could survive a power
    cut and its bytes not."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def near_paths(path: Path) -> list[str]:
    """Return existing paths spelled much like `path`, closest first."""
    try:
        names = [other.name for other in path.parent.iterdir()]
    except OSError:
        return []
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=3)]
