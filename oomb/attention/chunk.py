"""Attention of a chunk to the past and to itself, with its backward: dense or to chosen pages, as the past says.

The past is seen through a narrow face behind which pages may lie anywhere. Learned sinks are added here: with the lse
in hand they need no kernel. Shapes as in `reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oomb.attention import dense, packed, sparse
from oomb.attention.dense import DensePast
from oomb.attention.sparse import SparsePast


@dataclass(frozen=True)
class AttentionSpec:
    """What the layer's attention is, besides its tensors."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    kernels: str = "auto"
    rule: str = "mass"
    """How pages are chosen, where they are."""
    document_starts: tuple[int, ...] = ()
    """Where in the chunk other documents begin. What stands before the first cut sees the past, they do not."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, past: DensePast | SparsePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Output and lse of the chunk's queries over the past and the chunk itself."""
    with _without_autocast(q):
        dtype = q.dtype if sinks is None else None
        own = _own(q, spec), _own(k, spec), _own(v, spec)
        if isinstance(past, SparsePast):
            out, lse = sparse.forward(*own, past, spec)
        else:
            out, lse = dense.forward(*own, past, spec, dtype)
        if spec.document_starts:
            rest = partial(_others, spec=spec)
            out_rest, lse_rest = packed.forward(rest(q), rest(k), rest(v), _starts(spec), spec, dtype)
            out, lse = torch.cat([out, out_rest], 2), torch.cat([lse, lse_rest], 2)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out, lse = out * (lse - whole).exp().unsqueeze(-1), whole
        return out.to(q.dtype), lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    past: DensePast | SparsePast,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the chunk's q, k, v and of the sinks. Those of the past go into its gradient pages."""
    own = _own(dout, spec), _own(q, spec), _own(k, spec), _own(v, spec), _own(out, spec), _own(lse, spec)
    if isinstance(past, SparsePast):
        dq, dk, dv = sparse.backward(*own, past, spec)
    else:
        dq, dk, dv = dense.backward(*own, past, spec)
    dk, dv = past.add_future_grads(dk, dv)
    if spec.document_starts:
        rest = partial(_others, spec=spec)
        others = packed.backward(rest(dout), rest(q), rest(k), rest(v), rest(out), rest(lse), _starts(spec), spec)
        dq, dk, dv = (torch.cat(both, 2) for both in zip((dq, dk, dv), others, strict=True))
    dsinks = None
    if sinks is not None:
        # A sink is one more key whose value is zero: its probability is exp(sink - lse), its score gradient -p * delta.
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dsinks = -((sinks.to(lse.dtype).view(1, -1, 1) - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _own(x: Tensor, spec: AttentionSpec) -> Tensor:
    """What stands before the first cut."""
    return x[:, :, : spec.document_starts[0]] if spec.document_starts else x


def _others(x: Tensor, spec: AttentionSpec) -> Tensor:
    return x[:, :, spec.document_starts[0] :]


def _starts(spec: AttentionSpec) -> tuple[int, ...]:
    """Where the other documents begin, counted from the first of them."""
    return tuple(cut - spec.document_starts[0] for cut in spec.document_starts)


class ChunkAttention(torch.autograd.Function):
    """`attend` with its backward. `kept` holds (out, lse) where an earlier forward of this chunk has computed them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        past: DensePast | SparsePast,
        spec: AttentionSpec,
        kept: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = kept if kept is not None else attend(q, k, v, sinks, past, spec)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.past, ctx.spec = past, spec
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with _without_autocast(q):
            grads = attend_backward(dout, q, k, v, sinks, out, lse, ctx.past, ctx.spec)
        return (*grads, None, None, None)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Kernels choose their precision themselves; autocast would round the plain one's float32 products."""
    return torch.autocast(x.device.type, enabled=False)
