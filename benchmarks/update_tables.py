"""Writes the tables of README.md and docs/ from benchmarks/results/*.json, between their markers.

python benchmarks/update_tables.py            # rewrite
python benchmarks/update_tables.py --check    # exit 1 if the README does not say what the files say
"""

from __future__ import annotations

import sys
from typing import Any

import common
import long_tables
from common import exists, load, steps
from sparse_tables import SPARSE, fidelity, sparse_details, sparse_rows, sparse_summary

from oomb.utils import units


def cell(row: dict[str, Any]) -> str:
    """Time and memory of a row."""
    if row["seconds"] is None:
        return row["problem"]
    on_host = f" and {row['host_page_bytes'] / 2**30:.0f} GiB on the host" if row["host_page_bytes"] else ""
    return f"{row['seconds']:.1f} s, {row['peak_bytes'] / 2**30:.0f} GiB{on_host}"


def rows_of(mode: str, report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["context"]: row for row in report["rows"] if row["mode"] == mode}


def tiers() -> dict[str, dict[int, dict[str, Any]]]:
    """Measured rows of the lean setting by place and context: all on the GPU, and all on the host."""
    rows = [row for row in steps("plan_check.json") if row["case"] == "full-lean-kept" and not row["problem"]]
    return {place: {row["context"]: row for row in rows if row["place"] == place} for place in ("gpu", "host")}


def growth(rows: dict[int, dict[str, Any]], shortest: int) -> tuple[int, int, int]:
    """Peak GPU bytes more at the longest context than at `shortest`, pages and outputs by arithmetic, tokens more."""
    longest = max(rows)
    pages = [
        sum(t["num_bytes"] for t in rows[n]["terms"] if t["grows"] and t["tier"] == "gpu") for n in (shortest, longest)
    ]
    measured = rows[longest]["measured_gpu_bytes"] - rows[shortest]["measured_gpu_bytes"]
    return measured, pages[1] - pages[0], longest - shortest


def by(megabytes: float) -> str:
    return "it does not grow" if megabytes <= 0 else f"by {megabytes:.2f} MB per 10,000 tokens"


def table() -> str:
    """oomb beside standard training; then the same step with all that grows on the GPU, and all of it on the host."""
    report = load("exact_qwen2.5-7b_standard.json")
    oomb, standard = rows_of("oomb", report), rows_of("standard", report)
    machine, settings = report["machine"], report["settings"]
    notes = ["No optimizer is counted in: AdamW's states would take 28 GiB more."]
    if spilled := [f"{context:,}" for context, row in sorted(oomb.items()) if row["host_page_bytes"]]:
        notes.append(
            f"oomb leaves room for them, so at {' and '.join(spilled)} tokens attention outputs go to the host."
        )
    lines = [
        f"Qwen2.5-7B shape, {settings['dtype']}, batch 1, one step: forward and backward with all parameter gradients. "
        f"One {machine['gpu']['name']}, PyTorch {machine['versions']['torch']}, chunks of "
        f"{settings['chunk_size']:,} tokens, all else by default. Time and peak GPU memory of one step "
        "each, after a warm-up step:",
        "",
        "| context | oomb | standard training, same run |",
        "|---:|---:|---:|",
        *(f"| {n:,} | {cell(oomb[n])} | {cell(standard[n])} |" for n in sorted(oomb)),
        "",
        " ".join(notes),
        "",
        "Standard training is Hugging Face with every layer checkpointed, cuDNN attention and a tiled loss. By default "
        "oomb buys speed with memory: activations of a chunk, float32 sums of gradients, attention outputs. In little "
        'GPU memory (`checkpoint_layers=True, param_grad_dtype="param"`), with all that grows, attention outputs too, '
        "on the GPU (`host_memory=0`) or on the host (`gpu_memory=0`):",
        "",
        "| context | on the GPU | on the host | host memory | moved in, out | waited |",
        "|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    by_place = tiers()
    for context, row in sorted(by_place["host"].items()):
        on_gpu, on_host = (
            f"{r['measured_seconds']:.1f} s, {r['measured_gpu_bytes'] / 2**30:.1f} GiB"
            for r in (by_place["gpu"][context], row)
        )
        moved = f"{row['loaded_bytes'] / 2**30:,.0f}, {row['stored_bytes'] / 2**30:,.0f} GiB"
        lines.append(
            f"| {context:,} | {on_gpu} | {on_host} | {row['measured_host_bytes'] / 2**30:.1f} GiB | {moved} | "
            f"{row['waited_seconds']:.2f} s |"
        )
    on_gpu_alone = {row["context"]: row for row in steps("plan_check_growth.json")}
    shortest, longest = min(on_gpu_alone), max(on_gpu_alone)
    measured, pages, _ = growth(on_gpu_alone, shortest)
    middle = sorted(by_place["host"])[1]
    more, _, tokens = growth(by_place["host"], middle)
    error = load("gradient_error_qwen2.5-7b_16384_512.json")["summary"]["oomb default"]["worst_ratio_to_standard"]
    small = steps("plan_check_24gib.json")[0]
    lines += [
        "",
        f"From {shortest:,} to {longest:,} tokens memory on the GPU grows by {measured / 2**30:.2f} GiB, where K, V, "
        f"their gradients and attention outputs take {pages / 2**30:.2f} GiB more; with all of that on the host, from "
        f"{middle:,} tokens on, {by(more / tokens * 10_000 / 1e6)}. Against a float32 "
        f"reference, at 32 chunks, no layer's gradient error is above {error:.2f} times that of standard training.",
        "",
        f"On a GPU held to 24 GiB, a step with LoRA (rank 16 on all linear layers) at {small['context']:,} tokens, "
        f"exact and {'all else by default' if small.get('autocast') else 'with adapters in float32'}, takes "
        f"{small['measured_seconds']:.0f} s and "
        f"{small['measured_gpu_bytes'] / 2**30:.1f} GiB, with {small['measured_host_bytes'] / 2**30:.0f} GiB on the "
        "host.",
        "",
        "The figures come from [benchmarks/results](benchmarks/results); `oomb bench` measures your own machine, "
        "[`oomb plan`](docs/plan.md) predicts memory and time without a GPU.",
    ]  # fmt: skip
    return "\n".join(lines)


def headline() -> str:
    report, by_place = load("exact_qwen2.5-7b_standard.json"), tiers()
    context = max(rows_of("standard", report))
    ours, standard = (rows_of(mode, report)[context] for mode in ("oomb", "standard"))
    further = by_place["host"][max(by_place["host"])]
    done = [row for row in sparse_rows("times") if row["problem"] is None] if exists(SPARSE.format("times")) else []
    chosen = max(done, key=lambda row: row["context"], default=None)
    return (
        f"On one {report['machine']['gpu']['name']}, a step of the Qwen2.5-7B shape at {context:,} tokens takes "
        f"**{ours['seconds']:.1f} s where standard training takes {standard['seconds']:.1f} s**; at "
        f"{further['context']:,} tokens {further['measured_seconds']:.0f} s in "
        f"{further['measured_gpu_bytes'] / 2**30:.0f} GiB of GPU memory (AdamW: 28 GiB more), with K, V and their "
        "gradients in host memory"
        + (
            f"; with attention to chosen pages, {chosen['context']:,} tokens in {chosen['seconds']:.0f} s"
            if chosen
            else ""
        )
        + "".join(
            f"; with LoRA and pages in 8 bits, **{row['context']:,} tokens in {units.seconds(common.seconds(row))}**"
            for row in long_tables.measured(long_tables.LORA)
        )
        + " ([performance](#performance))."
    )


def sums() -> str:
    """Error of bfloat16 and float32 sums over chunks, beside standard training."""
    lines = [
        "| model, tokens | chunks | standard training | sums in bfloat16 | sums in float32 |",
        "|---|---:|---:|---:|---:|",
    ]
    for chunk_size in (512, 64, 16):
        result = load(f"gradient_error_demo_16384_{chunk_size}.json")
        cells = [
            f"{row['median']:.4f} (worst {row['worst']:.4f})"
            for row in (result["summary"][name] for name in ("standard", "oomb bf16-sums", "oomb f32-sums"))
        ]
        chunks = result["context"] // chunk_size
        lines.append(f"| `{result['model']}`, {result['context']:,} | {chunks} | {' | '.join(cells)} |")
    return "\n".join(lines)


EIGHT_BITS = {"eight_bits_smollm2.json": "SmolLM2-135M", "eight_bits_qwen2.5-7b.json": "Qwen2.5-7B shape"}
"""Results of eight_bits.py, and what each model is called."""


def eight_bits() -> str:
    """How near pages in 8 bits stay to pages in 16, for docs/limits.md: as much as there are files of."""
    lines = [
        "The gradient of all parameters against that of pages in bfloat16 (`benchmarks/eight_bits.py`), cosine:",
        "",
        "| model | text | attention | tokens, chunks | K and V in 8 bits | gradients too |",
        "|---|---|---|---:|---:|---:|",
    ]
    rows = []
    for name, model in EIGHT_BITS.items():
        report = load(name) if exists(name) else {"rows": []}
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in report["rows"]:
            std = row.get("std")
            text = row["text"] if std is None else f"{row['text']}, weights of std {std:g}"
            found.setdefault((text, row["attention"]), {})[row["variant"]] = row
        for (text, attention), row in found.items():
            keys, all_of_it = row["K and V in int8"], row["all in int8"]
            rows.append(
                f"| {model} | {text} | {attention} | {report['settings']['tokens']:,}, {keys['num_chunks']} | "
                f"{keys['cosine']:.5f} | {all_of_it['cosine']:.5f} |"
            )
    return "\n".join(lines + rows) if rows else ""


FINETUNED = "finetune_smollm2"


def beyond_luck(needle: dict[str, Any]) -> str:
    """Where more needles are found than luck finds: by more than two standard errors of a guess."""
    chance = needle["chance"]
    sure = [
        f"{row['length']:,}"
        for row in needle["lengths"]
        if row["accuracy"] > chance + 2 * (chance * (1 - chance) / row["count"]) ** 0.5
    ]
    if not sure:
        return "At no length that is more than luck: what training has lowered is the loss."
    if len(sure) == len(needle["lengths"]):
        return "At every length that is more than luck."
    return f"That is more than luck at {', '.join(sure)} tokens and not at the other lengths."


def finetune() -> str:
    """A fine-tune before and after, for docs/finetune.md; nothing as long as there is no such run."""
    if not exists(f"{FINETUNED}.json"):
        return ""
    report = load(f"{FINETUNED}.json")
    settings, machine, gpu = report["settings"], report["machine"], report["machine"]["gpu"]
    pages = settings["page_budget"]
    attention = "dense attention" if pages is None else f"{pages} pages of {settings['page_size']} tokens for each tile"
    lines = [
        "## What came of it",
        "",
        f"{settings['model']} ({settings['weights']}), {settings['steps']} steps of {settings['length']:,} tokens of "
        f"{settings['text']} ({settings['num_files']:,} files, {settings['num_bytes'] / 1e6:.1f} MB), {attention}, on "
        f"{'one ' + gpu['name'] if gpu else 'a CPU'} with PyTorch {machine['versions']['torch']}:",
        "",
        "| | before | after |",
        "|---|---:|---:|",
    ]

    def row(name: str, values: list[float], form: str) -> str:
        return f"| {name} | {' | '.join(format(value, form) for value in values)} |"

    when = ("before", "after")
    lines.append(row("loss on held-out text", [report["held_out"][w] for w in when], ".3f"))
    both = list(zip(*(report["positions"][w] for w in when)))
    for first, last in [both[0], both[len(both) // 2], both[-1]] if len(both) > 2 else both:
        name = f"at positions {first['start']:,} to {first['end']:,}"
        lines.append(row(name, [first["loss"], last["loss"]], ".3f"))
    needle = [report["needle"][w] for w in when]
    for rows in zip(*(found["lengths"] for found in needle)):
        cells = " | ".join(f"{r['accuracy']:.0%} ({r['control_accuracy']:.0%})" for r in rows)
        lines.append(f"| needles found in {rows[0]['length']:,} tokens (without any) | {cells} |")
    for key, name, form in (
        ("accuracy", "needles found, all lengths", ".0%"), ("share", "share of the right code", ".0%"),
        ("exact", "written exactly", ".0%"), ("gain", "gain, nats an answer", "+.2f"),
    ):  # fmt: skip
        lines.append(row(name, [found[key] for found in needle], form))
    low, high = needle[1]["interval"]
    took, peak = report["seconds"], report["peak_bytes"]
    whole = peak["gpu"] if "gpu" in peak else peak["process"]
    host = f" and {peak['host_pages'] / 2**30:.1f} GiB on the host" if peak["host_pages"] else ""
    lines += [
        "",
        f"Guessing finds {needle[1]['chance']:.0%} of the needles; in brackets is what the same questions give where "
        "no needle is hidden, which is luck. The 95% interval of all that were found after training is "
        f"{low:.0%} to {high:.0%}. {beyond_luck(needle[1])}",
        "",
        f"The command took {took['command']:.0f} s, evaluation before and after included; a step took "
        f"{took['median_step']:.2f} s in the median (all but the first together: "
        f"{report['tokens_per_second']:,.0f} tokens/s) and at the most {whole / 2**30:.1f} "
        f"GiB, of which what grows with the context is {peak['gpu_pages'] / 2**30:.1f} GiB"
        f"{host}. The whole record is [{FINETUNED}.json](../benchmarks/results/{FINETUNED}.json).",
    ]
    if (common.ROOT / "docs" / f"{FINETUNED}.html").exists():
        lines += ["", f"[The page of the run]({FINETUNED}.html), as `oomb report` wrote it, has the rest."]
    if (common.ROOT / "docs" / f"{FINETUNED}.png").exists():
        lines += ["", f"![Loss, speed, memory, loss by position and needles of the run]({FINETUNED}.png)"]
    return "\n".join(lines)


def updated(text: str, marker: str, content: str) -> str:
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    before, rest = text.split(start)
    return before + start + "\n" + content + "\n" + end + rest.split(end)[1]


def main(check: bool) -> bool:
    """Whether the documents said what the files say."""
    was_true = True
    blocks = (
        ("README.md", "headline", headline),
        ("README.md", "bench", table),
        ("docs/numerics.md", "sums", sums),
        ("docs/sparse.md", "fidelity", fidelity),
        ("README.md", "sparse", sparse_summary),
        ("docs/sparse.md", "sparse", sparse_details),
        ("docs/limits.md", "eight_bits", eight_bits),
        ("docs/finetune.md", "finetune", finetune),
        ("docs/memory.md", "long", long_tables.memory),
        ("docs/optimizer.md", "long", long_tables.optimizer),
    )
    for path, marker, make in blocks:
        text = (common.ROOT / path).read_text()
        new = updated(text, marker, make())
        was_true &= new == text
        if not check:
            (common.ROOT / path).write_text(new)
    return was_true


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(not main(check) and check)
