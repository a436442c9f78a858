"""Forecasts count what a training run holds, and the time follows the model and the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import H200, shape_of

from oomb.config import Config
from oomb.models.shape import ModelShape
from oomb.planner import forecast as forecast_module
from oomb.planner import hardware, step_time
from oomb.planner.forecast import forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.placement import FLOPS_PER_BYTE


def test_flops_per_byte_match_the_rates() -> None:
    rates = step_time.MATRIX_TFLOPS * 1e12 / hardware.PCIE_5_BYTES_PER_SECOND
    assert pytest.approx(rates, rel=0.01) == FLOPS_PER_BYTE


def test_the_time_follows_frozen_weights_windows_and_copies() -> None:
    def seconds(facts: ModelShape, **changes: Any) -> float:
        options = {"gpu_memory": "100GiB", "chunk_size": 4096, "keep_attention": False, **changes}
        plan = forecast_step(facts, Config(**options), replace(H200, host_bytes=2**50), length=2**17, optimizer="none")
        assert plan.fits and plan.seconds is not None
        return plan.seconds

    full = shape_of("qwen2.5-7b")
    assert seconds(replace(full, trained_params=0)) < seconds(full)
    windowed = replace(full, layers=tuple(replace(layer, window=4096) for layer in full.layers))
    assert seconds(windowed) < 0.5 * seconds(full)
    # With long chunks the arithmetic hides the copies; with short ones the copies are what takes the time.
    assert seconds(full, gpu_memory=0) == pytest.approx(seconds(full), rel=0.01)
    assert seconds(full, gpu_memory=0, chunk_size=256) > 2 * seconds(full, chunk_size=256)
    slow = forecast_step(full, Config(), machine_named("rtx-4090", 2**40), length=2**17)
    assert slow.seconds is not None and not slow.machine.is_measured
    assert forecast_step(full, Config(), Machine(gpu_bytes=2**37, host_bytes=2**37), length=2**17).seconds is None


def test_optimizer_states_are_counted_in_their_tier() -> None:
    full = shape_of("qwen2.5-7b")
    plans = {
        name: forecast_step(full, Config(), H200, length=2**15, optimizer=name) for name in forecast_module.OPTIMIZERS
    }
    sizes = {name: plan.peak_gpu_bytes - plan.placement.gpu_bytes for name, plan in plans.items()}
    assert sizes["adamw"] - sizes["none"] == 2 * full.grad_bytes
    assert sizes["adamw_8bit"] - sizes["none"] == full.grad_bytes == sizes["momentum"] - sizes["sgd"]
    for name, bytes_each in (
        ("offloaded_adamw", 8),
        ("offloaded_adamw_bf16", 4),
        ("offloaded_adamw_8bit", 2 + 8 / 256),
    ):
        assert sizes[name] == sizes["none"]
        assert plans[name].host_bytes == pytest.approx(bytes_each * full.trainable_params, rel=1e-6)
        assert plans[name].host_limit == pytest.approx(0.9 * H200.host_bytes + 0.1 * plans[name].host_bytes)
    # A quarter of an 80 GiB card is less than float32 sums take.
    assert not forecast_step(full, Config(), machine_named("H100", 2**37), length=2**15).request.float32_sums
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        forecast_step(full, Config(), H200, length=2**15, optimizer="lion")
    with pytest.raises(ValueError, match="at least 1 sequence of 2 tokens"):
        forecast_step(full, Config(), H200, length=1)
