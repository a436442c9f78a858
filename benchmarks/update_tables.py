"""Writes the tables of README.md and docs/numerics.md from benchmarks/results/*.json, between their markers.

python benchmarks/update_tables.py            # rewrite
python benchmarks/update_tables.py --check    # exit 1 if the README does not say what the files say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["seconds"] is None:
        return row["problem"]
    return f"{row['seconds']:.1f} s, {row['peak_bytes'] / 2**30:.0f} GiB"


def rows_of(mode: str, *reports: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["context"]: row for report in reports for row in report["rows"] if row["mode"] == mode}


def table() -> str:
    """One row per context: oomb, plain and with attention outputs kept, each beside standard training in its run."""
    plain, longer, kept = (load(f"exact_qwen2.5-7b_{case}.json") for case in ("plain", "long", "kept"))
    oomb = rows_of("oomb", plain, longer)
    columns = [oomb, rows_of("standard", plain), rows_of("oomb", kept), rows_of("standard", kept)]
    machine = kept["machine"]
    lines = [
        f"Qwen2.5-7B shape, {kept['settings']['dtype']}, batch 1, one step: forward and backward with all parameter "
        f"gradients. One {machine['gpu']['name']}, PyTorch {machine['versions']['torch']}, chunks of "
        f"{kept['settings']['chunk_size']:,} tokens. Time and peak GPU memory of one step, after a warm-up step of "
        "16,384 tokens:",
        "",
        "| context | oomb | standard, same run | oomb, `keep_attention=True` | standard, same run |",
        "|---:|---:|---:|---:|---:|",
    ]
    for context in sorted(oomb):
        lines.append(f"| {context:,} | {' | '.join(cell(column.get(context)) for column in columns)} |")
    shortest, longest = min(oomb), max(oomb)
    growth = oomb[longest]["peak_bytes"] - oomb[shortest]["peak_bytes"]
    pages = oomb[longest]["page_bytes"] - oomb[shortest]["page_bytes"]
    error = load("gradient_error_qwen2.5-7b_16384_512.json")["summary"]["oomb default"]["worst_ratio_to_standard"]
    lines += [
        "",
        "Standard training is Hugging Face with every layer checkpointed, cuDNN attention and a tiled loss; at 262,144 "
        f"tokens it was not tried. From {shortest:,} to {longest:,} tokens oomb's memory (without kept "
        f"attention) grows by {growth / 2**30:.2f} GiB; K, V and their gradients take {pages / 2**30:.2f} GiB more. "
        "Against a float32 reference, at 32 chunks, no layer's gradient error is above "
        f"{error:.2f} times that of standard training.",
        "",
        "These settings buy speed with memory: activations of 8,192 tokens, float32 sums of gradients. Smaller "
        '`chunk_size`, `checkpoint_layers=True` and `param_grad_dtype="param"` go the other way '
        "([docs/memory.md](docs/memory.md)).",
        "",
        "The figures come from [benchmarks/results](benchmarks/results); `oomb bench` measures your own machine.",
    ]  # fmt: skip
    return "\n".join(lines)


def headline() -> str:
    kept, longer = (load(f"exact_qwen2.5-7b_{case}.json") for case in ("kept", "long"))
    context = max(rows_of("standard", kept))
    ours, standard = (rows_of(mode, kept)[context] for mode in ("oomb", "standard"))
    (further,) = rows_of("oomb", longer).values()
    return (
        f"On one {kept['machine']['gpu']['name']}, a step of the Qwen2.5-7B shape at {context:,} tokens takes "
        f"**{ours['seconds']:.1f} s where standard training takes {standard['seconds']:.1f} s**, with attention "
        f"outputs kept ({ours['peak_bytes'] / 2**30:.0f} GiB against {standard['peak_bytes'] / 2**30:.0f}); at "
        f"{further['context']:,} tokens, without, {further['seconds']:.0f} s ([performance](#performance))."
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


def updated(text: str, marker: str, content: str) -> str:
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    before, rest = text.split(start)
    return before + start + "\n" + content + "\n" + end + rest.split(end)[1]


def main(check: bool) -> bool:
    """Whether the documents said what the files say."""
    was_true = True
    blocks = ("README.md", "headline", headline), ("README.md", "bench", table), ("docs/numerics.md", "sums", sums)
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
