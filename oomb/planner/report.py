"""`oomb plan`: the facts of a model by its name, without its weights; the forecast as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from oomb.config import OFFLOADED_STATES, Config
from oomb.memory.pool import GPU, HOST
from oomb.models import adapters, load
from oomb.models.checks import unwrap
from oomb.models.probe import model_shape
from oomb.models.shape import ModelShape
from oomb.planner.forecast import StepForecast, forecast_step, request_for, step_terms
from oomb.planner.hardware import Machine
from oomb.planner.placement import place
from oomb.planner.request import SAFETY_SHARE, MemoryTerm
from oomb.planner.suggest import Suggestions, suggest_settings
from oomb.utils import dtypes, files, units
from oomb.utils.units import parse_bytes, short_tokens

TIERS = {GPU: "GPU", HOST: "host"}
JSON_KEYS = {
    "has_float32_adapters": "has_wide_adapters",
    "layer_io_width": "layer_width",
    "active_params": "active_matrix_elements",
    "trained_params": "trained_matrix_elements",
    "trainable_params": "trainable_elements",
}
"""Keys of `oomb plan --output` that differ from field names. Programs read them, so they stay."""
NUM_CONTEXTS = 48
"""Points of a curve in the picture."""
PICTURES = (".png", ".pdf", ".svg")
COLORS = {
    "weights": "C0",
    "kernel workspaces": "C7",
    "optimizer states": "C1",
    "parameter gradients": "C2",
    "activations of a chunk": "C3",
    "head or one layer's backward": "C4",
    "one chunk's forward": "C4",
    "staging buffers": "C5",
    "pages of K and V": "C6",
    "pages of their gradients": "C8",
    "kept attention outputs": "C9",
    "page summaries and choices": "k",
}
"""The same for a use of memory in every picture, in the order in which they are stacked."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A model by its name, and the plan for it."""

    model: str
    dtype: str
    lora: bool
    shape: ModelShape
    forecast: StepForecast
    positions: int | None
    """How many positions the model was made for."""
    suggestions: Suggestions
    """What to change if it does not fit, or takes long."""

    @property
    def title(self) -> str:
        plan, machine = self.forecast, self.forecast.machine
        batch = f" x {plan.batch_size}" if plan.batch_size > 1 else ""
        return (
            f"{self.model} in {self.dtype}, {'LoRA' if self.lora else 'full training'}: one step on {plan.length:,} "
            f"tokens{batch} on {machine.gpu_name or 'a GPU'} ({machine.gpu_bytes / units.GIB:.1f} GiB, "
            f"{plan.gpu_limit / units.GIB:.1f} usable), {units.gib(machine.host_bytes)} of host memory free"
        )

    def table(self) -> Table:
        plan = self.forecast
        table = Table(title=escape(self.title), title_justify="left")
        for column in ("what", "where", "size", ""):
            table.add_column(column, justify="right" if column == "size" else "left")
        for tier, name in TIERS.items():
            terms = [term for term in plan.terms if term.tier == tier]
            for term in terms:
                table.add_row(
                    term.name, name, units.gib(term.num_bytes), "grows with the context" if term.grows else ""
                )
            limit, total = self._limit(tier), plan.peak_gpu_bytes if tier == GPU else plan.host_bytes
            source = "usable" if tier == GPU else f"{SAFETY_SHARE:.0%} of what is free"
            if tier == HOST and plan.config.host_memory != "auto":
                source = f"host_memory={plan.config.host_memory}"
            note = f"of {units.gib(limit)}, {source}"
            table.add_row(f"[bold]{name} in all[/]", name, f"[bold]{units.gib(total)}[/]", note, end_section=True)
        return table

    def _limit(self, tier: str) -> int:
        return self.forecast.gpu_limit if tier == GPU else self.forecast.host_limit

    @property
    def master_bytes(self) -> int:
        """What `master_weights` of `oomb.OffloadedAdamW` takes besides its states: as much as float32 sums."""
        return self.shape.float32_sum_bytes

    def notes(self) -> list[str]:
        """What the table does not say."""
        plan, placement = self.forecast, self.forecast.placement
        on_off = {True: "yes", False: "no"}
        kept = on_off[placement.keep_attention]
        if 0 < placement.out_tokens < placement.capacity:
            kept = f"of {placement.out_tokens / placement.capacity:.0%} of the tokens"
        sums = "float32" if plan.float32_sums else "the parameters' own precision"
        lines = [
            f"chunks of {plan.config.chunk_size:,} tokens; layers checkpointed: {on_off[placement.checkpoint_layers]}; "
            f"attention outputs kept: {kept}; gradients summed in {sums}; "
            f"optimizer {plan.optimizer}"
        ]
        if plan.seconds is not None and plan.fits:
            lines.append(f"time of a step: {plan.step_time_text}")
        elif plan.fits:
            unknown = "this GPU" if plan.machine.scale is None else "float32"
            lines.append(f"time of a step: not predicted, since the rates of {unknown} are not known")
        longest = {None: "no limit found", 0: "none"}.get(plan.longest_context, f"{plan.longest_context or 0:,} tokens")
        lines.append(f"longest context that fits: {longest}")
        for name, there, words in (
            ("gpu_memory", plan.page_limit, "left"),
            ("host_memory", plan.machine.host_bytes, "free"),
        ):
            value = getattr(plan.config, name)
            if value != "auto" and parse_bytes(value) > there:
                lines.append(f"[yellow]{name}={value}: {units.gib(there)} are {words} for it[/]")
        has_learned = self.shape.num_positions is not None
        if self.positions is not None and plan.length > self.positions and not has_learned:
            lines.append(
                f"[yellow]the model was made for {self.positions:,} positions (max_position_embeddings): scale RoPE "
                "before training on more[/]"
            )
        if plan.optimizer in OFFLOADED_STATES and self.master_bytes:
            lines.append(
                f"not counted: float32 copies of the weights, {units.gib(self.master_bytes)} more of host memory, "
                "which oomb train --optim offloaded_adamw keeps unless --optim_args has master_weights=false"
            )
        if plan.problem is not None:
            lines.append(f"[bold red]{escape(plan.problem)}[/]")
        else:
            lines.append("[bold green]fits[/]")
        return [*lines, *map(escape, self.suggestions.lines())]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plan = self.forecast
        return {
            "model": self.model,
            "dtype": self.dtype,
            "lora": self.lora,
            "context": plan.length,
            "batch_size": plan.batch_size,
            "optimizer": plan.optimizer,
            "settings": asdict(plan.config),
            "machine": {**asdict(plan.machine), "usable_gpu_bytes": plan.gpu_limit},
            "fits": plan.fits,
            "problem": plan.problem,
            "peak_gpu_bytes": plan.peak_gpu_bytes,
            "host_bytes": plan.host_bytes,
            "longest_context": plan.longest_context,
            "seconds": plan.seconds,
            "seconds_are_scaled": plan.seconds is not None and not plan.machine.is_measured,
            "float32_sums": plan.float32_sums,
            "placement": {k: v for k, v in asdict(plan.placement).items() if k != "terms"},
            "terms": [asdict(term) for term in plan.terms],
            "facts": {JSON_KEYS.get(name, name): value for name, value in self.shape.as_dict().items()},
            **self.suggestions.as_dict(),
        }

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(self.as_dict(), indent=1) + "\n")
        return path

    def plot(self, path: str | Path) -> Path:
        """Memory of both tiers against the context, up to a little beyond what fits and what is asked for."""
        check_plotting(path)
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        plan, path = self.forecast, Path(path)
        contexts = self._contexts()
        ticks = range(0, contexts[-1] + 1, 1 << max(0, (contexts[-1] // 4).bit_length() - 1))
        terms = [self._terms(context) for context in contexts]
        # Without pyplot: a program that has a window open keeps it.
        figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (tier, name) in zip(figure.subplots(1, 2), TIERS.items()):
            names, sizes = _curves(terms, tier)
            if names:
                axes.stackplot(contexts, sizes, labels=names, colors=[COLORS[name] for name in names])
            limit = self._limit(tier) / units.GIB
            axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"usable: {limit:.1f} GiB")
            axes.axvline(plan.length, color="gray", linestyle=":", linewidth=1, label=f"{plan.length:,} tokens")
            if plan.longest_context:
                label = f"longest: {plan.longest_context:,} tokens"
                axes.axvline(plan.longest_context, color="black", linestyle="-.", linewidth=1, label=label)
            axes.set(title=f"{name} memory", xlabel="context, tokens", ylabel="GiB", xlim=(contexts[0], contexts[-1]))
            needed = (plan.peak_gpu_bytes if tier == GPU else plan.host_bytes) / units.GIB
            axes.set_ylim(0, 1.15 * max(limit, needed) or 1)
            axes.set_xticks(ticks, [short_tokens(tokens) for tokens in ticks])
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)
        figure.suptitle(f"{self.model} in {self.dtype}, {'LoRA' if self.lora else 'full training'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path

    def _contexts(self) -> list[int]:
        chunk, longest = self.forecast.config.chunk_size, self.forecast.longest_context or 0
        end = max(self.forecast.length, longest) * 5 // 4
        step = max(1, -(-end // chunk // NUM_CONTEXTS)) * chunk
        return [chunk, *range(step + chunk, end + step, step)]

    def _terms(self, length: int) -> tuple[MemoryTerm, ...]:
        plan = self.forecast
        request = request_for(
            self.shape,
            plan.config,
            plan.machine,
            batch_size=plan.batch_size,
            length=length,
            optimizer=plan.optimizer,
            needs_grad=True,
        )
        return step_terms(request, place(request)[0], plan.optimizer)


def _curves(plans: Sequence[tuple[MemoryTerm, ...]], tier: str) -> tuple[list[str], list[list[float]]]:
    """Names of a tier's terms, and their GiB in every plan."""
    found = [{term.name: term.num_bytes for term in terms if term.tier == tier} for terms in plans]
    names = sorted({name for sizes in found for name in sizes}, key=list(COLORS).index)
    return names, [[sizes.get(name, 0) / units.GIB for sizes in found] for name in names]


def plan_step(
    model: str,
    context: int,
    machine: Machine,
    *,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    lora: bool = False,
    optimizer: str = "adamw",
    settings: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PlanReport:
    """The forecast for a preset, a folder or a hub id. `settings` are fields of `Config`."""
    config = Config.from_dict(settings or {})
    if batch_size < 1:
        raise ValueError(f"--batch_size is {batch_size}; it must be 1 or more")
    trust = {"trust_remote_code": True} if trust_remote_code else {}
    model_config = load.load_config(model, **trust)
    precision = dtypes.resolve_dtype(dtype, torch.device("cuda"))
    facts = shape_for(model, dtype=dtype, lora=lora, config=model_config, **trust)
    asked = forecast_step(facts, config, machine, batch_size=batch_size, length=context, optimizer=optimizer)

    def adapted() -> ModelShape | None:
        return shape_for(model, dtype=dtype, lora=True, config=model_config, **trust) if find_spec("peft") else None

    name = str(precision).removeprefix("torch.")
    return PlanReport(
        model=model,
        dtype=name,
        lora=lora,
        shape=facts,
        forecast=asked,
        positions=load.max_positions(model_config),
        suggestions=suggest_settings(model, name, lora, facts, asked, adapted),
    )


def shape_for(
    name: str,
    *,
    dtype: str = "bfloat16",
    lora: bool = False,
    config: Any = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """The facts of a model that is built on the meta device: no weight is read, no memory taken. With `lora`, as `oomb
    bench --lora` and `oomb train --use_peft` have it: rank 16, on all linear layers, computed as the weights are."""
    config = load.load_config(name, trust_remote_code=trust_remote_code) if config is None else config
    precision = dtypes.resolve_dtype(dtype, torch.device("cuda"))
    model: Any = load.meta_model(config, dtype=precision, trust_remote_code=trust_remote_code)
    unwrap(model, allow_meta=True)
    if lora:
        with torch.device("meta"):
            model = adapters.with_lora(model)
    return model_shape(model, autocast=lora and adapters.computes_in_autocast(precision))


def check_plotting(path: str | Path, option: str = "--plot") -> None:
    if Path(path).suffix.lower() not in PICTURES:
        raise ValueError(f"{option} {str(path)!r} is no picture; its name must end in {', '.join(PICTURES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib") from None
