"""Write the text and tables on memory: growth with the context, and the longest steps that were measured.

Used by update_tables.py for the README, docs/memory.md and docs/optimizer.md. Each function returns nothing for results
that are not there.
"""

from __future__ import annotations

import re
from typing import Any

from common import exists, load, markdown_table, seconds, steps

from oomb.planner.fit import SPARE_HOST_BYTES
from oomb.utils import units

LORA, FULL, SMALL = "curve_brim.json", "plan_check_full.json", "plan_check_24gib_1m.json"
"""plan_check.py steps that fill the GPU's memory: LoRA, all weights, and LoRA on a GPU limited to less memory."""
CURVE = "curve.json"
OPTIMIZERS = {"adamw": "AdamW", "offloaded_adamw_8bit": "offloaded 8-bit AdamW"}
TERMS = {
    "pages of their gradients": "pages of dK and dV",
    "page summaries and choices": "page means and selections",
    "activations of a chunk": "activations of one chunk",
    "head or one layer's backward": "LM head, or backward of one layer",
}
"""Names of memory terms in older files, as we say them now."""


def measured(name: str) -> list[dict[str, Any]]:
    """Return the complete steps of a file, each with the GPU memory limit it ran under."""
    if not exists(name):
        return []
    limit = load(name).get("limit")
    return [{**row, "limit": limit} for row in steps(name) if row["problem"] is None]


def tiers() -> dict[str, dict[int, dict[str, Any]]]:
    """Return the measured steps of the smallest exact setting, by place ("gpu", "host") and context."""
    rows = [row for row in steps("plan_check.json") if row["case"] == "full-lean-kept" and not row["problem"]]
    return {place: {row["context"]: row for row in rows if row["place"] == place} for place in ("gpu", "host")}


def growth(rows: dict[int, dict[str, Any]], shortest: int) -> tuple[int, int, int]:
    """Return how much peak GPU memory, the page memory it should contain, and the context grow from `shortest` on."""
    longest = max(rows)
    pages = [
        sum(t["num_bytes"] for t in rows[n]["terms"] if t["grows"] and t["tier"] == "gpu") for n in (shortest, longest)
    ]
    grown = rows[longest]["measured_gpu_bytes"] - rows[shortest]["measured_gpu_bytes"]
    return grown, pages[1] - pages[0], longest - shortest


def trained(row: dict[str, Any]) -> str:
    """Return what a step trains, with which optimizer, and on which GPU if it is limited."""
    what = "LoRA" if row["case"].startswith("lora") else "all weights"
    limit = f", GPU limited to {row['limit'].replace('GiB', ' GiB')}" if row["limit"] else ""
    return f"{what}, {OPTIMIZERS[row['optimizer']]}{limit}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def long_steps() -> list[str]:
    """Return the README's table of the steps that fill the GPU's memory."""
    rows = [row for name in (LORA, FULL, SMALL) for row in measured(name)]
    if not rows:
        return []

    def pair(tier: str) -> Any:
        return lambda row: f"{gib(row[f'measured_{tier}_bytes'])} ({gib(row[f'predicted_{tier}_bytes'])})"

    columns = {
        "trained": trained,
        "context": lambda row: f"**{row['context']:,}**",
        "time": lambda row: f"{units.seconds(seconds(row))} ({units.seconds(row['predicted_seconds'])})",
        "GPU, GiB": pair("gpu"),
        "host, GiB": pair("host"),
    }
    pinning = max(row["reserve_seconds"] for row in rows)
    notes = (
        f"LoRA has rank 16 on all linear layers. Pinning host memory takes up to another {pinning:.0f} s once per run. "
        "See [what takes the memory](docs/memory.md#measured) and [the commands](benchmarks/results/README.md)."
    )
    if any(row["limit"] for row in rows):
        notes = (
            "The 24 GiB row was measured on the same H200 with its memory limited, so it computes at the H200's full "
            "speed; a 24 GiB card is slower. "
        ) + notes
    return [
        "",
        "With K, V and their gradients in int8 as well (`kv_dtype`, `grad_dtype`; also approximate), complete steps "
        "with the optimizer reach these contexts. [`oomb plan`](docs/plan.md) predicted the values in parentheses; its "
        "time excludes the optimizer:",
        "",
        *markdown_table(columns, rows, left=("trained",)),
        "",
        notes,
    ]


OLD_WORDS = {
    r"\band ([\d.,]+ [KMGT]iB) are there\b": r"but only \1 are available",
    r"\bpages of K, V, their gradients and kept attention": "K, V, their gradients and saved attention",
    r"([\d.,]+ [KMGT]iB) of it is on the GPU\b": r"\1 fit on the GPU",
}
"""Patterns in the error messages of older result files, and how oomb says it today."""


def memory() -> str:
    """Return the section of docs/memory.md: what takes the memory, why no more fits, and growth with the context."""
    columns = [(name, row) for name in (LORA, FULL) for row in measured(name)]
    if not columns:
        return ""
    heads = [f"{trained(row)}: {row['context']:,} tokens" for _, row in columns]
    lines = [
        "## Measured",
        "",
        f"Predicted and measured memory, in GiB, of a model with Qwen2.5-7B's architecture and random weights on one "
        f"{load(columns[0][0])['machine']['gpu']['name']} with sparse attention, int8 pages and the whole "
        "GPU memory:",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for tier, name in (("gpu", "GPU"), ("host", "host")):
        counted = [
            {term["name"]: term["num_bytes"] for term in row["terms"] if term["tier"] == tier} for _, row in columns
        ]
        for term in dict.fromkeys(term for column in counted for term in column):
            cells = " | ".join(f"{column[term] / 2**30:.2f}" if term in column else "" for column in counted)
            lines.append(f"| {name}: {TERMS.get(term, term)} | {cells} |")
        for kind in ("predicted", "measured"):
            cells = " | ".join(f"{row[f'{kind}_{tier}_bytes'] / 2**30:.2f}" for _, row in columns)
            lines.append(f"| **{name}, {kind}** | {cells} |")
    for name, values in (
        ("time of the step", [units.seconds(seconds(row)) for _, row in columns]),
        ("of which optimizer", [f"{row['optimizer_seconds'] or 0.0:.2f} s" for _, row in columns]),
    ):
        lines.append(f"| {name} | {' | '.join(values)} |")
    if measured(FULL):
        lines += [line for row in steps(FULL) for line in why_no_more(row)]
    if exists(CURVE):
        lines += ["", *curve()]
    if exists("plan_check.json") and exists("plan_check_growth.json"):
        lines += ["", exact_growth()]
    return "\n".join(lines)


def why_no_more(row: dict[str, Any]) -> list[str]:
    """Return how much a context that was predicted not to fit lacks, and the longest that fits."""
    refused = "predicted not to fit: "
    if not (row["problem"] or "").startswith(refused):
        return []
    # "4,194,304 tokens do not fit: ... (... are free); 3,792,896 tokens would", the last part only if any would.
    why, _, reach = row["problem"].removeprefix(refused).rpartition(" (")
    for old, new in OLD_WORDS.items():
        why = re.sub(old, new, why)
    text = (
        f'`oomb plan` on a longer context with all weights: "{why}" The host memory it counts excludes the optimizer '
        f"states and {SPARE_HOST_BYTES >> 30} GiB that stay free."
    )
    if longest := reach.partition("; ")[2].removesuffix(" would"):
        text += f" The longest context that fits is {longest}."
    return ["", text]


def curve() -> list[str]:
    """Return the plot of time and memory over the context, and how GPU memory grows."""
    report = load(CURVE)
    growth = report["growth"]
    lines = [f"![Time per token, GPU memory and host memory over the context](../benchmarks/results/{CURVE[:-4]}png)"]
    if growth["mb_per_10_000_tokens"] is None:
        return lines
    first, last = growth["contexts"][0], growth["contexts"][-1]
    text = (
        f"With LoRA and all pages on the host, GPU memory grows by {growth['mb_per_10_000_tokens']:.1f} MB per 10,000 "
        f"tokens from {first:,} to {last:,} tokens."
    )
    if (before := growth["before"])["mb_per_10_000_tokens"] is not None:
        text += (
            f" From {before['contexts'][0]:,} to {first:,} tokens it grows by {before['mb_per_10_000_tokens']:.0f} MB, "
            "because the staging buffers hold every page a chunk can select and a short context has fewer pages than "
            "that."
        )
    largest, smallest = (pick(point["activation_bytes"] for point in report["points"]) for pick in (max, min))
    if smallest < largest / 2:
        text += (
            f" At the longest contexts, pages leave so little memory that layers are checkpointed: one chunk's "
            f"activations then take {gib(smallest)} GiB instead of {gib(largest)} and are recomputed."
        )
    return [*lines, "", text]


def exact_growth() -> str:
    """Return how the memory of exact attention grows, and what moving all of it to the host costs."""
    on_gpu = {row["context"]: row for row in steps("plan_check_growth.json")}
    shortest, longest = min(on_gpu), max(on_gpu)
    grown, pages, _ = growth(on_gpu, shortest)
    on_host = tiers()["host"]
    middle = sorted(on_host)[1]
    more, _, tokens = growth(on_host, middle)
    rate = more / tokens * 10_000 / 1e6
    growth_text = "does not grow" if rate <= 0 else f"grows by {rate:.2f} MB per 10,000 tokens"
    last = on_host[max(on_host)]
    return (
        f"With exact attention and everything on the GPU, memory grows by {grown / 2**30:.2f} GiB from {shortest:,} to "
        f"{longest:,} tokens; K, V, their gradients and attention outputs account for {pages / 2**30:.2f} GiB of it. "
        f"With all of that on the host, GPU memory {growth_text} "
        f"from {middle:,} tokens on. At {last['context']:,} tokens the step then copies "
        f"{last['loaded_bytes'] / 2**30:,.0f} GiB to the GPU and {last['stored_bytes'] / 2**30:,.0f} GiB back, and "
        f"waits for copies for only {last['waited_seconds']:.2f} s."
    )  # fmt: skip


def optimizer() -> str:
    """Return the sentence of docs/optimizer.md on the optimizer step that was timed in a full training step."""
    return "".join(
        f"In a complete step that trains all weights of Qwen2.5-7B with {OPTIMIZERS[row['optimizer']]} on a full "
        f"{load(FULL)['machine']['gpu']['name']}, the optimizer took {row['optimizer_seconds']:.1f} s, many times what "
        f"the link alone would take. Forward and backward took {units.seconds(row['measured_seconds'])}, on "
        f"{row['context']:,} tokens."
        for row in measured(FULL)
    )
