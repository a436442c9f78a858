"""Define the attention backends and pick the fastest one that supports a layer.

A backend attends queries to one block of keys and returns (out, lse). Its backward takes the out and LSE of the *whole*
softmax, so blocks can be computed apart and merged. Shapes as in `reference.py`; a causal mask is aligned to the bottom
right. The choice depends on device, dtype and sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from oomb.attention import reference

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""


@dataclass(frozen=True)
class KernelRequest:
    """What a layer needs from a backend."""

    device: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    window: bool
    softcap: bool


@dataclass(frozen=True)
class Kernel:
    """One attention backend."""

    name: str
    why_unsupported: Callable[[KernelRequest], str | None]
    """Returns why the backend does not support a request, or None if it does."""
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Grads]


def _gpu_unsupported(request: KernelRequest, largest_head: int) -> str | None:
    if request.device != "cuda":
        return f"it needs a CUDA GPU, not {request.device}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs an Ampere GPU or newer"
    if request.dtype not in HALF:
        return f"it computes in bfloat16 or float16, not {request.dtype}".replace("torch.", "")
    if request.softcap:
        return "it does not support soft-capped scores"
    if request.head_size != request.value_size:
        return f"it needs keys and values of one size, not {request.head_size} and {request.value_size}"
    if request.head_size > largest_head or request.head_size % 8:
        return f"it needs a head size that is a multiple of 8 up to {largest_head}, not {request.head_size}"
    return None


def _cudnn_unsupported(request: KernelRequest) -> str | None:
    if not torch.backends.cudnn.is_available() or torch.backends.cudnn.version() < 90300:
        return "it needs cuDNN 9.3 or newer"
    if request.window:
        return "it does not support sliding windows"
    return _gpu_unsupported(request, largest_head=128)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, **_: None) -> tuple[Tensor, Tensor]:
    assert not causal or q.shape[2] == k.shape[2], "cuDNN aligns a causal mask to the top left"
    if q.shape[2] == k.shape[2] == 1:  # the only shape that cuDNN does not support
        return _flash_forward(q, k, v, scale=scale, causal=causal)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool, **_: None
) -> Grads:
    if q.shape[2] == k.shape[2] == 1:
        return _flash_backward(dout, q, k, v, out, lse, scale=scale, causal=causal)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse.contiguous().unsqueeze(-1)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )


def _flash_unsupported(request: KernelRequest) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no flash attention"
    return _gpu_unsupported(request, largest_head=256)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None = None, softcap: None = None
) -> tuple[Tensor, Tensor]:
    transposed, sizes = (x.transpose(1, 2) for x in (q, k, v)), (q.shape[2], k.shape[2])
    out, lse = flash_forward(transposed, None, sizes, scale=scale, causal=causal, window=window)
    return out.transpose(1, 2), lse


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mask: Any) -> Grads:
    transposed, sizes = (x.transpose(1, 2) for x in (dout, q, k, v, out)), (q.shape[2], k.shape[2])
    dq, dk, dv = (grad.transpose(1, 2) for grad in flash_backward(transposed, lse, None, sizes, **mask))
    return dq, dk, dv


def flash_forward(
    qkv: Iterable[Tensor], cu_seqlens: Tensor | None, sizes: tuple[int, int], *, scale: float, causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the flash kernel and return its output and LSE.

    Args:
        qkv: q, k and v as [B, T, H, D], or packed documents as [T, H, D].
        cu_seqlens: Where packed documents begin, and where the last one ends.
        sizes: Maximum number of queries and of keys in a sequence or document.
    """
    out, lse, *_ = aten._flash_attention_forward(
        *qkv, cu_seqlens, cu_seqlens, *sizes, 0.0, **_flash_mask(causal, window), return_debug_mask=False, scale=scale
    )
    return out, lse


def flash_backward(
    tensors: Iterable[Tensor], lse: Tensor, cu_seqlens: Tensor | None, sizes: tuple[int, int], *, scale: float,
    causal: bool, window: int | None = None, softcap: None = None,
) -> Grads:  # fmt: skip
    """Call the backward of the flash kernel on dout, q, k, v and out; the other arguments are as in `flash_forward`."""
    dout, *rest = tensors
    rng, unused = torch.zeros(2, dtype=torch.uint64, device=dout.device), torch.empty(0, device=dout.device)
    # The kernel assumes a contiguous LSE without checking; that of a packed chunk's first document is a slice.
    return aten._flash_attention_backward(
        dout, *rest, lse.contiguous(), cu_seqlens, cu_seqlens, *sizes, 0.0, **_flash_mask(causal, window),
        rng_state=rng, unused=unused, scale=scale,
    )  # fmt: skip


def _flash_mask(causal: bool, window: int | None) -> dict[str, object]:
    if window is None:
        return {"is_causal": causal}
    return {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}


def _cpu_unsupported(request: KernelRequest) -> str | None:
    if request.device != "cpu":
        return "it runs on the CPU only"
    if request.window or request.softcap:
        return "it supports neither sliding windows nor soft-capped scores"
    if request.head_size != request.value_size:
        return f"it needs keys and values of one size, not {request.head_size} and {request.value_size}"
    return None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, **_: None) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool, **_: None
) -> Grads:
    groups = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k_all, v_all, out, lse, 0.0, causal, scale=scale
    )
    dk, dv = (grad.unflatten(1, (k.shape[1], groups)).sum(2) for grad in (dk, dv))
    return dq, dk, dv


CUDNN = Kernel("cudnn", _cudnn_unsupported, _cudnn_forward, _cudnn_backward)
FLASH = Kernel("flash", _flash_unsupported, _flash_forward, _flash_backward)
CPU_FLASH = Kernel("cpu-flash", _cpu_unsupported, _cpu_forward, _cpu_backward)
TORCH = Kernel("torch", lambda request: None, reference.forward, reference.backward)

PREFERENCE = (CUDNN, FLASH, CPU_FLASH, TORCH)
"""Fastest first. H200, 28 query heads of 128: cuDNN forward 620-680 TFLOP/s and backward 550, flash 345 and 310."""


@lru_cache(maxsize=256)
def choose(kernels: str, request: KernelRequest) -> Kernel:
    """Return the fastest backend that supports `request`, or the one that `Config.kernels` names.

    Raises:
        ValueError: The named backend does not support the request.
    """
    for kernel in PREFERENCE:
        if kernels == "auto" and kernel.why_unsupported(request) is None:
            return kernel
        if kernels == kernel.name:
            reason = kernel.why_unsupported(request)
            if reason is None:
                return kernel
            raise ValueError(
                f'Config(kernels="{kernels}") does not support this model: {reason}. Use kernels="auto", which picks '
                f'"{choose("auto", request).name}" here'
            )
    raise AssertionError(f"no kernel named {kernels}")
