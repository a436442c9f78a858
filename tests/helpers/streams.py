"""Emulate a GPU's streams on a CPU, detect races, and remove each of the waits between streams.

`LateCopies` delays every copy until somebody waits for it. `Clocks` keeps vector clocks for the computation and both
copy streams, watches every access to slabs and buffers, and reports unordered ones. That finds every kind of missing
wait, even those that only a late computation would show.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomb.memory.page_access import PageAccess
from oomb.memory.rows import ALIGNMENT, GRAD, KV, OUT
from oomb.memory.tiers import Tiers
from oomb.memory.transfer import Buffer, BufferRing, CopyStreams, Event, Issued, Load, Prefetcher, Work

CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class LateCopy:
    """A copy that has not run yet. It is its own event."""

    queue: deque[LateCopy]
    work: Work
    after: tuple[LateCopy | None, ...]
    is_done: bool = False


class LateCopies(CopyStreams):
    """Runs copies as late as possible: when somebody waits for them, in stream order."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queues: dict[str, deque[LateCopy]] = {"load": deque(), "store": deque()}
        self.num_late = 0

    def load(self, work: Work, after: Any = ()) -> Event:
        return self._enqueue("load", work, after)

    def store(self, work: Work, after: Any = ()) -> Event:
        return self._enqueue("store", work, after)

    def mark(self) -> None:
        """The computation is never late here."""

    def wait(self, event: LateCopy | None) -> None:
        while event is not None and not event.is_done:
            late = event.queue.popleft()
            for other in late.after:
                self.wait(other)
            if callable(late.work):
                late.work()
            else:
                for dst, src in late.work:
                    dst.copy_(src)
            late.is_done = True
            self.num_late += 1

    def finish(self, event: LateCopy | None) -> None:
        self.wait(event)

    def drain(self) -> None:
        for queue in self.queues.values():
            while queue:
                self.wait(queue[-1])

    def _enqueue(self, name: str, work: Work, after: Any) -> LateCopy:
        late = LateCopy(self.queues[name], work, tuple(after))
        late.queue.append(late)
        return late


COMPUTE, LOADS, STORES = range(3)


class Clocks(CopyStreams):
    """Runs copies at once and detects races with vector clocks.

    An access is a race if another stream touched the same bytes, one of the two writing, and no chain of events orders
    them. clocks[a, b] is how far stream a knows stream b to be; an event is a copy of its stream's row.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.clocks = np.eye(3, dtype=np.int64)
        self.seen: dict[int, tuple[Any, np.ndarray]] = {}
        """By address of a slab: its storage, and when each stream last [read, wrote] its bytes."""
        self.races: list[str] = []
        self.who = COMPUTE
        """The stream whose work is running."""
        self.is_copying = False

    def load(self, work: Work, after: Any = ()) -> Event:
        return self._do(LOADS, work, after)

    def store(self, work: Work, after: Any = ()) -> Event:
        return self._do(STORES, work, after)

    def mark(self) -> Event:
        return self._event(COMPUTE)

    def wait(self, event: Event) -> None:
        self._learn(COMPUTE, event)

    def finish(self, event: Event) -> None:
        # Everything that is launched on any stream from now on comes after the event.
        for who in (COMPUTE, LOADS, STORES):
            self._learn(who, event)

    def drain(self) -> None:
        for event in [self._event(who) for who in (COMPUTE, LOADS, STORES)]:
            self.finish(event)

    def track(self, slab: Tensor) -> None:
        storage = slab.untyped_storage()
        size = -(-storage.nbytes() // ALIGNMENT)
        self.seen.setdefault(storage.data_ptr(), (storage, np.zeros((2, 3, size), dtype=np.int64)))

    def touch(self, who: int, x: Tensor, writes: bool) -> None:
        _, last = self.seen.get(x.untyped_storage().data_ptr(), (None, None))
        if last is None or not x.numel():
            return
        first = x.storage_offset()
        end = first + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        span = slice(first * x.itemsize // ALIGNMENT, -(-end * x.itemsize // ALIGNMENT))
        for other in {COMPUTE, LOADS, STORES} - {who}:
            latest = last[0 if writes else 1 :, other, span].max()
            if latest > self.clocks[who, other]:
                names = ("the computation", "a load", "a store")
                self.races.append(f"{names[who]} {'writes' if writes else 'reads'} what {names[other]} may still touch")
        last[int(writes), who, span] = self.clocks[who, who]

    def _do(self, who: int, work: Work, after: Any) -> Event:
        for event in after:
            self._learn(who, event)
        if callable(work):
            self.who = who
            work()
            self.who = COMPUTE
            return self._event(who)
        self.is_copying = True
        for dst, src in work:
            self.track(dst)
            self.track(src)
            self.touch(who, src, writes=False)
            self.touch(who, dst, writes=True)
            dst.copy_(src)
        self.is_copying = False
        return self._event(who)

    def _event(self, who: int) -> Event:
        known = self.clocks[who].copy()
        self.clocks[who, who] += 1
        return known

    def _learn(self, who: int, event: Event) -> None:
        if event is not None:
            self.clocks[who] = np.maximum(self.clocks[who], event)


class Watch(TorchDispatchMode):
    """Reports to `clocks` what the computation and the emulated kernels of other streams read and write."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.clocks.is_copying:
            return out
        if func is torch.ops.aten.empty.memory_format and out.dtype == torch.uint8:
            self.clocks.track(out)
        elif not func.is_view:
            given = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
            for argument in func._schema.arguments:
                for x in tree_leaves(given.get(argument.name)):
                    if isinstance(x, Tensor):
                        writes = argument.alias_info is not None and argument.alias_info.is_write
                        self.clocks.touch(self.clocks.who, x, writes)
        return out


Mutation = Callable[[Tiers, pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """Register a function that removes one of the waits."""
    MUTATIONS[function.__name__] = function
    return function


@mutation
def computation_ignores_load(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    prefetcher, take = tiers.prefetcher, tiers.prefetcher.take

    def mutated(load: Load) -> Buffer:
        if prefetcher._issued and prefetcher._issued[0][0].key == load.key and load.pieces:
            prefetcher._issued[0] = (*prefetcher._issued[0][:2], None)
        return take(load)

    patch.setattr(prefetcher, "take", mutated)


@mutation
def load_ignores_store_of_its_pages(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    load = PageAccess.load
    patch.setattr(PageAccess, "load", lambda *args: dataclasses.replace(load(*args), after=()))


def gives_back_without(tiers: Tiers, patch: pytest.MonkeyPatch, *names: str) -> None:
    give = tiers.prefetcher.give

    def mutated(ring: BufferRing, slot: Buffer, free_after: Event) -> None:
        give(ring, slot, None if any(ring is tiers.rings.get(name) for name in names) else free_after)

    patch.setattr(tiers.prefetcher, "give", mutated)


@mutation
def load_ignores_use_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    gives_back_without(tiers, patch, KV, OUT)


@mutation
def load_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    issue = Prefetcher._issue

    def mutated(self: Prefetcher, load: Load) -> Issued:
        if load.ring is tiers.rings.get(GRAD) and load.pieces:
            load.ring.free[0].free_after = None
        return issue(self, load)

    patch.setattr(Prefetcher, "_issue", mutated)


@mutation
def store_ignores_computation(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    store = tiers.streams.store
    patch.setattr(tiers.streams, "store", lambda copies, after: store(copies))


@mutation
def chunk_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    write = PageAccess.write

    def mutated(self: PageAccess, kind: str, layer: int, start: int, tensors: list[Tensor], ring_name: str) -> None:
        self.ring(ring_name).free[0].free_after = None
        write(self, kind, layer, start, tensors, ring_name)

    patch.setattr(PageAccess, "write", mutated)


@mutation
def fresh_gradient_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    issue = Prefetcher._issue

    def mutated(self: Prefetcher, load: Load) -> Issued:
        issued = issue(self, load)
        return issued if load.pieces else (*issued[:2], None)

    patch.setattr(Prefetcher, "_issue", mutated)
