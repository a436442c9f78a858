"""The bytes behind the pages: a few slabs per tier, allocated once and used again from step to step.

GPU slabs are read and written by the stream that computes, and by no other. Host slabs are pinned, so that copies run
beside the computation; on a machine without CUDA they are ordinary memory, and everything else is the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oomb.memory.host import HostSlab, avoid_gaps, free_gpu_bytes, free_host_bytes
from oomb.memory.pool import GPU, HOST, OutOfPages, PagePool, PageRun, PageTable
from oomb.memory.transfer import BufferRing, CopyStreams, Event, Prefetcher
from oomb.utils.units import gib

SPARE = 1.1
"""A slab on the GPU is used again for up to so many times fewer pages; a larger one is given up, and taken anew."""


class Arena:
    """The pages of one size in one tier, with their bytes."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pool = PagePool()
        self.slabs: list[tuple[int, Tensor, HostSlab | None]] = []
        """(first page, bytes, owner of the bytes)."""

    @property
    def num_bytes(self) -> int:
        return self.pool.num_pages * self.page_bytes

    def view(self, first: int, count: int) -> Tensor:
        """The bytes of consecutive pages."""
        base, slab, _ = next(s for s in reversed(self.slabs) if s[0] <= first)
        return slab[(first - base) * self.page_bytes : (first - base + count) * self.page_bytes]


Key = tuple[str, int]
"""A kind of pages: their tier and their size in bytes."""


class PageLease:
    """What one sequence has of the tiers: pages in columns, and pages promised to it that it has not taken yet."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int], tuple[int, PageTable]] = {}
        """Page size in bytes and pages, by (kind, layer)."""
        self.promised: Counter[Key] = Counter()


class Tiers:
    """All page memory of an engine, and the streams and buffers that move it."""

    def __init__(self, device: torch.device, host_limit: int | None = None) -> None:
        avoid_gaps(device)
        self.device, self.host_limit = device, host_limit
        self.streams = CopyStreams(device)
        self.prefetcher = Prefetcher(self.streams)
        self.arenas: dict[Key, Arena] = {}
        self.rings: dict[str, BufferRing] = {}
        self.promised: Counter[Key] = Counter()
        self.peak_bytes = {GPU: 0, HOST: 0}
        """Most bytes of pages in use at once."""
        self.orphaned: deque[PageLease] = deque()
        """Of sequences that died unclosed. Python may find them dead at any moment, so they only leave word here."""
        self.left: Event = None
        """When the latest pass was at its end."""

    def reserve(self, holding: PageLease, num_pages: Mapping[Key, int]) -> None:
        """Promises pages. Allocates slabs for them where needed, all or nothing."""
        self.collect()
        self._release_idle(num_pages)
        short = {key: missing for key, count in num_pages.items() if (missing := count - self._num_open(key)) > 0}
        made: list[tuple[Key, int, Tensor, HostSlab | None]] = []
        for key, missing in short.items():
            host = HostSlab(missing * key[1], self.device) if key[0] == HOST else None
            made.append((key, missing, self.allocate(missing * key[1], "pages") if host is None else host.bytes, host))
        for key, missing, slab, owner in made:
            arena = self.arenas.setdefault(key, Arena(key[1]))
            arena.slabs.append((arena.pool.grow(missing), slab, owner))
        holding.promised.update(num_pages)
        self.promised.update(num_pages)
        # Another stream may have used these slabs last.
        self.streams.wait(self.left)

    def _release_idle(self, num_pages: Mapping[Key, int]) -> None:
        """Gives up slabs that nobody uses and whose memory was counted as free in the plan for `num_pages`: on the GPU
        all that are not of the size asked for; pinned memory, which is dear to take again, only for want of memory, and
        then also where there is more of it than is asked for."""
        idle = [key for key in self.arenas if self._is_idle(key)]
        for key in idle:
            wanted = num_pages.get(key, 0)
            if key[0] == GPU and not wanted <= self.arenas[key].pool.num_pages <= SPARE * wanted:
                del self.arenas[key]
        on_host = {key: count for key, count in num_pages.items() if key[0] == HOST}
        # Those that nobody wants first, then those of which less is wanted: these are made anew.
        for key in sorted((key for key in idle if key[0] == HOST), key=lambda key: num_pages.get(key, 0) > 0):
            missing = sum(max(0, count - self._num_open(wanted)) * wanted[1] for wanted, count in on_host.items())
            if missing > self._host_room() and self.arenas[key].pool.num_pages > num_pages.get(key, 0):
                del self.arenas[key]
        if all(map(self._is_idle, self.arenas)) and not any(on_host.values()):
            self.release_rings()

    def _host_room(self) -> int:
        """Bytes of host memory that slabs may still take."""
        held = sum(arena.num_bytes for (tier, _), arena in self.arenas.items() if tier == HOST)
        return free_host_bytes() if self.host_limit is None else min(free_host_bytes(), self.host_limit - held)

    def release_rings(self) -> None:
        """Gives up the staging buffers."""
        if self.rings:
            self.prefetcher.forget()
            self.streams.drain()
            self.rings.clear()

    def release(self) -> None:
        """Gives up all memory that no sequence uses."""
        self.collect()
        for key in [key for key in self.arenas if self._is_idle(key)]:
            del self.arenas[key]
        if not self.arenas:
            self.release_rings()

    def end_pass(self) -> None:
        """A pass has come to its end, well or not: nobody holds a buffer, and who comes next waits for it."""
        self.prefetcher.forget()
        for ring in self.rings.values():
            if len(ring.free) < len(ring.slots):
                # An interrupt came between the taking of a buffer and its return.
                self.streams.drain()
                ring.free = deque(ring.slots)
        self.left = self.streams.mark()

    def take(self, holding: PageLease, kind: tuple[str, int], tier: str, first: int, end: int) -> None:
        """Gives the column `kind` of the holding its pages `first` to `end` - 1, out of what was promised."""
        page_bytes, column = holding.tables[kind]
        key = tier, page_bytes
        assert holding.promised[key] >= end - first, "more pages than were promised"
        for start, count in self.arenas[key].pool.take(end - first):
            column.add(PageRun(tier, start, count, first))
            first += count
            holding.promised[key] -= count
            self.promised[key] -= count
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.used_bytes(tier))

    def free_from(self, holding: PageLease, first: int) -> None:
        """Takes back the pages from `first` on, of all columns."""
        for page_bytes, column in holding.tables.values():
            for run in column.free_from(first):
                self.arenas[run.tier, page_bytes].pool.give(run.first, run.count)

    def close(self, holding: PageLease) -> None:
        """Takes back everything."""
        self.free_from(holding, 0)
        self.promised.subtract(holding.promised)
        holding.promised.clear()

    def collect(self) -> None:
        """Takes back what abandoned sequences hold."""
        while self.orphaned:
            self.close(self.orphaned.popleft())

    def view(self, page_bytes: int, run: PageRun) -> Tensor:
        return self.arenas[run.tier, page_bytes].view(run.first, run.count)

    def ring(self, name: str, num_slots: int, slot_bytes: int) -> BufferRing:
        """Staging buffers, made anew if larger ones are needed."""
        ring = self.rings.get(name)
        if ring is None or ring.slot_bytes < slot_bytes:
            self.prefetcher.forget()
            self.streams.drain()
            self.rings.pop(name, None)
            ring = self.rings[name] = BufferRing(num_slots, self.allocate(num_slots * slot_bytes, "staging buffers"))
        return ring

    def used_bytes(self, tier: str) -> int:
        return sum(a.pool.num_used * a.page_bytes for (name, _), a in self.arenas.items() if name == tier)

    def held_bytes(self, tier: str) -> int:
        """Bytes of pages that sequences have taken or been promised."""
        self.collect()
        return self.used_bytes(tier) + sum(n * size for (name, size), n in self.promised.items() if name == tier)

    def idle_bytes(self, tier: str) -> int:
        """Bytes of slabs and buffers that `reserve` gives up if it must."""
        self.collect()
        slabs = sum(arena.num_bytes for key, arena in self.arenas.items() if key[0] == tier and self._is_idle(key))
        return slabs + (sum(ring.num_bytes for ring in self.rings.values()) if tier == GPU else 0)

    def reset_counters(self) -> None:
        self.streams.reset()
        self.peak_bytes = {tier: self.used_bytes(tier) for tier in (GPU, HOST)}

    def _is_idle(self, key: Key) -> bool:
        return not self.arenas[key].pool.num_used and not self.promised[key]

    def _num_open(self, key: Key) -> int:
        """Free pages that nobody has been promised."""
        return self.arenas[key].pool.num_free - self.promised[key] if key in self.arenas else 0

    def table(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the model's device for what is known of pages, beside them."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.allocate(num_bytes, "page tables").view(dtype).view(shape)

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Allocate bytes on the model's device, or raise `OutOfPages` saying what they are for."""
        return allocate(num_bytes, self.device, purpose, fix="lower gpu_memory or the context")


def allocate(num_bytes: int, device: torch.device, purpose: str, fix: str) -> Tensor:
    """Allocate bytes on a device, or raise `OutOfPages` with the numbers.

    Args:
        purpose: Completes "cannot allocate 1.5 GiB for ...".
        fix: What to do if there is not enough memory.
    """
    try:
        # Outside inference mode: a tensor made in it could not be written later.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, no class of its own on a CPU
        free = free_gpu_bytes(device)
        raise OutOfPages(
            f"cannot allocate {gib(num_bytes)} for {purpose} on {device}: "
            f"{gib(free_host_bytes() if free is None else free)} are free, perhaps fragmented; {fix}"
        ) from error
