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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from oomb.memory.past import DenseLayerPast, SparseLayerPast
from oomb.memory.pool import GPU, HOST, IntervalSet, PageTable
from oomb.memory.rows import (
    GRAD,
    KV,
    NEW,
    NUM_AHEAD,
    NUM_BEHIND,
    OUT,
    LayerRows,
    RowLayout,
    largest_segment,
    ring_bytes,
    segment_bounds,
)
from oomb.memory.selected import SelectedPages, SelectionSpec
from oomb.memory.tiers import PageLease, Tiers
from oomb.memory.transfer import BufferRing, Copies, Event, Load, Work
from oomb.ops.rounding import add_stochastic_, mix


@dataclass(frozen=True)
class RowSpan:
    """The bytes of consecutive tokens, `at` of them after the first that was asked for."""

    tier: str
    data: Tensor
    at: int
    count: int


class PageStore:
    """Pages for the `capacity` tokens that later chunks read (the last chunk's are read by nobody).

    `layers` are in the order in which the model calls them. The first `gpu_tokens` of K, V and gradients lie on the
    GPU. The last `out_tokens` have their outputs kept, the first `gpu_out_tokens` of these on the GPU. All memory is
    promised here or not at all; gradient pages are taken at first touch.
    """

    def __init__(
        self,
        tiers: Tiers,
        layers: Mapping[int, LayerRows],
        *,
        capacity: int,
        chunk_size: int,
        page_size: int,
        gpu_tokens: int,
        gpu_grad_tokens: int | None = None,
        out_tokens: int = 0,
        gpu_out_tokens: int = 0,
        needs_grad: bool = True,
        choosing: SelectionSpec | None = None,
    ) -> None:
        self.tiers, self.layers = tiers, layers
        self.capacity, self.chunk_size, self.page_size = capacity, chunk_size, page_size
        self.saved_from, self.selection_spec = capacity - out_tokens, choosing
        self.seed = 0
        """Of the random rounding of gradients."""
        self.num_pages = -(-capacity // page_size)
        self.gpu_pages = {
            kind: self.num_pages if tokens >= capacity else tokens // page_size
            for kind, tokens in (
                (KV, gpu_tokens),
                (GRAD, gpu_tokens if gpu_grad_tokens is None else gpu_grad_tokens),
                (OUT, self.saved_from + gpu_out_tokens if gpu_out_tokens else 0),
            )
        }
        self.kinds = [KV] + [GRAD] * needs_grad + [OUT] * (out_tokens > 0)
        first_page = dict.fromkeys(self.kinds, 0) | {OUT: self.saved_from // page_size}
        self.has_grad = {layer: IntervalSet() for layer in layers}
        """Tokens whose gradient pages hold something."""
        self.stored: dict[tuple[str, int], Event] = {}
        """When the latest store of a kind and layer is done."""
        rows = [(spec.kv.num_bytes, spec.grad.num_bytes, spec.out.num_bytes) for spec in layers.values()]
        self.ring_bytes = ring_bytes(rows, [i for i, layer in enumerate(layers) if self.is_sparse(layer)], chunk_size)
        self.selected: SelectedPages | None = None
        self.lease = PageLease()
        needed: Counter[tuple[str, int]] = Counter()
        for layer in layers:
            for kind in self.kinds:
                self.lease.tables[kind, layer] = self._row(kind, layer).num_bytes * page_size, PageTable()
                for tier, first, end in self._by_tier(kind, first_page[kind], self.num_pages):
                    needed[tier, self.lease.tables[kind, layer][0]] += end - first
        tiers.reserve(self.lease, needed)
        self._on_death = weakref.finalize(self, tiers.orphaned.append, self.lease)
        try:
            for layer in layers:
                for kind in self.kinds:
                    if kind != GRAD:
                        self._create(kind, layer, first_page[kind], self.num_pages)
            if choosing is not None:
                self.selected = SelectedPages(self, choosing, needs_grad)
            # Here rather than when the first of them is needed: what is to fail for want of memory fails early.
            if any(self.gpu_pages[kind] < self.num_pages for kind in self.kinds):
                for kind in (*self.kinds, NEW):
                    self._ring(kind)
            if self.selected is not None and self.selected.layers:
                for kind in (KV, GRAD) if needs_grad else (KV,):
                    if self.selected.needs_buffers(kind):
                        self.selected.ring(kind)
        except BaseException:
            # The error holds on to us, perhaps for long.
            self.close()
            raise

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Stores a chunk's K and V; those of the last chunk need no page."""
        if start < self.capacity:
            self._write(KV, layer, start, [k, v], NEW)

    def save_output(self, layer: int, start: int, out: Tensor, lse: Tensor) -> None:
        """Stores a chunk's attention output, if it is to be kept."""
        if self._is_saved(start):
            self._write(OUT, layer, start, [out, lse], OUT)

    def load_output(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """A chunk's attention output and lse, if they were kept."""
        if not self._is_saved(start):
            return None
        with self._resident(OUT, layer, start, end) as (out, lse):
            # In the layout that models go on with: [B, T, H, D].
            whole = torch.contiguous_format
            return out.transpose(1, 2).clone(memory_format=whole).transpose(1, 2), lse.clone(memory_format=whole)

    def past(self, layer: int, chunk_start: int, chunk_end: int) -> DenseLayerPast | SparseLayerPast:
        """The layer's pages as the chunk [chunk_start, chunk_end) sees them."""
        kind = SparseLayerPast if self.is_sparse(layer) else DenseLayerPast
        return kind(self, layer, chunk_start, chunk_end)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer reads chosen pages. A window is bounded as it is."""
        return self.selection_spec is not None and self.layers[layer].window is None

    def segments(self, layer: int, first: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        dtype = self.layers[layer].dtype
        for low, high in self._bounds(layer, first, end):
            with self._resident(KV, layer, low, high) as fields:
                k, v = self._row(KV, layer).read(fields, dtype)
                yield low, k, v

    def add_grad(self, layer: int, start: int, dk: Tensor, dv: Tensor, seed: int) -> None:
        for low, high in self._bounds(layer, start, start + dk.shape[2]):
            shares = dk[:, :, low - start : high - start], dv[:, :, low - start : high - start]
            fresh = self.has_grad[layer].missing(low, high)
            first, last = self._pages(low, high)
            for gap in list(self.lease.tables[GRAD, layer][1].missing(first, last)):
                self._create(GRAD, layer, *gap)
            with self._resident(GRAD, layer, low, high, writes=True) as fields:
                gaps = [(a - low, b - low) for a, b in fresh]
                self._add(self._row(GRAD, layer), fields, shares, gaps, (self.seed, layer, seed, low))
            self.has_grad[layer].add(low, high)

    @staticmethod
    def _add(
        row: RowLayout,
        fields: list[Tensor],
        shares: Sequence[Tensor],
        fresh: list[tuple[int, int]],
        seed: tuple[int, ...],
    ) -> None:
        """Adds to gradients at rest. The tokens in `fresh` have none yet, and hold anything."""
        num_tokens = shares[0].shape[2]
        totals = row.read(fields)
        if fresh == [(0, num_tokens)]:
            row.write(fields, shares, mix(*seed) if row.is_quantized else None)
            return
        for index, (total, share) in enumerate(zip(totals, shares, strict=True)):
            for a, b in fresh:
                total[:, :, a:b] = 0
            if row.is_quantized:
                total += share
            else:
                add_stochastic_(total, share, mix(*seed, index))
        if row.is_quantized:
            row.write(fields, totals, mix(*seed))

    def add_future_grads(self, layer: int, start: int, end: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of a chunk's own tokens plus what later chunks have left for them."""
        dtypes = dk.dtype, dv.dtype
        for low, high in self.has_grad[layer].within(start, end) if start < self.capacity else ():
            with self._resident(GRAD, layer, low, high) as fields:
                later_k, later_v = self._row(GRAD, layer).read(fields)
                if (low, high) == (start, end):
                    return (dk + later_k).to(dtypes[0]), (dv + later_v).to(dtypes[1])
                dk, dv = dk.clone(), dv.clone()
                dk[:, :, low - start : high - start] += later_k
                dv[:, :, low - start : high - start] += later_v
        return dk, dv

    def prefetch_forward(self, start: int, end: int, kept: bool, *, kept_behind: bool | None = None) -> None:
        """The layers of this chunk will run forward next; `kept` says whether attention outputs will be asked for. And
        if `kept_behind` says so of their backward, that comes right after: what it begins with sets out before."""
        loads, name = self._forward_loads(start, end, kept), None
        if kept_behind is not None:
            loads, name = chain(loads, self._backward_loads(start, end, kept_behind)), (id(self), start)
        self.tiers.prefetcher.expect(loads, name)

    def prefetch_backward(self, start: int, end: int, kept: bool) -> None:
        """The backward of this chunk will run next."""
        if not self.tiers.prefetcher.is_expecting((id(self), start)):
            self.tiers.prefetcher.expect(self._backward_loads(start, end, kept))

    def free_from(self, start: int) -> None:
        """Gives up the pages of the tokens from `start` on, which nobody reads any more."""
        self.tiers.free_from(self.lease, -(-start // self.page_size))

    def close(self) -> None:
        """Gives up all pages."""
        if self._on_death.detach():
            self.tiers.end_pass()
            if self.selected is not None:
                self.selected.close()
            self.tiers.close(self.lease)

    def page(self, kind: str, layer: int, page: int, tier: str) -> Tensor | None:
        """The bytes of a page, if it lies in `tier`."""
        low, high = page * self.page_size, (page + 1) * self.page_size
        return next((p.data for p in self._pieces(kind, layer, low, high) if p.tier == tier), None)

    def first_bytes(self, kind: str, layer: int) -> Tensor:
        """The bytes of the first run of pages, on the GPU."""
        return next(self._pieces(kind, layer, 0, self.num_pages * self.page_size)).data

    def addresses(self, kind: str, layer: int) -> list[int]:
        """Where every page begins. Gradient pages are created with this."""
        page_bytes, column = self.lease.tables[kind, layer]
        for gap in list(column.missing(0, self.num_pages)):
            self._create(kind, layer, *gap)
        if kind == GRAD:
            self.has_grad[layer].add(0, self.capacity)
        runs = [(self.tiers.view(page_bytes, run).data_ptr(), run.count) for run in column.pieces(0, self.num_pages)]
        return [first + i * page_bytes for first, count in runs for i in range(count)]

    def own_grads(self, layer: int, start: int, end: int) -> AbstractContextManager[list[Tensor]]:
        return self._resident(GRAD, layer, start, end)

    def store_back(self, kind: str, layer: int, work: Work, after: Event) -> Event:
        return self._store(kind, layer, work, after)

    def _forward_loads(self, start: int, end: int, kept: bool) -> Iterator[Load]:
        for layer in self.layers:
            if kept and self._is_saved(start):
                yield from self._loads(OUT, layer, start, end)
            elif self.is_sparse(layer):
                yield from self._selected_loads(layer, start, end, [KV])
            else:
                for low, high in self._bounds(layer, self._first(layer, start, end), start):
                    yield from self._loads(KV, layer, low, high)

    def _backward_loads(self, start: int, end: int, kept: bool) -> Iterator[Load]:
        for layer in list(self.layers)[::-1]:
            if kept and self._is_saved(start):
                yield from self._loads(OUT, layer, start, end)
            if self.is_sparse(layer):
                yield from self._selected_loads(layer, start, end, [KV, GRAD])
                if start < self.capacity:
                    yield from self._loads(GRAD, layer, start, end)
                continue
            first = self._first(layer, start, end)
            bounds = list(self._bounds(layer, first, start))
            # With a window all of the past is put together first, without one it is gone through once.
            kinds = [[KV], [GRAD]] if self._is_windowed(layer, end) else [[KV, GRAD]]
            for group in kinds:
                for low, high in bounds:
                    for kind in group:
                        yield from self._loads(kind, layer, low, high)
            if start < self.capacity:
                for low, high in self.has_grad[layer].within(start, end):
                    yield from self._loads(GRAD, layer, low, high)

    def _is_saved(self, start: int) -> bool:
        return self.saved_from <= start < self.capacity

    def _selected_loads(self, layer: int, start: int, end: int, kinds: list[str]) -> Iterator[Load]:
        """Of chosen pages, where the choice is known."""
        assert self.selected is not None
        if self.selected.selection(layer, start, end) is not None:
            for kind in kinds:
                yield from self.selected.loads(kind, layer, start, end)

    def _loads(self, kind: str, layer: int, low: int, high: int) -> Iterator[Load]:
        """What must be loaded for these tokens: nothing if they lie on the GPU."""
        if high > self.gpu_pages[kind] * self.page_size and high > low:
            yield self._load(kind, layer, low, high)

    def _load(self, kind: str, layer: int, low: int, high: int) -> Load:
        row = self._row(kind, layer).num_bytes
        parts = self.has_grad[layer].within(low, high) if kind == GRAD else [(low, high)]
        pieces = [
            ((a - low + piece.at) * row, piece.data)
            for a, b in parts
            for piece in self._pieces(kind, layer, a, b)
            if piece.tier == HOST
        ]
        after = (self.stored.get((kind, layer)),)
        return Load((id(self), kind, layer, low, high), self._ring(kind), tuple(pieces), after)

    @contextmanager
    def _resident(self, kind: str, layer: int, low: int, high: int, writes: bool = False) -> Iterator[list[Tensor]]:
        """The fields of these tokens' rows on the GPU, in place or in a buffer; `writes`: they come back changed."""
        row, pieces = self._row(kind, layer), list(self._pieces(kind, layer, low, high))
        if kind == GRAD and self.is_sparse(layer) and row.is_quantized and any(p.tier == GPU for p in pieces):
            # Chosen pages in 8 bits go back by the stream that stores, wherever they lie.
            self.tiers.streams.wait(self.stored.get((kind, layer)))
        if len(pieces) == 1 and pieces[0].tier == GPU:
            yield row.views(pieces[0].data, high - low)
            return
        copier, prefetcher, load = self.tiers.streams, self.tiers.prefetcher, self._load(kind, layer, low, high)
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
        on_host: list[RowSpan] = []
        for piece in self._pieces(kind, layer, start, start + num_tokens):
            if piece.tier == HOST:
                on_host.append(piece)
                continue
            part = [x[:, :, piece.at : piece.at + piece.count] for x in tensors]
            row.write(row.views(piece.data, piece.count), part)
        if not on_host:
            return
        ring, first = self._ring(ring_name), on_host[0].at
        slot = ring.take()
        self.tiers.streams.wait(slot.free_after)
        row.write(row.views(slot.bytes, num_tokens - first), [x[:, :, first:] for x in tensors])
        copies: Copies = [
            (p.data, slot.bytes[(p.at - first) * row.num_bytes : (p.at - first + p.count) * row.num_bytes])
            for p in on_host
        ]
        ring.give(slot, self._store(kind, layer, copies, self.tiers.streams.mark()))

    def _store(self, kind: str, layer: int, work: Work, after: Event) -> Event:
        self.stored[kind, layer] = done = self.tiers.streams.store(work, after=(after,))
        return done

    def _create(self, kind: str, layer: int, first: int, end: int) -> None:
        for tier, low, high in self._by_tier(kind, first, end):
            self.tiers.take(self.lease, (kind, layer), tier, low, high)

    def _by_tier(self, kind: str, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The pages `first` to `end` - 1 by tier."""
        edge = self.gpu_pages[kind]
        if first < edge:
            yield GPU, first, min(end, edge)
        if end > edge:
            yield HOST, max(first, edge), end

    def _pieces(self, kind: str, layer: int, low: int, high: int) -> Iterator[RowSpan]:
        """Where the rows of tokens `low` to `high` - 1 lie."""
        page_bytes, column = self.lease.tables[kind, layer]
        size, row = self.page_size, page_bytes // self.page_size
        for run in column.pieces(*self._pages(low, high)):
            first, end = max(low, run.at * size), min(high, (run.at + run.count) * size)
            data = self.tiers.view(page_bytes, run)
            yield RowSpan(
                run.tier, data[(first - run.at * size) * row : (end - run.at * size) * row], first - low, end - first
            )

    def _pages(self, low: int, high: int) -> tuple[int, int]:
        return low // self.page_size, -(-high // self.page_size)

    def _bounds(self, layer: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        return segment_bounds(first, end, self.chunk_size, self._largest(layer))

    def _largest(self, layer: int) -> int:
        """Most tokens in one segment; of a layer that reads chosen pages, those of the chunk itself."""
        return (
            self.chunk_size
            if self.is_sparse(layer)
            else largest_segment(self.chunk_size, self.layers[layer].kv.num_bytes)
        )

    def _is_windowed(self, layer: int, end: int) -> bool:
        window = self.layers[layer].window
        return window is not None and window < end

    def _first(self, layer: int, start: int, end: int) -> int:
        """The first token that the chunk's queries look at."""
        return max(0, start - (self.layers[layer].window or 0) + 1) if self._is_windowed(layer, end) else 0

    def _row(self, kind: str, layer: int) -> RowLayout:
        return self.layers[layer].row(kind)

    def _ring(self, kind: str) -> BufferRing:
        num_slots = NUM_AHEAD if kind in (KV, GRAD) else NUM_BEHIND
        return self.tiers.ring(kind, num_slots, self.ring_bytes[kind])
