"""Provide `oomb.SFTTrainer`: TRL's supervised fine-tuning on the engine."""

from __future__ import annotations

from typing import Any

from oomb.trainers.trl_base import TRLTrainer, trainer_class


class SFTMixin(TRLTrainer):
    """TRL's `SFTTrainer` for sequences whose activations do not fit in memory.

    It takes the arguments of `trl.SFTTrainer` and those below. `compute_metrics` gets per-token log-probabilities
    [B, T] as `predictions`, not logits.

    Args:
        engine_config: settings of the engine. Defaults to `oomb.Config()`.
        optimizer: keep AdamW's states in host memory; see `oomb.Trainer`.
        max_skipped_steps: tolerate steps that are NaN or infinite; see `oomb.Trainer`.

    Examples:
        ```python
        import oomb
        from datasets import load_dataset
        from peft import LoraConfig
        from trl import SFTConfig

        trainer = oomb.SFTTrainer(
            model="Qwen/Qwen2.5-0.5B",
            args=SFTConfig(output_dir="out", max_length=131_072, per_device_train_batch_size=1),
            train_dataset=load_dataset("trl-lib/Capybara", split="train"),
            peft_config=LoraConfig(r=16, target_modules="all-linear"),
        )
        trainer.train()
        ```
    """

    def _check(self, args: Any, named: dict[str, Any]) -> None:
        if named.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func needs logits, which the engine never holds: subclass oomb.SFTTrainer and compute "
                "the loss in compute_loss from self.engine.logprobs(input_ids)"
            )
        if named.get("preprocess_logits_for_metrics") is not None:
            raise ValueError(
                "preprocess_logits_for_metrics needs logits, which the engine never holds: leave it out; "
                "compute_metrics gets per-token log-probabilities instead"
            )


def __getattr__(name: str) -> Any:
    if name != "SFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has SFTTrainer")
    globals()[name] = trainer_class(name, SFTMixin, __name__)
    return globals()[name]
