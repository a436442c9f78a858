"""Show a plan on the terminal: the table of memory, the notes below it, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from oomb.cli.plan.suggestions import step_time, suggestion_lines, suggestions_as_dict
from oomb.config import OFFLOADED_STATES
from oomb.memory.pool import GPU, HOST
from oomb.planner.plan import PlanReport
from oomb.planner.request import SAFETY_SHARE
from oomb.utils.units import GIB, gib, parse_bytes

TIERS = {GPU: "GPU", HOST: "host"}
LABELS = {
    "kept attention outputs": "saved attention outputs",
    "page summaries and choices": "page means and selections",
}
"""Uses of memory that JSON files have under an older name."""
JSON_KEYS = {
    "has_float32_adapters": "has_wide_adapters",
    "layer_io_width": "layer_width",
    "active_params": "active_matrix_elements",
    "trained_params": "trained_matrix_elements",
    "trainable_params": "trainable_elements",
}
"""Keys of `oomb plan --output` that differ from field names. Programs read them, so they stay."""


def title(report: PlanReport) -> str:
    """Return model, context and machine in one line."""
    forecast, machine = report.forecast, report.forecast.machine
    batch = f" x {forecast.batch_size}" if forecast.batch_size > 1 else ""
    return (
        f"{model_title(report)}: one step on {forecast.length:,} tokens{batch} on {machine.gpu_name or 'a GPU'} "
        f"({machine.gpu_bytes / GIB:.1f} GiB, {forecast.gpu_limit / GIB:.1f} usable), {gib(machine.host_bytes)} of "
        "host memory free"
    )


def model_title(report: PlanReport) -> str:
    return f"{report.model} in {report.dtype}, {'LoRA' if report.lora else 'full training'}"


def memory_table(report: PlanReport) -> Table:
    """Return every use of memory, by tier."""
    forecast = report.forecast
    table = Table(title=escape(title(report)), title_justify="left")
    for column in ("what", "where", "size", ""):
        table.add_column(column, justify="right" if column == "size" else "left")
    for tier, name in TIERS.items():
        for term in forecast.terms:
            if term.tier == tier:
                label = LABELS.get(term.name, term.name)
                table.add_row(label, name, gib(term.num_bytes), "grows with the context" if term.grows else "")
        total, limit = used_and_limit(report, tier)
        source = "usable" if tier == GPU else f"{SAFETY_SHARE:.0%} of what is free"
        if tier == HOST and forecast.config.host_memory != "auto":
            source = f"host_memory={forecast.config.host_memory}"
        note = f"of {gib(limit)}, {source}"
        table.add_row(f"[bold]{name} total[/]", name, f"[bold]{gib(total)}[/]", note, end_section=True)
    return table


def used_and_limit(report: PlanReport, tier: str) -> tuple[int, int]:
    """Return the bytes that a step takes of a tier, and those that it may take."""
    forecast = report.forecast
    if tier == GPU:
        return forecast.peak_gpu_bytes, forecast.gpu_limit
    return forecast.host_bytes, forecast.host_limit


def notes(report: PlanReport) -> list[str]:
    """Return what the table does not say: settings, time, longest context, warnings, suggestions."""
    forecast, positions = report.forecast, report.positions
    lines = [_settings_line(report), *_time_line(report)]
    longest = {None: "no limit found", 0: "none"}.get(forecast.longest_context, f"{forecast.longest_context:,} tokens")
    lines.append(f"longest context that fits: {longest}")
    for name, available, state in (
        ("gpu_memory", forecast.page_limit, "left"),
        ("host_memory", forecast.machine.host_bytes, "free"),
    ):
        value = getattr(forecast.config, name)
        if value != "auto" and parse_bytes(value) > available:
            lines.append(f"[yellow]{name}={value}: only {gib(available)} are {state}[/]")
    if positions is not None and forecast.length > positions and report.shape.num_positions is None:
        lines.append(
            f"[yellow]the model was made for {positions:,} positions (max_position_embeddings): scale RoPE before "
            "training on more[/]"
        )
    if forecast.optimizer in OFFLOADED_STATES and report.master_weight_bytes:
        lines.append(
            f"not counted: float32 copies of the weights, {gib(report.master_weight_bytes)} of host memory, which "
            "oomb train --optim offloaded_adamw keeps unless --optim_args has master_weights=false"
        )
    problem = forecast.problem
    lines.append("[bold green]fits[/]" if problem is None else f"[bold red]{escape(problem)}[/]")
    return [*lines, *map(escape, suggestion_lines(report))]


def _settings_line(report: PlanReport) -> str:
    forecast, placement = report.forecast, report.forecast.placement
    kept = _yes_no(placement.keep_attention)
    if 0 < placement.out_tokens < placement.capacity:
        kept = f"of {placement.out_tokens / placement.capacity:.0%} of the tokens"
    sums = "float32" if forecast.request.float32_sums else "the parameters' dtype"
    return (
        f"chunks of {forecast.config.chunk_size:,} tokens; "
        f"layers checkpointed: {_yes_no(placement.checkpoint_layers)}; attention outputs kept: {kept}; "
        f"gradients summed in {sums}; optimizer {forecast.optimizer}"
    )


def _time_line(report: PlanReport) -> list[str]:
    forecast = report.forecast
    if not forecast.fits:
        return []
    if forecast.seconds is not None:
        return [f"time of a step: {step_time(forecast)}"]
    unknown = "this GPU" if forecast.machine.scale is None else "float32"
    return [f"time of a step: not predicted, because the speed of {unknown} is not known"]


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Return the plan as plain values, for `--output`."""
    forecast = report.forecast
    return {
        "model": report.model,
        "dtype": report.dtype,
        "lora": report.lora,
        "context": forecast.length,
        "batch_size": forecast.batch_size,
        "optimizer": forecast.optimizer,
        "settings": asdict(forecast.config),
        "machine": {**asdict(forecast.machine), "usable_gpu_bytes": forecast.gpu_limit},
        "fits": forecast.fits,
        "problem": forecast.problem,
        "peak_gpu_bytes": forecast.peak_gpu_bytes,
        "host_bytes": forecast.host_bytes,
        "longest_context": forecast.longest_context,
        "seconds": forecast.seconds,
        "seconds_are_scaled": forecast.seconds is not None and not forecast.machine.is_measured,
        "float32_sums": forecast.request.float32_sums,
        "placement": {name: value for name, value in asdict(forecast.placement).items() if name != "terms"},
        "terms": [asdict(term) for term in forecast.terms],
        "facts": {JSON_KEYS.get(name, name): value for name, value in report.shape.as_dict().items()},
        **suggestions_as_dict(report),
    }
