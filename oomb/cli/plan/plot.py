"""Plot memory of both tiers against the context, up to a little more than what fits and what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oomb.cli.plan.table import LABELS, TIERS, model_title, used_and_limit
from oomb.planner.forecast import StepForecast, step_terms
from oomb.planner.placement import place
from oomb.planner.plan import PlanReport
from oomb.planner.request import MemoryTerm
from oomb.utils.units import GIB, short_tokens

NUM_CONTEXTS = 48
"""Points per curve."""
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
"""Color of every use of memory, from the bottom of the stack to the top."""


def plot(report: PlanReport, path: Path) -> None:
    """Write the picture of a plan."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    forecast = report.forecast
    contexts = _contexts(forecast)
    ticks = range(0, contexts[-1] + 1, 1 << max(0, (contexts[-1] // 4).bit_length() - 1))
    terms = [_terms(forecast, context) for context in contexts]
    # Not pyplot, which would take over the windows of a program that uses it.
    figure = Figure(figsize=(11, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (tier, name) in zip(figure.subplots(1, 2), TIERS.items(), strict=True):
        names, sizes = _curves(terms, tier)
        if names:
            axes.stackplot(
                contexts,
                sizes,
                labels=[LABELS.get(name, name) for name in names],
                colors=[COLORS[name] for name in names],
            )
        used, limit = (num_bytes / GIB for num_bytes in used_and_limit(report, tier))
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"usable: {limit:.1f} GiB")
        axes.axvline(forecast.length, color="gray", linestyle=":", linewidth=1, label=f"{forecast.length:,} tokens")
        if forecast.longest_context:
            label = f"longest: {forecast.longest_context:,} tokens"
            axes.axvline(forecast.longest_context, color="black", linestyle="-.", linewidth=1, label=label)
        axes.set(title=f"{name} memory", xlabel="context, tokens", ylabel="GiB", xlim=(contexts[0], contexts[-1]))
        axes.set_ylim(0, 1.15 * max(limit, used) or 1)
        axes.set_xticks(ticks, [short_tokens(tokens) for tokens in ticks])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small", frameon=False)
    figure.suptitle(model_title(report))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _contexts(forecast: StepForecast) -> list[int]:
    chunk = forecast.config.chunk_size
    end = max(forecast.length, forecast.longest_context or 0) * 5 // 4
    step = max(1, -(-end // chunk // NUM_CONTEXTS)) * chunk
    return [chunk, *range(step + chunk, end + step, step)]


def _terms(forecast: StepForecast, length: int) -> tuple[MemoryTerm, ...]:
    """Return the uses of memory at another length."""
    request = replace(forecast.request, length=length)
    return step_terms(request, place(request)[0], forecast.optimizer)


def _curves(terms: Sequence[tuple[MemoryTerm, ...]], tier: str) -> tuple[list[str], list[list[float]]]:
    """Return the names of a tier's terms, and the GiB of each at every context."""
    by_context = [{term.name: term.num_bytes for term in some if term.tier == tier} for some in terms]
    names = sorted({name for sizes in by_context for name in sizes}, key=list(COLORS).index)
    return names, [[sizes.get(name, 0) / GIB for sizes in by_context] for name in names]
