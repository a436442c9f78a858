"""Describe the machine, measure peak memory, and write events as lines of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from oomb.utils import files
from oomb.utils.units import GIB


def machine() -> dict[str, Any]:
    """Return the machine and the software versions as plain values for a JSON report."""
    packages = ("torch", "transformers", "accelerate", "peft", "triton", "liger-kernel")
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
        "gpu": None,
        "commit": _commit(),
        "source": source(),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        described["gpu"] = {
            "name": gpu.name,
            "memory_gib": round(gpu.total_memory / GIB, 1),
            "capability": f"{gpu.major}.{gpu.minor}",
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver_version(),
        }
    return described


def source() -> str:
    """Return a hash of the package's source code, with or without git."""
    package = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _commit() -> str | None:
    """Return the commit of the clone that the code runs from, or None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    # platform.processor() is empty or "x86_64" on Linux; the kernel knows the name.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


class MemoryMeter:
    """Peak memory since `reset`: that of PyTorch's GPU allocator, or on a CPU the largest RSS sampled.

    The peak RSS of a process cannot be reset, so on a CPU call `sample` when memory use is high, for example from the
    engine's `progress` hook after each chunk.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.device = device
        self._process = psutil.Process()
        self._peak_rss_bytes = 0
        self.reset()

    def reset(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._peak_rss_bytes = 0
        self.sample()

    def sample(self) -> None:
        if not self.on_gpu:
            self._peak_rss_bytes = max(self._peak_rss_bytes, self._process.memory_info().rss)

    @property
    def peak_bytes(self) -> int:
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        self.sample()
        return self._peak_rss_bytes

    @property
    def label(self) -> str:
        return "GPU peak" if self.on_gpu else "RSS peak"


class JsonLines:
    """A file with one JSON object per line, written line by line so a crash loses none.

    If the disk is full, lines wait in memory until a later write succeeds. Once the file is open, `write` and `close`
    only warn about disk errors, so that a failed write does not stop training.

    Args:
        path: the file. Its folder is created.
        append: keep the lines that the file already has.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._has_warned = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # In append mode even if the file is emptied: a truncation then leaves no hole.
        self._file = path.open("ab", buffering=0)
        if not append and path.stat().st_size:
            self._file.truncate(0)
        self._whole_bytes = path.stat().st_size
        """Size of the file up to its last complete line. What follows is cut off before the next write."""
        if self._whole_bytes and not path.read_bytes().endswith(b"\n"):
            # A killed run left half a line: end it, so the next record starts on a new line.
            self._whole_bytes += self._file.write(b"\n")

    def write(self, **record: Any) -> None:
        """Write one line, or keep it in memory with a warning if the disk cannot be written."""
        self._waiting.append((json.dumps(record, default=str) + "\n").encode())
        try:
            self._write_waiting()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror or error}): keeping its lines in memory until "
                    "there is room",
                    stacklevel=2,
                )

    def move_to(self, path: Path) -> None:
        """Copy all lines to another file and continue there. Raises OSError if that file cannot be written, and then
        continues in the old one."""
        try:
            lines = [self.path.read_bytes()[: self._whole_bytes]]
        except OSError as error:
            lines = []
            warnings.warn(
                f"{self.path} cannot be read, so its lines are not copied ({error.strerror or error})", stacklevel=2
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(path) as partial:
            partial.write(b"".join([*lines, *self._waiting]))
            # Opened before the rename: nothing can fail after it.
            hidden = Path(partial.name)
            file = hidden.open("ab", buffering=0)
        old, self._file, self.path = self._file, file, path
        self._whole_bytes, self._has_warned = path.stat().st_size, False
        self._waiting.clear()
        _close_quietly(old)

    def close(self) -> None:
        """Write the waiting lines, or warn if that is not possible."""
        if self._file.closed:
            return
        try:
            self._write_waiting()
        except OSError as error:
            lines = f"{len(self._waiting):,} lines" if len(self._waiting) > 1 else "one line"
            reason = error.strerror or error
            warnings.warn(f"the last of {self.path}, {lines}, could not be written ({reason})", stacklevel=2)
        finally:
            late = _close_quietly(self._file)
        if late is not None:
            warnings.warn(f"the last of {self.path} may not be on the disk ({late.strerror or late})", stacklevel=2)

    def _write_waiting(self) -> None:
        """Write the waiting lines. Each waits until all of it is written."""
        while self._waiting:
            if os.fstat(self._file.fileno()).st_size > self._whole_bytes:
                self._file.truncate(self._whole_bytes)
            line, written = self._waiting[0], 0
            try:
                while written < len(line):
                    # A nearly full disk may take only part of it.
                    written += self._file.write(line[written:])
            except OSError:
                if written:
                    self._file.truncate(self._whole_bytes)
                raise
            self._whole_bytes += len(line)
            del self._waiting[0]
        self._has_warned = False

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _close_quietly(file: Any) -> OSError | None:
    """Close a file and return the error, if any: some file systems report failed writes only now."""
    try:
        file.close()
    except OSError as error:
        return error
    return None
