"""How a token's bytes lie in memory, how a past is cut into segments, and the sizes of the buffers for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.ops.int8 import SCALE_DTYPE, dequantize, quantize

KV, GRAD, OUT = "kv", "grad", "out"
"""The kinds of pages: K and V; their gradients; attention outputs and their lse."""
NEW = "new"
"""The staging buffers of a chunk's own K and V on their way out."""

SEGMENT_SIZE = 32768
"""Most tokens in one segment. Longer segments save merges (a pass over the output each); on an H200 the attention
kernel itself gains nothing above 32K."""
SEGMENT_BYTES = 2**26
"""Most bytes of K and V in one segment: 32768 tokens of a layer of Qwen2.5-7B. Several of them are staged at once."""
ALIGNMENT = 16
NUM_AHEAD = 3
"""Buffers for segments: one in use, two on their way."""
NUM_BEHIND = 2
"""Buffers for what a chunk leaves behind: one being filled, one on its way out."""


def row_bytes(*field_bytes: int) -> int:
    """Bytes of a row whose fields are aligned, as the widest loads of a GPU want them."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in field_bytes)


def largest_segment(chunk_size: int, kv_row: int) -> int:
    """Tokens of the largest segment: the chunk size times a power of two."""
    size = chunk_size
    while size * 2 <= min(SEGMENT_SIZE, SEGMENT_BYTES // max(1, kv_row)):
        size *= 2
    return size


def staging_bytes(
    rows: Sequence[tuple[int, int, int]], sparse: Sequence[int], *, chunk_size: int, keeps: bool, needs_grad: bool
) -> int:
    """GPU memory of all staging buffers, for layers with rows of so many bytes: K and V, their gradients, outputs.
    Those numbered in `sparse` read chosen pages, and of runs of tokens the chunk's own alone."""
    sizes = ring_bytes(rows, sparse, chunk_size)
    return NUM_AHEAD * (sizes[KV] + sizes[GRAD] * needs_grad) + NUM_BEHIND * (sizes[NEW] + sizes[OUT] * keeps)


def ring_bytes(rows: Sequence[tuple[int, int, int]], sparse: Sequence[int], chunk_size: int) -> dict[str, int]:
    """Bytes of a buffer: for segments of K and V and of gradients, for what a chunk keeps, and for its new K, V."""
    sizes = dict.fromkeys((KV, GRAD, OUT, NEW), 0)
    for index, (kv, grad, out) in enumerate(rows):
        segment = chunk_size if index in sparse else largest_segment(chunk_size, kv)
        wanted = {
            KV: 0 if index in sparse else segment * kv,
            GRAD: segment * grad,
            OUT: chunk_size * out,
            NEW: chunk_size * kv,
        }
        sizes = {kind: max(size, wanted[kind]) for kind, size in sizes.items()}
    return sizes


def segment_bounds(first: int, end: int, chunk_size: int, largest: int) -> Iterator[tuple[int, int]]:
    """Cuts [first, end) into few segments of few different sizes, since attention kernels are planned per size.

    The sizes are chunk_size times powers of two, the largest first: 7 chunks of 4096 become 16384 + 8192 + 4096.
    What is no multiple of the chunk (the start of a sliding window) comes first.
    """
    ragged = (end - first) % chunk_size
    if ragged:
        yield first, first + ragged
        first += ragged
    size = largest
    while first < end:
        while size > end - first:
            size //= 2
        yield first, first + size
        first += size


class RowLayout:
    """The layout of a token's bytes: fields of shape [B, heads, ...] one after the other."""

    def __init__(self, *fields: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.fields = []
        at = 0
        for shape, dtype in fields:
            size = torch.Size(shape).numel() * dtype.itemsize
            self.fields.append((at, size, shape, dtype))
            at += row_bytes(size)
        self.num_bytes = at

    def views(self, data: Tensor, num_tokens: int) -> list[Tensor]:
        """The fields of the first `num_tokens` rows in `data`, each [B, heads, T, ...]."""
        rows = data[: num_tokens * self.num_bytes].view(num_tokens, self.num_bytes)
        return [
            rows[:, at : at + size].view(dtype).view(num_tokens, *shape).movedim(0, 2)
            for at, size, shape, dtype in self.fields
        ]

    @property
    def is_quantized(self) -> bool:
        return self.fields[0][3] == torch.int8

    def read(self, fields: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """What the fields hold, in `dtype`, or as they are (8-bit ones in float32)."""
        if not self.is_quantized:
            return fields if dtype is None else [field.to(dtype) for field in fields]
        *numbers, scales = fields
        return [dequantize(x, scales[..., index], dtype or torch.float32) for index, x in enumerate(numbers)]

    def write(self, fields: list[Tensor], tensors: Sequence[Tensor], seed: int | None = None) -> None:
        """Fills the fields; 8-bit ones are rounded at random where there is a seed."""
        if not self.is_quantized:
            for field, x in zip(fields, tensors, strict=True):
                field.copy_(x)
            return
        *numbers, scales = fields
        for index, (field, x) in enumerate(zip(numbers, tensors, strict=True)):
            steps, scale = quantize(x, None if seed is None else seed + index)
            field.copy_(steps)
            scales[..., index] = scale


def kv_row(k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype) -> RowLayout:
    """The row of a token's K and V, or of their gradients, of shapes [B, heads, size]; in 8 bits with a scale each."""
    if dtype == torch.int8:
        return RowLayout((k, dtype), (v, dtype), ((*k[:2], 2), SCALE_DTYPE))
    return RowLayout((k, dtype), (v, dtype))


def pair_bytes(num_heads: int, k_size: int, v_size: int, itemsize: int) -> int:
    """Bytes of such a row, for so many heads of all sequences."""
    scales = [num_heads * 2 * SCALE_DTYPE.itemsize] if itemsize == 1 else []
    return row_bytes(num_heads * k_size * itemsize, num_heads * v_size * itemsize, *scales)


@dataclass(frozen=True)
class LayerRows:
    """The rows of a layer, and how far it looks back."""

    kv: RowLayout
    grad: RowLayout
    out: RowLayout
    dtype: torch.dtype
    window: int | None = None

    def working(self, kind: str) -> RowLayout:
        """The row of K and V, or of their gradients, as attention computes with them."""
        row = self.row(kind)
        return kv_row(row.fields[0][2], row.fields[1][2], self.dtype) if row.is_quantized else row

    def row(self, kind: str) -> RowLayout:
        return {KV: self.kv, GRAD: self.grad, OUT: self.out}[kind]
