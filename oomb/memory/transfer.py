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
"""Copies, or what makes them and counts them on the GPU: kernels that read there which ones, or copy engines."""


class CopyStreams:
    """Runs copies in order on a stream for each direction, and counts what it does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        self._copied_bytes = [0, 0]
        with torch.inference_mode(False):  # or else it could not be written outside of it
            self.moved_bytes = torch.zeros(2, dtype=torch.int64, device=device)
            """What kernels have loaded and stored, counted by them."""
        self._waited_seconds = 0.0
        self._waits: deque[tuple[Event, Event]] = deque()
        if self.is_async:
            self.loads, self.stores = (torch.cuda.Stream(device) for _ in range(2))

    def load(self, work: Work, after: Iterable[Event] = ()) -> Event:
        """Copies to the GPU once `after` has happened; the event says when it is done."""
        self._copied_bytes[0] += 0 if callable(work) else sum(dst.nbytes for dst, _ in work)
        return self._run(self.loads if self.is_async else None, work, after)

    def store(self, work: Work, after: Iterable[Event] = ()) -> Event:
        """Copies to the host once `after` has happened; the event says when it is done."""
        self._copied_bytes[1] += 0 if callable(work) else sum(dst.nbytes for dst, _ in work)
        return self._run(self.stores if self.is_async else None, work, after)

    @property
    def loaded_bytes(self) -> int:
        return self._copied_bytes[0] + int(self.moved_bytes[0])

    @property
    def stored_bytes(self) -> int:
        return self._copied_bytes[1] + int(self.moved_bytes[1])

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

    def finish(self, event: Event) -> None:
        """Waits for `event` on the host, which reads what was copied there."""
        if event is not None:
            event.synchronize()

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
                # Nobody gets an event for what has set out.
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
    """A staging buffer."""

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
    """What to bring into a buffer of `ring`, once all of `after` has happened: (offset in the buffer, bytes on the
    host) pairs, or what a kernel finds out by itself. The key says what it is."""

    key: tuple[Any, ...]
    ring: BufferRing
    pieces: tuple[tuple[int, Tensor], ...]
    after: tuple[Event, ...] = field(default=(), compare=False)
    gather: Callable[[Tensor], None] | None = field(default=None, compare=False)


Issued = tuple[Load, Buffer, Event]
"""A load under way, the buffer that it fills, and when it is done."""


class Prefetcher:
    """Starts loads in the order in which they will be asked for, as far ahead as there are free buffers.

    The order is a forecast: if something else is asked for, it is loaded then, and the forecast is dropped.
    """

    def __init__(self, copier: CopyStreams) -> None:
        self.streams = copier
        self._coming: Iterator[Load] = iter(())
        self._next: Load | None = None
        self._name: object = None
        self._issued: deque[Issued] = deque()
        self._started: dict[tuple[Any, ...], Issued] = {}
        """Asked for beside the forecast."""

    def start(self, load: Load) -> None:
        """This will be asked for soon, whatever else is forecast. Nothing happens if there is no free buffer."""
        if load.ring.free and load.key not in self._started:
            self._started[load.key] = self._issue(load)

    def expect(self, loads: Iterable[Load], name: object = None) -> None:
        """From now on these will be asked for, in this order. A name is for `is_expecting`."""
        self.forget()
        self._coming, self._name = iter(loads), name
        self._next = next(self._coming, None)
        self._pump()

    def is_expecting(self, name: object) -> bool:
        """Whether the forecast of this name still holds."""
        return self._name == name

    def take(self, load: Load) -> Buffer:
        """The buffer with what was asked for, ready for the computation to read and to overwrite."""
        if load.key in self._started:
            _, slot, done = self._started.pop(load.key)
            self.streams.wait(done)
            return slot
        if not self._issued or self._issued[0][0].key != load.key:
            if not load.pieces and load.gather is None and load.ring.free:
                # A buffer to work in, and nothing to bring: the forecast may still come true.
                slot = load.ring.take()
                self.streams.wait(slot.free_after)
                return slot
            self.forget()
            self._issued.append(self._issue(load))
        _, slot, done = self._issued.popleft()
        self.streams.wait(done)
        return slot

    def give(self, ring: BufferRing, slot: Buffer, free_after: Event) -> None:
        """Takes a buffer back."""
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
        """Drops the forecast. The pages that were on their way may be freed next, so the computation waits for them:
        who overwrites pages waits for the computation."""
        for load, slot, done in (*self._issued, *self._started.values()):
            self.streams.wait(done)
            load.ring.give(slot, done)
        self._issued.clear()
        self._started.clear()
        self._coming, self._next, self._name = iter(()), None, None
