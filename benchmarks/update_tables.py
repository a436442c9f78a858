"""Write the measured tables of README.md and docs/ from benchmarks/results/*.json, between their markers.

    python benchmarks/update_tables.py            # rewrite the documents
    python benchmarks/update_tables.py --check    # exit 1 if they differ from the result files

It reads the JSON files and writes none.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import long_tables
from cards import cards
from common import exists, load, markdown_table, steps
from long_tables import tiers
from sparse_tables import SPARSE, american, fidelity, sparse_details, sparse_rows, sparse_summary

from oomb.utils import units


def rows_of(mode: str, report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["context"]: row for row in report["rows"] if row["mode"] == mode}


def table() -> str:
    """Return the README's tables: oomb and standard training, then oomb with the least GPU memory."""
    report = load("exact_qwen2.5-7b_standard.json")
    oomb, standard = rows_of("oomb", report), rows_of("standard", report)
    machine, settings = report["machine"], report["settings"]
    by_place = tiers()
    small = steps("plan_check_24gib.json")[0]

    def gib(num_bytes: int, digits: int = 0) -> str:
        return f"{num_bytes / 2**30:.{digits}f} GiB" if num_bytes else ""

    exact = {
        "context": lambda n: f"{n:,}",
        "oomb: time": lambda n: f"{oomb[n]['seconds']:.1f} s",
        "GPU memory": lambda n: gib(oomb[n]["peak_bytes"]),
        "host memory": lambda n: gib(oomb[n]["host_page_bytes"]),
        "standard: time": lambda n: f"{standard[n]['seconds']:.1f} s",
        "GPU memory ": lambda n: gib(standard[n]["peak_bytes"]),
        "speedup": lambda n: f"{standard[n]['seconds'] / oomb[n]['seconds']:.2f}x",
    }
    lean = {
        "context": lambda n: f"{n:,}",
        "on the GPU: time": lambda n: f"{by_place['gpu'][n]['measured_seconds']:.1f} s",
        "GPU memory": lambda n: gib(by_place["gpu"][n]["measured_gpu_bytes"], 1),
        "on the host: time": lambda n: f"{by_place['host'][n]['measured_seconds']:.1f} s",
        "GPU memory ": lambda n: gib(by_place["host"][n]["measured_gpu_bytes"], 1),
        "host memory": lambda n: gib(by_place["host"][n]["measured_host_bytes"], 1),
    }
    lines = [
        "One training step (forward and backward, all parameter gradients, no optimizer) of a model with Qwen2.5-7B's "
        f"architecture and random weights, in {settings['dtype']}, batch size 1, on one {machine['gpu']['name']} with "
        f"PyTorch {machine['versions']['torch']}. oomb uses chunks of {settings['chunk_size']:,} tokens and otherwise "
        "its defaults. Standard training is Hugging Face with activation checkpointing, cuDNN attention and a tiled "
        "loss:",
        "",
        *markdown_table(exact, sorted(oomb)),
        "",
        "By default oomb spends spare GPU memory on speed, and leaves room for AdamW's states (28 GiB here). With the "
        'least GPU memory (`checkpoint_layers=True, param_grad_dtype="param"`) and everything that grows with the '
        "context on the GPU (`host_memory=0`) or on the host (`gpu_memory=0`):",
        "",
        *markdown_table(lean, sorted(by_place["host"])),
        "",
        f"On a GPU limited to 24 GiB, a LoRA step (rank 16 on all linear layers) at {small['context']:,} tokens takes "
        f"{small['measured_seconds']:.0f} s, {small['measured_gpu_bytes'] / 2**30:.1f} GiB of GPU memory and "
        f"{small['measured_host_bytes'] / 2**30:.0f} GiB of host memory, with exact attention. The data is in "
        "[benchmarks/results](benchmarks/results/README.md). Measure your own machine with `oomb bench`, or predict "
        "any GPU with [`oomb plan`](docs/plan.md).",
    ]
    return "\n".join(lines)


def headline() -> str:
    report, by_place = load("exact_qwen2.5-7b_standard.json"), tiers()
    context = max(rows_of("standard", report))
    oomb, standard = (rows_of(mode, report)[context] for mode in ("oomb", "standard"))
    offloaded = by_place["host"][max(by_place["host"])]
    text = (
        f"On one {report['machine']['gpu']['name']}, a training step (forward and backward) of a model with "
        f"Qwen2.5-7B's architecture and random weights takes **{oomb['seconds']:.1f} s at {context:,} tokens, versus "
        f"{standard['seconds']:.1f} s with standard training**. At {offloaded['context']:,} tokens it takes "
        f"{offloaded['measured_seconds']:.0f} s in {offloaded['measured_gpu_bytes'] / 2**30:.1f} GiB of GPU memory "
        "(plus 28 GiB of AdamW states), with K, V and their gradients in host memory."
    )
    done = [row for row in sparse_rows("times") if row["problem"] is None] if exists(SPARSE.format("times")) else []
    if sparse := max(done, key=lambda row: row["context"], default=None):
        text += f" Sparse attention (approximate) takes {sparse['seconds']:.0f} s for {sparse['context']:,} tokens."
    for row in long_tables.measured(long_tables.LORA):
        text += (
            f" With LoRA and int8 pages as well, one GPU trains on **{row['context']:,} tokens in "
            f"{units.seconds(common.seconds(row))}**."
        )
    return text + " See [performance](#performance)."


def sums() -> str:
    """Return the gradient error of bfloat16 and float32 sums over chunks, for docs/numerics.md."""
    lines = [
        "| model, tokens | chunks | standard training | bfloat16 sums | float32 sums |",
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
    large = load("gradient_error_qwen2.5-7b_16384_512.json")
    ratio = large["summary"]["oomb default"]["worst_ratio_to_standard"]
    num_chunks = large["context"] // large["chunk_size"]
    lines += [
        "",
        f"With Qwen2.5-7B's architecture and random weights, at {large['context']:,} tokens in {num_chunks} chunks, no "
        f"layer's gradient error exceeds {ratio:.2f} times that of standard training.",
    ]
    return "\n".join(lines)


EIGHT_BITS = {"eight_bits_smollm2.json": "SmolLM2-135M", "eight_bits_qwen2.5-7b.json": "Qwen2.5-7B architecture"}
"""Result files of eight_bits.py, with the name of each model."""


def eight_bits() -> str:
    """Return the comparison of int8 with bfloat16 pages for docs/limits.md: whatever there are files of."""
    lines = [
        "Cosine similarity of all parameter gradients with those of bfloat16 pages (`benchmarks/eight_bits.py`):",
        "",
        "| model | text | attention | tokens, chunks | int8 K and V | int8 gradients as well |",
        "|---|---|---|---:|---:|---:|",
    ]
    rows = []
    for name, model in EIGHT_BITS.items():
        report = load(name) if exists(name) else {"rows": []}
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in report["rows"]:
            std = row.get("std")
            text = row["text"] if std is None else f"{row['text']}, weights with std {std:g}"
            found.setdefault((text, row["attention"]), {})[row["variant"]] = row
        for (text, attention), row in found.items():
            keys, everything = row["K and V in int8"], row["all in int8"]
            rows.append(
                f"| {model} | {text} | {attention} | {report['settings']['tokens']:,}, {keys['num_chunks']} | "
                f"{keys['cosine']:.5f} | {everything['cosine']:.5f} |"
            )
    return "\n".join(lines + rows) if rows else ""


FINETUNED = "finetune_smollm2"


def beyond_luck(needle: dict[str, Any]) -> str:
    """Return at which lengths the accuracy exceeds chance by more than two standard errors of a guess."""
    chance = needle["chance"]
    significant = [
        f"{row['length']:,}"
        for row in needle["lengths"]
        if row["accuracy"] > chance + 2 * (chance * (1 - chance) / row["count"]) ** 0.5
    ]
    if not significant:
        return "No length is significantly above chance: training has lowered the loss only."
    if len(significant) == len(needle["lengths"]):
        return "Every length is significantly above chance."
    return f"The accuracy is significantly above chance at {', '.join(significant)} tokens, not at the other lengths."


def finetune() -> str:
    """Return the results of the fine-tuning example for docs/finetune.md; nothing if there is no such run."""
    if not exists(f"{FINETUNED}.json"):
        return ""
    report = load(f"{FINETUNED}.json")
    settings, machine, gpu = report["settings"], report["machine"], report["machine"]["gpu"]
    pages = settings["page_budget"]
    attention = (
        "dense attention" if pages is None else f"{pages} pages of {settings['page_size']} tokens per query tile"
    )
    lines = [
        "## Results",
        "",
        f"{settings['model']} ({american(settings['weights'])}) was trained for {settings['steps']} steps of "
        f"{settings['length']:,} tokens on {settings['text']} ({settings['num_files']:,} files, "
        f"{settings['num_bytes'] / 1e6:.1f} MB) with {attention}, on {'one ' + gpu['name'] if gpu else 'a CPU'} with "
        f"PyTorch {machine['versions']['torch']}:",
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
        lines.append(f"| needles found in {rows[0]['length']:,} tokens (control) | {cells} |")
    for key, name, form in (
        ("accuracy", "needles found, all lengths", ".0%"), ("share", "share of the right code", ".0%"),
        ("exact", "exact answers", ".0%"), ("gain", "gain per answer, nats", "+.2f"),
    ):  # fmt: skip
        lines.append(row(name, [found[key] for found in needle], form))
    low, high = needle[1]["interval"]
    took, peak = report["seconds"], report["peak_bytes"]
    whole = peak["gpu"] if "gpu" in peak else peak["process"]
    host = f", and {peak['host_pages'] / 2**30:.1f} GiB on the host" if peak["host_pages"] else ""
    lines += [
        "",
        f"Guessing finds {needle[1]['chance']:.0%} of the needles. The control, in parentheses, asks the same "
        "questions about a text without needles, so it shows luck. The 95% interval of the accuracy over all lengths "
        f"after training is {low:.0%} to {high:.0%}. {beyond_luck(needle[1])}",
        "",
        f"The command took {took['command']:.0f} s, including the evaluation before and after. The median step took "
        f"{took['median_step']:.2f} s ({report['tokens_per_second']:,.0f} tokens/s over all steps except the first). "
        f"Peak memory was {whole / 2**30:.1f} GiB, of which {peak['gpu_pages'] / 2**30:.1f} GiB grow with the context"
        f"{host}. All results are in [{FINETUNED}.json](../benchmarks/results/{FINETUNED}.json).",
    ]
    if (common.ROOT / "docs" / f"{FINETUNED}.html").exists():
        lines += ["", f"`oomb report` wrote [the page of this run]({FINETUNED}.html)."]
    if (common.ROOT / "docs" / f"{FINETUNED}.png").exists():
        lines += ["", f"![Loss, speed, memory, loss by position and needles of the run]({FINETUNED}.png)"]
    return "\n".join(lines)


def updated(text: str, marker: str, content: str) -> str:
    """Return a document with `content` between the markers of that name."""
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    before, rest = text.split(start)
    return before + start + "\n" + content + "\n" + end + rest.split(end)[1]


def main(check: bool) -> bool:
    """Update the documents unless `check` is set, and return whether they were up to date."""
    up_to_date = True
    blocks = (
        ("README.md", "headline", headline),
        ("README.md", "bench", table),
        ("README.md", "cards", cards),
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
        up_to_date &= new == text
        if not check:
            (common.ROOT / path).write_text(new)
    return up_to_date


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(not main(check) and check)
