"""Weights in 4 or 8 bits (QLoRA): the settings of bitsandbytes, through transformers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def bits_config(
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
