"""Attention of documents that stand side by side in a chunk: each sees itself alone.

On a GPU all of them go into one call of the flash kernel, which knows where each begins; elsewhere, and for what that
kernel does not do, they are computed one after the other. Shapes as in `reference.py`, with a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from oomb.attention import dense
from oomb.attention.backends import FLASH, flash_mask
from oomb.attention.call import AttentionSpec

aten = torch.ops.aten


class NoPast:
    """The `Past` of a document that begins here."""

    length = 0

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        return iter(())

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        raise AssertionError("nothing lies before a document")

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return dk, dv


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], spec: AttentionSpec, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Output and lse. Documents begin at `starts`, the first of which is 0."""
    if _is_one_call(q, v, spec):
        return _flash_forward(q, k, v, starts, spec)
    parts = [
        dense.forward(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], NoPast(), spec, dtype) for a, b in _bounds(starts, q)
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
    """Gradients of q, k and v."""
    if _is_one_call(q, v, spec):
        return _flash_backward(dout, q, k, v, out, lse, starts, spec)
    parts = [
        dense.backward(
            dout[:, :, a:b], q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], out[:, :, a:b], lse[:, :, a:b], NoPast(), spec
        )
        for a, b in _bounds(starts, q)
    ]
    dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*parts, strict=True))
    return dq, dk, dv


def _bounds(starts: tuple[int, ...], q: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise((*starts, q.shape[2]))


def _is_one_call(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    return spec.kernels in ("auto", "flash") and FLASH.why_unsupported(dense.kernel_request(q, v, 0, spec)) is None


@lru_cache(maxsize=64)
def _marks(starts: tuple[int, ...], end: int, device: torch.device) -> tuple[Tensor, int]:
    """Where documents begin and the last one ends, and the length of the longest. All layers of a chunk ask alike."""
    marks = (*starts, end)
    return torch.tensor(marks, dtype=torch.int32, device=device), max(b - a for a, b in pairwise(marks))


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    marks, longest = _marks(starts, q.shape[2], q.device)
    out, lse, *_ = aten._flash_attention_forward(
        *(_flat(x) for x in (q, k, v)), marks, marks, longest, longest, 0.0, **flash_mask(True, spec.window),
        return_debug_mask=False, scale=spec.scale,
    )  # fmt: skip
    return _unflat(out), lse.view(1, q.shape[1], q.shape[2])


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: tuple[int, ...],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    marks, longest = _marks(starts, q.shape[2], q.device)
    rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
    none = torch.empty(0, device=q.device)
    grads = aten._flash_attention_backward(
        *(_flat(x) for x in (dout, q, k, v, out)), lse[0].contiguous(), marks, marks, longest, longest, 0.0,
        **flash_mask(True, spec.window), rng_state=rng, unused=none, scale=spec.scale,
    )  # fmt: skip
    dq, dk, dv = (_unflat(g) for g in grads)
    return dq, dk, dv


def _flat(x_1HTD: Tensor) -> Tensor:
    return x_1HTD[0].transpose(0, 1)


def _unflat(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)
