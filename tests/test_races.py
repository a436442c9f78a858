"""Copies beside the computation: whatever runs late, the result is the same; and without one of the waits it is not.

On a CPU two things stand for a GPU's streams. `LateCopies` puts every copy off until somebody waits for it. `Clocks`
keeps vector clocks for the computation and both copy streams, watches every access to slabs and buffers, and reports
those that nothing orders: this finds missing waits of every kind, also those that only a late computation would show.
On a GPU the streams themselves are held up.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from checks import engine_for
from families import build, grads, random_ids
from test_memory import CHUNK, fill, keys, layer_spec, make_store
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oomb
from oomb.memory import PageStore, Tiers
from oomb.memory import store as store_module
from oomb.memory.store import ALIGNMENT, GRAD, KV, OUT
from oomb.memory.transfer import Copier, Copies, Event, Load, Prefetcher, Ring, Slot

CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class LateCopy:
    """A copy that has been asked for. It is its own event."""

    queue: deque[LateCopy]
    copies: Copies
    after: tuple[LateCopy | None, ...]
    is_done: bool = False


class LateCopies(Copier):
    """Runs copies as late as it may: when somebody waits for them, in the order of their stream."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queues: dict[str, deque[LateCopy]] = {"load": deque(), "store": deque()}
        self.num_late = 0

    def load(self, copies: Copies, after: Any = ()) -> Event:
        return self._enqueue("load", copies, after)

    def store(self, copies: Copies, after: Any = ()) -> Event:
        return self._enqueue("store", copies, after)

    def mark(self) -> None:
        """The computation is never late here."""

    def wait(self, event: LateCopy | None) -> None:
        while event is not None and not event.is_done:
            late = event.queue.popleft()
            for other in late.after:
                self.wait(other)
            for dst, src in late.copies:
                dst.copy_(src)
            late.is_done = True
            self.num_late += 1

    def drain(self) -> None:
        for queue in self.queues.values():
            while queue:
                self.wait(queue[-1])

    def _enqueue(self, name: str, copies: Copies, after: Any) -> LateCopy:
        late = LateCopy(self.queues[name], copies, tuple(after))
        late.queue.append(late)
        return late


COMPUTE, LOADS, STORES = range(3)


class Clocks(Copier):
    """Runs copies at once, and notes who knows of whom: an access is a race if another stream has touched the bytes
    before (one of the two writing) and no chain of events leads from there to here.

    clocks[a, b] is how far stream b has come for all that stream a knows; an event is what its stream knew.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.clocks = np.eye(3, dtype=np.int64)
        self.seen: dict[int, tuple[Any, np.ndarray]] = {}
        """By address of a slab: its storage, and when its bytes were last [read, written] by each stream."""
        self.races: list[str] = []
        self.is_copying = False

    def load(self, copies: Copies, after: Any = ()) -> Event:
        return self._copy(LOADS, copies, after)

    def store(self, copies: Copies, after: Any = ()) -> Event:
        return self._copy(STORES, copies, after)

    def mark(self) -> Event:
        return self._event(COMPUTE)

    def wait(self, event: Event) -> None:
        self._learn(COMPUTE, event)

    def drain(self) -> None:
        for event in [self._event(who) for who in (COMPUTE, LOADS, STORES)]:
            for who in (COMPUTE, LOADS, STORES):
                self._learn(who, event)

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

    def _copy(self, who: int, copies: Copies, after: Any) -> Event:
        for event in after:
            self._learn(who, event)
        self.is_copying = True
        for dst, src in copies:
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
    """Tells `clocks` what the computation reads and writes."""

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
                        self.clocks.touch(COMPUTE, x, writes)
        return out


Mutation = Callable[[Tiers, pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    """Takes one of the waits away."""
    MUTATIONS[function.__name__] = function
    return function


@mutation
def computation_ignores_load(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    prefetcher, take = tiers.prefetcher, tiers.prefetcher.take

    def mutated(load: Load) -> Slot:
        if prefetcher._issued and prefetcher._issued[0][0].key == load.key and load.pieces:
            prefetcher._issued[0] = (*prefetcher._issued[0][:2], None)
        return take(load)

    patch.setattr(prefetcher, "take", mutated)


@mutation
def load_ignores_store_of_its_pages(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    load = PageStore._load
    patch.setattr(PageStore, "_load", lambda *args: dataclasses.replace(load(*args), after=None))


def gives_back_without(tiers: Tiers, patch: pytest.MonkeyPatch, *names: str) -> None:
    give = tiers.prefetcher.give

    def mutated(ring: Ring, slot: Slot, free_after: Event) -> None:
        give(ring, slot, None if any(ring is tiers.rings.get(name) for name in names) else free_after)

    patch.setattr(tiers.prefetcher, "give", mutated)


@mutation
def load_ignores_use_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    gives_back_without(tiers, patch, KV, OUT)


@mutation
def load_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    issue = Prefetcher._issue

    def mutated(self: Prefetcher, load: Load) -> None:
        if load.ring is tiers.rings.get(GRAD) and load.pieces:
            load.ring.free[0].free_after = None
        issue(self, load)

    patch.setattr(Prefetcher, "_issue", mutated)


@mutation
def store_ignores_computation(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    store = tiers.copier.store
    patch.setattr(tiers.copier, "store", lambda copies, after: store(copies))


@mutation
def chunk_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    write = PageStore._write

    def mutated(self: PageStore, kind: str, layer: int, start: int, tensors: list[Tensor], ring_name: str) -> None:
        self._ring(ring_name).free[0].free_after = None
        write(self, kind, layer, start, tensors, ring_name)

    patch.setattr(PageStore, "_write", mutated)


@mutation
def fresh_gradient_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    issue = Prefetcher._issue

    def mutated(self: Prefetcher, load: Load) -> None:
        issue(self, load)
        if not load.pieces:
            self._issued[-1] = (*self._issued[-1][:2], None)

    patch.setattr(Prefetcher, "_issue", mutated)


LENGTH, CHUNK_SIZE = 140, 16
CONFIGS: list[dict[str, Any]] = [
    {"keep_attention": False, "checkpoint_layers": False},
    {"keep_attention": True, "checkpoint_layers": True},
    {"keep_attention": True, "checkpoint_layers": False, "gpu_memory": 10_000},
]
MODELS = [("llama", 1), ("llama", 3), ("mistral_sliding", 2)]
"""With one layer a load soon follows the store of its pages; with three, more stores than buffers are on their way."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks, so that more of them are on their way than there are buffers."""
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", 2 * CHUNK_SIZE)


@functools.lru_cache
def tiny(family: str, num_layers: int) -> Any:
    window = {"sliding_window": 50} if "sliding" in family else {}
    return build(family, dtype=torch.float32, num_hidden_layers=num_layers, **window)


def engine_of(model: Any, copier: Copier | None = None, chunk_size: int = CHUNK_SIZE, **config: Any) -> oomb.Engine:
    engine = engine_for(
        model,
        chunk_size,
        page_size=8,
        kernels="torch",
        fuse="off",
        **{"gpu_memory": 0, "keep_last_chunk": False, **config},
    )
    if copier is not None:
        engine.budget.tiers.copier = engine.budget.tiers.prefetcher.copier = copier
    return engine


def results(model: Any, engine: oomb.Engine, length: int = LENGTH) -> list[Tensor]:
    """Losses and gradients of two texts, whose passes are interleaved."""
    model.zero_grad()
    losses = [engine.loss(random_ids(1, n, seed=n)) for n in (length, length // 2)]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(g for g in grads(model).values() if g is not None)]


def are_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@functools.lru_cache
def expected_results(family: str, num_layers: int, index: int) -> list[Tensor]:
    model = copy.deepcopy(tiny(family, num_layers))
    return results(model, engine_of(model, **CONFIGS[index]))


def late_results(family: str, num_layers: int, index: int, mutate: Mutation | None = None) -> list[Tensor]:
    model, copier = copy.deepcopy(tiny(family, num_layers)), LateCopies()
    engine = engine_of(model, copier, **CONFIGS[index])
    with pytest.MonkeyPatch.context() as patch:
        if mutate is not None:
            mutate(engine.budget.tiers, patch)
        found = results(model, engine)
    assert copier.num_late > 20
    return found


@pytest.mark.parametrize("index", range(len(CONFIGS)))
@pytest.mark.parametrize(("family", "num_layers"), MODELS)
def test_late_copies_change_nothing(family: str, num_layers: int, index: int) -> None:
    assert are_equal(late_results(family, num_layers, index), expected_results(family, num_layers, index))


NEEDS_LATE_COMPUTATION = {"load_ignores_use_of_its_buffer", "store_ignores_computation"}


@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - NEEDS_LATE_COMPUTATION))
def test_without_a_wait_late_copies_change_the_result(name: str) -> None:
    assert any(
        not are_equal(late_results(*case, mutate=MUTATIONS[name]), expected_results(*case))
        for case in (("llama", 1, 0), ("llama", 3, 0))
    )


@contextmanager
def watched(tiers: Tiers) -> Iterator[Clocks]:
    clocks = tiers.copier
    assert isinstance(clocks, Clocks)
    with Watch(clocks):
        yield clocks


def races(family: str, num_layers: int, index: int, mutate: Mutation | None = None) -> list[str]:
    model = copy.deepcopy(tiny(family, num_layers))
    engine = engine_of(model, Clocks(), **CONFIGS[index])
    with pytest.MonkeyPatch.context() as patch, watched(engine.budget.tiers) as clocks:
        if mutate is not None:
            mutate(engine.budget.tiers, patch)
        found = results(model, engine)
    assert are_equal(found, expected_results(family, num_layers, index))
    assert len(clocks.seen) > 3 and (clocks.clocks.diagonal() > 20).all()
    return clocks.races


@pytest.mark.parametrize("index", range(len(CONFIGS)))
@pytest.mark.parametrize(("family", "num_layers"), MODELS)
def test_every_access_is_ordered(family: str, num_layers: int, index: int) -> None:
    assert races(family, num_layers, index) == []


@pytest.mark.parametrize(
    ("name", "race"),
    [
        ("computation_ignores_load", "the computation reads what a load may still touch"),
        ("load_ignores_store_of_its_pages", "a load reads what a store may still touch"),
        ("load_ignores_use_of_its_buffer", "a load writes what the computation may still touch"),
        ("load_ignores_store_of_its_buffer", "a load writes what a store may still touch"),
        ("store_ignores_computation", "a store reads what the computation may still touch"),
        ("chunk_ignores_store_of_its_buffer", "the computation writes what a store may still touch"),
        ("fresh_gradient_ignores_store_of_its_buffer", "the computation writes what a store may still touch"),
    ],
)
def test_without_a_wait_there_is_a_race(name: str, race: str) -> None:
    cases = (("llama", 1, 0), ("llama", 3, 0))
    assert any(race in races(*case, mutate=MUTATIONS[name]) for case in cases)


def forget_without_waiting(self: Prefetcher) -> None:
    for load, slot, done in self._issued:
        load.ring.give(slot, done)
    self._issued.clear()
    self._coming, self._next = iter(()), None


@pytest.mark.parametrize("waits", [True, False])
def test_pages_on_their_way_are_not_overwritten(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is closed while its pages are being loaded; another one gets them and stores into them."""
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", CHUNK)
    if not waits:
        monkeypatch.setattr(Prefetcher, "forget", forget_without_waiting)
    tiers = Tiers(CPU)
    tiers.copier = tiers.prefetcher.copier = Clocks()
    with watched(tiers) as clocks:
        for _ in range(2):
            store = make_store(tiers, layers={0: layer_spec()})
            k, *_ = fill(store)[0]
            store.expect_forward(store.capacity, store.capacity + CHUNK, kept=False)
            assert tiers.prefetcher._issued
            store.close()
        found = make_store(tiers, layers={0: layer_spec()})
        k, *_ = fill(found)[0]
        assert torch.equal(keys(found, found.capacity), k[:, :, : found.capacity])
    assert (clocks.races == []) is waits
    assert waits or "a store writes what a load may still touch" in clocks.races


def test_a_dropped_forecast_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is not what was expected, again and again, with copies as late as they may be."""
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", CHUNK)
    tiers = Tiers(CPU)
    tiers.copier = tiers.prefetcher.copier = LateCopies()
    store = make_store(tiers)
    filled = fill(store)
    for start in range(0, store.capacity + 1, CHUNK):
        store.expect_forward(start, start + CHUNK, kept=False)
        for layer in (3, 0):  # the other way round
            at = 0
            for at, k, v in store.segments(layer, 0, start):
                assert torch.equal(k, filled[layer][0][:, :, at : at + CHUNK])
                assert torch.equal(v, filled[layer][1][:, :, at : at + CHUNK])
            assert at == max(0, start - CHUNK)


GPU_LENGTH, GPU_CHUNK = 600, 64
LONG = 20_000_000
"""Cycles: about 10 ms of an H200, longer than Python takes for a layer of a tiny model."""
SHORT = 1_000_000


def gpu_llama(num_layers: int) -> Any:
    from test_gpu import wide_llama

    return wide_llama(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_hidden_layers=num_layers
    ).bfloat16()


def delay_copies(tiers: Tiers, patch: pytest.MonkeyPatch, *, loads: int, stores: int, seed: int | None = None) -> None:
    copier, run, draw = tiers.copier, tiers.copier._run, random.Random(seed)

    def late(stream: Any, copies: Copies, after: Any) -> Event:
        cycles = loads if stream is copier.loads else stores
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles if seed is None else draw.randrange(1, 2 * cycles))
        return run(stream, copies, after)

    patch.setattr(copier, "_run", late)


def delay_computation(tiers: Tiers, patch: pytest.MonkeyPatch, cycles: int, seed: int | None = None) -> None:
    """Before it uses a loaded buffer, fills one with a chunk's K and V, or adds to gradients."""
    draw = random.Random(seed)

    def sleep() -> None:
        torch.cuda._sleep(cycles if seed is None else draw.randrange(1, 2 * cycles))

    take, append, accumulate_ = tiers.prefetcher.take, PageStore.append, store_module.accumulate_

    def late_take(load: Load) -> Slot:
        slot = take(load)
        sleep()
        return slot

    def late_append(*args: Any) -> None:
        sleep()
        append(*args)

    def late_accumulate(*args: Any) -> None:
        sleep()
        accumulate_(*args)

    patch.setattr(tiers.prefetcher, "take", late_take)
    patch.setattr(PageStore, "append", late_append)
    patch.setattr(store_module, "accumulate_", late_accumulate)


@pytest.fixture
def gpu_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", 2 * GPU_CHUNK)


def gpu_results(model: Any, disturb: Callable[[Tiers, pytest.MonkeyPatch], None] | None = None, **config: Any) -> Any:
    config = {"chunk_size": GPU_CHUNK, "keep_attention": False, "checkpoint_layers": False, **config}
    engine = engine_of(model, **config)
    engine.reserve(1, GPU_LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        if disturb is not None:
            disturb(engine.budget.tiers, patch)
        found = results(model, engine, GPU_LENGTH)
        torch.cuda.synchronize()
    assert engine.stats.loaded_bytes > 0 and engine.stats.stored_bytes > 0
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"keep_attention": True},
        {"checkpoint_layers": True},
        {"keep_attention": True, "checkpoint_layers": True},
        {"chunk_size": 50},
        {"chunk_size": 128, "gpu_memory": 300_000},
    ],
    ids=str,
)
def test_late_streams_change_nothing(config: dict[str, Any], gpu_segments: None) -> None:
    model = gpu_llama(2)
    expected = gpu_results(model, **config)
    assert are_equal(gpu_results(model, **config), expected), "it does not even repeat itself"

    def late_copies(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_copies(tiers, patch, loads=SHORT, stores=SHORT, seed=1)

    def late_computation(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_computation(tiers, patch, SHORT, seed=2)

    def all_late(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_copies(tiers, patch, loads=SHORT, stores=2 * SHORT, seed=3)
        delay_computation(tiers, patch, SHORT, seed=4)

    for disturb in (late_copies, late_computation, all_late):
        assert are_equal(gpu_results(model, disturb, **config), expected), disturb.__name__


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "num_layers", "late"),
    [
        ("computation_ignores_load", 2, "loads"),
        ("load_ignores_store_of_its_pages", 1, "stores"),
        ("load_ignores_use_of_its_buffer", 2, "computation"),
        ("load_ignores_store_of_its_buffer", 2, "stores"),
        ("store_ignores_computation", 2, "computation"),
        ("chunk_ignores_store_of_its_buffer", 3, "stores"),
        ("fresh_gradient_ignores_store_of_its_buffer", 2, "stores"),
    ],
)
def test_without_a_wait_a_late_stream_changes_the_result(
    name: str, num_layers: int, late: str, gpu_segments: None
) -> None:
    model = gpu_llama(num_layers)

    def delay(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        if late == "computation":
            delay_computation(tiers, patch, LONG)
        else:
            delay_copies(tiers, patch, loads=LONG * (late == "loads"), stores=LONG * (late == "stores"))

    def delay_and_mutate(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay(tiers, patch)
        MUTATIONS[name](tiers, patch)

    expected = gpu_results(model)
    assert are_equal(gpu_results(model, delay), expected)
    assert not are_equal(gpu_results(model, delay_and_mutate), expected)
