"""Check the order of copies of selected pages and computation: delays do not change the result, removing any wait does.

Pages are copied one by one, as on a CPU, or moved by kernels and copy engines, as on a GPU (`followed`)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import engine_for
from families import build, random_ids
from races import SHORT, are_equal, delay_computation, delay_copies
from races import results as interleaved
from streams import MUTATIONS, Clocks, LateCopies, Mutation, Watch, gives_back_without
from torch import Tensor

pytest.importorskip("triton")

from followed import Kernel, follow, memory_for

import oomb
from oomb.attention import dense, sparse
from oomb.memory import batch_copy
from oomb.memory.selected import SelectedPages
from oomb.memory.selected_io import SelectedIO
from oomb.memory.tiers import Tiers
from oomb.memory.transfer import Buffer, CopyStreams, Event, Load, Prefetcher
from oomb.ops.triton_kernels import page_copy
from oomb.planner import placement

LENGTH = 74
SIZES: dict[str, Any] = {"chunk_size": 16, "page_size": 8, "page_budget": 3}
WAYS = ("copied", "followed")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "three layers": ("llama", {"num_hidden_layers": 3}),
    "five layers": ("llama", {"num_hidden_layers": 5}),
    "windows": ("qwen2_sliding", {"sliding_window": 30}),
    "capped windows": ("gemma2", {"sliding_window": 30}),
}
"""With one layer, a load soon follows the store of its pages; with five, more stores than buffers are in flight. In
"windows" a sparse layer is between two windowed ones; "capped windows" cannot use kernels, so it does not follow."""
PLACES: dict[str, tuple[int | None, int | None]] = {
    "host": (0, 0),
    "split": (5, 0),
    "gradients on the host": (None, 0),
    "gradients split": (None, 3),
    "gpu": (None, None),
}
"""Pages of K and V, and of gradients, on the GPU."""
KEPT: list[dict[str, Any]] = [
    {"keep_attention": False, "checkpoint_layers": False, "keep_last_chunk": False},
    {"keep_attention": True, "checkpoint_layers": True, "keep_last_chunk": False},
    {"keep_attention": False, "checkpoint_layers": True, "keep_last_chunk": True},
    {"keep_attention": True, "checkpoint_layers": False, "keep_last_chunk": True},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "TILE_SIZE", 8)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "followed":
        follow(monkeypatch)
    return request.param


@functools.lru_cache
def tiny(name: str) -> Any:
    family, sizes = MODELS[name]
    return build(family, dtype=torch.float32, **sizes)


def engine_of(model: Any, place: str, kept: dict[str, Any], copier: CopyStreams | None = None) -> oomb.Engine:
    short = {name: value for name, value in kept.items() if "dtype" in name}
    memory = memory_for(model, LENGTH, *PLACES[place], **SIZES, **short)
    engine = engine_for(model, kernels="torch", fuse="off", gpu_memory=memory, **kept, **SIZES)
    if copier is not None:
        engine.allocator.tiers.streams = engine.allocator.tiers.prefetcher.streams = copier
    return engine


results = functools.partial(interleaved, length=LENGTH)


@functools.lru_cache
def expected_results(name: str) -> list[Tensor]:
    """Return the results with all pages on the GPU and without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "TILE_SIZE", 8)
        model = copy.deepcopy(tiny(name))
        return results(model, engine_for(model, kernels="torch", fuse="off", **KEPT[0], **SIZES))


CASES = [
    ("one layer", "host", 0),
    ("one layer", "gradients split", 1),
    ("three layers", "split", 2),
    ("three layers", "gradients on the host", 3),
    ("three layers", "host", 1),
    ("windows", "host", 3),
    ("windows", "split", 0),
    ("windows", "gradients split", 2),
]
"""Model, placement of pages, and what is saved."""


@pytest.mark.parametrize(("name", "place", "kept"), CASES)
def test_late_copies_change_nothing(way: str, name: str, place: str, kept: int) -> None:
    model, copier = copy.deepcopy(tiny(name)), LateCopies()
    found = results(model, engine_of(model, place, KEPT[kept], copier))
    assert are_equal(found, expected_results(name))
    assert copier.num_late > 10


def races(name: str, place: str, kept: int, mutate: Mutation | None = None) -> list[str]:
    model = copy.deepcopy(tiny(name))
    engine = engine_of(model, place, KEPT[kept], Clocks())
    clocks = engine.allocator.tiers.streams
    assert isinstance(clocks, Clocks)
    with pytest.MonkeyPatch.context() as patch, Watch(clocks):
        if mutate is not None:
            mutate(engine.allocator.tiers, patch)
        found = results(model, engine)
    assert are_equal(found, expected_results(name))
    assert len(clocks.seen) > 3 and (clocks.clocks.diagonal() > 10).all()
    return clocks.races


@pytest.mark.parametrize(("name", "place", "kept"), [*CASES[1:4], *CASES[5:7]])
def test_every_access_is_ordered(way: str, name: str, place: str, kept: int) -> None:
    assert races(name, place, kept) == []


IN_EIGHT_BITS = {"kv_dtype": "int8", "grad_dtype": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kept"), [("host", 0), ("host", 3), ("split", 3), ("gpu", 0)])
def test_pages_in_eight_bits(way: str, place: str, kept: int) -> None:
    """8-bit pages pass through buffers in either tier, and the store stream writes gradients back."""
    name, reference = "three layers", {}
    for copier in (None, LateCopies(), Clocks()):
        model = copy.deepcopy(tiny(name))
        engine = engine_of(model, place, {**KEPT[kept], **IN_EIGHT_BITS}, copier)
        if isinstance(copier, Clocks):
            with Watch(copier):
                found = results(model, engine)
            assert copier.races == []
        else:
            found = results(model, engine)
        assert are_equal(found, reference.setdefault(way, found))


def loads_without(index: int) -> Mutation:
    """Remove one of the waits of a load of selected pages: for the store of its pages, or for the selection."""

    def mutate(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        load = SelectedIO.load

        def mutated(*args: Any) -> Load:
            found = load(*args)
            return dataclasses.replace(found, after=found.after[:index] + found.after[index + 1 :])

        patch.setattr(SelectedIO, "load", mutated)

    return mutate


def load_ignores_use_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    gives_back_without(tiers, patch, "selected kv")


def load_ignores_store_of_its_buffer(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    gives_back_without(tiers, patch, "selected grad")


def computation_ignores_load(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    prefetcher, take = tiers.prefetcher, tiers.prefetcher.take

    def mutated(load: Load) -> Buffer:
        if load.gather is not None and prefetcher._issued and prefetcher._issued[0][0].key == load.key:
            prefetcher._issued[0] = (*prefetcher._issued[0][:2], None)
        return take(load)

    patch.setattr(prefetcher, "take", mutated)


def computation_ignores_started_load(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
    start = Prefetcher.start

    def mutated(self: Prefetcher, load: Load) -> None:
        start(self, load)
        self._started[load.key] = (*self._started[load.key][:2], None)

    patch.setattr(Prefetcher, "start", mutated)


WAITS: dict[str, tuple[Mutation, str, str]] = {
    "load for store of its pages": (loads_without(0), "one layer", "a load reads what a store may still touch"),
    "load for selection": (loads_without(1), "one layer", "a load reads what the computation may still touch"),
    "load for use of its buffer": (
        load_ignores_use_of_its_buffer,
        "one layer",
        "a load writes what the computation may still touch",
    ),
    "load for store of its buffer": (
        load_ignores_store_of_its_buffer,
        "five layers",
        "a load writes what a store may still touch",
    ),
    "load of own gradients for their store": (
        MUTATIONS["load_ignores_store_of_its_pages"],
        "one layer",
        "a load reads what a store may still touch",
    ),
    "computation for load": (
        computation_ignores_load,
        "one layer",
        "the computation reads what a load may still touch",
    ),
    "computation for load outside the expected order": (
        computation_ignores_started_load,
        "one layer",
        "the computation reads what a load may still touch",
    ),
    "store for computation": (
        MUTATIONS["store_ignores_computation"],
        "one layer",
        "a store reads what the computation may still touch",
    ),
}
"""Each wait: how to remove it, a model that shows the race, and the race."""


@pytest.mark.parametrize("wait", WAITS)
def test_without_a_wait_there_is_a_race(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, name, race = WAITS[wait]
    follow(monkeypatch)
    assert race in races(name, "host", 0, mutate)


def test_the_cpu_waits_for_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch)
    monkeypatch.setattr(LateCopies, "finish", lambda self, event: None)
    model = copy.deepcopy(tiny("three layers"))
    empty = torch.empty
    # A selection that has not arrived yet is all zeros.
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
    found = results(model, engine_of(model, "gradients on the host", KEPT[0], LateCopies()))
    assert not are_equal(found, expected_results("three layers"))


@pytest.mark.parametrize(("place", "kinds"), [("host", {"kv", "grad"}), ("gradients split", {"grad"}), ("gpu", set())])
def test_engines_load_what_the_cpu_knows(place: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines copy all host pages in the gradient pass; kernels do in the fill pass and for the last chunk."""
    follow(monkeypatch)
    gather, by_engines, by_kernels = SelectedIO._gather, set(), set()

    def watched(self: SelectedIO, kind: str, layer: int, start: int, *args: Any) -> None:
        (by_engines if self.uses_engines_for(kind, layer, start) else by_kernels).add((kind, start))
        gather(self, kind, layer, start, *args)

    monkeypatch.setattr(SelectedIO, "_gather", watched)
    copied, copy_all = [], batch_copy.copy_all
    monkeypatch.setattr(batch_copy, "copy_all", lambda *args: (copied.append(len(args[0])), copy_all(*args)))
    model = copy.deepcopy(tiny("three layers"))
    engine_of(model, place, KEPT[0]).loss(random_ids(1, LENGTH)).backward()
    assert {kind for kind, _ in by_engines} == kinds and (sum(copied) > 0) == bool(kinds)
    last = LENGTH // SIZES["chunk_size"] * SIZES["chunk_size"]
    assert all(start < last for _, start in by_engines)
    assert all(kind == "kv" or start == last for kind, start in by_kernels)


@pytest.mark.parametrize(
    ("name", "place", "kept"),
    [*CASES[2:], ("three layers", "gradients split", 0), ("capped windows", "host", 0), ("capped windows", "gpu", 1)],
)
def test_the_expected_order_matches_attention(
    way: str, name: str, place: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order: any other request drops the expected order."""
    take, forget, surprises = Prefetcher.take, Prefetcher.forget, []

    def watched(self: Prefetcher, load: Load) -> Buffer:
        def surprised(self: Prefetcher) -> None:
            surprises.append(load.key)
            forget(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prefetcher, "forget", surprised)
            return take(self, load)

    monkeypatch.setattr(Prefetcher, "take", watched)
    model = copy.deepcopy(tiny(name))
    engine_of(model, place, KEPT[kept]).loss(random_ids(1, LENGTH)).backward()
    assert not surprises


def forget_without_waiting(self: Prefetcher) -> None:
    for load, slot, done in (*self._issued, *self._started.values()):
        load.ring.give(slot, done)
    self._issued.clear()
    self._started.clear()
    self._coming, self._next, self._name = iter(()), None, None


@pytest.mark.parametrize("waits", [True, False])
def test_selected_pages_in_flight_are_not_overwritten(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails while pages that were just selected are loading; the next step stores to them."""
    follow(monkeypatch)
    if not waits:
        monkeypatch.setattr(Prefetcher, "forget", forget_without_waiting)
    model, pick, calls = copy.deepcopy(tiny("one layer")), dense.pick_kernel, itertools.count()

    def stumble(*args: Any) -> Any:
        if next(calls) == 2:
            assert engine.allocator.tiers.prefetcher._started
            raise RuntimeError("injected")
        return pick(*args)

    monkeypatch.setattr(sparse, "pick_kernel", stumble)
    engine = engine_of(model, "host", KEPT[0], Clocks())
    clocks = engine.allocator.tiers.streams
    assert isinstance(clocks, Clocks)
    with Watch(clocks):
        with pytest.raises(RuntimeError, match="injected"):
            engine.loss(random_ids(1, LENGTH))
        assert are_equal(results(model, engine), expected_results("one layer"))
    assert (clocks.races == []) is waits
    assert waits or "a store writes what a load may still touch" in clocks.races


def test_a_failed_step_waits_for_stores_that_read_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are freed, and stores read addresses from them."""
    follow(monkeypatch)
    model, copier = copy.deepcopy(tiny("three layers")), LateCopies()
    engine = engine_of(model, "host", KEPT[0], copier)

    def stop(phase: str, done: int, num_chunks: int) -> None:
        if phase == "gradient":
            assert any(callable(late.work) for late in copier.queues["store"])
            raise KeyboardInterrupt

    engine.progress = stop
    with pytest.raises(KeyboardInterrupt):
        engine.loss(random_ids(1, LENGTH)).backward()
    assert not any(callable(late.work) for late in copier.queues["store"])
    engine.progress = None
    assert are_equal(results(model, engine), expected_results("three layers"))


def test_bytes_are_counted_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages of 1 GiB, as with many sequences, long chunks and wide gradients."""
    follow(monkeypatch)
    model = copy.deepcopy(tiny("one layer"))
    engine = engine_of(model, "host", KEPT[0])
    store_grads, count = SelectedIO.store_grads, torch.tensor([5, 0, 0, 0], dtype=torch.int32)

    def store_much(self: SelectedIO, *args: Any) -> Event:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SelectedIO, "_page_bytes", lambda *args: 2**30)
            patch.setattr(SelectedIO, "_parts", lambda *args: (count, count, count, torch.arange(6)))
            patch.setattr(page_copy, "copy_pages", Kernel(lambda *args, **settings: None))
            return store_grads(self, *args)

    monkeypatch.setattr(SelectedIO, "store_grads", store_much)
    monkeypatch.setattr(batch_copy, "copy_all", lambda *args: None)
    engine.loss(random_ids(1, 32)).backward()
    assert engine.stats.stored_bytes >= 5 * 2**30


def test_an_engine_that_has_scored_in_inference_mode_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch)
    model = copy.deepcopy(tiny("three layers"))
    engine = engine_of(model, "host", KEPT[0])
    with torch.inference_mode():
        engine.logprobs(random_ids(1, LENGTH))
    assert are_equal(results(model, engine), expected_results("three layers"))


GPU_LENGTH = 600
GPU_SIZES: dict[str, Any] = {"chunk_size": 64, "page_size": 16, "page_budget": 4}


def gpu_results(model: Any, place: str, kept: dict[str, Any], disturb: Mutation | None = None) -> list[Tensor]:
    # Plain PyTorch computes the chunk's own attention, because cuDNN's dq is not deterministic.
    config = {**GPU_SIZES, **kept, "kernels": "torch", "fuse": "off"}
    engine = engine_for(model, gpu_memory=memory_for(model, GPU_LENGTH, *PLACES[place], **config), **config)
    engine.reserve(1, GPU_LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "_uses_kernels", lambda q, spec: True)
        if disturb is not None:
            disturb(engine.allocator.tiers, patch)
        found = interleaved(model, engine, GPU_LENGTH)
        torch.cuda.synchronize()
    if place != "gpu":
        assert engine.stats.loaded_bytes > 0 and engine.stats.stored_bytes > 0
    return found


def delay_selections(tiers: Tiers, patch: pytest.MonkeyPatch, cycles: int, seed: int) -> None:
    """Delay selections, and the kernel that adds to gradient pages."""
    draw, set_selection, launch_dkv = random.Random(seed), SelectedPages.set_selection, sparse.launch_dkv

    def late(function: Callable[..., None]) -> Callable[..., None]:
        def sleep_first(*args: Any, **settings: Any) -> None:
            torch.cuda._sleep(draw.randrange(1, 2 * cycles))
            function(*args, **settings)

        return sleep_first

    patch.setattr(SelectedPages, "set_selection", late(set_selection))
    patch.setattr(sparse, "launch_dkv", late(launch_dkv))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "short"), [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, IN_EIGHT_BITS)], ids=str
)
@pytest.mark.parametrize(
    ("place", "kept"), [("host", 0), ("host", 1), ("split", 2), ("gradients on the host", 3), ("gradients split", 0)]
)
def test_late_streams_change_nothing(
    place: str, kept: int, dtype: torch.dtype, short: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from large_models import wide_llama

    monkeypatch.setattr(placement, "TILE_SIZE", 32)
    model = wide_llama(hidden_size=128, intermediate_size=256, num_attention_heads=2).to(dtype)
    expected = gpu_results(model, "gpu", {**KEPT[kept], **short})
    assert are_equal(gpu_results(model, "gpu", {**KEPT[kept], **short}), expected), "not even deterministic"

    def late_copies(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_copies(tiers, patch, loads=SHORT, stores=SHORT, seed=1)

    def late_computation(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_computation(tiers, patch, SHORT, seed=2)
        delay_selections(tiers, patch, SHORT, seed=3)

    def all_late(tiers: Tiers, patch: pytest.MonkeyPatch) -> None:
        delay_copies(tiers, patch, loads=SHORT, stores=2 * SHORT, seed=4)
        delay_computation(tiers, patch, SHORT, seed=5)
        delay_selections(tiers, patch, SHORT, seed=6)

    for disturb in (None, late_copies, late_computation, all_late):
        assert are_equal(gpu_results(model, place, {**KEPT[kept], **short}, disturb), expected), disturb
