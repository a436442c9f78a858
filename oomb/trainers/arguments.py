"""Translate training arguments and batch fields for the engine, and reject those that it cannot honor."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from transformers import TrainingArguments

from oomb.config import OFFLOADED_STATES, parse_optim_args
from oomb.engine.optim import OffloadedAdamW
from oomb.ops.logprob import IGNORE_INDEX

INPUTS = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
"""The batch fields that the engine reads."""
FLASH_INPUTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""What collators add for flash attention. `position_ids` carry the same information."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Older releases of transformers have only the second name, newer ones both for the same switch."""
NO_CHECKPOINTING = dict.fromkeys(CHECKPOINTING, False) | {f"{name}_kwargs": None for name in CHECKPOINTING}


def offloaded_optimizer(name: str, args: TrainingArguments) -> tuple[type[OffloadedAdamW], dict[str, Any]]:
    """Return the class and the keyword arguments of an offloaded optimizer by name. Raises ValueError if the name is
    unknown or contradicts the training arguments."""
    if name not in OFFLOADED_STATES:
        raise ValueError(f"optimizer is {name!r}; use one of {', '.join(OFFLOADED_STATES)}, or None for args.optim")
    optim = getattr(args.optim, "value", args.optim)
    if not optim.startswith("adamw"):
        raise ValueError(f"optimizer={name!r} contradicts optim={optim!r}: leave one of them out")
    options = parse_optim_args(args.optim_args)
    state_dtype = OFFLOADED_STATES[name]
    if name != "offloaded_adamw" and options.get("state_dtype", state_dtype) != state_dtype:
        raise ValueError(
            f"optimizer={name!r} contradicts state_dtype={options['state_dtype']} in optim_args: leave one of them out"
        )
    rates = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return OffloadedAdamW, {**rates, "state_dtype": state_dtype, **options}


def layout_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch that tell where its documents begin and end, as `Engine.loss` takes them."""
    return {name: inputs.get(name) for name in ("attention_mask", "position_ids")}


def with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with labels: its own, or its `input_ids` without the padding.

    If the mask numbers documents, the first token of each document gets the label -100: nothing predicts it, but
    transformers would count it. Does not sync with the device.
    """
    if "input_ids" not in inputs:
        return inputs
    labels, mask = inputs.get("labels"), inputs.get("attention_mask")
    if labels is None:
        labels = inputs["input_ids"] if mask is None else inputs["input_ids"].masked_fill(mask == 0, IGNORE_INDEX)
    if mask is not None and mask.shape == labels.shape:
        is_first = (mask[..., 1:] != mask[..., :-1]) & (mask > 1).any()
        labels = torch.cat([labels[..., :1], labels[..., 1:].masked_fill(is_first, IGNORE_INDEX)], dim=-1)
    return {**inputs, "labels": labels}


def unknown_inputs(inputs: dict[str, Any]) -> list[str]:
    """Return the fields of a batch that the engine would ignore."""
    known = INPUTS | FLASH_INPUTS if inputs.get("position_ids") is not None else INPUTS
    return [name for name, value in inputs.items() if name not in known and value is not None]


def check_inputs(inputs: dict[str, Any]) -> None:
    """Raise ValueError if the batch lacks token ids or has fields that the engine would ignore."""
    if "input_ids" not in inputs:
        raise ValueError(
            f"the batch has no input_ids, only {', '.join(inputs) or 'nothing'}: let the data collator return token ids"
        )
    if unknown := unknown_inputs(inputs):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which the engine does not read: let the data collator return only "
            f"{', '.join(sorted(INPUTS))}"
        )


def check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for arguments that the engine cannot honor, with what to do instead."""
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices is False, but the engine divides the loss by the tokens of all ranks: leave "
            "it at True"
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("oomb.Trainer does not work with fsdp or deepspeed: leave them out of the TrainingArguments")
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}, but label smoothing needs the logits of the "
            "whole sequence, which the engine never holds: set it to 0"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the input length, which would be that of a chunk: set it to None"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile compiles the whole model, which the engine never calls: leave it out; "
            'oomb.Config(fuse="compile") compiles each layer'
        )


def without_checkpointing(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments without gradient checkpointing: the engine recomputes by itself. Warns if it was on."""
    if asks_for_checkpointing(args):
        warn_checkpointing_off("TrainingArguments turn on gradient checkpointing (activation checkpointing)")
    # With several GPUs, transformers would wrap the model in DataParallel, whose forward is never called.
    return with_settings(args, **NO_CHECKPOINTING, _n_gpu=min(args.n_gpu, 1))


def without_offloading(args: Any) -> Any:
    """Return TRL's arguments with gradient checkpointing and activation offloading off. Warns only about offloading:
    checkpointing is on by default in TRL, so the user did not ask for it."""
    if getattr(args, "activation_offloading", False):
        warnings.warn(
            "activation_offloading=True has no effect: the engine keeps the activations of one chunk. To move keys and "
            "values to host memory, set gpu_memory in engine_config=oomb.Config(...).",
            stacklevel=4,
        )
    return with_settings(args, **NO_CHECKPOINTING, activation_offloading=False)


def asks_for_checkpointing(args: Any) -> bool:
    """Return whether training arguments turn on gradient checkpointing."""
    return any(getattr(args, name, False) for name in CHECKPOINTING)


def with_settings(args: Any, **settings: Any) -> Any:
    """Return training arguments with these settings, as far as `args` has them.

    Does not change the caller's object: if a setting differs, this is a shallow copy, which keeps the device setup that
    is cached on the object.
    """
    changed = {name: value for name, value in settings.items() if getattr(args, name, value) != value}
    if changed:
        args = copy.copy(args)
        for name, value in changed.items():
            setattr(args, name, value)
    return args


def warn_checkpointing_off(what: str) -> None:
    """Warn that gradient checkpointing is switched off. `what` says where it was on."""
    warnings.warn(
        f"{what}. It is switched off: the engine recomputes each chunk by itself. To recompute each layer within a "
        "chunk as well, pass engine_config=oomb.Config(checkpoint_layers=True).",
        # Points at the line that creates the trainer.
        stacklevel=4,
    )
