"""`transformers.Trainer` with the engine in place of the model's forward: the same arguments, much longer sequences."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from oomb.config import OFFLOADED_STATES, Config, parse_optim_args
from oomb.engine.engine import Engine
from oomb.engine.optim import OffloadedAdamW
from oomb.models.causal_lm import is_checkpointing, is_running, switch_checkpointing
from oomb.models.checks import unwrap
from oomb.ops.logprob import IGNORED
from oomb.trainers.resume import AtomicCheckpoints

INPUTS = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
FLASH_INPUTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""What collators add for flash kernels; position_ids say the same."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Releases of transformers have the second name alone, or both for the same thing."""
NO_CHECKPOINTING = dict.fromkeys(CHECKPOINTING, False) | {f"{name}_kwargs": None for name in CHECKPOINTING}
OWN_LOSS = "Build the loss in compute_loss from self.engine.loss or self.engine.logprobs"


class Trainer(AtomicCheckpoints):
    """Use it as `transformers.Trainer`; `engine_config`, `optimizer` and `max_skipped_steps` are additional arguments.

    Training and evaluation both go through the engine, so neither ever holds the logits of a whole sequence.
    Where `compute_metrics` is given, its `predictions` are therefore per-token log-probabilities [B, T]
    (see `Engine.logprobs`) and not logits. Batches without `labels` are trained on their `input_ids`.

    `optimizer` is "offloaded_adamw", with its states in host memory (`oomb.OffloadedAdamW`), or the same with states
    in 16 or 8 bits, "offloaded_adamw_bf16" or "offloaded_adamw_8bit". `optim_args` of `args` may say more of it, as in
    "master_weights=true". The engine then leaves no room for states on the GPU. By default `optim` of `args` decides.

    Training stops with `oomb.NonFiniteError` before a NaN or an infinite loss or gradient reaches the weights.
    `max_skipped_steps` is how many such steps are skipped before that; None turns the check off.
    """

    optimizer: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        engine_config: Config | None = None,
        optimizer: str | None = None,
        **options: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        _refuse_arguments(args)
        offloaded = None if optimizer is None else _offloaded(optimizer, args)
        args = _taken_over(args)
        self.engine_config = engine_config
        self._has_states_on_host = False
        self._engine: Engine | None = None
        self._engine_of: tuple[nn.Module, torch.device] | None = None
        super().__init__(model, args, *positional, **options)
        if offloaded is not None:
            if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
                raise ValueError(
                    f"optimizer={optimizer!r} beside an optimizer that is passed as well: leave one of them out"
                )
            self.optimizer_cls_and_kwargs = offloaded
        kind = type(self.optimizer) if self.optimizer_cls_and_kwargs is None else self.optimizer_cls_and_kwargs[0]
        self._has_states_on_host = isinstance(kind, type) and issubclass(kind, OffloadedAdamW)
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func takes logits, which the engine never holds: subclass oomb.Trainer and build the "
                "loss in compute_loss from self.engine.logprobs(input_ids)"
            )
        # The engine divides by the number of predicted tokens itself, whatever the model's own loss would do.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        # An unsupported model is refused here, before any data is read.
        self.engine.budget.has_states_on_host = self._has_states_on_host

    def create_optimizer(self, *positional: Any, **options: Any) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*positional, **options)
        if is_new and isinstance(optimizer, OffloadedAdamW):
            # Now, before the engine's pages take their share of host memory.
            optimizer.reserve()
        return optimizer

    @property
    def engine(self) -> Engine:
        """The engine of the current model. `model_init` makes a new model for each run, and so a new engine."""
        model_and_device = self.model, next(self.model.parameters()).device
        if self._engine is None or self._engine_of != model_and_device:
            if is_checkpointing(self.model):
                switch_checkpointing(unwrap(self.model), on=False)
                _warn_of_checkpointing("The model has gradient checkpointing enabled")
            self._engine = Engine(self.model, self.engine_config)
            self._engine.budget.has_states_on_host = self._has_states_on_host
            self._engine_of = model_and_device
        return self._engine

    def training_step(self, *positional: Any, **options: Any) -> Tensor:
        with _engine_alone_trains(self.engine.model.backbone):
            return super().training_step(*positional, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        _refuse_inputs(inputs)
        # Mixed precision (bf16=True, fp16=True) lives in the wrapped `forward`, which the engine does not call.
        with self.accelerator.autocast():
            loss = self.engine.loss(
                inputs["input_ids"],
                inputs.get("labels"),
                num_items=num_items_in_batch,
                **layout_of(inputs),
            )
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = with_labels(inputs)
        loss, _, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if prediction_loss_only:
            return loss, None, None
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.accelerator.autocast():
            logprobs = self.engine.logprobs(inputs["input_ids"], **layout_of(inputs))
        return loss, logprobs, labels

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        # Labels must be there before the tokens of an accumulated batch are counted.
        return super().get_batch_samples(map(with_labels, epoch_iterator), num_batches, device)


@contextmanager
def _engine_alone_trains(backbone: nn.Module) -> Iterator[None]:
    """Raise where a training step calls the model itself, before the plain forward takes its memory, and at the end of
    a step in which no engine has computed the model with a graph.

    The hook is on the backbone because every way into the model leads there. PEFT calls `forward` of the model inside
    of it directly, so hooks of that model do not run.
    """
    has_engine_run = False

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal has_engine_run
        if not torch.is_grad_enabled():
            return
        if is_running():
            has_engine_run = True
        elif module.training:
            shapes = [tuple(value.shape[:2]) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            raise RuntimeError(
                f"the training step calls the model itself{f' on a batch of shape {shapes[0]}' if shapes else ''}: it "
                "would train through the plain forward, with the activations of the whole sequence in memory. "
                f"{OWN_LOSS}. To score or generate, call the model under torch.no_grad()"
            )

    handle = backbone.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not has_engine_run:
        raise RuntimeError(f"the loss of this training step does not come from the engine. {OWN_LOSS}")


def _offloaded(name: str, args: TrainingArguments) -> tuple[type[OffloadedAdamW], dict[str, Any]]:
    """The class and the settings of the optimizer that is called so. Refuses names that are not known and settings that
    contradict it."""
    if name not in OFFLOADED_STATES:
        raise ValueError(f"optimizer is {name!r}; use one of {', '.join(OFFLOADED_STATES)}, or None for args.optim")
    optim = getattr(args.optim, "value", args.optim)
    if not optim.startswith("adamw"):
        raise ValueError(f"optimizer={name!r} and optim={optim!r} are two choices: leave one of them out")
    try:
        options = parse_optim_args(args.optim_args)
    except ValueError as error:
        raise ValueError(f"of optim_args, {error}") from None
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
        labels = inputs["input_ids"] if mask is None else inputs["input_ids"].masked_fill(mask == 0, IGNORED)
    if mask is not None and mask.shape == labels.shape:
        is_first = (mask[..., 1:] != mask[..., :-1]) & (mask > 1).any()
        labels = torch.cat([labels[..., :1], labels[..., 1:].masked_fill(is_first, IGNORED)], dim=-1)
    return {**inputs, "labels": labels}


def unknown_inputs(inputs: dict[str, Any]) -> list[str]:
    """What of a batch the engine would ignore."""
    known = INPUTS | FLASH_INPUTS if inputs.get("position_ids") is not None else INPUTS
    return [name for name, value in inputs.items() if name not in known and value is not None]


def _refuse_inputs(inputs: dict[str, Any]) -> None:
    if "input_ids" not in inputs:
        raise ValueError(
            f"the batch has no input_ids, only {', '.join(inputs) or 'nothing'}; the engine reads token ids"
        )
    if unknown := unknown_inputs(inputs):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which the engine does not read: let the data collator return only "
            f"{', '.join(sorted(INPUTS))}"
        )


def _refuse_arguments(args: TrainingArguments) -> None:
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


def _taken_over(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments with everything switched off that the engine does itself."""
    if asks_for_checkpointing(args):
        _warn_of_checkpointing("TrainingArguments asks for gradient checkpointing (activation checkpointing)")
    # transformers would split every batch over the GPUs with DataParallel, around a forward that is never called.
    return with_settings(args, **NO_CHECKPOINTING, _n_gpu=min(args.n_gpu, 1))


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


def _warn_of_checkpointing(what: str) -> None:
    warnings.warn(
        f"{what}. It is switched off: the engine recomputes chunk by chunk and needs no more. To recompute each layer "
        "within a chunk as well, pass engine_config=oomb.Config(checkpoint_layers=True).",
        # The line that makes the trainer.
        stacklevel=4,
    )
