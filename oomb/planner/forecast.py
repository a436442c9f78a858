"""Forecast memory and time of a training step on any machine with one GPU, and the longest context that fits there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oomb.config import OFFLOADED_STATES, Config
from oomb.memory.pool import GPU, HOST
from oomb.models.shape import ModelShape
from oomb.ops.moments import field_sizes
from oomb.planner.fit import explain, longest_context
from oomb.planner.hardware import WORKSPACE_BYTES, Machine
from oomb.planner.placement import float32_sums_fit, place
from oomb.planner.request import Limit, MemoryTerm, Placement, PlacementRequest, Shortfall, host_budget
from oomb.planner.step_time import SHORTEST_CHUNK, predict_seconds

STATES = "optimizer states"

STATE_BYTES: dict[str, Callable[[ModelShape], int]] = {
    "none": lambda shape: 0,
    "sgd": lambda shape: 0,
    "momentum": lambda shape: shape.grad_bytes,
    "adamw": lambda shape: 2 * shape.grad_bytes,
    "adamw_8bit": lambda shape: 2 * shape.trainable_params,
}
"""Bytes that an optimizer keeps on the GPU from step to step. An offloaded optimizer keeps none: what its step takes
there is less than the activations that are freed by then."""
OPTIMIZERS = (*STATE_BYTES, *OFFLOADED_STATES)


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """Predicted memory and time of one step."""

    machine: Machine
    request: PlacementRequest
    optimizer: str
    placement: Placement
    shortfall: Shortfall | None
    """Why it does not fit. The terms then say what it would need."""
    terms: tuple[MemoryTerm, ...]
    seconds: float | None
    """None if no time is predicted: for unknown GPUs and for models in float32."""
    longest_context: int | None
    """0 if not even one chunk fits, None if no limit was found."""

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def batch_size(self) -> int:
        return self.request.batch_size

    @property
    def length(self) -> int:
        return self.request.length

    @property
    def fits(self) -> bool:
        return self.shortfall is None

    @property
    def problem(self) -> str | None:
        """Why it does not fit, as a sentence."""
        return None if self.shortfall is None else explain(self.shortfall, self.request, self.placement)

    @property
    def peak_gpu_bytes(self) -> int:
        """Predicted peak of torch.cuda.max_memory_allocated."""
        return sum(term.num_bytes for term in self.terms if term.tier == GPU)

    @property
    def host_bytes(self) -> int:
        """Predicted host memory of pages and optimizer states."""
        return sum(term.num_bytes for term in self.terms if term.tier == HOST)

    @property
    def gpu_limit(self) -> int:
        """GPU memory that PyTorch can hand out."""
        return self.machine.usable_gpu_bytes

    @property
    def host_limit(self) -> int:
        """Host memory that pages and optimizer states may take together."""
        states = sum(term.num_bytes for term in self.terms if (term.name, term.tier) == (STATES, HOST))
        return states + host_budget(self.config, max(0, self.machine.host_bytes - states))

    @property
    def page_limit(self) -> int:
        """GPU memory left for what grows with the context."""
        return max(0, self.gpu_limit - self.peak_gpu_bytes + self.placement.gpu_bytes)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the step takes longer than `seconds`: chunks shorter than the measured ones underuse tensor cores."""
        return self.config.chunk_size < min(SHORTEST_CHUNK, self.length)


def forecast_step(
    shape: ModelShape,
    config: Config,
    machine: Machine,
    *,
    batch_size: int = 1,
    length: int,
    optimizer: str = "adamw",
) -> StepForecast:
    """Forecast a training step.

    The forecast is for a step in the middle of training: optimizer states exist, gradients of the last step do not.

    Args:
        shape: The model.
        config: Settings of the engine.
        machine: The machine to train on.
        batch_size: Sequences computed at once.
        length: Tokens per sequence.
        optimizer: One of `OPTIMIZERS`.
    """
    request = request_for(shape, config, machine, batch_size=batch_size, length=length, optimizer=optimizer)
    placement, shortfall = place(request)
    if shortfall is not None and request.free_host_bytes < 0:
        states_bytes = machine.host_bytes - request.free_host_bytes
        shortfall = Shortfall(Limit.OPTIMIZER_STATES, states_bytes, machine.host_bytes)
    return StepForecast(
        machine=machine,
        request=request,
        optimizer=optimizer,
        placement=placement,
        shortfall=shortfall,
        terms=step_terms(request, placement, optimizer),
        seconds=predict_seconds(request, placement, machine) if shape.itemsize <= 2 else None,
        longest_context=longest_context(request),
    )


def request_for(
    shape: ModelShape, config: Config, machine: Machine, *, batch_size: int, length: int, optimizer: str
) -> PlacementRequest:
    """Return the placement request of a training step. The arguments are those of `forecast_step`."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; use one of {', '.join(OPTIMIZERS)}")
    if length < 2 or batch_size < 1:
        raise ValueError(
            f"batch size is {batch_size} and length is {length}; a step needs at least 1 sequence of 2 tokens"
        )
    float32_sums = config.param_grad_dtype == "float32"
    if config.param_grad_dtype == "auto":
        float32_sums = float32_sums_fit(shape.missing_grad_bytes(True), machine.gpu_bytes)
    on_gpu, on_host = state_bytes(optimizer, shape)
    return PlacementRequest(
        shape=shape,
        config=config,
        batch_size=batch_size,
        length=length,
        needs_grad=True,
        float32_sums=float32_sums,
        fused=config.fuse != "off",
        free_gpu_bytes=machine.usable_gpu_bytes - shape.weight_bytes - WORKSPACE_BYTES,
        free_host_bytes=machine.host_bytes - on_host,
        missing_grad_bytes=shape.missing_grad_bytes(float32_sums),
        # A training run must fit in its second step, when optimizer states exist.
        state_bytes=on_gpu,
        optimizer_bytes=0,
        has_float8=machine.has_float8,
    )


def state_bytes(optimizer: str, shape: ModelShape) -> tuple[int, int]:
    """Return the bytes that an optimizer keeps from step to step, on the GPU and on the host."""
    if optimizer in OFFLOADED_STATES:
        all_parameters = torch.empty(shape.trainable_params, device="meta")
        fields = field_sizes(all_parameters, OFFLOADED_STATES[optimizer])
        return 0, sum(dtype.itemsize * count for dtype, count in fields.values())
    return STATE_BYTES[optimizer](shape), 0


def step_terms(request: PlacementRequest, placement: Placement, optimizer: str) -> tuple[MemoryTerm, ...]:
    """Return every use of memory of a step."""
    fixed = [
        MemoryTerm(name="weights", tier=GPU, num_bytes=request.shape.weight_bytes),
        MemoryTerm(name="kernel workspaces", tier=GPU, num_bytes=WORKSPACE_BYTES),
        MemoryTerm(name=STATES, tier=GPU, num_bytes=request.state_bytes),
        MemoryTerm(name=STATES, tier=HOST, num_bytes=state_bytes(optimizer, request.shape)[1]),
    ]
    return tuple(term for term in (*fixed, *placement.terms) if term.num_bytes)
