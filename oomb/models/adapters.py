"""LoRA and QLoRA: create adapters, load saved ones, quantize the base, and choose the precision they compute in."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomb.models import load
from oomb.models.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, holds_adapters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def bnb_config(
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    *,
    compute_dtype: str = "bfloat16",
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> Any:
    """Return the `quantization_config` for `from_pretrained`, or None if nothing is to be quantized.

    The defaults are those of QLoRA.

    Args:
        load_in_4bit: Quantize weights to 4 bits.
        load_in_8bit: Quantize weights to 8 bits.
        compute_dtype: Dtype that 4-bit weights are dequantized to: bfloat16, float16 or float32.
        quant_type: 4-bit type: nf4 or fp4.
        double_quant: Quantize the scales of 4-bit weights, too.

    Raises:
        ValueError: Settings contradict each other, or bitsandbytes is not installed.
    """
    if not (load_in_4bit or load_in_8bit):
        return None
    if load_in_4bit and load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both set: choose one")
    if quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type is {quant_type!r}; use nf4 or fp4")
    if compute_dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"compute_dtype is {compute_dtype!r}; use bfloat16, float16 or float32")
    if find_spec("bitsandbytes") is None:
        bits = 4 if load_in_4bit else 8
        raise ValueError(
            f"load_in_{bits}bit needs bitsandbytes, which is not installed (it is in oomb's extra qlora): "
            "pip install bitsandbytes, or train adapters on 16-bit weights"
        )
    from transformers import BitsAndBytesConfig

    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
    )


def load_in_4bit(
    name_or_path: str, *, config: PretrainedConfig, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a saved model with its weights quantized to 4 bits while they are loaded."""
    import torch

    return load.load_weights(
        name_or_path,
        config=config,
        trust_remote_code=trust_remote_code,
        dtype=torch.bfloat16,
        quantization_config=bnb_config(load_in_4bit=True),
        device_map={"": device},
    )


def with_lora(
    model: nn.Module,
    *,
    r: int = 16,
    alpha: int = 8,
    dropout: float = 0.0,
    target_modules: str | list[str] = "all-linear",
) -> Any:
    """Return the model with new LoRA adapters. The defaults are what plans and benchmarks assume."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("--lora needs peft: pip install peft") from None
    config = LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def with_adapters(model: PreTrainedModel, folder: str, *, trainable: bool = False) -> Any:
    """Return the model with the adapters saved in a folder, frozen unless `trainable`."""
    from peft import PeftModel

    path = str(Path(folder).expanduser())
    try:
        return PeftModel.from_pretrained(model, path, is_trainable=trainable, torch_device=str(model.device))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the adapters in {folder} do not fit their base model: {reason}") from error


def base_model_name(name_or_path: str) -> str | None:
    """Return the model that a folder's adapters were trained on, or None if it does not hold adapters.

    Raises:
        ValueError: The adapters cannot be loaded: their weights, their base model or peft is missing.
    """
    if not holds_adapters(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        raise ValueError(f"{folder} has an {ADAPTER_CONFIG} but no adapter weights: {' or '.join(ADAPTER_WEIGHTS)}")
    if find_spec("peft") is None:
        raise ValueError(f"{folder} holds LoRA adapters, and loading them needs peft: pip install peft")
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / ADAPTER_CONFIG} cannot be read ({type(error).__name__}: {error})") from error
    if not base:
        raise ValueError(
            f"{folder} holds LoRA adapters, but its {ADAPTER_CONFIG} names no base model: they were trained on a "
            "preset, whose random weights are not saved"
        )
    try:
        load.check_model_name(str(base))
    except ValueError as error:
        raise ValueError(
            f"{folder} holds LoRA adapters of {str(base)!r}, which is not here: run oomb eval in the folder where it "
            f"is, or set base_model_name_or_path in {folder / ADAPTER_CONFIG} ({error})"
        ) from error
    return str(base)


def base_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's own weights."""
    return next(p for p in model.parameters() if p.is_floating_point()).dtype


def are_wider_than_base(model: nn.Module) -> bool:
    """Return whether trainable parameters have a wider dtype than the base, as PEFT's float32 adapters often do."""
    itemsize = base_dtype(model).itemsize
    return any(p.requires_grad and p.dtype.itemsize > itemsize for p in model.parameters())


def computes_in_autocast(dtype: torch.dtype | str) -> bool:
    """Return whether LoRA on base weights of this dtype runs under autocast on a GPU.

    PEFT keeps adapters of bfloat16 weights in float32. Without autocast it would compute them in float32, too.
    """
    return str(dtype).removeprefix("torch.") == "bfloat16"


def autocast_for(model: nn.Module) -> torch.autocast:
    """Return the autocast context that `oomb train` runs a model under: bfloat16 for float32 adapters on bfloat16."""
    import torch

    device, dtype = next(model.parameters()).device, base_dtype(model)
    enabled = device.type == "cuda" and computes_in_autocast(dtype) and are_wider_than_base(model)
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
