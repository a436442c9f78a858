"""Decide what an engine keeps and in which tier, given the memory that is free now, and allocate its pages."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from oomb.config import Config
from oomb.distributed.mesh import ranks_per_host
from oomb.distributed.ulysses import TokenShards
from oomb.engine.grads import reusable_bytes
from oomb.memory.host import free_host_bytes, usable_gpu_bytes
from oomb.memory.pool import GPU, HOST, OutOfPages
from oomb.memory.rows import LayerRows
from oomb.memory.selections import SelectionSpec
from oomb.memory.store import PageStore
from oomb.memory.tiers import Tiers
from oomb.models.causal_lm import CausalLM
from oomb.models.hooks import autocast_dtype
from oomb.models.probe import model_shape, record_shapes
from oomb.models.shape import LayerShape
from oomb.planner.fit import place_or_raise
from oomb.planner.placement import selection_spec
from oomb.planner.request import Placement, PlacementRequest, layer_rows
from oomb.utils.units import parse_bytes

SLOW_ADAPTERS = (
    "the adapters compute in float32 although the weights are 16-bit, which is slower and takes more memory: call the "
    'engine under torch.autocast("cuda", torch.bfloat16), or pass bf16=True to the trainer'
)


@dataclass(frozen=True)
class TransferStats:
    """Traffic between GPU and host memory since the engine was created or `reset_stats` was called."""

    loaded_bytes: int
    """Bytes copied to the GPU."""
    stored_bytes: int
    """Bytes copied from the GPU to the host."""
    waited_seconds: float
    """Seconds the computation stalled on copies."""
    gpu_peak_bytes: int
    """Peak bytes of pages on the model's device."""
    host_peak_bytes: int
    """Peak bytes of pages in host memory."""


@dataclass(frozen=True, kw_only=True)
class AllocationRequest:
    """A batch that needs pages."""

    batch_size: int
    length: int
    longest: int
    """Tokens of its longest document."""
    needs_grad: bool
    fused: bool
    float32_sums: bool
    is_exclusive: bool = True
    """Whether no other batch holds pages at the same time."""


class PageAllocator:
    """Memory of an engine: its tiers, and what each batch gets of them.

    Args:
        model: the model that the batches run through.
        config: settings of the engine.
        shards: ranks that share sequences. They must decide alike.
        is_alone: whether no other rank of a mesh shares this machine's memory.
    """

    def __init__(self, model: CausalLM, config: Config, shards: TokenShards, *, is_alone: bool = True) -> None:
        self.model, self.config, self.shards = model, config, shards
        self._num_ranks = 1 if is_alone else ranks_per_host()
        self._versions: list[int] | None = None
        """Versions of the trainable parameters after the first gradient pass."""
        self._tiers: Tiers | None = None
        self._shapes: dict[tuple[Any, ...], dict[int, LayerShape]] = {}
        self._placements: dict[tuple[Any, ...], Placement] = {}
        self._has_warned = False
        self.optimizer_on_host = False
        """Whether the optimizer keeps its states in host memory. Otherwise the GPU leaves room for them."""

    @property
    def tiers(self) -> Tiers:
        if self._tiers is None or self._tiers.device != self.model.device:
            limit = self.config.host_memory
            self._tiers = Tiers(self.model.device, None if limit == "auto" else parse_bytes(limit))
            self._placements.clear()
        return self._tiers

    def after_backward(self) -> None:
        """Record the end of a gradient pass."""
        self._versions = self._versions or self._parameter_versions()

    @property
    def optimizer_has_stepped(self) -> bool:
        """Whether an optimizer has changed the parameters, so that its states exist."""
        return self._versions is not None and self._versions != self._parameter_versions()

    @property
    def _expects_optimizer_states(self) -> bool:
        return not (self.optimizer_has_stepped or self.optimizer_on_host)

    def _parameter_versions(self) -> list[int]:
        return [p._version for p in self.model.parameters() if p.requires_grad]

    @property
    def stats(self) -> TransferStats:
        copier, peak = self.tiers.streams, self.tiers.peak_bytes
        return TransferStats(
            loaded_bytes=copier.loaded_bytes,
            stored_bytes=copier.stored_bytes,
            waited_seconds=copier.waited_seconds,
            gpu_peak_bytes=peak[GPU],
            host_peak_bytes=peak[HOST],
        )

    def allocate(self, request: AllocationRequest) -> tuple[Placement, PageStore]:
        """Return the placement of a batch and its pages, or raise `OutOfPages` with the numbers.

        Reuse the placement of an earlier batch of the same shape, so that memory use is stable across steps. If other
        batches hold pages, plan with what remains. Call this while the model is active.
        """
        shapes = self.layer_shapes()
        key = (
            request.batch_size,
            request.length,
            request.needs_grad,
            request.is_exclusive,
            self._autocast,
            tuple(shapes.values()),
        )
        layers = {layer: layer_rows(shape, request.batch_size, self.config) for layer, shape in shapes.items()}
        is_alone = not any(self.tiers.held_bytes(tier) for tier in (GPU, HOST))
        if is_alone and key in self._placements:
            # Memory that was free then may be in use now. If so, plan again, on all ranks that share the sequence.
            known: PageStore | None = None
            with suppress(OutOfPages):
                known = self._pages(self._placements[key], layers, request.needs_grad)
            if not self.shards.group.any(known is None):
                assert known is not None
                return self._placements[key], known
            if known is not None:
                known.close()
        placement = self._place(shapes, replace(request, is_exclusive=request.is_exclusive and is_alone))
        store = self._pages(placement, layers, request.needs_grad)
        if is_alone:
            self._placements[key] = placement
        return placement, store

    def _pages(self, placement: Placement, layers: dict[int, LayerRows], needs_grad: bool) -> PageStore:
        return PageStore(
            self.tiers,
            layers,
            capacity=placement.capacity,
            chunk_size=self.config.chunk_size,
            page_size=self.config.page_size,
            gpu_tokens=placement.gpu_tokens,
            gpu_grad_tokens=placement.gpu_grad_tokens,
            out_tokens=placement.out_tokens,
            gpu_out_tokens=placement.gpu_out_tokens,
            needs_grad=needs_grad,
            selection_spec=self._selection_spec(),
        )

    def _selection_spec(self) -> SelectionSpec | None:
        return selection_spec(self.config, self.layer_shapes().values(), self._has_float8)

    def _remaining_limits(self) -> Config:
        """Return the settings, with limits reduced by what other batches hold."""
        limits = {"gpu_memory": GPU, "host_memory": HOST}
        left: dict[str, Any] = {
            name: max(0, parse_bytes(limit) - self.tiers.held_bytes(tier))
            for name, tier in limits.items()
            if (limit := getattr(self.config, name)) != "auto" and self.tiers.held_bytes(tier)
        }
        return replace(self.config, **left) if left else self.config

    @property
    def _has_float8(self) -> bool:
        """Whether Triton supports float8 on the model's device."""
        device = self.model.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

    @property
    def _autocast(self) -> torch.dtype | None:
        """Dtype of the caller's autocast, or None."""
        return autocast_dtype(self.model.device.type)

    @property
    def _precision(self) -> tuple[Any, ...]:
        return self.model.device, self.model.dtype, self._autocast

    @property
    def knows_layer_shapes(self) -> bool:
        """Whether the layer shapes are known for this device and precision."""
        return self._precision in self._shapes

    def layer_shapes(self) -> dict[int, LayerShape]:
        """Return the shape of every layer's attention, probed once per device and precision. Call this while the model
        is active."""
        if not self.knows_layer_shapes:
            shapes = record_shapes(self.model, on_meta=False)
            self._shapes[self._precision] = {layer: self._own_shape(layer, shape) for layer, shape in shapes.items()}
        return self._shapes[self._precision]

    def _own_shape(self, layer: int, shape: LayerShape) -> LayerShape:
        """Return the shape of the heads that this rank holds."""
        query, kv = self.shards.heads_per_rank(layer, shape.num_query_heads, shape.num_kv_heads)
        return replace(shape, num_query_heads=query, num_kv_heads=kv)

    def _place(self, shapes: dict[int, LayerShape], request: AllocationRequest) -> Placement:
        """Return the placement of a batch, given the memory that is free now."""
        facts = model_shape(self.model.lm, tuple(shapes.values()), autocast=self._autocast is not None)
        if (
            facts.has_float32_adapters
            and request.needs_grad
            and self.model.device.type == "cuda"
            and not self._has_warned
        ):
            self._has_warned = True
            warnings.warn(SLOW_ADAPTERS, stacklevel=2)
        if request.longest < request.length:
            # Positions restart with every document, and the length of each was checked.
            facts = replace(facts, num_positions=None)
        gpu = usable_gpu_bytes(self.model.device)
        host = free_host_bytes() // self._num_ranks + self.tiers.idle_bytes(HOST)
        if gpu is None:  # a CPU has one memory
            host += self.tiers.idle_bytes(GPU)
        # Ranks that share the sequence make the same decisions, with what the one with the least has.
        group = self.shards.group
        host, gpu = group.min(host), None if gpu is None else group.min(gpu + self.tiers.idle_bytes(GPU))
        missing_grad_bytes = 0
        if request.needs_grad:
            existing = reusable_bytes(self.model.parameters(), request.float32_sums)
            missing_grad_bytes = facts.missing_grad_bytes(request.float32_sums) - existing
        return place_or_raise(
            PlacementRequest(
                shape=facts,
                config=self._remaining_limits(),
                batch_size=request.batch_size,
                length=request.length,
                needs_grad=request.needs_grad,
                float32_sums=request.float32_sums,
                fused=request.fused,
                free_gpu_bytes=gpu,
                free_host_bytes=host,
                missing_grad_bytes=-group.min(-missing_grad_bytes),
                # Before the first optimizer step nothing says which optimizer follows. Most users take AdamW, with
                # states in the dtype of the parameters.
                optimizer_bytes=2 * facts.grad_bytes if request.needs_grad and self._expects_optimizer_states else 0,
                is_exclusive=request.is_exclusive,
                has_float8=self._has_float8,
                num_shards=self.shards.size,
            )
        )
