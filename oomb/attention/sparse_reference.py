"""Attention to chosen pages in plain PyTorch: what the Triton kernels are tested against, and the path of a CPU.

B batch, H query heads, K key/value heads (H = K x G), T queries, D head size, P pages of S tokens, R numbers in a row,
N query tiles, C pages chosen per tile at the most, U pages that any tile has chosen.

A page is S rows, a row being K of all sequences and heads, then V. Page p begins `offsets_P[p]` numbers after the start
of `base`; the past has `length` tokens, so the last page may be filled in part. chosen_BNC holds page numbers in any
order, -1 where a tile has chosen fewer. The heads of a tile share its pages.
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
    chosen_BNC: Tensor,
    own_BHTD: Tensor,
    own_lse_BHT: Tensor,
    *,
    scale: float,
    tile_size: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse over the chosen pages and what `own` is the attention of."""
    out, lse = own_BHTD.clone(), own_lse_BHT.clone()
    for b, at, k, v, _ in _tiles(q_BHTD, pages, chosen_BNC, tile_size):
        part, part_lse = reference.forward(q_BHTD[b : b + 1, :, at], k, v, scale=scale, causal=False, softcap=softcap)
        whole = torch.logaddexp(lse[b, :, at], part_lse[0])
        shares = ((x - whole).exp().unsqueeze(-1) for x in (lse[b, :, at], part_lse[0]))
        before, added = (x.to(whole.dtype) * share for x, share in zip((out[b, :, at], part[0]), shares, strict=True))
        out[b, :, at], lse[b, :, at] = (before + added).to(out.dtype), whole
    return out, lse


def backward(
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    pages: Pages,
    chosen_BNC: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    own_dq_BHTD: Tensor,
    *,
    scale: float,
    tile_size: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """dq, that of `own` included, and the gradients of K and V as rows [U, S, R] in float32 or wider, for the pages
    `used`. `out` and `lse` are those of the whole softmax, of which the chosen pages may be a part."""
    B, used_U = len(q_BHTD), used(chosen_BNC)
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    dq = own_dq_BHTD.to(wide)
    drows = torch.zeros(len(used_U), pages.page_size, pages.row_size, dtype=wide, device=q_BHTD.device)
    for b, at, k, v, (page, slot) in _tiles(q_BHTD, pages, chosen_BNC, tile_size):
        dout, q, out, lse = (x[b : b + 1, :, at].to(wide) for x in (dout_BHTD, q_BHTD, out_BHTD, lse_BHT))
        dq_tile, *dkv = reference.backward(
            dout, q, k.to(wide), v.to(wide), out, lse, scale=scale, causal=False, softcap=softcap
        )
        dq[b, :, at] += dq_tile[0]
        for field, gradient in zip(fields(pages, drows, B), dkv, strict=True):
            field[torch.searchsorted(used_U, page), slot, b] += gradient[0].transpose(0, 1)
    return dq.to(q_BHTD.dtype), drows


def used(chosen_BNC: Tensor) -> Tensor:
    """The pages that any tile has chosen, in order. Only of those there are gradients: a long past has many more."""
    return torch.unique(chosen_BNC[chosen_BNC >= 0].long())


def add_grads(grads: Pages, drows_USR: Tensor, chosen_BNC: Tensor, touched_BP: Tensor, seed: int) -> None:
    """Adds to the gradients of the pages that were chosen. Those that nobody has touched yet hold anything."""
    B = len(touched_BP)
    generator = torch.Generator(drows_USR.device).manual_seed(seed)
    rows = torch.arange(grads.page_size * grads.row_size, device=drows_USR.device)
    for page, drows in zip(used(chosen_BNC).tolist(), drows_USR, strict=True):
        at = grads.offsets_P[page] + rows
        total = grads.base[at].view(grads.page_size, grads.row_size)
        bits = random_bits(total, generator)
        for b in range(B):
            parts = zip(fields(grads, total, B), fields(grads, drows, B), strict=True)
            for index, (field, share) in enumerate(parts):
                if not touched_BP[b, page]:
                    field[:, b] = 0
                some = None if bits is None else fields(grads, bits, B)[index][:, b]
                add_stochastic_reference(field[:, b], share[:, b], some)
        grads.base[at] = total.flatten()


def fields(pages: Pages, rows: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """K [..., B, K, D] and V of rows [..., R]."""
    width = batch_size * pages.num_kv_heads
    k, v = (
        rows[..., at : at + width * size].unflatten(-1, (batch_size, pages.num_kv_heads, size))
        for at, size in ((0, pages.head_size), (pages.value_at, pages.value_size))
    )
    return k, v


def _tiles(
    q: Tensor, pages: Pages, chosen_BNC: Tensor, tile_size: int
) -> Iterator[tuple[int, slice, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """For every tile that has chosen any page: its sequence, its queries, K and V [1, K, tokens, D] of its pages, and
    which (page, slot) each token is."""
    B, _, T, _ = q.shape
    S = pages.page_size
    rows = torch.arange(S * pages.row_size, device=q.device).view(S, pages.row_size)
    for b in range(B):
        for n, chosen in enumerate(chosen_BNC[b]):
            chosen = chosen[chosen >= 0].long()
            if not len(chosen):
                continue
            data = pages.base[pages.offsets_P[chosen].view(-1, 1, 1) + rows]
            page, slot = chosen.repeat_interleave(S), torch.arange(S, device=q.device).repeat(len(chosen))
            filled = page * S + slot < pages.length
            k, v = (x[:, :, b].flatten(0, 1)[filled].transpose(0, 1)[None].to(q.dtype) for x in fields(pages, data, B))
            yield b, slice(n * tile_size, min(T, (n + 1) * tile_size)), k, v, (page[filled], slot[filled])
