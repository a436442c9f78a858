"""What has been chosen, for the CPU: choices are made on the GPU, and whoever tells copy engines what to copy must know
them. They are fetched a chunk ahead, so that nobody waits.

B batch, P pages, N tiles, C pages chosen per tile.
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
"""Chunks that are known: the one that is walked back, and the next."""


class HostSelections:
    """`tables` has the choices of each layer, [chunk, B, N, C], from the second chunk on."""

    def __init__(self, tiers: Tiers, tables: Mapping[int, Tensor], chunk_size: int, num_pages: int) -> None:
        self.tiers, self.tables, self.chunk_size, self.num_pages = tiers, tables, chunk_size, num_pages
        self.rows = {layer: row for row, layer in enumerate(tables)}
        self._fetched: dict[int, tuple[Tensor, Event]] = {}
        """By start of a chunk: choices [layer, B * N * C] on the host, and when they are there."""
        self._pages: dict[tuple[int, int], Tensor] = {}
        self._touched: dict[int, Tensor] = {}

    def pages(self, layer: int, start: int, num_choices: int, after: Iterable[Event]) -> Tensor:
        """The pages that the chunk's tiles have chosen, in order: `num_choices` of them with repetitions, which are
        there `after` these events. The choices of the chunk before, which is walked back next, set out as well."""
        if (layer, start) not in self._pages:
            if start not in self._fetched:
                self._fetch(start, after)
            choices, done = self._fetched[start]
            before = start - self.chunk_size
            if before > 0 and before not in self._fetched:
                self._fetch(before, after)
            self.tiers.streams.finish(done)
            self._pages[layer, start] = choices[self.rows[layer], :num_choices].unique().long()
        return self._pages[layer, start]

    def touch(self, layer: int, pages: Tensor) -> None:
        """These have gradients now."""
        if layer not in self._touched:
            self._touched[layer] = torch.zeros(self.num_pages, dtype=torch.bool, device="cpu")
        self._touched[layer][pages] = True

    def are_touched(self, layer: int, pages: Tensor) -> Tensor:
        touched = self._touched.get(layer)
        return torch.zeros_like(pages, dtype=torch.bool) if touched is None else touched[pages]

    def close(self) -> None:
        """Gives up what is known. The tables may go next, so the computation waits for those who read them."""
        for _, done in self._fetched.values():
            self.tiers.streams.wait(done)
        for known in (self._fetched, self._pages, self._touched):
            known.clear()

    def _fetch(self, start: int, after: Iterable[Event]) -> None:
        wanted = [table[start // self.chunk_size - 1].flatten() for table in self.tables.values()]
        shape, is_pinned = (len(wanted), wanted[0].numel()), wanted[0].is_cuda
        fetched = torch.empty(shape, dtype=wanted[0].dtype, device="cpu", pin_memory=is_pinned)

        def send() -> None:
            for row, choices in zip(fetched, wanted, strict=True):
                row.copy_(choices, non_blocking=True)

        done = self.tiers.streams.load(send, after)
        while len(self._fetched) >= NUM_FETCHED:
            gone = next(iter(self._fetched))
            del self._fetched[gone]
            self._pages = {key: pages for key, pages in self._pages.items() if key[1] != gone}
        self._fetched[start] = fetched, done
