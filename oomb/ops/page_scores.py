"""Which earlier pages a tile of queries reads.

A page is known by a few means of its keys. A tile's interest in a page is the attention that some of its queries would
give to the page's means if there were nothing but means to attend to, summed over queries and heads. The pages of most
interest are read, the same ones by all heads.

B batch, H query heads, K key/value heads, T queries, D head size, P pages, M means of all pages, N tiles, C pages
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.config import means_per_page
from oomb.ops.triton_support import LOG2_E, can_launch, matrix_tile, power_of_two

SINK = 0
"""The page where attention puts what it has no use for."""


@dataclass(frozen=True)
class PageRule:
    """How pages are ranked."""

    num_means: int
    """Means of keys kept for a page."""
    num_queries: int | None
    """Queries of a tile that are asked, evenly spread; None: all."""
    has_sink: bool
    """Page 0 is always chosen."""

    def sampled_queries(self, tile_size: int) -> list[int]:
        """The queries of a tile that are asked, its last among them: 15, 31, ..., 127 for eight of 128."""
        count = min(self.num_queries or tile_size, tile_size)
        return [j * tile_size // count - 1 for j in range(1, count + 1)]


def rule_named(name: str, page_size: int) -> PageRule:
    """ "paper" is that of arXiv 2602.02108, for comparison."""
    num_queries, has_sink = {"mass": (16, True), "paper": (None, False)}[name]
    return PageRule(means_per_page(name, page_size), num_queries, has_sink)


@dataclass(frozen=True)
class Tiling:
    """What a program of a kernel holds at a time."""

    means: int
    rows: int
    num_warps: int
    num_stages: int


STAGE_BYTES = 96 * 1024
"""Shared memory a program may take for loads under way: GPUs of today let it have 99 KB or more."""
WANTED_PROGRAMS = 2048
"""So many keep a large GPU busy to the end (an H200 runs some 400 at a time: 132 multiprocessors, three on each)."""
MAX_SPLITS = 16
"""Merging more would take longer than they save."""


def summarize(k_BKTD: Tensor, page_size: int, num_means: int, out_BKMD: Tensor) -> None:
    """Means of the keys of whole pages, `num_means` to a page, in the dtype of `out_BKMD`."""
    T = k_BKTD.shape[2]
    if T % page_size or page_size % num_means:
        raise ValueError(
            f"{T} keys are not whole pages of {page_size}, or {num_means} means do not share a page evenly; "
            "give whole pages, and take the number of means from means_per_page"
        )
    wide = torch.promote_types(k_BKTD.dtype, torch.float32)
    means = k_BKTD.unflatten(2, (-1, page_size // num_means)).mean(3, dtype=wide)
    # Out of float8's range PyTorch makes NaN, or the largest number, depending on its version.
    largest = torch.finfo(out_BKMD.dtype).max
    out_BKMD.copy_(means.clamp_(-largest, largest))


def select(q_BHTD: Tensor, means_BKMD: Tensor, rule: PageRule, budget: int, *, scale: float, tile_size: int) -> Tensor:
    """[B, N, C] numbers of the pages that each tile reads, ascending."""
    (B, _, T, _), P = q_BHTD.shape, means_BKMD.shape[2] // rule.num_means
    if budget >= P:
        return torch.arange(P, dtype=torch.int32, device=q_BHTD.device).expand(B, -(-T // tile_size), P)
    return top_pages(
        page_scores(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size), budget, rule.has_sink
    )


def page_scores(q_BHTD: Tensor, means_BKMD: Tensor, *, rule: PageRule, scale: float, tile_size: int) -> Tensor:
    """[B, N, P] in float32: the attention that each tile's asked queries give to each page's means, summed over queries
    and heads. The last tile may be shorter; it is asked for as many queries as it has, up to the rule's number."""
    if _use_triton(q_BHTD, means_BKMD):
        return launch_page_scores(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size)
    return page_scores_reference(q_BHTD, means_BKMD, rule=rule, scale=scale, tile_size=tile_size)


def top_pages(interest_BNP: Tensor, budget: int, has_sink: bool) -> Tensor:
    """[B, N, C] numbers of the `budget` pages of most interest, ascending; of two alike, the earlier is chosen."""
    P = interest_BNP.shape[2]
    # Bits of floats that are not negative are ordered as the floats are. With the page's number below them no two ranks
    # are equal, and nothing depends on how topk breaks ties.
    bits = interest_BNP.float().contiguous().view(torch.int32).long()
    if has_sink:
        bits[:, :, SINK : SINK + 1] = torch.iinfo(torch.int32).max
    from_end = torch.arange(P - 1, -1, -1, device=bits.device)
    ranks = (bits << 32 | from_end).topk(min(budget, P), dim=-1, sorted=False).values
    return (P - 1 - ranks % (1 << 32)).int().sort(dim=-1).values


def page_scores_reference(
    q_BHTD: Tensor, means_BKMD: Tensor, *, rule: PageRule, scale: float, tile_size: int
) -> Tensor:
    H, T = q_BHTD.shape[1:3]
    K, M = means_BKMD.shape[1:3]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    means_BKDM = means_BKMD.to(q_BHTD.dtype).to(wide).transpose(2, 3)
    by_tile = []
    for first in range(0, T, tile_size):
        tile = q_BHTD[:, :, first : first + tile_size]
        # R rows: all asked queries of all heads that share a key/value head.
        q_BKRD = tile[:, :, rule.sampled_queries(tile.shape[2])].to(wide).unflatten(1, (K, H // K)).flatten(2, 3)
        shares_BKRM = (q_BKRD @ means_BKDM * scale).softmax(-1)
        by_tile.append(shares_BKRM.sum((1, 2)).unflatten(-1, (M // rule.num_means, rule.num_means)).sum(-1))
    return torch.stack(by_tile, 1).float()


def launch_page_scores(
    q_BHTD: Tensor,
    means_BKMD: Tensor,
    *,
    rule: PageRule,
    scale: float,
    tile_size: int,
    lse_tiling: Tiling | None = None,
    interest_tiling: Tiling | None = None,
) -> Tensor:
    """Two passes over the means: the lse of every row, then the shares. No score leaves the kernels."""
    from oomb.ops.triton_kernels.page_scores import means_lse_kernel, merge_lse_kernel, page_scores_kernel

    (B, H, T, D), (K, M) = q_BHTD.shape, means_BKMD.shape[1:3]
    assert q_BHTD.stride(3) == means_BKMD.stride(3) == 1
    N, P, group = -(-T // tile_size), M // rule.num_means, H // K
    result_BNP = torch.empty(B, N, P, dtype=torch.float32, device=q_BHTD.device)
    if P == 0:
        return result_BNP
    num_asked = len(rule.sampled_queries(tile_size))
    num_rows = N * num_asked * group
    lse_tiling = lse_tiling or _tiling(q_BHTD, means_BKMD, num_rows)
    interest_tiling = interest_tiling or _tiling(q_BHTD, means_BKMD, num_asked * group)
    row_tiles, mean_tiles = -(-num_rows // lse_tiling.rows), -(-M // lse_tiling.means)
    splits = _num_splits(row_tiles * B * K, mean_tiles)
    lse = torch.empty(splits, B, K, num_rows, dtype=torch.float32, device=q_BHTD.device)
    strides = (*q_BHTD.stride()[:3], *means_BKMD.stride()[:3])
    sizes = {"GROUP": group, "TILE_T": tile_size, "ASKED": num_asked, "TILE_D": matrix_tile(D)}
    page_places = power_of_two(rule.num_means)
    tile_m = max(interest_tiling.means, page_places)
    with torch.cuda.device_of(q_BHTD):
        # Programs that follow one another read the same means.
        means_lse_kernel[(row_tiles, splits, B * K)](
            q_BHTD, means_BKMD, lse, T, D, M, K, num_rows, scale * LOG2_E, *strides, **sizes,
            TILE_R=lse_tiling.rows, TILE_M=lse_tiling.means,
            num_warps=lse_tiling.num_warps, num_stages=lse_tiling.num_stages,
        )  # fmt: skip
        if splits > 1:
            merge_lse_kernel[(-(-lse[0].numel() // 64),)](lse, lse[0].numel(), SPLITS=splits, TILE_R=64, num_warps=1)
        page_scores_kernel[(N, -(-P * page_places // tile_m), B)](
            q_BHTD, means_BKMD, lse, result_BNP, T, D, P, K, num_rows, scale * LOG2_E, *strides, **sizes,
            NUM_MEANS=rule.num_means, TILE_R=interest_tiling.rows, TILE_M=tile_m, TILE_PAGE=page_places,
            num_warps=interest_tiling.num_warps, num_stages=interest_tiling.num_stages,
        )  # fmt: skip
    return result_BNP


def _use_triton(q: Tensor, means: Tensor) -> bool:
    if not (can_launch(q, means) and q.shape[3] <= 256):
        return False
    # Triton has float8_e4m3fn from this generation on.
    return means.dtype.itemsize > 1 or torch.cuda.get_device_capability(q.device) >= (8, 9)


def _tiling(q: Tensor, means: Tensor, num_rows: int) -> Tiling:
    """64 x 64 scores are one matrix instruction of an H200, and two or three such programs fit a multiprocessor's
    registers. float32 has no matrix instruction and takes smaller tiles."""
    size, tile_d = 32 if q.dtype.itemsize == 4 else 64, matrix_tile(q.shape[3])
    rows = min(size, matrix_tile(num_rows))
    stage_bytes = tile_d * (size * means.dtype.itemsize + rows * q.dtype.itemsize)
    return Tiling(size, rows, num_warps=4, num_stages=max(1, min(3, STAGE_BYTES // stage_bytes)))


def _num_splits(programs: int, mean_tiles: int) -> int:
    """A power of two, and no split without a mean."""
    most = max(1, min(WANTED_PROGRAMS // programs, mean_tiles, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)
