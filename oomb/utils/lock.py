"""One run at a time in a folder. The system gives the lock back when a process ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
ORPHANS_S = 30.0
"""How long to wait for a lock whose owner is gone. PyTorch's data loader workers look for their parent every 5 s."""


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it. A folder that is still empty at the end is taken away again.
    Where the file system knows no locks there is none."""
    new = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {output_dir} cannot be created: {error.strerror}; choose another folder"
        ) from error
    path = output_dir / LOCK
    descriptor = _taken(path)
    try:
        yield
    finally:
        if descriptor is not None:
            # While it is still held: whoever opens the file after this makes a new one.
            # On a disk that can no longer be written, the file stays and locks nothing.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)
        for folder in new:
            try:
                folder.rmdir()
            except OSError:
                break


def _taken(path: Path) -> int | None:
    """The open lock file, or None where there can be no lock. Raises where another process has it."""
    if fcntl is None:
        return None
    give_up_at = time.monotonic() + ORPHANS_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have deleted the file between our opening it and its giving the lock back.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace")
            os.close(descriptor)
            # Workers that a killed run has forked hold its lock until they notice that it is gone.
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and time.monotonic() < give_up_at:
                time.sleep(0.1)
                continue
            who = f" (process {owner})" if owner.isdigit() else ""
            raise ValueError(
                f"another run{who} writes to {path.parent}: wait until it ends, or name another output_dir"
            ) from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
