"""SFT with TRL."""

from __future__ import annotations

from typing import Any

from oomb.trainers.trl_base import TRLTrainer, trainer_class


class SFTMixin(TRLTrainer):
    """Use it as `trl.SFTTrainer`, with the additional arguments of `oomb.Trainer`: `engine_config`, `optimizer` and
    `max_skipped_steps`.

    `compute_metrics` gets per-token log-probabilities [B, T] as `predictions`, not logits.
    """

    def _check(self, args: Any, named: dict[str, Any]) -> None:
        if named.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func takes logits, which the engine never holds: subclass oomb.SFTTrainer and build the "
                "loss in compute_loss from self.engine.logprobs(input_ids)"
            )
        if named.get("preprocess_logits_for_metrics") is not None:
            raise ValueError(
                "preprocess_logits_for_metrics takes logits, which the engine never holds: leave it out; "
                "compute_metrics gets per-token log-probabilities"
            )


def __getattr__(name: str) -> Any:
    if name != "SFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has SFTTrainer")
    globals()[name] = trainer_class(name, SFTMixin, __name__)
    return globals()[name]
