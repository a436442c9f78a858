"""Verify that chunked training gives a model the same gradients as whole-sequence autograd on this machine.

The reference is the model's own forward over the whole sequence, with its own attention (sdpa or eager), and autograd.
float64 and float32 are compared with it directly. In bfloat16 and float16 two correct computations differ by rounding,
so both are compared with the float32 gradients of the same weights: the engine's error must not be noticeably larger
than that of standard training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oomb.config import Config
from oomb.distributed.mesh import init_mesh, world_size
from oomb.distributed.topology import Topology
from oomb.engine.engine import Engine
from oomb.models.load import load_model
from oomb.utils.dtypes import resolve_device

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative error of a parameter's gradient, and of the loss. Most Hugging Face models compute RoPE and norms in
float32 even if the weights are float64, so float64 gradients agree to about 1e-7 at best."""

MAX_RATIO = 1.2
"""In half precision, the largest error of the whole gradient, as a multiple of standard training's. For tiny models two
correct computations differ by a factor of up to 1.15 by chance, for large ones by much less."""

MAX_PARAMETER_RATIO = 1.5
"""The same for a single parameter. Small tensors get a larger limit, since their ratio varies more by chance; see
`ParameterError.limit`."""

FLOOR = 1e-2
"""The error of a parameter is relative to its gradient's norm, or to this fraction of a typical norm if that is larger.
Some gradients are zero except for rounding, such as that of a key bias, and have no digits to compare."""


@dataclass(frozen=True)
class ParameterError:
    """Error of the engine's gradient for one parameter and, in half precision, of standard training's gradient."""

    name: str
    num_elements: int
    norm: float
    error: float
    standard_error: float | None = None
    is_negligible: bool = False
    """The gradient is below the floor, so this parameter is judged only as part of the total."""

    @property
    def ratio(self) -> float:
        assert self.standard_error is not None
        return self.error / self.standard_error if self.standard_error > 0 else float(self.error > 0) * float("inf")

    @property
    def limit(self) -> float:
        # The rounding error of n elements is known to about 1 / sqrt(2 n), and the ratio has two of them.
        return MAX_PARAMETER_RATIO * (1 + 2 * self.num_elements**-0.5)

    @property
    def severity(self) -> float:
        """The error or, in half precision, the ratio relative to its limit. Rows are sorted by it."""
        if self.standard_error is None:
            return self.error
        return 0.0 if self.is_negligible else self.ratio / self.limit


@dataclass(frozen=True)
class Comparison:
    """Outcome of a verification: the verdict (`trusted`) and all parameters (`rows`), worst first."""

    rows: list[ParameterError]
    loss: float
    whole_loss: float
    dtype: str
    context: int
    num_chunks: int
    total_error: float
    total_standard_error: float | None = None
    num_ranks: int = 1
    problems: list[str] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[getattr(torch, self.dtype)]

    @property
    def trusted(self) -> bool:
        return not self.problems

    @property
    def verdict(self) -> str:
        """One line that starts with "trust it" or "do not trust"."""
        if not self.trusted:
            return f"do not trust: {'; '.join(self.problems)}"
        scope = f"{len(self.rows)} parameters, {self.context} tokens in {self.num_chunks} chunks, {self.dtype}"
        scope += f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        if self.total_standard_error is None:
            return f"trust it: gradients match whole-sequence training to {self.rows[0].error:.1e} or better ({scope})"
        ratio = self.total_error / self.total_standard_error if self.total_standard_error else 1.0
        return f"trust it: rounding error is {ratio:.2f} x that of standard training ({scope})"

    def table(self, num_rows: int = 8) -> Table:
        """Return the worst `num_rows` parameters as a table for the terminal."""
        half = self.total_standard_error is not None
        order = "closest to their limit" if half else f"with the largest error (limit {self.tolerance:.0e})"
        num_shown = min(num_rows, len(self.rows))
        table = Table(title=f"{num_shown} of {len(self.rows)} parameters, {order}", title_justify="left")
        # Short headings leave room for parameter names, which are folded and never truncated.
        table.add_column("parameter", overflow="fold")
        columns = ("norm", "oomb error", "standard", "ratio", "limit") if half else ("gradient norm", "oomb error")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows[:num_rows]:
            cells = [row.name, f"{row.norm:.2e}", f"{row.error:.2e}"]
            if row.standard_error is not None:
                limit = "none" if row.is_negligible else f"{row.limit:.2f}"
                cells += [f"{row.standard_error:.2e}", f"{row.ratio:.2f}", limit]
            table.add_row(*cells)
        return table


def verify(
    name_or_path: str,
    *,
    context: int = 2048,
    chunk_size: int = 512,
    dtype: str = "float32",
    device: str = "auto",
    num_layers: int | None = None,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    parallel: str = "auto",
) -> Comparison:
    """Load a model and verify its gradients on random tokens.

    Args:
        name_or_path: A preset, a folder or a hub id.
        context: Sequence length, in tokens.
        chunk_size: Tokens per chunk; less than `context`.
        dtype: Precision to verify: float64, float32, bfloat16 or float16.
        device: "auto", "cpu", "cuda" or "cuda:N".
        num_layers: Keep only the first layers of a model that is too large for this machine.
        settings: Other fields of `oomb.Config`.
        seed: Seed for the tokens, and for a preset's weights.
        trust_remote_code: Run Python code that comes with the model.
        parallel: How the processes that torchrun started share the sequences, as in `oomb.Trainer`. Each compares all
            gradients with whole-sequence autograd.

    Examples:
        >>> verify("demo", context=64, chunk_size=16, device="cpu").trusted
        True
    """
    if chunk_size >= context:
        raise ValueError(
            f"chunk_size is {chunk_size} and the context {context}, which is a single chunk: set chunk_size below the "
            "context"
        )
    config = Config.from_dict({**(settings or {}), "chunk_size": chunk_size})
    topology, mesh = Topology.parse(parallel), None
    topology.num_replicas(world_size())  # raises if it does not fit
    if world_size() > 1:
        device = resolve_device(device).type
        mesh = init_mesh(device, sp=topology.sp)
    torch.manual_seed(seed)
    model = load_model(
        name_or_path, dtype=dtype, device=device, num_layers=num_layers, trust_remote_code=trust_remote_code
    )
    return compare(model, config, context=context, seed=seed, mesh=mesh)


def compare(
    model: nn.Module, config: Config, *, context: int, seed: int = 0, mesh: DeviceMesh | None = None
) -> Comparison:
    """Compare the engine's gradients with those of whole-sequence autograd, on random tokens and without dropout.

    The weights are left unchanged and `.grad` is None afterwards. With a mesh there is a sequence for each replica, and
    all of them for autograd.
    """
    engine = Engine(model, config, mesh=mesh)
    ranks, replicas = engine.replicas.ranks, engine.replicas.group
    parameter = next(model.parameters())
    if parameter.dtype not in TOLERANCE and _is_mixture_of_experts(model):
        raise ValueError(
            f"a mixture of experts cannot be verified in {str(parameter.dtype).removeprefix('torch.')}: rounding can "
            "route a token to another expert, so two correct computations differ at random. Use float32"
        )
    was_training = model.training
    model.eval()
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (replicas.size, context), generator=generator).to(parameter.device)
    own_ids = ids[replicas.rank : replicas.rank + 1]
    try:
        loss, gradients = _gradients(model, lambda: engine.loss(own_ids))
        whole_loss, whole = _gradients(model, lambda: _whole_sequence_loss(model, ids))
        if parameter.dtype in TOLERANCE:
            rows = _rows(whole, gradients)
            total, total_standard = total_error(whole, gradients), None
        else:
            reference = _float32_gradients(model, ids)
            rows = _rows(reference, gradients, whole)
            total, total_standard = total_error(reference, gradients), total_error(reference, whole)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    rows.sort(key=lambda row: row.severity, reverse=True)
    problems = _problems(rows, loss, whole_loss, total, total_standard, parameter.dtype)
    if ranks.size > 1:
        everyones = ranks.gather(problems)
        problems = [f"rank {rank}: {text}" for rank, found in enumerate(everyones) for text in found]
    return Comparison(
        rows=rows,
        loss=loss,
        whole_loss=whole_loss,
        dtype=str(parameter.dtype).removeprefix("torch."),
        context=context,
        num_chunks=-(-context // config.chunk_size),
        total_error=total,
        total_standard_error=total_standard,
        num_ranks=ranks.size,
        problems=problems,
    )


def _problems(
    rows: list[ParameterError],
    loss: float,
    whole_loss: float,
    total: float,
    total_standard: float | None,
    dtype: torch.dtype,
) -> list[str]:
    found = []
    if not all(_finite(x) for row in rows for x in (row.norm, row.error)) or not _finite(loss):
        found.append("the gradients or the loss are not finite")
    loss_error = abs(loss - whole_loss) / max(abs(whole_loss), 1e-12)
    if total_standard is None:
        tolerance = TOLERANCE[dtype]
        if loss_error > tolerance:
            found.append(f"the losses differ by {loss_error:.1e}, more than {tolerance:.0e}")
        if rows and rows[0].error > tolerance:
            found.append(f"the gradient of {rows[0].name} is off by {rows[0].error:.1e}, more than {tolerance:.0e}")
        return found
    if loss_error > 1e-2:
        found.append(f"the losses differ by {loss_error:.1e}, more than 1e-2")
    if total > MAX_RATIO * total_standard:
        found.append(
            f"the error is {total / max(total_standard, 1e-30):.2f} x standard training's, more than {MAX_RATIO}"
        )
    if rows and rows[0].severity > 1:
        found.append(
            f"the error of {rows[0].name} is {rows[0].ratio:.2f} x standard training's, more than {rows[0].limit:.2f}"
        )
    return found


def _whole_sequence_loss(model: nn.Module, ids: Tensor) -> Tensor:
    # Hugging Face computes its own loss in float32 even for a float64 model.
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    precision = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(precision), ids[:, 1:].flatten())


def _gradients(model: nn.Module, compute_loss: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and a copy of every trainable parameter's gradient in host memory."""
    model.zero_grad(set_to_none=True)
    loss = compute_loss()
    loss.backward()
    found = {
        name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.detach().to("cpu", copy=True)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def _float32_gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    # Convert parameters only: model.to() would round the float32 RoPE tables on the way back.
    dtypes = [(p, p.dtype) for p in model.parameters()]
    for p, _ in dtypes:
        p.data = p.data.float()
    try:
        return _gradients(model, lambda: _whole_sequence_loss(model, ids))[1]
    finally:
        for p, dtype in dtypes:
            p.data = p.data.to(dtype)


def _is_mixture_of_experts(model: nn.Module) -> bool:
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(a.double() - b.double())


def _finite(x: float) -> bool:
    return x == x and abs(x) != float("inf")


def _rows(
    reference: dict[str, Tensor], engine: dict[str, Tensor], standard: dict[str, Tensor] | None = None
) -> list[ParameterError]:
    norms = {name: _norm(x) for name, x in reference.items()}
    num_elements = sum(x.numel() for x in reference.values())
    typical = (sum(norm**2 for norm in norms.values()) / num_elements) ** 0.5
    rows = []
    for name, x in reference.items():
        floor = FLOOR * typical * x.numel() ** 0.5
        scale = max(norms[name], floor, 1e-30)
        rows.append(
            ParameterError(
                name=name,
                num_elements=x.numel(),
                norm=norms[name],
                error=_distance(engine[name], x) / scale,
                standard_error=None if standard is None else _distance(standard[name], x) / scale,
                is_negligible=norms[name] < floor,
            )
        )
    return rows


def total_error(reference: dict[str, Tensor], candidate: dict[str, Tensor]) -> float:
    error = sum(_distance(candidate[name], x) ** 2 for name, x in reference.items())
    return (error / max(sum(_norm(x) ** 2 for x in reference.values()), 1e-60)) ** 0.5
