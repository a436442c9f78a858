"""Write the text and tables on sparse attention for the README and docs/sparse.md; see update_tables.py."""

from __future__ import annotations

from typing import Any

from common import exists, load, markdown_table
from long_tables import long_steps

SPARSE = "sparse_qwen2.5-7b_{}.json"
TRAINED = "train_sparse.json"
MAIN_CHUNK, MAIN_LAYERS = 4096, 28


def fidelity() -> str:
    """Return the comparison of sparse with dense gradients; nothing if it has not been measured."""
    name = "fidelity_smollm2"
    if not exists(f"{name}.json"):
        return ""
    report = load(f"{name}.json")
    settings = report["settings"]
    gpu = report["machine"]["gpu"]
    prose = next(text["name"] for text in report["texts"] if text["kind"] == "prose").rpartition(", part")[0]
    lines = [
        "## How close the gradients are",
        "",
        f"Cosine similarity between the gradients of sparse and dense training over all parameters, with the relative "
        f"error in parentheses. {report['model']} ({american(report['weights'])}) in {settings['dtype']}, "
        f"{settings['tokens']:,} tokens in chunks of {settings['chunk_size']}, pages of {settings['page_size']}; "
        f"means over {settings['samples']} samples each of Python source and of prose ({prose}). Measured by "
        f"`benchmarks/fidelity.py` on {'one ' + gpu['name'] if gpu else 'a CPU'}:",
        "",
        *cosines(report),
    ]
    worst = max(sample["error"] for row in report["rows"] if row["reads_all"] for sample in row["samples"])
    lines += ["", f"With a budget that covers every page, the relative error is at most {worst:.0e}."]
    if exists(f"{name}.png"):
        lines += ["", f"![Cosine with the dense gradient by number of pages](../benchmarks/results/{name}.png)"]
    if exists(f"{name}_float8.json"):
        lines += ["", *in_float8(report, load(f"{name}_float8.json"))]
    return "\n".join(lines)


def american(text: str) -> str:
    """Return a text of an older result file in American spelling."""
    return text.replace("dequantised", "dequantized")


def cosines(report: dict[str, Any]) -> list[str]:
    """Return cosine and error by budget, with a column for each kind of text and rule."""
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


def in_float8(float32: dict[str, Any], float8: dict[str, Any]) -> list[str]:
    """Return the same comparison with page means in float8."""
    for name in ("tokens", "samples", "chunk_size", "page_size", "dtype"):
        if float32["settings"][name] != float8["settings"][name]:
            raise ValueError(
                f"{name} is {float8['settings'][name]} in the float8 file and {float32['settings'][name]} in the "
                "float32 file: run benchmarks/fidelity.py with the same settings for both"
            )
    hashes = [{text["sha256_of_ids"] for text in report["texts"]} for report in (float32, float8)]
    # Source and prose come with Python and change from version to version.
    texts = "the same texts" if hashes[0] == hashes[1] else f"the texts of Python {float8['machine']['python']}"
    return [
        "The table above uses page means in float32. With means in float8, which 16-bit models use, on "
        f"{texts} (`benchmarks/fidelity.py --summaries float8`):",
        "",
        *cosines(float8),
    ]


def sparse_rows(case: str) -> list[dict[str, Any]]:
    """Return the results of the complete model with the default chunk size."""
    rows = load(SPARSE.format(case))["rows"]
    return [row for row in rows if row["chunk_size"] == MAIN_CHUNK and row["num_layers"] == MAIN_LAYERS]


def sparse_summary() -> str:
    """Return the README's tables of time and memory with sparse attention; nothing if that has not been measured."""
    if not exists(SPARSE.format("times")):
        return ""
    report = load(SPARSE.format("times"))
    settings = report["settings"]
    columns = {
        "context": lambda row: f"{row['context']:,}",
        "time": lambda row: f"{row['seconds']:.1f} s",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "GPU memory": lambda row: f"{row['peak_bytes'] / 2**30:.0f} GiB",
        "host memory": lambda row: f"{row['host_page_bytes'] / 2**30:.0f} GiB" if row["host_page_bytes"] else "",
    }
    lines = [
        f"[Sparse attention](docs/sparse.md) is approximate: each query tile reads {settings['page_budget']} selected "
        f"pages of {settings['page_size']} tokens and its own chunk of {MAIN_CHUNK:,} tokens. Same model and GPU:",
        "",
        *markdown_table(columns, sparse_rows("times")),
        *long_steps(),
    ]
    return "\n".join(lines)


def sparse_details() -> str:
    """Return the measurements for docs/sparse.md: whatever there are files of."""
    if not exists(SPARSE.format("times")):
        return ""
    report = load(SPARSE.format("times"))
    machine, settings = report["machine"], report["settings"]
    longest = max((row for row in report["rows"] if row["problem"] is None), key=lambda row: row["context"])
    columns = {
        "context": lambda row: f"{row['context']:,}",
        "step": lambda row: f"{row['seconds']:.1f} s",
        "fill pass": lambda row: f"{row['fill_seconds']:.1f} s",
        "gradient pass": lambda row: f"{row['gradient_seconds']:.1f} s",
        "ms per 1,000 tokens": lambda row: f"{row['seconds'] / row['context'] * 1e6:.0f}",
        "GPU memory": lambda row: f"{row['peak_bytes'] / 2**30:.1f} GiB",
        "host memory": lambda row: f"{row['host_page_bytes'] / 2**30:.1f} GiB",
        "copied in, out": lambda row: f"{row['loaded_bytes'] / 2**30:,.0f}, {row['stored_bytes'] / 2**30:,.0f} GiB",
        "stall": lambda row: f"{row['waited_seconds']:.1f} s",
    }
    lines = [
        "## Measured",
        "",
        f"One step (forward and backward, all parameter gradients, no optimizer) of a model with Qwen2.5-7B's "
        f"architecture, random weights and random tokens, in bfloat16, batch size 1, on one {machine['gpu']['name']} "
        f"with PyTorch {machine['versions']['torch']}: {settings['page_budget']} pages of {settings['page_size']} "
        f'tokens, chunks of {MAIN_CHUNK:,}, and `gpu_memory="{settings["gpu_memory"]}"` for pages, since the default '
        f"reserves memory for AdamW. Pinning host memory takes another {longest['reserve_seconds']:.0f} s once per "
        f"run, at {longest['context']:,} tokens.",
        "",
        *markdown_table(columns, sparse_rows("times")),
    ]
    if exists(SPARSE.format("growth")) and (goals := load(SPARSE.format("growth"))["goals"]):
        contexts = sorted({row["context"] for row in load(SPARSE.format("growth"))["rows"]})
        how = goals[0]["name"].partition("(")[2].rstrip(")").replace("continued", "extrapolated")
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
            f"The training loss stays close, too. After {settings['steps']} AdamW steps of {settings['model']} on "
            f"{settings['text']} ({settings['num_windows']} examples of {settings['length']:,} tokens, "
            f"{settings['steps'] / settings['num_windows']:.1f} epochs), the mean training loss of the last ten steps "
            f"is {losses['dense']:.3f} with dense attention and {losses['sparse']:.3f} with {settings['budget']} pages "
            f"of {settings['page_size']} tokens.",
        ]
        if exists(picture := TRAINED.replace(".json", ".png")):
            lines += ["", f"![Training loss with dense and with sparse attention](../benchmarks/results/{picture})"]
    return "\n".join(lines)


KINDS = {
    "chosen pages: forward": "selected pages: forward",
    "chosen pages: dq": "selected pages: dQ",
    "chosen pages: dk and dv": "selected pages: dK, dV",
    "chosen pages: lists": "selected pages: index lists",
    "selection": "page selection",
    "own chunk": "own chunk (dense)",
    "sums of parameter gradients": "gradient accumulation",
    "waited for transfers": "stall on copies",
}
"""Kinds of kernels in older result files, as kernel_times.py calls them now."""


def kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return where the time goes, largest share first."""
    columns = []
    for row in rows:
        seconds: dict[str, float] = {}
        for one in row["kernels"].values():
            for kind, part in one["seconds"].items():
                seconds[kind] = seconds.get(kind, 0.0) + part
        columns.append({kind: part / sum(seconds.values()) for kind, part in seconds.items()})
    kinds = sorted({kind for column in columns for kind in column}, key=lambda kind: -columns[-1].get(kind, 0.0))
    shares = {kind: [f"{column.get(kind, 0.0):.1%}" for column in columns] for kind in kinds}
    contexts = [f"{row['context']:,}" for row in rows]
    return [
        "Share of the step by kind of kernel, from profiles of some chunks of each pass:",
        "",
        f"| tokens | {' | '.join(contexts)} |",
        f"|---|{'---:|' * len(rows)}",
        *(f"| {KINDS.get(kind, kind)} | {' | '.join(cells)} |" for kind, cells in shares.items()),
    ]
