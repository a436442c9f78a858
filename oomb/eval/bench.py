"""Measure time, throughput and memory of a training step with oomb and with standard training.

"standard" is a well-tuned Hugging Face step: activation checkpointing in every layer, the fastest attention backend
PyTorch has, and a tiled loss. Both modes see the same weights and tokens. Their losses and a sample of their gradients
are compared, and a result that disagrees is reported as wrong no matter how fast it was.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomb.config import Config
from oomb.engine.batch import shift_labels
from oomb.engine.engine import Engine
from oomb.engine.head import TokenHead
from oomb.models.adapters import autocast_for, with_lora
from oomb.models.causal_lm import CausalLM
from oomb.models.hooks import set_checkpointing
from oomb.models.load import load_model
from oomb.models.probe import model_shape
from oomb.models.shape import ModelShape
from oomb.planner.flops import step_flops
from oomb.planner.hardware import peak_flops
from oomb.utils import files, metrics, units

Row = TypeVar("Row")
MODES = ("oomb", "standard")
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
WARM_UP = 32768
"""Tokens of each mode's warm-up step: several chunks of any reasonable size, so that every kernel gets compiled."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2
"""Largest relative difference between the gradients of the two modes (a tenth of it for the loss), in full and in half
precision. Two bfloat16 runs of a deep random model differ by 0.07."""


@dataclass(kw_only=True)
class StepResult:
    """Time, memory and transfers of one measured step."""

    context: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    gpu_page_bytes: int = 0
    host_page_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    waited_seconds: float = 0.0
    reserve_seconds: float = 0.0
    loss: float | None = None
    problem: str | None = None


@dataclass(kw_only=True)
class BenchResult(StepResult):
    """One mode at one context."""

    mode: str
    mfu: float | None = None
    grad_difference: float | None = None
    is_wrong: bool = False
    """The loss or the gradients disagree with those of the other mode."""
    all_seconds: list[float] = field(default_factory=list)


@dataclass
class Report(Generic[Row]):
    """Results with the settings and the machine they were measured with."""

    model: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: list[Row]

    def save(self, path: str | Path) -> Path:
        """Write settings, machine and results to a JSON file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path


class BenchReport(Report[BenchResult]):
    """Results of one benchmark run."""

    def table(self) -> Table:
        """Return the results as a table for the terminal, without empty columns."""
        table = Table(title=f"{self.model}: one training step (forward and backward)")
        columns: dict[str, Callable[[BenchResult], str]] = {
            "context": lambda row: f"{row.context:,}",
            "mode": lambda row: row.mode,
            "time": lambda row: row.problem or units.seconds(row.seconds or 0.0),
            "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
            "MFU": lambda row: f"{row.mfu:.1%}" if row.mfu else "",
            "peak": lambda row: units.gib(row.peak_bytes) if row.peak_bytes else "",
            "device pages": lambda row: units.gib(row.gpu_page_bytes) if row.gpu_page_bytes else "",
            "host pages": lambda row: units.gib(row.host_page_bytes) if row.host_page_bytes else "",
            "copied in, out": lambda row: (
                f"{units.gib(row.loaded_bytes)}, {units.gib(row.stored_bytes)}" if row.loaded_bytes else ""
            ),
            "stall": lambda row: units.seconds(row.waited_seconds) if row.loaded_bytes else "",
            "grad diff": lambda row: f"{row.grad_difference:.1e}" if row.grad_difference is not None else "",
        }
        shown = {name: show for name, show in columns.items() if any(map(show, self.rows))}
        for name in shown:
            table.add_column(name, justify="left" if name == "mode" else "right")
        for row in self.rows:
            table.add_row(*(show(row) for show in shown.values()))
        return table

    @property
    def is_right(self) -> bool:
        """Whether no result disagrees with standard training."""
        return not any(row.is_wrong for row in self.rows)


def run(
    model: str,
    contexts: Sequence[int],
    *,
    modes: Sequence[str] = MODES,
    chunk_size: int = 4096,
    dtype: str = "auto",
    device: str = "auto",
    lora: bool = False,
    repeats: int = 1,
    settings: dict[str, Any] | None = None,
    finish: Callable[[Engine], None] | None = None,
    on_row: Callable[[BenchResult], None] | None = None,
    on_chunk: Callable[[str, int, int], None] | None = None,
    trust_remote_code: bool = False,
) -> BenchReport:
    """Measure every mode at every context, shortest context first.

    Args:
        model: A preset, a folder or a hub id.
        contexts: Sequence lengths, in tokens.
        modes: "oomb", "standard" or both.
        chunk_size: Tokens per chunk.
        dtype: Precision of the weights; "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        lora: Train LoRA adapters only.
        repeats: Timed steps per result; the median is reported.
        settings: Other fields of `oomb.Config`.
        finish: Called with the engine after the last measurement.
        on_row: Called with each result.
        on_chunk: Called as on_chunk(phase, chunks done, chunks in total).
        trust_remote_code: Run Python code that comes with the model.

    Examples:
        >>> report = run("demo", [64], chunk_size=16, device="cpu")
        >>> [row.mode for row in report.rows], report.is_right
        (['standard', 'oomb'], True)
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; use {' or '.join(MODES)}")
    if not contexts or min(contexts) < 2:
        raise ValueError(f"contexts is {list(contexts)}; it needs at least one context, and 2 tokens or more in each")
    config = Config.from_dict({"chunk_size": chunk_size, **(settings or {})})
    network = _load(model, dtype, device, lora, trust_remote_code)
    engine = Engine(network, config)
    engine.progress = on_chunk
    vocab, place, shape = engine.model.vocab_size, engine.model.device, model_shape(network)
    steps: dict[str, EngineStep | StandardStep] = {"standard": StandardStep(network), "oomb": EngineStep(engine)}
    rows: list[BenchResult] = []
    for context in sorted(contexts):
        ids = torch.randint(1, vocab, (1, context), generator=torch.Generator().manual_seed(context))
        sample: dict[str, Tensor] = {}
        for mode in sorted(modes, reverse=True):
            with autocast_for(network):
                row = _measure(mode, steps[mode], ids, network, repeats, place)
            keys = config.keys_read(context) if mode == "oomb" else context
            row.mfu = _mfu(row, shape, place, keys)
            if row.problem is None:
                other = next((r for r in rows if r.context == context and r.problem is None), None)
                compare_gradients(row, other, network, sample, config.keys_read(context) >= context)
            # Or the memory of standard training would include the engine's pages.
            engine.release()
            free_memory(network)
            rows.append(row)
            if on_row is not None:
                on_row(row)
    if finish is not None:
        finish(engine)
    precision = str(next(network.parameters()).dtype).removeprefix("torch.")
    used = {**asdict(config), "fused": engine.fuse, "dtype": precision, "lora": lora, "repeats": repeats}
    return BenchReport(model=model, settings=used, machine=metrics.machine(), rows=rows)


class EngineStep:
    """A training step with oomb."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_warm = False

    def prepare(self, ids: Tensor, row: StepResult) -> None:
        """Reserve memory before timing: like compilation, pinning happens once per run."""
        begin = time.perf_counter()
        self.engine.reserve(*ids.shape)
        row.reserve_seconds = time.perf_counter() - begin
        self.engine.reset_stats()

    def finish(self, row: StepResult) -> None:
        stats = self.engine.stats
        row.gpu_page_bytes, row.host_page_bytes = stats.gpu_peak_bytes, stats.host_peak_bytes
        row.loaded_bytes, row.stored_bytes = stats.loaded_bytes, stats.stored_bytes
        row.waited_seconds = stats.waited_seconds

    def __call__(self, ids: Tensor) -> Tensor:
        loss = self.engine.loss(ids)
        loss.backward()
        return loss.detach()


class StandardStep:
    """A training step with Hugging Face: activation checkpointing, cuDNN attention if available, tiled loss."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.is_warm = False
        self.model = CausalLM(network)
        self.head = TokenHead(self.model)

    def prepare(self, ids: Tensor, row: StepResult) -> None: ...

    def finish(self, row: StepResult) -> None: ...

    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.model.device)
        targets = shift_labels(ids)
        num_counted = ids.shape[1] - 1
        was_training = self.network.training
        self.network.train()
        set_checkpointing(self.model.lm, on=True)
        try:
            with sdpa_kernel(FASTEST_FIRST, set_priority=True):
                hidden = self.model.backbone(input_ids=ids, use_cache=False)[0]
                (logp,) = self.head.forward(hidden, targets, fused=False)
                dlogp = torch.full_like(logp, -1 / num_counted)
                dhidden = self.head.backward(hidden, targets, [dlogp], fused=False)
                hidden.backward(dhidden)
        finally:
            set_checkpointing(self.model.lm, on=False)
            self.network.train(was_training)
        return -logp.sum() / num_counted


def _load(model: str, dtype: str, device: str, lora: bool, trust_remote_code: bool) -> nn.Module:
    network: nn.Module = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return (with_lora(network) if lora else network).train()


def _measure(
    mode: str, step: EngineStep | StandardStep, ids: Tensor, network: nn.Module, repeats: int, place: torch.device
) -> BenchResult:
    row = BenchResult(mode=mode, context=ids.shape[1])
    on_gpu = place.type == "cuda"
    try:
        if not step.is_warm:
            # The first step compiles kernels and grows the allocator's pools.
            step(ids[:, :WARM_UP])
            step.is_warm = True
        clear_grads(network)
        step.prepare(ids, row)
        for _ in range(repeats):
            clear_grads(network)
            if on_gpu:
                torch.cuda.synchronize()
            meter = metrics.MemoryMeter(place)
            begin = time.perf_counter()
            row.loss = float(step(ids))
            if on_gpu:
                torch.cuda.synchronize()
                row.reserved_bytes = torch.cuda.max_memory_reserved(place)
            row.all_seconds.append(time.perf_counter() - begin)
            row.peak_bytes = meter.peak_bytes
        step.finish(row)
    except (torch.OutOfMemoryError, MemoryError) as error:
        row.problem = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"out of memory: {error}"
        return row
    row.seconds = statistics.median(row.all_seconds)
    row.tokens_per_second = row.context / row.seconds
    return row


def compare_gradients(
    row: BenchResult, other: BenchResult | None, network: nn.Module, sample: dict[str, Tensor], covers_all: bool = True
) -> None:
    """Compare a result with the other mode's, and mark it as wrong if they disagree.

    The first mode to run leaves a sample of its gradients in `sample`. With sparse attention (not `covers_all`) the
    gradients are expected to differ, so the difference is recorded but not judged.
    """
    grads = {n: p.grad for n, p in network.named_parameters() if p.grad is not None and p.ndim < 3}
    names = sorted(grads)[:: max(1, len(grads) // 24)]
    if other is None:
        sample.update({name: grads[name].to("cpu", torch.float32) for name in names})
        return
    assert row.loss is not None and other.loss is not None
    apart = sum(float((grads[name].to("cpu", torch.float32) - g).square().sum()) for name, g in sample.items())
    row.grad_difference = (apart / sum(float(g.square().sum()) for g in sample.values())) ** 0.5
    tolerance = HALF_TOLERANCE if next(network.parameters()).dtype.itemsize < 4 else TOLERANCE
    # `not (a <= b)` instead of `a > b`: NaN must count as wrong.
    if covers_all and not (abs(row.loss / other.loss - 1) <= tolerance / 10 and row.grad_difference <= tolerance):
        row.is_wrong = True
        row.problem = (
            f"WRONG: the loss is {row.loss:.4f} instead of {other.loss:.4f}, gradients differ by "
            f"{row.grad_difference:.1e}"
        )


def clear_grads(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.grad = None


def free_memory(network: nn.Module) -> None:
    clear_grads(network)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _mfu(row: BenchResult, shape: ModelShape, place: torch.device, keys: int) -> float | None:
    """Return model FLOP/s as a fraction of the GPU's peak, or None for an unknown GPU.

    Recomputation does not count, and attention counts only the `keys` it reads.
    """
    if row.seconds is None or place.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(place))
    return None if peak is None else step_flops(shape, row.context, keys) / row.seconds / peak
