"""What is asked of the planner and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from oomb.config import Config
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import pair_bytes, row_bytes
from oomb.models.shape import LayerShape, ModelShape
from oomb.utils.dtypes import ITEMSIZES
from oomb.utils.units import parse_bytes

SAFETY_SHARE = 0.9
"""Share of what is left that "auto" gives to pages, and at which a chunk's activations count as fitting."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """One use of memory."""

    name: str
    tier: str
    num_bytes: int
    grows: bool = False
    """With the context."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is kept, and where. The oldest tokens lie on the GPU: every later chunk reads them."""

    checkpoint_layers: bool
    keep_last_chunk: bool
    capacity: int
    """Tokens that later chunks read: all but those of the last chunk."""
    gpu_tokens: int
    """Tokens whose K and V lie on the GPU; the rest of `capacity` lies on the host."""
    gpu_grad_tokens: int
    """The same for their gradients. With chosen pages K and V go first: the fill pass waits for them."""
    out_tokens: int
    """The last so many of `capacity` have their attention outputs kept: with dense attention those cost most."""
    gpu_out_tokens: int
    """Of these, those on the GPU: none of them or all."""
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
        """What grows with the context, on the GPU."""
        return _total(self.terms, GPU, grows=True)

    @property
    def host_bytes(self) -> int:
        return _total(self.terms, HOST, grows=True)

    @property
    def fixed_bytes(self) -> int:
        """What a step takes on the GPU beside that: gradients, activations, staging buffers."""
        return _total(self.terms, GPU, grows=False)


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """A sequence and the memory there is for it: the arguments of `decide`."""

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
    is_exclusive: bool = True
    """No other sequence is to have pages at the same time."""
    state_bytes: int = 0
    """Optimizer states that exist and are not yet taken off `free_gpu_bytes`."""

    @property
    def available(self) -> float:
        """Bytes that this step may take on the model's device; of a CPU only what grows with the context is bounded."""
        return float("inf") if self.free_gpu_bytes is None else float(self.free_gpu_bytes - self.state_bytes)

    @property
    def capacity(self) -> int:
        return (self.length - 1) // self.config.chunk_size * self.config.chunk_size

    @property
    def chunk_tokens(self) -> int:
        """Tokens computed at once, over the whole batch."""
        return self.batch_size * min(self.config.chunk_size, self.length)

    @property
    def is_fused(self) -> bool:
        """Compiled code serves full chunks."""
        return self.fused and self.length >= self.config.chunk_size

    @property
    def sparse_layers(self) -> list[int]:
        """Those that choose pages."""
        if self.config.page_budget is None or not self.capacity:
            return []
        return [index for index, layer in enumerate(self.shape.layers) if layer.window is None]

    def is_quantized(self, field: int) -> bool:
        """Whether K and V (0) or their gradients (1) rest in 8 bits."""
        return (self.config.kv_dtype, self.config.grad_dtype)[field] == "int8"

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """Bytes per token of K/V, their gradients and kept outputs, for each layer."""
        # Most layers are alike, and a search for settings asks thousands of times.
        found = {layer: self._row(layer) for layer in set(self.shape.layers)}
        return [found[layer] for layer in self.shape.layers]

    def _row(self, layer: LayerShape) -> tuple[int, int, int]:
        size = layer.dtype.itemsize
        kv, grad = (ITEMSIZES.get(name, size) for name in (self.config.kv_dtype, self.config.grad_dtype))
        heads, queries = self.batch_size * layer.num_kv_heads, self.batch_size * layer.num_query_heads
        return (
            pair_bytes(heads, layer.head_size, layer.value_size, kv),
            pair_bytes(heads, layer.head_size, layer.value_size, grad) if self.needs_grad else 0,
            row_bytes(queries * layer.value_size * size, queries * max(4, size)),
        )


def host_budget(config: Config, room: int) -> int:
    """What may be taken of `room` bytes of host memory."""
    return int(SAFETY_SHARE * room) if config.host_memory == "auto" else min(room, parse_bytes(config.host_memory))


def _total(terms: tuple[MemoryTerm, ...], tier: str, *, grows: bool) -> int:
    return sum(term.num_bytes for term in terms if term.tier == tier and term.grows is grows)
