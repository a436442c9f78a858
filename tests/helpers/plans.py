"""Model shapes, machines and requests for tests of the planner."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from oomb.config import Config
from oomb.models.shape import LayerShape, ModelShape
from oomb.planner.fit import place_or_raise
from oomb.planner.forecast import StepForecast, forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.plan import PlanReport, shape_for
from oomb.planner.request import Placement, PlacementRequest
from oomb.planner.suggest import Suggestions, suggest_settings
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
def shape_of(name: str, lora: bool = False) -> ModelShape:
    return shape_for(name, lora=lora)


DEFAULTS: dict[str, Any] = {
    "batch_size": 1, "length": 4096, "needs_grad": True, "float32_sums": True, "fused": True, "free_gpu_bytes": GIB,
    "free_host_bytes": GIB, "missing_grad_bytes": 8 * MIB, "optimizer_bytes": 0,
}  # fmt: skip


def ask(shape: ModelShape = TINY, config: Config | None = None, **changes: Any) -> Placement:
    config = config or Config(chunk_size=256, page_size=64)
    return place_or_raise(PlacementRequest(shape=shape, config=config, **{**DEFAULTS, **changes}))


def qwen_7b(lora: bool = False) -> ModelShape:
    return shape_of("qwen2.5-7b", lora)


def suggest_for(forecast: StepForecast, lora: bool = False, adapted: ModelShape | None = None) -> Suggestions:
    """Return what to change about a forecast; `adapted` is the shape with LoRA, None without PEFT."""
    return suggest_settings(forecast, lora=lora, shape_with_lora=lambda: adapted)


def plan_qwen_7b(length: int, host: float = 119, lora: bool = False, **config: Any) -> tuple[StepForecast, Suggestions]:
    """Return forecast and suggestions for Qwen2.5-7B on one H200 with `host` GiB of host memory."""
    machine = machine_named("H200", int(host * GIB))
    forecast = forecast_step(qwen_7b(lora), Config(**config), machine, length=length)
    return forecast, suggest_for(forecast, lora, qwen_7b(True))


def report_of(
    forecast: StepForecast, suggestions: Suggestions, lora: bool = False, model: str = "a model"
) -> PlanReport:
    """Return the report that `oomb plan` shows for these."""
    return PlanReport(
        model=model,
        dtype="bfloat16",
        lora=lora,
        shape=forecast.request.shape,
        forecast=forecast,
        positions=None,
        suggestions=suggestions,
    )


requests = st.builds(
    PlacementRequest,
    shape=st.builds(
        lambda adapters, dtype: with_dtype(replace(TINY, has_adapters=adapters), dtype),
        st.booleans(),
        st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    ),
    config=st.builds(
        Config,
        chunk_size=st.sampled_from([64, 256, 1000]),
        page_size=st.sampled_from([1, 16, 100]),
        checkpoint_layers=st.sampled_from(["auto", True, False]),
        keep_attention=st.sampled_from(["auto", True, False]),
        gpu_memory=st.sampled_from(["auto", 0, 2 * MIB]),
        host_memory=st.sampled_from(["auto", 0, 8 * MIB]),
        kv_dtype=st.sampled_from(["auto", "float32"]),
    ),
    batch_size=st.integers(1, 3),
    length=st.integers(1, 20_000),
    needs_grad=st.booleans(),
    float32_sums=st.just(True),
    fused=st.booleans(),
    free_gpu_bytes=st.one_of(st.none(), st.integers(0, 64 * MIB)),
    free_host_bytes=st.integers(0, 64 * MIB),
    missing_grad_bytes=st.just(8 * MIB),
    optimizer_bytes=st.sampled_from([0, 4 * MIB]),
)


def bytes_of(placement: Placement | StepForecast, tier: str) -> int:
    """Return the bytes of all terms of a tier."""
    return sum(term.num_bytes for term in placement.terms if term.tier == tier)
