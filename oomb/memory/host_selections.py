"""Fetch page selections to the CPU, which must know them to program the copy engines.

Selections are made on the GPU. Those of the next chunk are fetched while the current one computes, so nobody waits.

B batch, P pages, N query tiles, C selected pages per tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oomb.memory.transfer import Event

if TYPE_CHECKING:
    from oomb.memory.tiers import Tiers

NUM_FETCHED = 2
"""Chunks whose selections are on the CPU: the current one of the gradient pass and the next."""


class HostSelections:
    """The selections of recent chunks, on the CPU.

    Args:
        tables: Selections [chunk, B, N, C] of each layer on the GPU, from the second chunk on.
    """

    def __init__(self, tiers: Tiers, tables: Mapping[int, Tensor], chunk_size: int, num_pages: int) -> None:
        self.tiers, self.tables, self.chunk_size, self.num_pages = tiers, tables, chunk_size, num_pages
        self.rows = {layer: row for row, layer in enumerate(tables)}
        self._fetched: dict[int, tuple[Tensor, Event]] = {}
        """By start of a chunk: selections [layer, B * N * C] on the host, and when they are complete."""
        self._pages: dict[tuple[int, int], Tensor] = {}
        self._touched: dict[int, Tensor] = {}

    def pages(self, layer: int, start: int, num_entries: int, after: Iterable[Event]) -> Tensor:
        """Return the pages that the chunk at `start` selected, sorted. Also fetch those of the chunk before it.

        Args:
            num_entries: Entries of the selection, with repetitions.
            after: Events after which the selections are complete on the GPU.
        """
        if (layer, start) not in self._pages:
            if start not in self._fetched:
                self._fetch(start, after)
            entries, done = self._fetched[start]
            before = start - self.chunk_size
            if before > 0 and before not in self._fetched:
                self._fetch(before, after)
            self.tiers.streams.finish(done)
            self._pages[layer, start] = entries[self.rows[layer], :num_entries].unique().long()
        return self._pages[layer, start]

    def touch(self, layer: int, pages: Tensor) -> None:
        """Record that pages have received gradients."""
        if layer not in self._touched:
            self._touched[layer] = torch.zeros(self.num_pages, dtype=torch.bool, device="cpu")
        self._touched[layer][pages] = True

    def are_touched(self, layer: int, pages: Tensor) -> Tensor:
        """Return which of the pages have received gradients."""
        touched = self._touched.get(layer)
        return torch.zeros_like(pages, dtype=torch.bool) if touched is None else touched[pages]

    def close(self) -> None:
        """Drop everything. The computation waits for copies that read the tables, which may be freed next."""
        for _, done in self._fetched.values():
            self.tiers.streams.wait(done)
        for entries in (self._fetched, self._pages, self._touched):
            entries.clear()

    def _fetch(self, start: int, after: Iterable[Event]) -> None:
        wanted = [table[start // self.chunk_size - 1].flatten() for table in self.tables.values()]
        shape, is_pinned = (len(wanted), wanted[0].numel()), wanted[0].is_cuda
        fetched = torch.empty(shape, dtype=wanted[0].dtype, device="cpu", pin_memory=is_pinned)

        def send() -> None:
            for row, entries in zip(fetched, wanted, strict=True):
                row.copy_(entries, non_blocking=True)

        done = self.tiers.streams.load(send, after)
        while len(self._fetched) >= NUM_FETCHED:
            oldest = next(iter(self._fetched))
            del self._fetched[oldest]
            self._pages = {key: pages for key, pages in self._pages.items() if key[1] != oldest}
        self._fetched[start] = fetched, done
