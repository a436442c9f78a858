"""Launch the Triton kernels of attention to selected pages.

B batch, H query heads, T queries, D head size, P pages, N query tiles, C selected pages per tile.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oomb.ops.rounding import DROPPED_BITS
from oomb.ops.triton_support import LOG2_E, matrix_tile

ALIGNED_BYTES = 16
"""The widest load of a GPU. Pages and their rows are aligned to it."""


class Pages(Protocol):
    """Pages of K and V, or of their gradients. `base` is flat; offsets and sizes count elements, not bytes."""

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
        """Offset of V in a row."""


class Grads(Pages, Protocol):
    """Gradient pages."""

    @property
    def touched_BP(self) -> Tensor:
        """1 where a batch entry's page has received a gradient. Other pages are uninitialized."""

    @property
    def seed(self) -> int:
        """Seed for the stochastic rounding."""


def launch_forward(
    q: Tensor,
    pages: Pages,
    selected_BNC: Tensor,
    own: Tensor,
    own_lse: Tensor,
    *,
    scale: float,
    tile_size: int,
    has_gaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE over the selected pages and the keys that `own` attended to.

    Args:
        own: Attention of the queries to their own chunk, which the softmax starts from.
        own_lse: Its LSE.
        has_gaps: Whether entries of the selection may be -1.
    """
    from oomb.ops.triton_kernels.page_attention import forward_kernel

    B, H, T, D = q.shape
    # [B, T, H, D] in memory: the layout that models continue with.
    out = torch.empty(B, T, H, pages.value_size, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    tile_q, tile_k, warps, stages = _tiling("forward", q, pages, tile_size)
    q, own = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, own))
    with torch.cuda.device_of(q):
        forward_kernel[(H, selected_BNC.shape[1] * (tile_size // tile_q), B)](
            q, pages.base, _places(pages, selected_BNC), selected_BNC, own, own_lse.contiguous(), out, lse,
            T, D, pages.value_size, pages.length, selected_BNC.shape[2], scale * LOG2_E,
            *q.stride()[:3], *own.stride()[:3], *out.stride()[:3], *_row_strides(pages),
            **_sizes(q, pages), **_masks(pages, tile_k, has_gaps), QUERY_TILE=tile_size, TILE_Q=tile_q,
            TILE_K=tile_k, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out, lse


def launch_dq(
    dout: Tensor,
    q: Tensor,
    pages: Pages,
    selected_BNC: Tensor,
    out: Tensor,
    lse: Tensor,
    own_dq: Tensor,
    *,
    scale: float,
    tile_size: int,
    has_gaps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dq including `own_dq`, and delta [B, H, T]: the sum of dout * out over D."""
    from oomb.ops.triton_kernels.page_attention import dq_kernel

    B, H, T, D = q.shape
    dq = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device).transpose(1, 2)
    delta = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    tile_q, tile_k, warps, stages = _tiling("dq", q, pages, tile_size)
    dout, q, out, own_dq = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, q, out, own_dq))
    with torch.cuda.device_of(q):
        dq_kernel[(H, selected_BNC.shape[1] * (tile_size // tile_q), B)](
            dout, q, out, pages.base, _places(pages, selected_BNC), selected_BNC, lse.contiguous(), own_dq, dq, delta,
            T, D, pages.value_size, pages.length, selected_BNC.shape[2], scale, scale * LOG2_E,
            *dout.stride()[:3], *q.stride()[:3], *out.stride()[:3], *own_dq.stride()[:3], *dq.stride()[:3],
            *_row_strides(pages), **_sizes(q, pages), **_masks(pages, tile_k, has_gaps), QUERY_TILE=tile_size,
            TILE_Q=tile_q, TILE_K=tile_k, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dq, delta


def launch_dkv(
    dout: Tensor,
    q: Tensor,
    pages: Pages,
    selected_BNC: Tensor,
    lse: Tensor,
    delta: Tensor,
    grads: Grads,
    *,
    scale: float,
    tile_size: int,
) -> None:
    """Add dk and dv to the gradient pages, which have the same numbers as those of K and V."""
    from oomb.ops.triton_kernels.page_attention import dkv_kernel

    _, H, T, D = q.shape
    num_pages, num_tiles = len(pages.offsets_P), selected_BNC.shape[1]
    readers, ends, order = invert(selected_BNC, num_pages)
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


def invert(selected_BNC: Tensor, num_pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tiles read each page: (readers, ends, order).

    Page p of batch entry b has the index i = b * num_pages + p. Its readers are readers[ends[i - 1]:ends[i]], each as
    b * N + tile. `order` has the indices, most read first, as many as can have readers at all.

    Two tiles that select pages [0, 2] and [2] of three: readers [0, 0, 1], ends [1, 1, 3], order [2, 0, 1].

    Sizes depend on shapes alone, so nothing waits for the GPU. Entries of -1 are sorted to the end.
    """
    B, N, C = selected_BNC.shape
    selected = selected_BNC.long()
    sequence = torch.arange(B, device=selected.device).view(B, 1, 1)
    item = torch.where(selected >= 0, sequence * num_pages + selected, B * num_pages).flatten()
    item, at = item.sort(stable=True)
    ends = torch.searchsorted(item, torch.arange(B * num_pages, device=selected.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    order = counts.argsort(descending=True, stable=True)
    return (at // C).int(), ends.int(), order[: B * N * C].int()


def _places(pages: Pages, selected_BNC: Tensor) -> Tensor:
    """Return the offsets of the selected pages. Entries of -1 get that of page 0, which is then not read."""
    return pages.offsets_P[selected_BNC.long().clamp(min=0)]


def _row_strides(pages: Pages) -> tuple[int, int, int, int]:
    """Return the strides of rows and of key heads, the offset of V, and the stride of value heads."""
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
    """Return the elements in 16 bytes: pages begin at multiples of that."""
    return ALIGNED_BYTES // pages.base.dtype.itemsize


def _masks(pages: Pages, tile_k: int, has_gaps: bool) -> dict[str, bool]:
    """Return what the kernels that read lists of pages have to mask."""
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
"""(queries per tile, tokens per tile, warps, pipeline stages), fastest first. Measured on an H200 with a chunk of 4096,
28 query heads over 4, head size 128, 64 random pages of 128: 420 TFLOP/s forward, 560 dq, 387 dk and dv; with 64 tokens
per tile 344 forward and 484 dq."""
SHARED_BYTES = 227 * 1024
"""Shared memory of an H200, assumed in the interpreter. GPUs report theirs."""
SMALL_SHARED_BYTES = 99 * 1024
"""Shared memory assumed for GPUs that do not report theirs."""


def _tiling(kernel: str, q: Tensor, pages: Pages, tile_size: int) -> tuple[int, int, int, int]:
    """Return queries and tokens per tile, warps and pipeline stages: the fastest entry that fits in shared memory."""
    size, width = q.dtype.itemsize, matrix_tile(pages.head_size) + matrix_tile(pages.value_size)
    shared_bytes = SHARED_BYTES
    if q.is_cuda:
        properties = torch.cuda.get_device_properties(q.device)
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", SMALL_SHARED_BYTES)
    # Wide heads need registers for accumulators, and float32 needs them for the products, since it has no matrix
    # instruction.
    max_tokens = 32 if size == 4 else 128 if width <= 256 else 64
    tiling = (16, 16, 4, 1)
    for queries, tokens, num_warps, num_stages in TILINGS[kernel]:
        tile_q = min(queries, tile_size, 128 if size < 4 else 64)
        tile_k = min(tokens, matrix_tile(pages.page_size), max_tokens)
        # Resident tiles: queries (for dq also dout), or the keys and values of a page.
        held = {"forward": tile_q * width // 2, "dq": tile_q * width, "dkv": tile_k * width}[kernel]
        step = tile_q if kernel == "dkv" else tile_k
        tiling = tile_q, tile_k, num_warps, num_stages
        if (held + num_stages * step * width) * size <= shared_bytes - 2048:
            break
    return tiling
