"""Triton kernels that assign buffer slots to selected pages, copy them and dequantize them."""

from __future__ import annotations

import triton
import triton.language as tl

from oomb.ops.triton_kernels.elementwise import mixed_bits, stochastic_round

TILE_ELEMENTS = 8192
"""Elements in a tile of `dequantize_pages`, for 16 warps."""


@triton.jit
def mark_pages(places, selected, num_selected, edge, TILE: tl.constexpr):
    """Set places[p] = -1 for every page p >= edge in `selected`. Entries of -1 are ignored."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    page = tl.load(selected + at, at < num_selected, other=-1).to(tl.int32)
    tl.store(places + page, tl.full([TILE], -1, tl.int64), page >= tl.maximum(edge, 0))


@triton.jit
def assign_slots(
    places, pages, count, moved, flags, buffer, place_bytes, page_bytes, edge, num_pages, num_rows, flags_b,
    TILE: tl.constexpr,
):  # fmt: skip
    """Assign a buffer slot to every marked page.

    The i-th marked page p gets places[p] = buffer + i * place_bytes and pages[i] = p; other places stay. count is the
    number of marked pages. moved grows by page_bytes for each of them that is >= edge and initialized: flags[b, p] is
    set for one of num_rows batch entries (num_rows = 0: all pages are initialized).

    places = [40, -1, 56, -1], buffer = 1000, place_bytes = 8: places = [40, 1000, 56, 1008], pages = [1, 3], count = 2.
    """
    num_marked = 0
    num_moved = 0
    for first in range(0, num_pages, TILE):
        p = first + tl.arange(0, TILE)
        place = tl.load(places + p, p < num_pages, other=0)
        marked = (place == -1).to(tl.int32)
        index = num_marked + tl.cumsum(marked, 0) - marked
        tl.store(places + p, buffer + index.to(tl.int64) * place_bytes, marked != 0)
        tl.store(pages + index, p, marked != 0)
        some = marked * (p >= edge).to(tl.int32)
        if num_rows > 0:
            holds = tl.zeros([TILE], tl.int32)
            for b in range(num_rows):
                holds |= (tl.load(flags + b * flags_b + p, p < num_pages, other=0) != 0).to(tl.int32)
            some *= holds
        num_marked += tl.sum(marked, 0)
        num_moved += tl.sum(some, 0)
    tl.store(count, num_marked)
    tl.store(moved, tl.load(moved) + tl.cast(num_moved, tl.int64) * page_bytes)


@triton.jit
def copy_pages(
    pages, count, addresses, buffer, touched, page_words, num_rows, touched_b, OUT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Copy the pages with slots from their addresses, which may be in host memory, to the buffer. OUT: copy them back.

    A page is page_words words of 4 bytes. Uninitialized pages (as in `assign_slots`) are skipped. A few programs of
    many warps saturate the link and leave the GPU to the computation.
    """
    num_tiles = tl.cdiv(page_words, TILE)
    for i in range(tl.program_id(0), tl.load(count) * num_tiles, tl.num_programs(0)):
        index, first = i // num_tiles, i % num_tiles * TILE
        page = tl.load(pages + index)
        has_some = num_rows == 0
        for b in range(num_rows):
            has_some = has_some | (tl.load(touched + b * touched_b + page) != 0)
        if has_some:
            w = first + tl.arange(0, TILE)
            away = tl.multiple_of(tl.load(addresses + page).to(tl.pointer_type(tl.int32)), 16) + w
            here = buffer + index.to(tl.int64) * page_words + w
            if OUT:
                tl.store(away, tl.load(here, w < page_words), w < page_words)
            else:
                tl.store(here, tl.load(away, w < page_words), w < page_words)


def dequantize_tiles(num_heads: int, head_size: int) -> dict[str, int]:
    """Return the tile sizes of `dequantize_pages`: whole rows, and as many as its warps hold in registers."""
    tile_d, tile_h = triton.next_power_of_2(head_size), triton.next_power_of_2(2 * num_heads)
    return {"TILE_S": max(1, TILE_ELEMENTS // (tile_h * tile_d)), "TILE_H": tile_h, "TILE_D": tile_d}


@triton.jit
def dequantize_pages(
    pages, count, addresses, buffer, flags, seed, page_size, num_heads, k_size, v_size,
    row_bytes, value_at, scale_at, wide_row, wide_value_at, num_rows, flags_b, edge,
    OUT: tl.constexpr, DROPPED: tl.constexpr, TILE_S: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Do the same for 8-bit pages: dequantize them into the buffer. OUT: quantize them back.

    A stored row has row_bytes bytes: K of all heads in int8, V at value_at, and two bfloat16 scales per head at
    scale_at. A row in the buffer has wide_row elements, with V at wide_value_at. `oomb.ops.int8` has the reference.
    Quantizing rounds stochastically with `seed`. So does dequantizing with DROPPED > 0, the number of bits by which the
    product with a scale is too long.

    Pages >= edge are already at the end of their slots in the buffer (OUT: they are left at the beginning). A program
    processes a page from its first row to its last, so that no byte is overwritten before it is read. With 4 rows of
    two bytes in the buffer and one byte stored:

        . . . . a b c d  ->  A A . . . b c d  ->  A A B B . . c d  ->  A A B B C C . d  ->  A A B B C C D D

    All vectors of a row are moved together, K of all heads and then V: the link is limited by the number of requests,
    and head by head there would be three times as many.
    """
    d = tl.arange(0, TILE_D)[None, None, :]
    h = tl.arange(0, TILE_H)[None, :]
    is_value = (h >= num_heads).to(tl.int32)
    head = h - is_value * num_heads
    # Products instead of `where`, after which the compiler loses divisibility and moves single bytes.
    size = k_size + is_value * (v_size - k_size)
    columns = is_value * value_at + head * size
    wide_columns = is_value * wide_value_at + head * size
    item_bytes = tl.constexpr(buffer.dtype.element_ty.primitive_bitwidth // 8)
    for index in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        page = tl.load(pages + index)
        has_some = num_rows == 0
        for b in range(num_rows):
            has_some = has_some | (tl.load(flags + b * flags_b + page) != 0)
        if has_some:
            place = buffer + tl.cast(index, tl.int64) * page_size * wide_row
            address = tl.load(addresses + page)
            if page >= edge:
                address = place.to(tl.int64)
                if not OUT:
                    address += page_size * (wide_row * item_bytes - row_bytes)
            base = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16)
            # One stage, so that no tile is loaded before the previous one is stored.
            for first in tl.range(0, page_size, TILE_S, num_stages=1):
                s = (first + tl.arange(0, TILE_S))[:, None]
                exists = (s < page_size) & (h < 2 * num_heads)
                inside = exists[:, :, None] & (d < size[:, :, None])
                rest = base + (s * row_bytes + columns)[:, :, None] + d
                scales = (address + scale_at).to(tl.pointer_type(tl.bfloat16)) + s * (row_bytes // 2) + head * 2
                scales += is_value
                here = place + (s * wide_row + wide_columns)[:, :, None] + d
                at = ((page * page_size + s) * num_heads * 2 + h)[:, :, None] * TILE_D + d
                if OUT:
                    x = tl.load(here, inside, other=0.0).to(tl.float32)
                    scale = (tl.max(tl.abs(x), 2) * (1.0078125 / 127)).to(tl.bfloat16)
                    steps = x / tl.maximum(scale.to(tl.float32), 1.1754943508222875e-38)[:, :, None]
                    steps = tl.floor(steps + (mixed_bits(seed, at) >> 8).to(tl.float32) * (1.0 / (1 << 24)))
                    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
                    tl.debug_barrier()
                    tl.store(rest, steps.to(tl.int8), inside)
                    tl.store(scales, scale, exists)
                else:
                    scale = tl.load(scales, exists, other=0.0).to(tl.float32)
                    x = tl.load(rest, inside, other=0).to(tl.float32) * scale[:, :, None]
                    if DROPPED > 0:
                        x = stochastic_round(x, seed, at, DROPPED)
                    tl.debug_barrier()
                    tl.store(here, x.to(buffer.dtype.element_ty), inside)
