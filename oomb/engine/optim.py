"""AdamW whose moments rest in pinned host memory and stream through the GPU, piece by piece, in every step.

A piece is a run of numbers of one parameter with all that belongs to them: gradient, moments, and the float32 copy of a
16-bit parameter if there is one. While a piece is computed, the next one is on its way in and the one before on its way
out; `oomb.memory.transfer` has the streams and the waits between them. On a CPU the same happens in ordinary memory.

    host      [m v 0] [m v 1] [m v 2] [m v 3]
                        ^       |       |
    stores    ----------+       |       |
    computation                 *       |          AdamW in float32, into the buffer; then the parameter is written
    loads                               v

A step that is interrupted (Ctrl-C, out of memory) leaves every piece as it was or wholly updated, and the next call of
`step` does the rest of it. A piece is computed beside the parameter and written at one point, `_commit`, which can be
done twice; what has been written is on record.
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
"""One piece on its way in, one computed, one on its way out."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ONLY = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
"""Settings of torch's AdamW that a loaded state may have."""


class OffloadedAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with its states in host memory.

    `state_dtype` is how the two moments rest: "float32" (8 bytes for a parameter's number), "bfloat16" (4, rounded at
    random without a bias) or "8bit" (2, with a scale for every 256). All arithmetic is in float32. With
    `master_weights`, 16-bit parameters have a float32 copy on the host as well (4 bytes), of which they are the rounded
    image; without, they are rounded up or down at random, so that small updates are not lost on average.

    Host memory is taken at the first step, by `reserve()` or by `load_state_dict`, all or nothing.
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
            raise ValueError(f"betas are {betas}; two numbers are needed, each 0 or more and below 1")
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self._synchronized()
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def _synchronized(self) -> None:
        self._homes: dict[Tensor, HostState] = {}
        self._copier: CopyStreams | None = None
        self._buffer: Tensor | None = None
        """The staging buffers, while copies may touch them."""
        self._pending: PendingWrite | None = None
        """A piece that is being written."""
        self._done: dict[Tensor, int] = {}
        """How many numbers of each parameter the present step has updated. Empty between steps."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in DTYPES:
                del self.param_groups[-1]
                raise ValueError(
                    f"a parameter is of {parameter.dtype}; OffloadedAdamW updates {', '.join(map(str, DTYPES))}"
                )

    @property
    def host_bytes(self) -> int:
        """Host memory that the states take, once every trainable parameter has them."""
        return sum(map(self._state_bytes, self._trainable()))

    def reserve(self) -> None:
        """Takes the host memory now, for all trainable parameters: before the engine plans its own share of it, say.
        The model must be on its device."""
        self._take(self._trainable())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or the rest of one that was interrupted. When it returns, all states are on the host."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_pending()
        pieces = self._pieces()
        if pieces:
            self._stream(pieces)
        self._done = {}
        return loss

    def _pieces(self) -> list[StateBlock]:
        """What is left to do in this step. Refuses what cannot be done, takes memory, changes nothing."""
        numbered = [(p, group) for group in self.param_groups for p in group["params"]]
        stepping = [
            (number, p, group) for number, (p, group) in enumerate(numbered) if p.grad is not None and p.numel()
        ]
        for number, parameter, _ in stepping:
            if parameter.grad.layout != torch.strided:
                raise ValueError(f"the gradient of parameter {number} is sparse: build its embedding with sparse=False")
        devices = {parameter.device for _, parameter, _ in stepping}
        if len(devices) > 1:
            raise ValueError(f"the parameters lie on {', '.join(map(str, devices))}: move the model to one device")
        self._take([parameter for _, parameter, _ in stepping])
        return [
            piece
            for number, parameter, group in stepping
            for piece in self._pieces_of(parameter, number, Update.of(group, self._state_of(parameter, number)))
        ]

    def _pieces_of(self, parameter: Tensor, number: int, update: Update) -> Iterator[StateBlock]:
        assert parameter.grad is not None
        values, grad = flat(parameter.detach(), parameter), flat(parameter.grad, parameter)
        for start, end in block_bounds(self._done.get(parameter, 0), values.numel()):
            host = part(self._homes[parameter].rows, start, end)
            # What is drawn depends on the step and the place alone: a run that is resumed goes on as it would have.
            seed = hash((number, update.step, start)) % 2**63
            yield StateBlock(parameter, values[start:end], grad[start:end], host, update, end, seed)

    def _stream(self, pieces: list[StateBlock]) -> None:
        device = pieces[0].values.device
        if self._copier is None or self._copier.device != device:
            self._copier = CopyStreams(device)
        layout = Layout([piece.host for piece in pieces])
        self._buffer = allocate(
            NUM_BUFFERS * layout.num_bytes,
            device,
            "the optimizer's staging buffers",
            fix="lower gpu_memory or chunk_size of oomb.Config",
        )
        ring, prefetcher = BufferRing(NUM_BUFFERS, self._buffer), Prefetcher(self._copier)
        allocated = self._copier.mark()
        for slot in ring.slots:
            # The computation may still be using what lay here before.
            slot.free_after = allocated
        generator = torch.Generator(device)
        loads = [Load((index,), ring, layout.placed(piece.host)) for index, piece in enumerate(pieces)]
        try:
            prefetcher.expect(loads)
            for piece, load in zip(pieces, loads, strict=True):
                slot = prefetcher.take(load)
                staged = layout.views(slot.bytes, piece.host)
                values = updated(piece, staged, generator.manual_seed(piece.seed))
                self._pending = PendingWrite(piece, values, staged)
                prefetcher.give(ring, slot, self._commit(self._pending))
        finally:
            self._finish_pending()

    def _commit(self, commit: PendingWrite) -> Event:
        """Writes a piece: to the parameter, to the host, and on record. Doing it again changes nothing, as long as the
        buffer has not been given back."""
        assert self._copier is not None
        piece = commit.piece
        piece.values.copy_(commit.values)
        copies = [(host, commit.staged[name]) for name, host in piece.host.items()]
        stored = self._copier.store(copies, [self._copier.mark()])
        if piece.end == piece.parameter.numel():
            self.state[piece.parameter]["step"].fill_(piece.update.step)
        self._done[piece.parameter] = piece.end
        self._pending = None
        return stored

    def _finish_pending(self) -> None:
        """At the end of a step, or where one was interrupted: no copy is under way and no piece half written."""
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
        """What rests on the host for a parameter: precision and number of each field."""
        fields = field_sizes(parameter, state_dtype or self.state_dtype)
        if self.master_weights and parameter.dtype.itemsize < 4:
            fields[MASTER] = torch.float32, parameter.numel()
        return fields

    def _state_bytes(self, parameter: Tensor, state_dtype: str | None = None) -> int:
        return sum(dtype.itemsize * count for dtype, count in self._fields(parameter, state_dtype).values())

    def _take(self, parameters: list[Tensor]) -> None:
        """Host memory for those that have none, or have it for another device: all of it or nothing."""
        homeless = [p for p in parameters if p not in self._homes or not self._homes[p].suits(p)]
        needed = sum(map(self._state_bytes, homeless))
        free = free_host_bytes() if homeless else 0
        try:
            if needed > free:
                raise OutOfPages
            homes = {p: HostState(p, self._fields(p)) for p in homeless}
        except OutOfPages as error:
            remedies = [
                f'state_dtype="{name}" takes {gib(sum(self._state_bytes(p, name) for p in homeless))}'
                for name in STATE_DTYPES[STATE_DTYPES.index(self.state_dtype) + 1 :]
            ]
            if self.master_weights:
                remedies.append("master_weights=False takes 4 bytes less for every 16-bit number")
            reason = f" ({error})" if str(error) else ""
            raise OutOfPages(
                f"the states of the optimizer take {gib(needed)} of host memory and {gib(free)} are "
                f"free{reason}: {'; '.join([*remedies, 'lower host_memory of oomb.Config'])}; or train fewer "
                "parameters, with LoRA for example"
            ) from None
        self._homes.update(homes)

    def _state_of(self, parameter: Tensor, number: int) -> dict[str, Any]:
        """The state of a parameter, in its home: moved there if it has come from elsewhere, new if there is none."""
        home, state = self._homes[parameter], self.state[parameter]
        if state.get("exp_avg") is not home.state["exp_avg"]:
            home.fill(parameter, state, seed=number)
            state = self.state[parameter] = {"step": torch.tensor(float(state.get("step", 0))), **home.state}
        return state

    def state_dict(self) -> dict[str, Any]:
        """As of `torch.optim.AdamW`, with the moments as they rest. The tensors are the optimizer's own."""
        self._check_no_partial_step()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of this class or of `torch.optim.AdamW`, whatever its precision; the same one exactly."""
        self._finish_pending()
        # The last of the hooks: torch would cast every state to the device and the precision of its parameter.
        handle = self.register_load_state_dict_pre_hook(_opaque)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._check_no_partial_step()
        return {**super().__getstate__(), "state_dtype": self.state_dtype, "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle, or at the end of `load_state_dict`."""
        loaded = {p: s.state if isinstance(s, _Opaque) else s for p, s in state["state"].items()}
        numbered = list(enumerate(p for group in state["param_groups"] for p in group["params"]))
        numbered = [(number, p) for number, p in numbered if loaded.get(p) and p.numel()]
        for number, parameter in numbered:
            _check_shape(parameter, number, loaded[parameter])
        if "_homes" not in self.__dict__:
            self._synchronized()
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        self._take([parameter for _, parameter in numbered])
        self._done = {}
        self.state = defaultdict(dict, {parameter: loaded[parameter] for _, parameter in numbered})
        for number, parameter in numbered:
            self._state_of(parameter, number)

    def _check_no_partial_step(self) -> None:
        self._finish_pending()
        if self._done:
            raise RuntimeError(
                f"a step was interrupted when {len(self._done)} parameters were updated, the last perhaps in part: "
                "call step() again, which does the rest of it, or load a state"
            )


@dataclass(frozen=True)
class Update:
    """What one step of AdamW is for a parameter."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @staticmethod
    def of(group: dict[str, Any], state: dict[str, Any]) -> Update:
        first, second = map(float, group["betas"])
        rates = (float(group[name]) for name in ("eps", "weight_decay"))
        return Update(int(state["step"]) + 1, float(group["lr"]), (first, second), *rates)

    def apply_(self, values: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """To tensors of one precision, operation by operation as `torch.optim.AdamW` with foreach=False does it."""
        beta1, beta2 = self.betas
        values.mul_(1 - self.lr * self.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = exp_avg_sq.sqrt().div_((1 - beta2**self.step) ** 0.5).add_(self.eps)
        values.addcdiv_(exp_avg, scale, value=-self.lr / (1 - beta1**self.step))


@dataclass(frozen=True, eq=False)
class StateBlock:
    """Neighbouring numbers of a parameter."""

    parameter: Tensor
    values: Tensor
    grad: Tensor
    host: dict[str, Tensor]
    """Their states at rest."""
    update: Update
    end: int
    seed: int


@dataclass(frozen=True, eq=False)
class PendingWrite:
    """A piece with its new values and, in a staging buffer, its new states."""

    piece: StateBlock
    values: Tensor
    staged: dict[str, Tensor]


def updated(piece: StateBlock, staged: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    """The new values of a piece; its states in the staging buffer become the new ones. The parameter is not touched."""
    dtype = piece.values.dtype
    wide = torch.promote_types(dtype, torch.float32)
    values = staged[MASTER] if MASTER in staged else piece.values.to(wide, copy=True)
    moments = [decode(staged, name, wide) for name in MOMENTS]
    piece.update.apply_(values, piece.grad.to(wide), *moments)
    for name, moment in zip(MOMENTS, moments, strict=True):
        encode_(staged, name, moment, generator)
    return values if MASTER in staged or dtype == wide else stochastic_round_next(values, dtype, generator)


def _opaque(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:
        for name, value in ONLY.items():
            if group.get(name, value) != value and (name != "decoupled_weight_decay" or group["weight_decay"]):
                raise ValueError(f"the state to load is of an optimizer with {name}={group[name]}, not plain AdamW")
    return {**state_dict, "state": {key: _Opaque(state) for key, state in state_dict["state"].items()}}


def _check_shape(parameter: Tensor, number: int, state: dict[str, Any]) -> None:
    for name in {*MOMENTS, MASTER} & state.keys():
        if state[name].shape != parameter.shape:
            raise ValueError(
                f"the state to load has {name} of shape {tuple(state[name].shape)} for parameter {number}, which has "
                f"{tuple(parameter.shape)}: it belongs to another model, or its groups come in another order"
            )
