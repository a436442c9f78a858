"""Check the order of copies and computation: delays do not change the result, but removing any wait does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from checks import engine_for
from families import build
from races import CHUNK_SIZE, SHORT, are_equal, delay_computation, delay_copies, results
from stores import CHUNK, CPU, fill, keys, layer_spec, make_store
from streams import MUTATIONS, Clocks, LateCopies, Mutation, Watch
from torch import Tensor

import oomb
from oomb.memory import rows as rows_module
from oomb.memory.tiers import Tiers
from oomb.memory.transfer import CopyStreams, Prefetcher

CONFIGS: list[dict[str, Any]] = [
    {"keep_attention": False, "checkpoint_layers": False},
    {"keep_attention": True, "checkpoint_layers": True},
    {"keep_attention": True, "checkpoint_layers": False, "gpu_memory": 10_000},
]
MODELS = [("llama", 1), ("llama", 3), ("mistral_sliding", 2)]
"""With one layer, a load soon follows the store of its pages; with three, more stores than buffers are in flight."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two chunks, so that more of them are in flight than there are buffers."""
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", 2 * CHUNK_SIZE)


@functools.lru_cache
def tiny(family: str, num_layers: int) -> Any:
    window = {"sliding_window": 50} if "sliding" in family else {}
    return build(family, dtype=torch.float32, num_hidden_layers=num_layers, **window)


def engine_of(
    model: Any, copier: CopyStreams | None = None, chunk_size: int = CHUNK_SIZE, **config: Any
) -> oomb.Engine:
    engine = engine_for(
        model,
        chunk_size,
        page_size=8,
        kernels="torch",
        fuse="off",
        **{"gpu_memory": 0, "keep_last_chunk": False, **config},
    )
    if copier is not None:
        engine.allocator.tiers.streams = engine.allocator.tiers.prefetcher.streams = copier
    return engine


@functools.lru_cache
def expected_results(family: str, num_layers: int, index: int) -> list[Tensor]:
    model = copy.deepcopy(tiny(family, num_layers))
    return results(model, engine_of(model, **CONFIGS[index]))


def late_results(family: str, num_layers: int, index: int, mutate: Mutation | None = None) -> list[Tensor]:
    model, copier = copy.deepcopy(tiny(family, num_layers)), LateCopies()
    engine = engine_of(model, copier, **CONFIGS[index])
    with pytest.MonkeyPatch.context() as patch:
        if mutate is not None:
            mutate(engine.allocator.tiers, patch)
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
    clocks = tiers.streams
    assert isinstance(clocks, Clocks)
    with Watch(clocks):
        yield clocks


def races(family: str, num_layers: int, index: int, mutate: Mutation | None = None) -> list[str]:
    model = copy.deepcopy(tiny(family, num_layers))
    engine = engine_of(model, Clocks(), **CONFIGS[index])
    with pytest.MonkeyPatch.context() as patch, watched(engine.allocator.tiers) as clocks:
        if mutate is not None:
            mutate(engine.allocator.tiers, patch)
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
    self._coming, self._next, self._name = iter(()), None, None


@pytest.mark.parametrize("waits", [True, False])
def test_pages_in_flight_are_not_overwritten(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a sequence while its pages are loading; another sequence gets them and stores to them."""
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", CHUNK)
    if not waits:
        monkeypatch.setattr(Prefetcher, "forget", forget_without_waiting)
    tiers = Tiers(CPU)
    tiers.streams = tiers.prefetcher.streams = Clocks()
    with watched(tiers) as clocks:
        for _ in range(2):
            store = make_store(tiers, layers={0: layer_spec()})
            k, *_ = fill(store)[0]
            store.prefetch_forward(store.capacity, store.capacity + CHUNK, saved=False)
            assert tiers.prefetcher._issued
            store.close()
        found = make_store(tiers, layers={0: layer_spec()})
        k, *_ = fill(found)[0]
        assert torch.equal(keys(found, found.capacity), k[:, :, : found.capacity])
    assert (clocks.races == []) is waits
    assert waits or "a store writes what a load may still touch" in clocks.races


def test_a_dropped_order_does_not_break_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take something other than the expected order again and again, with copies as late as possible."""
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", CHUNK)
    tiers = Tiers(CPU)
    tiers.streams = tiers.prefetcher.streams = LateCopies()
    store = make_store(tiers)
    filled = fill(store)
    for start in range(0, store.capacity + 1, CHUNK):
        store.prefetch_forward(start, start + CHUNK, saved=False)
        for layer in (3, 0):  # the other way round
            at = 0
            for at, k, v in store.segments(layer, 0, start):
                assert torch.equal(k, filled[layer][0][:, :, at : at + CHUNK])
                assert torch.equal(v, filled[layer][1][:, :, at : at + CHUNK])
            assert at == max(0, start - CHUNK)


GPU_LENGTH, GPU_CHUNK = 600, 64
LONG = 20_000_000
"""Cycles: about 10 ms of an H200, longer than Python takes for a layer of a tiny model."""


def gpu_llama(num_layers: int) -> Any:
    from large_models import wide_llama

    return wide_llama(
        hidden_size=128, intermediate_size=256, num_attention_heads=2, num_hidden_layers=num_layers
    ).bfloat16()


@pytest.fixture
def gpu_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", 2 * GPU_CHUNK)


def gpu_results(model: Any, disturb: Callable[[Tiers, pytest.MonkeyPatch], None] | None = None, **config: Any) -> Any:
    config = {"chunk_size": GPU_CHUNK, "keep_attention": False, "checkpoint_layers": False, **config}
    engine = engine_of(model, **config)
    engine.reserve(1, GPU_LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        if disturb is not None:
            disturb(engine.allocator.tiers, patch)
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
