"""Triton kernels that merge partial attention and add gradients, and their stochastic rounding."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    x, y, out, lse_x, lse_y, lse_out, T, D,
    x_b, x_h, x_t, y_b, y_h, y_t, out_b, out_h, out_t,
    WEIGHTED: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Write x + y to out. With WEIGHTED, weigh each by exp(its LSE - the merged LSE), which goes to lse_out.

    x, y and out are [B, H, T, D] with strides *_b, *_h, *_t and 1; an LSE is [B, H, T] and contiguous. A program
    processes TILE_T rows of one head. Values 4 and 8 with LSEs log 1 and log 3 give 4 * 1/4 + 8 * 3/4 = 7, LSE log 4.
    """
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    d = tl.arange(0, TILE_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x_at = b * x_b + h * x_h + t[:, None] * x_t + d[None, :]
    y_at = b * y_b + h * y_h + t[:, None] * y_t + d[None, :]
    x_tile = tl.load(x + x_at, inside, other=0.0).to(tl.float32)
    y_tile = tl.load(y + y_at, inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        rows = (b * tl.num_programs(1) + h) * T + t
        first = tl.load(lse_x + rows, t < T, other=0.0)
        second = tl.load(lse_y + rows, t < T, other=0.0)
        top = tl.maximum(first, second)
        whole = top + tl.log(tl.exp(first - top) + tl.exp(second - top))
        tl.store(lse_out + rows, whole, t < T)
        x_tile *= tl.exp(first - whole)[:, None]
        y_tile *= tl.exp(second - whole)[:, None]
    out_at = b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    tl.store(out + out_at, (x_tile + y_tile).to(out.dtype.element_ty), inside)


@triton.jit
def mixed_bits(seed, index):
    """Return 32 pseudorandom bits for a seed and an index.

    Multiplications and shifts spread every bit over all others. Triton's own generator is better but takes ten rounds,
    which made `dkv_kernel` 1.6 times slower.
    """
    x = index.to(tl.uint32) ^ (tl.cast(seed, tl.uint32) * 0x9E3779B9)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def stochastic_round(x, seed, index, DROPPED: tl.constexpr):
    """Drop the last DROPPED bits of float32, rounding up with probability equal to the remainder."""
    bits = mixed_bits(seed, index).to(tl.int32, bitcast=True) & ((1 << DROPPED) - 1)
    moved = ((x.to(tl.int32, bitcast=True) + bits) & (-(1 << DROPPED))).to(tl.float32, bitcast=True)
    # Infinities and NaN stay unchanged: x - x is not zero for them.
    return tl.where(x - x == 0.0, moved, x)


@triton.jit
def add_share_kernel(total, x, seed, num_elements, DROPPED: tl.constexpr, TILE: tl.constexpr):
    """Add x to total in float32, both flat and of any dtype. With DROPPED > 0 that many bits of the sum are dropped by
    stochastic rounding, whose random bits repeat after 2**32 elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_elements
    summed = tl.load(total + at, inside).to(tl.float32) + tl.load(x + at, inside).to(tl.float32)
    if DROPPED > 0:
        summed = stochastic_round(summed, seed, at, DROPPED)
    tl.store(total + at, summed.to(total.dtype.element_ty), inside)


@triton.jit
def accumulate_kernel(
    total, update, seed, T, D, total_b, total_k, total_t, update_b, update_k, update_t,
    DROPPED: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Add update to total in float32. With DROPPED > 0 that many bits of the sum are dropped by stochastic rounding.

    Both are [B, K, T, D] with strides *_b, *_k, *_t and 1. A program processes TILE_T tokens of one head. The random
    bits of an element depend on `seed` and its index in a contiguous [B, K, T, D].
    """
    k, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    d = tl.arange(0, TILE_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    total_at = b * total_b + k * total_k + t[:, None] * total_t + d[None, :]
    update_at = b * update_b + k * update_k + t[:, None] * update_t + d[None, :]
    summed = tl.load(total + total_at, inside, other=0.0).to(tl.float32)
    summed += tl.load(update + update_at, inside, other=0.0).to(tl.float32)
    if DROPPED > 0:
        index = ((b * tl.num_programs(1) + k) * T + t[:, None]) * D + d[None, :]
        summed = stochastic_round(summed, seed, index, DROPPED)
    tl.store(total + total_at, summed.to(total.dtype.element_ty), inside)
