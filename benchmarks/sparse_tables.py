"""What was measured of chosen pages, in words and tables for the README and docs/sparse.md."""

from __future__ import annotations

from typing import Any

from common import exists, load
from long_tables import long_steps

SPARSE = "sparse_qwen2.5-7b_{}.json"
TRAINED = "train_sparse.json"
MAIN_CHUNK, MAIN_LAYERS = 4096, 28


def fidelity() -> str:
    """Gradients with chosen pages against dense ones; nothing as long as that is not measured."""
    name = "fidelity_smollm2"
    if not exists(f"{name}.json"):
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
    if exists(f"{name}.png"):
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
    lines += long_steps()
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
