"""Reject models that chunk recurrence cannot train exactly, before any work is done."""

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
    """A model that chunk recurrence cannot train exactly.

    Only K and V of causal attention carry over between chunks, so a model that carries anything else from token to
    token is rejected instead of being trained with wrong gradients. The message names the class at fault and what to
    do. docs/limits.md lists all reasons.

    Examples:
        >>> import oomb, torch
        >>> try:
        ...     oomb.Engine(torch.nn.Linear(2, 2))
        ... except oomb.UnsupportedModelError as error:
        ...     print(error)
        Linear is not a Hugging Face model: pass one loaded by AutoModelForCausalLM
    """


def unwrap(model: nn.Module, *, check: bool = True, allow_meta: bool = False) -> PreTrainedModel:
    """Return the Hugging Face model inside of wrappers, or raise if it cannot be trained.

    Args:
        model: A Hugging Face causal LM, possibly wrapped by PEFT, `torch.compile` or a data-parallel class.
        check: Raise `UnsupportedModelError` if the model cannot be trained.
        allow_meta: Accept parameters on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"model is a {type(model).__name__}: pass a Hugging Face causal LM")
    if check and type(model).__name__ in DISTRIBUTED and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedModelError(
            f"the model is wrapped in {type(model).__name__}, whose forward the engine never calls, so the "
            f"{dist.get_world_size()} processes would train apart: pass the model itself, with mesh=oomb.init_mesh()"
        )
    while hasattr(model, "_orig_mod") or (hasattr(model, "module") and isinstance(model.module, nn.Module)):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    if hasattr(model, "get_base_model"):
        if check:
            _check_peft(getattr(model, "active_peft_config", None))
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Hugging Face model: pass one loaded by AutoModelForCausalLM"
        )
    if check:
        check_supported(model, allow_meta=allow_meta)
    return model


def check_supported(model: PreTrainedModel, *, allow_meta: bool = False) -> None:
    """Raise `UnsupportedModelError` if the model's config, modules or parameters rule out exact training."""
    _check_architecture(model)
    _check_positions(model)
    _check_parameters(model, allow_meta)


def _check_architecture(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of {name} is of type {kind!r}, but only K and V of causal attention carry over "
                "between chunks: use a model whose layers are all full or sliding-window attention"
            )
    if model.config.is_encoder_decoder or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not a causal decoder: use a decoder-only model")
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} adds a load-balancing loss over the whole sequence (config.output_router_logits=True), which "
            "cannot be computed chunk by chunk: set it to False"
        )
    backbone = getattr(model, model.base_model_prefix, None)
    if model.get_output_embeddings() is None or backbone is None or model.base_model_prefix not in model._modules:
        raise UnsupportedModelError(
            f"{name} has no language-model head on top of a backbone: pass a model loaded by AutoModelForCausalLM"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} carries a recurrent state ({_find(backbone, _has_state)}), but only K and V carry over between "
            "chunks: use a model whose layers are all attention"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} computes attention in its own code ({_find(backbone, _is_attention)}), so its K and V are out of "
            "reach: use a model that calls transformers' attention interface"
        )
    if any(_is_bidirectional(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} attends in both directions ({_find(backbone, _is_bidirectional)}), but a chunk cannot see later "
            "ones: use a causal decoder (some encoders become one with config.is_decoder=True)"
        )


def _check_positions(model: PreTrainedModel) -> None:
    name, backbone = type(model).__name__, getattr(model, model.base_model_prefix)
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, so a chunk cannot be told its place in the sequence: use a model whose "
            "backbone takes them"
        )
    if any(_counts_positions_itself(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} derives positions from padding, so a chunk cannot be told its place in the sequence: use a model "
            "that follows position_ids"
        )


def _check_parameters(model: PreTrainedModel, allow_meta: bool) -> None:
    name = type(model).__name__
    if (getattr(model, "tp_size", None) or 1) > 1 or any(_is_distributed(p) for p in model.parameters()):
        raise UnsupportedModelError(
            f"{name} has parameters sharded across processes (DTensor, from tp_plan or fully_shard), whose gradients "
            "the engine does not reduce: load it without tp_plan and train in one process"
        )
    if not allow_meta and any(p.is_meta for p in model.parameters()):
        raise UnsupportedModelError(f"{name} has parameters on the meta device: load its weights first")


def _check_peft(config: Any) -> None:
    kind = getattr(config, "peft_type", None)
    kind = str(getattr(kind, "value", kind))
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(f"PEFT's {kind} adds tokens that are not in input_ids: use LoRA")
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            "PEFT's aLoRA searches the whole sequence for its invocation tokens, but the model sees one chunk at a "
            "time: use LoRA"
        )
    if kind == "ADALORA":
        raise UnsupportedModelError(
            "PEFT's AdaLoRA adds a term to the model's own loss, which the engine does not compute: use LoRA"
        )


def check_attention_dropout(backbone: nn.Module) -> None:
    """Raise ValueError if an attention layer in training mode has dropout, which kernels cannot replay."""
    for name, module in backbone.named_modules():
        if module.training and hasattr(module, "layer_idx"):
            for field in ("attention_dropout", "attn_dropout"):
                p = getattr(module, field, 0.0)
                p = p.p if isinstance(p, nn.Dropout) else p
                if isinstance(p, float) and p > 0:
                    raise ValueError(attention_dropout_text(name, p))


def attention_dropout_text(name: str, p: float) -> str:
    """Return the error message for an attention layer with dropout."""
    return (
        f"{name} has attention dropout {p}, which attention kernels cannot replay in the gradient pass: load the model "
        "with attention_dropout=0 (GPT-2: attn_pdrop=0) or train in eval mode. Other dropout is supported"
    )


def check_every_layer_attended(
    model: PreTrainedModel, layers: nn.ModuleList, windows: dict[int, int | None], total_length: int
) -> None:
    """Raise `UnsupportedModelError` if a forward did not use attention as the config says.

    Args:
        model: The model that ran.
        layers: Its decoder layers.
        windows: Sliding window, or None, that each layer passed to attention.
        total_length: Length of the whole sequence.
    """
    name = type(model).__name__
    for index, layer in enumerate(layers):
        if index not in windows:
            raise UnsupportedModelError(
                f"layer {index} of {name} ({type(layer).__name__}) did not call attention, but only K and V carry over "
                "between chunks: use a model whose layers are all attention"
            )
    window = _configured_window(model.config.get_text_config(decoder=True))
    if window is not None and window < total_length and not any(windows.values()):
        raise UnsupportedModelError(
            f"{name} has a sliding window of {window}, but its layers do not pass it to attention: train on at most "
            f"{window} tokens, or set config.sliding_window=None if the model was trained without a window"
        )


def _configured_window(config: Any) -> int | None:
    """Return the sliding window that a config turns on. Some configs keep one, or a 0, that is switched off."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_used = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return window if isinstance(window, int) and window and is_used else None


def _is_distributed(parameter: nn.Parameter) -> bool:
    # By name: if DTensor has not been imported, no parameter is one, and importing it is slow.
    return "DTensor" in (kind.__name__ for kind in type(parameter).__mro__)


def _find(backbone: nn.Module, test: Callable[[nn.Module], bool]) -> str:
    """Return class and path of the first module that passes the test."""
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
