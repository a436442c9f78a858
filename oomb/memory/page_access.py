"""Give access to the pages of one sequence: where each token's row is, and how to read, write and move it.

The oldest tokens' pages are on the GPU, as many as fit; the others are in pinned host memory. A page never moves. Host
pages reach the GPU through staging buffers, and what the GPU writes to them goes back the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

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
from oomb.memory.tiers import PageLease, Tiers
from oomb.memory.transfer import BufferRing, Copies, Event, Load, Work


@dataclass(frozen=True)
class RowRun:
    """The bytes of `count` consecutive tokens, `at` of them after the first requested token."""

    tier: str
    data: Tensor
    at: int
    count: int


class PageAccess:
    """The page tables of one sequence and the bytes behind them.

    The constructor reserves all pages or raises `OutOfPages`. K, V and outputs get their pages at once, gradients when
    they are first written.

    Args:
        tiers: Memory and copy streams, shared by all sequences of an engine.
        layers: Row layouts by layer, in the order in which the model calls the layers.
        gpu_end: For each kind of pages that the sequence has, up to which token they are on the GPU.
        capacity: Tokens that need pages: all but those of the last chunk, which no later chunk reads.
        saved_from: The first token whose attention output is saved.
        is_selective: Whether layers without a sliding window read selected pages only.
    """

    def __init__(
        self,
        tiers: Tiers,
        layers: Mapping[int, LayerRows],
        gpu_end: Mapping[str, int],
        *,
        capacity: int,
        chunk_size: int,
        page_size: int,
        saved_from: int,
        is_selective: bool,
    ) -> None:
        self.tiers, self.layers = tiers, layers
        self.capacity, self.chunk_size, self.page_size = capacity, chunk_size, page_size
        self.saved_from, self.is_selective = saved_from, is_selective
        self.rounding_seed = 0
        """Seed for the stochastic rounding of gradients."""
        self.num_pages = -(-capacity // page_size)
        self.gpu_pages = {
            kind: self.num_pages if tokens >= capacity else tokens // page_size for kind, tokens in gpu_end.items()
        }
        self.kinds = list(gpu_end)
        self.has_grad = {layer: IntervalSet() for layer in layers}
        """Tokens whose gradient rows are initialized."""
        self.stored: dict[tuple[str, int], Event] = {}
        """When the latest store of a kind and layer is done."""
        rows = [(spec.kv.num_bytes, spec.grad.num_bytes, spec.out.num_bytes) for spec in layers.values()]
        self.ring_bytes = ring_bytes(rows, [i for i, layer in enumerate(layers) if self.is_sparse(layer)], chunk_size)
        self.lease = PageLease()
        self._first_page = {kind: saved_from // page_size if kind == OUT else 0 for kind in self.kinds}
        needed: Counter[tuple[str, int]] = Counter()
        for layer in layers:
            for kind in self.kinds:
                self.lease.tables[kind, layer] = self.row(kind, layer).num_bytes * page_size, PageTable()
                for tier, first, end in self._by_tier(kind, self._first_page[kind], self.num_pages):
                    needed[tier, self.lease.tables[kind, layer][0]] += end - first
        tiers.reserve(self.lease, needed)

    def create_pages(self) -> None:
        """Take the pages of K, V and outputs."""
        for layer in self.layers:
            for kind in self.kinds:
                if kind != GRAD:
                    self._create(kind, layer, self._first_page[kind], self.num_pages)

    def create_rings(self) -> None:
        """Allocate the staging buffers. Done up front, so that a lack of memory shows before the first chunk."""
        if any(self.gpu_pages[kind] < self.num_pages for kind in self.kinds):
            for kind in (*self.kinds, NEW):
                self.ring(kind)

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer reads selected pages. A sliding window is bounded anyway."""
        return self.is_selective and self.layers[layer].window is None

    def is_saved(self, start: int) -> bool:
        """Return whether the chunk at `start` has its attention output saved."""
        return self.saved_from <= start < self.capacity

    def row(self, kind: str, layer: int) -> RowLayout:
        return self.layers[layer].row(kind)

    def page_bytes(self, kind: str, layer: int) -> int:
        return self.row(kind, layer).num_bytes * self.page_size

    def ring(self, name: str) -> BufferRing:
        num_slots = NUM_AHEAD if name in (KV, GRAD) else NUM_BEHIND
        return self.tiers.ring(name, num_slots, self.ring_bytes[name])

    def bounds(self, layer: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the segments that cover tokens [first, end). A sparse layer only ever reads the chunk's own tokens."""
        is_sparse, row = self.is_sparse(layer), self.layers[layer].kv.num_bytes
        largest = self.chunk_size if is_sparse else largest_segment(self.chunk_size, row)
        return segment_bounds(first, end, self.chunk_size, largest)

    def page(self, kind: str, layer: int, page: int, tier: str) -> Tensor | None:
        """Return the bytes of a page, or None if it is not in `tier`."""
        low, high = page * self.page_size, (page + 1) * self.page_size
        return next((run.data for run in self._runs(kind, layer, low, high) if run.tier == tier), None)

    def first_bytes(self, kind: str, layer: int) -> Tensor:
        """Return the bytes of the first run of pages, which is on the GPU."""
        return next(self._runs(kind, layer, 0, self.num_pages * self.page_size)).data

    def addresses(self, kind: str, layer: int) -> list[int]:
        """Return the address of every page. Creates all gradient pages."""
        page_bytes, table = self.lease.tables[kind, layer]
        for gap in list(table.missing(0, self.num_pages)):
            self._create(kind, layer, *gap)
        if kind == GRAD:
            self.has_grad[layer].add(0, self.capacity)
        runs = [(self.tiers.view(page_bytes, run).data_ptr(), run.count) for run in table.pieces(0, self.num_pages)]
        return [first + i * page_bytes for first, count in runs for i in range(count)]

    def create_grads(self, layer: int, low: int, high: int) -> None:
        """Take the gradient pages of tokens [low, high) that do not exist yet."""
        for gap in list(self.lease.tables[GRAD, layer][1].missing(*self._pages(low, high))):
            self._create(GRAD, layer, *gap)

    def loads(self, kind: str, layer: int, low: int, high: int) -> Iterator[Load]:
        """Yield the load of tokens [low, high), or nothing if they are on the GPU."""
        if high > self.gpu_pages[kind] * self.page_size and high > low:
            yield self.load(kind, layer, low, high)

    def load(self, kind: str, layer: int, low: int, high: int) -> Load:
        """Return the load that brings the host rows of tokens [low, high) into a buffer."""
        row = self.row(kind, layer).num_bytes
        parts = self.has_grad[layer].within(low, high) if kind == GRAD else [(low, high)]
        pieces = [
            ((a - low + run.at) * row, run.data)
            for a, b in parts
            for run in self._runs(kind, layer, a, b)
            if run.tier == HOST
        ]
        after = (self.stored.get((kind, layer)),)
        return Load((id(self), kind, layer, low, high), self.ring(kind), tuple(pieces), after)

    @contextmanager
    def resident(self, kind: str, layer: int, low: int, high: int, writes: bool = False) -> Iterator[list[Tensor]]:
        """Yield the fields of tokens [low, high) on the GPU, in place or in a buffer.

        With `writes` the caller changes them, and host rows are stored back afterwards.
        """
        row, runs = self.row(kind, layer), list(self._runs(kind, layer, low, high))
        if kind == GRAD and self.is_sparse(layer) and row.is_quantized and any(run.tier == GPU for run in runs):
            # The store stream writes selected 8-bit gradient pages, even those on the GPU.
            self.tiers.streams.wait(self.stored.get((kind, layer)))
        if len(runs) == 1 and runs[0].tier == GPU:
            yield row.views(runs[0].data, high - low)
            return
        streams, prefetcher, load = self.tiers.streams, self.tiers.prefetcher, self.load(kind, layer, low, high)
        slot = prefetcher.take(load)
        free_after = None
        try:
            parts = [(s, slot.bytes[s.at * row.num_bytes : (s.at + s.count) * row.num_bytes]) for s in runs]
            for run, part in parts:
                if run.tier == GPU:
                    part.copy_(run.data)
            yield row.views(slot.bytes, high - low)
            if writes:
                for run, part in parts:
                    if run.tier == GPU:
                        run.data.copy_(part)
                back = [(run.data, part) for run, part in parts if run.tier == HOST]
                free_after = self.store(kind, layer, back, streams.mark())
        finally:
            prefetcher.give(load.ring, slot, free_after if free_after is not None else streams.mark())

    def write(self, kind: str, layer: int, start: int, tensors: list[Tensor], ring_name: str) -> None:
        """Write a chunk's rows: those on the GPU in place, the others through a buffer."""
        row, num_tokens = self.row(kind, layer), tensors[0].shape[2]
        on_host: list[RowRun] = []
        for run in self._runs(kind, layer, start, start + num_tokens):
            if run.tier == HOST:
                on_host.append(run)
                continue
            part = [x[:, :, run.at : run.at + run.count] for x in tensors]
            row.write(row.views(run.data, run.count), part)
        if not on_host:
            return
        ring, first = self.ring(ring_name), on_host[0].at
        slot = ring.take()
        self.tiers.streams.wait(slot.free_after)
        row.write(row.views(slot.bytes, num_tokens - first), [x[:, :, first:] for x in tensors])
        copies: Copies = [
            (s.data, slot.bytes[(s.at - first) * row.num_bytes : (s.at - first + s.count) * row.num_bytes])
            for s in on_host
        ]
        ring.give(slot, self.store(kind, layer, copies, self.tiers.streams.mark()))

    def store(self, kind: str, layer: int, work: Work, after: Event) -> Event:
        """Start a store of this kind and layer; later loads of them wait for it."""
        self.stored[kind, layer] = done = self.tiers.streams.store(work, after=(after,))
        return done

    def free_from(self, start: int) -> None:
        """Free the pages of the tokens from `start` on."""
        self.tiers.free_from(self.lease, -(-start // self.page_size))

    def _create(self, kind: str, layer: int, first: int, end: int) -> None:
        for tier, low, high in self._by_tier(kind, first, end):
            self.tiers.take(self.lease, (kind, layer), tier, low, high)

    def _by_tier(self, kind: str, first: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Split the pages [first, end) by tier."""
        edge = self.gpu_pages[kind]
        if first < edge:
            yield GPU, first, min(end, edge)
        if end > edge:
            yield HOST, max(first, edge), end

    def _runs(self, kind: str, layer: int, low: int, high: int) -> Iterator[RowRun]:
        """Yield the rows of tokens [low, high)."""
        page_bytes, table = self.lease.tables[kind, layer]
        size, row = self.page_size, page_bytes // self.page_size
        for run in table.pieces(*self._pages(low, high)):
            first, end = max(low, run.at * size), min(high, (run.at + run.count) * size)
            data = self.tiers.view(page_bytes, run)[(first - run.at * size) * row : (end - run.at * size) * row]
            yield RowRun(run.tier, data, first - low, end - first)

    def _pages(self, low: int, high: int) -> tuple[int, int]:
        return low // self.page_size, -(-high // self.page_size)
