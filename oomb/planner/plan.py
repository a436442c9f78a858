"""Plan a training step of a model by name: its shape without weights, the forecast, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from oomb.config import Config
from oomb.models import adapters, load
from oomb.models.checks import unwrap
from oomb.models.probe import model_shape
from oomb.models.shape import ModelShape
from oomb.planner.forecast import StepForecast, forecast_step
from oomb.planner.hardware import Machine
from oomb.planner.suggest import Suggestions, suggest_settings
from oomb.utils import dtypes


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan for a model: everything that `oomb plan` shows."""

    model: str
    dtype: str
    lora: bool
    shape: ModelShape
    forecast: StepForecast
    positions: int | None
    """The number of positions that the model was made for."""
    suggestions: Suggestions
    """What to change if it does not fit or takes long."""

    @property
    def master_weight_bytes(self) -> int:
        """Host memory of `master_weights` of `oomb.OffloadedAdamW`: as much as float32 sums."""
        return self.shape.float32_sum_bytes


def plan_step(
    model: str,
    length: int,
    machine: Machine,
    *,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    lora: bool = False,
    optimizer: str = "adamw",
    settings: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PlanReport:
    """Plan a training step without loading weights.

    Args:
        model: A preset, a folder with a config.json, or a hub id.
        length: Tokens per sequence.
        machine: The machine to train on.
        batch_size: Sequences computed at once.
        dtype: Dtype of the weights.
        lora: Whether LoRA adapters are trained instead of the weights.
        optimizer: One of `oomb.planner.forecast.OPTIMIZERS`.
        settings: Fields of `oomb.Config`.
        trust_remote_code: Whether to run Python code that comes with the model.

    >>> from oomb.planner.hardware import machine_named
    >>> report = plan_step("demo", 4096, machine_named("H100", 64 << 30))
    >>> report.forecast.fits
    True
    """
    config = Config.from_dict(settings or {})
    if batch_size < 1:
        raise ValueError(f"--batch_size is {batch_size}; it must be 1 or more")
    trust = {"trust_remote_code": True} if trust_remote_code else {}
    model_config = load.load_config(model, **trust)
    dtype_name = str(dtypes.resolve_dtype(dtype, torch.device("cuda"))).removeprefix("torch.")
    shape = shape_for(model, dtype=dtype, lora=lora, config=model_config, **trust)
    forecast = forecast_step(shape, config, machine, batch_size=batch_size, length=length, optimizer=optimizer)

    def shape_with_lora() -> ModelShape | None:
        return shape_for(model, dtype=dtype, lora=True, config=model_config, **trust) if find_spec("peft") else None

    return PlanReport(
        model=model,
        dtype=dtype_name,
        lora=lora,
        shape=shape,
        forecast=forecast,
        positions=load.max_positions(model_config),
        suggestions=suggest_settings(forecast, lora=lora, shape_with_lora=shape_with_lora),
    )


def shape_for(
    name: str,
    *,
    dtype: str = "bfloat16",
    lora: bool = False,
    config: Any = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Return the shape of a model that is built on the meta device: no weights are read and no memory is taken.

    Args:
        name: A preset, a folder with a config.json, or a hub id.
        dtype: Dtype of the weights.
        lora: Whether to add adapters of rank 16 on all linear layers, as `oomb bench --lora` does.
        config: The model's Hugging Face config, if it is loaded already.
        trust_remote_code: Whether to run Python code that comes with the model.
    """
    config = load.load_config(name, trust_remote_code=trust_remote_code) if config is None else config
    precision = dtypes.resolve_dtype(dtype, torch.device("cuda"))
    model: Any = load.meta_model(config, dtype=precision, trust_remote_code=trust_remote_code)
    unwrap(model, allow_meta=True)
    if lora:
        with torch.device("meta"):
            model = adapters.with_lora(model)
    return model_shape(model, autocast=lora and adapters.computes_in_autocast(precision))
