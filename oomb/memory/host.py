"""Free memory of GPU and host, and pinned host memory."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from oomb.memory.pool import OutOfPages
from oomb.utils.units import GIB, gib

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


GAPS = 0.03
"""Share of a GPU that lies between allocations: steps of Qwen2.5-7B reserved 3% to 6% more than they used; the margin
that plans leave covers the rest."""


PIECE_BYTES = GIB
"""Host memory that is asked for at once."""


def free_gpu_bytes(device: torch.device) -> int | None:
    """Memory that this process may still take on the device, or None where nobody counts it."""
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return max(0, min(free + unused, int(limit) - allocated))


def usable_gpu_bytes(device: torch.device) -> int | None:
    """The same without what gaps will take."""
    free = free_gpu_bytes(device)
    return None if free is None else max(0, free - int(GAPS * (free + torch.cuda.memory_allocated(device))))


def avoid_gaps(device: torch.device) -> None:
    """Lets PyTorch's allocator grow its segments instead of adding others, unless the user has set it up. Without this
    the gaps between activations took 1.7 of 24 GiB (LoRA of Qwen2.5-7B at 262,144 tokens), and a step that fitted by
    the bytes it used ran out of memory."""
    is_set_up = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type == "cuda" and sys.platform == "linux" and configure is not None and not is_set_up:
        configure("expandable_segments:True")


def free_host_bytes() -> int:
    """Host memory that can still be taken: what the system has left, or the control groups we are in."""
    return int(max(0, min([psutil.virtual_memory().available, *map(_free_in, _control_groups())])))


def _control_groups() -> Iterator[Path]:
    """Ours and those around it, in version 2 (one tree) or 1 (a tree for memory)."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = CGROUPS / "memory" if controllers else CGROUPS
            group = root / path.lstrip("/")
            yield from [group, *(parent for parent in group.parents if parent.is_relative_to(root))]


def _free_in(group: Path) -> float:
    """What a control group may still take; page cache, which makes way, counts as free."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            free = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return free + sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return float("inf")


class HostSlab:
    """Host memory that the GPU can copy from and to by itself.

    Touching all of it first and pinning it then takes 0.3 to 0.4 s a GiB on a 16-core virtual machine; an allocation
    by `pin_memory=True` takes 0.5 and rounds up to a power of two. The mapping is shared: a data loader's fork leaves
    it where the GPU knows it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, max(1, num_bytes))
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfPages(
                f"the system refused {gib(num_bytes)} of host memory ({error}): lower host_memory or the context"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Followed where the system lets shared memory have huge pages (shmem_enabled), and harmless elsewhere.
            memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda":
            touch(self.bytes)
            pin(self.bytes, device)
            weakref.finalize(self, unpin, self.bytes, device).atexit = False


def touch(memory: Tensor) -> None:
    """Writes to all of it, so that the system has to find it, a piece at a time: a system that has promised more memory
    than it has ends the process that asks for it, so we do not ask for what is not there."""
    done = 0
    for piece in memory.split(PIECE_BYTES):
        if (free := free_host_bytes()) < piece.nbytes:
            raise OutOfPages(
                f"{gib(memory.nbytes)} of host memory were to be taken, and after {gib(done)} "
                f"{gib(free)} were left: something else has taken memory since it was planned. Lower host_memory "
                "or the context, or end what else is running"
            )
        piece.zero_()
        done += piece.nbytes


def pin(memory: Tensor, device: torch.device) -> None:
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        with suppress(RuntimeError):
            # CUDA remembers the failure and would report it as that of the next kernel: let this be the one.
            torch.zeros(1, device=device)
        raise OutOfPages(
            f"{gib(memory.nbytes)} of host memory could not be pinned ({error}): lower host_memory or the "
            "context, or raise the machine's limit on locked memory"
        )


def unpin(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
