"""What `oomb plan` predicts against what a step really takes: memory of both tiers, and time.

python benchmarks/plan_check.py                              # about ten minutes on an H200
python benchmarks/plan_check.py --contexts 32K,128K --cases full,lora --places gpu,host
python benchmarks/plan_check.py --contexts 4M --cases lora-8bit --places brim --layers 2     # a rehearsal

Ends with exit code 1 if a predicted peak is more than 3% off, or if a step that was predicted to fit comes to nothing.
The file is written before each part of a long step: one that is killed leaves a row that says how far it came.
With --layers the model, and so the forecast, has fewer layers: the step is rehearsed in little time. The file says so,
tables pass over its rows, and without --out it goes beside the file of whole steps.
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
"""Whether LoRA is trained, and the settings."""
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu_memory": "1TiB", "host_memory": 0},
    "half": {},
    "host": {"gpu_memory": 0, "host_memory": "auto"},
    "auto": {},
    "brim": {"gpu_memory": "1TiB"},
    "host-brim": {"gpu_memory": 0},
}
"""All pages on the GPU; the older half of them; none; as the plan decides; both tiers filled to the brim; none on the
GPU, and the host filled to the brim."""
OPTIMIZERS = ("none", "adamw", *OFFLOADED_STATES)
WHOLE, REHEARSAL = (OUT / f"plan_check{end}.json" for end in ("", "_rehearsal"))
TOLERANCE = 0.03
NOT_PLANNED = "predicted not to fit"
WARM_UP_CHUNKS = {"dense": 3, "chosen": 16}
"""After so many chunks every kernel has been built."""


@dataclass(kw_only=True)
class Row:
    """One step: predicted and measured."""

    case: str
    place: str
    context: int
    settings: dict[str, Any]
    layers: int | None = None
    """Of a rehearsal: the model had these only. None: all of them."""
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
    """Pinning host memory, once in a run."""
    autocast: bool = False
    """With adapters: they computed in the precision of the weights."""
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
    contexts: Annotated[str, typer.Option(help="Contexts, as in 32K,128K.")] = "32K,128K",
    cases: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(CASES),
    places: Annotated[str, typer.Option(help=f"Some of {', '.join(PLACES)}.")] = "gpu,host",
    model: Annotated[str, typer.Option(help="A preset, a folder or a hub id.")] = "qwen2.5-7b",
    optimizer: Annotated[
        str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}: with one the step is a whole one.")
    ] = "none",
    layers: Annotated[
        int | None, typer.Option(help="A rehearsal: the first so many layers only, in the forecast too.")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="Hold the process to so much GPU memory, as in 24GiB.")] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Where to write. Default: {WHOLE}, with --layers {REHEARSAL}.")
    ] = None,
) -> None:
    console = Console(width=150)
    try:
        lengths = parse_list(contexts, parse_tokens)
        chosen, where = (parse_list(text, str.strip) for text in (cases, places))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for wanted, there in ((chosen, CASES), (where, PLACES), ([optimizer], OPTIMIZERS)):
        if unknown := [name for name in wanted if name not in there]:
            raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(there)}")
    path = out or (WHOLE if layers is None else REHEARSAL)
    machine = find_machine(None, None)
    if limit is not None:
        # As on a card of this size, whose CUDA context takes its part.
        share = (parse_bytes(limit) - CONTEXT_BYTES) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        machine = replace(machine, gpu_bytes=parse_bytes(limit))
    rows: list[Row] = []

    def keep(row: Row) -> None:
        if not any(row is one for one in rows):
            rows.append(row)
        write(path, model, layers, limit, rows)

    for lora in (False, True):
        mine = [case for case in chosen if CASES[case][0] is lora]
        if not mine:
            continue
        # One model for all cases alike, and one set of compiled layers.
        try:
            network: nn.Module = load_model(model, num_layers=layers)
            network = (with_lora(network) if lora else network).train()
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        compiled: dict[Any, Any] = {}
        for case in mine:
            for place in where:
                for context in lengths:
                    with autocast_for(network):
                        row = check(network, machine, compiled, case, place, context, optimizer, layers, keep)
                    figures = (
                        f"{row.measured_seconds:.2f} s, waited {row.waited_seconds:.3f} s, {row.measured_gpu_bytes}"
                    )
                    console.print(f"{case}, {place}, {context:,}: {row.problem or figures}", style="dim")
        del network, compiled
        clear()
    console.print(table(rows, layers))
    console.print(f"written to {path}")
    raise typer.Exit(0 if all(row.is_right for row in rows) else 1)


def write(path: Path, model: str, layers: int | None, limit: str | None, rows: list[Row]) -> None:
    """After every row: a run that is cut off keeps what it has measured."""
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
    """Predicts a step, takes it, and puts both side by side. What came of it is saved as it comes."""
    settings: dict[str, Any] = {"keep_attention": False, "keep_last_chunk": "auto", **CASES[case][1], **PLACES[place]}
    facts = model_shape(network, autocast=torch.is_autocast_enabled())
    if place == "half":
        whole = forecast_step(facts, Config(**{**settings, "gpu_memory": 0}), machine, length=context, optimizer="none")
        settings["gpu_memory"] = whole.placement.host_bytes // 2
    states = make_optimizer(optimizer, network)
    if place.endswith("brim"):
        # What is free now, with the optimizer's states in their place.
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
        """What is being done is what was the matter, if nothing is heard of it again."""
        row.problem = f"stopped while {part}"
        keep(row)

    try:
        measure(engine, network, context, row, states, at)
        row.problem = None
    except Exception as error:  # At the brim much else than an error of torch means that memory is short.
        traceback.print_exc()
        row.problem = f"{row.problem}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        keep(row)
        del engine
        network.zero_grad(set_to_none=True)
        clear()
    return row


def make_optimizer(name: str, network: nn.Module) -> Any:
    """None, or an optimizer. Its learning rate is small: random weights are to stay about as they are."""
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
    # Pinning host memory and building kernels belong to a run's first step.
    at("pinning host memory")
    row.reserve_seconds = timed(lambda: engine.reserve(1, context))
    print(f"{units.gib(free_host_bytes())} of host memory are free beside the pages", flush=True)
    chunks = WARM_UP_CHUNKS["dense" if engine.config.page_budget is None else "chosen"]
    at("warming up")
    timed(lambda: engine.loss(ids[:, : chunks * engine.config.chunk_size]).backward())
    if optimizer is not None:
        # From its first step on plain AdamW has states, which the plan counts.
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
    """Progress of a long step, a line for every sixteenth of a pass. It does not wait for the GPU, which is behind."""

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
