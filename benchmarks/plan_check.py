"""Compare what `oomb plan` predicts with what a step takes: GPU memory, host memory and time.

    python benchmarks/plan_check.py                              # about ten minutes on an H200
    python benchmarks/plan_check.py --contexts 32K,128K --cases full,lora --places gpu,host
    python benchmarks/plan_check.py --contexts 4M --cases lora-8bit --places brim --layers 2     # a rehearsal

Writes plan_check.json, before each part of a long step: a run that is killed leaves a row that says how far it got.
With --layers, model and forecast have fewer layers, which rehearses a long step quickly; this writes
plan_check_rehearsal.json, which the documents ignore. Exit code 1 if a predicted peak is off by more than 3%, or if a
step fails that was predicted to fit.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import OUT, save
from rich.console import Console
from rich.table import Table
from torch import nn

from oomb.config import OFFLOADED_STATES, Config
from oomb.engine.engine import Engine
from oomb.engine.optim import OffloadedAdamW
from oomb.memory.host import free_host_bytes
from oomb.models.adapters import autocast_for, with_lora
from oomb.models.load import load_model
from oomb.models.probe import model_shape
from oomb.planner.fit import SPARE_HOST_BYTES
from oomb.planner.forecast import StepForecast, forecast_step
from oomb.planner.hardware import CONTEXT_BYTES, Machine, find_machine
from oomb.utils import metrics, units
from oomb.utils.units import parse_bytes, parse_list, parse_tokens

EIGHT_BITS: dict[str, Any] = {"page_budget": 64, "page_size": 128, "kv_dtype": "int8", "grad_dtype": "int8"}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "full": (False, {"chunk_size": 8192, "checkpoint_layers": False, "param_grad_dtype": "float32"}),
    "full-lean": (False, {"chunk_size": 4096, "checkpoint_layers": True, "param_grad_dtype": "param"}),
    "full-lean-kept": (
        False,
        {"chunk_size": 8192, "checkpoint_layers": True, "param_grad_dtype": "param", "keep_attention": True},
    ),
    "full-kept": (
        False,
        {"chunk_size": 8192, "checkpoint_layers": False, "param_grad_dtype": "float32", "keep_attention": True},
    ),
    "lora": (True, {"chunk_size": 4096, "checkpoint_layers": False}),
    "lora-lean": (True, {"chunk_size": 4096, "checkpoint_layers": True}),
    "lora-default": (True, {"keep_attention": "auto"}),
    "lora-8bit": (True, {**EIGHT_BITS}),
    "full-8bit": (False, {**EIGHT_BITS, "param_grad_dtype": "param", "checkpoint_layers": True}),
}
"""Whether to train LoRA, and the engine's settings."""
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu_memory": "1TiB", "host_memory": 0},
    "half": {},
    "host": {"gpu_memory": 0, "host_memory": "auto"},
    "auto": {},
    "brim": {"gpu_memory": "1TiB"},
    "host-brim": {"gpu_memory": 0},
}
"""Where pages go: all to the GPU, half of them, none, as the planner decides, to both tiers until they are full, or to
the host until it is full."""
OPTIMIZERS = ("none", "adamw", *OFFLOADED_STATES)
WHOLE, REHEARSAL = (OUT / f"plan_check{end}.json" for end in ("", "_rehearsal"))
TOLERANCE = 0.03
NOT_PLANNED = "predicted not to fit"
WARM_UP_CHUNKS = {"dense": 3, "sparse": 16}
"""Chunks after which every kernel has been compiled."""


@dataclass(kw_only=True)
class Row:
    """Prediction and measurement of one step."""

    case: str
    place: str
    context: int
    settings: dict[str, Any]
    layers: int | None = None
    """Number of layers in a rehearsal; None for the whole model."""
    predicted_gpu_bytes: int = 0
    measured_gpu_bytes: int = 0
    predicted_host_bytes: int = 0
    measured_host_bytes: int = 0
    predicted_seconds: float | None = None
    measured_seconds: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    waited_seconds: float = 0.0
    optimizer: str = "none"
    optimizer_seconds: float | None = None
    reserve_seconds: float = 0.0
    """Time to pin host memory, once per run."""
    autocast: bool = False
    """Float32 adapters computed in the precision of the weights."""
    loss: float | None = None
    terms: list[dict[str, Any]] | None = None
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        pairs = (
            (self.predicted_gpu_bytes, self.measured_gpu_bytes),
            (self.predicted_host_bytes, self.measured_host_bytes),
        )
        if self.problem is not None:
            return self.problem.startswith(NOT_PLANNED)
        return all(abs(p - m) <= TOLERANCE * m for p, m in pairs)


def main(
    contexts: Annotated[str, typer.Option(help="Contexts, for example 32K,128K.")] = "32K,128K",
    cases: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(CASES),
    places: Annotated[str, typer.Option(help=f"Some of {', '.join(PLACES)}.")] = "gpu,host",
    model: Annotated[str, typer.Option(help="A preset, a folder or a hub id.")] = "qwen2.5-7b",
    optimizer: Annotated[str, typer.Option(help=f"Also take an optimizer step: {', '.join(OPTIMIZERS)}.")] = "none",
    layers: Annotated[
        int | None, typer.Option(help="Rehearse with the first N layers only, in the forecast too.")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="Limit the GPU memory, for example to 24GiB.")] = None,
    out: Annotated[Path | None, typer.Option(help=f"Output file. Default: {WHOLE}; with --layers {REHEARSAL}.")] = None,
) -> None:
    console = Console(width=150)
    try:
        lengths = parse_list(contexts, parse_tokens)
        case_list, place_list = (parse_list(text, str.strip) for text in (cases, places))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for names, known in ((case_list, CASES), (place_list, PLACES), ([optimizer], OPTIMIZERS)):
        if unknown := [name for name in names if name not in known]:
            raise typer.BadParameter(f"unknown {', '.join(unknown)}; use some of {', '.join(known)}")
    path = out or (WHOLE if layers is None else REHEARSAL)
    machine = find_machine(None, None)
    if limit is not None:
        # On a card of this size, the CUDA context takes part of the memory.
        share = (parse_bytes(limit) - CONTEXT_BYTES) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        machine = replace(machine, gpu_bytes=parse_bytes(limit))
    rows: list[Row] = []

    def keep(row: Row) -> None:
        if not any(row is one for one in rows):
            rows.append(row)
        write(path, model, layers, limit, rows)

    for lora in (False, True):
        selected = [case for case in case_list if CASES[case][0] is lora]
        if not selected:
            continue
        # All cases share one model and its compiled layers.
        try:
            network: nn.Module = load_model(model, num_layers=layers)
            network = (with_lora(network) if lora else network).train()
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        compiled: dict[Any, Any] = {}
        for case in selected:
            for place in place_list:
                for context in lengths:
                    with autocast_for(network):
                        row = check(network, machine, compiled, case, place, context, optimizer, layers, keep)
                    figures = (
                        f"{row.measured_seconds:.2f} s, stall {row.waited_seconds:.3f} s, {row.measured_gpu_bytes} B"
                    )
                    console.print(f"{case}, {place}, {context:,}: {row.problem or figures}", style="dim")
        del network, compiled
        clear()
    console.print(table(rows, layers))
    console.print(f"written to {path}")
    raise typer.Exit(0 if all(row.is_right for row in rows) else 1)


def write(path: Path, model: str, layers: int | None, limit: str | None, rows: list[Row]) -> None:
    """Write the rows so far, so that an aborted run keeps what it has measured."""
    report = {"model": model, "layers": layers, "machine": metrics.machine(), "limit": limit,
              "rows": [asdict(row) for row in rows]}  # fmt: skip
    save(report, path)


def check(
    network: nn.Module,
    machine: Machine,
    compiled: dict[Any, Any],
    case: str,
    place: str,
    context: int,
    optimizer: str,
    layers: int | None,
    keep: Callable[[Row], None],
) -> Row:
    """Predict a step and measure it. `keep` is called with the row at every stage."""
    settings: dict[str, Any] = {"keep_attention": False, "keep_last_chunk": "auto", **CASES[case][1], **PLACES[place]}
    facts = model_shape(network, autocast=torch.is_autocast_enabled())
    if place == "half":
        whole = forecast_step(facts, Config(**{**settings, "gpu_memory": 0}), machine, length=context, optimizer="none")
        settings["gpu_memory"] = whole.placement.host_bytes // 2
    states = make_optimizer(optimizer, network)
    if place.endswith("brim"):
        # The optimizer's states are allocated by now, so this is what is left.
        settings["host_memory"] = max(0, free_host_bytes() - SPARE_HOST_BYTES)
        machine = replace(machine, host_bytes=free_host_bytes() + getattr(states, "host_bytes", 0))
    row = Row(
        case=case,
        place=place,
        context=context,
        settings=settings,
        layers=layers,
        optimizer=optimizer,
        autocast=torch.is_autocast_enabled(),
    )
    config = Config(**settings)
    plan: StepForecast = forecast_step(facts, config, machine, length=context, optimizer=optimizer)
    if not plan.fits:
        reach = f"; {plan.longest_context:,} tokens would" if plan.longest_context else ""
        row.problem = f"{NOT_PLANNED}: {plan.problem} ({units.gib(free_host_bytes())} of host memory are free){reach}"
        keep(row)
        return row
    row.predicted_gpu_bytes, row.predicted_host_bytes = plan.peak_gpu_bytes, plan.host_bytes
    row.predicted_seconds, row.terms = plan.seconds, [asdict(term) for term in plan.terms]
    engine = Engine(network, config)
    engine.model._compiled = compiled

    def at(part: str) -> None:
        """Record the current stage as the problem, in case the process is killed in it."""
        row.problem = f"stopped while {part}"
        keep(row)

    try:
        measure(engine, network, context, row, states, at)
        row.problem = None
    except Exception as error:  # With full memory, many other errors than torch's mean out of memory.
        traceback.print_exc()
        row.problem = f"{row.problem}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        keep(row)
        del engine
        network.zero_grad(set_to_none=True)
        clear()
    return row


def make_optimizer(name: str, network: nn.Module) -> Any:
    """Return an optimizer or None. Its learning rate is tiny, since the random weights should barely change."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    if name == "none":
        return None
    if name not in OFFLOADED_STATES:
        return torch.optim.AdamW(parameters, lr=1e-7)
    optimizer = OffloadedAdamW(parameters, lr=1e-7, state_dtype=OFFLOADED_STATES[name])
    optimizer.reserve()
    return optimizer


def measure(
    engine: Engine, network: nn.Module, context: int, row: Row, optimizer: Any, at: Callable[[str], None]
) -> None:
    ids = torch.randint(1, engine.model.vocab_size, (1, context), generator=torch.Generator().manual_seed(context))
    # Pinning host memory and compiling kernels happen once per run.
    at("pinning host memory")
    row.reserve_seconds = timed(lambda: engine.reserve(1, context))
    print(f"{units.gib(free_host_bytes())} of host memory are free after pinning pages", flush=True)
    chunks = WARM_UP_CHUNKS["dense" if engine.config.page_budget is None else "sparse"]
    at("warming up")
    timed(lambda: engine.loss(ids[:, : chunks * engine.config.chunk_size]).backward())
    if optimizer is not None:
        # AdamW allocates its states in its first step, and the plan counts them.
        optimizer.step()
    network.zero_grad(set_to_none=True)
    clear()
    engine.reset_stats()
    meter = metrics.MemoryMeter(engine.model.device)
    losses = []

    def step() -> None:
        losses.append(engine.loss(ids))
        losses[0].backward()

    at("taking the step")
    engine.progress = Steps()
    row.measured_seconds = timed(step)
    engine.progress = None
    row.loss = float(losses.pop().detach())
    if optimizer is not None:
        at("the optimizer took its step")
        row.optimizer_seconds = timed(optimizer.step)
    row.measured_gpu_bytes = meter.peak_bytes
    stats = engine.stats
    row.measured_host_bytes = stats.host_peak_bytes + getattr(optimizer, "host_bytes", 0)
    row.waited_seconds = stats.waited_seconds
    row.loaded_bytes, row.stored_bytes = stats.loaded_bytes, stats.stored_bytes


class Steps:
    """Progress callback that prints a line for every sixteenth of a long pass, without waiting for the GPU."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if total >= 256 and done * 16 // total > (done - 1) * 16 // total:
            print(f"{time.perf_counter() - self.begin:.0f} s: {phase} pass, {done} of {total} chunks", flush=True)


def timed(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table(rows: list[Row], layers: int | None) -> Table:
    shown = Table(title="predicted / measured" + ("" if layers is None else f", a rehearsal: --layers {layers}"))
    for column in ("case", "place", "context", "GPU", "", "host", "", "time", ""):
        shown.add_column(column, justify="left" if column in ("case", "place") else "right")
    for row in rows:
        if row.problem is not None:
            shown.add_row(row.case, row.place, f"{row.context:,}", row.problem)
            continue
        shown.add_row(
            row.case,
            row.place,
            f"{row.context:,}",
            f"{units.gib(row.predicted_gpu_bytes)} / {units.gib(row.measured_gpu_bytes)}",
            percent(row.predicted_gpu_bytes, row.measured_gpu_bytes),
            f"{units.gib(row.predicted_host_bytes)} / {units.gib(row.measured_host_bytes)}",
            percent(row.predicted_host_bytes, row.measured_host_bytes),
            f"{row.predicted_seconds or 0:.2f} / {row.measured_seconds:.2f} s",
            percent(row.predicted_seconds or 0, row.measured_seconds),
        )
    return shown


def percent(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


if __name__ == "__main__":
    typer.run(main)
