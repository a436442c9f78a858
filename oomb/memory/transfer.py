"""Copy between host pages and staging buffers on the GPU, in parallel with the computation and ahead of need.

There are three streams: the caller's, which computes, one that loads (to the GPU) and one that stores (to the host).
Only events order them:

  a load waits for the store that wrote what it reads, and for the last use of the buffer it fills;
  the computation waits for the load of a buffer it reads, and for the store of a buffer it writes;
  a store waits for the computation that filled its buffer.

Nothing here knows what the bytes mean. Without CUDA, copies are synchronous and events are None.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Event = Any
Copies = list[tuple[Tensor, Tensor]]
"""(destination, source) pairs."""
Work = Copies | Callable[[], None]
"""Copies, or a function that launches them (kernels or copy engines) and counts their bytes on the GPU."""


class CopyStreams:
    """One copy stream per direction, with counters of bytes and stalls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        self._copied_bytes = [0, 0]
        with torch.inference_mode(False):  # a tensor made in it could not be written later
            self.moved_bytes = torch.zeros(2, dtype=torch.int64, device=device)
            """Bytes that kernels have loaded and stored. The kernels count them."""
        self._waited_seconds = 0.0
        self._waits: deque[tuple[Event, Event]] = deque()
        if self.is_async:
            self.loads, self.stores = (torch.cuda.Stream(device) for _ in range(2))

    def load(self, work: Work, after: Iterable[Event] = ()) -> Event:
        """Start a copy to the GPU after the events in `after`, and return the event of its completion."""
        self._copied_bytes[0] += 0 if callable(work) else sum(dst.nbytes for dst, _ in work)
        return self._run(self.loads if self.is_async else None, work, after)

    def store(self, work: Work, after: Iterable[Event] = ()) -> Event:
        """Start a copy to the host after the events in `after`, and return the event of its completion."""
        self._copied_bytes[1] += 0 if callable(work) else sum(dst.nbytes for dst, _ in work)
        return self._run(self.stores if self.is_async else None, work, after)

    @property
    def loaded_bytes(self) -> int:
        return self._copied_bytes[0] + int(self.moved_bytes[0])

    @property
    def stored_bytes(self) -> int:
        return self._copied_bytes[1] + int(self.moved_bytes[1])

    def mark(self) -> Event:
        """Return an event for the current point of the computation."""
        return torch.cuda.current_stream(self.device).record_event() if self.is_async else None

    def wait(self, event: Event) -> None:
        """Make the computation wait for `event`, and count how long it stalls."""
        if event is None or event.query():
            return
        compute = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(compute)
        compute.wait_event(event)
        end.record(compute)
        self._waits.append((begin, end))
        self._count_waits()

    def finish(self, event: Event) -> None:
        """Block the CPU until `event`, before it reads what was copied to it."""
        if event is not None:
            event.synchronize()

    def drain(self) -> None:
        """Block the CPU until all copies are done, before memory they may touch is freed."""
        if self.is_async:
            torch.cuda.synchronize(self.device)

    @property
    def waited_seconds(self) -> float:
        """How long the computation has stalled for copies, as far as the GPU has got."""
        self._count_waits()
        return self._waited_seconds

    def reset(self) -> None:
        """Reset the counters."""
        self._count_waits()
        self._copied_bytes = [0, 0]
        self.moved_bytes.zero_()
        self._waited_seconds = 0.0
        self._waits.clear()

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._waited_seconds += begin.elapsed_time(end) / 1000

    def _run(self, stream: Any, work: Work, after: Iterable[Event]) -> Event:
        if stream is None:
            begin = time.perf_counter()
            _do(work)
            self._waited_seconds += time.perf_counter() - begin
            return None
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            try:
                _do(work)
            except BaseException:
                # Some copies may be running, and the caller gets no event for them.
                self.drain()
                raise
        return stream.record_event()


def _do(work: Work) -> None:
    if callable(work):
        work()
        return
    for dst, src in work:
        dst.copy_(src, non_blocking=True)


@dataclass(eq=False)
class Buffer:
    """One staging buffer."""

    bytes: Tensor
    free_after: Event = None
    """When the buffer may be overwritten."""


class BufferRing:
    """A few staging buffers of one size, used in turn."""

    def __init__(self, num_slots: int, buffer: Tensor) -> None:
        self.num_bytes = buffer.nbytes
        self.slot_bytes = buffer.nbytes // num_slots
        self.slots = [Buffer(part) for part in buffer.split(self.slot_bytes)] if self.slot_bytes else []
        self.free = deque(self.slots)

    def take(self) -> Buffer:
        return self.free.popleft()

    def give(self, slot: Buffer, free_after: Event) -> None:
        slot.free_after = free_after
        self.free.append(slot)


@dataclass(frozen=True)
class Load:
    """A request to fill a buffer.

    Args:
        key: Identifies the content.
        ring: Where the buffer comes from.
        pieces: (offset in the buffer, bytes on the host) pairs.
        after: Events to wait for first.
        gather: Fills the buffer instead of `pieces`, if only the GPU knows what to copy.
    """

    key: tuple[Any, ...]
    ring: BufferRing
    pieces: tuple[tuple[int, Tensor], ...]
    after: tuple[Event, ...] = field(default=(), compare=False)
    gather: Callable[[Tensor], None] | None = field(default=None, compare=False)


Issued = tuple[Load, Buffer, Event]
"""A load in flight, the buffer it fills, and the event of its completion."""


class Prefetcher:
    """Starts loads in the order in which they will be taken, as far ahead as there are free buffers.

    This order is only expected. If something else is taken, it is loaded on demand and the expected order is dropped.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams
        self._coming: Iterator[Load] = iter(())
        self._next: Load | None = None
        self._name: object = None
        self._issued: deque[Issued] = deque()
        self._started: dict[tuple[Any, ...], Issued] = {}
        """Loads in flight that are not part of the expected order, by key."""

    def start(self, load: Load) -> None:
        """Start a load outside the expected order, if there is a free buffer."""
        if load.ring.free and load.key not in self._started:
            self._started[load.key] = self._issue(load)

    def expect(self, loads: Iterable[Load], name: object = None) -> None:
        """Set the expected order. `name` identifies it for `is_expecting`."""
        self.forget()
        self._coming, self._name = iter(loads), name
        self._next = next(self._coming, None)
        self._pump()

    def is_expecting(self, name: object) -> bool:
        """Return whether the expected order of this name is still valid."""
        return self._name == name

    def take(self, load: Load) -> Buffer:
        """Return the filled buffer, which the computation may read and overwrite."""
        if load.key in self._started:
            _, slot, done = self._started.pop(load.key)
            self.streams.wait(done)
            return slot
        if not self._issued or self._issued[0][0].key != load.key:
            if not load.pieces and load.gather is None and load.ring.free:
                # Nothing to load, only a buffer to work in: the expected order stays valid.
                slot = load.ring.take()
                self.streams.wait(slot.free_after)
                return slot
            self.forget()
            self._issued.append(self._issue(load))
        _, slot, done = self._issued.popleft()
        self.streams.wait(done)
        return slot

    def give(self, ring: BufferRing, slot: Buffer, free_after: Event) -> None:
        """Take a buffer back, and start the next load."""
        ring.give(slot, free_after)
        self._pump()

    def _pump(self) -> None:
        while self._next is not None and self._next.ring.free:
            load, self._next = self._next, next(self._coming, None)
            self._issued.append(self._issue(load))

    def _issue(self, load: Load) -> Issued:
        slot = load.ring.take()
        after = slot.free_after, *load.after
        if load.gather is not None:
            return load, slot, self.streams.load(partial(load.gather, slot.bytes), after)
        if not load.pieces:
            return load, slot, slot.free_after
        copies = [(slot.bytes[at : at + src.nbytes], src) for at, src in load.pieces]
        return load, slot, self.streams.load(copies, after)

    def forget(self) -> None:
        """Drop the expected order.

        The computation waits for the loads in flight, because their pages may be freed and overwritten next, and
        whoever overwrites pages waits for the computation.
        """
        for load, slot, done in (*self._issued, *self._started.values()):
            self.streams.wait(done)
            load.ring.give(slot, done)
        self._issued.clear()
        self._started.clear()
        self._coming, self._next, self._name = iter(()), None, None
