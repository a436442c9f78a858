"""The whole picture of a step on a machine that need not be here: every term of memory, the time, the longest context.

Times are for a machine with one GPU. The rates are those of whole steps on one H200 (Qwen2.5-7B, chunks of 8192, cuDNN
attention), so they contain the norms, the activations and the launches in between; for other GPUs they are scaled by
the vendors' figures for bfloat16, which is a guess and is called one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oomb.config import OFFLOADED_STATES, Config
from oomb.memory.pool import GPU, HOST
from oomb.models.shape import ModelShape
from oomb.ops.moments import field_sizes
from oomb.planner.fit import longest_context
from oomb.planner.hardware import WORKSPACE_BYTES, Machine
from oomb.planner.placement import place
from oomb.planner.request import MemoryTerm, Placement, PlacementRequest, host_budget
from oomb.planner.step_time import predict_seconds
from oomb.utils.units import duration, gib

SHORTEST_CHUNK = 4096
"""Rates were measured with chunks of so many tokens or more. Shorter ones leave matrix units idle."""

STATES = "optimizer states"
SUMS_SHARE = 0.25
"""float32 sums are chosen where they take at most this share of the GPU, as `oomb.grads` has it."""

STATE_BYTES: dict[str, Callable[[ModelShape], int]] = {
    "none": lambda facts: 0,
    "sgd": lambda facts: 0,
    "momentum": lambda facts: facts.grad_bytes,
    "adamw": lambda facts: 2 * facts.grad_bytes,
    "adamw_8bit": lambda facts: 2 * facts.trainable_params,
}
"""What an optimizer keeps on the GPU from step to step."""
# What those with states on the host take of the GPU in their step is less than the activations that are gone by then.
OPTIMIZERS = (*STATE_BYTES, *OFFLOADED_STATES)


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """What a step will take."""

    machine: Machine
    config: Config
    batch_size: int
    length: int
    optimizer: str
    float32_sums: bool
    placement: Placement
    terms: tuple[MemoryTerm, ...]
    seconds: float | None
    """None where it is not predicted: on a GPU that is not known, and of a model in float32."""
    longest_context: int | None
    """0: not even one chunk fits. None: no limit was found."""
    problem: str | None
    """Why it does not fit. The terms are then those it would need."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def peak_gpu_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated will be."""
        return sum(term.num_bytes for term in self.terms if term.tier == GPU)

    @property
    def host_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms if term.tier == HOST)

    @property
    def gpu_limit(self) -> int:
        """What PyTorch can hand out on this machine."""
        return self.machine.usable_gpu_bytes

    @property
    def host_limit(self) -> int:
        """What may be taken of the host's memory, optimizer states included."""
        states = sum(term.num_bytes for term in self.terms if (term.name, term.tier) == (STATES, HOST))
        return states + host_budget(self.config, max(0, self.machine.host_bytes - states))

    @property
    def step_time_text(self) -> str:
        """Time of a step for a person, where one is predicted."""
        assert self.seconds is not None
        # The rates are those of longer chunks.
        is_short = self.config.chunk_size < SHORTEST_CHUNK and self.length > self.config.chunk_size
        words = "more than" if is_short else "about"
        text = f"{words} {duration(self.seconds)}, {self.length * self.batch_size / self.seconds:,.0f} tokens/s"
        return text if self.machine.is_measured else f"{text}; scaled from an H200 by datasheet rates, not measured"

    @property
    def page_limit(self) -> int:
        """GPU memory that is left for what grows with the context."""
        return max(0, self.gpu_limit - self.peak_gpu_bytes + self.placement.gpu_bytes)


def forecast_step(
    shape: ModelShape,
    config: Config,
    machine: Machine,
    *,
    batch_size: int = 1,
    length: int,
    optimizer: str = "adamw",
    needs_grad: bool = True,
) -> StepForecast:
    """A step in the middle of training: the optimizer's states are there, the gradients of the last step are not."""
    request = request_for(
        shape, config, machine, batch_size=batch_size, length=length, optimizer=optimizer, needs_grad=needs_grad
    )
    placement, problem = place(request)
    if problem is not None and request.free_host_bytes < 0:
        states, free = gib(machine.host_bytes - request.free_host_bytes), gib(machine.host_bytes)
        problem = f"{length:,} tokens do not fit: the {STATES} take {states} of host memory, and {free} are free."
    return StepForecast(
        machine=machine,
        config=config,
        batch_size=batch_size,
        length=length,
        optimizer=optimizer,
        float32_sums=request.float32_sums,
        placement=placement,
        terms=step_terms(request, placement, optimizer),
        seconds=predict_seconds(request, placement, machine) if shape.itemsize <= 2 else None,
        longest_context=longest_context(request),
        problem=problem,
    )


def request_for(
    shape: ModelShape,
    config: Config,
    machine: Machine,
    *,
    batch_size: int,
    length: int,
    optimizer: str,
    needs_grad: bool,
) -> PlacementRequest:
    """What the planner is asked for such a step."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; its states are known for {', '.join(OPTIMIZERS)}")
    if length < 2 or batch_size < 1:
        raise ValueError(f"a step has 2 tokens or more in 1 sequence or more, not {length} in {batch_size}")
    float32_sums = config.param_grad_dtype == "float32"
    if config.param_grad_dtype == "auto":
        float32_sums = shape.missing_grad_bytes(True) <= SUMS_SHARE * machine.gpu_bytes
    on_gpu, on_host = state_bytes(optimizer, shape) if needs_grad else (0, 0)
    return PlacementRequest(
        shape=shape,
        config=config,
        batch_size=batch_size,
        length=length,
        needs_grad=needs_grad,
        float32_sums=float32_sums,
        fused=config.fuse != "off",
        free_gpu_bytes=machine.usable_gpu_bytes - shape.weight_bytes - WORKSPACE_BYTES,
        # Less than nothing, where the states alone do not fit: then nothing does.
        free_host_bytes=machine.host_bytes - on_host,
        missing_grad_bytes=shape.missing_grad_bytes(float32_sums),
        # What a training run must fit is its second step.
        state_bytes=on_gpu,
        optimizer_bytes=0,
    )


def state_bytes(optimizer: str, facts: ModelShape) -> tuple[int, int]:
    """What an optimizer keeps from step to step, on the GPU and on the host."""
    if optimizer in OFFLOADED_STATES:
        all_parameters = torch.empty(facts.trainable_params, device="meta")
        fields = field_sizes(all_parameters, OFFLOADED_STATES[optimizer])
        return 0, sum(dtype.itemsize * count for dtype, count in fields.values())
    return STATE_BYTES[optimizer](facts), 0


def step_terms(request: PlacementRequest, placement: Placement, optimizer: str = "none") -> tuple[MemoryTerm, ...]:
    """Every use of memory of a step."""
    on_host = state_bytes(optimizer, request.shape)[1] if request.needs_grad else 0
    fixed = [
        MemoryTerm(name="weights", tier=GPU, num_bytes=request.shape.weight_bytes),
        MemoryTerm(name="kernel workspaces", tier=GPU, num_bytes=WORKSPACE_BYTES),
        MemoryTerm(name=STATES, tier=GPU, num_bytes=request.state_bytes),
        MemoryTerm(name=STATES, tier=HOST, num_bytes=on_host),
    ]
    return tuple(term for term in (*fixed, *placement.terms) if term.num_bytes)
