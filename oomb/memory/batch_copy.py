"""Copy many blocks between host and GPU in one driver call, using the GPU's copy engines.

Kernels can read and write pinned memory, too, and must if only the GPU knows what to copy. But they take SMs from the
computation: on an H200 a matrix product takes twice its time while kernels move pages both ways. Copy engines do not
slow it down, and reach 45 GB/s each way with pages of 128 KiB.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

STREAM_ORDER, OVERLAP_WITH_COMPUTE = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, location hints (not used), and flags."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source_type", ctypes.c_uint),
        ("source_id", ctypes.c_int),
        ("target_type", ctypes.c_uint),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


@cache
def _function() -> tuple[Any, bool] | None:
    """Return the driver's batch copy function, and whether it reports which copy failed. It needs CUDA 12.8."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for name, reports_failed in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(driver, name, None)
        if function is not None:
            return function, reports_failed
    return None


@cache
def is_available(device: torch.device) -> bool:
    """Return whether the driver supports batch copies, by trying one."""
    if _function() is None or device.type != "cuda":
        return False
    try:
        source = torch.ones(16, dtype=torch.uint8, device="cpu").pin_memory()
        target = torch.zeros(16, dtype=torch.uint8, device=device)
        addresses = [torch.tensor([x.data_ptr()], device="cpu") for x in (target, source)]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_all(addresses[0], addresses[1], 16, stream.cuda_stream)
        stream.synchronize()
    except RuntimeError:
        return False
    return bool(target.all())


def copy_all(targets: Tensor, sources: Tensor, num_bytes: int, stream: int) -> None:
    """Copy `num_bytes` from each source to its target.

    Args:
        targets: Addresses, int64 on the CPU.
        sources: As many addresses.
        stream: CUDA handle of the stream that orders the copies.
    """
    found, count = _function(), len(targets)
    assert found is not None and len(sources) == count
    if not count:
        return
    function, reports_failed = found
    sizes = torch.full((count,), num_bytes, dtype=torch.int64, device="cpu")
    attributes, first = Attributes(STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE), ctypes.c_size_t(0)
    failed = [ctypes.byref(ctypes.c_size_t(0))] if reports_failed else []
    code = function(
        *(ctypes.c_void_p(x.data_ptr()) for x in (targets, sources, sizes)),
        ctypes.c_size_t(count),
        # One set of attributes, from the first copy on.
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        *failed,
        ctypes.c_void_p(stream),
    )
    if code:
        raise RuntimeError(f"the driver refused {count} copies of {num_bytes} bytes (CUDA error {code})")
