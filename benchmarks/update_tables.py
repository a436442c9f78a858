"""Writes the tables of README.md and docs/ from benchmarks/results/*.json, between their markers.

python benchmarks/update_tables.py            # rewrite
python benchmarks/update_tables.py --check    # exit 1 if the README does not say what the files say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from oomb import metrics

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def cell(row: dict[str, Any]) -> str:
    """Time and memory of a row."""
    if row["seconds"] is None:
        return row["problem"]
    on_host = f" and {row['host_page_bytes'] / 2**30:.0f} GiB on the host" if row["host_page_bytes"] else ""
    return f"{row['seconds']:.1f} s, {row['peak_bytes'] / 2**30:.0f} GiB{on_host}"


def rows_of(mode: str, report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["context"]: row for row in report["rows"] if row["mode"] == mode}


def steps(name: str) -> list[dict[str, Any]]:
    """Rows of plan_check.py, but for rehearsals, which had a part of the model's layers."""
    return [row for row in load(name)["rows"] if row.get("layers") is None]


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
            f"; with LoRA and pages in 8 bits, **{row['context']:,} tokens in "
            f"{metrics.seconds(row['measured_seconds'])}**"
            for row in filled()
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


def fidelity() -> str:
    """Gradients with chosen pages against dense ones; nothing as long as that is not measured."""
    name = "fidelity_smollm2"
    if not (RESULTS / f"{name}.json").exists():
        return ""
    report = load(f"{name}.json")
    settings = report["settings"]
    gpu = report["machine"]["gpu"]
    prose = next(text["name"] for text in report["texts"] if text["kind"] == "prose").rpartition(", part")[0]
    lines = [
        "## How faithful",
        "",
        f"The gradient of all parameters against that of dense training, both by the engine: cosine and, in brackets, "
        f"relative error. {report['model']} ({report['weights']}) in {settings['dtype']}, {settings['tokens']:,} "
        f"tokens in chunks of {settings['chunk_size']}, pages of {settings['page_size']}; means over "
        f"{settings['samples']} samples each of Python source and of prose ({prose}; `benchmarks/fidelity.py`, "
        f"{'one ' + gpu['name'] if gpu else 'on a CPU'}):",
        "",
        *cosines(report),
    ]
    worst = max(sample["error"] for row in report["rows"] if row["reads_all"] for sample in row["samples"])
    lines += ["", f"With a budget that covers every page the relative error is {worst:.0e} at most."]
    if (RESULTS / f"{name}.png").exists():
        lines += [
            "",
            f"![Cosine with the dense gradient against the number of pages](../benchmarks/results/{name}.png)",
        ]
    if exists(f"{name}_float8.json"):
        lines += ["", *in_float8(report, load(f"{name}_float8.json"))]
    return "\n".join(lines)


def cosines(report: dict[str, Any]) -> list[str]:
    """Cosine and error by budget, a column for each kind of text and rule."""
    rows = [row for row in report["rows"] if not row["reads_all"]]
    columns = list(dict.fromkeys((row["kind"], row["rule"]) for row in rows))
    means = {(row["kind"], row["rule"], row["budget"]): row["mean"] for row in rows}
    lines = [
        f"| pages | {' | '.join(f'{kind}, `{rule}`' for kind, rule in columns)} |",
        f"|---:|{'---:|' * len(columns)}",
    ]
    for budget in sorted({row["budget"] for row in rows}):
        cells = [means.get((*column, budget)) for column in columns]
        shown = [f"{mean['cosine']:.3f} ({mean['error']:.2f})" if mean else "" for mean in cells]
        lines.append(f"| {budget} | {' | '.join(shown)} |")
    return lines


def in_float8(wide: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """The same measurement where pages are chosen by means in 8 bits."""
    for name in ("tokens", "samples", "chunk_size", "page_size", "dtype"):
        if wide["settings"][name] != report["settings"][name]:
            raise ValueError(
                f"{name} is {report['settings'][name]} with summaries in float8 and {wide['settings'][name]} with "
                "those in float32: measure both alike with benchmarks/fidelity.py"
            )
    ids = [{text["sha256_of_ids"] for text in one["texts"]} for one in (wide, report)]
    # Source and prose come with Python, and change with it.
    texts = "on the same texts" if ids[0] == ids[1] else f"on the texts of Python {report['machine']['python']}"
    return [
        "The table above has the means that pages are chosen by in float32. In 8 bits, as where a model computes in "
        f"16, {texts} (`benchmarks/fidelity.py --summaries float8`):",
        "",
        *cosines(report),
    ]


SPARSE = "sparse_qwen2.5-7b_{}.json"
TRAINED = "train_sparse.json"
MAIN_CHUNK, MAIN_LAYERS = 4096, 28


def filled() -> list[dict[str, Any]]:
    """The step that fills both memories, as soon as it has been measured."""
    rows = steps("curve_brim.json") if exists("curve_brim.json") else []
    return [row for row in rows if row["problem"] is None]


def to_the_brim(row: dict[str, Any]) -> str:
    """The same in words."""
    sizes = {name: value / 2**30 for name, value in row.items() if name.endswith("_bytes")}
    return (
        "With K, V and their gradients in 8 bits besides (`kv_dtype`, `grad_dtype`; "
        "[limits](docs/limits.md#pages-in-8-bits)), both memories filled to the brim, a whole step with LoRA (forward, "
        "backward, AdamW; rank 16 on all linear layers) on "
        f"**{row['context']:,} tokens** takes {metrics.seconds(row['measured_seconds'])}, "
        f"{sizes['measured_gpu_bytes']:.1f} GiB of GPU memory and {sizes['measured_host_bytes']:.1f} GiB of host "
        f"memory; {sizes['loaded_bytes'] / 1024:.1f} TiB are moved in and {sizes['stored_bytes'] / 1024:.1f} out, for "
        f"which the computation waits {row['waited_seconds']:.0f} s. `oomb plan` had said "
        f"{metrics.seconds(row['predicted_seconds'])}, {sizes['predicted_gpu_bytes']:.1f} GiB and "
        f"{sizes['predicted_host_bytes']:.1f} GiB. Pinning that memory, once in a run, takes "
        f"{row['reserve_seconds']:.0f} s."
    )


def exists(name: str) -> bool:
    return (RESULTS / name).exists()


def sparse_rows(case: str) -> list[dict[str, Any]]:
    """Rows of the whole model in the usual chunks."""
    rows = load(SPARSE.format(case))["rows"]
    return [row for row in rows if row["chunk_size"] == MAIN_CHUNK and row["num_layers"] == MAIN_LAYERS]


def sparse_summary() -> str:
    """Time and memory with chosen pages, for the README; nothing as long as that is not measured."""
    if not exists(SPARSE.format("times")):
        return ""
    report = load(SPARSE.format("times"))
    settings = report["settings"]
    lines = [
        f"With attention to {settings['page_budget']} chosen pages of {settings['page_size']} tokens and the own chunk "
        f"of {MAIN_CHUNK:,} ([docs/sparse.md](docs/sparse.md)), not exact, the same model and GPU:",
        "",
        "| context | time | tokens/s | GPU | host |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in sparse_rows("times"):
        if row["problem"] is not None:
            lines.append(f"| {row['context']:,} | {row['problem']} | | | |")
            continue
        on_host = f"{row['host_page_bytes'] / 2**30:.0f} GiB" if row["host_page_bytes"] else ""
        lines.append(
            f"| {row['context']:,} | {row['seconds']:.1f} s | {row['tokens_per_second']:,.0f} | "
            f"{row['peak_bytes'] / 2**30:.0f} GiB | {on_host} |"
        )
    lines += ["", beside_pages(report)]
    for row in filled():
        lines += ["", to_the_brim(row)]
    return "\n".join(lines)


def beside_pages(report: dict[str, Any]) -> str:
    """Under what conditions chosen pages were timed."""
    longest = max((row for row in report["rows"] if row["problem"] is None), key=lambda row: row["context"])
    return (
        f"There is no optimizer: pages may take {report['settings']['gpu_memory']} of the GPU's memory "
        f"(`gpu_memory`; the default leaves room for AdamW), all else is by default. Pinning host memory, once in a "
        f"run, comes before: {longest['reserve_seconds']:.0f} s for {longest['context']:,} tokens."
    )


def sparse_details() -> str:
    """What was measured of chosen pages, for docs/sparse.md: as much as there are files of."""
    if not exists(SPARSE.format("times")):
        return ""
    report = load(SPARSE.format("times"))
    machine, settings = report["machine"], report["settings"]
    lines = [
        "## Measured",
        "",
        f"Qwen2.5-7B shape with random weights and tokens, bfloat16, batch 1, forward and backward with all parameter "
        f"gradients, on one {machine['gpu']['name']} with PyTorch {machine['versions']['torch']}: "
        f"{settings['page_budget']} pages of {settings['page_size']}, chunks of {MAIN_CHUNK:,}. {beside_pages(report)}",
        "",
        "| context | fill pass | gradient pass | both | ms per 1,000 tokens | GPU | host | moved in, out | waited |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sparse_rows("times"):
        if row["problem"] is not None:
            lines.append(f"| {row['context']:,} | | | {row['problem']} | | | | | |")
            continue
        moved = f"{row['loaded_bytes'] / 2**30:,.0f}, {row['stored_bytes'] / 2**30:,.0f} GiB"
        lines.append(
            f"| {row['context']:,} | {row['fill_seconds']:.1f} s | {row['gradient_seconds']:.1f} s | "
            f"{row['seconds']:.1f} s | {row['seconds'] / row['context'] * 1e6:.0f} | "
            f"{row['peak_bytes'] / 2**30:.1f} GiB | {row['host_page_bytes'] / 2**30:.1f} GiB | {moved} | "
            f"{row['waited_seconds']:.1f} s |"
        )
    if exists(SPARSE.format("growth")) and (goals := load(SPARSE.format("growth"))["goals"]):
        contexts = sorted({row["context"] for row in load(SPARSE.format("growth"))["rows"]})
        how = goals[0]["name"].partition("(")[2].rstrip(")")
        lines += [
            "",
            f"With all pages on the host, GPU memory grows by {goals[0]['value']:.1f} MB per 10,000 tokens from "
            f"{contexts[0]:,} to {contexts[-1]:,} tokens ({how}).",
        ]
    if profiled := [row for row in sparse_rows("times") if row["kernels"] is not None]:
        lines += ["", *kernel_lines(profiled)]
    if exists(TRAINED) and (trained := load(TRAINED))["difference"] is not None:
        settings, losses = trained["settings"], trained["final_losses"]
        lines += [
            "",
            f"{settings['model']}, {settings['steps']} steps of AdamW on {settings['text']}, windows of "
            f"{settings['length']:,} tokens ({settings['num_windows']} of them, each read "
            f"{settings['steps'] / settings['num_windows']:.1f} times): the training loss of the last ten steps is "
            f"{losses['dense']:.3f} with dense attention and {losses['sparse']:.3f} with {settings['budget']} pages "
            f"of {settings['page_size']}.",
        ]
        if exists(picture := TRAINED.replace(".json", ".png")):
            lines += [
                "",
                f"![Training loss with dense attention and with chosen pages](../benchmarks/results/{picture})",
            ]
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


def kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Where the time goes, the largest share first."""
    columns = []
    for row in rows:
        seconds: dict[str, float] = {}
        for one in row["kernels"].values():
            for kind, part in one["seconds"].items():
                seconds[kind] = seconds.get(kind, 0.0) + part
        columns.append({kind: part / sum(seconds.values()) for kind, part in seconds.items()})
    kinds = sorted({kind for column in columns for kind in column}, key=lambda kind: -columns[-1].get(kind, 0.0))
    contexts = " | ".join(f"{row['context']:,}" for row in rows)
    return [
        "Where the time goes, from profiles of some chunks of each pass:",
        "",
        f"| | {contexts} |",
        f"|---|{'---:|' * len(rows)}",
        *(f"| {kind} | {' | '.join(f'{column.get(kind, 0.0):.1%}' for column in columns)} |" for kind in kinds),
    ]


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
    if (ROOT / "docs" / f"{FINETUNED}.html").exists():
        lines += ["", f"[The page of the run]({FINETUNED}.html), as `oomb report` wrote it, has the rest."]
    if (ROOT / "docs" / f"{FINETUNED}.png").exists():
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
    )
    for path, marker, make in blocks:
        text = (ROOT / path).read_text()
        new = updated(text, marker, make())
        was_true &= new == text
        if not check:
            (ROOT / path).write_text(new)
    return was_true


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(not main(check) and check)
