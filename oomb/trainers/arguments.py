"""Which training arguments and batch fields the engine takes over, and which it rejects."""

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


FLASH_INPUTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""What collators add for flash kernels; position_ids say the same."""


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Releases of transformers have the second name alone, or both for the same thing."""


NO_CHECKPOINTING = dict.fromkeys(CHECKPOINTING, False) | {f"{name}_kwargs": None for name in CHECKPOINTING}


def offloaded_optimizer(name: str, args: TrainingArguments) -> tuple[type[OffloadedAdamW], dict[str, Any]]:
    """The class and the settings of the optimizer that is called so. Refuses names that are not known and settings that
    contradict it."""
    if name not in OFFLOADED_STATES:
        raise ValueError(f"optimizer is {name!r}; use one of {', '.join(OFFLOADED_STATES)}, or None for args.optim")
    optim = getattr(args.optim, "value", args.optim)
    if not optim.startswith("adamw"):
        raise ValueError(f"optimizer={name!r} and optim={optim!r} are two choices: leave one of them out")
    options = parse_optim_args(args.optim_args)
    state_dtype = OFFLOADED_STATES[name]
    if name != "offloaded_adamw" and options.get("state_dtype", state_dtype) != state_dtype:
        raise ValueError(
            f"optimizer={name!r} and state_dtype={options['state_dtype']} of optim_args are two choices: leave one of "
            "them out"
        )
    rates = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return OffloadedAdamW, {**rates, "state_dtype": state_dtype, **options}


def layout_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Where documents begin and end in the batch, as `Engine.loss` takes it."""
    return {name: inputs.get(name) for name in ("attention_mask", "position_ids")}


def with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with labels: its own, or its `input_ids` less the padding. Those of documents' first tokens are
    -100 where the mask numbers documents: nothing predicts them, and transformers would count them. Does not wait for
    the device."""
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
    """What of a batch the engine would ignore."""
    known = INPUTS | FLASH_INPUTS if inputs.get("position_ids") is not None else INPUTS
    return [name for name, value in inputs.items() if name not in known and value is not None]


def check_inputs(inputs: dict[str, Any]) -> None:
    if "input_ids" not in inputs:
        raise ValueError(
            f"the batch has no input_ids, only {', '.join(inputs) or 'nothing'}; the engine reads token ids"
        )
    if unknown := unknown_inputs(inputs):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which the engine does not read: let the data collator return only "
            f"{', '.join(sorted(INPUTS))}"
        )


def check_arguments(args: TrainingArguments) -> None:
    """What the engine could not honour is refused, with what to do instead: silence would train another model."""
    if args.world_size > 1:
        raise ValueError(
            f"oomb.Trainer runs in one process and was started in {args.world_size}: run it with python, not torchrun"
        )
    if args.fsdp or args.deepspeed:
        raise ValueError("oomb.Trainer does not work with fsdp or deepspeed: leave them out of the TrainingArguments")
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}; it takes logits, which the engine never holds: "
            "set it to 0"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the length of the input, which is a chunk here: set it to None"
        )
    if args.torch_compile:
        raise ValueError(
            "torch_compile compiles the whole model, which the engine does not call: leave it out; "
            'oomb.Config(fuse="compile") compiles layer by layer'
        )


def without_checkpointing(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments with everything switched off that the engine does itself."""
    if asks_for_checkpointing(args):
        warn_checkpointing_off("TrainingArguments asks for gradient checkpointing (activation checkpointing)")
    # transformers would split every batch over the GPUs with DataParallel, around a forward that is never called.
    return with_settings(args, **NO_CHECKPOINTING, _n_gpu=min(args.n_gpu, 1))


def without_offloading(args: Any) -> Any:
    """Return the arguments of a TRL trainer with everything switched off that the engine does itself. TRL's configs ask
    for gradient checkpointing by default, so switching that off is no news."""
    if getattr(args, "activation_offloading", False):
        warnings.warn(
            "activation_offloading=True is switched off: the engine holds the activations of one chunk. To move K and "
            "V to the host, set gpu_memory in engine_config=oomb.Config(...).",
            stacklevel=4,
        )
    return with_settings(args, **NO_CHECKPOINTING, activation_offloading=False)


def asks_for_checkpointing(args: Any) -> bool:
    return any(getattr(args, name, False) for name in CHECKPOINTING)


def with_settings(args: Any, **settings: Any) -> Any:
    """Return training arguments with these settings, without those of them that `args` does not know.

    The caller's object stays as it is: where a setting differs, this is a shallow copy, which keeps the device setup
    that is cached on the object. Otherwise it is the same object.
    """
    changed = {name: value for name, value in settings.items() if getattr(args, name, value) != value}
    if changed:
        args = copy.copy(args)
        for name, value in changed.items():
            setattr(args, name, value)
    return args


def warn_checkpointing_off(what: str) -> None:
    warnings.warn(
        f"{what}. It is switched off: the engine recomputes chunk by chunk and needs no more. To recompute each layer "
        "within a chunk as well, pass engine_config=oomb.Config(checkpoint_layers=True).",
        # The line that makes the trainer.
        stacklevel=4,
    )
