"""Train on several ranks with a fault on one of them: `failing_run.py OUT PHASE RANK`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from families import build
from trainer_run import examples
from transformers import TrainingArguments

import oomb
from oomb.data.dataset import pad_batch
from oomb.distributed.data_parallel import GradientSync

PHASES = ("open", "fill", "loss", "gradient", "reduction", "save", "evaluation", "killed")


def fail(*given: Any, **named: Any) -> Any:
    raise ArithmeticError("the fault of this test")


def main(out: Path, phase: str, bad_rank: int) -> None:
    torch.set_num_threads(1)
    args = TrainingArguments(
        str(out / "run"),
        max_steps=4,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    is_bad = args.process_index == bad_rank

    class Trainer(oomb.Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            return fail() if is_bad and phase == "loss" and self.state.global_step == 2 else loss

        def _write_checkpoint(self, *given: Any) -> None:
            return fail() if phase == "save" else super()._write_checkpoint(*given)

        def prediction_step(self, *given: Any, **named: Any) -> Any:
            return fail() if is_bad and phase == "evaluation" else super().prediction_step(*given, **named)

    if is_bad and phase == "open":
        oomb.Engine.reserve = oomb.Engine.loss = fail  # type: ignore[method-assign]
    trainer = Trainer(
        build("llama"),
        args,
        train_dataset=examples(),
        eval_dataset=examples(8),
        data_collator=pad_batch,
        engine_config=oomb.Config(chunk_size=8),
    )

    def progress(done_phase: str, done: int, total: int) -> None:
        if is_bad and trainer.state.global_step == 2 and done_phase == phase:
            fail()
        if is_bad and trainer.state.global_step == 2 and phase == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.engine.progress = progress
    if is_bad and phase == "reduction":
        GradientSync.average = fail  # type: ignore[method-assign]
    trainer.train()
    print("trained to the end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
