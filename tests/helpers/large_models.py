"""Models that are large enough for GPU kernels."""

from __future__ import annotations

from typing import Any

import torch


def wide_llama(**changes: Any) -> Any:
    """Return a llama on the GPU with heads large enough for its attention kernels."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, head_dim=64, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").cuda()
