"""Launch the Triton kernels of attention to selected pages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oomb.ops.rounding import DROPPED_BITS
from oomb.ops.triton_support import LOG2_E, matrix_tile

ALIGNED_BYTES = 16
"""The widest load of a GPU; pages and their rows begin at multiples of it."""


class Pages(Protocol):
    """Where K and V of the past lie, or their gradients. `base` is flat; sizes and places count numbers, not bytes."""

    @property
    def base(self) -> Tensor: ...
    @property
    def offsets_P(self) -> Tensor: ...
    @property
    def length(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def row_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def value_size(self) -> int: ...
    @property
    def value_at(self) -> int:
        """Where V begins in a row."""


class Grads(Pages, Protocol):
    """Gradient pages."""

    @property
    def touched_BP(self) -> Tensor:
        """1 where something has been added to a sequence's page."""

    @property
    def seed(self) -> int:
        """Of the random rounding."""


def launch_forward(
    q: Tensor,
    pages: Pages,
    chosen_BNC: Tensor,
    own: Tensor,
    own_lse: Tensor,
    *,
    scale: float,
    tile_size: int,
    has_gaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """`has_gaps`: some entries of `chosen` may be -1."""
    from oomb.ops.triton_kernels.page_attention import forward_kernel

    B, H, T, D = q.shape
    # [B, T, H, D] in memory, as models go on with it.
    out = torch.empty(B, T, H, pages.value_size, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    tile_q, tile_k, warps, stages = _tiling("forward", q, pages, tile_size)
    q, own = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, own))
    with torch.cuda.device_of(q):
        forward_kernel[(H, chosen_BNC.shape[1] * (tile_size // tile_q), B)](
            q, pages.base, _places(pages, chosen_BNC), chosen_BNC, own, own_lse.contiguous(), out, lse,
            T, D, pages.value_size, pages.length, chosen_BNC.shape[2], scale * LOG2_E,
            *q.stride()[:3], *own.stride()[:3], *out.stride()[:3], *_row_strides(pages),
            **_sizes(q, pages), **_masks(pages, tile_k, has_gaps), QUERY_TILE=tile_size, TILE_Q=tile_q,
            TILE_K=tile_k, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out, lse


def launch_dq(
    dout: Tensor,
    q: Tensor,
    pages: Pages,
    chosen_BNC: Tensor,
    out: Tensor,
    lse: Tensor,
    own_dq: Tensor,
    *,
    scale: float,
    tile_size: int,
    has_gaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """dq, that of `own` included, and delta [B, H, T]: the sum of dout * out over a row."""
    from oomb.ops.triton_kernels.page_attention import dq_kernel

    B, H, T, D = q.shape
    dq = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device).transpose(1, 2)
    delta = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    tile_q, tile_k, warps, stages = _tiling("dq", q, pages, tile_size)
    dout, q, out, own_dq = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, out, own_dq))
    with torch.cuda.device_of(q):
        dq_kernel[(H, chosen_BNC.shape[1] * (tile_size // tile_q), B)](
            dout, q, out, pages.base, _places(pages, chosen_BNC), chosen_BNC, lse.contiguous(), own_dq, dq, delta,
            T, D, pages.value_size, pages.length, chosen_BNC.shape[2], scale, scale * LOG2_E,
            *dout.stride()[:3], *q.stride()[:3], *out.stride()[:3], *own_dq.stride()[:3], *dq.stride()[:3],
            *_row_strides(pages), **_sizes(q, pages), **_masks(pages, tile_k, has_gaps), QUERY_TILE=tile_size,
            TILE_Q=tile_q, TILE_K=tile_k, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dq, delta


def launch_dkv(
    dout: Tensor,
    q: Tensor,
    pages: Pages,
    chosen_BNC: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: Grads,
    *,
    scale: float,
    tile_size: int,
) -> None:
    """Adds dk and dv to the gradient pages, which are numbered as those of K and V."""
    from oomb.ops.triton_kernels.page_attention import dkv_kernel

    _, H, T, D = q.shape
    num_pages, num_tiles = len(pages.offsets_P), chosen_BNC.shape[1]
    readers, ends, order = invert(chosen_BNC, num_pages)
    tile_q, tile_k, warps, stages = _tiling("dkv", q, pages, tile_size)
    num_programs = len(order) * pages.num_kv_heads * -(-pages.page_size // tile_k)
    dout, q = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q))
    with torch.cuda.device_of(q):
        dkv_kernel[(num_programs,)](
            dout, q, pages.base, pages.offsets_P, readers, ends, order, lse.contiguous(), delta,
            grads.base, grads.offsets_P, grads.touched_BP, grads.seed,
            num_pages, num_tiles, T, D, pages.value_size, pages.length, scale, scale * LOG2_E,
            *dout.stride()[:3], *q.stride()[:3], grads.touched_BP.stride(0), *_row_strides(pages), *_row_strides(grads),
            NUM_HEADS=H, **_sizes(q, pages), PADDED=_is_padded(pages) or T % tile_size > 0, QUERY_TILE=tile_size,
            TILE_Q=tile_q, TILE_K=tile_k, DROPPED=DROPPED_BITS.get(grads.base.dtype, 0), GRAD_ALIGNED=_alignment(grads),
            STAGES=stages, num_warps=warps,
        )  # fmt: skip


def invert(chosen_BNC: Tensor, num_pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every page of every sequence, i = b * num_pages + page: which tiles read it, as b * N + tile, one list after
    the other; where the lists end; and the pages in the order of their readers' number, as many as can have any.

    Nothing here waits for the GPU: sizes depend on shapes alone. What was not chosen is sorted to the end.
    """
    B, N, C = chosen_BNC.shape
    chosen = chosen_BNC.long()
    sequence = torch.arange(B, device=chosen.device).view(B, 1, 1)
    item = torch.where(chosen >= 0, sequence * num_pages + chosen, B * num_pages).flatten()
    item, at = item.sort(stable=True)
    ends = torch.searchsorted(item, torch.arange(B * num_pages, device=chosen.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    order = counts.argsort(descending=True, stable=True)
    return (at // C).int(), ends.int(), order[: B * N * C].int()


def _places(pages: Pages, chosen_BNC: Tensor) -> Tensor:
    """Where the chosen pages begin; those that were not chosen at the first, which is never read."""
    return pages.offsets_P[chosen_BNC.long().clamp(min=0)]


def _row_strides(pages: Pages) -> tuple[int, int, int, int]:
    """Between rows, and heads; where V begins; between heads of V."""
    return pages.row_size, pages.head_size, pages.value_at, pages.value_size


def _sizes(q: Tensor, pages: Pages) -> dict[str, int | str]:
    return {
        "GROUP": q.shape[1] // pages.num_kv_heads,
        "PAGE": pages.page_size,
        "TILE_D": matrix_tile(pages.head_size),
        "TILE_V": matrix_tile(pages.value_size),
        "ALIGNED": _alignment(pages),
        "PRECISION": "ieee",
    }


def _alignment(pages: Pages) -> int:
    """Numbers in 16 bytes, at multiples of which pages begin."""
    return ALIGNED_BYTES // pages.base.dtype.itemsize


def _masks(pages: Pages, tile_k: int, has_gaps: bool) -> dict[str, bool]:
    """What the kernels that go through lists of pages have to mask."""
    return {
        "PADDED": _is_padded(pages),
        "GAPS": has_gaps or pages.page_size % tile_k > 0 or pages.length % pages.page_size > 0,
    }


def _is_padded(pages: Pages) -> bool:
    return any(size != matrix_tile(size) for size in (pages.head_size, pages.value_size))


TILINGS = {
    "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
    "dq": ((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
    "dkv": ((64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
}
"""(queries and tokens at a time, warps, loads under way), the fastest first. Measured on an H200 with a chunk of 4096,
28 query heads over 4, head size 128, 64 random pages of 128: 420 TFLOP/s forward, 560 dq, 387 dk and dv; with 64 tokens
at a time 344 and 484."""


SHARED_BYTES = 227 * 1024
"""Of an H200; other GPUs are asked."""


SMALL_SHARED_BYTES = 99 * 1024
"""Of those that do not answer."""


def _tiling(kernel: str, q: Tensor, pages: Pages, tile_size: int) -> tuple[int, int, int, int]:
    """Queries and tokens at a time, warps, and loads under way: the fastest that fits into shared memory."""
    size, width = q.dtype.itemsize, matrix_tile(pages.head_size) + matrix_tile(pages.value_size)
    room = SHARED_BYTES
    if q.is_cuda:
        room = getattr(torch.cuda.get_device_properties(q.device), "shared_memory_per_block_optin", SMALL_SHARED_BYTES)
    # Accumulators of wide heads, and float32 products (which have no matrix instruction), need registers.
    most = 32 if size == 4 else 128 if width <= 256 else 64
    tiling = (16, 16, 4, 1)
    for queries, tokens, num_warps, num_stages in TILINGS[kernel]:
        tile_q = min(queries, tile_size, 128 if size < 4 else 64)
        tile_k = min(tokens, matrix_tile(pages.page_size), most)
        # What stays: queries (for dq their output's gradient too), or the keys and values of a page.
        held = {"forward": tile_q * width // 2, "dq": tile_q * width, "dkv": tile_k * width}[kernel]
        step = tile_q if kernel == "dkv" else tile_k
        tiling = tile_q, tile_k, num_warps, num_stages
        if (held + num_stages * step * width) * size <= room - 2048:
            break
    return tiling
