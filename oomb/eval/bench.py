"""Time, throughput and memory of one training step (forward and backward), beside standard training in the same run.

"standard" is what a good engineer does with Hugging Face alone: every layer checkpointed, the fastest attention PyTorch
has, the loss in tiles. Both modes get the same weights and tokens; where both run, the losses and a sample of the
gradients are compared, and a row that does not agree is reported as wrong, whatever its speed.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
from oomb.planner.flops import step_flops
from oomb.planner.hardware import peak_flops
from oomb.utils import metrics, units

MODES = ("oomb", "standard")
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
WARM_UP = 32768
"""Tokens of a mode's first step, before the measured ones: several chunks of any sensible size, so that kernels are
built."""
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2
"""How far apart the gradients of the modes may be, relative to their norm, before a row counts as wrong; a tenth of it
for the loss. Two bfloat16 runs of a deep random model are 0.07 apart."""


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
class Report:
    """What was measured, on what, with which settings."""

    model: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: list[BenchResult]

    def table(self) -> Table:
        table = Table(title=f"{self.model}: one step, forward and backward")
        columns: dict[str, Callable[[BenchResult], str]] = {
            "context": lambda row: f"{row.context:,}",
            "mode": lambda row: row.mode,
            "time": lambda row: row.problem or units.seconds(row.seconds or 0.0),
            "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
            "MFU": lambda row: f"{row.mfu:.1%}" if row.mfu else "",
            "peak": lambda row: units.gib(row.peak_bytes) if row.peak_bytes else "",
            "pages, device": lambda row: units.gib(row.gpu_page_bytes) if row.gpu_page_bytes else "",
            "host": lambda row: units.gib(row.host_page_bytes) if row.host_page_bytes else "",
            "moved in, out": lambda row: (
                f"{units.gib(row.loaded_bytes)}, {units.gib(row.stored_bytes)}" if row.loaded_bytes else ""
            ),
            "waited": lambda row: units.seconds(row.waited_seconds) if row.loaded_bytes else "",
            "grad diff": lambda row: f"{row.grad_difference:.1e}" if row.grad_difference is not None else "",
        }
        shown = {name: show for name, show in columns.items() if any(map(show, self.rows))}
        for name in shown:
            table.add_column(name, justify="left" if name == "mode" else "right")
        for row in self.rows:
            table.add_row(*(show(row) for show in shown.values()))
        return table

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @property
    def is_right(self) -> bool:
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
) -> Report:
    """Measures every mode at every context, the shortest first. `settings` are further fields of `Config`; `on_row` and
    `on_chunk` are called as results come in, `finish` with the engine when all are there."""
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    if not contexts or min(contexts) < 2:
        raise ValueError("give at least one context of 2 tokens or more")
    config = Config.from_dict({"chunk_size": chunk_size, **(settings or {})})
    network = _prepare(model, dtype, device, lora, trust_remote_code)
    engine = Engine(network, config)
    engine.progress = on_chunk
    vocab, place = engine.model.vocab_size, engine.model.device
    steps: dict[str, EngineStep | StandardStep] = {"standard": StandardStep(network), "oomb": EngineStep(engine)}
    rows: list[BenchResult] = []
    for context in sorted(contexts):
        ids = torch.randint(1, vocab, (1, context), generator=torch.Generator().manual_seed(context))
        sample: dict[str, Tensor] = {}
        for mode in sorted(modes, reverse=True):
            with autocast_for(network):
                row = _measure(mode, steps[mode], ids, network, repeats, place)
            keys = config.keys_read(context) if mode == "oomb" else context
            row.mfu = _mfu(row, engine.model, place, keys)
            if row.problem is None:
                other = next((r for r in rows if r.context == context and r.problem is None), None)
                compare_gradients(row, other, network, sample, config.keys_read(context) >= context)
            # Pages are the engine's; standard training is not charged for them.
            engine.release()
            free_memory(network)
            rows.append(row)
            if on_row is not None:
                on_row(row)
    if finish is not None:
        finish(engine)
    precision = str(next(network.parameters()).dtype).removeprefix("torch.")
    used = {**asdict(config), "fused": engine.fuse, "dtype": precision, "lora": lora, "repeats": repeats}
    return Report(model=model, settings=used, machine=metrics.machine(), rows=rows)


class EngineStep:
    """One step of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_warm = False

    def prepare(self, ids: Tensor, row: StepResult) -> None:
        """Takes the memory beforehand: pinning it is a matter of a run's first step, as compilation is."""
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
    """One step as Hugging Face users would do it: layer checkpointing, cuDNN attention first, tiled loss."""

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
                logp = self.head.logprobs(hidden, targets)
                dhidden = self.head.backward(hidden, targets, torch.full_like(logp, -1 / num_counted))
                hidden.backward(dhidden)
        finally:
            set_checkpointing(self.model.lm, on=False)
            self.network.train(was_training)
        return -logp.sum() / num_counted


def _prepare(model: str, dtype: str, device: str, lora: bool, trust_remote_code: bool) -> nn.Module:
    network: nn.Module = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return (with_lora(network) if lora else network).train()


def _measure(
    mode: str, step: EngineStep | StandardStep, ids: Tensor, network: nn.Module, repeats: int, place: torch.device
) -> BenchResult:
    row = BenchResult(mode=mode, context=ids.shape[1])
    on_gpu = place.type == "cuda"
    try:
        if not step.is_warm:
            # Compilation, kernel plans and the allocator's first requests belong to a first step, not to the pace.
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
    """Keeps a sample of the first mode's gradients; compares the second mode with it. Gradients of a step that reads
    chosen pages only (not `covers_all`) are another thing: their distance is shown, not judged."""
    grads = {n: p.grad for n, p in network.named_parameters() if p.grad is not None and p.ndim < 3}
    names = sorted(grads)[:: max(1, len(grads) // 24)]
    if other is None:
        sample.update({name: grads[name].to("cpu", torch.float32) for name in names})
        return
    assert row.loss is not None and other.loss is not None
    apart = sum(float((grads[name].to("cpu", torch.float32) - g).square().sum()) for name, g in sample.items())
    row.grad_difference = (apart / sum(float(g.square().sum()) for g in sample.values())) ** 0.5
    tolerance = HALF_TOLERANCE if next(network.parameters()).dtype.itemsize < 4 else TOLERANCE
    # Written so that NaN, which compares as false, counts as wrong.
    if covers_all and not (abs(row.loss / other.loss - 1) <= tolerance / 10 and row.grad_difference <= tolerance):
        row.is_wrong = True
        row.problem = f"WRONG: loss {row.loss:.4f} against {other.loss:.4f}, gradients {row.grad_difference:.1e} apart"


def clear_grads(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.grad = None


def free_memory(network: nn.Module) -> None:
    clear_grads(network)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _mfu(row: BenchResult, model: CausalLM, place: torch.device, keys: int) -> float | None:
    """Model FLOPs (no recomputation counted, of attention what is read) over the GPU's peak. None where that is not
    known."""
    if row.seconds is None or place.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(place))
    return None if peak is None else step_flops(model, row.context, keys) / row.seconds / peak
