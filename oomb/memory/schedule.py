"""List the loads of a chunk's forward or backward in the order in which its layers will ask for them.

The prefetcher follows these lists to bring host pages to the GPU before they are needed. Only speed depends on them:
a wrong order costs a wait, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator

from oomb.memory.page_access import PageAccess
from oomb.memory.rows import GRAD, KV, OUT
from oomb.memory.selected import SelectedPages
from oomb.memory.transfer import Load


class PassSchedule:
    """The order in which the layers of a chunk read the pages of one sequence."""

    def __init__(self, pages: PageAccess, selected: SelectedPages | None) -> None:
        self.pages, self.selected = pages, selected

    def forward(self, start: int, span_end: int, saved: bool) -> Iterator[Load]:
        """Yield the loads of the forward of the chunk at `start`; `saved`: saved attention outputs replace the past."""
        pages = self.pages
        for layer in pages.layers:
            if saved and pages.is_saved(start):
                yield from pages.loads(OUT, layer, start, span_end)
            elif pages.is_sparse(layer):
                yield from self._selected(layer, start, span_end, [KV])
            else:
                for low, high in pages.bounds(layer, self._first_visible(layer, start, span_end), start):
                    yield from pages.loads(KV, layer, low, high)

    def backward(self, start: int, span_end: int, saved: bool) -> Iterator[Load]:
        """Yield the loads of the backward of the chunk at `start`; `saved`: including those of checkpointed layers."""
        pages = self.pages
        for layer in list(pages.layers)[::-1]:
            if saved and pages.is_saved(start):
                yield from pages.loads(OUT, layer, start, span_end)
            if pages.is_sparse(layer):
                yield from self._selected(layer, start, span_end, [KV, GRAD])
                if start < pages.capacity:
                    yield from pages.loads(GRAD, layer, start, span_end)
                continue
            bounds = list(pages.bounds(layer, self._first_visible(layer, start, span_end), start))
            # A windowed layer gathers its whole past before it adds any gradient; others go segment by segment.
            groups = [[KV], [GRAD]] if self._is_windowed(layer, span_end) else [[KV, GRAD]]
            for kinds in groups:
                for low, high in bounds:
                    for kind in kinds:
                        yield from pages.loads(kind, layer, low, high)
            if start < pages.capacity:
                for low, high in pages.has_grad[layer].within(start, span_end):
                    yield from pages.loads(GRAD, layer, low, high)

    def _selected(self, layer: int, start: int, span_end: int, kinds: list[str]) -> Iterator[Load]:
        """Yield the loads of selected pages, if the selection has been made."""
        assert self.selected is not None
        if self.selected.selection(layer, start, span_end) is not None:
            for kind in kinds:
                yield from self.selected.loads(kind, layer, start, span_end)

    def _is_windowed(self, layer: int, span_end: int) -> bool:
        window = self.pages.layers[layer].window
        return window is not None and window < span_end

    def _first_visible(self, layer: int, start: int, span_end: int) -> int:
        """Return the first token that the chunk's queries attend to."""
        return max(0, start - (self.pages.layers[layer].window or 0) + 1) if self._is_windowed(layer, span_end) else 0
