"""Lock a folder for one run at a time. The system releases the lock when the process ends, however it ends."""

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
"""How long to wait for a lock whose owner has died: PyTorch's data loader workers, which inherit the lock, look for
their parent every 5 s."""


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Create a folder and keep other runs out of it.

    Removes the folder at the end if it is still empty. Raises ValueError if another process has locked it. On a file
    system without locks, nothing is locked.
    """
    new = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {output_dir} cannot be created: {error.strerror}; choose another folder"
        ) from error
    path = output_dir / LOCK
    descriptor = _acquire(path)
    try:
        yield
    finally:
        if descriptor is not None:
            # Delete the file while the lock is held, so whoever comes next creates a new one. On a disk that can no
            # longer be written the file stays, and locks nothing.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)
        for folder in new:
            try:
                folder.rmdir()
            except OSError:
                break


def _acquire(path: Path) -> int | None:
    """Return the open lock file, or None if there can be no lock. Raises ValueError if another process has it."""
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
            # The previous owner may have deleted the file after we opened it and before it released the lock.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace")
            os.close(descriptor)
            # Workers of a killed run hold its lock until they notice that it has died.
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and time.monotonic() < give_up_at:
                time.sleep(0.1)
                continue
            who = f" (process {owner})" if owner.isdigit() else ""
            raise ValueError(
                f"another run{who} writes to {path.parent}: wait until it ends, or choose another output_dir"
            ) from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
