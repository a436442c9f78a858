"""DPO with TRL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oomb.engine.engine import Engine
from oomb.trainers.trl_base import EngineForward, TRLTrainer, trainer_class


class DPOMixin(TRLTrainer):
    """Use it as `trl.DPOTrainer`, with the additional arguments of `oomb.Trainer`: `engine_config`, `optimizer` and
    `max_skipped_steps`.

    The reference model, where there is one, has an engine of its own. `compute_metrics` gets per-token
    log-probabilities [B, T] as `predictions`, not logits.
    """

    noted: tuple[str, ...] = ("entropy", "mean_logits", "is_top1")
    precompute_ref_logps: bool
    _precompute_model_hash: Any

    def __init__(self, *given: Any, **options: Any) -> None:
        self._reference: Engine | None = None
        super().__init__(*given, **options)
        if self.use_weighting:
            self.noted = (*self.noted, "log_sum_sq_probs")
        # A mean over pairs: batches have no labels that could be counted.
        self.model_accepts_loss_kwargs = False
        # A reference that cannot be computed in chunks is refused here.
        _ = self.reference_engine

    @property
    def reference_engine(self) -> Engine:
        """The engine of the reference: with PEFT, or with references computed beforehand, that of the model itself."""
        if self.ref_model is None:
            return self.engine
        if self._reference is None:
            self._reference = Engine(self.ref_model, self.engine_config)
        return self._reference

    def _precompute_ref_logps(self, *positional: Any, **options: Any) -> Any:
        # TRL keeps the results on disk by data and weights. They also depend on these, so both are part of the name.
        model_hash = getattr(self, "_precompute_model_hash", None)
        self._precompute_model_hash = repr((model_hash, self.ld_alpha, self.engine.config))
        try:
            return super()._precompute_ref_logps(*positional, **options)
        finally:
            self._precompute_model_hash = model_hash

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        engine = self.reference_engine
        is_separate = engine is not self.engine
        if is_separate:
            # Engines hold page memory from step to step. These two take turns: both may use all that there is.
            self.engine.release()
        try:
            return super().compute_ref_log_probs(EngineForward(engine, self.accelerator.autocast), inputs)
        finally:
            if is_separate:
                engine.release()

    def _batch_loss(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> Tensor:
        is_precomputed = self.precompute_ref_logps
        if not is_precomputed:
            # TRL would ask the reference after the model, while the model's pages wait for their backward. Asked
            # first, and handed over in the batch as if computed beforehand, it has the memory to itself.
            chosen, rejected = self.compute_ref_log_probs(self.ref_model, inputs)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self.precompute_ref_logps = True
        try:
            return super()._batch_loss(inputs, num_items)
        finally:
            self.precompute_ref_logps = is_precomputed


def __getattr__(name: str) -> Any:
    if name != "DPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has DPOTrainer")
    globals()[name] = trainer_class(name, DPOMixin, __name__)
    return globals()[name]
