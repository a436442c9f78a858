"""Compute attention of a chunk to itself and to selected pages of the past.

Each tile of queries selects its pages once, in the fill pass; the gradient pass reads the same ones. Attention to the
chunk itself is dense. The pages are read by Triton kernels, or by plain PyTorch where those cannot run. Both parts are
one softmax: the kernels start from the output and LSE of the chunk, and from its dq.

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
    """The selection [B, N, C] of this chunk, if it has been made."""

    def page_means(self) -> Tensor:
        """Return the means [B, K, M, D] of the pages."""

    def own_page_means(self) -> Tensor | None:
        """Return where to write the means of the chunk's own pages, or None if they are written or not needed."""

    def set_selection(self, selected_BNC: Tensor, reads_in_place: bool) -> None:
        """Record the selection of this chunk for both passes, and start to load its pages.

        Args:
            selected_BNC: Page numbers.
            reads_in_place: Whether the kernels take one pointer per page, so pages may be anywhere; otherwise `pages`
                gathers them in one buffer.
        """

    def pages(self) -> AbstractContextManager[Pages]:
        """Yield the selected pages of K and V."""

    def grads(self) -> AbstractContextManager[Grads]:
        """Yield the gradients of the selected pages, to add to."""

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return dk and dv of the current chunk plus what later chunks added for its tokens."""


def forward(q: Tensor, k: Tensor, v: Tensor, past: SparsePast, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return output and LSE over the selected pages and the chunk."""
    rule, uses_kernels = page_scores.rule_named(spec.rule, past.page_size), _uses_kernels(q, spec)
    means = past.own_page_means()
    if means is not None:
        page_scores.summarize(k, past.page_size, rule.num_means, means)
    if past.length and past.selection is None:
        selected_BNC = page_scores.select(
            q,
            past.page_means(),
            rule,
            past.budget,
            scale=spec.scale,
            tile_size=past.tile_size,
            sum_scores=spec.sum_scores,
        )
        past.set_selection(selected_BNC, uses_kernels)
    # Host pages are being loaded meanwhile.
    own, own_lse = pick_kernel(q, v, 0, spec).forward(q, k, v, scale=spec.scale, softcap=spec.softcap, causal=True)
    if past.selection is None:
        return own, own_lse
    settings: dict[str, Any] = {"scale": spec.scale, "tile_size": past.tile_size}
    with past.pages() as pages:
        if uses_kernels:
            return launch_forward(q, pages, past.selection, own, own_lse, **settings)
        return sparse_reference.forward(q, pages, past.selection, own, own_lse, **settings, softcap=spec.softcap)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, past: SparsePast, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the chunk's q, k and v, without what later chunks added; add those of the past to it."""
    kernel = pick_kernel(q, v, 0, spec)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, scale=spec.scale, softcap=spec.softcap, causal=True)
    if past.selection is None:
        return dq, dk, dv
    settings: dict[str, Any] = {"scale": spec.scale, "tile_size": past.tile_size}
    with past.pages() as pages, past.grads() as grads:
        if _uses_kernels(q, spec):
            dq, delta = launch_dq(dout, q, pages, past.selection, out, lse, dq, **settings)
            launch_dkv(dout, q, pages, past.selection, lse, delta, grads, **settings)
        else:
            dq, drows = sparse_reference.backward(
                dout, q, pages, past.selection, out, lse, dq, **settings, softcap=spec.softcap
            )
            sparse_reference.add_grads(grads, drows, past.selection, grads.touched_BP, grads.seed)
    return dq, dk, dv


def _uses_kernels(q: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the Triton kernels support these queries."""
    return can_launch(q) and q.shape[-1] <= 256 and spec.softcap is None and spec.kernels != "torch"
