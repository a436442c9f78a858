"""Compute exact attention of a chunk to all of its past and itself.

Each segment of the past and the chunk itself is one block of keys and one backend call; the results are merged by their
LSE. The backward of a block, given the merged out and LSE, yields exactly its part of the gradients. Shapes as in
`reference.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oomb.attention.backends import Kernel, KernelRequest, choose
from oomb.attention.call import AttentionSpec
from oomb.ops.merge import add, merge


class DensePast(Protocol):
    """K, V and their gradients of one layer before the current chunk."""

    length: int

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (start, k, v) of the tokens from `first` to the chunk, oldest first. Each is valid until the next."""

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradients of the tokens from `start` on."""

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return dk and dv of the current chunk plus what later chunks added for its tokens."""


@dataclass(frozen=True)
class KeyBlock:
    """Keys attended to by one backend call: `past` keys from token `start` on; the last block ends with the chunk."""

    start: int
    past: int
    k: Tensor
    v: Tensor
    mask: dict[str, Any]
    is_last: bool


def forward(
    q: Tensor, k: Tensor, v: Tensor, past: DensePast, spec: AttentionSpec, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return output and LSE over the past and the chunk. A merged output is in `dtype`; None: float32 or wider."""
    kernel = pick_kernel(q, v, past.length, spec)
    out: Tensor | None = None
    lse: Tensor | None = None
    for block in _key_blocks(k, v, past, spec):
        out_block, lse_block = kernel.forward(q, block.k, block.v, **block.mask)
        if out is None or lse is None:
            out, lse = out_block, lse_block
        else:
            out, lse = merge(out, lse, out_block, lse_block, dtype if block.is_last else None)
    assert out is not None and lse is not None
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, past: DensePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the chunk's q, k and v, without what later chunks added; add those of the past to it."""
    kernel = pick_kernel(q, v, past.length, spec)
    dq: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None
    for block in _key_blocks(k, v, past, spec):
        dq_block, dk, dv = kernel.backward(dout, q, block.k, block.v, out, lse, **block.mask)
        # Sum dq in float32: bfloat16 would round once per block.
        dq = dq_block if dq is None else add(dq, dq_block, q.dtype if block.is_last else None)
        if block.past:
            past.add_grad(block.start, dk[:, :, : block.past], dv[:, :, : block.past])
        if block.past < block.k.shape[2]:
            own = dk[:, :, block.past :], dv[:, :, block.past :]
    assert dq is not None and own is not None
    return dq, *own


def pick_kernel(q: Tensor, v: Tensor, past_length: int, spec: AttentionSpec) -> Kernel:
    """Return the backend for a chunk after `past_length` tokens."""
    return choose(spec.kernels, kernel_request(q, v, past_length, spec))


def kernel_request(q: Tensor, v: Tensor, past_length: int, spec: AttentionSpec) -> KernelRequest:
    """Return what a chunk after `past_length` tokens needs from a backend."""
    return KernelRequest(
        device=q.device.type,
        dtype=q.dtype,
        head_size=q.shape[-1],
        value_size=v.shape[-1],
        window=_window(q, past_length, spec) is not None,
        softcap=spec.softcap is not None,
    )


def _window(q: Tensor, past_length: int, spec: AttentionSpec) -> int | None:
    """Return the sliding window, or None if the chunk ends before it hides anything."""
    return spec.window if spec.window is not None and spec.window < past_length + q.shape[2] else None


def _key_blocks(k: Tensor, v: Tensor, past: DensePast, spec: AttentionSpec) -> Iterator[KeyBlock]:
    mask = {"scale": spec.scale, "softcap": spec.softcap}
    window = _window(k, past.length, spec)
    if window is None:
        for start, k_seg, v_seg in past.segments(0):
            yield KeyBlock(start, k_seg.shape[2], k_seg, v_seg, {**mask, "causal": False}, is_last=False)
        yield KeyBlock(past.length, 0, k, v, {**mask, "causal": True}, is_last=True)
        return
    # A window reaches back a bounded number of tokens: gather the end of the past and the chunk in one block.
    first = max(0, past.length - window + 1)
    num_past = past.length - first
    k_all, v_all = (x.new_empty(*x.shape[:2], num_past + x.shape[2], x.shape[3]) for x in (k, v))
    for start, k_seg, v_seg in past.segments(first):
        at = start - first
        k_all[:, :, at : at + k_seg.shape[2]] = k_seg
        v_all[:, :, at : at + v_seg.shape[2]] = v_seg
    k_all[:, :, num_past:], v_all[:, :, num_past:] = k, v
    yield KeyBlock(first, num_past, k_all, v_all, {**mask, "causal": True, "window": window}, is_last=True)
