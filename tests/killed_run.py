"""The run that `test_kill.py` kills: a process of its own, which goes on from the newest checkpoint there is."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import tqdm
from trainings import CHUNKED, Samples, arguments, tiny_model
from transformers import TrainerCallback

import oomb
from oomb import checkpoints

NUM_STEPS = 36
SLOWED_S = 0.004
"""Between two operations on the disk, so that many a kill falls between them."""


class Tell(TrainerCallback):
    """Every loss in a file, bit by bit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            with self.path.open("a") as file:
                file.write(json.dumps([state.global_step, logs["loss"].hex(), logs["grad_norm"].hex()]) + "\n")


def slowed(name: str) -> None:
    function = getattr(os, name)

    def slow(*positional: Any, **options: Any) -> Any:
        time.sleep(SLOWED_S)
        return function(*positional, **options)

    setattr(os, name, slow)


def main(folder: Path, losses: Path, is_slowed: bool) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(folder.parent / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if is_slowed:
        for name in ("fsync", "rename", "unlink"):
            slowed(name)
    train(folder, losses, NUM_STEPS)


def train(folder: Path, losses: Path, num_steps: int) -> None:
    """Dropout, several epochs, an odd number of batches to accumulate, an optimizer that rounds at random."""
    torch.set_num_threads(1)
    options = {"max_steps": num_steps, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = oomb.Trainer(
        tiny_model("phi", num_hidden_layers=1, resid_pdrop=0.1, dtype=torch.bfloat16),
        arguments(folder, gradient_accumulation_steps=2, **options),
        train_dataset=Samples(18, 20),
        engine_config=CHUNKED,
        optimizer="offloaded_adamw_8bit",
        callbacks=[Tell(losses)],
    )
    trainer.train(resume_from_checkpoint=checkpoints.latest(folder))


# Progress bars lock each other out across processes, and forked ones share the lock: one killed with it would stop all
# that come after.
tqdm.tqdm.set_lock(threading.RLock())

if os.environ.get("OOMB_TESTS_WARM_UP"):
    # In the process that the runs are forked from: what is imported at first use is there then, for all of them.
    with tempfile.TemporaryDirectory() as place:
        train(Path(place), Path(place) / "losses", 1)
