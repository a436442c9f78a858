"""Weights in 4 or 8 bits (QLoRA): the settings of bitsandbytes, through transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomb.models import load
from oomb.models.load import holds_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel
if TYPE_CHECKING:
    import torch
    from torch import nn


def bnb_config(
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    *,
    compute_dtype: str = "bfloat16",
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> Any:
    """What `from_pretrained(quantization_config=...)` takes, or None where neither is asked for. Raises ValueError,
    before anything is loaded, where it cannot be done.

    By default as in QLoRA: the 4-bit type that suits weights, its scales in 8 bits, arithmetic in bfloat16.
    """
    if not (load_in_4bit or load_in_8bit):
        return None
    if load_in_4bit and load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both set: choose one of them")
    if quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type is {quant_type!r}; use nf4 or fp4")
    if compute_dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"compute_dtype is {compute_dtype!r}; use bfloat16, float16 or float32")
    if find_spec("bitsandbytes") is None:
        bits = 4 if load_in_4bit else 8
        raise ValueError(
            f"load_in_{bits}bit needs bitsandbytes, which is not installed (the extra qlora of oomb has it): "
            "pip install bitsandbytes; or train the adapter on weights in 16 bits, without it"
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


def with_lora(network: nn.Module) -> Any:
    """LoRA as plans and measurements have it: rank 16, on all linear layers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("--lora needs peft: pip install peft") from None
    return get_peft_model(network, LoraConfig(r=16, target_modules="all-linear"))


def autocast_for(network: nn.Module) -> torch.autocast:
    """The precision that `oomb train` computes in: where float32 adapters stand beside weights in bfloat16, that of the
    weights. PEFT alone would cast its inputs to float32."""
    import torch

    first = next(p for p in network.parameters() if p.is_floating_point())
    has_wide = any(p.requires_grad and p.dtype.itemsize > first.dtype.itemsize for p in network.parameters())
    is_short = first.dtype is torch.bfloat16
    return torch.autocast(first.device.type, torch.bfloat16, enabled=has_wide and is_short and first.is_cuda)


CONFIG = "adapter_config.json"


WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def base_of(name_or_path: str) -> str | None:
    """The model that the adapters of a folder were trained on; None where the folder or hub id is a whole model. What
    is missing is told here, before anything is loaded."""
    if not holds_adapters(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ValueError(f"{folder} holds {CONFIG} and no weights of adapters: {' or '.join(WEIGHTS)} is missing")
    if find_spec("peft") is None:
        raise ValueError(f"{folder} holds LoRA adapters, and to read them needs peft: pip install peft")
    try:
        base = json.loads((folder / CONFIG).read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read ({type(error).__name__}: {error})") from error
    if not base:
        raise ValueError(
            f"{folder} holds LoRA adapters and {CONFIG} names no base model: they were trained on random weights, a "
            "preset's, which are not saved"
        )
    try:
        load.check_model_name(str(base))
    except ValueError as error:
        raise ValueError(
            f"{folder} holds LoRA adapters of {str(base)!r}, which is not here: call oomb eval where it is, or write "
            f"its place into {folder / CONFIG} as base_model_name_or_path ({error})"
        ) from error
    return str(base)


def with_adapters(model: PreTrainedModel, folder: str) -> Any:
    """The model with the adapters of a folder on top."""
    from peft import PeftModel

    path = Path(folder).expanduser()
    try:
        return PeftModel.from_pretrained(model, str(path), torch_device=str(model.device))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the adapters in {folder} do not load on top of their base model: {reason}") from error
