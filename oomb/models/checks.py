"""Which models cannot be trained by chunk recurrence, and why. Every check comes before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel")


class UnsupportedModelError(ValueError):
    """The model cannot be trained exactly by chunk recurrence."""


def unwrap(model: nn.Module, *, check: bool = True, allow_meta: bool = False) -> PreTrainedModel:
    """Return the Hugging Face model inside of wrappers, or raise if it cannot be trained.

    Args:
        model: A Hugging Face causal LM, possibly wrapped by PEFT, `torch.compile` or a data-parallel class.
        check: Raise `UnsupportedModelError` if the model cannot be trained.
        allow_meta: Accept parameters on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} is not a model; pass a Hugging Face causal LM")
    if check and type(model).__name__ in DISTRIBUTED and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedModelError(
            f"the model is wrapped in {type(model).__name__}, whose reduction of gradients over processes the engine "
            "would pass by: train in one process"
        )
    while hasattr(model, "_orig_mod") or (hasattr(model, "module") and isinstance(model.module, nn.Module)):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    if hasattr(model, "get_base_model"):
        if check:
            _check_peft(getattr(model, "active_peft_config", None))
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Hugging Face model; pass one made by AutoModelForCausalLM"
        )
    if check:
        check_supported(model, allow_meta=allow_meta)
    return model


def check_supported(model: PreTrainedModel, *, allow_meta: bool = False) -> None:
    """Raises where chunk recurrence would not be exact, going by what the model says of itself."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of {name} is of type {kind!r}: what it carries from token to token is not K and V of "
                "plain causal attention, so chunks cannot carry it. Models whose layers are all full or sliding-window "
                "attention can be trained"
            )
    if model.config.is_encoder_decoder or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not a causal decoder")
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} is set to add a load-balancing loss over the whole sequence (config.output_router_logits=True), "
            "which chunks do not see: set it to False"
        )
    backbone = getattr(model, model.base_model_prefix, None)
    if model.get_output_embeddings() is None or backbone is None or model.base_model_prefix not in model._modules:
        raise UnsupportedModelError(
            f"{name} has no language-model head on a backbone; pass a model made by AutoModelForCausalLM"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} carries a recurrent state ({_find(backbone, _has_state)}) that is not K and V, so chunks cannot "
            "carry it"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} computes attention in its own code ({_find(backbone, _is_attention)}) instead of calling "
            "transformers' attention interface; oomb cannot reach its K and V"
        )
    if any(_is_bidirectional(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} attends in both directions ({_find(backbone, _is_bidirectional)}); only causal decoders can be "
            "trained (some encoders become one by config.is_decoder=True)"
        )
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no position_ids, so a chunk cannot be placed in its sequence")
    if any(_counts_positions_itself(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} numbers positions by where padding is, so a chunk cannot be placed in its sequence"
        )
    if (getattr(model, "tp_size", None) or 1) > 1 or any(_is_distributed(p) for p in model.parameters()):
        raise UnsupportedModelError(
            f"{name} has parameters that are split over processes (DTensor: tp_plan, tensor parallelism, fully_shard), "
            "whose gradients the engine would not reduce: load it without tp_plan and train in one process"
        )
    if not allow_meta and any(p.is_meta for p in model.parameters()):
        raise UnsupportedModelError(f"{name} has parameters on the meta device; load its weights first")


def _check_peft(config: Any) -> None:
    kind = getattr(config, "peft_type", None)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(f"PEFT's {kind} adds tokens that are not in input_ids; use LoRA or the like")
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            "PEFT's aLoRA looks for tokens in the whole sequence, which a chunk is not; use LoRA"
        )
    if str(getattr(kind, "value", kind)) == "ADALORA":
        raise UnsupportedModelError("PEFT's AdaLoRA adds a term to the model's own loss, which is not used; use LoRA")


def check_attention_dropout(backbone: nn.Module) -> None:
    """Attention kernels do not replay it."""
    for name, module in backbone.named_modules():
        if module.training and hasattr(module, "layer_idx"):
            for field in ("attention_dropout", "attn_dropout"):
                p = getattr(module, field, 0.0)
                p = p.p if isinstance(p, nn.Dropout) else p
                if isinstance(p, float) and p > 0:
                    raise ValueError(attention_dropout_text(name, p))


def attention_dropout_text(name: str, p: float) -> str:
    return (
        f"{name} has attention dropout {p}, which attention kernels do not replay: load the model with "
        "attention_dropout=0 (GPT-2 calls it attn_pdrop), or train in eval mode; other dropouts are supported"
    )


def check_every_layer_attended(
    model: PreTrainedModel, layers: nn.ModuleList, windows: dict[int, int | None], total_length: int
) -> None:
    """Raises if layers have not attended in a forward, or if none has asked for the window that the config speaks of.
    `windows` are what the layers that attended asked for."""
    name = type(model).__name__
    for index, layer in enumerate(layers):
        if index not in windows:
            raise UnsupportedModelError(
                f"layer {index} of {name} ({type(layer).__name__}) did not call attention: what it carries from token "
                "to token is not K and V, so chunks cannot stand for it"
            )
    window = _window(model.config.get_text_config(decoder=True))
    if window is not None and window < total_length and not any(windows.values()):
        raise UnsupportedModelError(
            f"{name} has a sliding window of {window}, but its layers do not pass it on; use sequences of at most "
            f"{window} tokens, or set config.sliding_window = None if the model was trained without"
        )


def _window(config: Any) -> int | None:
    """The sliding window that a config asks for. Some keep one, or a 0, beside a word that says not to use it."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_used = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return window if isinstance(window, int) and window and is_used else None


def _is_distributed(parameter: nn.Parameter) -> bool:
    # Not by import: where it has not been imported, no parameter is one.
    return "DTensor" in (kind.__name__ for kind in type(parameter).__mro__)


def _find(backbone: nn.Module, test: Callable[[nn.Module], bool]) -> str:
    for name, module in backbone.named_modules():
        if test(module):
            return f"{type(module).__name__} at {name}"
    return type(backbone).__name__


def _has_state(module: nn.Module) -> bool:
    return any(hasattr(module, mark) for mark in ("conv1d", "A_log", "ssm_state_size"))


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _is_bidirectional(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False


def _counts_positions_itself(module: nn.Module) -> bool:
    return getattr(getattr(module, "position_embeddings", None), "padding_idx", None) is not None
