"""Attention of a chunk to chosen pages of the past and to itself.

Which pages: once for each tile of queries, in the fill pass; the gradient pass asks for the same. The chunk itself is
attended to as in `dense`; the pages by Triton kernels where they can run, by plain PyTorch elsewhere. Both halves are
one softmax: the kernels begin with the output and lse of the chunk, and with its dq.

Shapes and `Pages` as in `sparse_reference.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from oomb.attention import sparse_reference
from oomb.attention.call import AttentionSpec
from oomb.attention.dense import pick_kernel
from oomb.ops import page_scores
from oomb.ops.page_attention import Grads, Pages, launch_dkv, launch_dq, launch_forward
from oomb.ops.triton_support import can_launch


@runtime_checkable
class SparsePast(Protocol):
    """K, V and their gradients of one layer before the current chunk, of which each tile of queries reads few pages."""

    length: int
    page_size: int
    budget: int
    tile_size: int
    selection: Tensor | None
    """What was chosen for this chunk before, [B, N, C]."""

    def page_means(self) -> Tensor:
        """Summaries of the pages, [B, K, pages x means, D]."""

    def own_page_means(self) -> Tensor | None:
        """Where those of this chunk go; None if they are there, or nobody will read its pages."""

    def set_selection(self, chosen_BNC: Tensor, reads_in_place: bool) -> None:
        """This is the chunk's choice, in this pass and the next; its pages may set out. `follows`: we read pages at any
        distance from `base`; otherwise they are brought together in it."""

    def pages(self) -> AbstractContextManager[Pages]:
        """The chosen pages of K and V."""

    def grads(self) -> AbstractContextManager[Grads]:
        """The gradient pages of the chosen ones, to be added to."""

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the current chunk's K and V: the given ones plus what later chunks have left."""


def forward(q: Tensor, k: Tensor, v: Tensor, past: SparsePast, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Output and lse over the chosen pages and the chunk."""
    rule, runs = page_scores.rule_named(spec.rule, past.page_size), _runs_kernels(q, spec)
    means = past.own_page_means()
    if means is not None:
        page_scores.summarize(k, past.page_size, rule.num_means, means)
    if past.length and past.selection is None:
        chosen = page_scores.select(q, past.page_means(), rule, past.budget, scale=spec.scale, tile_size=past.tile_size)
        past.set_selection(chosen, runs)
    # Pages that are not at hand are on their way meanwhile.
    own, own_lse = pick_kernel(q, v, 0, spec).forward(q, k, v, scale=spec.scale, softcap=spec.softcap, causal=True)
    if past.selection is None:
        return own, own_lse
    settings: dict[str, Any] = {"scale": spec.scale, "tile_size": past.tile_size}
    with past.pages() as pages:
        if runs:
            return launch_forward(q, pages, past.selection, own, own_lse, **settings)
        return sparse_reference.forward(q, pages, past.selection, own, own_lse, **settings, softcap=spec.softcap)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, past: SparsePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the chunk's q, k and v, without what later chunks have left."""
    kernel = pick_kernel(q, v, 0, spec)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, scale=spec.scale, softcap=spec.softcap, causal=True)
    if past.selection is None:
        return dq, dk, dv
    settings: dict[str, Any] = {"scale": spec.scale, "tile_size": past.tile_size}
    with past.pages() as pages, past.grads() as grads:
        if _runs_kernels(q, spec):
            dq, delta = launch_dq(dout, q, pages, past.selection, out, lse, dq, **settings)
            launch_dkv(dout, q, pages, past.selection, lse, delta, grads, **settings)
        else:
            dq, drows = sparse_reference.backward(
                dout, q, pages, past.selection, out, lse, dq, **settings, softcap=spec.softcap
            )
            sparse_reference.add_grads(grads, drows, past.selection, grads.touched_BP, grads.seed)
    return dq, dk, dv


def _runs_kernels(q: Tensor, spec: AttentionSpec) -> bool:
    return can_launch(q) and q.shape[-1] <= 256 and spec.softcap is None and spec.kernels != "torch"
