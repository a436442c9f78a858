"""Train a tiny model with a trainer, alone or under torchrun: `trainer_run.py OUT '{"max_steps": 3, ...}'`.

Rank 0 writes the log and the weights to OUT/result.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from checks import lora
from families import VOCAB, build
from transformers import TrainingArguments

import oomb
from oomb.data.dataset import pad_batch


def examples(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    # Of one length: transformers averages the losses of an evaluation over examples, not tokens.
    ids = [torch.randint(3, VOCAB, (20,), generator=generator) for _ in range(count)]
    return [{"input_ids": x, "labels": x} for x in ids]


def main(out: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    use_lora, resume = settings.pop("lora", False), settings.pop("resume", None)
    bad_step, bad_rank = settings.pop("nan_at", None), settings.pop("nan_rank", 0)
    options = {name: settings.pop(name) for name in ("optimizer", "max_skipped_steps", "parallel") if name in settings}
    defaults = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    args = TrainingArguments(str(out / "run"), **{**defaults, **settings})
    model = build("llama", seed=args.process_index if use_lora == "other" else 0)
    if use_lora:
        model = lora(build("llama"), dropout=0.1 if use_lora == "dropout" else 0.0)

    class Trainer(oomb.Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            if self.state.global_step + 1 == bad_step and args.process_index == bad_rank and self.model.training:
                self.engine.replicas.last_share = torch.tensor(float("nan"))
                loss = loss * float("nan")
            return loss

    trainer = Trainer(
        model,
        args,
        train_dataset=examples(),
        eval_dataset=examples(5),
        data_collator=pad_batch,
        engine_config=oomb.Config(chunk_size=8, page_size=4),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    if args.should_save:
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        found = {"log": trainer.state.log_history, "weights": weights, "best": trainer.state.best_model_checkpoint}
        torch.save({**found, "wrapper": type(trainer.model_wrapped).__name__}, out / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
