"""What `oomb plan` predicts against what a step really takes: memory of both tiers, and time.

python benchmarks/plan_check.py                              # about ten minutes on an H200
python benchmarks/plan_check.py --contexts 32K,128K --cases full,lora --places gpu,host

Ends with exit code 1 if a predicted peak is more than 3% off.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from oomb import metrics
from oomb.config import Config, parse_bytes
from oomb.engine import Engine
from oomb.facts import facts_of
from oomb.forecast import CONTEXT_BYTES, Machine, Plan, forecast
from oomb.options import parse_list, parse_tokens
from oomb.planner import find_machine, with_lora
from oomb.presets import load_model

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
}
"""Whether LoRA is trained, and the settings."""
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu_memory": "1TiB", "host_memory": 0},
    "half": {},
    "host": {"gpu_memory": 0, "host_memory": "auto"},
    "auto": {},
}
"""All pages on the GPU; the older half of them; none; as the plan decides."""
TOLERANCE = 0.03


@dataclass(kw_only=True)
class Row:
    """One step: predicted and measured."""

    case: str
    place: str
    context: int
    settings: dict[str, Any]
    predicted_gpu_bytes: int = 0
    measured_gpu_bytes: int = 0
    predicted_host_bytes: int = 0
    measured_host_bytes: int = 0
    predicted_seconds: float | None = None
    measured_seconds: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    waited_seconds: float = 0.0
    terms: list[dict[str, Any]] | None = None
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        pairs = (
            (self.predicted_gpu_bytes, self.measured_gpu_bytes),
            (self.predicted_host_bytes, self.measured_host_bytes),
        )
        return self.problem is not None or all(abs(p - m) <= TOLERANCE * m for p, m in pairs)


def main(
    contexts: Annotated[str, typer.Option(help="Contexts, as in 32K,128K.")] = "32K,128K",
    cases: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(CASES),
    places: Annotated[str, typer.Option(help=f"Some of {', '.join(PLACES)}.")] = "gpu,host",
    model: Annotated[str, typer.Option(help="A preset, a folder or a hub id.")] = "qwen2.5-7b",
    limit: Annotated[str | None, typer.Option(help="Hold the process to so much GPU memory, as in 24GiB.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("benchmarks/results/plan_check.json"),
) -> None:
    console = Console(width=150)
    machine = find_machine(None, None)
    if limit is not None:
        # As on a card of this size, whose CUDA context takes its part.
        share = (parse_bytes(limit) - CONTEXT_BYTES) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        machine = replace(machine, gpu_bytes=parse_bytes(limit))
    chosen = parse_list(cases, str.strip)
    rows: list[Row] = []
    for lora in (False, True):
        mine = [case for case in chosen if CASES[case][0] is lora]
        if not mine:
            continue
        # One model for all cases alike, and one set of compiled layers.
        network: nn.Module = load_model(model)
        network = (with_lora(network) if lora else network).train()
        compiled: dict[Any, Any] = {}
        for case in mine:
            for place in parse_list(places, str.strip):
                for context in parse_list(contexts, parse_tokens):
                    row = check(network, machine, compiled, case, place, context)
                    rows.append(row)
                    figures = (
                        f"{row.measured_seconds:.2f} s, waited {row.waited_seconds:.3f} s, {row.measured_gpu_bytes}"
                    )
                    console.print(f"{case}, {place}, {context:,}: {row.problem or figures}", style="dim")
        del network, compiled
        clear()
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"model": model, "machine": metrics.machine(), "limit": limit, "rows": [asdict(row) for row in rows]}
    out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(table(rows))
    console.print(f"written to {out}")
    raise typer.Exit(0 if all(row.is_right for row in rows) else 1)


def check(network: nn.Module, machine: Machine, compiled: dict[Any, Any], case: str, place: str, context: int) -> Row:
    """Predicts a step, takes it, and puts both side by side."""
    settings: dict[str, Any] = {"keep_attention": False, "keep_last_chunk": "auto", **CASES[case][1], **PLACES[place]}
    facts = facts_of(network)
    if place == "half":
        whole = forecast(facts, Config(**{**settings, "gpu_memory": 0}), machine, length=context, optimizer="none")
        settings["gpu_memory"] = whole.placement.host_bytes // 2
    row = Row(case=case, place=place, context=context, settings=settings)
    config = Config(**settings)
    plan: Plan = forecast(facts, config, machine, length=context, optimizer="none")
    if not plan.fits:
        row.problem = f"predicted not to fit: {plan.problem}"
        return row
    row.predicted_gpu_bytes, row.predicted_host_bytes = plan.peak_gpu_bytes, plan.host_bytes
    row.predicted_seconds, row.terms = plan.seconds, [asdict(term) for term in plan.terms]
    engine = Engine(network, config)
    engine.model._compiled = compiled
    try:
        measure(engine, network, context, row)
    except (torch.OutOfMemoryError, MemoryError) as error:
        row.problem = f"out of memory: {str(error).splitlines()[0]}"
    finally:
        del engine
        network.zero_grad(set_to_none=True)
        clear()
    return row


def measure(engine: Engine, network: nn.Module, context: int, row: Row) -> None:
    ids = torch.randint(1, engine.model.vocab_size, (1, context), generator=torch.Generator().manual_seed(context))
    # Pinning host memory and building kernels belong to a run's first step.
    engine.reserve(1, context)
    timed(lambda: engine.loss(ids[:, : 3 * engine.config.chunk_size]).backward())
    network.zero_grad(set_to_none=True)
    clear()
    engine.reset_stats()
    meter = metrics.MemoryMeter(engine.model.device)
    row.measured_seconds = timed(lambda: engine.loss(ids).backward())
    row.measured_gpu_bytes = meter.peak_bytes
    stats = engine.stats
    row.measured_host_bytes, row.waited_seconds = stats.host_peak_bytes, stats.waited_seconds
    row.loaded_bytes, row.stored_bytes = stats.loaded_bytes, stats.stored_bytes


def timed(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table(rows: list[Row]) -> Table:
    shown = Table(title="predicted / measured")
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
            f"{metrics.gib(row.predicted_gpu_bytes)} / {metrics.gib(row.measured_gpu_bytes)}",
            percent(row.predicted_gpu_bytes, row.measured_gpu_bytes),
            f"{metrics.gib(row.predicted_host_bytes)} / {metrics.gib(row.measured_host_bytes)}",
            percent(row.predicted_host_bytes, row.measured_host_bytes),
            f"{row.predicted_seconds or 0:.2f} / {row.measured_seconds:.2f} s",
            percent(row.predicted_seconds or 0, row.measured_seconds),
        )
    return shown


def percent(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


if __name__ == "__main__":
    typer.run(main)
