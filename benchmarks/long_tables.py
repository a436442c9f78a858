"""What was measured of whole steps with pages in 8 bits, in words and tables for the README and docs/: as much as
there are files of."""

from __future__ import annotations

from typing import Any

from common import exists, load, seconds, steps

from oomb.planner.fit import SPARE_HOST_BYTES
from oomb.utils import units

LORA, FULL, SMALL = "curve_brim.json", "plan_check_full.json", "plan_check_24gib_1m.json"
"""Steps of plan_check.py that fill the GPU's memory: with LoRA, with all weights, and with a GPU held to less."""
CURVE = "curve.json"
OPTIMIZERS = {"adamw": "AdamW", "offloaded_adamw_8bit": "AdamW with states of 8 bits on the host"}


def measured(name: str) -> list[dict[str, Any]]:
    """Whole steps of a file that were taken to their end, each with what the GPU was held to."""
    if not exists(name):
        return []
    limit = load(name).get("limit")
    return [{**row, "limit": limit} for row in steps(name) if row["problem"] is None]


def trained(row: dict[str, Any]) -> str:
    """What is trained, with what, on which GPU."""
    what = "LoRA" if row["case"].startswith("lora") else "all weights"
    held = f"; the GPU held to {row['limit'].replace('GiB', ' GiB')}" if row["limit"] else ""
    return f"{what}, {OPTIMIZERS[row['optimizer']]}{held}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def long_steps() -> list[str]:
    """For the README: steps that fill the GPU's memory, a row each."""
    rows = [row for name in (LORA, FULL, SMALL) for row in measured(name)]
    if not rows:
        return []
    lines = [
        "",
        "With K, V and their gradients in 8 bits besides (`kv_dtype`, `grad_dtype`; "
        "[limits](docs/limits.md#pages-in-8-bits)), all of the GPU's memory and as much of the host's as it takes, "
        "whole steps: forward, backward and optimizer. In brackets is what `oomb plan` had said before, in time "
        "without the optimizer (its rates were fitted to some of them since, [how far off it "
        "is](docs/plan.md#how-the-figures-come-about)):",
        "",
        "| trained | context | time | GPU, GiB | host, GiB | moved in, out | waited |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        time = f"{units.seconds(seconds(row))} ({units.seconds(row['predicted_seconds'])})"
        gpu, host = (
            f"{gib(row[f'measured_{tier}_bytes'])} ({gib(row[f'predicted_{tier}_bytes'])})" for tier in ("gpu", "host")
        )
        moved = ", ".join(f"{row[name] / 2**40:.1f}" for name in ("loaded_bytes", "stored_bytes"))
        lines.append(
            f"| {trained(row)} | **{row['context']:,}** | {time} | {gpu} | {host} | {moved} TiB | "
            f"{row['waited_seconds']:.0f} s |"
        )
    pinning = [row["reserve_seconds"] for row in rows]
    notes = [
        "LoRA is of rank 16 on all linear layers. With all weights, layers are checkpointed and gradients summed in "
        "bfloat16 (`checkpoint_layers`, `param_grad_dtype`). `gpu_memory` and `host_memory` allow all there is, on the "
        f"host but {SPARE_HOST_BYTES >> 30} GiB; [the commands](benchmarks/results/README.md).",
        f"Pinning host memory for pages, once in a run, comes before and takes up to {max(pinning):.0f} s.",
    ]
    if any(row["limit"] for row in rows):
        notes.append("A GPU that is held to less memory keeps its speed: a smaller card is slower.")
    notes.append("[What takes the memory, and time and memory over the context](docs/memory.md#measured).")
    return [*lines, "", " ".join(notes)]


def memory() -> str:
    """For docs/memory.md: what takes the memory, why no more fits, and the curve over the context."""
    columns = [(name, row) for name in (LORA, FULL) for row in measured(name)]
    if not columns:
        return ""
    heads = [(row, f"{row['context']:,} tokens") for _, row in columns]
    lines = [
        "## Measured",
        "",
        f"Qwen2.5-7B shape on one {load(columns[0][0])['machine']['gpu']['name']}, chosen pages in 8 bits, with all "
        "of the GPU's memory. What the plan counted, in GiB, and what was measured:",
        "",
        f"| | {' | '.join(f'{trained(row)}: {tokens}' for row, tokens in heads)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for tier, name in (("gpu", "on the GPU"), ("host", "on the host")):
        counted = [
            {term["name"]: term["num_bytes"] for term in row["terms"] if term["tier"] == tier} for _, row in columns
        ]
        for term in dict.fromkeys(term for column in counted for term in column):
            cells = " | ".join(f"{column[term] / 2**30:.2f}" if term in column else "" for column in counted)
            lines.append(f"| {name}: {term} | {cells} |")
        for kind in ("predicted", "measured"):
            cells = " | ".join(f"{row[f'{kind}_{tier}_bytes'] / 2**30:.2f}" for _, row in columns)
            lines.append(f"| **{name}, {kind}** | {cells} |")
    for name, values in (
        ("time of the step", [units.seconds(seconds(row)) for _, row in columns]),
        ("of it optimizer", [f"{row['optimizer_seconds'] or 0.0:.2f} s" for _, row in columns]),
    ):
        lines.append(f"| {name} | {' | '.join(values)} |")
    if measured(FULL):
        lines += [line for row in steps(FULL) for line in why_no_more(row)]
    if exists(CURVE):
        lines += ["", *curve()]
    return "\n".join(lines)


def why_no_more(row: dict[str, Any]) -> list[str]:
    """What the plan had against a context, and which it would have taken; nothing if it was for it."""
    refused = "predicted not to fit: "
    if not (row["problem"] or "").startswith(refused):
        return []
    # "4,194,304 tokens do not fit: ... are there. (... are free); 3,792,896 tokens would", the last only if any would
    why, _, reach = row["problem"].removeprefix(refused).rpartition(" (")
    said = (
        f"With all weights, the plan says: {why} That is what is free beside the optimizer's states, but for "
        f"{SPARE_HOST_BYTES >> 30} GiB."
    )
    if longest := reach.partition("; ")[2].removesuffix(" would"):
        said += f" By the plan {longest} are the most."
    return ["", said]


def curve() -> list[str]:
    """Time and memory over the context, and how GPU memory grows."""
    report = load(CURVE)
    growth = report["growth"]
    lines = [f"![Time per token, GPU memory and host memory over the context](../benchmarks/results/{CURVE[:-4]}png)"]
    if growth["mb_per_10_000_tokens"] is None:
        return lines
    first, last = growth["contexts"][0], growth["contexts"][-1]
    said = (
        f"With LoRA and all pages on the host, GPU memory grows by {growth['mb_per_10_000_tokens']:.1f} MB per 10,000 "
        f"tokens from {first:,} to {last:,} tokens."
    )
    if (sooner := growth["before"])["mb_per_10_000_tokens"] is not None:
        said += (
            f" From {sooner['contexts'][0]:,} to {first:,} it grows by {sooner['mb_per_10_000_tokens']:.0f} MB: the "
            "staging buffers have room for all pages that a chunk can choose, and as long as the context has no more "
            "than those, they grow with it."
        )
    kept, least = (pick(point["activation_bytes"] for point in report["points"]) for pick in (max, min))
    if least < kept / 2:
        said += (
            f" Where pages leave them no room, layers are checkpointed: the activations of a chunk take {gib(least)} "
            f"GiB and not {gib(kept)}, and are computed once more."
        )
    return [*lines, "", said]


def optimizer() -> str:
    """For docs/optimizer.md: the one step of its that was timed."""
    return "".join(
        f"Measured is one step, {OPTIMIZERS[row['optimizer']]}, of all weights of Qwen2.5-7B on an "
        f"{load(FULL)['machine']['gpu']['name']} whose memory is full: {row['optimizer_seconds']:.1f} s, many times "
        f"that of the link. Forward and backward before it took {units.seconds(row['measured_seconds'])}, on "
        f"{row['context']:,} tokens."
        for row in measured(FULL)
    )
