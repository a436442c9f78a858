"""Keep K, V, their gradients and attention outputs of one sequence between chunks, as attention reads and writes them.

A token has one row of bytes per layer: K and V of all heads and batch entries side by side. A page is `page_size` rows,
so consecutive pages form one strided tensor that attention kernels read in place. Host pages pass through staging
buffers, segment by segment. Where pages are does not change how a past is cut into segments, nor any result.

    past          one layer as one chunk sees it: the interface of attention
    store         one sequence, below. In the fill pass `append` and `save_output`; in the gradient pass `past`,
                  `load_output`, `add_grad`, `add_future_grads`, and `free_from` after each chunk
    page_access   where each token's row is, in place or through a staging buffer
    pool          page numbers alone: the free ones, and the page tables of sequences
    tiers         the memory of all sequences of an engine
    transfer      copy streams, staging buffers, prefetching

A chunk is passed as its start and the end of its first span, `span_end`: only that span has a past.

B batch, K key/value heads, H query heads, T tokens, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from oomb.memory.page_access import PageAccess
from oomb.memory.past import DenseLayerPast, SparseLayerPast
from oomb.memory.rows import GRAD, KV, NEW, OUT, LayerRows, RowLayout
from oomb.memory.schedule import PassSchedule
from oomb.memory.selected import SelectedPages, SelectionSpec
from oomb.memory.tiers import Tiers
from oomb.ops.rounding import add_stochastic_, mix


class PageStore:
    """Keys, values, gradients and attention outputs of one sequence (a batch of one padded length).

    The constructor reserves all memory or raises `OutOfPages`. `close` frees it; a store that is dropped without
    `close` is freed at the next reservation.

    Args:
        tiers: Memory and copy streams, shared by all sequences of an engine.
        layers: Row layouts by layer, in the order in which the model calls the layers.
        capacity: Tokens that need pages: all but those of the last chunk, which no later chunk reads.
        chunk_size: Tokens per chunk.
        page_size: Tokens per page.
        gpu_tokens: How many of the first tokens keep K and V on the GPU.
        gpu_grad_tokens: The same for gradients; None: as many as K and V.
        out_tokens: How many of the last tokens have their attention output saved.
        gpu_out_tokens: How many of the first of these keep it on the GPU.
        needs_grad: Whether a gradient pass will follow.
        selection_spec: How layers without a sliding window select pages; None: they read all.
    """

    def __init__(
        self,
        tiers: Tiers,
        layers: Mapping[int, LayerRows],
        *,
        capacity: int,
        chunk_size: int,
        page_size: int,
        gpu_tokens: int,
        gpu_grad_tokens: int | None = None,
        out_tokens: int = 0,
        gpu_out_tokens: int = 0,
        needs_grad: bool = True,
        selection_spec: SelectionSpec | None = None,
    ) -> None:
        self.tiers, self.layers, self.selection_spec = tiers, layers, selection_spec
        saved_from, gpu_end = capacity - out_tokens, {KV: gpu_tokens}
        if needs_grad:
            gpu_end[GRAD] = gpu_tokens if gpu_grad_tokens is None else gpu_grad_tokens
        if out_tokens:
            gpu_end[OUT] = saved_from + gpu_out_tokens if gpu_out_tokens else 0
        self.pages = PageAccess(
            tiers,
            layers,
            gpu_end,
            capacity=capacity,
            chunk_size=chunk_size,
            page_size=page_size,
            saved_from=saved_from,
            is_selective=selection_spec is not None,
        )
        self.capacity, self.chunk_size, self.page_size = capacity, chunk_size, page_size
        self.selected: SelectedPages | None = None
        self._finalizer = weakref.finalize(self, tiers.orphaned.append, self.pages.lease)
        try:
            self.pages.create_pages()
            if selection_spec is not None:
                self.selected = SelectedPages(self.pages, selection_spec, needs_grad)
            self.pages.create_rings()
            if self.selected is not None:
                self.selected.create_rings()
        except BaseException:
            # The traceback may keep this store alive for long.
            self.close()
            raise
        self.schedule = PassSchedule(self.pages, self.selected)

    @property
    def rounding_seed(self) -> int:
        """Seed for the stochastic rounding of gradients."""
        return self.pages.rounding_seed

    @rounding_seed.setter
    def rounding_seed(self, seed: int) -> None:
        self.pages.rounding_seed = seed

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store a chunk's K and V. The last chunk has no pages and is skipped."""
        if start < self.capacity:
            self.pages.write(KV, layer, start, [k, v], NEW)

    def save_output(self, layer: int, start: int, out: Tensor, lse: Tensor) -> None:
        """Save a chunk's attention output and LSE, if the placement has room for them."""
        if self.pages.is_saved(start):
            self.pages.write(OUT, layer, start, [out, lse], OUT)

    def load_output(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Return a chunk's saved attention output and LSE, or None."""
        if not self.pages.is_saved(start):
            return None
        with self.pages.resident(OUT, layer, start, end) as (out, lse):
            # The memory layout that models continue with: [B, T, H, D].
            contiguous = torch.contiguous_format
            return out.transpose(1, 2).clone(memory_format=contiguous).transpose(1, 2), lse.clone(
                memory_format=contiguous
            )

    def past(self, layer: int, start: int, span_end: int) -> DenseLayerPast | SparseLayerPast:
        """Return the layer's pages as the chunk at `start` sees them."""
        kind = SparseLayerPast if self.pages.is_sparse(layer) else DenseLayerPast
        return kind(self, layer, start, span_end)

    def segments(self, layer: int, first: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (start, k, v) of the segments of tokens [first, end). Each is valid until the next is requested."""
        dtype = self.layers[layer].dtype
        for low, high in self.pages.bounds(layer, first, end):
            with self.pages.resident(KV, layer, low, high) as fields:
                k, v = self.pages.row(KV, layer).read(fields, dtype)
                yield low, k, v

    def add_grad(self, layer: int, start: int, dk: Tensor, dv: Tensor, chunk_start: int) -> None:
        """Add dk and dv, which the chunk at `chunk_start` computed, to the gradients of the tokens from `start` on."""
        pages = self.pages
        for low, high in pages.bounds(layer, start, start + dk.shape[2]):
            updates = dk[:, :, low - start : high - start], dv[:, :, low - start : high - start]
            fresh = [(a - low, b - low) for a, b in pages.has_grad[layer].missing(low, high)]
            pages.create_grads(layer, low, high)
            with pages.resident(GRAD, layer, low, high, writes=True) as fields:
                self._add(
                    pages.row(GRAD, layer), fields, updates, fresh, (pages.rounding_seed, layer, chunk_start, low)
                )
            pages.has_grad[layer].add(low, high)

    @staticmethod
    def _add(
        row: RowLayout,
        fields: list[Tensor],
        updates: Sequence[Tensor],
        fresh: list[tuple[int, int]],
        seed: tuple[int, ...],
    ) -> None:
        """Add to stored gradients. Those of the tokens in `fresh` are uninitialized and count as zero."""
        num_tokens = updates[0].shape[2]
        totals = row.read(fields)
        if fresh == [(0, num_tokens)]:
            row.write(fields, updates, mix(*seed) if row.is_quantized else None)
            return
        for index, (total, update) in enumerate(zip(totals, updates, strict=True)):
            for a, b in fresh:
                total[:, :, a:b] = 0
            if row.is_quantized:
                total += update
            else:
                add_stochastic_(total, update, mix(*seed, index))
        if row.is_quantized:
            row.write(fields, totals, mix(*seed))

    def add_future_grads(self, layer: int, start: int, span_end: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return dk and dv of a chunk's first span plus what later chunks added to its gradient pages."""
        dtypes = dk.dtype, dv.dtype
        for low, high in self.pages.has_grad[layer].within(start, span_end) if start < self.capacity else ():
            with self.pages.resident(GRAD, layer, low, high) as fields:
                future_dk, future_dv = self.pages.row(GRAD, layer).read(fields)
                if (low, high) == (start, span_end):
                    return (dk + future_dk).to(dtypes[0]), (dv + future_dv).to(dtypes[1])
                dk, dv = dk.clone(), dv.clone()
                dk[:, :, low - start : high - start] += future_dk
                dv[:, :, low - start : high - start] += future_dv
        return dk, dv

    def prefetch_forward(self, start: int, span_end: int, saved: bool, *, backward_saved: bool | None = None) -> None:
        """Start to prefetch for the forward of the chunk at `start`.

        Args:
            saved: Whether the forward will read saved attention outputs.
            backward_saved: If given, the chunk's backward follows directly, and this is `saved` for it: its first loads
                start before the forward ends.
        """
        loads, name = self.schedule.forward(start, span_end, saved), None
        if backward_saved is not None:
            loads, name = chain(loads, self.schedule.backward(start, span_end, backward_saved)), (id(self), start)
        self.tiers.prefetcher.expect(loads, name)

    def prefetch_backward(self, start: int, span_end: int, saved: bool) -> None:
        """Start to prefetch for the backward of the chunk at `start`, unless `prefetch_forward` has."""
        if not self.tiers.prefetcher.is_expecting((id(self), start)):
            self.tiers.prefetcher.expect(self.schedule.backward(start, span_end, saved))

    def free_from(self, start: int) -> None:
        """Free the pages of the tokens from `start` on, once no chunk reads them any more."""
        self.pages.free_from(start)

    def close(self) -> None:
        """Free all pages. Calling it again does nothing."""
        if self._finalizer.detach():
            self.tiers.end_pass()
            if self.selected is not None:
                self.selected.close()
            self.tiers.close(self.pages.lease)
