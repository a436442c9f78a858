"""Measure steps with sparse attention: time, where it goes by kernel, and growth of GPU memory.

    python benchmarks/sparse.py times                 # 64K to 1M, kernels of 128K and 1M: ten minutes on an H200
    python benchmarks/sparse.py growth --layers 2,6   # all pages on the host, 256K and 1M: at most six minutes

A correctness check comes first: with a budget that covers every page, loss and gradients must match standard training,
and with a small budget they must not depend on the tier. Writes sparse_MODEL_CASE.json after every row and keeps the
rows of earlier runs with the same settings. Exit code 1 if the check fails or a target is missed.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import OUT, Device, Log, save
from kernel_times import ChunkClock, Profile, clocks_problem, take_waits, whole_pass
from rich.table import Table
from torch import Tensor

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.eval import bench
from oomb.models.load import load_model
from oomb.utils import metrics, units
from oomb.utils.units import parse_list, parse_tokens, short_tokens

MODEL, CHUNK_SIZE, PAGE_SIZE, BUDGET = "qwen2.5-7b", 4096, 128, 64
"""The settings the targets apply to."""
GOAL_SECONDS = {2**16: 10.0, 2**17: 20.0, 2**18: 40.0, 2**20: 165.0}
GOAL_PER_TOKEN = (2**17, 2**20, 1.15)
"""Largest ratio of the time per token at the second context to that at the first."""
GOAL_GROWTH = 5.0
"""Largest growth of GPU memory, in MB per 10,000 tokens."""
WHOLE_LAYERS = 28
LEAN: dict[str, Any] = {
    "gpu_memory": 0,
    "keep_attention": False,
    "checkpoint_layers": True,
    "param_grad_dtype": "param",
}
"""Everything that grows with the context is on the host."""
ROOMY: dict[str, Any] = {"gpu_memory": "65GiB"}
"""What an H200 has left for pages without an optimizer. "auto" reserves memory for AdamW and would move some of K and V
at 1M tokens to the host."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "times": ("64K,128K,256K,1M", "", ROOMY),
    "growth": ("256K,1M", "7,14", LEAN),
}
"""Contexts, layers and other settings. 28 layers at 1M tokens need 112 GiB of pages, which the host of an H200 often
does not have free."""
PROFILED = "128K,1M"
"""Contexts of "times" whose kernels are profiled, on a GPU."""
WARM_UP_CHUNKS = 16
"""With chunks of 4096, every variant of the page selection kernels has been compiled by then."""
NUM_WINDOWS, WINDOW_CHUNKS = 4, 4
"""Profiled windows in each pass, and chunks in each window."""

log = Log(width=150)


class GateError(Exception):
    """The correctness check failed, so speed does not matter."""


@dataclass(kw_only=True)
class Row(bench.StepResult):
    """One step of a number of layers."""

    chunk_size: int
    num_layers: int
    fill_seconds: float | None = None
    gradient_seconds: float | None = None
    kernels: dict[str, dict[str, Any]] | None = None
    """Kernel times of a profiled step by pass; see `kernel_times.whole_pass`."""
    kernels_problem: str | None = None
    """Why the kernel times cannot be trusted. The time of the step still can."""
    source: str | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.num_layers, self.chunk_size, self.context

    def read(self, profile: Profile, by_pass: dict[str, list[float]]) -> None:
        """Take the kernel times from a profile of this step."""
        try:
            self.kernels = {name: whole_pass(profile.windows[name], seconds) for name, seconds in by_pass.items()}
            take_waits(self.kernels, self.waited_seconds)
            self.kernels_problem = clocks_problem(self.kernels)
        except RuntimeError as error:
            self.kernels_problem = str(error)


@dataclass(kw_only=True)
class Goal:
    """A target and the measured value."""

    name: str
    limit: float
    value: float | None
    unit: str

    @property
    def is_met(self) -> bool:
        # NaN compares as false, so it counts as missed.
        return self.value is not None and self.value <= self.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}".strip()
        verdict = "met" if self.is_met else "NOT MET"
        return f"{self.name}: {value}, target {self.limit:g} {self.unit}".strip() + f": {verdict}"


@dataclass(kw_only=True)
class Report:
    """Results of one case, with its settings and the machine."""

    case: str
    model: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    gates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Largest differences in the correctness check, by layers and chunk size."""
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, case: str, model: str, settings: dict[str, Any]) -> Report:
        """Return a report that continues the file's if the settings are the same."""
        report = cls(case=case, model=model, settings=settings, machine=metrics.machine())
        if path.exists():
            before = json.loads(path.read_text())
            if (before["case"], before["model"], before["settings"]) == (case, model, settings):
                report.gates = before["gates"]
                report.rows = [Row(**row) for row in before["rows"]]
            else:
                log.console.print(f"{path} has other settings: its rows will be replaced", style="yellow")
        return report

    def add(self, row: Row, path: Path) -> None:
        row.source = self.machine["source"]
        self.rows = sorted([r for r in self.rows if r.key != row.key] + [row], key=lambda r: r.key)
        self.goals = goals_of(self)
        save(asdict(self), path)


class Stand:
    """A model that is loaded and compiled once, to measure steps with several settings."""

    def __init__(
        self, model: str, num_layers: int | None = None, device: str = "auto", settings: dict[str, Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.network = load_model(model, device=device, num_layers=num_layers, attn_implementation="sdpa").train()
        self.settings = settings or {}
        self.num_layers: int = self.network.config.num_hidden_layers
        self._compiled: dict[Any, Any] = {}
        self.device = next(self.network.parameters()).device

    def engine(self, **settings: Any) -> Engine:
        engine = Engine(self.network, Config(**{**self.settings, **settings}))
        engine.model._compiled = self._compiled
        return engine

    def ids(self, context: int) -> Tensor:
        vocab_size = self.network.config.vocab_size
        return torch.randint(1, vocab_size, (1, context), generator=torch.Generator().manual_seed(context))

    def gate(self, chunk_size: int) -> dict[str, float]:
        """Return the differences between gradients that should be equal; raise `GateError` if they are too large."""
        ids = self.ids(4 * chunk_size)
        num_pages = ids.shape[1] // self.settings["page_size"]
        on_gpu, on_host = {"gpu_memory": "auto"}, {"gpu_memory": 0}
        cases: dict[str, tuple[int, list[dict[str, Any] | None]]] = {
            "all pages": (num_pages, [None, on_gpu, on_host]),
            "selected pages": (max(1, num_pages // 8), [on_gpu, on_host]),
        }
        differences = {}
        for name, (budget, places) in cases.items():
            reference: bench.BenchResult | None = None
            sample: dict[str, Tensor] = {}
            for place in places:
                bench.clear_grads(self.network)
                if place is None:
                    loss = bench.StandardStep(self.network)(ids)
                else:
                    engine = self.engine(chunk_size=chunk_size, page_budget=budget, **place)
                    loss = bench.EngineStep(engine)(ids)
                    engine.release()
                row = bench.BenchResult(mode=name, context=ids.shape[1], loss=float(loss))
                bench.compare_gradients(row, reference, self.network, sample)
                if row.is_wrong:
                    raise GateError(f"{name}, {place}, compared with {places[0] or 'standard training'}: {row.problem}")
                if row.grad_difference is not None:
                    differences[f"{name}, {'on the GPU' if place is on_gpu else 'on the host'}"] = row.grad_difference
                reference = reference or row
        self.clear()
        return differences

    def warm_up(self, engine: Engine) -> None:
        """Take a first step, which compiles the kernels."""
        engine.loss(self.ids(WARM_UP_CHUNKS * engine.config.chunk_size)).backward()
        engine.release()
        self.clear()

    def measure(self, engine: Engine, context: int, profile: bool = False) -> Row:
        """Measure time and memory of one step."""
        row = Row(context=context, chunk_size=engine.config.chunk_size, num_layers=self.num_layers)
        ids, clock = self.ids(context), ChunkClock(self.device)
        watch = Profile(clock, NUM_WINDOWS, WINDOW_CHUNKS) if profile else clock
        step = bench.EngineStep(engine)
        try:
            step.prepare(ids, row)
            engine.progress = watch
            self.synchronize()
            meter = metrics.MemoryMeter(self.device)
            begin = time.perf_counter()
            clock.start()
            loss = step(ids)
            self.synchronize()
            row.seconds = time.perf_counter() - begin
            row.loss = float(loss)
            row.peak_bytes = meter.peak_bytes
            if self.device.type == "cuda":
                row.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            by_pass = clock.seconds()
            row.fill_seconds, row.gradient_seconds = (sum(by_pass[name]) for name in ("fill", "gradient"))
            row.tokens_per_second = context / row.seconds
            step.finish(row)
            if isinstance(watch, Profile):
                row.read(watch, by_pass)
        except (torch.OutOfMemoryError, MemoryError) as error:
            row.seconds, row.problem = None, f"out of memory: {str(error).splitlines()[0]}"
        finally:
            engine.progress = None
            engine.release()
            self.clear()
        return row

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        bench.free_memory(self.network)


def time_goals(rows: Sequence[Row], limits: dict[int, float], per_token: tuple[int, int, float]) -> list[Goal]:
    """Return the time targets of the measured contexts."""
    found = {row.context: row.seconds for row in rows if row.chunk_size == CHUNK_SIZE}
    goals = [
        Goal(name=f"{short_tokens(n)} tokens", limit=limit, value=found[n], unit="s")
        for n, limit in limits.items()
        if n in found
    ]
    short, long, most = per_token
    if short in found and long in found:
        a, b = found[short], found[long]
        value = None if a is None or b is None else b / long / (a / short)
        name = f"time per token at {short_tokens(long)} relative to {short_tokens(short)}"
        goals.append(Goal(name=name, limit=most, value=value, unit=""))
    return goals


def growth(rows: Iterable[Row], num_layers: int = WHOLE_LAYERS) -> tuple[float, str] | None:
    """Return MB of peak GPU memory per 10,000 tokens with `num_layers` layers, and how it was determined.

    Tables grow with layers and context, buffers for selected pages with the context only (up to about 256K tokens). So
    two models with fewer layers predict the growth of the whole one. A single smaller model overestimates it.
    """
    by_layers: dict[int, dict[int, int]] = {}
    for row in rows:
        if row.peak_bytes is not None and row.problem is None:
            by_layers.setdefault(row.num_layers, {})[row.context] = row.peak_bytes
    slopes = {
        layers: (peaks[max(peaks)] - peaks[min(peaks)]) / (max(peaks) - min(peaks)) * 10_000 / 1e6
        for layers, peaks in sorted(by_layers.items())
        if len(peaks) > 1
    }
    if not slopes:
        return None
    if num_layers in slopes:
        return slopes[num_layers], f"measured with {num_layers} layers"
    fewest, most = min(slopes), max(slopes)
    if len(slopes) == 1:
        return slopes[most] * num_layers / most, f"measured with {most} layers, times {num_layers / most:g}"
    per_layer = (slopes[most] - slopes[fewest]) / (most - fewest)
    how = f"measured with {fewest} and {most} layers, extrapolated to {num_layers}"
    return slopes[most] + (num_layers - most) * per_layer, how


def growth_goals(rows: Iterable[Row], limit: float) -> list[Goal]:
    found = growth(rows)
    if found is None:
        return []
    name = f"GPU memory per 10,000 tokens ({found[1]})"
    return [Goal(name=name, limit=limit, value=found[0], unit="MB")]


def table(report: Report) -> Table:
    shown = Table(title=f"{report.model}, {report.settings['page_budget']} pages: {report.case}")
    columns: dict[str, Callable[[Row], str]] = {
        "layers": lambda row: str(row.num_layers),
        "chunk": lambda row: f"{row.chunk_size:,}",
        "context": lambda row: f"{row.context:,}",
        "time": lambda row: row.problem or units.seconds(row.seconds or 0.0),
        "fill": lambda row: units.seconds(row.fill_seconds or 0.0),
        "gradient": lambda row: units.seconds(row.gradient_seconds or 0.0),
        "tokens/s": lambda row: f"{row.tokens_per_second or 0:,.0f}",
        "peak": lambda row: units.gib(row.peak_bytes or 0),
        "GPU pages": lambda row: units.gib(row.gpu_page_bytes),
        "host pages": lambda row: units.gib(row.host_page_bytes),
        "copied in, out": lambda row: f"{units.gib(row.loaded_bytes)}, {units.gib(row.stored_bytes)}",
        "stall": lambda row: units.seconds(row.waited_seconds),
    }
    for name in columns:
        shown.add_column(name, justify="right")
    for row in report.rows:
        shown.add_row(*(show(row) for show in columns.values()))
    return shown


def kernel_table(rows: Sequence[Row]) -> Table:
    """Return seconds and shares by kind of kernel, over both passes."""
    shown = Table(title="time by kind of kernel, extrapolated from the profiled chunks")
    shown.add_column("")
    profiled = [row for row in rows if row.kernels is not None]
    for row in profiled:
        shown.add_column(f"{row.context:,}", justify="right")
        shown.add_column("", justify="right")
    sums = [kernel_sums(row) for row in profiled]
    for kind in sorted({kind for kinds in sums for kind in kinds}, key=lambda kind: -sums[-1].get(kind, 0.0)):
        cells = []
        for kinds in sums:
            part = kinds.get(kind, 0.0)
            cells += [f"{part:.2f} s", f"{part / sum(kinds.values()):.1%}"]
        shown.add_row(kind, *cells)
    slowdowns = [
        "/".join(f"{found['slowdown'] or 1:.3f}" for found in (row.kernels or {}).values()) for row in profiled
    ]
    shown.caption = f"slowdown of profiled chunks: {', '.join(slowdowns)} (fill/gradient)"
    return shown


def kernel_sums(row: Row) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in (row.kernels or {}).values():
        for kind, part in one["seconds"].items():
            found[kind] = found.get(kind, 0.0) + part
    return found


def run(
    case: str,
    model: str,
    *,
    contexts: Sequence[int],
    profiled: Sequence[int] = (),
    chunk_sizes: Sequence[int],
    layers: Sequence[int | None],
    out: Path,
    device: str = "auto",
    settings: dict[str, Any],
) -> Report:
    """Measure all rows of a case, smallest model and shortest context first."""
    path = out / f"sparse_{model}_{case}.json"
    report = Report.open(path, case, model, settings)
    for num_layers in layers:
        stand = Stand(model, num_layers, device, settings)
        for chunk_size in chunk_sizes:
            differences = stand.gate(chunk_size)
            report.gates[f"{stand.num_layers} layers, chunks of {chunk_size}"] = differences
            log(f"check passed: gradients differ by at most {max(differences.values()):.1e}")
            engine = stand.engine(chunk_size=chunk_size)
            stand.warm_up(engine)
            if profiled:
                check_profiler(stand, engine)
            log("warmed up")
            for context in sorted(contexts):
                row = stand.measure(engine, context)
                report.add(row, path)
                if context in profiled:
                    # In a step of its own, since the profiler delays it by seconds.
                    again = stand.measure(engine, context, profile=True)
                    row.kernels, row.kernels_problem = again.kernels, again.kernels_problem or again.problem
                    report.add(row, path)
                figures = f"{row.seconds or 0:.2f} s, stall {row.waited_seconds:.2f} s, peak {row.peak_bytes or 0:,} B"
                log(f"{stand.num_layers} layers, chunks of {chunk_size:,}, {context:,}: {row.problem or figures}")
            del engine
        del stand
        gc.collect()
    log.console.print(table(report))
    log.console.print(f"written to {path}")
    return report


def check_profiler(stand: Stand, engine: Engine) -> None:
    """Profile a short step, to find out before the long ones if profiling fails here."""
    row = stand.measure(engine, WARM_UP_CHUNKS * engine.config.chunk_size, profile=True)
    if row.problem is not None or row.kernels_problem is not None:
        raise GateError(f"the profiler: {row.problem or row.kernels_problem}")


def goals_of(report: Report) -> list[Goal]:
    """Return the targets for which this report has rows. They apply to one setting only."""
    given = report.model, report.settings["page_size"], report.settings["page_budget"]
    rows = [row for row in report.rows if row.chunk_size == CHUNK_SIZE]
    if given != (MODEL, PAGE_SIZE, BUDGET):
        return []
    if report.case == "growth":
        return growth_goals(rows, GOAL_GROWTH)
    return time_goals([row for row in rows if row.num_layers == WHOLE_LAYERS], GOAL_SECONDS, GOAL_PER_TOKEN)


def main(
    case: Annotated[str, typer.Argument(help=f"One of {', '.join(CASES)}.")],
    model: Annotated[str, typer.Option(help="A preset, a folder or a hub id.")] = MODEL,
    contexts: Annotated[str, typer.Option(help="Contexts, for example 64K,1M. Default: those of the case.")] = "",
    chunk_sizes: Annotated[str, typer.Option(help="Chunk sizes; the targets apply to 4096.")] = str(CHUNK_SIZE),
    profile: Annotated[
        str,
        typer.Option(help=f"Contexts to profile by kernel, or none. Default for times: {PROFILED}."),
    ] = "",
    layers: Annotated[str, typer.Option(help="Numbers of layers to keep, for example 7,14.")] = "",
    budget: Annotated[int, typer.Option(help="Past pages that a query tile reads.")] = BUDGET,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = PAGE_SIZE,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Output folder.")] = OUT,
) -> None:
    if case not in CASES:
        raise typer.BadParameter(f"unknown case {case!r}; use one of {', '.join(CASES)}")
    has_gpu = torch.cuda.is_available() and device != "cpu"
    profile = profile or (PROFILED if has_gpu and case == "times" else "none")
    if profile != "none" and not has_gpu:
        raise typer.BadParameter("--profile needs a GPU: it reads the GPU's kernel trace")
    default_contexts, default_layers, more = CASES[case]
    try:
        report = run(
            case,
            model,
            contexts=parse_list(contexts or default_contexts, parse_tokens),
            profiled=[] if profile == "none" else parse_list(profile, parse_tokens),
            chunk_sizes=parse_list(chunk_sizes, parse_tokens),
            layers=parse_list(layers or default_layers, int) if layers or default_layers else [None],
            out=out,
            device=device,
            settings={"page_size": page_size, "page_budget": budget, **more},
        )
    except GateError as error:
        log.verdict(f"the correctness check failed: {error}", False)
        raise typer.Exit(1) from None
    if any(row.kernels is not None for row in report.rows):
        log.console.print(kernel_table(report.rows))
    for row in report.rows:
        if row.kernels_problem is not None:
            log.verdict(f"{row.context:,}, kernels: {row.kernels_problem}", False)
    for goal in report.goals:
        log.verdict(str(goal), goal.is_met)
    is_right = all(goal.is_met for goal in report.goals) and all(
        row.problem is None and row.kernels_problem is None for row in report.rows
    )
    raise typer.Exit(0 if is_right else 1)


if __name__ == "__main__":
    typer.run(main)
