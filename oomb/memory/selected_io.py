"""Move selected pages between where they are stored and the buffer that attention reads.

During the fill pass the selection exists only on the GPU, so a kernel reads the pages straight from pinned host memory
and the CPU never waits for the result. In the gradient pass the selections are old: the CPU fetches them a chunk ahead,
and copy engines bring the pages and take gradients back without slowing the computation down. Without kernels (on a CPU
or without Triton) pages are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oomb.memory import batch_copy
from oomb.memory.page_access import PageAccess
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import GRAD, KV
from oomb.memory.selections import Selections
from oomb.memory.transfer import BufferRing, Event, Load
from oomb.ops.rounding import DROPPED_BITS, mix, stochastic_round

NUM_BUFFERS = {KV: 2, GRAD: 3}
"""One in use and one being loaded; for gradients also one being stored."""
NUM_PROGRAMS, NUM_WARPS = 8, 16
"""Size of the copy kernel. On an H200, 8 programs of 16 warps read pinned memory at 48 GB/s and slow a concurrent
matrix product by 8%; writing slows it by 26%; reading and writing at once double its time."""
COMES_IN, GOES_OUT = 1, 2
"""Parts of rounding seeds: gradients draw independent random bits when they are loaded, added to and stored."""
Flags = tuple[Tensor, int, int]
"""Which pages are initialized: a table by batch entry and page, its number of rows (0: all pages are), its stride."""


def buffer_bytes(num_selected: int, page_bytes: int, num_pages: int) -> int:
    """Return the size of a buffer for selected pages, rounded up so that the next buffer is aligned for all loads."""
    return -(-sum(buffer_parts(num_selected, page_bytes, num_pages)) // 256) * 256


def buffer_parts(num_selected: int, page_bytes: int, num_pages: int) -> tuple[int, int, int, int]:
    """Return the bytes of a buffer's parts: pages, address of every page, number of pages in the buffer, their list."""
    return num_selected * page_bytes, -(-8 * num_pages // 16) * 16, 16, -(-4 * num_selected // 16) * 16


class SelectedIO:
    """The transport of one sequence's selected pages.

    Args:
        pages: The pages of the sequence.
        selections: What was selected.
        uses_kernels: Whether Triton kernels can run.
    """

    def __init__(self, pages: PageAccess, selections: Selections, uses_kernels: bool) -> None:
        self.pages, self.selections, self.uses_kernels = pages, selections, uses_kernels
        self.device = pages.tiers.device
        self._addresses: dict[tuple[str, int], Tensor] = {}
        """Page addresses by kind and layer, on the GPU."""
        self._host_addresses: dict[tuple[str, int], Tensor] = {}
        """The same on the CPU."""

    def close(self) -> None:
        """Free the address tables."""
        self._addresses.clear()
        self._host_addresses.clear()

    @property
    def uses_engines(self) -> bool:
        """Whether copy engines move pages once the CPU knows which."""
        return self.selections.needs_grad and self.uses_kernels and batch_copy.is_available(self.device)

    def has_host_pages(self, kind: str, start: int) -> bool:
        """Return whether the chunk at `start` may select pages on the host."""
        return start > self.pages.gpu_pages[kind] * self.pages.page_size

    def is_resident(self, kind: str, layer: int, start: int) -> bool:
        """Return whether attention can read all of the chunk's selected pages in place."""
        reads_in_place = self.selections.reads_in_place[layer]
        return reads_in_place and not self.has_host_pages(kind, start) and not self._is_quantized(kind, layer)

    def needs_buffers(self, kind: str) -> bool:
        """Return whether pages of this kind are ever gathered in a buffer."""
        is_quantized = any(self._is_quantized(kind, layer) for layer in self.selections.layers)
        has_host_pages = self.pages.gpu_pages[kind] < self.pages.num_pages
        return is_quantized or has_host_pages or not all(self.selections.reads_in_place.values())

    def ring(self, kind: str) -> BufferRing:
        page_bytes = max(self._working_bytes(kind, layer) for layer in self.selections.layers)
        size = buffer_bytes(self.selections.num_selected, page_bytes, self.pages.num_pages)
        return self.pages.tiers.ring(f"selected {kind}", NUM_BUFFERS[kind], size)

    def addresses(self, kind: str, layer: int) -> Tensor:
        """Return the addresses [P] of all pages, on the GPU."""
        if (kind, layer) not in self._addresses:
            for each in self.selections.layers:
                addresses = torch.tensor(self.pages.addresses(kind, each), dtype=torch.int64, device="cpu")
                self._host_addresses[kind, each] = addresses
                self._addresses[kind, each] = addresses.to(self.device)
            # Loads wait for `done`: they read the addresses as well.
            self.selections.done |= dict.fromkeys(self.selections.layers, self.pages.tiers.streams.mark())
        return self._addresses[kind, layer]

    def load(self, kind: str, layer: int, start: int, end: int) -> Load:
        """Return the load that brings a chunk's selected pages into a buffer."""
        key = id(self), kind, layer, "selected", start
        ring = self.ring(kind)
        # Before the events below are read: this may record one that the load must wait for.
        self.addresses(kind, layer)
        after = self.pages.stored.get((kind, layer)), self.selections.done.get(layer)
        if self.selections.reads_in_place[layer]:
            if self.uses_engines_for(kind, layer, start):
                # Fetch the selection now if the CPU does not have it: the load needs it.
                self.selections.host_pages(layer, start, end)
            return Load(key, ring, (), after, lambda data: self._gather(kind, layer, start, end, data))
        page_bytes = self._page_bytes(kind, layer)
        pieces = tuple(
            (i * page_bytes, piece)
            for i, p in enumerate(self.selections.unique(layer, start, end))
            if (piece := self.pages.page(kind, layer, p, HOST)) is not None
        )
        return Load(key, ring, pieces, after)

    @contextmanager
    def copied(
        self, kind: str, layer: int, numbers: list[int], data: Tensor, seed: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the selected pages in working precision and the offset of each; host pages are already in `data`.

        With a seed the caller changes the pages, and GPU pages are written back afterwards.
        """
        near = [(page, part) for tier, page, part in self._copies(kind, layer, numbers, data) if tier == GPU]
        for page, part in near:
            part.copy_(page)
        spec, num_tokens = self.pages.layers[layer], len(numbers) * self.pages.page_size
        row, working = spec.row(kind), spec.working(kind)
        places = torch.zeros(self.pages.num_pages, dtype=torch.int64, device=self.device)
        places[numbers] = torch.arange(len(numbers), device=self.device) * self._working_bytes(kind, layer)
        if row.is_quantized:
            wide = torch.empty(num_tokens * working.num_bytes, dtype=torch.uint8, device=self.device)
            tensors = row.read(row.views(data, num_tokens))
            if seed is not None:
                tensors = [stochastic_round(x, spec.dtype, mix(seed, COMES_IN, i)) for i, x in enumerate(tensors)]
            working.write(working.views(wide, num_tokens), tensors)
            yield wide, places
            if seed is not None:
                changed = working.read(working.views(wide, num_tokens))
                row.write(row.views(data, num_tokens), changed, mix(seed, GOES_OUT))
        else:
            yield data[: num_tokens * row.num_bytes], places
        if seed is not None:
            for page, part in near:
                page.copy_(part)

    def copy_back(self, kind: str, layer: int, numbers: list[int], data: Tensor) -> Event:
        """Start to store the host pages among `numbers`."""
        back = [(page, part) for tier, page, part in self._copies(kind, layer, numbers, data) if tier == HOST]
        return self.pages.store(kind, layer, back, self.pages.tiers.streams.mark())

    def _copies(self, kind: str, layer: int, numbers: list[int], data: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (tier, page, place in the buffer) of each page."""
        size = self._page_bytes(kind, layer)
        for i, number in enumerate(numbers):
            for tier in (GPU, HOST):
                page = self.pages.page(kind, layer, number, tier)
                if page is not None:
                    yield tier, page, data[i * size : (i + 1) * size]

    def gathered(self, kind: str, layer: int, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pages in a loaded buffer and the offset of every page from them, wherever it is."""
        gathered = data[: self.selections.num_selected * self._working_bytes(kind, layer)]
        return gathered, self._parts(data, kind, layer)[1] - data.data_ptr()

    def store_grads(self, layer: int, start: int, end: int, data: Tensor, seed: int) -> Event:
        """Start to store the gradient pages in the buffer."""
        by_engines, page_bytes = None, self._page_bytes(GRAD, layer)
        if self.uses_engines_for(GRAD, layer, start):
            by_engines = self._engine_copies(GRAD, layer, start, end, data, is_out=True)

        def send() -> None:
            _, _, count, numbers = self._parts(data, GRAD, layer)
            moved, edge = self.pages.tiers.streams.moved_bytes, self.pages.gpu_pages[GRAD]
            with torch.cuda.device_of(data):
                self._copy(GRAD, layer, start, data, (numbers, 0, 0), is_out=True, seed=mix(seed, GOES_OUT))
                # Count the pages that go to the host.
                index = torch.arange(len(numbers), device=numbers.device)
                moved[1] += ((index < count[0]) & (numbers >= edge)).sum() * page_bytes
            if by_engines is not None:
                in_buffer, on_host = by_engines
                batch_copy.copy_all(on_host, in_buffer, page_bytes, self._stream())

        return self.pages.store(GRAD, layer, send, self.pages.tiers.streams.mark())

    def _gather(self, kind: str, layer: int, start: int, end: int, data: Tensor) -> None:
        """Assign buffer slots to the selected pages that are not read in place, and copy them there."""
        from oomb.ops.triton_kernels.page_copy import assign_slots, mark_pages

        selection, (_, places, count, numbers) = self.selections.get(layer, start, end), self._parts(data, kind, layer)
        flags = self._flags(kind, layer)
        moved = self.pages.tiers.streams.moved_bytes
        places.copy_(self.addresses(kind, layer))
        if self.uses_engines_for(kind, layer, start):
            in_buffer, on_host = self._engine_copies(kind, layer, start, end, data, is_out=False)
            batch_copy.copy_all(in_buffer, on_host, self._page_bytes(kind, layer), self._stream())
        with torch.cuda.device_of(data):
            mark_pages[(-(-selection.numel() // 1024),)](
                places, selection, selection.numel(), self._first_in_buffer(kind, layer), TILE=1024
            )
            assign_slots[(1,)](
                places, numbers, count, moved[0:], flags[0], data.data_ptr(), self._working_bytes(kind, layer),
                self._page_bytes(kind, layer), self.pages.gpu_pages[kind], self.pages.num_pages, *flags[1:], TILE=1024,
            )  # fmt: skip
            seed = mix(self.pages.rounding_seed, layer, start, COMES_IN) if kind == GRAD else 0
            self._copy(kind, layer, start, data, flags, is_out=False, seed=seed)

    def _copy(self, kind: str, layer: int, start: int, data: Tensor, flags: Flags, *, is_out: bool, seed: int) -> None:
        """Copy the pages that have slots, except those that engines copy, and dequantize or quantize 8-bit ones.

        8-bit gradients are rounded stochastically both ways, since every chunk that adds to them moves them.
        """
        from oomb.ops.triton_kernels.page_copy import copy_pages, dequantize_pages, dequantize_tiles

        pages, _, count, numbers = self._parts(data, kind, layer)
        addresses, spec = self.addresses(kind, layer), self.pages.layers[layer]
        by_engines = self.uses_engines_for(kind, layer, start)
        if not self._is_quantized(kind, layer):
            if not by_engines:
                copy_pages[(NUM_PROGRAMS,)](
                    numbers, count, addresses, pages, flags[0], self._page_bytes(kind, layer) // 4, *flags[1:],
                    OUT=is_out, TILE=4096, num_warps=NUM_WARPS,
                )  # fmt: skip
            return
        (_, _, (batch_size, heads, k_size), _), (value_at, _, (_, _, v_size), _), (scale_at, *_) = spec.row(kind).fields
        working, edge = spec.working(kind), self.pages.gpu_pages[kind]
        # Copies within the GPU are limited by latency alone, and in the fill pass the computation waits for them.
        is_near = by_engines or not self.has_host_pages(kind, start) or 2 * edge > self.pages.num_pages
        dequantize_pages[(NUM_PROGRAMS * (16 if is_near else 2),)](
            numbers, count, addresses, pages.view(spec.dtype), flags[0], seed, self.pages.page_size, batch_size * heads,
            k_size, v_size, spec.row(kind).num_bytes, value_at, scale_at, working.num_bytes // spec.dtype.itemsize,
            working.fields[1][0] // spec.dtype.itemsize, *flags[1:], edge if by_engines else self.pages.num_pages,
            OUT=is_out, DROPPED=DROPPED_BITS.get(spec.dtype, 0) if kind == GRAD and not is_out else 0,
            **dequantize_tiles(batch_size * heads, max(k_size, v_size)), num_warps=NUM_WARPS,
        )  # fmt: skip

    def uses_engines_for(self, kind: str, layer: int, start: int) -> bool:
        """Return whether copy engines move the host pages that the chunk at `start` selected."""
        # Engines put an 8-bit page at the end of its slot, so the slot must be at least as large.
        fits = self._page_bytes(kind, layer) <= self._working_bytes(kind, layer)
        is_known = self.selections.latest.get(layer) != start
        return self.uses_engines and fits and self.has_host_pages(kind, start) and is_known

    def _engine_copies(
        self, kind: str, layer: int, start: int, end: int, data: Tensor, *, is_out: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the addresses of the selected host pages: in the buffer and on the host.

        An 8-bit page arrives at the end of its slot, where dequantizing it in place overwrites no byte before it is
        read; on the way out it is at the beginning.
        """
        numbers = self.selections.host_pages(layer, start, end)
        numbers = numbers[numbers >= self._first_in_buffer(kind, layer)]
        is_on_host = numbers >= self.pages.gpu_pages[kind]
        if kind == GRAD and not is_out:
            is_on_host &= self.selections.on_host.are_touched(layer, numbers)
        slots = torch.arange(len(numbers), device="cpu")[is_on_host]
        places = slots * self._working_bytes(kind, layer) + data.data_ptr()
        if not is_out:
            places += self._working_bytes(kind, layer) - self._page_bytes(kind, layer)
        return places, self._host_addresses[kind, layer][numbers[is_on_host]]

    def _first_in_buffer(self, kind: str, layer: int) -> int:
        """Return the first page that needs a slot: the first on the host, or 0 if pages must be dequantized."""
        return 0 if self._is_quantized(kind, layer) else self.pages.gpu_pages[kind]

    def _parts(self, data: Tensor, kind: str, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split a buffer into pages, addresses of all pages, number of pages in the buffer, and their list."""
        sizes = buffer_parts(self.selections.num_selected, self._working_bytes(kind, layer), self.pages.num_pages)
        pages, places, count, numbers = data[: sum(sizes)].split(sizes)
        places = places.view(torch.int64)[: self.pages.num_pages]
        return pages.view(torch.int32), places, count.view(torch.int32), numbers.view(torch.int32)

    def _flags(self, kind: str, layer: int) -> Flags:
        """Return which pages are initialized."""
        if kind == GRAD:
            return self.selections.touched[layer], self.selections.batch_size, self.pages.num_pages
        return self.selections.tables[layer], 0, 0

    def _is_quantized(self, kind: str, layer: int) -> bool:
        return self.pages.row(kind, layer).is_quantized

    def _page_bytes(self, kind: str, layer: int) -> int:
        return self.pages.page_bytes(kind, layer)

    def _working_bytes(self, kind: str, layer: int) -> int:
        """Return the bytes of a page in a buffer, in working precision."""
        return self.pages.layers[layer].working(kind).num_bytes * self.pages.page_size

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
