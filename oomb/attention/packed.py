"""Compute attention of packed documents: several in one chunk, each of which attends only to itself.

On a GPU one call of the flash kernel takes all of them; elsewhere, and for what that kernel does not support, they are
computed one after the other. Shapes as in `reference.py`, with a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from oomb.attention import dense
from oomb.attention.backends import FLASH, flash_backward, flash_forward
from oomb.attention.call import AttentionSpec


class NoPast:
    """The `DensePast` of a document that begins in this chunk."""

    length = 0

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        return iter(())

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        raise AssertionError("a document that begins in this chunk has no past")

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return dk, dv


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], spec: AttentionSpec, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of documents that begin at `starts`, the first of which is 0."""
    if _is_one_call(q, v, spec):
        cu_seqlens, longest = _cu_seqlens(starts, q.shape[2], q.device)
        out, lse = flash_forward(
            map(_flat, (q, k, v)), cu_seqlens, (longest, longest), scale=spec.scale, causal=True, window=spec.window
        )
        return _unflat(out), lse.view(1, q.shape[1], q.shape[2])
    parts = [
        dense.forward(q_part, k_part, v_part, NoPast(), spec, dtype)
        for q_part, k_part, v_part in _split((q, k, v), starts)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: tuple[int, ...],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if _is_one_call(q, v, spec):
        cu_seqlens, longest = _cu_seqlens(starts, q.shape[2], q.device)
        tensors, sizes = map(_flat, (dout, q, k, v, out)), (longest, longest)
        grads = flash_backward(tensors, lse[0], cu_seqlens, sizes, scale=spec.scale, causal=True, window=spec.window)
        dq, dk, dv = map(_unflat, grads)
        return dq, dk, dv
    parts = [
        dense.backward(dout_part, q_part, k_part, v_part, out_part, lse_part, NoPast(), spec)
        for dout_part, q_part, k_part, v_part, out_part, lse_part in _split((dout, q, k, v, out, lse), starts)
    ]
    dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*parts, strict=True))
    return dq, dk, dv


def _split(tensors: tuple[Tensor, ...], starts: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Yield the tensors of one document after the other."""
    for start, end in pairwise((*starts, tensors[0].shape[2])):
        yield [x[:, :, start:end] for x in tensors]


def _is_one_call(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    return spec.kernels in ("auto", "flash") and FLASH.why_unsupported(dense.kernel_request(q, v, 0, spec)) is None


@lru_cache(maxsize=64)
def _cu_seqlens(starts: tuple[int, ...], end: int, device: torch.device) -> tuple[Tensor, int]:
    """Return where documents begin and the last one ends, and the longest length. Cached for all layers of a chunk."""
    bounds = (*starts, end)
    return torch.tensor(bounds, dtype=torch.int32, device=device), max(b - a for a, b in pairwise(bounds))


def _flat(x_1HTD: Tensor) -> Tensor:
    return x_1HTD[0].transpose(0, 1)


def _unflat(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)
