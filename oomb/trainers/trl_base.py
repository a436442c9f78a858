"""TRL's trainers with the engine in place of the model's forward: `from oomb import SFTTrainer`, all else as it was.

TRL asks a model for the log-probability of each label and makes its losses and metrics of that. Here the engine is
asked instead (`Forward`), so TRL's own code computes every loss it knows, at lengths that its model could not hold.

B batch, T tokens, N tokens that count, V vocabulary.
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
"""The first TRL that asks its models for log-probabilities and not for logits."""


@dataclass
class FusedOutput:
    """What TRL expects of a model. Of every position but the last, [B, T - 1], and zero where no label counts."""

    log_probs: Tensor
    label_mask: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None


class EngineForward:
    """Stands where TRL calls a model. `noted` are the fields of the answer that need logits: they are computed in the
    fill pass, a tile of tokens at a time, and have no gradient."""

    def __init__(
        self, engine: Engine, autocast: Callable[[], AbstractContextManager[Any]], noted: tuple[str, ...] = ()
    ) -> None:
        self.engine, self.autocast, self.stats = engine, autocast, noted

    def __call__(
        self, *, use_cache: bool | None = None, fused_lm_head: bool = False, **inputs: Tensor | None
    ) -> FusedOutput:
        _reject_call(fused_lm_head, inputs)
        # Not `engine.logprobs`: labels may differ from the ids, and the head has no work where none counts.
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        assert input_ids is not None
        packed = self.engine.pack(input_ids, labels, **layout_of(inputs))
        # Mixed precision (bf16=True, fp16=True) lives in the wrapped `forward`, which the engine does not call.
        with self.autocast():
            fields = self.engine.forward(packed, TokenHead(self.engine.model, self.stats))
        counted = [(batch.targets != IGNORE_INDEX).to(self.engine.model.device) for batch in packed.batches]
        return FusedOutput(
            log_probs=packed.join(fields.pop("logprob"))[:, :-1],
            label_mask=packed.join(counted)[:, :-1],
            **{name: packed.join(parts)[:, :-1] for name, parts in fields.items()},
        )


class TRLTrainer(Trainer):
    """What both trainers share. In the order of inheritance TRL's trainer comes after `oomb.Trainer`, so
    `super(Trainer, self)` is TRL's: what `oomb.Trainer` does with batches of its own is passed by."""

    trl_class: type
    """The trainer of TRL that this one is."""
    noted: tuple[str, ...] = ("entropy", "is_top1")

    def __init__(
        self,
        *given: Any,
        engine_config: Config | None = None,
        optimizer: str | None = None,
        max_skipped_steps: int | None = 0,
        **options: Any,
    ) -> None:
        named = dict(inspect.signature(self.trl_class).bind(*given, **options).arguments)
        model, args = named.pop("model"), named.pop("args", None)
        if args is None:
            args = self._default_arguments(model)
        self._check(args, named)
        if isinstance(model, nn.Module):
            # Here, before the data is tokenised; a model that is still a name is seen when TRL has loaded it.
            unwrap(model)
            _reject_router_loss(model, args)
        named["max_skipped_steps"] = max_skipped_steps
        super().__init__(model, without_offloading(args), engine_config=engine_config, optimizer=optimizer, **named)
        if getattr(self, "_is_vision_dataset", False):
            raise ValueError(
                "the training data has images, which the engine does not read: leave out the columns image and images, "
                f"or train with trl.{self.trl_class.__name__}"
            )

    @property
    def engine(self) -> Engine:
        """The engine of the model that is trained."""
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(_router_loss_text(self.router_aux_loss_coef))
        return super().engine

    def _batch_loss(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> Tensor:
        forward = EngineForward(self.engine, self.accelerator.autocast, self.noted)
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
        """Raises where arguments of this trainer ask for what the engine cannot do."""

    def _default_arguments(self, model: Any) -> Any:
        import trl

        kind = self.trl_class.__name__.removesuffix("Trainer")
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        return getattr(trl, f"{kind}Config")(f"{name.split('/')[-1]}-{kind}")


class _KeywordOnly:
    """Between `oomb.Trainer`, which passes two arguments by their place, and TRL's trainers, whose order varies."""

    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        super().__init__(model=model, args=args, **options)  # type: ignore[call-arg]


def trainer_class(name: str, ours: type[TRLTrainer], module: str) -> type[TRLTrainer]:
    """Return `ours` on top of TRL's trainer of that name. Made when it is first asked for: TRL is optional."""
    try:
        import trl
        from trl.trainer import utils
    except ImportError as error:
        raise ImportError(f"oomb.{name} needs TRL: pip install trl ({error})") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise ImportError(
            f"oomb.{name} needs TRL {OLDEST} or newer; this is {trl.__version__}: pip install --upgrade trl"
        )
    theirs = getattr(trl, name)
    body = {"trl_class": theirs, "__doc__": ours.__doc__, "__module__": module}
    return type(name, (ours, _KeywordOnly, theirs), body)


def _reject_call(fused_lm_head: bool, inputs: dict[str, Any]) -> None:
    if not fused_lm_head:
        raise ValueError(
            "TRL asks for logits, which the engine never holds: a compute_loss that calls the model must call "
            "self.engine.logprobs(input_ids) instead"
        )
    missing = [name for name in ("input_ids", "labels") if inputs.get(name) is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}: let the data collator return them")
    if unknown := unknown_inputs(inputs):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which the engine does not read: let the data collator return tokens, "
            "padded on the right with an attention_mask or in rows with position_ids; images cannot be trained"
        )


def _reject_router_loss(model: nn.Module, args: Any) -> None:
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    asked = getattr(args, "router_aux_loss_coef", None)
    weight = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
    if hasattr(config, "output_router_logits") and weight:
        raise ValueError(_router_loss_text(weight))


def _router_loss_text(weight: float) -> str:
    return (
        f"router_aux_loss_coef is {weight}: TRL would add a load-balancing loss over the whole sequence, which chunks "
        "do not see; pass router_aux_loss_coef=0.0 in the trainer's config"
    )
