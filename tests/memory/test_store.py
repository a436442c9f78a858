"""Check the page store on its own: contents, placement, segments and byte counts."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stores import CHUNK, CPU, PLACEMENTS, B, D, K, V, fill, layer_spec, make_store

from oomb.memory import rows as rows_module
from oomb.memory import tiers as tiers_module
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import (
    ALIGNMENT,
    GRAD,
    KV,
    NEW,
    OUT,
    RowLayout,
    largest_segment,
    row_bytes,
    segment_bounds,
    staging_bytes,
)
from oomb.memory.store import PageStore
from oomb.memory.tiers import Tiers


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(0, 5000), st.integers(0, 6))
def test_segments_cover_the_past_in_few_sizes(chunk_size: int, num_chunks: int, skipped: int, power: int) -> None:
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


def test_segment_bounds_example() -> None:
    sizes = [stop - start for start, stop in segment_bounds(0, 7 * 4096, 4096, 32768)]
    assert sizes == [16384, 8192, 4096]
    assert list(segment_bounds(5, 24, 8, 8)) == [(5, 8), (8, 16), (16, 24)]


@given(st.integers(1, 100_000), st.integers(1, 1 << 20))
def test_the_largest_segment_is_bounded_in_tokens_and_bytes(chunk_size: int, row: int) -> None:
    size = largest_segment(chunk_size, row)
    assert size == chunk_size << (size // chunk_size).bit_length() - 1
    may_double = 2 * size <= rows_module.SEGMENT_SIZE and 2 * size * row <= rows_module.SEGMENT_BYTES
    assert not may_double
    assert size == chunk_size or (size <= rows_module.SEGMENT_SIZE and size * row <= rows_module.SEGMENT_BYTES)


FIELDS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple),
        st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    ),
    min_size=1,
    max_size=3,
)


@given(FIELDS, st.integers(1, 5))
def test_fields_of_a_row_are_aligned_and_disjoint(fields: list[tuple[Any, torch.dtype]], num_tokens: int) -> None:
    row = RowLayout(*fields)
    assert row.num_bytes == row_bytes(*(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields))
    assert row.num_bytes % ALIGNMENT == 0
    data = torch.zeros(num_tokens * row.num_bytes + 48, dtype=torch.uint8)
    views = row.views(data, num_tokens)
    written = []
    for view, (shape, dtype) in zip(views, fields, strict=True):
        assert view.shape == (*shape[:2], num_tokens, *shape[2:]) and view.dtype == dtype
        assert (view.data_ptr() - data.data_ptr()) % ALIGNMENT == 0
        assert num_tokens == 1 or view.stride(2) * dtype.itemsize == row.num_bytes, "a token is contiguous"
        written.append(torch.randn(view.shape).to(dtype))
        view.copy_(written[-1])
    assert all(torch.equal(view, x) for view, x in zip(row.views(data, num_tokens), written, strict=True))
    assert not data[num_tokens * row.num_bytes :].any()
    for token in range(num_tokens):
        own = row.views(data[token * row.num_bytes :], 1)
        assert all(torch.equal(view[:, :, 0], x[:, :, token]) for view, x in zip(own, written, strict=True))


@pytest.mark.parametrize("saved_from", [0, 2 * CHUNK])
@pytest.mark.parametrize("gpu_tokens", PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_appended_chunks_are_read_back(
    tiers: Tiers, page_size: int, gpu_tokens: int, saved_from: int, segment_size: int
) -> None:
    places = {"gpu_tokens": gpu_tokens, "out_tokens": 5 * CHUNK - saved_from, "gpu_out_tokens": gpu_tokens}
    store = make_store(tiers, page_size=page_size, **places)
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
            kept = store.load_output(layer, start, start + CHUNK)
            assert (kept is not None) == (start >= saved_from)
            if kept is None:
                continue
            assert kept[0].transpose(1, 2).is_contiguous()
            assert torch.equal(kept[0], out[:, :, start : start + CHUNK])
            assert torch.equal(kept[1], lse[:, :, start : start + CHUNK])
        assert store.load_output(layer, end, end + CHUNK) is None, "the last chunk has no pages"


def test_outputs_are_not_saved_by_default(tiers: Tiers) -> None:
    store = make_store(tiers)
    fill(store)
    assert store.load_output(0, 0, CHUNK) is None
    assert OUT not in store.pages.kinds and (OUT, 0) not in store.pages.lease.tables


@pytest.mark.parametrize("gpu_tokens", PLACEMENTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_gradients_add_up_and_reach_their_chunk(
    tiers: Tiers, page_size: int, gpu_tokens: int, segment_size: int
) -> None:
    """Process chunks in reverse; each adds to its past from some token on, as windowed and dense attention do."""
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
            for total, x, before, found in zip(totals, own, given, past.add_future_grads(*own), strict=True):
                later = total[:, :, start : start + CHUNK] if start < store.capacity else torch.zeros_like(x)
                torch.testing.assert_close(
                    found, before + later, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
                )
                assert torch.equal(x, before), "what was given is left alone"
            if layer == 3:
                store.free_from(start)


def test_gradient_pages_are_created_when_first_written(tiers: Tiers) -> None:
    store = make_store(tiers, page_size=4, layers={0: layer_spec()}, gpu_tokens=16)
    row = store.layers[0].grad.num_bytes
    assert tiers.used_bytes(GPU) + tiers.used_bytes(HOST) == 9 * 4 * row
    share = torch.ones(B, K, 6, D, dtype=torch.float64), torch.ones(B, K, 6, V, dtype=torch.float64)
    store.add_grad(0, 13, *share, chunk_start=0)  # pages 3 and 4, one in each tier
    assert (tiers.used_bytes(GPU), tiers.used_bytes(HOST)) == (5 * 4 * row, 6 * 4 * row)
    store.add_grad(0, 12, *share, chunk_start=0)
    assert (tiers.used_bytes(GPU), tiers.used_bytes(HOST)) == (5 * 4 * row, 6 * 4 * row)


@pytest.mark.parametrize("gpu_tokens", [0, 13, 1000])
def test_pages_have_the_configured_dtypes(tiers: Tiers, gpu_tokens: int) -> None:
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
        store.add_grad(0, 0, share, tiny[1], chunk_start=0)
    dk, _ = store.add_future_grads(0, 0, CHUNK, torch.zeros_like(tiny[0]), tiny[1])
    assert torch.equal(dk, torch.full_like(dk, 1 + 1e-12))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_rounding_does_not_depend_on_the_tier(grad_dtype: torch.dtype) -> None:
    found = []
    for gpu_tokens, page_size in itertools.product(PLACEMENTS, (1, 4, 16)):
        layers = {0: layer_spec(torch.float32, grad_dtype=grad_dtype)}
        store = make_store(Tiers(CPU), layers=layers, gpu_tokens=gpu_tokens, page_size=page_size)
        store.rounding_seed = 5
        torch.manual_seed(1)
        for start in (35, 28, 21):
            shares = torch.randn(B, K, start, D), torch.randn(B, K, start, V)
            store.past(0, start, start + CHUNK).add_grad(0, *shares)
        nothing = torch.zeros(B, K, CHUNK, D), torch.zeros(B, K, CHUNK, V)
        found.append(torch.cat([x.flatten() for x in store.add_future_grads(0, 14, 21, *nothing)]))
        assert torch.equal(found[-1], found[0]) and found[0].any()
    others = []
    for seed in (5, 6):
        store = make_store(Tiers(CPU), layers=layers)
        store.rounding_seed = seed
        for start in (28, 35):
            store.past(0, start, start + CHUNK).add_grad(0, *(torch.full((B, K, CHUNK, n), 1 / 3) for n in (D, V)))
        others.append(store.add_future_grads(0, 0, CHUNK, *nothing)[0])
    assert not torch.equal(*others), "another seed rounds otherwise"


def test_a_window_does_not_reach_the_first_pages(tiers: Tiers) -> None:
    """The expected order must list what attention will read, and no more."""
    store = make_store(tiers, layers={0: layer_spec(window=9), 1: layer_spec()})
    fill(store)
    asked = [load.key[1:] for load in store.schedule.forward(28, 35, saved=False)]
    assert asked == [(KV, 0, 20, 21), (KV, 0, 21, 28), (KV, 1, 0, 28)]


def test_bytes_are_counted(tiers: Tiers) -> None:
    """One layer and three chunks with pages. The GPU has room for 11 of 21 tokens: two pages of four."""
    spec = layer_spec()
    kv, grad, out = spec.kv.num_bytes, spec.grad.num_bytes, spec.out.num_bytes
    store = make_store(tiers, 3, layers={0: spec}, gpu_tokens=11, keeps=True)
    fill(store)
    assert tiers.streams.stored_bytes == (21 - 8) * kv + 21 * out
    assert tiers.streams.loaded_bytes == 0
    list(store.segments(0, 0, 21))
    assert tiers.streams.loaded_bytes == 13 * kv
    list(store.segments(0, 0, 7))
    assert tiers.streams.loaded_bytes == 13 * kv
    store.load_output(0, 7, 14)
    assert tiers.streams.loaded_bytes == 13 * kv + 7 * out
    tiers.reset_counters()
    assert tiers.streams.loaded_bytes == tiers.streams.stored_bytes == 0
    shares = torch.ones(B, K, 14, D, dtype=torch.float64), torch.ones(B, K, 14, V, dtype=torch.float64)
    store.add_grad(0, 7, *shares, chunk_start=0)  # fresh: nothing to load, tokens 8 to 20 to store
    assert (tiers.streams.loaded_bytes, tiers.streams.stored_bytes) == (0, 13 * grad)
    store.add_grad(0, 7, *shares, chunk_start=0)
    assert (tiers.streams.loaded_bytes, tiers.streams.stored_bytes) == (13 * grad, 26 * grad)
    store.add_future_grads(0, 14, 21, *(x[:, :, :7] for x in shares))
    assert tiers.streams.loaded_bytes == 20 * grad
    # Pages 0 and 1 hold tokens 0 to 7; the gradients touched pages 1 to 5.
    assert tiers.peak_bytes == {GPU: 4 * (2 * kv + grad), HOST: 4 * (4 * kv + 4 * grad + 6 * out)}
    store.close()
    assert tiers.peak_bytes[GPU] == 4 * (2 * kv + grad)
    tiers.reset_counters()
    assert tiers.peak_bytes == {GPU: 0, HOST: 0}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_staging_bytes_are_those_of_the_rings(tiers: Tiers, keeps: bool, needs_grad: bool) -> None:
    spec = layer_spec()
    make_store(tiers, layers={0: spec}, keeps=keeps, needs_grad=needs_grad)
    expected = staging_bytes(
        [(spec.kv.num_bytes, spec.grad.num_bytes, spec.out.num_bytes)],
        [],
        chunk_size=CHUNK,
        keeps=keeps,
        needs_grad=needs_grad,
    )
    assert sum(ring.num_bytes for ring in tiers.rings.values()) == expected
    assert set(tiers.rings) == {KV, NEW, *[GRAD] * needs_grad, *[OUT] * keeps}


def test_no_staging_buffers_if_all_pages_fit_on_the_gpu(tiers: Tiers) -> None:
    store = make_store(tiers, gpu_tokens=35, gpu_out_tokens=35, keeps=True)
    fill(store)
    list(store.segments(0, 0, 35))
    assert not tiers.rings and not tiers.used_bytes(HOST)
    assert tiers.streams.loaded_bytes == tiers.streams.stored_bytes == 0


@pytest.mark.parametrize(("tier", "gpu_tokens"), [(HOST, 0), (GPU, 1000)])
def test_memory_is_reused(tiers: Tiers, tier: str, gpu_tokens: int) -> None:
    """A step like the last one allocates nothing, and a second sequence adds a slab. A longer sequence replaces all GPU
    slabs by one but adds a host slab, since pinning is expensive."""

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
    kept = 0 if tier == GPU else 18 * per_page
    assert num_bytes() == kept + 35 * per_page // 4, "slabs of a size that nobody uses make room on the GPU"
    other.close()
    assert tiers.idle_bytes(tier) == num_bytes() + rings
    tiers.release()
    assert not tiers.arenas and not tiers.rings


def test_an_oversized_gpu_slab_is_freed(tiers: Tiers) -> None:
    """Evaluating a long sequence may take more pages than training, whose plan counts the idle memory for activations
    and gradients."""
    make_store(tiers, 10, gpu_tokens=1000, needs_grad=False).close()
    large = tiers.idle_bytes(GPU)
    make_store(tiers, 3, gpu_tokens=1000, needs_grad=False).close()
    assert 0 < tiers.idle_bytes(GPU) < large / 2
    make_store(tiers, 0, gpu_tokens=1000, needs_grad=False).close()
    assert tiers.idle_bytes(GPU) == 0, "one chunk needs no pages"


@pytest.mark.parametrize("has_limit", [False, True])
def test_oversized_pinned_slabs_are_freed_if_memory_is_short(
    tiers: Tiers, has_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer sequence has more pages and saves fewer outputs: the plan counts the sum, not the maximum of each."""

    def held() -> int:
        return sum(arena.num_bytes for (tier, _), arena in tiers.arenas.items() if tier == HOST)

    def store(num_chunks: int, out_tokens: int) -> PageStore:
        return make_store(tiers, num_chunks, layers={0: layer_spec()}, out_tokens=out_tokens, page_size=1)

    store(4, 4 * CHUNK).close()
    before = held()
    monkeypatch.setattr(tiers_module, "free_host_bytes", lambda: 2**40)
    store(6, CHUNK).close()
    assert held() > before, "pinned memory is kept while there is room"
    if has_limit:
        tiers.host_limit = held()
    else:
        monkeypatch.setattr(tiers_module, "free_host_bytes", lambda: 0)
    longest = store(8, CHUNK)
    assert held() == tiers.held_bytes(HOST)
    longest.close()


def test_pinned_slabs_of_other_sizes_stay_if_memory_suffices(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tiers, gpu_tokens=0).close()
    before = set(tiers.arenas)
    make_store(tiers, gpu_tokens=0, page_size=1).close()
    assert before < set(tiers.arenas)
    monkeypatch.setattr(tiers_module, "free_host_bytes", lambda: 0)
    make_store(tiers, gpu_tokens=0, page_size=2).close()
    assert not before & set(tiers.arenas)


def test_a_dropped_store_is_collected(tiers: Tiers) -> None:
    store = make_store(tiers)
    fill(store)
    store.add_grad(
        0, 0, torch.ones(B, K, 3, D, dtype=torch.float64), torch.ones(B, K, 3, V, dtype=torch.float64), chunk_start=0
    )
    del store
    gc.collect()
    assert tiers.orphaned and tiers.used_bytes(HOST)
    num_bytes = sum(arena.num_bytes for arena in tiers.arenas.values())
    other = make_store(tiers)
    assert not tiers.orphaned and other.pages.num_pages
    assert sum(arena.num_bytes for arena in tiers.arenas.values()) == num_bytes


def test_a_closed_store_is_not_collected_again(tiers: Tiers) -> None:
    store = make_store(tiers)
    store.close()
    assert not tiers.used_bytes(HOST) and not +tiers.promised
    other = make_store(tiers)
    del store
    gc.collect()
    assert not tiers.orphaned and tiers.used_bytes(HOST) and +tiers.promised
    other.close()
