"""Where K, V and their gradients live between chunks.

One `PageStore` serves one call of the engine: a batch of sequences of one padded length. A layer's bytes lie in slabs
[B, K, tokens, D], so that any run of pages is a view that attention kernels read in place. A page belongs to the chunk
that wrote it; gradient pages exist from the first touch on. Nothing here knows of models or attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SEGMENT_SIZE = 32768
"""Most tokens in one segment. Longer segments save merges (a pass over the output each); on an H200 the attention
kernel itself gains nothing above 32K."""


class OutOfPages(MemoryError):
    """The pages a sequence needs do not fit."""


def free_bytes(device: torch.device) -> int | None:
    """GPU memory that can still be taken, or None where nobody counts it."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class PageStore:
    """Pages of every layer for the `capacity` tokens that later chunks read (the last chunk's are read by nobody)."""

    def __init__(
        self,
        capacity: int,
        *,
        chunk_size: int,
        num_layers: int,
        kv_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        with_grads: bool = True,
    ) -> None:
        self.capacity = capacity
        self.chunk_size = chunk_size
        self.num_layers = num_layers
        self.kv_dtype = kv_dtype
        self.grad_dtype = grad_dtype
        self.with_grads = with_grads
        self.layers: dict[int, LayerPages] = {}

    def append(self, layer: int, start: int, k: Tensor, v: Tensor, kept_bytes: int = 0) -> None:
        """Stores the chunk's K and V; those of the last chunk need no page. `kept_bytes` is what the caller keeps of
        this chunk and layer besides, which must fit too."""
        if start >= self.capacity:
            return
        if layer not in self.layers:
            if not self.layers:
                self._check_room(k, v, kept_bytes // k.shape[2])
            self.layers[layer] = LayerPages(self.capacity, k, v, self.kv_dtype, self.grad_dtype)
        self.layers[layer].write(start, k, v)

    def past(self, layer: int, chunk_start: int, chunk_end: int) -> LayerPast:
        """The layer's pages as the chunk [chunk_start, chunk_end) sees them."""
        return LayerPast(self.layers.get(layer), chunk_start, chunk_end, self.chunk_size)

    def grad_bytes(self) -> int:
        """Bytes that gradient pages take once every page is touched."""
        return sum(pages.grad_bytes() for pages in self.layers.values())

    def num_bytes(self) -> int:
        """Bytes taken now."""
        return sum(x.nbytes for p in self.layers.values() for x in (p.k, p.v, p.dk, p.dv) if x is not None)

    def close(self) -> None:
        self.layers.clear()

    def _check_room(self, k: Tensor, v: Tensor, kept_bytes: int) -> None:
        """Refuses before the first page is taken if the pages of all layers can't fit, going by the first layer's."""
        free = free_bytes(k.device)
        if free is None:
            return
        rows = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (k, v))
        kv, grad = ((dtype or k.dtype).itemsize for dtype in (self.kv_dtype, self.grad_dtype))
        per_token = self.num_layers * (rows * (kv + grad * self.with_grads) + kept_bytes)
        if self.capacity * per_token > free:
            what = "K, V" + ", their gradients" * self.with_grads + ", kept attention outputs" * (kept_bytes > 0)
            raise OutOfPages(
                f"{what} for {self.capacity:,} tokens need "
                f"{self.capacity * per_token / 2**30:.1f} GiB on {k.device}, where {free / 2**30:.1f} GiB are free: "
                f"shorten the context to about {free * 9 // 10 // per_token:,} tokens, or lower the batch size"
            )


class LayerPages:
    """One layer's slabs."""

    def __init__(
        self, capacity: int, k: Tensor, v: Tensor, kv_dtype: torch.dtype | None, grad_dtype: torch.dtype | None
    ) -> None:
        self.capacity = capacity
        self.compute_dtype = k.dtype
        self.grad_dtype = grad_dtype or k.dtype
        self.k, self.v = (
            torch.empty(*x.shape[:2], capacity, x.shape[3], dtype=kv_dtype or x.dtype, device=x.device) for x in (k, v)
        )
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self.k[:, :, start : start + k.shape[2]] = k
        self.v[:, :, start : start + v.shape[2]] = v

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k, v = self.k[:, :, start:end], self.v[:, :, start:end]
        return k.to(self.compute_dtype), v.to(self.compute_dtype)

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        if self.dk is None or self.dv is None:
            self.dk, self.dv = (torch.zeros_like(x, dtype=self.grad_dtype) for x in (self.k, self.v))
        end = start + dk.shape[2]
        self.dk[:, :, start:end] += dk
        self.dv[:, :, start:end] += dv

    def grad_bytes(self) -> int:
        return (self.k.numel() + self.v.numel()) * self.grad_dtype.itemsize


class LayerPast:
    """What one chunk sees of a layer's pages (the `Past` of `oomb.attention.dense`)."""

    def __init__(self, pages: LayerPages | None, chunk_start: int, chunk_end: int, chunk_size: int) -> None:
        self.pages = pages
        self.chunk_size = chunk_size
        self.length = chunk_start
        self.end = chunk_end

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        if self.pages is None:
            return
        for start, end in segment_bounds(first, self.length, self.chunk_size):
            k, v = self.pages.read(start, end)
            yield start, k, v

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        assert self.pages is not None
        self.pages.add_grad(start, dk, dv)

    def own_grad(self) -> tuple[Tensor, Tensor] | None:
        pages = self.pages
        if pages is None or pages.dk is None or pages.dv is None or self.length >= pages.capacity:
            return None
        return pages.dk[:, :, self.length : self.end], pages.dv[:, :, self.length : self.end]


def segment_bounds(first: int, end: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Cuts [first, end) into few segments of few different sizes, since attention kernels are planned per size.

    The sizes are chunk_size times powers of two, the largest first: 7 chunks of 4096 become 16384 + 8192 + 4096.
    What is no multiple of the chunk (the start of a sliding window) comes first.
    """
    ragged = (end - first) % chunk_size
    if ragged:
        yield first, first + ragged
        first += ragged
    size = chunk_size
    while size * 2 <= max(SEGMENT_SIZE, chunk_size):
        size *= 2
    while first < end:
        while size > end - first:
            size //= 2
        yield first, first + size
        first += size
