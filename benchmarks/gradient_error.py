"""Measure the error of bfloat16 gradients by layer, for oomb with many chunks and for standard training.

    python benchmarks/gradient_error.py --model qwen2.5-7b --context 16384 --chunk-size 512

The reference is whole-sequence autograd in float32 on the same weights and tokens. The error of a layer is
|g - ref| / |ref| over all its parameters. Its length is <g, ref> / <ref, ref>, which is below 1 if additions are lost.
Prints a table and writes gradient_error_MODEL_CONTEXT_CHUNK.json.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from common import OUT, save
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.eval.bench import EngineStep, StandardStep
from oomb.models.load import load_model
from oomb.utils import metrics

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16-sums": {"param_grad_dtype": "param"},
    "f32-sums": {"param_grad_dtype": "float32"},
    "f32-pages": {"param_grad_dtype": "param", "grad_dtype": "float32"},
    "kept-attention": {"keep_attention": True},
    "f32-both": {"param_grad_dtype": "float32", "grad_dtype": "float32"},
    "int8-kv": {"kv_dtype": "int8"},
    "int8-pages": {"kv_dtype": "int8", "grad_dtype": "int8"},
}


def float32_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    """Attention by PyTorch's memory-efficient backend, which supports float32 but not grouped K/V heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register("float32_reference", float32_attention)


def cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters only: RoPE tables stay in float32, as in a model loaded in bfloat16."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def take_grads(network: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        grads[name], parameter.grad = parameter.grad, None
    return grads


def errors(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the relative error of each layer and its length along the reference."""
    sums: dict[str, list[float]] = {}
    for name, ref in reference.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        key = f"layer {layer[1]}" if layer else name
        off, norm, along = sums.setdefault(key, [0.0, 0.0, 0.0])
        g = grads[name].float()
        sums[key] = [
            off + float((g - ref).square().sum()),
            norm + float(ref.square().sum()),
            along + float((g * ref).sum()),
        ]
    return {key: ((off / norm) ** 0.5, along / norm) for key, (off, norm, along) in sums.items()}


def main(
    model: str = "qwen2.5-7b",
    context: int = 16384,
    chunk_size: int = 512,
    variants: Annotated[str, typer.Option(help=f"all, or a list of {','.join(VARIANTS)}.")] = "all",
    out: Path | None = None,
) -> None:
    names = list(VARIANTS) if variants == "all" else variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise typer.BadParameter(f"--variants has {', '.join(unknown)}; use some of {', '.join(VARIANTS)}")
    torch.manual_seed(0)
    network = load_model(model, dtype="bfloat16", attn_implementation="sdpa").train()
    ids = torch.randint(1, network.config.vocab_size, (1, context))
    cast(network, torch.float32)
    network.set_attn_implementation("float32_reference")
    losses = {"float32": float(StandardStep(network)(ids))}
    reference = take_grads(network)
    cast(network, torch.bfloat16)
    network.set_attn_implementation("sdpa")
    losses["standard"] = float(StandardStep(network)(ids))
    results = {"standard": errors(take_grads(network), reference)}
    for name in names:
        step = EngineStep(Engine(network, Config(chunk_size=chunk_size, **VARIANTS[name])))
        losses[f"oomb {name}"] = float(step(ids))
        results[f"oomb {name}"] = errors(take_grads(network), reference)

    table = Table(
        title=f"{model}, {context:,} tokens, {-(-context // chunk_size)} chunks: gradient error against float32"
    )
    for column in ("", "loss", "worst layer", "median layer", "worst ratio to standard", "shortest", "longest"):
        table.add_column(column, justify="right" if column else "left")
    summary = {}
    for name, layers in results.items():
        relative = sorted(error for error, _ in layers.values())
        ratio = max(error / results["standard"][key][0] for key, (error, _) in layers.items())
        lengths = [length for _, length in layers.values()]
        summary[name] = {"loss": losses[name], "worst": relative[-1], "median": relative[len(relative) // 2],
                         "worst_ratio_to_standard": ratio, "lengths": [min(lengths), max(lengths)]}  # fmt: skip
        table.add_row(name, f"{losses[name]:.5f}", f"{relative[-1]:.4f}", f"{relative[len(relative) // 2]:.4f}",
                      f"{ratio:.3f}", f"{min(lengths):.4f}", f"{max(lengths):.4f}")  # fmt: skip
    Console(width=140).print(table, f"loss in float32: {losses['float32']:.5f}")
    path = out or OUT / f"gradient_error_{model}_{context}_{chunk_size}.json"
    record = {"model": model, "context": context, "chunk_size": chunk_size, "losses": losses, "summary": summary,
              "layers": results, "machine": metrics.machine()}  # fmt: skip
    save(record, path)


if __name__ == "__main__":
    typer.run(main)
