"""Plot GPU memory of a step over the context, for standard training and oomb, from measured result files.

    python benchmarks/memory_plot.py        # writes benchmarks/results/memory.png

Reads exact_qwen2.5-7b_standard.json (written by `oomb bench`), plan_check.json and curve_host.json (written by
plan_check.py). Nothing is measured here.
"""

from __future__ import annotations

import common

from oomb.planner.hardware import GPUS
from oomb.utils.units import GIB, short_tokens

PLOT = "memory.png"


def series() -> dict[str, list[tuple[int, float]]]:
    """Return (context, GiB of GPU memory) by label."""
    bench = common.load("exact_qwen2.5-7b_standard.json")["rows"]
    exact = [
        row for row in common.steps("plan_check.json") if (row["case"], row["place"]) == ("full-lean-kept", "host")
    ]
    sparse = common.steps("curve_host.json")

    def measured(rows: list[dict]) -> list[tuple[int, float]]:
        return sorted((row["context"], row["measured_gpu_bytes"] / GIB) for row in rows if not row["problem"])

    return {
        "standard training": sorted(
            (row["context"], row["peak_bytes"] / GIB) for row in bench if row["mode"] == "standard"
        ),
        "oomb, exact, all weights": measured(exact),
        "oomb, sparse, LoRA, int8 pages": measured(sparse),
    }


def main() -> None:
    figure = common.new_figure(7.0, 3.6)
    axes = figure.add_subplot()
    styles = (("tab:red", "s"), ("tab:blue", "o"), ("tab:green", "^"))
    lines = series()
    for (label, points), (color, marker) in zip(lines.items(), styles, strict=True):
        contexts, memory = zip(*points, strict=True)
        axes.plot(contexts, memory, color=color, marker=marker, label=label)
        if label == "standard training":
            # The last doubling, doubled again.
            more = 2 * (memory[-1] - memory[-2])
            axes.plot(
                (contexts[-1], 2 * contexts[-1]), (memory[-1], memory[-1] + more), color=color, linestyle=":",
                label="extrapolated",
            )  # fmt: skip
    limit = GPUS["H200"].memory_gib
    axes.axhline(limit, color="gray", linestyle="--", linewidth=1)
    axes.annotate("memory of the H200", (1 << 15, limit), xytext=(0, -12), textcoords="offset points", color="gray")
    ticks = sorted({context for points in lines.values() for context, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short_tokens(context) for context in ticks])
    axes.set_ylim(0, 155)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("peak GPU memory, GiB")
    axes.set_title("One training step of a model with Qwen2.5-7B's architecture on one H200", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center right")
    common.save_figure(figure, common.RESULTS / PLOT)


if __name__ == "__main__":
    main()
