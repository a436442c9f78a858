"""Triton kernels of attention to selected pages. `oomb.attention.sparse_reference` is the PyTorch reference.

A page is PAGE rows, row_stride apart. Page p begins at any offset from `base`. In a row, head k of batch entry b has
its key at (b * K + k) * head_stride and its value at value_at + (b * K + k) * value_stride. Tensors of queries
are [B, H, T, D] with strides *_b, *_h, *_t and 1; lse and delta are [B, H, T] and contiguous. Lists of selected pages
are [B, N, C]. Scores are in base 2.

Pages begin at multiples of ALIGNED elements, which allows wide loads. GAPS means that some of what a tile reads may not
exist: entries of -1, tokens beyond `length`, rows beyond the end of a page. Without it nothing is masked.
"""

import triton
import triton.language as tl

from oomb.ops import triton_support
from oomb.ops.triton_kernels.elementwise import stochastic_round

LOG2_E = tl.constexpr(triton_support.LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def query_positions(T, D, Dv, TILE_Q: tl.constexpr, TILE_D: tl.constexpr, TILE_V: tl.constexpr):
    """Return batch entry, head, and where the TILE_Q queries of this program are, with masks for [T, D] and [T, Dv]."""
    h, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    d, dv = tl.arange(0, TILE_D), tl.arange(0, TILE_V)
    is_query = t < T
    q_mask, v_mask = is_query[:, None] & (d < D)[None, :], is_query[:, None] & (dv < Dv)[None, :]
    return b, h, t.to(tl.int64), d, dv, is_query, q_mask, v_mask, (b * tl.num_programs(0) + h) * T + t


@triton.jit
def score_page_tile(
    i, q_tile, base, places, selected, D, Dv, length, C, scale_log2, row_stride, head_stride, value_at,
    value_stride, GROUP: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr, TILE_K: tl.constexpr,
    TILE_D: tl.constexpr, TILE_V: tl.constexpr, PADDED: tl.constexpr, GAPS: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return base-2 scores, K and V of the i-th piece of the selected pages, and with GAPS which of its tokens exist.

    Pages of 128 tokens with TILE_K = 64 have two pieces each: i = 5 is the second half of the third selected page.
    """
    h, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * (tl.num_programs(0) // GROUP) + h // GROUP
    d, dv, s = tl.arange(0, TILE_D), tl.arange(0, TILE_V), tl.arange(0, TILE_K)
    list_at = (b * (tl.num_programs(1) // PARTS) + tl.program_id(1) // PARTS) * C
    k_at = head * head_stride + s.to(tl.int64)[:, None] * row_stride + d[None, :]
    v_at = value_at + head * value_stride + s.to(tl.int64)[:, None] * row_stride + dv[None, :]
    PIECES: tl.constexpr = (PAGE + TILE_K - 1) // TILE_K
    first = (i % PIECES) * TILE_K
    start = base + tl.multiple_of(tl.load(places + list_at + i // PIECES), ALIGNED) + first * row_stride
    inside = first + s < PAGE
    if GAPS:
        token = tl.load(selected + list_at + i // PIECES).to(tl.int32) * PAGE + first + s
        inside = (token >= 0) & (token < length) & (first + s < PAGE)
        k_tile = tl.load(start + k_at, inside[:, None] & (d < D)[None, :], other=0.0)
        v_tile = tl.load(start + v_at, inside[:, None] & (dv < Dv)[None, :], other=0.0)
    elif PADDED:
        k_tile = tl.load(start + k_at, (d < D)[None, :], other=0.0)
        v_tile = tl.load(start + v_at, (dv < Dv)[None, :], other=0.0)
    else:
        k_tile = tl.load(start + k_at)
        v_tile = tl.load(start + v_at)
    k_tile, v_tile = k_tile.to(q_tile.dtype), v_tile.to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
    return scores, k_tile, v_tile, inside


@triton.jit
def forward_kernel(
    q, base, places, selected, own, own_lse, out, lse, T, D, Dv, length, C, scale_log2,
    q_b, q_h, q_t, own_b, own_h, own_t, out_b, out_h, out_t, row_stride, head_stride, value_at, value_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, QUERY_TILE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    TILE_D: tl.constexpr, TILE_V: tl.constexpr, PADDED: tl.constexpr, GAPS: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of TILE_Q queries of one tile and head to the tile's selected pages and the chunk's own keys.

    The softmax starts from `own` and `own_lse`, the result for the chunk's own keys. With own = 4, own_lse = log 1, and
    one page of one token with score log 3 and value 8: out = 7, lse = log 4.
    """
    b, h, t64, d, dv, is_query, q_mask, v_mask, at_query = query_positions(T, D, Dv, TILE_Q, TILE_D, TILE_V)
    q_tile = tl.load(q + b * q_b + h * q_h + t64[:, None] * q_t + d[None, :], q_mask, other=0.0)
    acc = tl.load(own + b * own_b + h * own_h + t64[:, None] * own_t + dv[None, :], v_mask, other=0.0).to(tl.float32)
    top = tl.load(own_lse + at_query, is_query, other=0.0) * LOG2_E
    total = tl.full([TILE_Q], 1.0, tl.float32)
    # One loop over pages and their pieces, so that loads of the next pages overlap with this one's computation.
    for i in tl.range(0, C * tl.cdiv(PAGE, TILE_K), num_stages=STAGES):
        scores, _, v_tile, inside = score_page_tile(
            i, q_tile, base, places, selected, D, Dv, length, C, scale_log2, row_stride, head_stride, value_at,
            value_stride, GROUP, PAGE, QUERY_TILE // TILE_Q, TILE_K, TILE_D, TILE_V, PADDED, GAPS, ALIGNED, PRECISION,
        )  # fmt: skip
        if GAPS:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(probs, 1)
        top = higher
    out_at = out + b * out_b + h * out_h + t64[:, None] * out_t + dv[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), v_mask)
    tl.store(lse + at_query, (top + tl.log2(total)) * LN_2, is_query)


@triton.jit
def dq_kernel(
    dout, q, out, base, places, selected, lse, own, dq, delta, T, D, Dv, length, C, scale, scale_log2,
    do_b, do_h, do_t, q_b, q_h, q_t, out_b, out_h, out_t, own_b, own_h, own_t, dq_b, dq_h, dq_t,
    row_stride, head_stride, value_at, value_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, QUERY_TILE: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    TILE_D: tl.constexpr, TILE_V: tl.constexpr, PADDED: tl.constexpr, GAPS: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of TILE_Q queries of one tile and head: `own` plus the part of the tile's selected pages.

    out and lse are those of the whole softmax. delta, the sum of dout * out over D, is written for `dkv_kernel`.
    """
    b, h, t64, d, dv, is_query, q_mask, v_mask, at_query = query_positions(T, D, Dv, TILE_Q, TILE_D, TILE_V)
    q_tile = tl.load(q + b * q_b + h * q_h + t64[:, None] * q_t + d[None, :], q_mask, other=0.0)
    do_tile = tl.load(dout + b * do_b + h * do_h + t64[:, None] * do_t + dv[None, :], v_mask, other=0.0)
    out_tile = tl.load(out + b * out_b + h * out_h + t64[:, None] * out_t + dv[None, :], v_mask, other=0.0)
    delta_tile = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + at_query, delta_tile, is_query)
    lse_tile = tl.load(lse + at_query, is_query, other=0.0) * LOG2_E
    acc = tl.load(own + b * own_b + h * own_h + t64[:, None] * own_t + d[None, :], q_mask, other=0.0).to(tl.float32)
    acc /= scale
    for i in tl.range(0, C * tl.cdiv(PAGE, TILE_K), num_stages=STAGES):
        scores, k_tile, v_tile, inside = score_page_tile(
            i, q_tile, base, places, selected, D, Dv, length, C, scale_log2, row_stride, head_stride, value_at,
            value_stride, GROUP, PAGE, QUERY_TILE // TILE_Q, TILE_K, TILE_D, TILE_V, PADDED, GAPS, ALIGNED, PRECISION,
        )  # fmt: skip
        dprobs = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        probs = tl.exp2(scores - lse_tile[:, None])
        if GAPS:
            probs = tl.where(inside[None, :], probs, 0.0)
        dscores = probs * (dprobs - delta_tile[:, None])
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    dq_at = dq + b * dq_b + h * dq_h + t64[:, None] * dq_t + d[None, :]
    tl.store(dq_at, (acc * scale).to(dq.dtype.element_ty), q_mask)


@triton.jit
def dkv_kernel(
    dout, q, base, offsets, readers, reader_ends, order, lse, delta, grads, grad_offsets, touched, seed,
    num_pages, num_tiles, T, D, Dv, length, scale, scale_log2,
    do_b, do_h, do_t, q_b, q_h, q_t, touched_b, row_stride, head_stride, value_at, value_stride,
    grad_row_stride, grad_head_stride, grad_value_at, grad_value_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, QUERY_TILE: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, TILE_D: tl.constexpr, TILE_V: tl.constexpr, PADDED: tl.constexpr, DROPPED: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of TILE_K tokens of one page, batch entry and key/value head, from all tiles that read it.

    They are added to the page's gradient rows, or written there if the page has received no gradient yet.

    The readers of page p of batch entry b are readers[reader_ends[i - 1]:reader_ends[i]] with i = b * num_pages + p,
    each as b * num_tiles + tile. `order` has the i, most read first, so that the longest work starts first. No other
    program writes these rows, so there are no atomics and the result is deterministic.
    """
    PIECES: tl.constexpr = (PAGE + TILE_K - 1) // TILE_K
    PARTS: tl.constexpr = QUERY_TILE // TILE_Q
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    item = tl.load(order + tl.program_id(0) // (KV_HEADS * PIECES))
    kv_head = (tl.program_id(0) // PIECES % KV_HEADS).to(tl.int64)
    begin = tl.load(reader_ends + item - 1, item > 0, other=0)
    end = tl.load(reader_ends + item)
    if begin < end:
        b, page = (item // num_pages).to(tl.int64), item % num_pages
        head = b * KV_HEADS + kv_head
        d, dv = tl.arange(0, TILE_D), tl.arange(0, TILE_V)
        s = tl.program_id(0) % PIECES * TILE_K + tl.arange(0, TILE_K)
        inside = (s < PAGE) & (page * PAGE + s < length)
        k_mask, v_mask = inside[:, None] & (d < D)[None, :], inside[:, None] & (dv < Dv)[None, :]
        start = base + tl.multiple_of(tl.load(offsets + page), ALIGNED) + s.to(tl.int64)[:, None] * row_stride
        k_tile = tl.load(start + head * head_stride + d[None, :], k_mask, other=0.0).to(q.dtype.element_ty)
        v_tile = tl.load(start + value_at + head * value_stride + dv[None, :], v_mask, other=0.0).to(q.dtype.element_ty)
        dk = tl.zeros([TILE_K, TILE_D], tl.float32)
        dv_sum = tl.zeros([TILE_K, TILE_V], tl.float32)
        first_tile, r = item // num_pages * num_tiles, tl.arange(0, TILE_Q)
        for i in tl.range(begin * (GROUP * PARTS), end * (GROUP * PARTS), num_stages=STAGES):
            tile = tl.load(readers + i // (GROUP * PARTS)) - first_tile
            h = kv_head * GROUP + i // PARTS % GROUP
            t = tile * QUERY_TILE + i % PARTS * TILE_Q + r
            t64 = t.to(tl.int64)
            q_at = q + b * q_b + h * q_h + t64[:, None] * q_t + d[None, :]
            do_at = dout + b * do_b + h * do_h + t64[:, None] * do_t + dv[None, :]
            at_query = (b * NUM_HEADS + h) * T + t
            if PADDED:
                is_query = t < T
                q_tile = tl.load(q_at, is_query[:, None] & (d < D)[None, :], other=0.0)
                do_tile = tl.load(do_at, is_query[:, None] & (dv < Dv)[None, :], other=0.0)
                lse_tile = tl.load(lse + at_query, is_query, other=float("inf")) * LOG2_E
                delta_tile = tl.load(delta + at_query, is_query, other=0.0)
            else:
                q_tile = tl.load(q_at)
                do_tile = tl.load(do_at)
                lse_tile = tl.load(lse + at_query) * LOG2_E
                delta_tile = tl.load(delta + at_query)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale_log2
            dprobs = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            probs = tl.exp2(scores - lse_tile[None, :])
            dv_sum = tl.dot(probs.to(do_tile.dtype), do_tile, dv_sum, input_precision=PRECISION)
            dscores = probs * (dprobs - delta_tile[None, :])
            dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
        grad_start = grads + tl.multiple_of(tl.load(grad_offsets + page), GRAD_ALIGNED)
        grad_start += s.to(tl.int64)[:, None] * grad_row_stride
        dk_at = grad_start + head * grad_head_stride + d[None, :]
        dv_at = grad_start + grad_value_at + head * grad_value_stride + dv[None, :]
        dk *= scale
        if tl.load(touched + b * touched_b + page) != 0:
            dk += tl.load(dk_at, k_mask, other=0.0).to(tl.float32)
            dv_sum += tl.load(dv_at, v_mask, other=0.0).to(tl.float32)
        if DROPPED > 0:
            # Wraps around: elements 2**32 apart share their random bits.
            row = ((head.to(tl.int32) * num_pages + page) * PAGE + s)[:, None] * 2
            dk = stochastic_round(dk, seed, row * TILE_D + d[None, :], DROPPED)
            dv_sum = stochastic_round(dv_sum, seed, (row + 1) * TILE_V + dv[None, :], DROPPED)
        tl.store(dk_at, dk.to(grads.dtype.element_ty), k_mask)
        tl.store(dv_at, dv_sum.to(grads.dtype.element_ty), v_mask)
