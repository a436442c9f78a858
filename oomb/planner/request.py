"""Define what the planner is asked (`PlacementRequest`) and what it answers (`Placement`, `Shortfall`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import torch

from oomb.config import Config
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import LayerRows, RowLayout, kv_row
from oomb.models.shape import LayerShape, ModelShape
from oomb.utils.units import parse_bytes

SAFETY_SHARE = 0.9
"""Share of the remaining memory that "auto" gives to pages, and in which a chunk's activations must fit."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """One use of memory in one tier."""

    name: str
    tier: str
    num_bytes: int
    grows: bool = False
    """Whether it grows with the context."""


class Limit(Enum):
    """A limit that a placement can exceed."""

    POSITIONS = "learned positions, in tokens"
    OPTIMIZER_STATES = "host memory, by the optimizer states alone"
    WEIGHTS = "GPU memory, by weights and optimizer states alone"
    GPU = "GPU memory for the part of a step that does not grow with the context"
    HOST = "host memory for pages"
    CPU = "memory for pages of a model on the CPU"


@dataclass(frozen=True)
class Shortfall:
    """Why a placement does not fit: the limit it exceeds, in bytes, or in tokens for `Limit.POSITIONS`."""

    limit: Limit
    needed: int
    available: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is kept and in which tier. The oldest tokens are on the GPU because every later chunk reads them."""

    checkpoint_layers: bool
    keep_last_chunk: bool
    capacity: int
    """Tokens that later chunks read: all but those of the last chunk."""
    gpu_tokens: int
    """Tokens whose K and V are on the GPU; the rest of `capacity` is on the host."""
    gpu_grad_tokens: int
    """The same for gradients of K and V. With selected pages K and V go first, because the fill pass waits for them."""
    out_tokens: int
    """How many of the last tokens in `capacity` keep their attention output. With dense attention, recomputing those
    costs most."""
    gpu_out_tokens: int
    """How many of these are on the GPU: all or none."""
    terms: tuple[MemoryTerm, ...]

    @property
    def host_tokens(self) -> int:
        return self.capacity - self.gpu_tokens

    @property
    def keep_attention(self) -> bool:
        """Whether any attention outputs are kept."""
        return self.out_tokens > 0

    @property
    def host_out_tokens(self) -> int:
        return self.out_tokens - self.gpu_out_tokens

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that grows with the context."""
        return _total(self.terms, GPU, grows=True)

    @property
    def host_bytes(self) -> int:
        """Host memory that grows with the context."""
        return _total(self.terms, HOST, grows=True)

    @property
    def fixed_bytes(self) -> int:
        """GPU memory of a step that does not grow with the context: gradients, activations, staging buffers."""
        return _total(self.terms, GPU, grows=False)


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """A batch to place and the memory there is for it.

    Args:
        shape: The model.
        config: Settings of the engine.
        batch_size: Sequences in the batch.
        length: Tokens per sequence.
        needs_grad: Whether there will be a gradient pass.
        float32_sums: Whether parameter gradients are summed in float32.
        fused: Whether full chunks run compiled.
        free_gpu_bytes: GPU memory that the process can still allocate; None for a model on the CPU.
        free_host_bytes: Free host memory. Negative if the optimizer states alone do not fit; then nothing does.
        missing_grad_bytes: Parameter gradients and sums that the gradient pass has to allocate.
        optimizer_bytes: Optimizer states that will be allocated on the GPU after this step.
        state_bytes: Optimizer states that exist already but are not yet subtracted from `free_gpu_bytes`.
        is_exclusive: Whether no other batch holds pages at the same time.
        has_float8: Whether the GPU stores page means in float8.
        num_shards: Ranks that share the tokens of each chunk. `shape` has the heads of one of them.
    """

    shape: ModelShape
    config: Config
    batch_size: int
    length: int
    needs_grad: bool
    float32_sums: bool
    fused: bool
    free_gpu_bytes: int | None
    free_host_bytes: int
    missing_grad_bytes: int
    optimizer_bytes: int
    state_bytes: int = 0
    is_exclusive: bool = True
    has_float8: bool = False
    num_shards: int = 1

    @property
    def on_cpu(self) -> bool:
        return self.free_gpu_bytes is None

    @property
    def available(self) -> float:
        """GPU memory that this step may take. On a CPU only what grows with the context is limited."""
        return float("inf") if self.free_gpu_bytes is None else float(self.free_gpu_bytes - self.state_bytes)

    @property
    def capacity(self) -> int:
        """Tokens per sequence that later chunks read."""
        return (self.length - 1) // self.config.chunk_size * self.config.chunk_size

    @property
    def num_pages(self) -> int:
        return -(-self.capacity // self.config.page_size)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk that this rank computes, over the whole batch."""
        return self.batch_size * -(-min(self.config.chunk_size, self.length) // self.num_shards)

    @property
    def is_fused(self) -> bool:
        """Whether compiled code runs: only full chunks use it."""
        return self.fused and self.length >= self.config.chunk_size

    @property
    def sparse_layers(self) -> list[int]:
        """Indices of the layers that select pages."""
        if self.config.page_budget is None or not self.capacity:
            return []
        return [index for index, layer in enumerate(self.shape.layers) if layer.window is None]

    @cached_property
    def layers(self) -> list[LayerRows]:
        """The row layouts of every layer."""
        return [layer_rows(layer, self.batch_size, self.config) for layer in self.shape.layers]

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """Bytes per token of K and V, of their gradients and of attention outputs, for every layer."""
        return [
            (layer.kv.num_bytes, layer.grad.num_bytes if self.needs_grad else 0, layer.out.num_bytes)
            for layer in self.layers
        ]

    def is_quantized(self, kind: str) -> bool:
        """Return whether K and V ("kv") or their gradients ("grad") are stored in 8 bits."""
        return getattr(self.config, f"{kind}_dtype") == "int8"


def layer_rows(shape: LayerShape, batch_size: int, config: Config) -> LayerRows:
    """Return how one token's K, V, their gradients and attention output are laid out in memory."""
    return _layer_rows(shape, batch_size, config.kv_dtype, config.grad_dtype)


@lru_cache(maxsize=256)
def _layer_rows(shape: LayerShape, batch_size: int, kv_dtype: str, grad_dtype: str) -> LayerRows:
    # Cached because most layers are alike and the search for settings asks thousands of times.
    k, v = ((batch_size, shape.num_kv_heads, size) for size in (shape.head_size, shape.value_size))
    out, lse = (batch_size, shape.num_query_heads, shape.value_size), (batch_size, shape.num_query_heads)
    return LayerRows(
        kv=kv_row(k, v, _stored_dtype(kv_dtype, shape)),
        grad=kv_row(k, v, _stored_dtype(grad_dtype, shape)),
        out=RowLayout((out, shape.dtype), (lse, torch.promote_types(shape.dtype, torch.float32))),
        dtype=shape.dtype,
        window=shape.window,
    )


def _stored_dtype(name: str, shape: LayerShape) -> torch.dtype:
    return shape.dtype if name == "auto" else getattr(torch, name)


def host_budget(config: Config, free_bytes: int) -> int:
    """Return how much of `free_bytes` of host memory pages may take."""
    if config.host_memory == "auto":
        return int(SAFETY_SHARE * free_bytes)
    return min(free_bytes, parse_bytes(config.host_memory))


def _total(terms: tuple[MemoryTerm, ...], tier: str, *, grows: bool) -> int:
    return sum(term.num_bytes for term in terms if term.tier == tier and term.grows is grows)
