"""Chosen pages of a sequence, as sparse attention sees them: what was chosen, summaries of the pages, and the pages
themselves brought together on the GPU.

Pages on the GPU are read where they lie, by kernels that follow addresses. Those on the host come into a buffer. In the
fill pass a kernel brings them that reads pinned memory by itself: which they are is known on the GPU alone, and nothing
here waits to learn it. In the gradient pass the choices are old, so the CPU has them fetched a chunk ahead, and copy
engines bring the pages and take gradients back, which costs the computation beside them nothing. Where kernels cannot
run (on a CPU, or without Triton) all chosen pages are copied into the buffer one by one.

B batch, K key/value heads, D head size, P pages, N tiles, C pages chosen per tile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oomb.memory import batch_copy
from oomb.memory.host_selections import HostSelections
from oomb.memory.pool import GPU, HOST
from oomb.memory.transfer import BufferRing, Event, Load
from oomb.ops.rounding import DROPPED_BITS, mix, stochastic_round

if TYPE_CHECKING:
    from oomb.memory.store import PageStore

HAS_TRITON = find_spec("triton") is not None
NUM_BUFFERS = {"kv": 2, "grad": 3}
"""One in use, one on its way here; and of gradients one on its way back."""
NUM_PROGRAMS, NUM_WARPS = 8, 16
"""Of the kernel that moves pages. On an H200, 8 programs of 16 warps read pinned memory at 48 GB/s and slow a matrix
product beside them by 8%; those that write to it, by 26%; both together make it take twice its time."""
MOST_SHORT = 2**15 - 1
COMES_IN, GOES_OUT = 1, 2
"""Of the seeds of random rounding: gradients that come in, are added to and go out draw apart from each other."""
Flags = tuple[Tensor, int, int]
"""Which pages hold anything: a table by sequence and page, the number of its rows (0: all do), and their distance."""


@dataclass(frozen=True)
class SelectionSpec:
    """How pages are chosen, as far as memory is concerned."""

    budget: int
    """Pages that a tile reads at the most."""
    tile_size: int
    """Queries that share a choice."""
    num_means: int
    """Means of keys that stand for a page when pages are chosen."""
    means_dtype: torch.dtype

    def num_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tile_size)


def max_selected(choosing: SelectionSpec, batch_size: int, chunk_size: int, num_pages: int) -> int:
    """Pages that all tiles of a chunk can choose together."""
    return min(num_pages, batch_size * choosing.num_tiles(chunk_size) * choosing.budget)


def buffer_bytes(num_chosen: int, page_bytes: int, num_pages: int) -> int:
    """A buffer for chosen pages. The next one begins on a boundary that suits all loads."""
    return -(-sum(buffer_parts(num_chosen, page_bytes, num_pages)) // 256) * 256


def buffer_parts(num_chosen: int, page_bytes: int, num_pages: int) -> tuple[int, int, int, int]:
    """Bytes of the pages, of the places where all pages are found, of the number of the chosen, and of their list."""
    return num_chosen * page_bytes, -(-8 * num_pages // 16) * 16, 16, -(-4 * num_chosen // 16) * 16


def table_bytes(
    spec: SelectionSpec, *, batch_size: int, num_kv_heads: int, head_size: int, num_pages: int, capacity: int,
    chunk_size: int, needs_grad: bool,
) -> int:  # fmt: skip
    """GPU memory of one layer beside its pages: summaries, choices, flags and addresses."""
    means = batch_size * num_kv_heads * num_pages * spec.num_means * head_size * spec.means_dtype.itemsize
    tiles = batch_size * spec.num_tiles(chunk_size) * (capacity // chunk_size)
    number = selection_dtype(num_pages).itemsize
    if not needs_grad:
        return means + 16 * num_pages
    return means + 32 * num_pages + batch_size * num_pages + tiles * min(spec.budget, num_pages) * number


def selection_dtype(num_pages: int) -> torch.dtype:
    return torch.int16 if num_pages <= MOST_SHORT else torch.int32


@dataclass(frozen=True)
class PageView:
    """Pages as attention kernels read them (the `Pages` of `oomb.attention.sparse_reference`): page p begins
    `offsets_P[p]` numbers after the start of `base`, a flat tensor."""

    base: Tensor
    offsets_P: Tensor
    length: int
    page_size: int
    row_size: int
    num_kv_heads: int
    head_size: int
    value_size: int
    value_at: int
    touched_BP: Tensor
    """Of gradients: 1 where something has been added to a sequence's page. Other pages hold anything."""
    seed: int


class SelectedPages:
    """What a sequence has for those of its layers that choose pages."""

    def __init__(self, store: PageStore, spec: SelectionSpec, needs_grad: bool) -> None:
        # It has hold of us: with both ways held, its pages would wait for Python's garbage collector.
        self.store: PageStore = weakref.proxy(store)
        self.spec, self.needs_grad = spec, needs_grad
        self.device, self.num_pages = store.tiers.device, store.num_pages
        self.layers = [layer for layer, spec in store.layers.items() if store.is_sparse(layer)]
        self.uses_kernels = self.device.type == "cuda" and HAS_TRITON
        self.batch_size = store.layers[self.layers[0]].kv.fields[0][2][0] if self.layers else 1
        self.num_selected = max_selected(spec, self.batch_size, store.chunk_size, self.num_pages)
        self.reads_in_place = dict.fromkeys(self.layers, self.uses_kernels)
        """Whether a layer's attention follows addresses, and so reads pages where they lie."""
        self.page_means, self.touched, self.selections = {}, {}, {}
        self.num_summarised = dict.fromkeys(self.layers, 0)
        self.selection_done: dict[int, Event] = {}
        self._addresses: dict[tuple[str, int], Tensor] = {}
        """Where the pages of a kind and layer begin."""
        self._host_addresses: dict[tuple[str, int], Tensor] = {}
        """The same, for the CPU."""
        num_chunks = store.capacity // store.chunk_size
        shape = num_chunks, self.batch_size, spec.num_tiles(store.chunk_size), min(spec.budget, self.num_pages)
        for layer in self.layers:
            _, num_heads, size = store.layers[layer].kv.fields[0][2]
            means = self.batch_size, num_heads, self.num_pages * spec.num_means, size
            self.page_means[layer] = store.tiers.table(means, spec.means_dtype)
            if needs_grad:
                self.touched[layer] = store.tiers.table((self.batch_size, self.num_pages), torch.uint8).zero_()
            table = shape if needs_grad else (1, *shape[1:])
            self.selections[layer] = store.tiers.table(table, selection_dtype(self.num_pages))
        self._made: dict[int, set[int]] = {layer: set() for layer in self.layers}
        self._latest: dict[int, int] = {}
        """Start of the chunk for which a layer has chosen last. The CPU does not know what."""
        self.host_selections = HostSelections(store.tiers, self.selections, store.chunk_size, self.num_pages)

    def close(self) -> None:
        """Gives up the tables. Their memory is the computation's to use again, and stores on their way read addresses
        in it: it waits for them."""
        for layer in self.layers:
            self.store.tiers.streams.wait(self.store.stored.get(("grad", layer)))
        self.host_selections.close()
        for tables in (self.page_means, self.touched, self.selections, self._addresses, self._host_addresses):
            tables.clear()

    def needs_buffers(self, kind: str) -> bool:
        """Whether pages of this kind are ever brought together."""
        is_quantized = any(self._is_quantized(kind, layer) for layer in self.layers)
        return is_quantized or not all(self.reads_in_place.values()) or self.store.gpu_pages[kind] < self.num_pages

    def ring(self, kind: str) -> BufferRing:
        page_bytes = max(self._working_bytes(kind, layer) for layer in self.layers)
        size = buffer_bytes(self.num_selected, page_bytes, self.num_pages)
        return self.store.tiers.ring(f"chosen {kind}", NUM_BUFFERS[kind], size)

    def selection(self, layer: int, start: int, end: int) -> Tensor | None:
        """[B, N, C] of the chunk, if it has been made."""
        if start not in self._made[layer]:
            return None
        num_tiles = self.spec.num_tiles(end - start)
        num_chosen = min(self.spec.budget, start // self.store.page_size)
        whole = self.selections[layer][start // self.store.chunk_size - 1 if self.needs_grad else 0]
        return whole.flatten()[: self.batch_size * num_tiles * num_chosen].view(self.batch_size, num_tiles, num_chosen)

    def set_selection(self, layer: int, start: int, end: int, chosen_BNC: Tensor, follows: bool) -> None:
        """Notes a choice; pages on the host set out at once. `follows`: attention will follow addresses."""
        self.reads_in_place[layer] = follows and self.uses_kernels
        if not self.needs_grad:
            self._made[layer].clear()
        self._made[layer].add(start)
        self._latest[layer] = start
        choice = self.selection(layer, start, end)
        assert choice is not None and choice.shape == chosen_BNC.shape
        choice.copy_(chosen_BNC)
        self.selection_done[layer] = self.store.tiers.streams.mark()
        for load in self.loads("kv", layer, start, end):
            self.store.tiers.prefetcher.start(load)

    def own_page_means(self, layer: int, start: int, end: int) -> Tensor | None:
        """Where the summaries of a chunk's pages go, unless they are there."""
        first, last = (at // self.store.page_size * self.spec.num_means for at in (start, end))
        if start >= self.store.capacity or first < self.num_summarised[layer]:
            return None
        self.num_summarised[layer] = last
        return self.page_means[layer][:, :, first:last]

    def past_means(self, layer: int, start: int) -> Tensor:
        return self.page_means[layer][:, :, : start // self.store.page_size * self.spec.num_means]

    def loads(self, kind: str, layer: int, start: int, end: int) -> Iterator[Load]:
        """What must be brought in for a chunk: nothing if all that it may have chosen is read where it lies."""
        if start and not self._is_resident(kind, layer, start):
            yield self._load(kind, layer, start, end)

    @contextmanager
    def resident(self, kind: str, layer: int, start: int, end: int, seed: int = 0) -> Iterator[PageView]:
        """The chosen pages on the GPU; gradients go back when they have been added to."""
        writes = kind == "grad"
        if self._is_resident(kind, layer, start):
            address = self._table(kind, layer)
            base = self.store.first_bytes(kind, layer)
            yield self._view(kind, layer, start, base, address - base.data_ptr(), seed)
            if writes:
                self._touch(layer, start, end)
            return
        tiers, load = self.store.tiers, self._load(kind, layer, start, end)
        slot = tiers.prefetcher.take(load)
        free_after = None
        try:
            if self.reads_in_place[layer]:
                data = slot.bytes[: self.num_selected * self._working_bytes(kind, layer)]
                places = self._parts(slot.bytes, kind, layer)[1] - data.data_ptr()
                yield self._view(kind, layer, start, data, places, seed)
                if writes:
                    self._touch(layer, start, end)
                    free_after = self._store(layer, start, end, slot.bytes, seed)
            else:
                pages = self._unique(layer, start, end)
                with self._gathered(kind, layer, pages, slot.bytes, seed if writes else None) as (data, places):
                    yield self._view(kind, layer, start, data, places, seed)
                if writes:
                    self._touch(layer, start, end)
                    copies = self._copies(kind, layer, pages, slot.bytes)
                    back = [(page, part) for tier, page, part in copies if tier == HOST]
                    free_after = self.store.store_back(kind, layer, back, tiers.streams.mark())
        finally:
            tiers.prefetcher.give(load.ring, slot, free_after if free_after is not None else tiers.streams.mark())

    def _copies(self, kind: str, layer: int, pages: list[int], data: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(tier, page, its place in the buffer) of chosen pages that are copied one by one."""
        size = self._page_bytes(kind, layer)
        for i, p in enumerate(pages):
            for tier in (GPU, HOST):
                page = self.store.page(kind, layer, p, tier)
                if page is not None:
                    yield tier, page, data[i * size : (i + 1) * size]

    @contextmanager
    def _gathered(
        self, kind: str, layer: int, pages: list[int], data: Tensor, seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen pages as attention computes with them, and where each begins; with a seed they come back changed.
        Those on the host are in the buffer already."""
        near = [(page, part) for tier, page, part in self._copies(kind, layer, pages, data) if tier == GPU]
        for page, part in near:
            part.copy_(page)
        spec, num_tokens = self.store.layers[layer], len(pages) * self.store.page_size
        row, working = spec.row(kind), spec.working(kind)
        places = torch.zeros(self.num_pages, dtype=torch.int64, device=self.device)
        places[pages] = torch.arange(len(pages), device=self.device) * self._working_bytes(kind, layer)
        if row.is_quantized:
            wide = torch.empty(num_tokens * working.num_bytes, dtype=torch.uint8, device=self.device)
            found = row.read(row.views(data, num_tokens))
            if seed is not None:
                found = [stochastic_round(x, spec.dtype, mix(seed, COMES_IN, index)) for index, x in enumerate(found)]
            working.write(working.views(wide, num_tokens), found)
            yield wide, places
            if seed is not None:
                changed = working.read(working.views(wide, num_tokens))
                row.write(row.views(data, num_tokens), changed, mix(seed, GOES_OUT))
        else:
            yield data[: num_tokens * row.num_bytes], places
        if seed is not None:
            for page, part in near:
                page.copy_(part)

    def add_future_grads(self, layer: int, start: int, end: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of a chunk's own tokens plus what later chunks have left for them."""
        first, last = start // self.store.page_size, end // self.store.page_size
        is_touched = (
            self.touched[layer][:, first:last].bool().repeat_interleave(self.store.page_size, 1)[:, None, :, None]
        )
        with self.store.own_grads(layer, start, end) as fields:
            later_k, later_v = self.store.layers[layer].grad.read(fields)
            return torch.where(is_touched, dk + later_k, dk), torch.where(is_touched, dv + later_v, dv)

    def _touch(self, layer: int, start: int, end: int) -> None:
        choice = self.selection(layer, start, end)
        assert choice is not None
        self.touched[layer].scatter_(1, choice.flatten(1).long(), 1)
        if self.uses_engines and self._has_host_pages("grad", start):
            self.host_selections.touch(layer, self._known_pages(layer, start, end))

    def _is_resident(self, kind: str, layer: int, start: int) -> bool:
        return (
            self.reads_in_place[layer] and not self._has_host_pages(kind, start) and not self._is_quantized(kind, layer)
        )

    def _is_quantized(self, kind: str, layer: int) -> bool:
        return self.store.layers[layer].row(kind).is_quantized

    def _working_bytes(self, kind: str, layer: int) -> int:
        """Bytes of a page in a buffer, where pages in 8 bits are wide again."""
        return self.store.layers[layer].working(kind).num_bytes * self.store.page_size

    def _page_bytes(self, kind: str, layer: int) -> int:
        return self.store.layers[layer].row(kind).num_bytes * self.store.page_size

    def _table(self, kind: str, layer: int) -> Tensor:
        """Addresses [P] of the pages."""
        if (kind, layer) not in self._addresses:
            for each in self.layers:
                address = torch.tensor(self.store.addresses(kind, each), dtype=torch.int64, device="cpu")
                self._host_addresses[kind, each], self._addresses[kind, each] = address, address.to(self.device)
            self.selection_done |= dict.fromkeys(self.layers, self.store.tiers.streams.mark())
        return self._addresses[kind, layer]

    def _view(self, kind: str, layer: int, start: int, data: Tensor, places: Tensor, seed: int) -> PageView:
        row = self.store.layers[layer].working(kind)
        (_, _, (_, num_heads, head_size), dtype), (value_at, _, (_, _, value_size), _) = row.fields
        return PageView(
            base=data.view(dtype),
            offsets_P=places // dtype.itemsize,
            length=start,
            page_size=self.store.page_size,
            row_size=row.num_bytes // dtype.itemsize,
            num_kv_heads=num_heads,
            head_size=head_size,
            value_size=value_size,
            value_at=value_at // dtype.itemsize,
            touched_BP=self.touched[layer] if self.needs_grad else places,
            seed=seed,
        )

    def _unique(self, layer: int, start: int, end: int) -> list[int]:
        choice = self.selection(layer, start, end)
        assert choice is not None
        return choice.unique().tolist()

    def _load(self, kind: str, layer: int, start: int, end: int) -> Load:
        key = id(self), kind, layer, "chosen", start
        ring = self.ring(kind)
        # Here, because what is read of it on another stream must be there by the events below.
        self._table(kind, layer)
        after = self.store.stored.get((kind, layer)), self.selection_done.get(layer)
        if self.reads_in_place[layer]:
            if self._goes_by_engines(kind, layer, start):
                # Here, since it may have them fetched.
                self._known_pages(layer, start, end)
            return Load(key, ring, (), after, lambda data: self._gather(kind, layer, start, end, data))
        page_bytes = self._page_bytes(kind, layer)
        pieces = tuple(
            (i * page_bytes, piece)
            for i, p in enumerate(self._unique(layer, start, end))
            if (piece := self.store.page(kind, layer, p, HOST)) is not None
        )
        return Load(key, ring, pieces, after)

    def _parts(self, data: Tensor, kind: str, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a buffer: pages, places of all pages, how many were chosen, and which."""
        sizes = buffer_parts(self.num_selected, self._working_bytes(kind, layer), self.num_pages)
        pages, places, count, which = data[: sum(sizes)].split(sizes)
        places = places.view(torch.int64)[: self.num_pages]
        return pages.view(torch.int32), places, count.view(torch.int32), which.view(torch.int32)

    def _flags(self, kind: str, layer: int) -> Flags:
        """Which pages hold anything, the number of rows of that (0: all pages do), and their distance."""
        if kind == "grad":
            return self.touched[layer], self.batch_size, self.num_pages
        return self.selections[layer], 0, 0

    def _gather(self, kind: str, layer: int, start: int, end: int, data: Tensor) -> None:
        """Numbers the chosen pages that are not read where they lie, and brings them in."""
        from oomb.ops.triton_kernels.page_copy import assign_slots, mark_pages

        choice, (_, places, count, which) = self.selection(layer, start, end), self._parts(data, kind, layer)
        assert choice is not None
        flags = self._flags(kind, layer)
        moved = self.store.tiers.streams.moved_bytes
        places.copy_(self._table(kind, layer))
        if self._goes_by_engines(kind, layer, start):
            in_buffer, at_rest = self._host_pages(kind, layer, start, end, data, is_out=False)
            batch_copy.copy_all(in_buffer, at_rest, self._page_bytes(kind, layer), self._stream())
        with torch.cuda.device_of(data):
            mark_pages[(-(-choice.numel() // 1024),)](
                places, choice, choice.numel(), self._first_in_buffer(kind, layer), TILE=1024
            )
            assign_slots[(1,)](
                places, which, count, moved[0:], flags[0], data.data_ptr(), self._working_bytes(kind, layer),
                self._page_bytes(kind, layer), self.store.gpu_pages[kind], self.num_pages, *flags[1:], TILE=1024,
            )  # fmt: skip
            seed = mix(self.store.seed, layer, start, COMES_IN) if kind == "grad" else 0
            self._move(kind, layer, start, data, flags, is_out=False, seed=seed)

    def _store(self, layer: int, start: int, end: int, data: Tensor, seed: int) -> Event:
        far, page_bytes = None, self._page_bytes("grad", layer)
        if self._goes_by_engines("grad", layer, start):
            far = self._host_pages("grad", layer, start, end, data, is_out=True)

        def send() -> None:
            _, _, count, which = self._parts(data, "grad", layer)
            moved, edge = self.store.tiers.streams.moved_bytes, self.store.gpu_pages["grad"]
            with torch.cuda.device_of(data):
                self._move("grad", layer, start, data, (which, 0, 0), is_out=True, seed=mix(seed, GOES_OUT))
                # Of the chosen, those on the host.
                numbers = torch.arange(len(which), device=which.device)
                moved[1] += ((numbers < count[0]) & (which >= edge)).sum() * page_bytes
            if far is not None:
                in_buffer, at_rest = far
                batch_copy.copy_all(at_rest, in_buffer, page_bytes, self._stream())

        return self.store.store_back("grad", layer, send, self.store.tiers.streams.mark())

    def _move(self, kind: str, layer: int, start: int, data: Tensor, flags: Flags, *, is_out: bool, seed: int) -> None:
        """Copies the numbered pages between where they rest and the buffer, as far as engines do not; 8-bit ones become
        wide, or narrow again. Gradients are rounded at random both ways: they are moved for every chunk that adds to
        them."""
        from oomb.ops.triton_kernels.page_copy import copy_pages, dequantize_pages, dequantize_tiles

        pages, _, count, which = self._parts(data, kind, layer)
        address, spec = self._table(kind, layer), self.store.layers[layer]
        by_engines = self._goes_by_engines(kind, layer, start)
        if not self._is_quantized(kind, layer):
            if not by_engines:
                copy_pages[(NUM_PROGRAMS,)](
                    which, count, address, pages, flags[0], self._page_bytes(kind, layer) // 4, *flags[1:], OUT=is_out,
                    TILE=4096, num_warps=NUM_WARPS,
                )  # fmt: skip
            return
        (_, _, (batch_size, heads, k_size), _), (value_at, _, (_, _, v_size), _), (scale_at, *_) = spec.row(kind).fields
        working, edge = spec.working(kind), self.store.gpu_pages[kind]
        # Pages on the GPU are limited by latency alone, and in the fill pass all the computation waits for them.
        is_near = by_engines or not self._has_host_pages(kind, start) or 2 * edge > self.num_pages
        dequantize_pages[(NUM_PROGRAMS * (16 if is_near else 2),)](
            which, count, address, pages.view(spec.dtype), flags[0], seed, self.store.page_size, batch_size * heads,
            k_size, v_size, spec.row(kind).num_bytes, value_at, scale_at, working.num_bytes // spec.dtype.itemsize,
            working.fields[1][0] // spec.dtype.itemsize, *flags[1:], edge if by_engines else self.num_pages, OUT=is_out,
            DROPPED=DROPPED_BITS.get(spec.dtype, 0) if kind == "grad" and not is_out else 0,
            **dequantize_tiles(batch_size * heads, max(k_size, v_size)), num_warps=NUM_WARPS,
        )  # fmt: skip

    @property
    def uses_engines(self) -> bool:
        """Whether copy engines bring pages once the CPU knows which."""
        return self.needs_grad and self.uses_kernels and batch_copy.is_available(self.device)

    def _has_host_pages(self, kind: str, start: int) -> bool:
        """Whether a chunk may choose pages on the host."""
        return start > self.store.gpu_pages[kind] * self.store.page_size

    def _goes_by_engines(self, kind: str, layer: int, start: int) -> bool:
        # A page in 8 bits waits at the end of its place in the buffer, which must be large enough.
        fits = self._page_bytes(kind, layer) <= self._working_bytes(kind, layer)
        return self.uses_engines and fits and self._has_host_pages(kind, start) and self._latest.get(layer) != start

    def _first_in_buffer(self, kind: str, layer: int) -> int:
        """Chosen pages from this one on have a place in the buffer: those on the host, and all in 8 bits, since they
        become wide on their way."""
        return 0 if self._is_quantized(kind, layer) else self.store.gpu_pages[kind]

    def _host_pages(
        self, kind: str, layer: int, start: int, end: int, data: Tensor, *, is_out: bool
    ) -> tuple[Tensor, Tensor]:
        """Addresses of the chosen pages that are copied from or to the host: in the buffer, and at rest. Before they
        become wide, pages in 8 bits lie at the end of their places; narrow again, at the beginning."""
        pages = self._known_pages(layer, start, end)
        pages = pages[pages >= self._first_in_buffer(kind, layer)]
        is_far = pages >= self.store.gpu_pages[kind]
        if kind == "grad" and not is_out:
            is_far &= self.host_selections.are_touched(layer, pages)
        places = torch.arange(len(pages), device="cpu")[is_far] * self._working_bytes(kind, layer) + data.data_ptr()
        if not is_out:
            places += self._working_bytes(kind, layer) - self._page_bytes(kind, layer)
        return places, self._host_addresses[kind, layer][pages[is_far]]

    def _known_pages(self, layer: int, start: int, end: int) -> Tensor:
        choice = self.selection(layer, start, end)
        assert choice is not None
        return self.host_selections.pages(layer, start, choice.numel(), self.selection_done.values())

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
