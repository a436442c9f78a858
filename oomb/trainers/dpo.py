"""Provide `oomb.DPOTrainer`: TRL's preference training on the engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oomb.engine.engine import Engine
from oomb.trainers.trl_base import EngineForward, TRLTrainer, trainer_class


class DPOMixin(TRLTrainer):
    """TRL's `DPOTrainer` for pairs whose activations do not fit in memory.

    It takes the arguments of `trl.DPOTrainer` and those below. The reference model, if there is one, has an engine of
    its own. `compute_metrics` gets per-token log-probabilities [B, T] as `predictions`, not logits.

    Args:
        engine_config: settings of both engines. Defaults to `oomb.Config()`.
        optimizer: keep AdamW's states in host memory; see `oomb.Trainer`.
        max_skipped_steps: tolerate steps that are NaN or infinite; see `oomb.Trainer`.

    Examples:
        ```python
        import oomb
        from datasets import load_dataset
        from trl import DPOConfig

        trainer = oomb.DPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            args=DPOConfig(output_dir="out", max_length=65_536, per_device_train_batch_size=1),
            train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
        )
        trainer.train()
        ```
    """

    token_stats: tuple[str, ...] = ("entropy", "mean_logits", "is_top1")
    precompute_ref_logps: bool
    _precompute_model_hash: Any

    def __init__(self, *given: Any, **options: Any) -> None:
        self._reference: Engine | None = None
        super().__init__(*given, **options)
        if self.use_weighting:
            self.token_stats = (*self.token_stats, "log_sum_sq_probs")
        # The loss is a mean over pairs: there are no labels to count.
        self.model_accepts_loss_kwargs = False
        # Creates the engine: an unsupported reference model raises now.
        _ = self.reference_engine

    @property
    def reference_engine(self) -> Engine:
        """The engine of the reference model. Without a separate reference model, the engine of the model."""
        if self.ref_model is None:
            return self.engine
        if self._reference is None:
            self._reference = Engine(self.ref_model, self.engine_config)
        return self._reference

    def _precompute_ref_logps(self, *positional: Any, **options: Any) -> Any:
        # TRL caches the results on disk under a hash of data and weights. They also depend on these settings.
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
            # Engines keep page memory from step to step. These two take turns, so each may use all of it.
            self.engine.release()
        try:
            return super().compute_ref_log_probs(EngineForward(engine, self.accelerator.autocast), inputs)
        finally:
            if is_separate:
                engine.release()

    def _batch_loss(self, inputs: dict[str, Any], num_items: Tensor | int | None) -> Tensor:
        is_precomputed = self.precompute_ref_logps
        if not is_precomputed:
            # TRL would run the reference after the model, while the model's pages wait for the backward. Run it first,
            # when it has the memory to itself, and pass its results in the batch as if they were precomputed.
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
