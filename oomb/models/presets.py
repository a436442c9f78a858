"""Define presets: named model shapes that get random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Arguments of the Hugging Face config. Presets have neither weights nor a tokenizer.
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        # Attention is nearly all the work at 16K tokens, so a few narrow heads keep two CPU cores fast enough.
        # 264 = 256 bytes + the special tokens of `oomb.data`, padded to a multiple of 8 for tensor cores.
        "model_type": "llama",
        "vocab_size": 264,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1 << 22,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        # The usual 0.02 suits models 30 times as wide and learns slowly here.
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


def is_preset(name: str) -> bool:
    """Return whether a name is a preset, ignoring case unless a folder has that name.

    Examples:
        >>> is_preset("Qwen2.5-7B")
        True
    """
    return name in PRESETS or (name.lower() in PRESETS and not Path(name).is_dir())


def preset_config(name: str, **overrides: Any) -> PretrainedConfig:
    """Return the Hugging Face config of a preset.

    Args:
        name: Name of the preset.
        overrides: Fields of the config to replace.

    Examples:
        >>> preset_config("qwen2.5-7b", num_hidden_layers=2).num_hidden_layers
        2
    """
    from transformers import AutoConfig

    if not is_preset(name):
        raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
    shape = {**PRESETS[name.lower()], **overrides}
    return AutoConfig.for_model(shape.pop("model_type"), **shape)
