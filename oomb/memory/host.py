"""Measure free GPU and host memory, and allocate pinned host memory."""

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


FRAGMENTATION = 0.03
"""Share of GPU memory lost to fragmentation. Steps of Qwen2.5-7B reserved 3% to 6% more than they used; the planner's
safety margin covers the rest."""
BLOCK_BYTES = GIB
"""Host memory touched at once."""


def free_gpu_bytes(device: torch.device) -> int | None:
    """Return the memory that this process can still allocate on the device, or None on a CPU."""
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return max(0, min(free + unused, int(limit) - allocated))


def usable_gpu_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device without what fragmentation will take."""
    free = free_gpu_bytes(device)
    return None if free is None else max(0, free - int(FRAGMENTATION * (free + torch.cuda.memory_allocated(device))))


def use_expandable_segments(device: torch.device) -> None:
    """Turn on expandable segments in PyTorch's allocator, unless the user has configured it.

    Without them, fragmentation took 1.7 of 24 GiB (LoRA of Qwen2.5-7B at 262,144 tokens), and a step whose tensors fit
    ran out of memory.
    """
    is_configured = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type == "cuda" and sys.platform == "linux" and configure is not None and not is_configured:
        configure("expandable_segments:True")


def free_host_bytes() -> int:
    """Return the host memory that can still be allocated, by the system and by our control groups."""
    return int(max(0, min([psutil.virtual_memory().available, *map(_free_in, _control_groups())])))


def _control_groups() -> Iterator[Path]:
    """Yield this process's control group and its parents, in version 2 (one tree) or 1 (a tree for memory)."""
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
    """Return what a control group can still allocate. Page cache counts as free, since it can be evicted."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            free = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return free + sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return float("inf")


class HostSlab:
    """One allocation of pinned host memory, which the GPU copies from and to directly.

    Touching and then pinning it takes 0.3 to 0.4 s per GiB on a 16-core virtual machine; `pin_memory=True` takes 0.5 s
    and rounds up to a power of two. The mapping is shared, so that a fork by a data loader does not move it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, max(1, num_bytes))
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfPages(
                f"cannot allocate {gib(num_bytes)} of host memory ({error}): lower host_memory or the context"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Only works if the system allows huge pages for shared memory (shmem_enabled); harmless otherwise.
            memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda":
            touch(self.bytes)
            pin(self.bytes, device)
            weakref.finalize(self, unpin, self.bytes, device).atexit = False


def touch(memory: Tensor) -> None:
    """Write to all of `memory`, so that the system must provide it.

    A system that overcommits kills the process that touches too much, so check the free memory before each block.
    """
    done = 0
    for block in memory.split(BLOCK_BYTES):
        if (free := free_host_bytes()) < block.nbytes:
            raise OutOfPages(
                f"cannot allocate {gib(memory.nbytes)} of host memory: after {gib(done)} only {gib(free)} are free, "
                "because another process has taken memory since this step was planned. Lower host_memory or the "
                "context, or stop the other process"
            )
        block.zero_()
        done += block.nbytes


def pin(memory: Tensor, device: torch.device) -> None:
    """Pin host memory for copies to and from `device`."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        with suppress(RuntimeError):
            # CUDA would report this error at the next kernel launch; consume it here.
            torch.zeros(1, device=device)
        raise OutOfPages(
            f"cannot pin {gib(memory.nbytes)} of host memory (CUDA error {error}): lower host_memory or the context, "
            "or raise the machine's limit on locked memory"
        )


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin` once no copy uses the memory any more."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
