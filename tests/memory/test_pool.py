"""Check page bookkeeping: pools, page tables and intervals against naive models, and stores that share tiers."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from oomb.memory import tiers as tiers_module
from oomb.memory.pool import GPU, HOST, IntervalSet, OutOfPages, PagePool, PageRun, PageTable
from oomb.memory.rows import LayerRows, RowLayout
from oomb.memory.store import PageStore
from oomb.memory.tiers import PageLease, Tiers

POOL_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 12)),
        st.tuples(st.just("take"), st.integers(0, 15)),
        st.tuples(st.just("give"), st.integers(0, 40), st.integers(1, 6)),
        st.tuples(st.just("give back"), st.integers(0, 100)),
    ),
    max_size=40,
)


class NaivePool:
    """A pool written with sets."""

    def __init__(self) -> None:
        self.slabs: list[range] = []
        self.used: set[int] = set()

    @property
    def free(self) -> set[int]:
        return {page for slab in self.slabs for page in slab} - self.used

    def longest_free_run(self) -> int:
        runs, longest = Counter[int](), 0
        for page in sorted(self.free):
            runs[page] = runs[page - 1] + 1
            longest = max(longest, runs[page])
        return longest

    def may_give(self, pages: range) -> bool:
        return self.used.issuperset(pages) and any(pages[0] in slab and pages[-1] in slab for slab in self.slabs)


@given(POOL_STEPS)
@settings(max_examples=300)
def test_a_pool_neither_loses_nor_duplicates_pages(steps: list[tuple[Any, ...]]) -> None:
    pool, naive, runs = PagePool(), NaivePool(), []
    for name, *numbers in steps:
        before = copy.deepcopy(vars(pool))
        if name == "grow":
            first = pool.grow(numbers[0])
            new = range(first, first + numbers[0])
            assert not naive.free & set(new) and not naive.used & set(new)
            naive.slabs.append(new)
        elif name == "take" and numbers[0] > len(naive.free):
            with pytest.raises(OutOfPages, match=f"{numbers[0]} pages.* {len(naive.free)} are free"):
                pool.take(numbers[0])
            assert vars(pool) == before
        elif name == "take":
            in_one_piece = numbers[0] <= naive.longest_free_run()
            taken = pool.take(numbers[0])
            assert sum(count for _, count in taken) == numbers[0]
            assert len(taken) <= 1 or not in_one_piece
            for first, count in taken:
                pages = range(first, first + count)
                assert naive.free.issuperset(pages)
                assert any(pages[0] in slab and pages[-1] in slab for slab in naive.slabs), "reaches across slabs"
                naive.used.update(pages)
            runs += taken
        else:
            if name == "give back" and not runs:
                continue
            first, count = runs[numbers[0] % len(runs)] if name == "give back" else numbers
            pages = range(first, first + count)
            if naive.may_give(pages):
                pool.give(first, count)
                naive.used.difference_update(pages)
            else:
                with pytest.raises(ValueError, match=f"pages {first} to {first + count - 1} are not in use"):
                    pool.give(first, count)
                assert vars(pool) == before
        assert pool.num_used == len(naive.used) and pool.num_free == len(naive.free)
    for page in naive.used:
        pool.give(page, 1)
    assert pool.num_free == pool.num_pages == sum(map(len, naive.slabs))
    for slab in sorted((slab for slab in naive.slabs if slab), key=len, reverse=True):
        [(first, count)] = pool.take(len(slab))
        assert count == len(slab)
        assert first in {other.start for other in naive.slabs if len(other) == count}, "free runs did not merge"


def test_docstring_example() -> None:
    pool = PagePool()
    pool.grow(10)
    assert pool.take(4) == [(0, 4)] and pool.take(3) == [(4, 3)]
    pool.give(0, 4)
    assert pool.take(5) == [(0, 4), (7, 1)]


RANGES = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(RANGES, max_size=12), RANGES)
def test_intervals_are_a_set(added: list[tuple[int, int]], queried: tuple[int, int]) -> None:
    intervals, numbers = IntervalSet(), set[int]()
    for low, high in added:
        intervals.add(low, high)
        numbers.update(range(low, high))
    window = set(range(*queried))
    for found, expected in (
        (intervals.within(*queried), window & numbers),
        (intervals.missing(*queried), window - numbers),
    ):
        assert [n for low, high in found for n in range(low, high)] == sorted(expected)
        assert all(low < high for low, high in found)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found)), "what touches is one interval"


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 2), st.sampled_from((GPU, HOST))), max_size=8),
    st.randoms(use_true_random=False),
    RANGES,
    st.integers(0, 30),
)
def test_a_table_is_a_list_of_pages(
    parts: list[tuple[int, bool, int, str]], random: Any, queried: tuple[int, int], cut: int
) -> None:
    """Add runs in any order, some of them consecutive in the pool, in the table or in both."""
    runs, at, pages = [], 0, {}
    for count, follows, gap, tier in parts:
        first = runs[-1].first + runs[-1].count if follows and runs else 50 + 10 * len(runs)
        at += gap
        runs.append(PageRun(tier, first, count, at))
        pages.update({at + i: (tier, first + i) for i in range(count)})
        at += count
    table = PageTable()
    random.shuffle(runs)
    for run in runs:
        table.add(run)

    def listed(runs: list[PageRun]) -> list[tuple[int, tuple[str, int]]]:
        return [(run.at + i, (run.tier, run.first + i)) for run in runs for i in range(run.count)]

    pieces = list(table.pieces(*queried))
    assert listed(pieces) == [(i, pages[i]) for i in range(*queried) if i in pages]
    for a, b in itertools.pairwise(pieces):
        assert (a.tier, a.first + a.count, a.at + a.count) != (b.tier, b.first, b.at), "one run would do"
    gaps = list(table.missing(*queried))
    assert [i for low, high in gaps for i in range(low, high)] == [i for i in range(*queried) if i not in pages]
    assert all(low < high for low, high in gaps)
    gone = table.free_from(cut)
    assert listed(gone) == sorted((i, page) for i, page in pages.items() if i >= cut)
    assert listed(table.runs) == sorted((i, page) for i, page in pages.items() if i < cut)


def spec(num_heads: int, grad_dtype: torch.dtype = torch.float32) -> LayerRows:
    shape = (1, num_heads, 2)
    return LayerRows(
        kv=RowLayout((shape, torch.float32), (shape, torch.float32)),
        grad=RowLayout((shape, grad_dtype), (shape, grad_dtype)),
        out=RowLayout((shape, torch.float32), ((1, num_heads), torch.float32)),
        dtype=torch.float32,
    )


class Tracked:
    """A store with its expected content."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.num_filled = 0
        self.end = store.capacity
        """Tokens from here on were freed."""
        heads = store.layers[0].kv.fields[0][2][1]
        self.k = torch.zeros(len(store.layers), 1, heads, store.capacity, 2)
        self.grad = torch.zeros_like(self.k)


OPENED = {
    "num_chunks": st.integers(0, 5),
    "chunk_size": st.integers(1, 3),
    "page_size": st.sampled_from((1, 2, 4)),
    "gpu_tokens": st.integers(0, 15),
    "gpu_out_tokens": st.integers(0, 15),
    "chunks_kept": st.integers(0, 5),
    "needs_grad": st.booleans(),
    "num_layers": st.integers(1, 2),
    "num_heads": st.integers(1, 3),
}


class StoresComeAndGo(RuleBasedStateMachine):
    """Stores of all kinds that share one `Tiers`: opened, filled, freed in part, closed, dropped and refused."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = Tiers(torch.device("cpu"))
        self.live: list[Tracked] = []
        self.value = 0.0

    def pick(self, index: int) -> Tracked:
        return self.live[index % len(self.live)]

    def numbers(self, *shape: int) -> Tensor:
        """Return small integers, never the same tensor twice; their sums are exact."""
        self.value += 1
        return self.value + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

    @initialize(**OPENED)
    def begin(self, **drawn: Any) -> None:
        self.open(**drawn)

    @rule(**OPENED)
    def open(self, num_chunks: int, chunks_kept: int, num_layers: int, num_heads: int, **settings: Any) -> None:
        settings["capacity"] = num_chunks * settings["chunk_size"]
        settings["out_tokens"] = min(num_chunks, chunks_kept) * settings["chunk_size"]
        layers = {layer: spec(num_heads) for layer in range(num_layers)}
        self.live.append(Tracked(PageStore(self.tiers, layers, **settings)))

    @rule(**OPENED, num_slabs=st.integers(0, 3))
    def open_where_memory_is_refused(self, num_slabs: int, **drawn: Any) -> None:
        """Refuse to allocate more than `num_slabs` slabs."""
        before = self.pages_in_use(), self.promised()
        num_made = itertools.count()

        def refusing(make: Any) -> Any:
            def make_or_refuse(*args: Any) -> Any:
                if next(num_made) >= num_slabs:
                    raise OutOfPages("refused")
                return make(*args)

            return make_or_refuse

        with (
            mock.patch.object(tiers_module, "HostSlab", refusing(tiers_module.HostSlab)),
            mock.patch.object(self.tiers, "allocate", refusing(self.tiers.allocate)),
        ):
            try:
                self.open(**drawn)
            except OutOfPages:
                # Already here, while the error still references the unfinished store.
                assert (self.pages_in_use(), self.promised()) == before, "a refusal changes nothing"
                self.every_page_has_one_owner()
                self.promises_can_be_kept()

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def fill(self, index: int) -> None:
        tracked = self.pick(index)
        store = tracked.store
        for start in range(tracked.num_filled, tracked.end, store.chunk_size):
            for layer in store.layers:
                k = self.numbers(1, tracked.k.shape[2], store.chunk_size, 2)
                tracked.k[layer][:, :, start : start + store.chunk_size] = k
                store.append(layer, start, k, -k)
                store.save_output(layer, start, k, k[..., 0])
            tracked.num_filled = start + store.chunk_size

    @precondition(lambda self: any(self.can_train()))
    @rule(index=st.integers(0, 9), layer=st.integers(0, 1), first=st.integers(0, 14), length=st.integers(1, 15))
    def add_grad(self, index: int, layer: int, first: int, length: int) -> None:
        candidates = self.can_train()
        tracked = candidates[index % len(candidates)]
        layer, first = layer % len(tracked.store.layers), first % tracked.end
        end = min(first + length, tracked.end)
        dk = self.numbers(1, tracked.k.shape[2], end - first, 2)
        tracked.grad[layer][:, :, first:end] += dk
        tracked.store.add_grad(layer, first, dk, -dk, chunk_start=0)

    def can_train(self) -> list[Tracked]:
        return [tracked for tracked in self.live if "grad" in tracked.store.pages.kinds and tracked.end]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), first=st.integers(0, 15))
    def read(self, index: int, first: int) -> None:
        tracked = self.pick(index)
        store, end = tracked.store, min(tracked.num_filled, tracked.end)
        for layer in store.layers:
            at = min(first, end)
            for start, k, v in store.segments(layer, at, end):
                assert start == at
                at = start + k.shape[2]
                assert torch.equal(k, tracked.k[layer][:, :, start:at]) and torch.equal(v, -k)
            assert at == end
            if "grad" in store.pages.kinds:
                nothing = torch.zeros_like(tracked.k[layer][:, :, : tracked.end])
                for at in range(0, tracked.end, store.chunk_size):
                    upto = min(at + store.chunk_size, tracked.end)
                    dk, dv = store.add_future_grads(layer, at, upto, nothing[:, :, at:upto], nothing[:, :, at:upto])
                    assert torch.equal(dk, tracked.grad[layer][:, :, at:upto]) and torch.equal(dv, -dk)
            for at in range(store.pages.saved_from, end - store.chunk_size + 1, store.chunk_size):
                out, lse = store.load_output(layer, at, at + store.chunk_size)  # type: ignore[misc]
                assert torch.equal(out, tracked.k[layer][:, :, at : at + store.chunk_size])
                assert torch.equal(lse, out[..., 0])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), chunk=st.integers(0, 4))
    def cut(self, index: int, chunk: int) -> None:
        tracked = self.pick(index)
        tracked.end = min(tracked.end, chunk * tracked.store.chunk_size)
        tracked.store.free_from(tracked.end)
        num_pages = -(-tracked.end // tracked.store.page_size)
        for _, table in tracked.store.pages.lease.tables.values():
            assert not list(table.pieces(num_pages, tracked.store.pages.num_pages))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        tracked = self.live.pop(index % len(self.live))
        tracked.store.close()
        tracked.store.close()

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def abandon(self, index: int) -> None:
        num_abandoned = len(self.tiers.orphaned)
        self.live.pop(index % len(self.live))
        assert len(self.tiers.orphaned) == num_abandoned + 1

    @rule()
    def collect(self) -> None:
        self.tiers.collect()
        assert not self.tiers.orphaned

    def holdings(self) -> list[PageLease]:
        return [*(tracked.store.pages.lease for tracked in self.live), *self.tiers.orphaned]

    def promised(self) -> Counter[tuple[str, int]]:
        """Return the pages promised to live sequences."""
        return sum((+tracked.store.pages.lease.promised for tracked in self.live), start=Counter())

    def pages_in_use(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for tracked in self.live:
            for page_bytes, table in tracked.store.pages.lease.tables.values():
                for run in table.runs:
                    found.setdefault((run.tier, page_bytes), []).extend(range(run.first, run.first + run.count))
        return found

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned: Counter[tuple[str, int, int]] = Counter()
        for holding in self.holdings():
            for page_bytes, table in holding.tables.values():
                for run in table.runs:
                    owned.update((run.tier, page_bytes, run.first + i) for i in range(run.count))
        assert all(count == 1 for count in owned.values())
        per_arena = Counter((tier, page_bytes) for tier, page_bytes, _ in owned)
        assert per_arena.keys() <= self.tiers.arenas.keys()
        for (tier, page_bytes), arena in self.tiers.arenas.items():
            assert arena.pool.num_used == per_arena[tier, page_bytes]
            free = {page for first, end in arena.pool._free for page in range(first, end)}
            assert len(free) == arena.pool.num_free
            assert not any((tier, page_bytes, page) in owned for page in free)
            assert arena.num_bytes == sum(slab.nbytes for _, slab, _ in arena.slabs)

    @invariant()
    def promises_can_be_kept(self) -> None:
        promised: Counter[tuple[str, int]] = Counter()
        for holding in self.holdings():
            assert all(count >= 0 for count in holding.promised.values())
            promised.update(holding.promised)
        assert +promised == +self.tiers.promised
        assert all(count >= 0 for count in self.tiers.promised.values())
        for key, count in promised.items():
            assert not count or self.tiers.arenas[key].pool.num_free >= count

    def teardown(self) -> None:
        for tracked in self.live:
            tracked.store.close()
        self.tiers.collect()
        assert not +self.tiers.promised
        assert self.tiers.used_bytes(GPU) == self.tiers.used_bytes(HOST) == 0
        for arena in self.tiers.arenas.values():
            assert arena.pool.num_free == arena.pool.num_pages
        for ring in self.tiers.rings.values():
            assert len(ring.free) == ring.num_bytes // ring.slot_bytes if ring.slot_bytes else not ring.free


TestStoresComeAndGo = StoresComeAndGo.TestCase
TestStoresComeAndGo.settings = settings(max_examples=200, stateful_step_count=40)
