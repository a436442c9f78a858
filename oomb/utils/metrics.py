"""What train and bench both report: the machine, the memory used, and one JSON line per event."""

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
    """The machine and the software, as plain values for a JSON report."""
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
    """A fingerprint of the package's own code: equal where the code is, whatever git says of the folder it lies in."""
    package = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _commit() -> str | None:
    """The commit that the code stands at, where it runs out of a clone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


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
    """Peak memory since `reset`: the GPU allocator's peak where there is a GPU, else the largest RSS seen.

    A process's RSS has no peak that can be reset, so on a CPU `sample` must be called where memory is high; the
    progress hook of the engine, after each chunk, is such a place.
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
    """Writes one JSON object per line, each at once, so that a crash loses nothing that was written.

    Lines that find no room on the disk wait in memory and are written, in their order, with the next one that does. No
    error of the disk is raised after the file has been opened: hours of training are worth more than a line of it.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._is_told = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # To append also to an empty file: what is cut off leaves no hole then.
        self._file = path.open("ab", buffering=0)
        if not append and path.stat().st_size:
            self._file.truncate(0)
        self._whole_bytes = path.stat().st_size
        """Of the file, up to the end of its last whole line: what lies behind is cut off before more is written."""
        if self._whole_bytes and not path.read_bytes().endswith(b"\n"):
            # A killed run left half a line behind; what comes now is not to be part of it.
            self._whole_bytes += self._file.write(b"\n")

    def write(self, **record: Any) -> None:
        self._waiting.append((json.dumps(record, default=str) + "\n").encode())
        try:
            self._write_waiting()
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror or error}): its lines are kept in memory until "
                    "there is room",
                    stacklevel=2,
                )

    def move_to(self, path: Path) -> None:
        """Goes on in another file, with all lines so far: those on the disk, which stay there as well, and those that
        wait. Raises OSError where that cannot be written, and goes on as before then."""
        try:
            lines = [self.path.read_bytes()[: self._whole_bytes]]
        except OSError as error:
            lines = []
            warnings.warn(f"{self.path} cannot be read and stays where it is ({error.strerror or error})", stacklevel=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(path) as partial:
            partial.write(b"".join([*lines, *self._waiting]))
            # Opened before the rename: nothing can fail after it.
            hidden = Path(partial.name)
            file = hidden.open("ab", buffering=0)
        old, self._file, self.path = self._file, file, path
        self._whole_bytes, self._is_told = path.stat().st_size, False
        self._waiting.clear()
        _closed(old)

    def close(self) -> None:
        """Tries once more; what still cannot be written is told."""
        if self._file.closed:
            return
        try:
            self._write_waiting()
        except OSError as error:
            lines = f"{len(self._waiting):,} lines" if len(self._waiting) > 1 else "one line"
            reason = error.strerror or error
            warnings.warn(f"the last of {self.path}, {lines}, could not be written ({reason})", stacklevel=2)
        finally:
            late = _closed(self._file)
        if late is not None:
            warnings.warn(f"the last of {self.path} may not be on the disk ({late.strerror or late})", stacklevel=2)

    def _write_waiting(self) -> None:
        """A line waits until all of it is written, whatever comes in between."""
        while self._waiting:
            if os.fstat(self._file.fileno()).st_size > self._whole_bytes:
                self._file.truncate(self._whole_bytes)
            line, written = self._waiting[0], 0
            try:
                while written < len(line):
                    # A disk with some room left takes some of it.
                    written += self._file.write(line[written:])
            except OSError:
                if written:
                    self._file.truncate(self._whole_bytes)
                raise
            self._whole_bytes += len(line)
            del self._waiting[0]
        self._is_told = False

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _closed(file: Any) -> OSError | None:
    """Closes it; some file systems say only now what did not reach the disk."""
    try:
        file.close()
    except OSError as error:
        return error
    return None
