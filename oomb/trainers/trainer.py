"""Provide `oomb.Trainer`: `transformers.Trainer` with the engine in place of the model's forward.

`Trainer` computes losses. Its base classes do the rest: `ResumableTrainer` checkpoints and resuming, `FiniteSteps` the
checks for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from oomb.config import Config
from oomb.distributed.mesh import init_mesh
from oomb.distributed.topology import Topology
from oomb.engine.engine import Engine
from oomb.engine.optim import OffloadedAdamW
from oomb.models.checks import unwrap
from oomb.models.hooks import is_checkpointing, is_running, set_checkpointing
from oomb.trainers.arguments import (
    check_arguments,
    check_inputs,
    layout_of,
    offloaded_optimizer,
    warn_checkpointing_off,
    with_labels,
    without_checkpointing,
)
from oomb.trainers.resume import ResumableTrainer
from oomb.trainers.shared_examples import share_examples

OWN_LOSS = "Compute the loss in compute_loss from self.engine.loss or self.engine.logprobs"


class Trainer(ResumableTrainer):
    """A `transformers.Trainer` for sequences whose activations do not fit in memory.

    Under `torchrun`, ranks train on different examples, or share them, and average their gradients once per step.

    Training and evaluation go through the engine, which never holds the logits of a whole sequence. `compute_metrics`
    therefore gets per-token log-probabilities [B, T] as `predictions` (see `Engine.logprobs`), not logits. Batches
    without `labels` are trained on their `input_ids`.

    Args:
        model: a causal LM of transformers, with or without PEFT adapters. Unsupported models raise
            `oomb.UnsupportedModelError`.
        args: `TrainingArguments`. What the engine cannot honor, such as `label_smoothing_factor`, raises ValueError.
        positional: passed to `transformers.Trainer`, like all other options.
        engine_config: settings of the engine. Defaults to `oomb.Config()`.
        optimizer: "offloaded_adamw", "offloaded_adamw_bf16" or "offloaded_adamw_8bit": `oomb.OffloadedAdamW`, with its
            states in host memory in 32, 16 or 8 bits. `args.optim_args` has its other settings, as in
            "master_weights=true". Defaults to what `args.optim` says.
        max_skipped_steps: how many steps with a NaN or infinite loss or gradient to skip before training stops with
            `oomb.NonFiniteError`. None turns the check off. Defaults to 0.
        parallel: how ranks share the work, such as "sp=4": four ranks share each example, and groups of four train on
            different ones. Defaults to "auto": all ranks train on different examples.

    Examples:
        >>> import oomb, tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> trainer = oomb.Trainer(
        ...     model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)),
        ...     args=TrainingArguments(tempfile.mkdtemp(), max_steps=2, report_to="none", use_cpu=True),
        ...     train_dataset=[{"input_ids": torch.randint(64, (1000,))} for _ in range(16)],
        ...     engine_config=oomb.Config(chunk_size=128),
        ... )
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {...}
        2
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
        max_skipped_steps: int | None = 0,
        parallel: str = "auto",
        **options: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        offloaded = None if optimizer is None else offloaded_optimizer(optimizer, args)
        args = without_checkpointing(args)
        self.engine_config = engine_config
        self._has_states_on_host = False
        self._topology = Topology.parse(parallel)
        self._topology.num_replicas(args.world_size)  # raises if it does not fit
        self._mesh: DeviceMesh | None = None
        if args.world_size > 1:
            self._mesh = init_mesh(args.device.type, sp=self._topology.sp)
        self._engine: Engine | None = None
        self._engine_of: tuple[nn.Module, torch.device] | None = None
        super().__init__(model, args, *positional, max_skipped_steps=max_skipped_steps, **options)
        if offloaded is not None:
            if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
                raise ValueError(f"got both optimizer={optimizer!r} and an optimizer or optimizer class: pass only one")
            self.optimizer_cls_and_kwargs = offloaded
        kind = type(self.optimizer) if self.optimizer_cls_and_kwargs is None else self.optimizer_cls_and_kwargs[0]
        self._has_states_on_host = isinstance(kind, type) and issubclass(kind, OffloadedAdamW)
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func needs logits, which the engine never holds: subclass oomb.Trainer and compute the "
                "loss in compute_loss from self.engine.logprobs(input_ids)"
            )
        # The engine divides by the number of predicted tokens itself, whatever the model's own loss does.
        self.model_accepts_loss_kwargs = True
        # transformers' own flag: its count of labels leaves out the first of each row, which nothing predicts.
        self._loss_shifts_labels = True
        # Creates the engine: an unsupported model raises before any data is read.
        self.engine.expect_optimizer(on_host=self._has_states_on_host)

    def create_optimizer(self, *positional: Any, **options: Any) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*positional, **options)
        if is_new and isinstance(optimizer, OffloadedAdamW):
            # Now, before the engine plans with the host memory that is free.
            optimizer.reserve()
        return optimizer

    @property
    def engine(self) -> Engine:
        """The engine of the current model. With `model_init`, each run has a new model and so a new engine."""
        model_and_device = self.model, next(self.model.parameters()).device
        if self._engine is None or self._engine_of != model_and_device:
            if is_checkpointing(self.model):
                set_checkpointing(unwrap(self.model), on=False)
                warn_checkpointing_off("The model has gradient checkpointing enabled")
            self._engine = Engine(self.model, self.engine_config, mesh=self._mesh)
            self._engine.expect_optimizer(on_host=self._has_states_on_host)
            self._engine_of = model_and_device
        return self._engine

    def training_step(self, *positional: Any, **options: Any) -> Tensor:
        self.engine.replicas.last_share = None
        accumulates = nullcontext() if self.accelerator.sync_gradients else self.engine.no_sync()
        with _engine_alone_trains(self.engine.model.backbone), accumulates:
            return super().training_step(*positional, **options)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The engine averages gradients. DistributedDataParallel would keep a second copy of them, and its forward is
        # never called.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        if self._topology.sp > 1:
            share_examples(self.accelerator, self._topology.sp)
            # The trainer has taken this function already.
            self.gather_function = partial(
                self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) // self._topology.sp

    @property
    def ranks_per_example(self) -> int:
        return self._topology.sp

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._topology.sp

    def _is_own_loss_finite(self, loss: Tensor) -> bool:
        share = self.engine.replicas.last_share
        return super()._is_own_loss_finite(loss if share is None else share)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = self._batch_loss(inputs, num_items_in_batch)
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def _batch_loss(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> Tensor:
        """Return the loss of a batch. The TRL trainers override this to let TRL compute it."""
        check_inputs(inputs)
        if self.engine.replicas.is_alone:
            num_items = None  # it counts the tokens of all ranks
        # transformers applies mixed precision (bf16, fp16) in a wrapped `forward`, which the engine never calls.
        with self.accelerator.autocast():
            return self.engine.loss(inputs["input_ids"], inputs.get("labels"), num_items=num_items, **layout_of(inputs))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # transformers gathers the losses of all ranks.
        with self.engine.replicas.alone():
            loss, labels = self._eval_loss(model, inputs, prediction_loss_only, ignore_keys)
            if prediction_loss_only:
                return loss, None, None
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad(), self.accelerator.autocast():
                logprobs = self.engine.logprobs(inputs["input_ids"], **layout_of(inputs))
        return loss, logprobs, labels

    def _eval_loss(
        self, model: nn.Module, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss and the labels of an evaluation batch."""
        loss, _, labels = super().prediction_step(model, with_labels(inputs), loss_only, ignore_keys)
        return loss, labels

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        # transformers counts the labels of all accumulated batches in here.
        batches, num_items = super().get_batch_samples(map(with_labels, epoch_iterator), num_batches, device)
        # It counts the tokens of an example once per rank.
        return batches, None if num_items is None else num_items // self._topology.sp


@contextmanager
def _engine_alone_trains(backbone: nn.Module) -> Iterator[None]:
    """Raise if a training step calls the model itself, or ends without any gradient pass of an engine.

    The hook is on the backbone because every call of the model ends there. PEFT calls `forward` of the model it wraps
    directly, which skips that model's hooks.
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
                f"the training step calls the model itself{f' on a batch of shape {shapes[0]}' if shapes else ''}, "
                "which would keep the activations of the whole sequence in memory. "
                f"{OWN_LOSS}. To score or generate, call the model under torch.no_grad()"
            )

    handle = backbone.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not has_engine_run:
        raise RuntimeError(f"the loss of this training step does not come from the engine. {OWN_LOSS}")
