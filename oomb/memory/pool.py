"""Track which pages are free and which belong to whom. Only integers here, no bytes.

A pool hands out runs of consecutive pages, unbroken if it can. A page table lists the pages that hold one layer's K and
V (or gradients, or attention outputs) of one sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

GPU, HOST = "gpu", "host"
"""The tiers. "gpu" is the model's device, even if that is a CPU."""


class OutOfPages(MemoryError):
    """Raised when a batch does not fit in GPU and host memory, before any of it is computed.

    The message has the numbers and the settings to change, and if a plan was made, the longest context that would fit.
    """


@dataclass(frozen=True)
class PageRun:
    """Consecutive pages of one tier's pool, starting at `first`. In the page table they are the pages from `at` on."""

    tier: str
    first: int
    count: int
    at: int


class PagePool:
    """Free-page bookkeeping for the pages of one size in one tier.

    Pages 0 to 9 exist; take(4) gives [(0, 4)]; take(3) gives [(4, 3)]; after give(0, 4), take(5) finds no run of five
    and gives [(0, 4), (7, 1)].
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.num_free = 0
        self._free: list[tuple[int, int]] = []
        """Free runs (first, end), sorted."""
        self._slabs: list[tuple[int, int]] = []
        """(first, end) of each slab. One number is skipped between slabs, so that no run spans two of them."""

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def grow(self, count: int) -> int:
        """Add the pages of one more slab and return its first page."""
        first = self._slabs[-1][1] + 1 if self._slabs else 0
        self._slabs.append((first, first + count))
        self.num_pages += count
        self.num_free += count
        if count:
            self._free.append((first, first + count))
        return first

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return `count` pages as (first, count) runs: one run if any free run is long enough, otherwise several."""
        if count > self.num_free:
            raise OutOfPages(f"cannot take {count} pages: {self.num_free} are free")
        for index, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[index : index + 1] = [(first + count, end)] if end - first > count else []
                self.num_free -= count
                return [(first, count)] if count else []
        taken = []
        while count:
            first, end = self._free[0]
            size = min(count, end - first)
            taken.append((first, size))
            self._free[:1] = [(first + size, end)] if end - first > size else []
            self.num_free -= size
            count -= size
        return taken

    def give(self, first: int, count: int) -> None:
        """Give pages back."""
        end = first + count
        index = bisect_left(self._free, (first, end))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        is_ours = any(low <= first < end <= high for low, high in self._slabs)
        if not is_ours or (before and before[1] > first) or (after and after[0] < end):
            raise ValueError(f"pages {first} to {end - 1} are not in use")
        low, high = index, index
        if before and before[1] == first:
            first, low = before[0], index - 1
        if after and after[0] == end:
            end, high = after[1], index + 1
        self._free[low:high] = [(first, end)]
        self.num_free += count


class PageTable:
    """The pages of one layer and kind of one sequence. Gradient pages are missing until something is added to them."""

    def __init__(self) -> None:
        self.runs: list[PageRun] = []
        """Sorted by `at`, without overlaps."""

    def add(self, run: PageRun) -> None:
        """Insert a run and merge it with its neighbors."""
        index = bisect_left(self.runs, run.at, key=lambda r: r.at)
        self.runs.insert(index, run)
        if index + 1 < len(self.runs):
            self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Merge a run with the next one if they are consecutive."""
        a, b = self.runs[index : index + 2]
        if a.tier == b.tier and a.first + a.count == b.first and a.at + a.count == b.at:
            self.runs[index : index + 2] = [PageRun(a.tier, a.first, a.count + b.count, a.at)]

    def pieces(self, first: int, end: int) -> Iterator[PageRun]:
        """Yield the runs that hold pages [first, end)."""
        for run in self.runs:
            low, high = max(first, run.at), min(end, run.at + run.count)
            if low < high:
                yield PageRun(run.tier, run.first + low - run.at, high - low, low)

    def missing(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of pages in [first, end) that do not exist."""
        for run in list(self.pieces(first, end)):
            if first < run.at:
                yield first, run.at
            first = run.at + run.count
        if first < end:
            yield first, end

    def free_from(self, first: int) -> list[PageRun]:
        """Remove the pages from `first` on and return them."""
        freed = list(self.pieces(first, 1 << 62))
        self.runs = list(self.pieces(0, first))
        return freed


class IntervalSet:
    """A set of integers stored as disjoint intervals."""

    def __init__(self) -> None:
        self._all: list[tuple[int, int]] = []

    def add(self, low: int, high: int) -> None:
        """Add [low, high)."""
        touching = [i for i in self._all if i[0] <= high and i[1] >= low]
        rest = [i for i in self._all if i not in touching]
        ends = [low, high, *(end for i in touching for end in i)]
        self._all = sorted([*rest, (min(ends), max(ends))])

    def within(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of [low, high) that are in the set."""
        return [(max(low, a), min(high, b)) for a, b in self._all if a < high and b > low]

    def missing(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the parts of [low, high) that are not in the set."""
        gaps = []
        for a, b in self.within(low, high):
            if low < a:
                gaps.append((low, a))
            low = b
        return [*gaps, (low, high)] if low < high else gaps
