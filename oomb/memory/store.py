"""The pages of one sequence (a batch of one padded length), as attention sees them.

A token has a row of bytes in every layer: K and V of all heads and sequences side by side. A page is `page_size` rows,
so any run of consecutive pages is one strided tensor that attention kernels read in place. The oldest tokens' pages lie
on the GPU, as far as that goes, the others on the host; a page never moves, and its gradient page lies in its tier.
Pages on the host are brought in segment by segment through staging buffers. How a past is cut into segments does not
depend on where it lies, so neither does the arithmetic.

B batch, K key/value heads, H query heads, T tokens, D head size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.memory.pages import GPU, HOST, Column, Intervals
from oomb.memory.rounding import accumulate_
from oomb.memory.slabs import Holding, Tiers
from oomb.memory.transfer import Copies, Event, Load, Ring

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


def staging_bytes(*, kv_row: int, grad_row: int, out_row: int, chunk_size: int, keeps: bool, trains: bool) -> int:
    """GPU memory of all staging buffers, for rows of these sizes."""
    segment = largest_segment(chunk_size, kv_row)
    total = NUM_AHEAD * segment * (kv_row + grad_row * trains)
    return total + NUM_BEHIND * chunk_size * (kv_row + out_row * keeps)


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


class Row:
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


@dataclass(frozen=True)
class LayerSpec:
    """The rows of a layer, and how far it looks back."""

    kv: Row
    grad: Row
    out: Row
    dtype: torch.dtype
    window: int | None = None

    def row(self, kind: str) -> Row:
        return {KV: self.kv, GRAD: self.grad, OUT: self.out}[kind]


@dataclass(frozen=True)
class Piece:
    """The bytes of consecutive tokens, `at` of them after the first that was asked for."""

    tier: str
    data: Tensor
    at: int
    count: int


class PageStore:
    """Pages for the `capacity` tokens that later chunks read (the last chunk's are read by nobody).

    `layers` are in the order in which the model calls them; `gpu_tokens` of K, V and gradients and `gpu_out_tokens` of
    kept outputs lie on the GPU. All memory is promised here or not at all; gradient pages are taken at first touch.
    """

    def __init__(
        self,
        tiers: Tiers,
        layers: Mapping[int, LayerSpec],
        *,
        capacity: int,
        chunk_size: int,
        page_size: int,
        gpu_tokens: int,
        gpu_out_tokens: int = 0,
        keeps: bool = False,
        trains: bool = True,
    ) -> None:
        self.tiers, self.layers = tiers, layers
        self.capacity, self.chunk_size, self.page_size = capacity, chunk_size, page_size
        self.keeps = keeps
        self.seed = 0
        """Of the random rounding of gradients."""
        self.num_pages = -(-capacity // page_size)
        self.gpu_pages = {
            kind: self.num_pages if tokens >= capacity else tokens // page_size
            for kind, tokens in ((KV, gpu_tokens), (GRAD, gpu_tokens), (OUT, gpu_out_tokens))
        }
        self.kinds = [KV] + [GRAD] * trains + [OUT] * keeps
        self.touched = {layer: Intervals() for layer in layers}
        """Tokens whose gradient pages hold something."""
        self.stored: dict[tuple[str, int], Event] = {}
        """When the latest store of a kind and layer is done."""
        self.ring_bytes = self._ring_sizes()
        self.holding = Holding()
        needed: Counter[tuple[str, int]] = Counter()
        for layer in layers:
            for kind in self.kinds:
                self.holding.columns[kind, layer] = self._row(kind, layer).num_bytes * page_size, Column()
                for tier, first, end in self._by_tier(kind, 0, self.num_pages):
                    needed[tier, self.holding.columns[kind, layer][0]] += end - first
        tiers.reserve(self.holding, needed)
        self._on_death = weakref.finalize(self, tiers.abandoned.append, self.holding)
        try:
            for layer in layers:
                for kind in self.kinds:
                    if kind != GRAD:
                        self._create(kind, layer, 0, self.num_pages)
            if any(self.gpu_pages[kind] < self.num_pages for kind in self.kinds):
                # Here rather than when the first of them is needed: what is to fail for want of memory fails early.
                for kind in (*self.kinds, NEW):
                    self._ring(kind)
        except BaseException:
            # The error holds on to us, perhaps for long.
            self.close()
            raise

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Stores a chunk's K and V; those of the last chunk need no page."""
        if start < self.capacity:
            self._write(KV, layer, start, [k, v], NEW)

    def keep(self, layer: int, start: int, out: Tensor, lse: Tensor) -> None:
        """Stores a chunk's attention output, if outputs are kept."""
        if self.keeps and start < self.capacity:
            self._write(OUT, layer, start, [out, lse], OUT)

    def kept(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """A chunk's attention output and lse, if they were kept."""
        if not self.keeps or start >= self.capacity:
            return None
        with self._resident(OUT, layer, start, end) as (out, lse):
            # In the layout that models go on with: [B, T, H, D].
            whole = torch.contiguous_format
            return out.transpose(1, 2).clone(memory_format=whole).transpose(1, 2), lse.clone(memory_format=whole)

    def past(self, layer: int, chunk_start: int, chunk_end: int) -> LayerPast:
        """The layer's pages as the chunk [chunk_start, chunk_end) sees them."""
        return LayerPast(self, layer, chunk_start, chunk_end)

    def segments(self, layer: int, first: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        dtype = self.layers[layer].dtype
        for low, high in self._bounds(layer, first, end):
            with self._resident(KV, layer, low, high) as (k, v):
                yield low, k.to(dtype), v.to(dtype)

    def add_grad(self, layer: int, start: int, dk: Tensor, dv: Tensor, seed: int) -> None:
        for low, high in self._bounds(layer, start, start + dk.shape[2]):
            shares = dk[:, :, low - start : high - start], dv[:, :, low - start : high - start]
            fresh = self.touched[layer].missing(low, high)
            first, last = self._pages(low, high)
            for gap in list(self.holding.columns[GRAD, layer][1].missing(first, last)):
                self._create(GRAD, layer, *gap)
            with self._resident(GRAD, layer, low, high, writes=True) as totals:
                for index, (total, share) in enumerate(zip(totals, shares, strict=True)):
                    if fresh == [(low, high)]:
                        total.copy_(share)
                        continue
                    for a, b in fresh:
                        total[:, :, a - low : b - low] = 0
                    accumulate_(total, share, _mix(self.seed, layer, seed, low, index))
            self.touched[layer].add(low, high)

    def with_later(self, layer: int, start: int, end: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of a chunk's own tokens plus what later chunks have left for them."""
        dtypes = dk.dtype, dv.dtype
        for low, high in self.touched[layer].within(start, end) if start < self.capacity else ():
            with self._resident(GRAD, layer, low, high) as (later_k, later_v):
                if (low, high) == (start, end):
                    return (dk + later_k).to(dtypes[0]), (dv + later_v).to(dtypes[1])
                dk, dv = dk.clone(), dv.clone()
                dk[:, :, low - start : high - start] += later_k
                dv[:, :, low - start : high - start] += later_v
        return dk, dv

    def expect_forward(self, start: int, end: int, kept: bool) -> None:
        """The layers of this chunk will run forward next; `kept` says whether attention outputs will be asked for."""
        self.tiers.prefetcher.expect(self._forward_loads(start, end, kept))

    def expect_backward(self, start: int, end: int, kept: bool) -> None:
        """The backward of this chunk will run next."""
        self.tiers.prefetcher.expect(self._backward_loads(start, end, kept))

    def cut(self, start: int) -> None:
        """Gives up the pages of the tokens from `start` on, which nobody reads any more."""
        self.tiers.cut(self.holding, -(-start // self.page_size))

    def close(self) -> None:
        """Gives up all pages."""
        if self._on_death.detach():
            self.tiers.leave()
            self.tiers.close(self.holding)

    def _forward_loads(self, start: int, end: int, kept: bool) -> Iterator[Load]:
        for layer in self.layers:
            if kept and self.keeps and start < self.capacity:
                yield from self._loads(OUT, layer, start, end)
            else:
                for low, high in self._bounds(layer, self._first(layer, start, end), start):
                    yield from self._loads(KV, layer, low, high)

    def _backward_loads(self, start: int, end: int, kept: bool) -> Iterator[Load]:
        for layer in list(self.layers)[::-1]:
            if kept and self.keeps and start < self.capacity:
                yield from self._loads(OUT, layer, start, end)
            first = self._first(layer, start, end)
            bounds = list(self._bounds(layer, first, start))
            # With a window all of the past is put together first, without one it is gone through once.
            kinds = [[KV], [GRAD]] if self._is_windowed(layer, end) else [[KV, GRAD]]
            for group in kinds:
                for low, high in bounds:
                    for kind in group:
                        yield from self._loads(kind, layer, low, high)
            if start < self.capacity:
                for low, high in self.touched[layer].within(start, end):
                    yield from self._loads(GRAD, layer, low, high)

    def _loads(self, kind: str, layer: int, low: int, high: int) -> Iterator[Load]:
        """What must be loaded for these tokens: nothing if they lie on the GPU."""
        if high > self.gpu_pages[kind] * self.page_size and high > low:
            yield self._load(kind, layer, low, high)

    def _load(self, kind: str, layer: int, low: int, high: int) -> Load:
        row = self._row(kind, layer).num_bytes
        parts = self.touched[layer].within(low, high) if kind == GRAD else [(low, high)]
        pieces = [
            ((a - low + piece.at) * row, piece.data)
            for a, b in parts
            for piece in self._pieces(kind, layer, a, b)
            if piece.tier == HOST
        ]
        return Load((id(self), kind, layer, low, high), self._ring(kind), tuple(pieces), self.stored.get((kind, layer)))

    @contextmanager
    def _resident(self, kind: str, layer: int, low: int, high: int, writes: bool = False) -> Iterator[list[Tensor]]:
        """The fields of these tokens' rows on the GPU, in place or in a buffer; `writes`: they come back changed."""
        row, pieces = self._row(kind, layer), list(self._pieces(kind, layer, low, high))
        if len(pieces) == 1 and pieces[0].tier == GPU:
            yield row.views(pieces[0].data, high - low)
            return
        copier, prefetcher, load = self.tiers.copier, self.tiers.prefetcher, self._load(kind, layer, low, high)
        slot = prefetcher.take(load)
        free_after = None
        try:
            parts = [(p, slot.bytes[p.at * row.num_bytes : (p.at + p.count) * row.num_bytes]) for p in pieces]
            for piece, part in parts:
                if piece.tier == GPU:
                    part.copy_(piece.data)
            yield row.views(slot.bytes, high - low)
            if writes:
                for piece, part in parts:
                    if piece.tier == GPU:
                        piece.data.copy_(part)
                back = [(piece.data, part) for piece, part in parts if piece.tier == HOST]
                free_after = self._store(kind, layer, back, copier.mark())
        finally:
            prefetcher.give(load.ring, slot, free_after if free_after is not None else copier.mark())

    def _write(self, kind: str, layer: int, start: int, tensors: list[Tensor], ring_name: str) -> None:
        row, num_tokens = self._row(kind, layer), tensors[0].shape[2]
        on_host: list[Piece] = []
        for piece in self._pieces(kind, layer, start, start + num_tokens):
            if piece.tier == HOST:
                on_host.append(piece)
                continue
            for field, x in zip(row.views(piece.data, piece.count), tensors, strict=True):
                field.copy_(x[:, :, piece.at : piece.at + piece.count])
        if not on_host:
            return
        ring, first = self._ring(ring_name), on_host[0].at
        slot = ring.take()
        self.tiers.copier.wait(slot.free_after)
        for field, x in zip(row.views(slot.bytes, num_tokens - first), tensors, strict=True):
            field.copy_(x[:, :, first:])
        copies: Copies = [
            (p.data, slot.bytes[(p.at - first) * row.num_bytes : (p.at - first + p.count) * row.num_bytes])
            for p in on_host
        ]
        ring.give(slot, self._store(kind, layer, copies, self.tiers.copier.mark()))

    def _store(self, kind: str, layer: int, copies: Copies, after: Event) -> Event:
        self.stored[kind, layer] = done = self.tiers.copier.store(copies, after=(after,))
        return done

    def _create(self, kind: str, layer: int, first: int, end: int) -> None:
        for tier, low, high in self._by_tier(kind, first, end):
            self.tiers.take(self.holding, (kind, layer), tier, low, high)

    def _by_tier(self, kind: str, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The pages `first` to `end` - 1 by tier."""
        edge = self.gpu_pages[kind]
        if first < edge:
            yield GPU, first, min(end, edge)
        if end > edge:
            yield HOST, max(first, edge), end

    def _pieces(self, kind: str, layer: int, low: int, high: int) -> Iterator[Piece]:
        """Where the rows of tokens `low` to `high` - 1 lie."""
        page_bytes, column = self.holding.columns[kind, layer]
        size, row = self.page_size, page_bytes // self.page_size
        for run in column.pieces(*self._pages(low, high)):
            first, end = max(low, run.at * size), min(high, (run.at + run.count) * size)
            data = self.tiers.view(page_bytes, run)
            yield Piece(
                run.tier, data[(first - run.at * size) * row : (end - run.at * size) * row], first - low, end - first
            )

    def _pages(self, low: int, high: int) -> tuple[int, int]:
        return low // self.page_size, -(-high // self.page_size)

    def _bounds(self, layer: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        largest = largest_segment(self.chunk_size, self.layers[layer].kv.num_bytes)
        return segment_bounds(first, end, self.chunk_size, largest)

    def _is_windowed(self, layer: int, end: int) -> bool:
        window = self.layers[layer].window
        return window is not None and window < end

    def _first(self, layer: int, start: int, end: int) -> int:
        """The first token that the chunk's queries look at."""
        return max(0, start - (self.layers[layer].window or 0) + 1) if self._is_windowed(layer, end) else 0

    def _row(self, kind: str, layer: int) -> Row:
        return self.layers[layer].row(kind)

    def _ring_sizes(self) -> dict[str, int]:
        """Bytes of a buffer: for segments of K and V and of gradients, for what a chunk keeps, and for its new K, V."""
        specs = self.layers.values()
        segments = [largest_segment(self.chunk_size, spec.kv.num_bytes) for spec in specs]
        return {
            KV: max((size * spec.kv.num_bytes for size, spec in zip(segments, specs, strict=True)), default=0),
            GRAD: max((size * spec.grad.num_bytes for size, spec in zip(segments, specs, strict=True)), default=0),
            OUT: max((self.chunk_size * spec.out.num_bytes for spec in specs), default=0),
            NEW: max((self.chunk_size * spec.kv.num_bytes for spec in specs), default=0),
        }

    def _ring(self, kind: str) -> Ring:
        num_slots = NUM_AHEAD if kind in (KV, GRAD) else NUM_BEHIND
        return self.tiers.ring(kind, num_slots, self.ring_bytes[kind])


class LayerPast:
    """What one chunk sees of a layer's pages (the `Past` of `oomb.attention.dense`)."""

    def __init__(self, store: PageStore, layer: int, start: int, end: int) -> None:
        self.store, self.layer = store, layer
        self.length, self.end = start, end

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        return self.store.segments(self.layer, first, self.length)

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        self.store.add_grad(self.layer, start, dk, dv, seed=self.length)

    def with_later(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.with_later(self.layer, self.length, self.end, dk, dv)


def _mix(*numbers: int) -> int:
    """One number below 2**31 of several."""
    return hash(numbers) % (2**31)
