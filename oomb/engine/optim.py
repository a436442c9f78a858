"""Provide `OffloadedAdamW`: AdamW whose states live in pinned host memory and stream through the GPU in every step.

A block is a run of elements of one parameter with everything they need: gradient, moments, and the float32 master copy
of a 16-bit parameter if there is one. While one block is computed, the next is loaded and the previous one stored;
`oomb.memory.transfer` has the streams and the waits between them. On a CPU the same code runs in ordinary memory.

    host      [m v 0] [m v 1] [m v 2] [m v 3]
                        ^       |       |
    stores    ----------+       |       |
    compute                     *       |          AdamW in float32, in the buffer; then the parameter is written
    loads                               v

An interrupted step (Ctrl-C, out of memory) leaves every block either unchanged or fully updated, and the next call of
`step` finishes it. A block is computed out of place and written at one point, `_commit`, which may run twice; progress
is recorded there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomb.engine.optim_state import MASTER, HostState, Layout, _Opaque, block_bounds, flat
from oomb.memory.host import free_host_bytes
from oomb.memory.pool import OutOfPages
from oomb.memory.tiers import allocate
from oomb.memory.transfer import BufferRing, CopyStreams, Event, Load, Prefetcher
from oomb.ops.moments import MOMENTS, STATE_DTYPES, decode, encode_, field_sizes, part
from oomb.ops.rounding import stochastic_round_next
from oomb.utils.units import gib

NUM_BUFFERS = 3
"""One block is loaded, one computed, one stored."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ONLY = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
"""The only values that these settings of torch's AdamW may have in a loaded state."""


class OffloadedAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with its states in host memory.

    All arithmetic is in float32. 16-bit parameters are updated with stochastic rounding, so small updates survive on
    average, or with `master_weights` from a float32 copy. Host memory is allocated at the first step, by `reserve()` or
    by `load_state_dict`: all of it, or `oomb.OutOfPages` with the numbers.

    Args:
        params: parameters or parameter groups, as in torch.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        state_dtype: how the moments are stored: "float32" (8 bytes per parameter element), "bfloat16" (4, with
            stochastic rounding) or "8bit" (2, with a scale per 256 elements).
        master_weights: keep a float32 copy of 16-bit parameters on the host (4 bytes per element).

    Examples:
        >>> import oomb, torch
        >>> model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = oomb.OffloadedAdamW(model.parameters(), lr=1e-5, state_dtype="8bit")
        >>> optimizer.host_bytes
        8456
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: str = "float32",
        master_weights: bool = False,
    ) -> None:
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype is {state_dtype!r}; use one of {', '.join(STATE_DTYPES)}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not float(value) >= 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; they must be two numbers, each at least 0 and below 1")
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self._reset_streams()
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _reset_streams(self) -> None:
        self._host_states: dict[Tensor, HostState] = {}
        self._copier: CopyStreams | None = None
        self._buffer: Tensor | None = None
        """The staging buffers while copies may access them."""
        self._pending: PendingWrite | None = None
        """The block that is being written."""
        self._done: dict[Tensor, int] = {}
        """How many elements of each parameter the current step has updated. Empty between steps."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in DTYPES:
                del self.param_groups[-1]
                raise ValueError(
                    f"a parameter has dtype {parameter.dtype}; OffloadedAdamW updates {', '.join(map(str, DTYPES))}"
                )

    @property
    def host_bytes(self) -> int:
        """Host memory of the states of all trainable parameters."""
        return sum(map(self._state_bytes, self._trainable()))

    def reserve(self) -> None:
        """Allocate the host memory of all trainable parameters now, before the engine plans with what is free.

        The model must be on its device already.
        """
        self._allocate(self._trainable())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or finish an interrupted one. When it returns, all states are on the host."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_pending()
        blocks = self._blocks()
        if blocks:
            self._stream(blocks)
        self._done = {}
        return loss

    def _blocks(self) -> list[StateBlock]:
        """Return what is left to do in this step. Checks and allocates, but updates nothing."""
        numbered = [(p, group) for group in self.param_groups for p in group["params"]]
        stepping = [
            (number, p, group) for number, (p, group) in enumerate(numbered) if p.grad is not None and p.numel()
        ]
        for number, parameter, _ in stepping:
            if parameter.grad.layout != torch.strided:
                raise ValueError(f"the gradient of parameter {number} is sparse: build its embedding with sparse=False")
        devices = {parameter.device for _, parameter, _ in stepping}
        if len(devices) > 1:
            raise ValueError(f"the parameters are on {', '.join(map(str, devices))}: move the model to one device")
        self._allocate([parameter for _, parameter, _ in stepping])
        return [
            block
            for number, parameter, group in stepping
            for block in self._parameter_blocks(parameter, number, Update.of(group, self._state_of(parameter, number)))
        ]

    def _parameter_blocks(self, parameter: Tensor, number: int, update: Update) -> Iterator[StateBlock]:
        assert parameter.grad is not None
        values, grad = flat(parameter.detach(), parameter), flat(parameter.grad, parameter)
        for start, end in block_bounds(self._done.get(parameter, 0), values.numel()):
            host = part(self._host_states[parameter].rows, start, end)
            # The random numbers depend only on step and position, so a resumed run draws the same ones.
            seed = hash((number, update.step, start)) % 2**63
            yield StateBlock(parameter, values[start:end], grad[start:end], host, update, end, seed)

    def _stream(self, blocks: list[StateBlock]) -> None:
        device = blocks[0].values.device
        if self._copier is None or self._copier.device != device:
            self._copier = CopyStreams(device)
        layout = Layout([block.host for block in blocks])
        self._buffer = allocate(
            NUM_BUFFERS * layout.num_bytes,
            device,
            "the optimizer's staging buffers",
            fix="lower gpu_memory or chunk_size of oomb.Config",
        )
        ring, prefetcher = BufferRing(NUM_BUFFERS, self._buffer), Prefetcher(self._copier)
        allocated = self._copier.mark()
        for slot in ring.slots:
            # The default stream may still use the memory that the buffer was made of.
            slot.free_after = allocated
        generator = torch.Generator(device)
        loads = [Load((index,), ring, layout.placed(block.host)) for index, block in enumerate(blocks)]
        try:
            prefetcher.expect(loads)
            for block, load in zip(blocks, loads, strict=True):
                slot = prefetcher.take(load)
                staged = layout.views(slot.bytes, block.host)
                values = compute_update(block, staged, generator.manual_seed(block.seed))
                self._pending = PendingWrite(block, values, staged)
                prefetcher.give(ring, slot, self._commit(self._pending))
        finally:
            self._finish_pending()

    def _commit(self, commit: PendingWrite) -> Event:
        """Write a block to the parameter and to the host, and record it. May run twice while it holds the buffer."""
        assert self._copier is not None
        block = commit.block
        block.values.copy_(commit.values)
        copies = [(host, commit.staged[name]) for name, host in block.host.items()]
        stored = self._copier.store(copies, [self._copier.mark()])
        if block.end == block.parameter.numel():
            self.state[block.parameter]["step"].fill_(block.update.step)
        self._done[block.parameter] = block.end
        self._pending = None
        return stored

    def _finish_pending(self) -> None:
        """Wait for all copies and finish the block that was being written, after a step or an interrupt."""
        if self._copier is None or self._buffer is None:
            return
        self._copier.drain()
        if self._pending is not None:
            self._commit(self._pending)
            self._copier.drain()
        self._buffer = None

    def _trainable(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.numel()]

    def _fields(self, parameter: Tensor, state_dtype: str | None = None) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and number of elements of every state of a parameter."""
        fields = field_sizes(parameter, state_dtype or self.state_dtype)
        if self.master_weights and parameter.dtype.itemsize < 4:
            fields[MASTER] = torch.float32, parameter.numel()
        return fields

    def _state_bytes(self, parameter: Tensor, state_dtype: str | None = None) -> int:
        return sum(dtype.itemsize * count for dtype, count in self._fields(parameter, state_dtype).values())

    def _allocate(self, parameters: list[Tensor]) -> None:
        """Allocate the states of parameters that have none, or have them for another device: all of them or none."""
        missing = [p for p in parameters if p not in self._host_states or not self._host_states[p].fits(p)]
        needed = sum(map(self._state_bytes, missing))
        free = free_host_bytes() if missing else 0
        try:
            if needed > free:
                raise OutOfPages
            host_states = {p: HostState(p, self._fields(p)) for p in missing}
        except OutOfPages as error:
            fixes = [
                f'state_dtype="{name}" needs {gib(sum(self._state_bytes(p, name) for p in missing))}'
                for name in STATE_DTYPES[STATE_DTYPES.index(self.state_dtype) + 1 :]
            ]
            if self.master_weights:
                fixes.append("master_weights=False needs 4 bytes less per element of a 16-bit parameter")
            reason = f" ({error})" if str(error) else ""
            raise OutOfPages(
                f"the optimizer states need {gib(needed)} of host memory, but only {gib(free)} are free{reason}: "
                f"{'; '.join([*fixes, 'lower host_memory of oomb.Config'])}; or train fewer parameters, with LoRA for "
                "example"
            ) from None
        self._host_states.update(host_states)

    def _state_of(self, parameter: Tensor, number: int) -> dict[str, Any]:
        """Return the state of a parameter in its host memory. Creates it, or moves it there from elsewhere."""
        host, state = self._host_states[parameter], self.state[parameter]
        if state.get("exp_avg") is not host.state["exp_avg"]:
            host.fill(parameter, state, seed=number)
            state = self.state[parameter] = {"step": torch.tensor(float(state.get("step", 0))), **host.state}
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like that of `torch.optim.AdamW`, with the moments as they are stored, not copied."""
        self._check_no_partial_step()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.optim.AdamW`, in any precision. In the same precision it is exact."""
        self._finish_pending()
        # Registered last. Without it torch would cast every state to the device and dtype of its parameter.
        handle = self.register_load_state_dict_pre_hook(_opaque)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._check_no_partial_step()
        return {**super().__getstate__(), "state_dtype": self.state_dtype, "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, or at the end of `load_state_dict`."""
        loaded = {p: s.state if isinstance(s, _Opaque) else s for p, s in state["state"].items()}
        numbered = list(enumerate(p for group in state["param_groups"] for p in group["params"]))
        numbered = [(number, p) for number, p in numbered if loaded.get(p) and p.numel()]
        for number, parameter in numbered:
            _check_shape(parameter, number, loaded[parameter])
        if "_host_states" not in self.__dict__:
            self._reset_streams()
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        self._allocate([parameter for _, parameter in numbered])
        self._done = {}
        self.state = defaultdict(dict, {parameter: loaded[parameter] for _, parameter in numbered})
        for number, parameter in numbered:
            self._state_of(parameter, number)

    def _check_no_partial_step(self) -> None:
        self._finish_pending()
        if self._done:
            raise RuntimeError(
                f"a step was interrupted after it updated {len(self._done)} parameters, the last one possibly only in "
                "part: call step() again to finish it, or load a state"
            )


@dataclass(frozen=True)
class Update:
    """The settings of one AdamW step for a parameter."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @staticmethod
    def of(group: dict[str, Any], state: dict[str, Any]) -> Update:
        """Return the next step of a parameter, given its group and its state."""
        first, second = map(float, group["betas"])
        rates = (float(group[name]) for name in ("eps", "weight_decay"))
        return Update(int(state["step"]) + 1, float(group["lr"]), (first, second), *rates)

    def apply_(self, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Update tensors of one dtype in place, with the operations of `torch.optim.AdamW` at foreach=False."""
        beta1, beta2 = self.betas
        values.mul_(1 - self.lr * self.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = exp_avg_sq.sqrt().div_((1 - beta2**self.step) ** 0.5).add_(self.eps)
        values.addcdiv_(exp_avg, scale, value=-self.lr / (1 - beta1**self.step))


@dataclass(frozen=True, eq=False)
class StateBlock:
    """Consecutive elements of a parameter."""

    parameter: Tensor
    values: Tensor
    grad: Tensor
    host: dict[str, Tensor]
    """Their states in host memory."""
    update: Update
    end: int
    seed: int


@dataclass(frozen=True, eq=False)
class PendingWrite:
    """A block with its new values and, in a staging buffer, its new states."""

    block: StateBlock
    values: Tensor
    staged: dict[str, Tensor]


def compute_update(block: StateBlock, staged: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    """Return the new values of a block and update its states in the staging buffer. Does not write the parameter."""
    dtype = block.values.dtype
    wide = torch.promote_types(dtype, torch.float32)
    values = staged[MASTER] if MASTER in staged else block.values.to(wide, copy=True)
    moments = [decode(staged, name, wide) for name in MOMENTS]
    block.update.apply_(values, block.grad.to(wide), *moments)
    for name, moment in zip(MOMENTS, moments, strict=True):
        encode_(staged, name, moment, generator)
    return values if MASTER in staged or dtype == wide else stochastic_round_next(values, dtype, generator)


def _opaque(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state dict and wrap its states, so torch does not cast them."""
    for group in state_dict["param_groups"]:
        for name, value in ONLY.items():
            if group.get(name, value) != value and (name != "decoupled_weight_decay" or group["weight_decay"]):
                raise ValueError(f"the loaded state belongs to an optimizer with {name}={group[name]}, not plain AdamW")
    return {**state_dict, "state": {key: _Opaque(state) for key, state in state_dict["state"].items()}}


def _check_shape(parameter: Tensor, number: int, state: dict[str, Any]) -> None:
    for name in {*MOMENTS, MASTER} & state.keys():
        if state[name].shape != parameter.shape:
            raise ValueError(
                f"the loaded state has {name} of shape {tuple(state[name].shape)} for parameter {number} of shape "
                f"{tuple(parameter.shape)}: it belongs to another model, or its groups are in another order"
            )
