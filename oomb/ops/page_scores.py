"""Score the pages of the past and select those that each tile of queries reads.

A few mean keys stand for a page. The score of a page is the attention that a sample of the tile's queries would give to
its means if there were no other keys, summed over queries and heads. All heads read the pages with the highest scores.

B batch, H query heads, K key/value heads, T queries, D head size, P pages, M means of all pages, N query tiles,
C selected pages per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.config import means_per_page
from oomb.ops.triton_support import LOG2_E, can_launch, matrix_tile, power_of_two

SINK = 0
"""The page with the attention sink: models put attention there that they have no other use for."""


@dataclass(frozen=True)
class PageRule:
    """How pages are scored."""

    num_means: int
    """Mean keys per page."""
    num_queries: int | None
    """Queries of a tile that are sampled, evenly spaced; None: all."""
    has_sink: bool
    """Whether page 0 is always selected."""

    def sampled_queries(self, tile_size: int) -> list[int]:
        """Return the sampled queries of a tile, which include its last one.

        >>> PageRule(num_means=2, num_queries=8, has_sink=True).sampled_queries(128)
        [15, 31, 47, 63, 79, 95, 111, 127]
        """
        count = min(self.num_queries or tile_size, tile_size)
        return [j * tile_size // count - 1 for j in range(1, count + 1)]


def rule_named(name: str, page_size: int) -> PageRule:
    """Return the rule of that name: "mass", or "paper" (arXiv 2602.02108, for comparison)."""
    num_queries, has_sink = {"mass": (16, True), "paper": (None, False)}[name]
    return PageRule(means_per_page(name, page_size), num_queries, has_sink)


@dataclass(frozen=True)
class Tiling:
    """How much a kernel program holds at a time."""

    means: int
    rows: int
    num_warps: int
    num_stages: int


STAGE_BYTES = 96 * 1024
"""Shared memory for pipelined loads: current GPUs allow a program 99 KB or more."""
MIN_PROGRAMS = 2048
"""Enough to keep a large GPU busy to the end: an H200 runs about 400 at once, three on each of 132 SMs."""
MAX_SPLITS = 16
"""Merging more splits takes longer than they save."""


def summarize(k_BKTD: Tensor, page_size: int, num_means: int, out_BKMD: Tensor) -> None:
    """Write the means of whole pages of keys, `num_means` per page, to `out_BKMD`."""
    T = k_BKTD.shape[2]
    if T % page_size or page_size % num_means:
        raise ValueError(
            f"cannot split {T} keys into pages of {page_size} with {num_means} means each: pass whole pages, and the "
            "number of means from means_per_page"
        )
    wide = torch.promote_types(k_BKTD.dtype, torch.float32)
    means = k_BKTD.unflatten(2, (-1, page_size // num_means)).mean(3, dtype=wide)
    # Outside float8's range, PyTorch returns NaN or the largest number, depending on its version.
    largest = torch.finfo(out_BKMD.dtype).max
    out_BKMD.copy_(means.clamp_(-largest, largest))


def select(
    q_BHTD: Tensor,
    means_BKMD: Tensor,
    rule: PageRule,
    budget: int,
    *,
    scale: float,
    tile_size: int,
    sum_scores: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the pages [B, N, C] that each tile reads, in ascending order.

    `sum_scores` adds the scores of heads that other ranks hold.
    """
    (B, _, T, _), P = q_BHTD.shape, means_BKMD.shape[2] // rule.num_means
    if budget >= P:
        return torch.arange(P, dtype=torch.int32, device=q_BHTD.device).expand(B, -(-T // tile_size), P)
    scores_BNP = page_scores(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size)
    return top_pages(scores_BNP if sum_scores is None else sum_scores(scores_BNP), budget, rule.has_sink)


def page_scores(q_BHTD: Tensor, means_BKMD: Tensor, *, rule: PageRule, scale: float, tile_size: int) -> Tensor:
    """Return the score [B, N, P] of each page for each tile, in float32.

    The last tile may be shorter; then it samples as many queries as it has, up to the rule's number.
    """
    if _use_triton(q_BHTD, means_BKMD):
        return launch_page_scores(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size)
    return page_scores_reference(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size)


def top_pages(scores_BNP: Tensor, budget: int, has_sink: bool) -> Tensor:
    """Return the `budget` pages [B, N, C] with the highest scores, in ascending order. Ties go to the earlier page."""
    P = scores_BNP.shape[2]
    # The bits of nonnegative floats are ordered like the floats. Appending the page number makes all ranks different,
    # so nothing depends on how topk breaks ties.
    bits = scores_BNP.float().contiguous().view(torch.int32).long()
    if has_sink:
        bits[:, :, SINK : SINK + 1] = torch.iinfo(torch.int32).max
    from_end = torch.arange(P - 1, -1, -1, device=bits.device)
    ranks = (bits << 32 | from_end).topk(min(budget, P), dim=-1, sorted=False).values
    return (P - 1 - ranks % (1 << 32)).int().sort(dim=-1).values


def page_scores_reference(
    q_BHTD: Tensor, means_BKMD: Tensor, *, rule: PageRule, scale: float, tile_size: int
) -> Tensor:
    """Score pages in plain PyTorch."""
    H, T = q_BHTD.shape[1:3]
    K, M = means_BKMD.shape[1:3]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    means_BKDM = means_BKMD.to(q_BHTD.dtype).to(wide).transpose(2, 3)
    by_tile = []
    for first in range(0, T, tile_size):
        tile = q_BHTD[:, :, first : first + tile_size]
        # R rows: the sampled queries of all heads that share a key/value head.
        q_BKRD = tile[:, :, rule.sampled_queries(tile.shape[2])].to(wide).unflatten(1, (K, H // K)).flatten(2, 3)
        probs_BKRM = (q_BKRD @ means_BKDM * scale).softmax(-1)
        by_tile.append(probs_BKRM.sum((1, 2)).unflatten(-1, (M // rule.num_means, rule.num_means)).sum(-1))
    return torch.stack(by_tile, 1).float()


def launch_page_scores(
    q_BHTD: Tensor,
    means_BKMD: Tensor,
    *,
    rule: PageRule,
    scale: float,
    tile_size: int,
    lse_tiling: Tiling | None = None,
    scores_tiling: Tiling | None = None,
) -> Tensor:
    """Launch the kernels: one pass over the means for the LSE of every row, one for the scores of the pages."""
    from oomb.ops.triton_kernels.page_scores import means_lse_kernel, merge_lse_kernel, page_scores_kernel

    (B, H, T, D), (K, M) = q_BHTD.shape, means_BKMD.shape[1:3]
    assert q_BHTD.stride(3) == means_BKMD.stride(3) == 1
    N, P, group = -(-T // tile_size), M // rule.num_means, H // K
    result_BNP = torch.empty(B, N, P, dtype=torch.float32, device=q_BHTD.device)
    if P == 0:
        return result_BNP
    num_sampled = len(rule.sampled_queries(tile_size))
    num_rows = N * num_sampled * group
    lse_tiling = lse_tiling or _tiling(q_BHTD, means_BKMD, num_rows)
    scores_tiling = scores_tiling or _tiling(q_BHTD, means_BKMD, num_sampled * group)
    row_tiles, mean_tiles = -(-num_rows // lse_tiling.rows), -(-M // lse_tiling.means)
    splits = _num_splits(row_tiles * B * K, mean_tiles)
    lse = torch.empty(splits, B, K, num_rows, dtype=torch.float32, device=q_BHTD.device)
    strides = (*q_BHTD.stride()[:3], *means_BKMD.stride()[:3])
    sizes = {"GROUP": group, "TILE_T": tile_size, "SAMPLED": num_sampled, "TILE_D": matrix_tile(D)}
    page_places = power_of_two(rule.num_means)
    tile_m = max(scores_tiling.means, page_places)
    with torch.cuda.device_of(q_BHTD):
        # Consecutive programs read the same means, which stay in the cache.
        means_lse_kernel[(row_tiles, splits, B * K)](
            q_BHTD, means_BKMD, lse, T, D, M, K, num_rows, scale * LOG2_E, *strides, **sizes,
            TILE_R=lse_tiling.rows, TILE_M=lse_tiling.means,
            num_warps=lse_tiling.num_warps, num_stages=lse_tiling.num_stages,
        )  # fmt: skip
        if splits > 1:
            merge_lse_kernel[(-(-lse[0].numel() // 64),)](lse, lse[0].numel(), SPLITS=splits, TILE_R=64, num_warps=1)
        page_scores_kernel[(N, -(-P * page_places // tile_m), B)](
            q_BHTD, means_BKMD, lse, result_BNP, T, D, P, K, num_rows, scale * LOG2_E, *strides, **sizes,
            NUM_MEANS=rule.num_means, TILE_R=scores_tiling.rows, TILE_M=tile_m, TILE_PAGE=page_places,
            num_warps=scores_tiling.num_warps, num_stages=scores_tiling.num_stages,
        )  # fmt: skip
    return result_BNP


def _use_triton(q: Tensor, means: Tensor) -> bool:
    if not (can_launch(q, means) and q.shape[3] <= 256):
        return False
    # Triton supports float8_e4m3fn from this generation on.
    return means.dtype.itemsize > 1 or torch.cuda.get_device_capability(q.device) >= (8, 9)


def _tiling(q: Tensor, means: Tensor, num_rows: int) -> Tiling:
    """Return the tile sizes.

    64 x 64 scores are one matrix instruction of an H200, and two or three such programs fit in the registers of an SM.
    float32 has no matrix instruction and takes smaller tiles.
    """
    size, tile_d = 32 if q.dtype.itemsize == 4 else 64, matrix_tile(q.shape[3])
    rows = min(size, matrix_tile(num_rows))
    stage_bytes = tile_d * (size * means.dtype.itemsize + rows * q.dtype.itemsize)
    return Tiling(size, rows, num_warps=4, num_stages=max(1, min(3, STAGE_BYTES // stage_bytes)))


def _num_splits(programs: int, mean_tiles: int) -> int:
    """Return in how many parts to split the means: a power of two, and at least one tile each."""
    num_splits = max(1, min(MIN_PROGRAMS // programs, mean_tiles, MAX_SPLITS))
    return 1 << (num_splits.bit_length() - 1)
