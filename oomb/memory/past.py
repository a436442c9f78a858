"""Expose one layer's pages to one chunk, through the interfaces that attention expects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from oomb.memory.rows import GRAD, KV
from oomb.memory.selected import PageView
from oomb.ops.rounding import mix

if TYPE_CHECKING:
    from oomb.memory.store import PageStore


class DenseLayerPast:
    """All pages of a layer before one chunk (the `DensePast` of `oomb.attention.dense`)."""

    def __init__(self, store: PageStore, layer: int, start: int, span_end: int) -> None:
        self.store, self.layer = store, layer
        self.length, self.span_end = start, span_end

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        return self.store.segments(self.layer, first, self.length)

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        self.store.add_grad(self.layer, start, dk, dv, chunk_start=self.length)

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.add_future_grads(self.layer, self.length, self.span_end, dk, dv)


class SparseLayerPast:
    """The selected pages of a layer before one chunk (the `SparsePast` of `oomb.attention.sparse`)."""

    def __init__(self, store: PageStore, layer: int, start: int, span_end: int) -> None:
        assert store.selected is not None and store.selection_spec is not None
        spec = store.selection_spec
        self.store, self.selected, self.layer = store, store.selected, layer
        self.length, self.span_end = start, span_end
        self.page_size, self.budget, self.tile_size = store.page_size, spec.budget, spec.tile_size
        self.selection = self.selected.selection(layer, start, span_end)

    def page_means(self) -> Tensor:
        return self.selected.past_means(self.layer, self.length)

    def own_page_means(self) -> Tensor | None:
        return self.selected.own_page_means(self.layer, self.length, self.span_end)

    def set_selection(self, selected_BNC: Tensor, reads_in_place: bool) -> None:
        self.selected.set_selection(self.layer, self.length, self.span_end, selected_BNC, reads_in_place)
        self.selection = self.selected.selection(self.layer, self.length, self.span_end)

    def pages(self) -> AbstractContextManager[PageView]:
        return self.selected.resident(KV, self.layer, self.length, self.span_end)

    def grads(self) -> AbstractContextManager[PageView]:
        seed = mix(self.store.rounding_seed, self.layer, self.length)
        return self.selected.resident(GRAD, self.layer, self.length, self.span_end, seed)

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        if self.length >= self.store.capacity:
            return dk, dv
        return self.selected.add_future_grads(self.layer, self.length, self.span_end, dk, dv)
