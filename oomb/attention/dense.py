"""Exact attention of a chunk: segments of the past and the chunk itself, each by one kernel call, merged by lse.

The unit of work is "attend to this run of keys, return (out, lse)"; the backward of a run, given the merged out and
lse, yields exactly its share of the gradients. Shapes as in `reference.py`.
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
        """(start, k, v) of the tokens from `first` to the chunk, oldest first; valid until the next is asked for."""

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        """Adds to the gradients of the tokens from `start` on."""

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the current chunk's K and V: the given ones plus what later chunks have left."""


@dataclass(frozen=True)
class KeyBlock:
    """A run of keys attended to at once. `past` of its keys come from the past, starting at token `start`; the last run
    ends with the chunk itself."""

    start: int
    past: int
    k: Tensor
    v: Tensor
    mask: dict[str, Any]
    is_last: bool


def forward(
    q: Tensor, k: Tensor, v: Tensor, past: DensePast, spec: AttentionSpec, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Output and lse over the past and the chunk; the output in `dtype`, or as it comes (float32 or wider)."""
    kernel = pick_kernel(q, v, past.length, spec)
    out: Tensor | None = None
    lse: Tensor | None = None
    for run in _key_blocks(k, v, past, spec):
        out_run, lse_run = kernel.forward(q, run.k, run.v, **run.mask)
        if out is None or lse is None:
            out, lse = out_run, lse_run
        else:
            out, lse = merge(out, lse, out_run, lse_run, dtype if run.is_last else None)
    assert out is not None and lse is not None
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, past: DensePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the chunk's q, k and v, without what later chunks have left."""
    kernel = pick_kernel(q, v, past.length, spec)
    dq: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None
    for run in _key_blocks(k, v, past, spec):
        dq_run, dk, dv = kernel.backward(dout, q, run.k, run.v, out, lse, **run.mask)
        # Shares of dq are summed in float32: with bfloat16 each of them would cost a rounding.
        dq = dq_run if dq is None else add(dq, dq_run, q.dtype if run.is_last else None)
        if run.past:
            past.add_grad(run.start, dk[:, :, : run.past], dv[:, :, : run.past])
        if run.past < run.k.shape[2]:
            own = dk[:, :, run.past :], dv[:, :, run.past :]
    assert dq is not None and own is not None
    return dq, *own


def pick_kernel(q: Tensor, v: Tensor, past_length: int, spec: AttentionSpec) -> Kernel:
    """The kernel for a chunk after `past_length` tokens."""
    return choose(spec.kernels, kernel_request(q, v, past_length, spec))


def kernel_request(q: Tensor, v: Tensor, past_length: int, spec: AttentionSpec) -> KernelRequest:
    """What such a chunk asks of a kernel."""
    return KernelRequest(
        device=q.device.type,
        dtype=q.dtype,
        head_size=q.shape[-1],
        value_size=v.shape[-1],
        window=_window(q, past_length, spec) is not None,
        softcap=spec.softcap is not None,
    )


def _window(q: Tensor, past_length: int, spec: AttentionSpec) -> int | None:
    """The window, if this chunk is late enough in the sequence to feel it."""
    return spec.window if spec.window is not None and spec.window < past_length + q.shape[2] else None


def _key_blocks(k: Tensor, v: Tensor, past: DensePast, spec: AttentionSpec) -> Iterator[KeyBlock]:
    mask = {"scale": spec.scale, "softcap": spec.softcap}
    window = _window(k, past.length, spec)
    if window is None:
        for start, k_seg, v_seg in past.segments(0):
            yield KeyBlock(start, k_seg.shape[2], k_seg, v_seg, {**mask, "causal": False}, is_last=False)
        yield KeyBlock(past.length, 0, k, v, {**mask, "causal": True}, is_last=True)
        return
    # A window reaches back a bounded way: one run, put together from the end of the past and the chunk.
    first = max(0, past.length - window + 1)
    num_past = past.length - first
    k_all, v_all = (x.new_empty(*x.shape[:2], num_past + x.shape[2], x.shape[3]) for x in (k, v))
    for start, k_seg, v_seg in past.segments(first):
        at = start - first
        k_all[:, :, at : at + k_seg.shape[2]] = k_seg
        v_all[:, :, at : at + v_seg.shape[2]] = v_seg
    k_all[:, :, num_past:], v_all[:, :, num_past:] = k, v
    yield KeyBlock(first, num_past, k_all, v_all, {**mask, "causal": True, "window": window}, is_last=True)
