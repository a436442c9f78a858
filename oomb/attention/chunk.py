"""Compute attention of one chunk over its past and itself, forward and backward.

The past decides whether attention is dense or sparse, and hides where its pages live. The first span of the chunk sees
the past; packed documents after it see only themselves. Learned sinks need no kernel: they rescale the output by the
LSE. Shapes as in `reference.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomb.attention import dense, packed, sparse
from oomb.attention.call import AttentionSpec
from oomb.attention.dense import DensePast
from oomb.attention.sparse import SparsePast


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, past: DensePast | SparsePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of the chunk's queries over the past and the chunk itself."""
    with _without_autocast(q):
        dtype = q.dtype if sinks is None else None
        first = _first_span(q, spec), _first_span(k, spec), _first_span(v, spec)
        if isinstance(past, SparsePast):
            out, lse = sparse.forward(*first, past, spec)
        else:
            out, lse = dense.forward(*first, past, spec, dtype)
        if starts := spec.packed_starts:
            rest = _packed(q, spec), _packed(k, spec), _packed(v, spec)
            out_rest, lse_rest = packed.forward(*rest, starts, spec, dtype)
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
    """Return the gradients of the chunk's q, k, v and of the sinks; add those of the past to its gradient pages."""
    first = _first_span(dout, spec), _first_span(q, spec), _first_span(k, spec), _first_span(v, spec)
    saved = _first_span(out, spec), _first_span(lse, spec)
    if isinstance(past, SparsePast):
        dq, dk, dv = sparse.backward(*first, *saved, past, spec)
    else:
        dq, dk, dv = dense.backward(*first, *saved, past, spec)
    dk, dv = past.add_future_grads(dk, dv)
    if starts := spec.packed_starts:
        rest = _packed(dout, spec), _packed(q, spec), _packed(k, spec), _packed(v, spec)
        grads = packed.backward(*rest, _packed(out, spec), _packed(lse, spec), starts, spec)
        dq, dk, dv = (torch.cat(both, 2) for both in zip((dq, dk, dv), grads, strict=True))
    dsinks = None
    if sinks is not None:
        # A sink is one more key whose value is zero: its probability is exp(sink - lse), its score gradient -p * delta.
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dsinks = -((sinks.to(lse.dtype).view(1, -1, 1) - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _first_span(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the tokens of the first span, the only one with a past."""
    return x[:, :, : spec.spans[0].end] if spec.packed_starts else x


def _packed(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the tokens of the documents after the first span."""
    return x[:, :, spec.spans[0].end :]


class ChunkAttention(torch.autograd.Function):
    """`attend` as an autograd function. `saved` is (out, lse) if an earlier forward of this chunk computed them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        past: DensePast | SparsePast,
        spec: AttentionSpec,
        saved: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = saved if saved is not None else attend(q, k, v, sinks, past, spec)
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
    """Return a context without autocast, which would round float32 products. Backends choose their own precision."""
    return torch.autocast(x.device.type, enabled=False)
