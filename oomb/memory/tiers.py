"""Hold the bytes of all pages in GPU and host memory: a few slabs per tier, reused from step to step.

Only the compute stream touches GPU slabs. Host slabs are pinned, so that copies overlap with the computation; without
CUDA they are ordinary memory, and everything else is the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oomb.memory.host import HostSlab, free_gpu_bytes, free_host_bytes, use_expandable_segments
from oomb.memory.pool import GPU, HOST, OutOfPages, PagePool, PageRun, PageTable
from oomb.memory.transfer import BufferRing, CopyStreams, Event, Prefetcher
from oomb.utils.units import gib

SPARE = 1.1
"""Reuse a GPU slab that is up to this many times too large; otherwise free it and allocate a new one."""


class Arena:
    """All slabs of one page size in one tier."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pool = PagePool()
        self.slabs: list[tuple[int, Tensor, HostSlab | None]] = []
        """(first page, bytes, owner of the bytes)."""

    @property
    def num_bytes(self) -> int:
        return self.pool.num_pages * self.page_bytes

    def view(self, first: int, count: int) -> Tensor:
        """Return the bytes of consecutive pages."""
        base, slab, _ = next(s for s in reversed(self.slabs) if s[0] <= first)
        return slab[(first - base) * self.page_bytes : (first - base + count) * self.page_bytes]


ArenaKey = tuple[str, int]
"""Which arena: tier and page size in bytes."""


class PageLease:
    """The pages of one sequence: those it has taken, and those promised to it."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int], tuple[int, PageTable]] = {}
        """Page size in bytes and page table, by (kind, layer)."""
        self.promised: Counter[ArenaKey] = Counter()


class Tiers:
    """All page memory of an engine, with the streams and staging buffers that move it.

    Args:
        device: The model's device.
        host_limit: Maximum bytes of pinned host memory; None: what the system has.
    """

    def __init__(self, device: torch.device, host_limit: int | None = None) -> None:
        use_expandable_segments(device)
        self.device, self.host_limit = device, host_limit
        self.streams = CopyStreams(device)
        self.prefetcher = Prefetcher(self.streams)
        self.arenas: dict[ArenaKey, Arena] = {}
        self.rings: dict[str, BufferRing] = {}
        self.promised: Counter[ArenaKey] = Counter()
        self.peak_bytes = {GPU: 0, HOST: 0}
        """Peak number of bytes of pages in use."""
        self.orphaned: deque[PageLease] = deque()
        """Leases of sequences dropped without `close`. Finalizers can run at any moment, so they only append here."""
        self.pass_done: Event = None
        """When the latest pass ended."""

    def reserve(self, lease: PageLease, num_pages: Mapping[ArenaKey, int]) -> None:
        """Promise pages to a lease, and allocate slabs for them if needed: all of them or none."""
        self.collect()
        self._release_idle(num_pages)
        short = {key: missing for key, count in num_pages.items() if (missing := count - self._num_unpromised(key)) > 0}
        made: list[tuple[ArenaKey, int, Tensor, HostSlab | None]] = []
        for key, missing in short.items():
            host = HostSlab(missing * key[1], self.device) if key[0] == HOST else None
            made.append((key, missing, self.allocate(missing * key[1], "pages") if host is None else host.bytes, host))
        for key, missing, slab, owner in made:
            arena = self.arenas.setdefault(key, Arena(key[1]))
            arena.slabs.append((arena.pool.grow(missing), slab, owner))
        lease.promised.update(num_pages)
        self.promised.update(num_pages)
        # The previous pass may have used these slabs on another stream.
        self.streams.wait(self.pass_done)

    def _release_idle(self, num_pages: Mapping[ArenaKey, int]) -> None:
        """Free unused slabs, whose memory the placement behind `num_pages` counted as available.

        GPU slabs go unless they have the requested size. Pinned memory is expensive to allocate again, so host slabs
        go only if memory is short; then slabs that are larger than requested go, too.
        """
        idle = [key for key in self.arenas if self._is_idle(key)]
        for key in idle:
            wanted = num_pages.get(key, 0)
            if key[0] == GPU and not wanted <= self.arenas[key].pool.num_pages <= SPARE * wanted:
                del self.arenas[key]
        on_host = {key: count for key, count in num_pages.items() if key[0] == HOST}
        # First the slabs that are not requested at all, then those that are too large.
        for key in sorted((key for key in idle if key[0] == HOST), key=lambda key: num_pages.get(key, 0) > 0):
            missing = sum(max(0, count - self._num_unpromised(wanted)) * wanted[1] for wanted, count in on_host.items())
            if missing > self._available_host_bytes() and self.arenas[key].pool.num_pages > num_pages.get(key, 0):
                del self.arenas[key]
        if all(map(self._is_idle, self.arenas)) and not any(on_host.values()):
            self.release_rings()

    def _available_host_bytes(self) -> int:
        """Return how much host memory slabs can still take."""
        held = sum(arena.num_bytes for (tier, _), arena in self.arenas.items() if tier == HOST)
        return free_host_bytes() if self.host_limit is None else min(free_host_bytes(), self.host_limit - held)

    def release_rings(self) -> None:
        """Free the staging buffers."""
        if self.rings:
            self.prefetcher.forget()
            self.streams.drain()
            self.rings.clear()

    def release(self) -> None:
        """Free all memory that no sequence uses."""
        self.collect()
        for key in [key for key in self.arenas if self._is_idle(key)]:
            del self.arenas[key]
        if not self.arenas:
            self.release_rings()

    def end_pass(self) -> None:
        """End a pass, successful or not: take all buffers back, and let the next user of the memory wait for it."""
        self.prefetcher.forget()
        for ring in self.rings.values():
            if len(ring.free) < len(ring.slots):
                # An interrupt came between taking a buffer and giving it back.
                self.streams.drain()
                ring.free = deque(ring.slots)
        self.pass_done = self.streams.mark()

    def take(self, lease: PageLease, table_key: tuple[str, int], tier: str, first: int, end: int) -> None:
        """Move pages [first, end) of a (kind, layer) from promised to taken."""
        page_bytes, table = lease.tables[table_key]
        key = tier, page_bytes
        assert lease.promised[key] >= end - first, "more pages taken than promised"
        for start, count in self.arenas[key].pool.take(end - first):
            table.add(PageRun(tier, start, count, first))
            first += count
            lease.promised[key] -= count
            self.promised[key] -= count
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.used_bytes(tier))

    def free_from(self, lease: PageLease, first: int) -> None:
        """Take back the pages from `first` on, of all kinds and layers."""
        for page_bytes, table in lease.tables.values():
            for run in table.free_from(first):
                self.arenas[run.tier, page_bytes].pool.give(run.first, run.count)

    def close(self, lease: PageLease) -> None:
        """Take back all pages and promises."""
        self.free_from(lease, 0)
        self.promised.subtract(lease.promised)
        lease.promised.clear()

    def collect(self) -> None:
        """Take back the pages of dropped sequences."""
        while self.orphaned:
            self.close(self.orphaned.popleft())

    def view(self, page_bytes: int, run: PageRun) -> Tensor:
        return self.arenas[run.tier, page_bytes].view(run.first, run.count)

    def ring(self, name: str, num_slots: int, slot_bytes: int) -> BufferRing:
        """Return the staging buffers of this name, reallocated if larger ones are needed."""
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
        """Return the bytes of pages that sequences have taken or been promised."""
        self.collect()
        return self.used_bytes(tier) + sum(n * size for (name, size), n in self.promised.items() if name == tier)

    def idle_bytes(self, tier: str) -> int:
        """Return the bytes of slabs and buffers that `reserve` can free."""
        self.collect()
        slabs = sum(arena.num_bytes for key, arena in self.arenas.items() if key[0] == tier and self._is_idle(key))
        return slabs + (sum(ring.num_bytes for ring in self.rings.values()) if tier == GPU else 0)

    def reset_counters(self) -> None:
        self.streams.reset()
        self.peak_bytes = {tier: self.used_bytes(tier) for tier in (GPU, HOST)}

    def _is_idle(self, key: ArenaKey) -> bool:
        return not self.arenas[key].pool.num_used and not self.promised[key]

    def _num_unpromised(self, key: ArenaKey) -> int:
        """Return how many free pages are not promised to anybody."""
        return self.arenas[key].pool.num_free - self.promised[key] if key in self.arenas else 0

    def table(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a table on the model's device."""
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
