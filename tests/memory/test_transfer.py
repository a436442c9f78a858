"""Check host memory, when it is refused, prefetching and staging buffers."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores import CHUNK, CPU, B, D, K, V, fill, keys, layer_spec, make_store
from torch import Tensor

from oomb.memory import host
from oomb.memory import rows as rows_module
from oomb.memory import tiers as tiers_module
from oomb.memory.host import HostSlab, free_gpu_bytes, free_host_bytes
from oomb.memory.pool import HOST, OutOfPages
from oomb.memory.rows import GRAD, KV, NEW, NUM_AHEAD, NUM_BEHIND
from oomb.memory.tiers import Tiers
from oomb.memory.transfer import BufferRing, CopyStreams, Load, Prefetcher


@pytest.mark.parametrize("version", [1, 2])
def test_free_host_memory_is_that_of_the_control_groups(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our control group and its parents count; page cache can be evicted."""
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "groups")
    assert free_host_bytes() == 10_000
    (tmp_path / "self").mkdir()
    line = {1: "3:cpu,memory:/jobs/ours", 2: "0::/jobs/ours"}[version]
    (tmp_path / "self" / "cgroup").write_text(f"2:pids:/elsewhere\n{line}\n")
    outer = tmp_path / "groups" / ("memory" if version == 1 else "") / "jobs"
    (outer / "ours").mkdir(parents=True)
    limit, used = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]

    def write(group: Path, **values: str) -> None:
        for name, value in values.items():
            (group / f"memory.{name}").write_text(value + "\n")

    write(outer / "ours", **{limit: "max", used: "1000", "stat": "anon 900\ninactive_file 0"})
    assert free_host_bytes() == 10_000
    write(outer, **{limit: "5000", used: "1800", "stat": "anon 1500\nactive_file 200\ninactive_file 100"})
    assert free_host_bytes() == 3500
    write(outer / "ours", **{limit: "1200"})
    assert free_host_bytes() == 200
    write(outer / "ours", **{used: "9000"})
    assert free_host_bytes() == 0


def test_a_cpu_has_no_gpu_memory_limit() -> None:
    assert free_gpu_bytes(CPU) is None


def refusing_mmap(*args: Any, **kwargs: Any) -> None:
    raise OSError(12, "Cannot allocate memory")


def failing_kernel(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("refuses", ["mmap", "pin"])
def test_host_memory_refused_leaves_nothing(refuses: str, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {0: layer_spec()}
    first = make_store(tiers, 2, layers=large)
    before = tiers.used_bytes(HOST), +tiers.promised, tiers.idle_bytes(HOST)
    if refuses == "mmap":
        monkeypatch.setattr(mmap, "mmap", refusing_mmap)
        message = r"4\.00 GiB .*Cannot allocate memory.*host_memory"
    else:
        # Pretend that there is a GPU whose driver refuses.
        real = HostSlab
        monkeypatch.setattr(tiers_module, "HostSlab", lambda num_bytes, device: real(num_bytes, torch.device("cuda")))
        monkeypatch.setattr(Tensor, "zero_", lambda self: self)  # touching it takes seconds
        driver = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch, "zeros", failing_kernel)
        message = r"cannot pin 4\.00 GiB .*error 2.*host_memory"
    with pytest.raises(OutOfPages, match=message):
        make_store(tiers, 2**31 // large[0].kv.num_bytes // CHUNK, layers=large)
    tiers.collect()
    assert (tiers.used_bytes(HOST), +tiers.promised, tiers.idle_bytes(HOST)) == before
    monkeypatch.undo()
    fill(first)
    second = make_store(tiers, 3, layers=large)
    k, *_ = fill(second)[0]
    assert torch.equal(keys(second, 21), k[:, :, :21])


@pytest.mark.gpu
def test_a_failed_pin_does_not_fail_a_later_call() -> None:
    device = torch.device("cuda")
    slab = HostSlab(2**20, device)
    with pytest.raises(OutOfPages, match="cannot pin"):
        host.pin(slab.bytes, device)  # it is already
    assert torch.ones(1000, device=device).sum().item() == 1000


@pytest.mark.gpu
def test_pinned_slabs_come_and_go() -> None:
    device = torch.device("cuda")
    for _ in range(3):
        slab = HostSlab(2**20, device)
        assert slab.bytes.is_pinned() and not slab.bytes.any()
        del slab
        gc.collect()


class CountingCopier(CopyStreams):
    """Records every load, and how many are in flight or in use."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sources: list[int] = []

    def load(self, copies: Any, after: Any = ()) -> Any:
        self.sources += [int(src[0]) for _, src in copies]
        return super().load(copies, after)


def loads_of(ring: BufferRing, names: Any) -> list[Load]:
    return [Load(("test", name), ring, ((0, torch.full((4,), name, dtype=torch.uint8)),)) for name in names]


def ring_of(num_slots: int) -> BufferRing:
    return BufferRing(num_slots, torch.zeros(4 * num_slots, dtype=torch.uint8))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_loads_run_ahead_as_far_as_there_are_buffers(which: list[int]) -> None:
    """With two rings and a correct expected order, nothing is loaded twice and all but one buffer are ahead."""
    copier = CountingCopier()
    prefetcher, rings = Prefetcher(copier), (ring_of(3), ring_of(2))
    loads = [load for name, index in enumerate(which) for load in loads_of(rings[index], [name])]
    prefetcher.expect(iter(loads))
    for done, load in enumerate(loads):
        slot = prefetcher.take(load)
        assert (slot.bytes == done).all()
        ahead = copier.sources[done + 1 :]
        assert copier.sources == list(range(len(copier.sources)))
        for ring, size in zip(rings, (3, 2), strict=True):
            in_flight = sum(loads[name].ring is ring for name in [done, *ahead])
            assert in_flight <= size and len(ring.free) == size - in_flight
        blocked = len(copier.sources) < len(loads)
        assert not blocked or not loads[len(copier.sources)].ring.free, "a buffer is idle"
        prefetcher.give(load.ring, slot, None)
    assert [len(ring.free) for ring in rings] == [3, 2]


def test_an_unexpected_request_is_served_and_drops_the_expected_order() -> None:
    copier, ring = CountingCopier(), ring_of(3)
    prefetcher = Prefetcher(copier)
    expected = loads_of(ring, range(10, 20))
    prefetcher.expect(expected)
    assert copier.sources == [10, 11, 12] and not ring.free
    slot = prefetcher.take(loads_of(ring, [7])[0])
    assert (slot.bytes == 7).all()
    assert copier.sources == [10, 11, 12, 7] and len(ring.free) == 2
    prefetcher.give(ring, slot, None)
    assert copier.sources == [10, 11, 12, 7], "the expected order is gone"
    slot = prefetcher.take(expected[0])
    assert (slot.bytes == 10).all()
    prefetcher.give(ring, slot, None)
    assert len(ring.free) == 3 and len(set(map(id, ring.free))) == 3


def test_the_expected_order_of_one_sequence_does_not_serve_another(tiers: Tiers) -> None:
    first, second = (make_store(tiers, layers={0: layer_spec()}) for _ in range(2))
    fill(first)
    k, *_ = fill(second)[0]
    first.prefetch_forward(35, 42, saved=False)
    assert tiers.prefetcher._issued
    assert torch.equal(keys(second, 35), k[:, :, :35])


def test_a_new_expected_order_replaces_the_old() -> None:
    copier, ring = CountingCopier(), ring_of(2)
    prefetcher = Prefetcher(copier)
    prefetcher.expect(loads_of(ring, range(5)))
    prefetcher.expect(loads_of(ring, [8, 9]))
    assert copier.sources == [0, 1, 8, 9]
    for name in (8, 9):
        slot = prefetcher.take(loads_of(ring, [name])[0])
        assert (slot.bytes == name).all()
        prefetcher.give(ring, slot, None)
    assert len(ring.free) == 2


def test_the_expected_order_matches_attention(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is expected in the right order: `forget` finds none in flight."""
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", CHUNK)
    store = make_store(tiers, layers={0: layer_spec(window=9), 1: layer_spec()}, gpu_tokens=4, keeps=True)
    fill(store)
    dropped = []
    forget = tiers.prefetcher.forget
    monkeypatch.setattr(
        tiers.prefetcher,
        "forget",
        lambda: (dropped.extend(load.key for load, *_ in tiers.prefetcher._issued), forget()),
    )
    taken, take = [], tiers.prefetcher.take
    monkeypatch.setattr(tiers.prefetcher, "take", lambda load: (taken.append(load.key), take(load))[1])
    for start in (35, 28, 14, 7, 0):
        end = start + CHUNK
        store.prefetch_forward(start, end, saved=False)
        for layer in store.layers:
            list(store.past(layer, start, end).segments(max(0, start - 8) if layer == 0 and end > 9 else 0))
        store.prefetch_forward(start, end, saved=True)
        for layer in store.layers:
            if store.load_output(layer, start, end) is None:
                list(store.past(layer, start, end).segments(max(0, start - 8) if layer == 0 and end > 9 else 0))
        store.prefetch_backward(start, end, saved=True)
        for layer in (1, 0):
            store.load_output(layer, start, end)
            past, first = store.past(layer, start, end), max(0, start - 8) if layer == 0 and end > 9 else 0
            k_and_v = []
            for at, k, v in past.segments(first):
                if layer == 1:
                    past.add_grad(at, k, v)
                k_and_v.append((k.clone(), v.clone()))
            if layer == 0 and k_and_v:
                past.add_grad(first, *(torch.cat(x, 2) for x in zip(*k_and_v, strict=True)))
            past.add_future_grads(torch.zeros(B, K, CHUNK, D), torch.zeros(B, K, CHUNK, V))
    assert len(taken) > 50 and not dropped
    for ring in tiers.rings.values():
        assert len(ring.free) == ring.num_bytes // ring.slot_bytes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "stops"])
def test_an_aborted_consumer_loses_no_buffer(how: str, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", CHUNK)
    store = make_store(tiers)
    k, *_ = fill(store)[0]

    def consume() -> None:
        for start, *_ in store.segments(0, 0, 35):
            if start >= 7:
                if how == "stops":
                    return
                raise RuntimeError("in the middle")

    for _ in range(2 * NUM_AHEAD):
        store.prefetch_forward(35, 42, saved=False)
        try:
            consume()
        except RuntimeError as error:
            assert str(error) == "in the middle"
        gc.collect()
    tiers.prefetcher.forget()
    assert [len(tiers.rings[name].free) for name in (KV, GRAD, NEW)] == [NUM_AHEAD, NUM_AHEAD, NUM_BEHIND]
    assert torch.equal(keys(store, 35), k[:, :, :35])
