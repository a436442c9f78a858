"""Lay out the bytes of a token, cut a past into segments, and size the staging buffers for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.ops.int8 import SCALE_DTYPE, dequantize, quantize

KV, GRAD, OUT = "kv", "grad", "out"
"""The kinds of pages: K and V, their gradients, and attention outputs with their LSE."""
NEW = "new"
"""Name of the staging buffers through which a chunk's own K and V go to the host."""

SEGMENT_SIZE = 32768
"""Maximum number of tokens in a segment. Longer segments save merges, each of which is a pass over the output; on an
H200 the attention kernel itself gains nothing above 32K."""
SEGMENT_BYTES = 2**26
"""Maximum bytes of K and V in a segment: 32768 tokens of a layer of Qwen2.5-7B. Several segments are staged at once."""
ALIGNMENT = 16
NUM_AHEAD = 3
"""Buffers for segments: one in use, two being loaded."""
NUM_BEHIND = 2
"""Buffers for what a chunk stores: one being filled, one being stored."""


def row_bytes(*field_bytes: int) -> int:
    """Return the bytes of a row whose fields are aligned for the widest loads of a GPU."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in field_bytes)


def largest_segment(chunk_size: int, kv_row: int) -> int:
    """Return the tokens of the largest segment: the chunk size times a power of two."""
    size = chunk_size
    while size * 2 <= min(SEGMENT_SIZE, SEGMENT_BYTES // max(1, kv_row)):
        size *= 2
    return size


def staging_bytes(
    rows: Sequence[tuple[int, int, int]], sparse: Sequence[int], *, chunk_size: int, keeps: bool, needs_grad: bool
) -> int:
    """Return the GPU memory of all staging buffers.

    Args:
        rows: Bytes per token of K and V, their gradients and outputs, for each layer.
        sparse: Indices of the layers that read selected pages. Their segments cover the chunk's own tokens only.
        keeps: Whether attention outputs are saved.
    """
    sizes = ring_bytes(rows, sparse, chunk_size)
    return NUM_AHEAD * (sizes[KV] + sizes[GRAD] * needs_grad) + NUM_BEHIND * (sizes[NEW] + sizes[OUT] * keeps)


def ring_bytes(rows: Sequence[tuple[int, int, int]], sparse: Sequence[int], chunk_size: int) -> dict[str, int]:
    """Return the bytes of one staging buffer of each kind."""
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
    """Cut [first, end) into few segments of few different sizes, since attention backends plan for each size.

    Sizes are chunk_size times powers of two, the largest first: 7 chunks of 4096 become 16384 + 8192 + 4096. A
    remainder that is no multiple of the chunk size (the start of a sliding window) comes first.
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
    """The layout of one token's bytes: aligned fields of shape [B, heads, ...], one after the other.

    >>> RowLayout(((1, 4, 128), torch.bfloat16), ((1, 4, 128), torch.bfloat16)).num_bytes
    2048
    """

    def __init__(self, *fields: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.fields = []
        at = 0
        for shape, dtype in fields:
            size = torch.Size(shape).numel() * dtype.itemsize
            self.fields.append((at, size, shape, dtype))
            at += row_bytes(size)
        self.num_bytes = at

    def views(self, data: Tensor, num_tokens: int) -> list[Tensor]:
        """Return the fields of the first `num_tokens` rows in `data`, each [B, heads, T, ...]."""
        rows = data[: num_tokens * self.num_bytes].view(num_tokens, self.num_bytes)
        return [
            rows[:, at : at + size].view(dtype).view(num_tokens, *shape).movedim(0, 2)
            for at, size, shape, dtype in self.fields
        ]

    @property
    def is_quantized(self) -> bool:
        """Whether the fields are int8 with a scale per vector."""
        return self.fields[0][3] == torch.int8

    def read(self, fields: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the fields in `dtype`; None: as they are, or in float32 if they are quantized."""
        if not self.is_quantized:
            return fields if dtype is None else [field.to(dtype) for field in fields]
        *numbers, scales = fields
        return [dequantize(x, scales[..., index], dtype or torch.float32) for index, x in enumerate(numbers)]

    def write(self, fields: list[Tensor], tensors: Sequence[Tensor], seed: int | None = None) -> None:
        """Write to the fields. With a seed, quantized ones are rounded stochastically."""
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
    """Return the layout of K and V, or of their gradients, of shapes [B, heads, size]. int8 adds a scale per vector."""
    if dtype == torch.int8:
        return RowLayout((k, dtype), (v, dtype), ((*k[:2], 2), SCALE_DTYPE))
    return RowLayout((k, dtype), (v, dtype))


@dataclass(frozen=True)
class LayerRows:
    """The row layouts of one layer, and its sliding window."""

    kv: RowLayout
    grad: RowLayout
    out: RowLayout
    dtype: torch.dtype
    window: int | None = None

    def working(self, kind: str) -> RowLayout:
        """Return the layout of K and V, or of their gradients, in the precision that attention computes in."""
        row = self.row(kind)
        return kv_row(row.fields[0][2], row.fields[1][2], self.dtype) if row.is_quantized else row

    def row(self, kind: str) -> RowLayout:
        return {KV: self.kv, GRAD: self.grad, OUT: self.out}[kind]
