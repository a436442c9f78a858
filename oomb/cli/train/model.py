"""Load the model and tokenizer that a run trains, and choose their precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from oomb.cli.train.settings import DEMO, TrainSettings
from oomb.config import SettingError
from oomb.data.tokenizers import another_tokenizer
from oomb.distributed.ulysses import possible_sizes
from oomb.models import adapters, load, presets
from oomb.utils import dtypes

MASTER_BYTES = 16
"""Bytes per parameter trained in float32: the weight, its gradient and AdamW's two moments."""
MASTER_SHARE = 0.5
"""Share of the GPU that these may take by default. The rest is for activations and pages."""


@dataclass(frozen=True)
class Precision:
    """The precision that `--dtype` and `--bf16` resolve to."""

    dtype: str
    mixed: bool
    """Whether the model computes in bfloat16, whatever the precision of its weights."""
    warning: str | None = None


def choose_precision(settings: TrainSettings, gpu_bytes: int | None, model_config: PretrainedConfig) -> Precision:
    """Return the precision of weights and arithmetic.

    16-bit weights lose updates smaller than half the distance to the next number, which at fine-tuning rates is most
    of them. The default is therefore float32 weights with bfloat16 arithmetic, if they fit.

    Args:
        settings: Settings of the run.
        gpu_bytes: Memory of the GPU; None on a CPU.
        model_config: Config of the model.
    """
    trains_weights = not settings.use_peft
    keeps_updates = settings.optim == "offloaded_adamw"
    dtype = dtypes.SHORT_DTYPES.get(settings.dtype, settings.dtype)
    if dtype == "auto":
        if gpu_bytes is None or (settings.bf16 and trains_weights):
            dtype = "float32"
        else:
            needs_float32 = trains_weights and not keeps_updates
            model = load.meta_model(model_config, trust_remote_code=settings.trust_remote_code)
            fits = MASTER_BYTES * model.num_parameters() <= MASTER_SHARE * gpu_bytes
            dtype = "float32" if needs_float32 and fits else "bfloat16"
    mixed = settings.bf16
    if mixed is None:
        # Adapters are float32, which is slow unless they compute in the precision of the weights.
        has_float32_adapters = settings.use_peft and adapters.computes_in_autocast(dtype)
        mixed = gpu_bytes is not None and (has_float32_adapters or (dtype == "float32" and settings.dtype == "auto"))
    warning = None
    if trains_weights and not keeps_updates and dtype in ("bfloat16", "float16"):
        warning = (
            f"AdamW on {dtype} weights loses small updates. Use --optim offloaded_adamw (float32 copies in host "
            "memory), --dtype float32 --bf16 if that fits on the GPU, or --use_peft (adapters)"
        )
    return Precision(dtype, mixed, warning)


def check_heads(settings: TrainSettings, config: PretrainedConfig) -> None:
    """Raise `SettingError` if the heads of the model cannot be divided over the ranks that share an example."""
    text, shared = config.get_text_config(decoder=True), settings.topology.sp
    heads = getattr(text, "num_attention_heads", None)
    sizes = [] if heads is None else possible_sizes(heads, getattr(text, "num_key_value_heads", None) or heads)
    if shared > 1 and heads is not None and shared not in sizes:
        known = ", ".join(map(str, sizes))
        raise SettingError(
            "parallel", f"sp={shared} cannot divide the {heads} heads of this model: choose from {known}"
        )


def check_targets(settings: TrainSettings, model_config: PretrainedConfig) -> None:
    """Refuse adapters for layers that the model does not have, before its weights are loaded."""
    targets = settings.target_modules
    if isinstance(targets, str):
        return
    modules = load.meta_model(model_config, trust_remote_code=settings.trust_remote_code).named_modules()
    names = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
            raise SettingError("lora_target_modules", f"has {target!r}, but the model's linear layers are {known}")


def load_tokenizer(settings: TrainSettings, model_config: PretrainedConfig) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, or None if the model reads bytes.

    Raises:
        SettingError: `tokenizer_name` gives different ids from the model's own tokenizer.
    """
    trust = {"trust_remote_code": settings.trust_remote_code}
    if settings.tokenizer_name is not None:
        named = load.load_tokenizer(settings.tokenizer_name, **trust)
        model = settings.model_name_or_path
        fault = another_tokenizer(settings.tokenizer_name, named, model, load.own_tokenizer(model, **trust))
        if fault is not None:
            remedy = "or train a preset or a model made for this tokenizer"
            raise SettingError("tokenizer_name", f"{fault}. Leave out --tokenizer_name, {remedy}")
        return named
    if presets.is_preset(settings.model_name_or_path):
        return None
    try:
        return load.load_tokenizer(settings.model_name_or_path, **trust)
    except ValueError:
        # A byte-level model saved by `oomb train` has no tokenizer and reads bytes again.
        if model_config.get_text_config().vocab_size == presets.PRESETS[DEMO]["vocab_size"]:
            return None
        raise


def load_model(settings: TrainSettings, model_config: PretrainedConfig, dtype: str, device: torch.device) -> Any:
    """Return the model to train, with new adapters or those of the checkpoint to resume from."""
    torch.manual_seed(settings.seed)
    resume = settings.resume_from_checkpoint
    options: dict[str, Any] = {"dtype": dtype, "device": str(device), "trust_remote_code": settings.trust_remote_code}
    if settings.load_in_4bit:
        if presets.is_preset(settings.model_name_or_path):
            raise SettingError("load_in_4bit", "needs saved weights, and presets have none: name a folder or a hub id")
        model = adapters.load_in_4bit(
            settings.model_name_or_path,
            config=model_config,
            device=device,
            trust_remote_code=settings.trust_remote_code,
        )
    elif resume is not None and not settings.use_peft:
        # The trainer loads the checkpoint too, but only after the held-out loss before training.
        model = load.load_model(resume, **options)
    else:
        model = load.load_model(settings.model_name_or_path, config=model_config, **options)
    return _with_adapters(settings, model) if settings.use_peft else model


def _with_adapters(settings: TrainSettings, model: Any) -> Any:
    if settings.resume_from_checkpoint is not None:
        return adapters.with_adapters(model, settings.resume_from_checkpoint, trainable=True)
    return adapters.with_lora(
        model,
        r=settings.lora_r,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
    )
