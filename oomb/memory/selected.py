"""Track which pages sparse attention selects, keep the page means it selects by, and hand it the selected pages.

Pages on the GPU are read in place by kernels that take one pointer per page; host pages are gathered in a buffer
(`selected_io`). Where the kernels cannot run (on a CPU or without Triton), all selected pages are gathered.

B batch, K key/value heads, D head size, P pages, N query tiles, C selected pages per tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oomb.memory.page_access import PageAccess
from oomb.memory.rows import GRAD, KV
from oomb.memory.selected_io import SelectedIO
from oomb.memory.selections import Selections, SelectionSpec
from oomb.memory.transfer import Load
from oomb.ops.triton_support import HAS_TRITON


@dataclass(frozen=True)
class PageView:
    """Pages as attention kernels read them (the `Pages` of `oomb.ops.page_attention`).

    Page p begins `offsets_P[p]` elements after the start of the flat tensor `base`.
    """

    base: Tensor
    offsets_P: Tensor
    length: int
    page_size: int
    row_size: int
    num_kv_heads: int
    head_size: int
    value_size: int
    value_at: int
    touched_BP: Tensor
    """Gradient pages: 1 where a batch entry's page has received a gradient. Other pages are uninitialized."""
    seed: int


class SelectedPages:
    """The sparse layers of one sequence: their selections, page means and selected pages.

    Args:
        pages: The pages of the sequence.
        spec: How pages are selected.
        needs_grad: Whether a gradient pass follows, which reads the selections again.
    """

    def __init__(self, pages: PageAccess, spec: SelectionSpec, needs_grad: bool) -> None:
        uses_kernels = has_kernels(pages.tiers.device)
        self.pages, self.needs_grad = pages, needs_grad
        self.selections = Selections(pages, spec, needs_grad, uses_kernels)
        self.io = SelectedIO(pages, self.selections, uses_kernels)

    def create_rings(self) -> None:
        """Allocate the buffers. Done up front, so that a lack of memory shows before the first chunk."""
        if self.selections.layers:
            for kind in (KV, GRAD) if self.needs_grad else (KV,):
                if self.io.needs_buffers(kind):
                    self.io.ring(kind)

    def close(self) -> None:
        """Free the tables, once no store reads addresses from them any more."""
        for layer in self.selections.layers:
            self.pages.tiers.streams.wait(self.pages.stored.get((GRAD, layer)))
        self.selections.close()
        self.io.close()

    def selection(self, layer: int, start: int, end: int) -> Tensor | None:
        """Return the selection [B, N, C] of a chunk, or None if it has not been made."""
        return self.selections.find(layer, start, end)

    def set_selection(self, layer: int, start: int, end: int, selected_BNC: Tensor, reads_in_place: bool) -> None:
        """Record a selection and start to load its host pages.

        Args:
            reads_in_place: Whether the attention of this layer takes one pointer per page.
        """
        self.selections.record(layer, start, end, selected_BNC, reads_in_place and self.io.uses_kernels)
        for load in self.loads(KV, layer, start, end):
            self.pages.tiers.prefetcher.start(load)

    def own_page_means(self, layer: int, start: int, end: int) -> Tensor | None:
        """Return where to write the means of a chunk's own pages, or None if they are written or not needed."""
        return self.selections.own_page_means(layer, start, end)

    def past_means(self, layer: int, start: int) -> Tensor:
        """Return the means [B, K, M, D] of the pages before token `start`."""
        return self.selections.past_means(layer, start)

    def loads(self, kind: str, layer: int, start: int, end: int) -> Iterator[Load]:
        """Yield the load of a chunk's selected pages, or nothing if all of them are read in place."""
        if start and not self.io.is_resident(kind, layer, start):
            yield self.io.load(kind, layer, start, end)

    @contextmanager
    def resident(self, kind: str, layer: int, start: int, end: int, seed: int = 0) -> Iterator[PageView]:
        """Yield a chunk's selected pages on the GPU. Gradient pages are stored back when the caller is done.

        Args:
            seed: Seed for the stochastic rounding of gradients.
        """
        is_grad = kind == GRAD
        if self.io.is_resident(kind, layer, start):
            addresses = self.io.addresses(kind, layer)
            base = self.pages.first_bytes(kind, layer)
            yield self._view(kind, layer, start, base, addresses - base.data_ptr(), seed)
            if is_grad:
                self._mark_touched(layer, start, end)
            return
        tiers, load = self.pages.tiers, self.io.load(kind, layer, start, end)
        slot = tiers.prefetcher.take(load)
        free_after = None
        try:
            if self.selections.reads_in_place[layer]:
                data, places = self.io.gathered(kind, layer, slot.bytes)
                yield self._view(kind, layer, start, data, places, seed)
                if is_grad:
                    self._mark_touched(layer, start, end)
                    free_after = self.io.store_grads(layer, start, end, slot.bytes, seed)
            else:
                numbers = self.selections.unique(layer, start, end)
                with self.io.copied(kind, layer, numbers, slot.bytes, seed if is_grad else None) as (data, places):
                    yield self._view(kind, layer, start, data, places, seed)
                if is_grad:
                    self._mark_touched(layer, start, end)
                    free_after = self.io.copy_back(kind, layer, numbers, slot.bytes)
        finally:
            tiers.prefetcher.give(load.ring, slot, free_after if free_after is not None else tiers.streams.mark())

    def add_future_grads(self, layer: int, start: int, end: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return dk and dv of a chunk plus what later chunks added to its gradient pages."""
        page_size = self.pages.page_size
        touched_BP = self.selections.touched[layer][:, start // page_size : end // page_size].bool()
        is_touched = touched_BP.repeat_interleave(page_size, 1)[:, None, :, None]
        with self.pages.resident(GRAD, layer, start, end) as fields:
            future_dk, future_dv = self.pages.row(GRAD, layer).read(fields)
            return torch.where(is_touched, dk + future_dk, dk), torch.where(is_touched, dv + future_dv, dv)

    def _mark_touched(self, layer: int, start: int, end: int) -> None:
        self.selections.mark_touched(layer, start, end)
        if self.io.uses_engines and self.io.has_host_pages(GRAD, start):
            self.selections.on_host.touch(layer, self.selections.host_pages(layer, start, end))

    def _view(self, kind: str, layer: int, start: int, data: Tensor, places: Tensor, seed: int) -> PageView:
        row = self.pages.layers[layer].working(kind)
        (_, _, (_, num_heads, head_size), dtype), (value_at, _, (_, _, value_size), _) = row.fields
        return PageView(
            base=data.view(dtype),
            offsets_P=places // dtype.itemsize,
            length=start,
            page_size=self.pages.page_size,
            row_size=row.num_bytes // dtype.itemsize,
            num_kv_heads=num_heads,
            head_size=head_size,
            value_size=value_size,
            value_at=value_at // dtype.itemsize,
            touched_BP=self.selections.touched[layer] if self.needs_grad else places,
            seed=seed,
        )


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on `device`."""
    return device.type == "cuda" and HAS_TRITON
