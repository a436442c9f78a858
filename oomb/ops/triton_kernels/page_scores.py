"""Triton kernels that score pages. `oomb.ops.page_scores` has the PyTorch reference."""

import triton
import triton.language as tl


@triton.jit
def sampled_row(row, T, GROUP: tl.constexpr, TILE_T: tl.constexpr, SAMPLED: tl.constexpr):
    """Return query, head within its group, and whether the query exists, of rows numbered by tile, query and head.

    A tile of L queries samples c = min(SAMPLED, L) of them, at (j + 1) * L // c - 1 for j below c: 15, 31, ..., 127 for
    eight of 128. Rows beyond those, and beyond the last tile, have no query.
    """
    tile, j = row // (SAMPLED * GROUP), row // GROUP % SAMPLED
    length = tl.minimum(T - tile * TILE_T, TILE_T)
    count = tl.minimum(length, SAMPLED)
    t = tile * TILE_T + (j + 1) * length // tl.maximum(count, 1) - 1
    return t, row % GROUP, j < count


@triton.jit
def means_lse_kernel(
    q, means, lse, T, D, M, K, num_rows, scale_log2, q_b, q_h, q_t, means_b, means_k, means_m,
    GROUP: tl.constexpr, TILE_T: tl.constexpr, SAMPLED: tl.constexpr, TILE_R: tl.constexpr, TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """Write the base-2 LSE of the sampled queries over one split of the means to lse [splits, B, K, num_rows].

    q is [B, H, T, D] and means [B, K, M, D], with strides *_b, *_h, *_k, *_t, *_m and 1. A program processes TILE_R
    rows of one key/value head, numbered as in `sampled_row`, and one split of the tiles of TILE_M means.

    Every element of a [TILE_M, TILE_R] tile keeps a running softmax of its own, so nothing is reduced before the end.
    The larger of old maximum and new score has the exponential 1, so only one exponential is computed: maximum 3,
    total 2 and a new score of 5 give 2 ** -|5 - 3| = 1/4, hence maximum 5 and total 2 * 1/4 + 1.
    """
    split, batch = tl.program_id(1), tl.program_id(2)
    b, k = (batch // K).to(tl.int64), (batch % K).to(tl.int64)
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    t, g, exists = sampled_row(row, T, GROUP, TILE_T, SAMPLED)
    d = tl.arange(0, TILE_D)
    q_at = b * q_b + (k * GROUP + g) * q_h + t.to(tl.int64) * q_t
    q_tile = tl.load(q + q_at[:, None] + d[None, :], exists[:, None] & (d < D)[None, :], other=0.0)
    means += b * means_b + k * means_k
    top = tl.full([TILE_M, TILE_R], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M, TILE_R], tl.float32)
    num_tiles = (M + TILE_M - 1) // TILE_M
    begin = split * num_tiles // tl.num_programs(1)
    end = (split + 1) * num_tiles // tl.num_programs(1)
    for tile in range(begin, end):
        m = tile * TILE_M + tl.arange(0, TILE_M)
        means_at = m.to(tl.int64)[:, None] * means_m + d[None, :]
        means_tile = tl.load(means + means_at, (m < M)[:, None] & (d < D)[None, :], other=0.0)
        # Via float32: converting float8 directly to bfloat16 is slow.
        means_tile = means_tile.to(tl.float32).to(q_tile.dtype)
        scores = tl.dot(means_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        # Not -inf: `top` may be -inf, and their difference would be NaN.
        scores = tl.where((m < M)[:, None], scores, -3e38)
        ahead = scores - top
        smaller = tl.exp2(-tl.abs(ahead))
        total = tl.where(ahead > 0.0, total * smaller + 1.0, total + smaller)
        top = tl.maximum(top, scores)
    highest = tl.max(top, 0)
    whole = highest + tl.log2(tl.sum(total * tl.exp2(top - highest[None, :]), 0))
    lse_at = (split * tl.num_programs(2) + batch).to(tl.int64) * num_rows + row
    tl.store(lse + lse_at, whole, row < num_rows)


@triton.jit
def merge_lse_kernel(lse, num_rows, SPLITS: tl.constexpr, TILE_R: tl.constexpr):
    """Merge the base-2 LSE of all splits, [SPLITS, num_rows], into the first row: 1 and 1 become 2."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    split = tl.arange(0, SPLITS).to(tl.int64)
    parts = tl.load(lse + split[:, None] * num_rows + row[None, :], (row < num_rows)[None, :], other=0.0)
    highest = tl.max(parts, 0)
    whole = highest + tl.log2(tl.sum(tl.exp2(parts - highest[None, :]), 0))
    tl.store(lse + row, whole, row < num_rows)


@triton.jit
def page_scores_kernel(
    q, means, lse, scores_out, T, D, P, K, num_rows, scale_log2, q_b, q_h, q_t, means_b, means_k, means_m,
    GROUP: tl.constexpr, TILE_T: tl.constexpr, SAMPLED: tl.constexpr, NUM_MEANS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_M: tl.constexpr, TILE_D: tl.constexpr, TILE_PAGE: tl.constexpr,
):  # fmt: skip
    """Write the scores of TILE_M / TILE_PAGE pages for one tile of queries to scores_out [B, N, P].

    Arguments are as in `means_lse_kernel`, lse is [B, K, num_rows]. A page has NUM_MEANS means in TILE_PAGE slots, the
    next power of two. The program sums over all heads, in order, so the result is deterministic.
    """
    n, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    PAGES: tl.constexpr = TILE_M // TILE_PAGE
    place, d = tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    page = tl.program_id(1) * PAGES + place // TILE_PAGE
    is_mean = (page < P) & (place % TILE_PAGE < NUM_MEANS)
    m = page.to(tl.int64) * NUM_MEANS + place % TILE_PAGE
    means_at = means + b * means_b + m[:, None] * means_m + d[None, :]
    ROW_TILES: tl.constexpr = (SAMPLED * GROUP + TILE_R - 1) // TILE_R
    probs = tl.zeros([TILE_M, TILE_R], tl.float32)
    for step in range(K * ROW_TILES):
        k = tl.cast(step // ROW_TILES, tl.int64)
        row_of_tile = step % ROW_TILES * TILE_R + tl.arange(0, TILE_R)
        row = n * (SAMPLED * GROUP) + row_of_tile
        t, g, exists = sampled_row(row, T, GROUP, TILE_T, SAMPLED)
        exists &= row_of_tile < SAMPLED * GROUP
        q_at = b * q_b + (k * GROUP + g) * q_h + t.to(tl.int64) * q_t
        q_tile = tl.load(q + q_at[:, None] + d[None, :], exists[:, None] & (d < D)[None, :], other=0.0)
        means_tile = tl.load(means_at + k * means_k, is_mean[:, None] & (d < D)[None, :], other=0.0)
        means_tile = means_tile.to(tl.float32).to(q_tile.dtype)
        whole = tl.load(lse + (b * K + k) * num_rows + row, exists, other=float("inf"))
        scores = tl.dot(means_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        probs += tl.exp2(scores - whole[None, :])
    by_mean = tl.where(is_mean, tl.sum(probs, 1), 0.0)
    by_page = tl.sum(tl.reshape(by_mean, [PAGES, TILE_PAGE]), 1)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    tl.store(scores_out + (b * tl.num_programs(0) + n) * P + page, by_page, page < P)
