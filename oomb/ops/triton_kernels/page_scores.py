"""The Triton kernels that rank pages; `oomb.attention.select` says what they compute."""

import triton
import triton.language as tl


@triton.jit
def sampled_row(row, T, GROUP: tl.constexpr, TILE_T: tl.constexpr, ASKED: tl.constexpr):
    """Query, head within its group, and whether there is such a query, of rows numbered by tile, query and head.

    A tile of L queries is asked for c = min(ASKED, L) of them, at (j + 1) * L // c - 1 for j below c: 15, 31, ..., 127
    for eight of 128. Past those, and past the last tile, there is no query.
    """
    tile, j = row // (ASKED * GROUP), row // GROUP % ASKED
    length = tl.minimum(T - tile * TILE_T, TILE_T)
    count = tl.minimum(length, ASKED)
    t = tile * TILE_T + (j + 1) * length // tl.maximum(count, 1) - 1
    return t, row % GROUP, j < count


@triton.jit
def means_lse_kernel(
    q, means, lse, T, D, M, K, num_rows, scale_log2, q_b, q_h, q_t, means_b, means_k, means_m,
    GROUP: tl.constexpr, TILE_T: tl.constexpr, ASKED: tl.constexpr, TILE_R: tl.constexpr, TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """Base-2 lse of the asked queries over one split of the means, into lse [splits, B, K, num_rows].

    q is [B, H, T, D] and means [B, K, M, D], with strides *_b, *_h, *_k, *_t, *_m and 1. A program does TILE_R rows of
    one key/value head, numbered as `asked_row` has them, and its share of all tiles of TILE_M means. Every place of a
    [TILE_M, TILE_R] tile of scores keeps a softmax of its own: nothing is reduced before the end, and the larger of
    (old top, new score) has the exponential 1, so that one is computed and not two. Old (top 3, total 2) and score 5:
    2 ** -|5 - 3| = 1/4, and 5 is on top, hence (5, 2 * 1/4 + 1).
    """
    split, batch = tl.program_id(1), tl.program_id(2)
    b, k = (batch // K).to(tl.int64), (batch % K).to(tl.int64)
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    t, g, exists = sampled_row(row, T, GROUP, TILE_T, ASKED)
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
        # By way of float32: from float8 straight to bfloat16 goes through a slow unit.
        means_tile = means_tile.to(tl.float32).to(q_tile.dtype)
        scores = tl.dot(means_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        # Not -inf, which top may be: their difference is NaN.
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
    """Base-2 lse of all splits from [SPLITS, num_rows], into its first row: (1, 1) become 2."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    split = tl.arange(0, SPLITS).to(tl.int64)
    parts = tl.load(lse + split[:, None] * num_rows + row[None, :], (row < num_rows)[None, :], other=0.0)
    highest = tl.max(parts, 0)
    whole = highest + tl.log2(tl.sum(tl.exp2(parts - highest[None, :]), 0))
    tl.store(lse + row, whole, row < num_rows)


@triton.jit
def page_scores_kernel(
    q, means, lse, interest, T, D, P, K, num_rows, scale_log2, q_b, q_h, q_t, means_b, means_k, means_m,
    GROUP: tl.constexpr, TILE_T: tl.constexpr, ASKED: tl.constexpr, NUM_MEANS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_M: tl.constexpr, TILE_D: tl.constexpr, TILE_PAGE: tl.constexpr,
):  # fmt: skip
    """Interest of one tile of queries in TILE_M / TILE_PAGE pages, into interest [B, N, P].

    Arguments as in `means_lse_kernel`, lse [B, K, num_rows]. A page has NUM_MEANS means and TILE_PAGE places, the next
    power of two. All heads are summed in here, in order: the result is always the same.
    """
    n, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    PAGES: tl.constexpr = TILE_M // TILE_PAGE
    place, d = tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    page = tl.program_id(1) * PAGES + place // TILE_PAGE
    is_mean = (page < P) & (place % TILE_PAGE < NUM_MEANS)
    m = page.to(tl.int64) * NUM_MEANS + place % TILE_PAGE
    means_at = means + b * means_b + m[:, None] * means_m + d[None, :]
    ROW_TILES: tl.constexpr = (ASKED * GROUP + TILE_R - 1) // TILE_R
    shares = tl.zeros([TILE_M, TILE_R], tl.float32)
    for step in range(K * ROW_TILES):
        k = tl.cast(step // ROW_TILES, tl.int64)
        row_of_tile = step % ROW_TILES * TILE_R + tl.arange(0, TILE_R)
        row = n * (ASKED * GROUP) + row_of_tile
        t, g, exists = sampled_row(row, T, GROUP, TILE_T, ASKED)
        exists &= row_of_tile < ASKED * GROUP
        q_at = b * q_b + (k * GROUP + g) * q_h + t.to(tl.int64) * q_t
        q_tile = tl.load(q + q_at[:, None] + d[None, :], exists[:, None] & (d < D)[None, :], other=0.0)
        means_tile = tl.load(means_at + k * means_k, is_mean[:, None] & (d < D)[None, :], other=0.0)
        means_tile = means_tile.to(tl.float32).to(q_tile.dtype)
        whole = tl.load(lse + (b * K + k) * num_rows + row, exists, other=float("inf"))
        scores = tl.dot(means_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        shares += tl.exp2(scores - whole[None, :])
    by_mean = tl.where(is_mean, tl.sum(shares, 1), 0.0)
    by_page = tl.sum(tl.reshape(by_mean, [PAGES, TILE_PAGE]), 1)
    page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    tl.store(interest + (b * tl.num_programs(0) + n) * P + page, by_page, page < P)
