"""The attention kernels there are, what each can do, and the choice among them.

A kernel attends queries to one run of keys and returns (out, lse); its backward takes the out and lse of the *whole*
softmax, so that runs can be computed apart and merged. Shapes as in `reference.py`; a causal mask is aligned to the
bottom right. Which kernel serves a layer depends on devices, dtypes and sizes alone and is decided once per kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oomb.attention import reference

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelRequest:
    """What a layer asks of a kernel."""

    device: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    window: bool
    softcap: bool


@dataclass(frozen=True)
class Kernel:
    name: str
    why_unsupported: Callable[[KernelRequest], str | None]
    """What the kernel is missing for this ask, in words, or None if it can serve it."""
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _gpu_unsupported(ask: KernelRequest, largest_head: int) -> str | None:
    if ask.device != "cuda":
        return f"it runs on CUDA GPUs, not on {ask.device}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs an Ampere GPU or newer"
    if ask.dtype not in HALF:
        return f"it computes in bfloat16 or float16, not {ask.dtype}".replace("torch.", "")
    if ask.softcap:
        return "it has no soft-capped scores"
    if ask.head_size != ask.value_size:
        return f"keys of size {ask.head_size} and values of size {ask.value_size} differ"
    if ask.head_size > largest_head or ask.head_size % 8:
        return f"head size {ask.head_size} is not a multiple of 8 up to {largest_head}"
    return None


def _cudnn_unsupported(ask: KernelRequest) -> str | None:
    if not torch.backends.cudnn.is_available() or torch.backends.cudnn.version() < 90300:
        return "it needs cuDNN 9.3 or newer"
    if ask.window:
        return "it has no sliding window"
    return _gpu_unsupported(ask, largest_head=128)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: None = None, softcap: None = None
) -> tuple[Tensor, Tensor]:
    assert not causal or q.shape[2] == k.shape[2], "cuDNN aligns a causal mask to the top left"
    if q.shape[2] == k.shape[2] == 1:  # the one shape that it does not do
        return _flash_forward(q, k, v, scale=scale, causal=causal)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    window: None = None,
    softcap: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[2] == k.shape[2] == 1:
        return _flash_backward(dout, q, k, v, out, lse, scale=scale, causal=causal)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous().unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def _flash_unsupported(ask: KernelRequest) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no flash attention"
    return _gpu_unsupported(ask, largest_head=256)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None = None, softcap: None = None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, **flash_mask(causal, window),
        return_debug_mask=False, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
    none = torch.empty(0, device=q.device)
    grads = aten._flash_attention_backward(
        # The kernel takes the lse for contiguous, and does not look: of a shared chunk it is a part.
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
        **flash_mask(causal, window), rng_state=rng, unused=none, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


def flash_mask(causal: bool, window: int | None) -> dict[str, object]:
    if window is None:
        return {"is_causal": causal}
    return {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}


def _cpu_unsupported(ask: KernelRequest) -> str | None:
    if ask.device != "cpu":
        return "it runs on the CPU"
    if ask.window or ask.softcap:
        return "it has neither sliding window nor soft-capped scores"
    if ask.head_size != ask.value_size:
        return "keys and values differ in size"
    return None


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: None = None, softcap: None = None
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    window: None = None,
    softcap: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k_all, v_all, out, lse, 0.0, causal, scale=scale
    )
    dk, dv = (g.unflatten(1, (k.shape[1], groups)).sum(2) for g in (dk, dv))
    return dq, dk, dv


CUDNN = Kernel("cudnn", _cudnn_unsupported, _cudnn_forward, _cudnn_backward)
FLASH = Kernel("flash", _flash_unsupported, _flash_forward, _flash_backward)
CPU_FLASH = Kernel("cpu-flash", _cpu_unsupported, _cpu_forward, _cpu_backward)
TORCH = Kernel("torch", lambda ask: None, reference.forward, reference.backward)

PREFERENCE = (CUDNN, FLASH, CPU_FLASH, TORCH)
"""Fastest first. H200, 28 query heads of 128: cuDNN forward 620-680 TFLOP/s and backward 550, flash 345 and 310."""


@lru_cache(maxsize=256)
def choose(kernels: str, ask: KernelRequest) -> Kernel:
    """The fastest kernel that can serve `ask`, or the one named by `Config.kernels`; an error says what that lacks."""
    for kernel in PREFERENCE:
        if kernels == "auto" and kernel.why_unsupported(ask) is None:
            return kernel
        if kernels == kernel.name:
            missing = kernel.why_unsupported(ask)
            if missing is None:
                return kernel
            raise ValueError(
                f'Config(kernels="{kernels}") cannot serve this model: {missing}. Use kernels="auto", which takes '
                f'"{choose("auto", ask).name}" here'
            )
    raise AssertionError(f"no kernel named {kernels}")
