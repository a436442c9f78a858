"""Run TRL's trainers on the engine: what `oomb.SFTTrainer` and `oomb.DPOTrainer` share.

TRL asks a model for the log-probability of each label and computes its losses and metrics from those. `EngineForward`
answers in place of the model, so TRL's own code computes every loss it has, at lengths the model could not hold.

B batch, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.engine.head import TokenHead
from oomb.models.checks import unwrap
from oomb.ops.logprob import IGNORE_INDEX
from oomb.trainers.arguments import layout_of, unknown_inputs, without_offloading
from oomb.trainers.trainer import Trainer

OLDEST = "1.15"
"""The first TRL that asks models for log-probabilities instead of logits."""


@dataclass
class FusedOutput:
    """What TRL expects of a model: values of all positions but the last, [B, T - 1], 0 where the label is ignored."""

    log_probs: Tensor
    label_mask: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None


class EngineForward:
    """A stand-in for the model that TRL calls.

    Args:
        engine: computes the log-probabilities.
        autocast: returns the context of mixed precision.
        stats: the fields of `FusedOutput` to fill in besides the log-probabilities. They have no gradient.
    """

    def __init__(
        self, engine: Engine, autocast: Callable[[], AbstractContextManager[Any]], stats: tuple[str, ...] = ()
    ) -> None:
        self.engine, self.autocast, self.stats = engine, autocast, stats

    def __call__(
        self, *, use_cache: bool | None = None, fused_lm_head: bool = False, **inputs: Tensor | None
    ) -> FusedOutput:
        _reject_call(fused_lm_head, inputs)
        # Not `engine.logprobs`: labels may differ from the ids, and the head skips tokens without a label.
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        assert input_ids is not None
        packed = self.engine.pack(input_ids, labels, **layout_of(inputs))
        # transformers applies mixed precision (bf16, fp16) in a wrapped `forward`, which the engine never calls.
        with self.autocast():
            fields = self.engine.forward(packed, TokenHead(self.engine.model, self.stats))
        counted = [(batch.targets != IGNORE_INDEX).to(self.engine.model.device) for batch in packed.batches]
        return FusedOutput(
            log_probs=packed.unpack(fields.pop("logprob"))[:, :-1],
            label_mask=packed.unpack(counted)[:, :-1],
            **{name: packed.unpack(parts)[:, :-1] for name, parts in fields.items()},
        )


class TRLTrainer(Trainer):
    """Base class of the trainers on top of TRL.

    The method resolution order of `oomb.SFTTrainer` is SFTMixin, TRLTrainer, oomb.Trainer (the loss),
    ResumableTrainer (checkpoints), FiniteSteps (NaN), trl.SFTTrainer, transformers.Trainer. TRL computes its own losses
    from batches of its own, so `super(Trainer, self)` below skips what `oomb.Trainer` overrides, and nothing else.
    """

    trl_class: type
    """TRL's trainer."""
    token_stats: tuple[str, ...] = ("entropy", "is_top1")

    def __init__(
        self,
        *given: Any,
        engine_config: Config | None = None,
        optimizer: str | None = None,
        max_skipped_steps: int | None = 0,
        parallel: str = "auto",
        **options: Any,
    ) -> None:
        named = dict(inspect.signature(self.trl_class).bind(*given, **options).arguments)
        model, args = named.pop("model"), named.pop("args", None)
        if args is None:
            args = self._default_arguments(model)
        self._check(args, named)
        if isinstance(model, nn.Module):
            # Check now, before TRL tokenizes the data. A model given by name is checked after TRL has loaded it.
            unwrap(model)
            _reject_router_loss(model, args)
        super().__init__(
            model,
            without_offloading(args),
            engine_config=engine_config,
            optimizer=optimizer,
            max_skipped_steps=max_skipped_steps,
            parallel=parallel,
            **named,
        )
        if getattr(self, "_is_vision_dataset", False):
            raise ValueError(
                "the training data has images, which the engine does not read: remove the columns image and images, or "
                f"train with trl.{self.trl_class.__name__}"
            )

    @property
    def engine(self) -> Engine:
        """The engine of the trained model."""
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(_router_loss_text(self.router_aux_loss_coef))
        return super().engine

    def _batch_loss(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> Tensor:
        forward = EngineForward(self.engine, self.accelerator.autocast, self.token_stats)
        return super(Trainer, self).compute_loss(forward, inputs, num_items_in_batch=num_items)

    def _eval_loss(
        self, model: nn.Module, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Tensor | None, Tensor | None]:
        loss, _, _ = super(Trainer, self).prediction_step(model, inputs, True, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        return loss, inputs.get("labels", inputs.get("input_ids"))

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        return super(Trainer, self).get_batch_samples(*args, **options)

    def _check(self, args: Any, named: dict[str, Any]) -> None:
        """Raise ValueError for arguments of this trainer that the engine cannot honor."""

    def _default_arguments(self, model: Any) -> Any:
        """Return the arguments that TRL would create if none are given."""
        import trl

        kind = self.trl_class.__name__.removesuffix("Trainer")
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        return getattr(trl, f"{kind}Config")(f"{name.split('/')[-1]}-{kind}")


class _KeywordOnly:
    """An adapter between `oomb.Trainer`, which passes arguments by position, and TRL's trainers, whose order varies."""

    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        super().__init__(model=model, args=args, **options)  # type: ignore[call-arg]


def trainer_class(name: str, ours: type[TRLTrainer], module: str) -> type[TRLTrainer]:
    """Return `ours` on top of TRL's trainer of that name. Created at first use, because TRL is optional."""
    try:
        import trl
        from trl.trainer import utils
    except ImportError as error:
        raise ImportError(f"oomb.{name} needs TRL: pip install trl ({error})") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise ImportError(
            f"oomb.{name} needs TRL {OLDEST} or newer, but {trl.__version__} is installed: pip install --upgrade trl"
        )
    theirs = getattr(trl, name)
    body = {"trl_class": theirs, "__doc__": ours.__doc__, "__module__": module}
    return type(name, (ours, _KeywordOnly, theirs), body)


def _reject_call(fused_lm_head: bool, inputs: dict[str, Any]) -> None:
    if not fused_lm_head:
        raise ValueError(
            "compute_loss asks the model for logits, which the engine never holds: use "
            "self.engine.logprobs(input_ids) instead"
        )
    missing = [name for name in ("input_ids", "labels") if inputs.get(name) is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}: let the data collator return them")
    if unknown := unknown_inputs(inputs):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which the engine does not read: let the data collator return tokens, "
            "padded on the right with an attention_mask or packed with position_ids, and no images"
        )


def _reject_router_loss(model: nn.Module, args: Any) -> None:
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    setting = getattr(args, "router_aux_loss_coef", None)
    weight = getattr(config, "router_aux_loss_coef", 0.0) if setting is None else setting
    if hasattr(config, "output_router_logits") and weight:
        raise ValueError(_router_loss_text(weight))


def _router_loss_text(weight: float) -> str:
    return (
        f"router_aux_loss_coef is {weight}, but the load-balancing loss needs the whole sequence at once: pass "
        "router_aux_loss_coef=0.0 in the trainer's config"
    )
