"""Record which pages each chunk selects, and keep the tables that go with it on the GPU.

B batch, K key/value heads, D head size, P pages, N query tiles, C selected pages per tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.memory.host_selections import HostSelections
from oomb.memory.page_access import PageAccess
from oomb.memory.transfer import Event

MAX_INT16 = 2**15 - 1


@dataclass(frozen=True)
class SelectionSpec:
    """How pages are selected, as far as memory is concerned."""

    budget: int
    """Pages that a query tile reads at most."""
    tile_size: int
    """Queries that share a selection."""
    num_means: int
    """Mean keys that stand for a page."""
    means_dtype: torch.dtype

    def num_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tile_size)


def max_selected(spec: SelectionSpec, batch_size: int, chunk_size: int, num_pages: int) -> int:
    """Return how many pages all tiles of a chunk can select together."""
    return min(num_pages, batch_size * spec.num_tiles(chunk_size) * spec.budget)


def table_bytes(
    spec: SelectionSpec, *, batch_size: int, num_kv_heads: int, head_size: int, num_pages: int, capacity: int,
    chunk_size: int, needs_grad: bool,
) -> int:  # fmt: skip
    """Return the GPU memory of one layer's tables: page means, selections, flags and addresses."""
    means = batch_size * num_kv_heads * num_pages * spec.num_means * head_size * spec.means_dtype.itemsize
    tiles = batch_size * spec.num_tiles(chunk_size) * (capacity // chunk_size)
    itemsize = selection_dtype(num_pages).itemsize
    if not needs_grad:
        return means + 16 * num_pages
    return means + 32 * num_pages + batch_size * num_pages + tiles * min(spec.budget, num_pages) * itemsize


def selection_dtype(num_pages: int) -> torch.dtype:
    """Return the smallest dtype that holds every page number."""
    return torch.int16 if num_pages <= MAX_INT16 else torch.int32


class Selections:
    """The selections, page means and gradient flags of the sparse layers of one sequence."""

    def __init__(self, pages: PageAccess, spec: SelectionSpec, needs_grad: bool, uses_kernels: bool) -> None:
        self.pages, self.spec, self.needs_grad = pages, spec, needs_grad
        self.layers = [layer for layer in pages.layers if pages.is_sparse(layer)]
        self.batch_size = pages.row("kv", self.layers[0]).fields[0][2][0] if self.layers else 1
        self.num_selected = max_selected(spec, self.batch_size, pages.chunk_size, pages.num_pages)
        """Pages that a chunk can select."""
        self.reads_in_place = dict.fromkeys(self.layers, uses_kernels)
        """Whether a layer's attention takes one pointer per page, and so reads GPU pages in place."""
        self.done: dict[int, Event] = {}
        """When a layer's latest selection is complete."""
        self.latest: dict[int, int] = {}
        """Start of the chunk whose selection is a layer's latest. The CPU does not know its content yet."""
        self.page_means, self.touched, self.tables = {}, {}, {}
        num_chunks = pages.capacity // pages.chunk_size if needs_grad else 1
        shape = num_chunks, self.batch_size, spec.num_tiles(pages.chunk_size), min(spec.budget, pages.num_pages)
        for layer in self.layers:
            _, num_heads, size = pages.row("kv", layer).fields[0][2]
            means = self.batch_size, num_heads, pages.num_pages * spec.num_means, size
            self.page_means[layer] = pages.tiers.table(means, spec.means_dtype)
            if needs_grad:
                self.touched[layer] = pages.tiers.table((self.batch_size, pages.num_pages), torch.uint8).zero_()
            self.tables[layer] = pages.tiers.table(shape, selection_dtype(pages.num_pages))
        self._recorded: dict[int, set[int]] = {layer: set() for layer in self.layers}
        self._num_means_written = dict.fromkeys(self.layers, 0)
        self.on_host = HostSelections(pages.tiers, self.tables, pages.chunk_size, pages.num_pages)

    def close(self) -> None:
        """Free the tables."""
        self.on_host.close()
        for tables in (self.page_means, self.touched, self.tables):
            tables.clear()

    def find(self, layer: int, start: int, end: int) -> Tensor | None:
        """Return the selection [B, N, C] of chunk [start, end), or None if it has not been recorded."""
        if start not in self._recorded[layer]:
            return None
        num_tiles = self.spec.num_tiles(end - start)
        num_selected = min(self.spec.budget, start // self.pages.page_size)
        table = self.tables[layer][start // self.pages.chunk_size - 1 if self.needs_grad else 0]
        shape = self.batch_size, num_tiles, num_selected
        return table.flatten()[: self.batch_size * num_tiles * num_selected].view(shape)

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """Return the recorded selection [B, N, C] of chunk [start, end)."""
        selection = self.find(layer, start, end)
        assert selection is not None, f"layer {layer} has not selected pages for the chunk at {start}"
        return selection

    def record(self, layer: int, start: int, end: int, selected_BNC: Tensor, reads_in_place: bool) -> None:
        """Record the selection of chunk [start, end)."""
        self.reads_in_place[layer] = reads_in_place
        if not self.needs_grad:
            self._recorded[layer].clear()
        self._recorded[layer].add(start)
        self.latest[layer] = start
        selection = self.get(layer, start, end)
        assert selection.shape == selected_BNC.shape
        selection.copy_(selected_BNC)
        self.done[layer] = self.pages.tiers.streams.mark()

    def unique(self, layer: int, start: int, end: int) -> list[int]:
        """Return the selected pages in order. Waits for the GPU."""
        return self.get(layer, start, end).unique().tolist()

    def host_pages(self, layer: int, start: int, end: int) -> Tensor:
        """Return the selected pages in order, on the CPU, without waiting for the computation."""
        return self.on_host.pages(layer, start, self.get(layer, start, end).numel(), self.done.values())

    def mark_touched(self, layer: int, start: int, end: int) -> None:
        """Record that the selected pages have received gradients."""
        self.touched[layer].scatter_(1, self.get(layer, start, end).flatten(1).long(), 1)

    def own_page_means(self, layer: int, start: int, end: int) -> Tensor | None:
        """Return where to write the means of a chunk's own pages, or None if they are written or not needed."""
        first, last = (at // self.pages.page_size * self.spec.num_means for at in (start, end))
        if start >= self.pages.capacity or first < self._num_means_written[layer]:
            return None
        self._num_means_written[layer] = last
        return self.page_means[layer][:, :, first:last]

    def past_means(self, layer: int, start: int) -> Tensor:
        """Return the means [B, K, M, D] of the pages before token `start`."""
        return self.page_means[layer][:, :, : start // self.pages.page_size * self.spec.num_means]
