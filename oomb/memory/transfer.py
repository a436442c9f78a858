"""Copies between host pages and staging buffers on the GPU, beside the computation and ahead of need.

Three streams: the caller's, which computes; one that loads (into the GPU); one that stores (out of it). They meet in
events only:

  a load waits for the store that wrote what it reads, and for the last use of the buffer it fills;
  a computation waits for the load of the buffer it reads, and for the store of the buffer it writes;
  a store waits for the computation that filled its buffer.

Nothing here knows what the bytes mean. Without CUDA every copy is done at once and events are None.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Event = Any
Copies = list[tuple[Tensor, Tensor]]
"""(destination, source) pairs."""


class Copier:
    """Runs copies in order on a stream for each direction, and counts what it does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        self.loaded_bytes = self.stored_bytes = 0
        self._waited_seconds = 0.0
        self._waits: deque[tuple[Event, Event]] = deque()
        if self.is_async:
            self.loads, self.stores = (torch.cuda.Stream(device) for _ in range(2))

    def load(self, copies: Copies, after: Iterable[Event] = ()) -> Event:
        """Copies to the GPU once `after` has happened; the event says when it is done."""
        self.loaded_bytes += sum(dst.nbytes for dst, _ in copies)
        return self._run(self.loads if self.is_async else None, copies, after)

    def store(self, copies: Copies, after: Iterable[Event] = ()) -> Event:
        """Copies to the host once `after` has happened; the event says when it is done."""
        self.stored_bytes += sum(dst.nbytes for dst, _ in copies)
        return self._run(self.stores if self.is_async else None, copies, after)

    def mark(self) -> Event:
        """The present point of the computation."""
        return torch.cuda.current_stream(self.device).record_event() if self.is_async else None

    def wait(self, event: Event) -> None:
        """The computation goes on once `event` has happened. How long that holds it up is counted."""
        if event is None or event.query():
            return
        compute = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(compute)
        compute.wait_event(event)
        end.record(compute)
        self._waits.append((begin, end))
        self._count_waits()

    def drain(self) -> None:
        """Waits for everything, on the host: before memory that copies may still touch is given away."""
        if self.is_async:
            torch.cuda.synchronize(self.device)

    @property
    def waited_seconds(self) -> float:
        """How long the computation stood still for copies, up to the last that the GPU has come to."""
        self._count_waits()
        return self._waited_seconds

    def reset(self) -> None:
        """Counts from zero again."""
        self._count_waits()
        self.loaded_bytes = self.stored_bytes = 0
        self._waited_seconds = 0.0
        self._waits.clear()

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._waited_seconds += begin.elapsed_time(end) / 1000

    def _run(self, stream: Any, copies: Copies, after: Iterable[Event]) -> Event:
        if stream is None:
            begin = time.perf_counter()
            for dst, src in copies:
                dst.copy_(src)
            self._waited_seconds += time.perf_counter() - begin
            return None
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            for dst, src in copies:
                dst.copy_(src, non_blocking=True)
        return stream.record_event()


@dataclass(eq=False)
class Slot:
    """A staging buffer."""

    bytes: Tensor
    free_after: Event = None
    """When the buffer may be overwritten."""


class Ring:
    """A few staging buffers of one size, used in turn."""

    def __init__(self, num_slots: int, buffer: Tensor) -> None:
        self.num_bytes = buffer.nbytes
        self.slot_bytes = buffer.nbytes // num_slots
        self.slots = [Slot(part) for part in buffer.split(self.slot_bytes)] if self.slot_bytes else []
        self.free = deque(self.slots)

    def take(self) -> Slot:
        return self.free.popleft()

    def give(self, slot: Slot, free_after: Event) -> None:
        slot.free_after = free_after
        self.free.append(slot)


@dataclass(frozen=True)
class Load:
    """What to bring into a buffer of `ring`, once `after` has happened: (offset in the buffer, bytes on the host)
    pairs. The key says what it is."""

    key: tuple[Any, ...]
    ring: Ring
    pieces: tuple[tuple[int, Tensor], ...]
    after: Event = field(default=None, compare=False)


class Prefetcher:
    """Starts loads in the order in which they will be asked for, as far ahead as there are free buffers.

    The order is a forecast: if something else is asked for, it is loaded then, and the forecast is dropped.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._coming: Iterator[Load] = iter(())
        self._next: Load | None = None
        self._issued: deque[tuple[Load, Slot, Event]] = deque()

    def expect(self, loads: Iterable[Load]) -> None:
        """From now on these will be asked for, in this order."""
        self.forget()
        self._coming = iter(loads)
        self._next = next(self._coming, None)
        self._pump()

    def take(self, load: Load) -> Slot:
        """The buffer with what was asked for, ready for the computation to read and to overwrite."""
        if not self._issued or self._issued[0][0].key != load.key:
            if not load.pieces and load.ring.free:
                # A buffer to work in, and nothing to bring: the forecast may still come true.
                slot = load.ring.take()
                self.copier.wait(slot.free_after)
                return slot
            self.forget()
            self._issue(load)
        _, slot, done = self._issued.popleft()
        self.copier.wait(done)
        return slot

    def give(self, ring: Ring, slot: Slot, free_after: Event) -> None:
        """Takes a buffer back."""
        ring.give(slot, free_after)
        self._pump()

    def _pump(self) -> None:
        while self._next is not None and self._next.ring.free:
            load, self._next = self._next, next(self._coming, None)
            self._issue(load)

    def _issue(self, load: Load) -> None:
        slot = load.ring.take()
        done = slot.free_after
        if load.pieces:
            copies = [(slot.bytes[at : at + src.nbytes], src) for at, src in load.pieces]
            done = self.copier.load(copies, after=(slot.free_after, load.after))
        self._issued.append((load, slot, done))

    def forget(self) -> None:
        """Drops the forecast. The pages that were on their way may be freed next, so the computation waits for them:
        who overwrites pages waits for the computation."""
        for load, slot, done in self._issued:
            self.copier.wait(done)
            load.ring.give(slot, done)
        self._issued.clear()
        self._coming, self._next = iter(()), None
