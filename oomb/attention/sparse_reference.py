"""Compute attention to selected pages in plain PyTorch.

The Triton kernels are tested against this module, and a CPU uses it. B batch, H query heads, K key/value heads (H = K x
G), T queries, D head size, P pages of S tokens, R elements in a row, N query tiles, C selected pages per tile, U pages
that any tile selected.

A page is S rows; a row is K of all batch entries and heads, then V. Page p begins `offsets_P[p]` elements after the
start of `base`. The past has `length` tokens, so the last page may be partly filled. selected_BNC has page numbers in
any order, -1 if a tile selected fewer than C. All heads of a tile read the same pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oomb.attention import reference
from oomb.ops.page_attention import Pages
from oomb.ops.rounding import add_stochastic_reference, random_bits


def forward(
    q_BHTD: Tensor,
    pages: Pages,
    selected_BNC: Tensor,
    own_BHTD: Tensor,
    own_lse_BHT: Tensor,
    *,
    scale: float,
    tile_size: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE over the selected pages and the keys that `own` attended to."""
    out, lse = own_BHTD.clone(), own_lse_BHT.clone()
    for b, at, k, v, _ in _tiles(q_BHTD, pages, selected_BNC, tile_size):
        part, part_lse = reference.forward(q_BHTD[b : b + 1, :, at], k, v, scale=scale, causal=False, softcap=softcap)
        whole = torch.logaddexp(lse[b, :, at], part_lse[0])
        weights = ((x - whole).exp().unsqueeze(-1) for x in (lse[b, :, at], part_lse[0]))
        before, added = (x.to(whole.dtype) * w for x, w in zip((out[b, :, at], part[0]), weights, strict=True))
        out[b, :, at], lse[b, :, at] = (before + added).to(out.dtype), whole
    return out, lse


def backward(
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    pages: Pages,
    selected_BNC: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    own_dq_BHTD: Tensor,
    *,
    scale: float,
    tile_size: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dq including `own_dq`, and the gradients of K and V as rows [U, S, R] in float32 or wider.

    The rows are those of the pages in `used`. `out` and `lse` belong to the whole softmax.
    """
    B, used_U = len(q_BHTD), used(selected_BNC)
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    dq = own_dq_BHTD.to(wide)
    drows = torch.zeros(len(used_U), pages.page_size, pages.row_size, dtype=wide, device=q_BHTD.device)
    for b, at, k, v, (page, slot) in _tiles(q_BHTD, pages, selected_BNC, tile_size):
        dout, q, out, lse = (x[b : b + 1, :, at].to(wide) for x in (dout_BHTD, q_BHTD, out_BHTD, lse_BHT))
        dq_tile, *dkv = reference.backward(
            dout, q, k.to(wide), v.to(wide), out, lse, scale=scale, causal=False, softcap=softcap
        )
        dq[b, :, at] += dq_tile[0]
        for field, gradient in zip(fields(pages, drows, B), dkv, strict=True):
            field[torch.searchsorted(used_U, page), slot, b] += gradient[0].transpose(0, 1)
    return dq.to(q_BHTD.dtype), drows


def used(selected_BNC: Tensor) -> Tensor:
    """Return the pages that any tile selected, sorted. Only these get gradients: a long past has many more."""
    return torch.unique(selected_BNC[selected_BNC >= 0].long())


def add_grads(grads: Pages, drows_USR: Tensor, selected_BNC: Tensor, touched_BP: Tensor, seed: int) -> None:
    """Add to the gradients of the selected pages. Pages that are not touched yet are uninitialized."""
    B = len(touched_BP)
    generator = torch.Generator(drows_USR.device).manual_seed(seed)
    rows = torch.arange(grads.page_size * grads.row_size, device=drows_USR.device)
    for page, drows in zip(used(selected_BNC).tolist(), drows_USR, strict=True):
        at = grads.offsets_P[page] + rows
        total = grads.base[at].view(grads.page_size, grads.row_size)
        bits = random_bits(total, generator)
        for b in range(B):
            parts = zip(fields(grads, total, B), fields(grads, drows, B), strict=True)
            for index, (field, update) in enumerate(parts):
                if not touched_BP[b, page]:
                    field[:, b] = 0
                field_bits = None if bits is None else fields(grads, bits, B)[index][:, b]
                add_stochastic_reference(field[:, b], update[:, b], field_bits)
        grads.base[at] = total.flatten()


def fields(pages: Pages, rows: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return K [..., B, K, D] and V of rows [..., R]."""
    width = batch_size * pages.num_kv_heads
    k, v = (
        rows[..., at : at + width * size].unflatten(-1, (batch_size, pages.num_kv_heads, size))
        for at, size in ((0, pages.head_size), (pages.value_at, pages.value_size))
    )
    return k, v


def _tiles(
    q: Tensor, pages: Pages, selected_BNC: Tensor, tile_size: int
) -> Iterator[tuple[int, slice, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """Yield, for each tile that selected a page: batch entry, queries, K and V [1, K, tokens, D] of its pages, and the
    (page, slot) of each token."""
    B, _, T, _ = q.shape
    S = pages.page_size
    rows = torch.arange(S * pages.row_size, device=q.device).view(S, pages.row_size)
    for b in range(B):
        for n, selected in enumerate(selected_BNC[b]):
            selected = selected[selected >= 0].long()
            if not len(selected):
                continue
            data = pages.base[pages.offsets_P[selected].view(-1, 1, 1) + rows]
            page, slot = selected.repeat_interleave(S), torch.arange(S, device=q.device).repeat(len(selected))
            filled = page * S + slot < pages.length
            k, v = (x[:, :, b].flatten(0, 1)[filled].transpose(0, 1)[None].to(q.dtype) for x in fields(pages, data, B))
            yield b, slice(n * tile_size, min(T, (n + 1) * tile_size)), k, v, (page[filled], slot[filled])
