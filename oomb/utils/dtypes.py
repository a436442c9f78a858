"""Resolve names of devices and dtypes, "auto" included."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


DTYPES = ("float64", "float32", "bfloat16", "float16")


SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_device(device: str = "auto") -> torch.device:
    """Return the torch device of a name. "auto" is the first GPU, or the CPU if there is none."""
    import torch

    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if (resolved.index or 0) >= num_gpus:
            raise ValueError(f"device {device!r} does not exist: this machine has {num_gpus} CUDA GPUs; use cpu")
        return torch.device("cuda", resolved.index or 0)
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a name, long or short ("bf16"). "auto" is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = SHORT_DTYPES.get(dtype, dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; use auto or one of {', '.join(DTYPES)}")
    return getattr(torch, name)


ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
