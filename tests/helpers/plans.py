"""Model shapes, machines and requests for tests of the planner."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from oomb.config import Config
from oomb.models.shape import LayerShape, ModelShape
from oomb.planner import report
from oomb.planner.fit import place_or_raise
from oomb.planner.hardware import Machine
from oomb.planner.request import Placement
from oomb.utils.units import GIB

MIB = 1 << 20


H200 = Machine(gpu_bytes=int(139.8 * GIB), host_bytes=100 * GIB, gpu_name="NVIDIA H200")


TINY = ModelShape(
    layers=(
        LayerShape(num_kv_heads=2, head_size=16, value_size=16, num_query_heads=4, dtype=torch.bfloat16),
        LayerShape(num_kv_heads=2, head_size=16, value_size=8, num_query_heads=4, window=32, dtype=torch.bfloat16),
    ),
    hidden_size=64,
    vocab_size=500,
    itemsize=2,
    weight_bytes=4 * MIB,
    grad_bytes=4 * MIB,
    float32_sum_bytes=8 * MIB,
    wide_grad_bytes=0,
    head_grad_bytes=500 * 64 * 2,
    layer_io_width=1000,
    has_adapters=False,
    has_float32_adapters=False,
    active_params=2_000_000,
    trained_params=2_000_000,
    trainable_params=2_000_000,
)


def with_dtype(shape: ModelShape, dtype: torch.dtype) -> ModelShape:
    """Return the shape of a model that computes in another dtype."""
    layers = tuple(replace(layer, dtype=dtype) for layer in shape.layers)
    return replace(shape, itemsize=dtype.itemsize, layers=layers)


@functools.cache
def facts_for(name: str, lora: bool = False) -> ModelShape:
    return report.shape_for(name, lora=lora)


def ask(shape: ModelShape = TINY, config: Config | None = None, **changes: Any) -> Placement:
    options = {
        "batch_size": 1, "length": 4096, "needs_grad": True, "float32_sums": True, "fused": True, "free_gpu_bytes": GIB,
        "free_host_bytes": GIB, "missing_grad_bytes": 8 * MIB, "optimizer_bytes": 0,
    }  # fmt: skip
    return place_or_raise(shape, config or Config(chunk_size=256, page_size=64), **{**options, **changes})
