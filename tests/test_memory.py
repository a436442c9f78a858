"""The page store on its own: what it holds and where, how it cuts segments, what it counts, when it refuses; and the
rounding of gradients at rest."""

from __future__ import annotations

import gc
import itertools
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oomb.memory import (
    GPU,
    HOST,
    LayerSpec,
    OutOfPages,
    PageStore,
    Row,
    Tiers,
    accumulate_,
    accumulate_reference,
    free_gpu_bytes,
    free_host_bytes,
    row_bytes,
    segment_bounds,
    slabs,
    staging_bytes,
)
from oomb.memory import store as store_module
from oomb.memory.slabs import HostSlab
from oomb.memory.store import ALIGNMENT, GRAD, KV, NEW, NUM_AHEAD, NUM_BEHIND, OUT, largest_segment
from oomb.memory.transfer import Copier, Load, Prefetcher, Ring

CPU = torch.device("cpu")
B, K, H, D, V = 2, 3, 6, 5, 4
"""Sequences, key/value heads, query heads, sizes of keys and of values: rows need padding."""
CHUNK = 7
PLACEMENTS = (1000, 0, 13, 16, 24)
"""Tokens on the GPU of 35: all, none, and edges inside a segment and inside a page."""


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(0, 5000), st.integers(0, 6))
def test_segments_cover_the_past_once_in_few_sizes(chunk_size: int, num_chunks: int, skipped: int, power: int) -> None:
    end, largest = chunk_size * num_chunks, chunk_size << power
    first = min(skipped, end)
    bounds = list(segment_bounds(first, end, chunk_size, largest))
    covered = first
    for start, stop in bounds:
        assert start == covered < stop
        covered = stop
    assert covered == end
    sizes = [stop - start for start, stop in bounds]
    ragged = [size for size in sizes if size not in {chunk_size << i for i in range(power + 1)}]
    assert ragged == sizes[: len(ragged)] and len(ragged) <= 1 and all(size < chunk_size for size in ragged)
    whole = sizes[len(ragged) :]
    assert whole == sorted(whole, reverse=True)
    assert len(sizes) <= (end - first) // largest + power + 2


def test_the_example_of_segment_bounds() -> None:
    sizes = [stop - start for start, stop in segment_bounds(0, 7 * 4096, 4096, 32768)]
    assert sizes == [16384, 8192, 4096]
    assert list(segment_bounds(5, 24, 8, 8)) == [(5, 8), (8, 16), (16, 24)]


@given(st.integers(1, 100_000), st.integers(1, 1 << 20))
def test_the_largest_segment_is_bounded_in_tokens_and_bytes(chunk_size: int, row: int) -> None:
    size = largest_segment(chunk_size, row)
    assert size == chunk_size << (size // chunk_size).bit_length() - 1
    may_double = 2 * size <= store_module.SEGMENT_SIZE and 2 * size * row <= store_module.SEGMENT_BYTES
    assert not may_double
    assert size == chunk_size or (size <= store_module.SEGMENT_SIZE and size * row <= store_module.SEGMENT_BYTES)


FIELDS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple),
        st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    ),
    min_size=1,
    max_size=3,
)


@given(FIELDS, st.integers(1, 5))
@settings(deadline=None)
def test_the_fields_of_a_row_are_aligned_and_apart(fields: list[tuple[Any, torch.dtype]], num_tokens: int) -> None:
    row = Row(*fields)
    assert row.num_bytes == row_bytes(*(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields))
    assert row.num_bytes % ALIGNMENT == 0
    data = torch.zeros(num_tokens * row.num_bytes + 48, dtype=torch.uint8)
    views = row.views(data, num_tokens)
    written = []
    for view, (shape, dtype) in zip(views, fields, strict=True):
        assert view.shape == (*shape[:2], num_tokens, *shape[2:]) and view.dtype == dtype
        assert (view.data_ptr() - data.data_ptr()) % ALIGNMENT == 0
        assert num_tokens == 1 or view.stride(2) * dtype.itemsize == row.num_bytes, "a token's bytes lie together"
        written.append(torch.randn(view.shape).to(dtype))
        view.copy_(written[-1])
    assert all(torch.equal(view, x) for view, x in zip(row.views(data, num_tokens), written, strict=True))
    assert not data[num_tokens * row.num_bytes :].any()
    for token in range(num_tokens):
        own = row.views(data[token * row.num_bytes :], 1)
        assert all(torch.equal(view[:, :, 0], x[:, :, token]) for view, x in zip(own, written, strict=True))


def layer_spec(
    dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> LayerSpec:
    k, v = (B, K, D), (B, K, V)
    return LayerSpec(
        kv=Row((k, kv_dtype or dtype), (v, kv_dtype or dtype)),
        grad=Row((k, grad_dtype or dtype), (v, grad_dtype or dtype)),
        out=Row(((B, H, V), dtype), ((B, H), torch.promote_types(dtype, torch.float32))),
        dtype=dtype,
        window=window,
    )


def make_store(
    tiers: Tiers, num_chunks: int = 5, *, layers: dict[int, LayerSpec] | None = None, **changes: Any
) -> PageStore:
    layers = layers or {0: layer_spec(), 3: layer_spec(torch.float32)}
    sizes = {"capacity": num_chunks * CHUNK, "chunk_size": CHUNK, "page_size": 4, "gpu_tokens": 0}
    return PageStore(tiers, layers, **{**sizes, **changes})


def fill(store: PageStore) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Chunk by chunk, layer by layer, with one chunk more than has pages. Returns K, V, outputs and lses by layer."""
    filled = {}
    length = store.capacity + CHUNK
    for layer, spec in store.layers.items():
        k, v, out, lse = (
            torch.randn(B, length, *shape, dtype=spec.dtype).transpose(1, 2) for shape in ((K, D), (K, V), (H, V), (H,))
        )
        filled[layer] = k, v, out, lse
    for start in range(0, length, store.chunk_size):
        for layer, tensors in filled.items():
            k, v, out, lse = (x[:, :, start : start + store.chunk_size] for x in tensors)
            store.append(layer, start, k, v)
            store.keep(layer, start, out, lse)
    return filled


def keys(store: PageStore, end: int) -> Tensor:
    """K of the first layer. A segment is valid until the next is asked for."""
    return torch.cat([k.clone() for _, k, _ in store.segments(0, 0, end)], 2)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers(CPU)


@pytest.fixture(params=[CHUNK, 4 * CHUNK], ids=["small segments", "large segments"])
def segment_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", request.param)
    return request.param


@pytest.mark.parametrize("gpu_tokens", PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_was_appended_comes_back(tiers: Tiers, page_size: int, gpu_tokens: int, segment_size: int) -> None:
    store = make_store(tiers, page_size=page_size, gpu_tokens=gpu_tokens, gpu_out_tokens=gpu_tokens, keeps=True)
    filled = fill(store)
    end = store.capacity
    for layer, (k, v, out, lse) in filled.items():
        for first in (0, 3, 8, 14, end - 1, end):
            at = first
            for start, k_segment, v_segment in store.past(layer, end, end + CHUNK).segments(first):
                assert start == at
                at += k_segment.shape[2]
                assert torch.equal(k_segment, k[:, :, start:at]) and torch.equal(v_segment, v[:, :, start:at])
                assert at - start <= segment_size
            assert at == end
        for start in range(0, end, CHUNK):
            kept = store.kept(layer, start, start + CHUNK)
            assert kept is not None and kept[0].transpose(1, 2).is_contiguous()
            assert torch.equal(kept[0], out[:, :, start : start + CHUNK])
            assert torch.equal(kept[1], lse[:, :, start : start + CHUNK])
        assert store.kept(layer, end, end + CHUNK) is None, "the last chunk has no pages"


def test_outputs_are_not_kept_unless_asked_for(tiers: Tiers) -> None:
    store = make_store(tiers)
    fill(store)
    assert store.kept(0, 0, CHUNK) is None
    assert OUT not in store.kinds and (OUT, 0) not in store.holding.columns


@pytest.mark.parametrize("gpu_tokens", PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_gradients_add_up_and_reach_their_chunk(
    tiers: Tiers, page_size: int, gpu_tokens: int, segment_size: int
) -> None:
    """Chunks in reverse, each touching its past from some token on, as windows and dense attention do."""
    store = make_store(tiers, page_size=page_size, gpu_tokens=gpu_tokens)
    fill(store)
    for layer in store.layers:
        dtype = store.layers[layer].dtype
        totals = [torch.zeros(B, K, store.capacity, size, dtype=dtype) for size in (D, V)]
        for start, reach in ((35, 10), (28, 5), (21, 3), (14, 14), (7, 0), (0, 0)):
            past = store.past(layer, start, start + CHUNK)
            if reach:
                shares = [torch.randn(B, K, reach, size, dtype=dtype) for size in (D, V)]
                past.add_grad(start - reach, *shares)
                for total, share in zip(totals, shares, strict=True):
                    total[:, :, start - reach : start] += share
            own = [torch.randn(B, K, CHUNK, size, dtype=dtype) for size in (D, V)]
            given = [x.clone() for x in own]
            for total, x, before, found in zip(totals, own, given, past.with_later(*own), strict=True):
                later = total[:, :, start : start + CHUNK] if start < store.capacity else torch.zeros_like(x)
                torch.testing.assert_close(
                    found, before + later, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
                )
                assert torch.equal(x, before), "what was given is left alone"
            if layer == 3:
                store.cut(start)


def test_gradient_pages_come_at_first_touch(tiers: Tiers) -> None:
    store = make_store(tiers, page_size=4, layers={0: layer_spec()}, gpu_tokens=16)
    row = store.layers[0].grad.num_bytes
    assert tiers.used_bytes(GPU) + tiers.used_bytes(HOST) == 9 * 4 * row
    share = torch.ones(B, K, 6, D, dtype=torch.float64), torch.ones(B, K, 6, V, dtype=torch.float64)
    store.add_grad(0, 13, *share, seed=0)  # pages 3 and 4, one in each tier
    assert (tiers.used_bytes(GPU), tiers.used_bytes(HOST)) == (5 * 4 * row, 6 * 4 * row)
    store.add_grad(0, 12, *share, seed=0)
    assert (tiers.used_bytes(GPU), tiers.used_bytes(HOST)) == (5 * 4 * row, 6 * 4 * row)


@pytest.mark.parametrize("gpu_tokens", [0, 13, 1000])
def test_pages_rest_in_the_precision_asked_for(tiers: Tiers, gpu_tokens: int) -> None:
    spec = layer_spec(kv_dtype=torch.float32, grad_dtype=torch.float64)
    store = make_store(tiers, layers={0: spec}, gpu_tokens=gpu_tokens)
    k, v, *_ = fill(store)[0]
    for start, read_k, read_v in store.segments(0, 0, store.capacity):
        end = start + read_k.shape[2]
        assert read_k.dtype == read_v.dtype == torch.float64
        assert torch.equal(read_k, k[:, :, start:end].float().double())
        assert torch.equal(read_v, v[:, :, start:end].float().double())
    assert spec.kv.num_bytes == row_bytes(B * K * D * 4, B * K * V * 4)
    assert spec.grad.num_bytes == row_bytes(B * K * D * 8, B * K * V * 8)
    tiny = torch.full((B, K, CHUNK, D), 1e-12, dtype=torch.float64), torch.zeros(B, K, CHUNK, V, dtype=torch.float64)
    for share in (torch.ones_like(tiny[0]), tiny[0]):
        store.add_grad(0, 0, share, tiny[1], seed=0)
    dk, _ = store.with_later(0, 0, CHUNK, torch.zeros_like(tiny[0]), tiny[1])
    assert torch.equal(dk, torch.full_like(dk, 1 + 1e-12))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_alike_wherever_they_lie(grad_dtype: torch.dtype) -> None:
    found = []
    for gpu_tokens, page_size in itertools.product(PLACEMENTS, (1, 4, 16)):
        layers = {0: layer_spec(torch.float32, grad_dtype=grad_dtype)}
        store = make_store(Tiers(CPU), layers=layers, gpu_tokens=gpu_tokens, page_size=page_size, seed=5)
        torch.manual_seed(1)
        for start in (35, 28, 21):
            shares = torch.randn(B, K, start, D), torch.randn(B, K, start, V)
            store.past(0, start, start + CHUNK).add_grad(0, *shares)
        nothing = torch.zeros(B, K, CHUNK, D), torch.zeros(B, K, CHUNK, V)
        found.append(torch.cat([x.flatten() for x in store.with_later(0, 14, 21, *nothing)]))
        assert torch.equal(found[-1], found[0]) and found[0].any()
    others = []
    for seed in (5, 6):
        store = make_store(Tiers(CPU), layers=layers, seed=seed)
        for start in (28, 35):
            store.past(0, start, start + CHUNK).add_grad(0, *(torch.full((B, K, CHUNK, n), 1 / 3) for n in (D, V)))
        others.append(store.with_later(0, 0, CHUNK, *nothing)[0])
    assert not torch.equal(*others), "another seed rounds otherwise"


def test_a_window_does_not_reach_the_first_pages(tiers: Tiers) -> None:
    """The forecast must ask for what attention will ask for, and for no more."""
    store = make_store(tiers, layers={0: layer_spec(window=9), 1: layer_spec()})
    fill(store)
    asked = [load.key[1:] for load in store._forward_loads(28, 35, kept=False)]
    assert asked == [(KV, 0, 20, 21), (KV, 0, 21, 28), (KV, 1, 0, 28)]


def test_bytes_are_counted(tiers: Tiers) -> None:
    """Three chunks with pages, one layer; the GPU has room for 11 of 21 tokens: two pages of four."""
    spec = layer_spec()
    kv, grad, out = spec.kv.num_bytes, spec.grad.num_bytes, spec.out.num_bytes
    store = make_store(tiers, 3, layers={0: spec}, gpu_tokens=11, keeps=True)
    fill(store)
    assert tiers.copier.stored_bytes == (21 - 8) * kv + 21 * out
    assert tiers.copier.loaded_bytes == 0
    list(store.segments(0, 0, 21))
    assert tiers.copier.loaded_bytes == 13 * kv
    list(store.segments(0, 0, 7))
    assert tiers.copier.loaded_bytes == 13 * kv
    store.kept(0, 7, 14)
    assert tiers.copier.loaded_bytes == 13 * kv + 7 * out
    tiers.reset_counters()
    assert tiers.copier.loaded_bytes == tiers.copier.stored_bytes == 0
    shares = torch.ones(B, K, 14, D, dtype=torch.float64), torch.ones(B, K, 14, V, dtype=torch.float64)
    store.add_grad(0, 7, *shares, seed=0)  # fresh: nothing to load, tokens 8 to 20 to store
    assert (tiers.copier.loaded_bytes, tiers.copier.stored_bytes) == (0, 13 * grad)
    store.add_grad(0, 7, *shares, seed=0)
    assert (tiers.copier.loaded_bytes, tiers.copier.stored_bytes) == (13 * grad, 26 * grad)
    store.with_later(0, 14, 21, *(x[:, :, :7] for x in shares))
    assert tiers.copier.loaded_bytes == 20 * grad
    # Pages 0 and 1 hold tokens 0 to 7; the gradients touched pages 1 to 5.
    assert tiers.peak_bytes == {GPU: 4 * (2 * kv + grad), HOST: 4 * (4 * kv + 4 * grad + 6 * out)}
    store.close()
    assert tiers.peak_bytes[GPU] == 4 * (2 * kv + grad)
    tiers.reset_counters()
    assert tiers.peak_bytes == {GPU: 0, HOST: 0}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_staging_bytes_are_those_of_the_rings(tiers: Tiers, keeps: bool, trains: bool) -> None:
    spec = layer_spec()
    make_store(tiers, layers={0: spec}, keeps=keeps, trains=trains)
    expected = staging_bytes(
        kv_row=spec.kv.num_bytes,
        grad_row=spec.grad.num_bytes,
        out_row=spec.out.num_bytes,
        chunk_size=CHUNK,
        keeps=keeps,
        trains=trains,
    )
    assert sum(ring.num_bytes for ring in tiers.rings.values()) == expected
    assert set(tiers.rings) == {KV, NEW, *[GRAD] * trains, *[OUT] * keeps}


def test_nothing_is_staged_where_all_fits_the_gpu(tiers: Tiers) -> None:
    store = make_store(tiers, gpu_tokens=35, gpu_out_tokens=35, keeps=True)
    fill(store)
    list(store.segments(0, 0, 35))
    assert not tiers.rings and not tiers.used_bytes(HOST)
    assert tiers.copier.loaded_bytes == tiers.copier.stored_bytes == 0


@pytest.mark.parametrize(("tier", "gpu_tokens"), [(HOST, 0), (GPU, 1000)])
def test_memory_is_used_again(tiers: Tiers, tier: str, gpu_tokens: int) -> None:
    """From step to step nothing is allocated. A sequence beside another adds a slab. A longer one replaces the slabs of
    the GPU by one; those of the host, which are dear to pin, get one more."""

    def num_bytes() -> int:
        return sum(arena.num_bytes for arena in tiers.arenas.values())

    layers = {0: layer_spec()}
    per_page = 4 * (layers[0].kv.num_bytes + layers[0].grad.num_bytes)
    settings = {"layers": layers, "gpu_tokens": gpu_tokens}
    first = make_store(tiers, **settings)
    rings = sum(ring.num_bytes for ring in tiers.rings.values()) if tier == GPU else 0
    slab = tiers.arenas[tier, per_page // 2].slabs[0][1].data_ptr()
    assert num_bytes() == 9 * per_page and tiers.idle_bytes(tier) == rings
    first.close()
    assert tiers.idle_bytes(tier) == 9 * per_page + rings
    again = make_store(tiers, **settings)
    assert num_bytes() == 9 * per_page and tiers.arenas[tier, per_page // 2].slabs[0][1].data_ptr() == slab
    second = make_store(tiers, 2, **settings)
    assert num_bytes() == (9 + 4) * per_page
    again.close()
    second.close()
    longer = make_store(tiers, 10, **settings)
    assert num_bytes() == 18 * per_page
    assert len(tiers.arenas[tier, per_page // 2].slabs) == (1 if tier == GPU else 3)
    longer.close()
    other = make_store(tiers, page_size=1, **settings)
    assert num_bytes() == 35 * per_page // 4, "slabs of a size that nobody uses make room"
    other.close()
    assert tiers.idle_bytes(tier) == num_bytes() + rings


def test_an_abandoned_store_is_collected(tiers: Tiers) -> None:
    store = make_store(tiers)
    fill(store)
    store.add_grad(
        0, 0, torch.ones(B, K, 3, D, dtype=torch.float64), torch.ones(B, K, 3, V, dtype=torch.float64), seed=0
    )
    del store
    gc.collect()
    assert tiers.abandoned and tiers.used_bytes(HOST)
    num_bytes = sum(arena.num_bytes for arena in tiers.arenas.values())
    other = make_store(tiers)
    assert not tiers.abandoned and other.num_pages
    assert sum(arena.num_bytes for arena in tiers.arenas.values()) == num_bytes


def test_a_closed_store_is_not_collected_again(tiers: Tiers) -> None:
    store = make_store(tiers)
    store.close()
    assert not tiers.used_bytes(HOST) and not +tiers.promised
    other = make_store(tiers)
    del store
    gc.collect()
    assert not tiers.abandoned and tiers.used_bytes(HOST) and +tiers.promised
    other.close()


@pytest.mark.parametrize("version", [1, 2])
def test_free_host_memory_is_that_of_the_control_group(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        1: {"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "1800"},
        2: {"memory.max": "5000", "memory.current": "1800"},
    }[version]
    monkeypatch.setattr(slabs.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))

    def read(path: Path) -> str:
        try:
            return files[str(path.relative_to("/sys/fs/cgroup"))] + "\n"
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(Path, "read_text", read)
    assert free_host_bytes() == 3200
    files.update({name: "9000" for name in files if "current" in name or "usage" in name})
    assert free_host_bytes() == 0
    files.update({name: "max" for name in files if "max" in name or "limit" in name})
    assert free_host_bytes() == 10_000
    files.clear()
    assert free_host_bytes() == 10_000


def test_nobody_counts_gpu_memory_on_a_cpu() -> None:
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
        message = r"refused 4\.0 GiB of host memory \(.*Cannot allocate memory\): lower host_memory or the context"
    else:
        # As if there were a GPU, whose driver refuses.
        real = HostSlab
        monkeypatch.setattr(slabs, "HostSlab", lambda num_bytes, device: real(num_bytes, torch.device("cuda")))
        monkeypatch.setattr(Tensor, "zero_", lambda self: self)  # touching it takes seconds
        driver = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch, "zeros", failing_kernel)
        message = r"4\.0 GiB of host memory could not be pinned \(2\): lower host_memory or the context, or raise"
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
def test_a_failed_pin_is_not_the_failure_of_a_later_call() -> None:
    device = torch.device("cuda")
    slab = HostSlab(2**20, device)
    with pytest.raises(OutOfPages, match="could not be pinned"):
        slabs.pin(slab.bytes, device)  # it is already
    assert torch.ones(1000, device=device).sum().item() == 1000


@pytest.mark.gpu
def test_pinned_slabs_come_and_go() -> None:
    device = torch.device("cuda")
    for _ in range(3):
        slab = HostSlab(2**20, device)
        assert slab.bytes.is_pinned() and not slab.bytes.any()
        del slab
        gc.collect()


class CountingCopier(Copier):
    """Notes every load, and how many are on their way or in use."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sources: list[int] = []

    def load(self, copies: Any, after: Any = ()) -> Any:
        self.sources += [int(src[0]) for _, src in copies]
        return super().load(copies, after)


def loads_of(ring: Ring, names: Any) -> list[Load]:
    return [Load(("test", name), ring, ((0, torch.full((4,), name, dtype=torch.uint8)),)) for name in names]


def ring_of(num_slots: int) -> Ring:
    return Ring(num_slots, torch.zeros(4 * num_slots, dtype=torch.uint8))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_loads_run_ahead_as_far_as_there_are_buffers(which: list[int]) -> None:
    """Two rings; what is asked for is what was forecast. Nothing is loaded twice, and all but one buffer are ahead."""
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
        assert not blocked or not loads[len(copier.sources)].ring.free, "a buffer lies idle"
        prefetcher.give(load.ring, slot, None)
    assert [len(ring.free) for ring in rings] == [3, 2]


def test_an_unexpected_request_is_served_and_drops_the_forecast() -> None:
    copier, ring = CountingCopier(), ring_of(3)
    prefetcher = Prefetcher(copier)
    expected = loads_of(ring, range(10, 20))
    prefetcher.expect(expected)
    assert copier.sources == [10, 11, 12] and not ring.free
    slot = prefetcher.take(loads_of(ring, [7])[0])
    assert (slot.bytes == 7).all()
    assert copier.sources == [10, 11, 12, 7] and len(ring.free) == 2
    prefetcher.give(ring, slot, None)
    assert copier.sources == [10, 11, 12, 7], "the forecast is gone"
    slot = prefetcher.take(expected[0])
    assert (slot.bytes == 10).all()
    prefetcher.give(ring, slot, None)
    assert len(ring.free) == 3 and len(set(map(id, ring.free))) == 3


def test_the_forecast_of_one_sequence_does_not_serve_another(tiers: Tiers) -> None:
    first, second = (make_store(tiers, layers={0: layer_spec()}) for _ in range(2))
    fill(first)
    k, *_ = fill(second)[0]
    first.expect_forward(35, 42, kept=False)
    assert tiers.prefetcher._issued
    assert torch.equal(keys(second, 35), k[:, :, :35])


def test_a_new_forecast_takes_the_place_of_the_old() -> None:
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


def test_the_forecast_is_what_attention_asks_for(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is forecast, in the right order: `forget` finds nothing on its way."""
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", CHUNK)
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
        store.expect_forward(start, end, kept=False)
        for layer in store.layers:
            list(store.past(layer, start, end).segments(max(0, start - 8) if layer == 0 and end > 9 else 0))
        store.expect_forward(start, end, kept=True)
        for layer in store.layers:
            if store.kept(layer, start, end) is None:
                list(store.past(layer, start, end).segments(max(0, start - 8) if layer == 0 and end > 9 else 0))
        store.expect_backward(start, end, kept=True)
        for layer in (1, 0):
            store.kept(layer, start, end)
            past, first = store.past(layer, start, end), max(0, start - 8) if layer == 0 and end > 9 else 0
            k_and_v = []
            for at, k, v in past.segments(first):
                if layer == 1:
                    past.add_grad(at, k, v)
                k_and_v.append((k.clone(), v.clone()))
            if layer == 0 and k_and_v:
                past.add_grad(first, *(torch.cat(x, 2) for x in zip(*k_and_v, strict=True)))
            past.with_later(torch.zeros(B, K, CHUNK, D), torch.zeros(B, K, CHUNK, V))
    assert len(taken) > 50 and not dropped
    for ring in tiers.rings.values():
        assert len(ring.free) == ring.num_bytes // ring.slot_bytes


@pytest.mark.parametrize("how", ["raises", "stops"])
def test_buffers_are_not_lost_by_a_consumer_who_leaves(how: str, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SEGMENT_SIZE", CHUNK)
    store = make_store(tiers)
    k, *_ = fill(store)[0]

    def consume() -> None:
        for start, *_ in store.segments(0, 0, 35):
            if start >= 7:
                if how == "stops":
                    return
                raise RuntimeError("in the middle")

    for _ in range(2 * NUM_AHEAD):
        store.expect_forward(35, 42, kept=False)
        try:
            consume()
        except RuntimeError as error:
            assert str(error) == "in the middle"
        gc.collect()
    tiers.prefetcher.forget()
    assert [len(tiers.rings[name].free) for name in (KV, GRAD, NEW)] == [NUM_AHEAD, NUM_AHEAD, NUM_BEHIND]
    assert torch.equal(keys(store, 35), k[:, :, :35])


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of `dtype` next to x, towards zero and away from it."""
    below = x.to(dtype)
    bits = below.view(torch.int16)
    too_far = below.float().abs() > x.abs()
    below = torch.where(too_far, bits - 1, bits).view(dtype)
    above = torch.where(below.float() == x, below.view(torch.int16), below.view(torch.int16) + 1).view(dtype)
    return below, above


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_to_one_of_its_neighbours(dtype: torch.dtype) -> None:
    total = torch.randn(4000).to(dtype)
    share = torch.randn(4000) * 10 ** torch.randint(-4, 2, (4000,)).float()
    summed = total.float() + share
    below, above = neighbours(summed, dtype)
    bits = torch.randint(0, 2**31 - 1, (4000,), dtype=torch.int32)
    accumulate_reference(total, share, bits)
    is_subnormal = summed.abs() < torch.finfo(dtype).tiny
    assert ((total == below) | (total == above) | is_subnormal).all() and not is_subnormal.all()
    assert (total == below).any() and ((total == above) & (above != below)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0, 2**31 - 1])
def test_what_needs_no_rounding_is_exact(dtype: torch.dtype, bits: int) -> None:
    total = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5]).to(dtype)
    share = torch.tensor([0.5, 0.25, 0.0, -3.0, 1 / 128])
    accumulate_reference(total, share, torch.full((5,), bits, dtype=torch.int32))
    assert total.tolist() == [1.5, -1.75, 0.0, 0.0, 0.5078125]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_many_small_shares_arrive(dtype: torch.dtype, sign: int) -> None:
    """1024 shares, each a sixteenth of half the distance to the next number: rounding to nearest loses all of them."""
    step = torch.finfo(dtype).eps
    shape = (1, 2, 16, 32)
    total = torch.full(shape, float(sign)).to(dtype)
    share = torch.full(shape, sign * step / 32)
    nearest = total.clone()
    for seed in range(1024):
        accumulate_(total, share, seed)
        nearest += share.to(dtype)
    arrived = (total.double().abs().mean() - 1).item() / (1024 * step / 32)
    if dtype == torch.float32:
        assert arrived == 0, "float32 is rounded to nearest"
        return
    assert (nearest == sign).all()
    # The mean of 1024 walks of 1024 steps of variance 1/32 x 31/32: its deviation is 0.5% of the way.
    assert abs(arrived - 1) < 0.03
    assert total.double().std() > 0, "all of them went the same way"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_and_nan_stay(dtype: torch.dtype) -> None:
    """Also the NaN whose bits are all ones, a GPU's usual one: there the random bits have nowhere to carry to."""
    inf, nan = float("inf"), float("nan")
    ones = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    total = torch.tensor([inf, -inf, 1.0, 1.0, nan, inf]).to(dtype)
    share = torch.stack([torch.tensor(x) for x in (1.0, 1.0, -inf, ones, 1.0, -inf)])
    assert share[3].view(torch.int32) == 2**31 - 1
    accumulate_reference(total, share, torch.full((6,), 2**31 - 1, dtype=torch.int32))
    assert total[:3].tolist() == [inf, -inf, -inf] and total[3:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_repeats_with_the_seed(dtype: torch.dtype) -> None:
    shape = (2, 3, 9, 5)
    start, share = torch.randn(shape).to(dtype), torch.randn(shape)

    def summed(seed: int, total: Tensor) -> Tensor:
        torch.rand(3)  # what else is drawn does not matter
        accumulate_(total, share, seed)
        return total

    strided = start.transpose(1, 2).contiguous().transpose(1, 2)
    state = torch.get_rng_state()
    first = summed(7, start.clone())
    assert torch.equal(summed(7, start.clone()), first)
    assert torch.equal(summed(7, strided), first)
    is_rounded = dtype in (torch.bfloat16, torch.float16)
    assert torch.equal(summed(8, start.clone()), first) is not is_rounded
    torch.set_rng_state(state)
    accumulate_(start.clone(), share, 7)
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
