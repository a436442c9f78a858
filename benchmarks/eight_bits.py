"""Measure how close gradients with int8 pages are to those with bfloat16 pages.

    python benchmarks/eight_bits.py smollm2              # real weights and text, 16 chunks; a minute on an H200
    python benchmarks/eight_bits.py qwen2.5-7b           # random weights and tokens, 64K; about two minutes
    python benchmarks/eight_bits.py qwen2.5-7b --stds 0.02,0.008    # random weights with several standard deviations

Covers dense attention, and for the large model sparse attention as well. For comparison it repeats the bfloat16 step
(some kernels are not deterministic) and, for the small model, uses float32 pages. Prints a table and writes
eight_bits_MODEL.json after each standard deviation. Exit code 1 if a cosine misses its target.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import fidelity
import smollm2
import torch
import typer
from common import OUT, Device, Gguf, Log, save
from rich.table import Table
from torch import Tensor

from oomb.config import Config
from oomb.models.load import load_config, load_model
from oomb.models.presets import is_preset
from oomb.utils import metrics
from oomb.utils.units import parse_list, parse_tokens

REFERENCE = {"kv_dtype": "bfloat16", "grad_dtype": "bfloat16"}
VARIANTS: dict[str, dict[str, str]] = {
    "bfloat16 again": REFERENCE,
    "K and V in int8": {**REFERENCE, "kv_dtype": "int8"},
    "all in int8": {"kv_dtype": "int8", "grad_dtype": "int8"},
}
WIDE = {"float32": {"kv_dtype": "float32", "grad_dtype": "float32"}}
ASKED = {"K and V in int8": 0.999, "all in int8": 0.995}
"""Targets: smallest cosine with the gradients of bfloat16 pages."""
SPARE = 1.05
"""Safety factor for the memory of a step while reference gradients are on the GPU."""


@dataclass(kw_only=True)
class Row:
    """Results of one variant on one text."""

    text: str
    attention: str
    variant: str
    num_chunks: int
    cosine: float
    error: float
    qk_cosine: float
    loss: float
    loss_difference: float
    std: float | None = None
    """Standard deviation of the random weights, if --stds sets one."""

    @property
    def is_right(self) -> bool:
        # NaN compares as false, so it counts as wrong.
        return self.cosine >= ASKED.get(self.variant, -1.0)

    @property
    def goal(self) -> str:
        """The target and whether it is reached."""
        if self.variant not in ASKED:
            return ""
        return f"{ASKED[self.variant]}: {'reached' if self.is_right else 'NOT REACHED'}"


def parse_std(text: str) -> float:
    std = float(text)
    if not 0 < std < math.inf:
        raise ValueError(f"--stds has {text.strip()}; a standard deviation is a number above 0, such as 0.02")
    return std


def random_network(model: str, std: float | None, device: str) -> Any:
    """Return a preset with random weights of that standard deviation."""
    torch.manual_seed(0)
    if std is None:
        return load_model(model, device=device).train()
    config = load_config(model)
    config.initializer_range = std
    return load_model(model, device=device, config=config).train()


def reference_gradient(network: Any, ids: Tensor, config: Config) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients, and keep them on the GPU if another step fits as well.

    With 7 billion parameters, copying them from the CPU for every variant would be 15 GB each time.
    """
    device = next(network.parameters()).device
    if device.type != "cuda":
        return fidelity.gradient(network, ids, config)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss, grads = fidelity.gradient(network, ids, config)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return loss, kept(grads, needed, torch.cuda.mem_get_info(device)[0])


def kept(grads: dict[str, Tensor], needed_bytes: int, free_bytes: int) -> dict[str, Tensor]:
    """Return the gradients on the GPU if a step still fits, else on the CPU."""
    if SPARE * needed_bytes <= free_bytes:
        return grads
    return {name: grad.cpu() for name, grad in grads.items()}


def measure(
    network: Any,
    texts: Sequence[tuple[str, Tensor]],
    shapes: dict[str, dict[str, Any]],
    variants: dict[str, dict[str, str]],
    log: Log,
    std: float | None = None,
) -> list[Row]:
    rows = []
    for name, ids in texts:
        for attention, shape in shapes.items():
            loss, reference = reference_gradient(network, ids, Config.from_dict({**shape, **REFERENCE}))
            for variant, dtypes in variants.items():
                own_loss, grads = fidelity.gradient(network, ids, Config.from_dict({**shape, **dtypes}))
                row = Row(
                    text=name,
                    attention=attention,
                    variant=variant,
                    num_chunks=-(-ids.shape[1] // shape["chunk_size"]),
                    loss=loss,
                    loss_difference=own_loss - loss,
                    std=std,
                    **fidelity.compare(grads, reference),
                )
                rows.append(row)
                del grads
                log(f"{name}, {attention}, {variant}: cosine {row.cosine:.6f}")
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title)
    left, right = ("text", "attention", "pages", "target"), ("chunks", "cosine", "error", "cosine of q, k")
    for column in (*left[:3], *right[:2], left[3], *right[2:], "loss difference"):
        shown.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        shown.add_row(
            row.text + ("" if row.std is None else f", std {row.std:g}"),
            row.attention,
            row.variant,
            str(row.num_chunks),
            f"{row.cosine:.6f}",
            row.goal,
            f"{row.error:.1e}",
            f"{row.qk_cosine:.6f}",
            f"{row.loss_difference:+.1e}",
        )
    return shown


def main(
    model: Annotated[str, typer.Argument(help="smollm2, or a preset with random weights, such as qwen2.5-7b.")],
    tokens: Annotated[str, typer.Option(help="Tokens of a text. Default: 8192, or 64K for a preset.")] = "",
    chunk_size: Annotated[int | None, typer.Option(help="Tokens per chunk. Default: 512; 4096 for a preset.")] = None,
    stds: Annotated[
        str, typer.Option(help="Standard deviations of a preset's weights, for example 0.02,0.008. Default: its own.")
    ] = "",
    samples: Annotated[int, typer.Option(help="Texts of each kind, for smollm2.")] = 1,
    gguf: Gguf = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Output file. Default: benchmarks/results/eight_bits_MODEL.json.")
    ] = None,
) -> None:
    log = Log(width=160)
    is_small = model == "smollm2"
    length = parse_tokens(tokens or ("8192" if is_small else "64K"))
    dense: dict[str, Any] = {"chunk_size": chunk_size or (512 if is_small else 4096), "fuse": fidelity.FUSE}
    shapes, variants = {"dense": dense}, VARIANTS
    texts: list[tuple[str, Tensor]]
    deviations: list[float | None] = [None]
    try:
        if stds:
            if not is_preset(model) or is_small:
                raise ValueError(f"--stds needs random weights, and {model} has its own: use a preset or leave it out")
            deviations = [*parse_list(stds, parse_std)]
        if is_small:
            torch.set_float32_matmul_precision("highest")
            network, tokenizer = smollm2.load(gguf, device)
            texts = [(text.kind, text.ids) for text in fidelity.read_texts(tokenizer, length, samples, None)]
            variants = {**VARIANTS, **WIDE}
        else:
            network = random_network(model, deviations[0], device)
            dense["param_grad_dtype"], dense["fuse"] = "param", "auto"
            shapes["64 pages of 128"] = {**dense, "page_budget": 64, "page_size": 128}
            generator = torch.Generator().manual_seed(0)
            texts = [("random", torch.randint(1, network.config.vocab_size, (1, length), generator=generator))]
        for shape, dtypes in product(shapes.values(), variants.values()):
            Config.from_dict({**shape, **dtypes})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    path = out or OUT / f"eight_bits_{model}.json"
    rows: list[Row] = []
    for index, std in enumerate(deviations):
        if index:
            # Two models may not fit on the GPU.
            del network
            gc.collect()
            torch.cuda.empty_cache()
            network = random_network(model, std, device)
        rows += measure(network, texts, shapes, variants, log, std)
        is_right = all(row.is_right for row in rows)
        record = {
            "model": model,
            "settings": {"tokens": length, "stds": [one for one in deviations if one is not None], **dense},
            "asked": ASKED,
            "is_right": is_right,
            "rows": [asdict(row) for row in rows],
            "machine": metrics.machine(),
        }
        save(record, path)
    log.console.print(table(rows, f"{model}, {length:,} tokens: gradients compared with those of bfloat16 pages"))
    log.console.print(f"written to {path} after {log.seconds:.0f} s")
    raise typer.Exit(0 if is_right else 1)


if __name__ == "__main__":
    typer.run(main)
