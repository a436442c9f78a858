"""The run that `test_kill.py` kills: its own process, which resumes from the newest checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import tqdm
from trainings import CHUNKED, Samples, arguments, tiny_model
from transformers import TrainerCallback

import oomb
from oomb.trainers import checkpoints

SLOWED_S = 0.004
"""Pause between two disk operations, so that kills fall between them."""


class Moment:
    """When to be killed, after `num_steps` steps.

    "step": while the run computes and saves one more. "partial": while it writes a checkpoint. "named": as that gets
    its name. "gone": while one is deleted. It reports when the moment begins, and waits for the kill before the moment
    ends, because the kill may be late on a busy machine.
    """

    def __init__(self, name: str, num_steps: int, came: Connection) -> None:
        self.name, self.num_left, self.came = name, num_steps, came
        self.has_begun = False

    def begins(self, name: str) -> None:
        if name == self.name and self.num_left <= 0 and not self.has_begun:
            self.has_begun = True
            self.came.send(name)

    def ends(self, name: str) -> None:
        if name == self.name and self.has_begun:
            threading.Event().wait()

    def step_is_told(self) -> None:
        self.ends("step")
        self.ends("named")
        self.num_left -= 1
        self.begins("step")

    def follow_the_disk(self) -> None:
        """Slow down the disk operations of checkpoints, and detect the moments in them."""

        def before(name: str, path: Any) -> None:
            if name == "mkdir" and ".partial-" in str(path):
                self.begins("partial")
            elif name == "rename" and ".partial-" in str(path):
                self.ends("partial")
            elif name == "rmdir" and ".gone-" in str(path):
                self.ends("gone")

        def after(name: str, path: Any, target: Any = None, *rest: Any) -> None:
            if name == "rename" and ".partial-" in str(path):
                self.begins("named")
            elif name == "rename" and ".gone-" in str(target):
                self.begins("gone")

        def follow(name: str) -> None:
            function = getattr(os, name)

            def slow(*positional: Any, **options: Any) -> Any:
                before(name, positional[0])
                time.sleep(SLOWED_S)
                done = function(*positional, **options)
                after(name, *positional)
                return done

            setattr(os, name, slow)

        for name in ("fsync", "mkdir", "rename", "rmdir", "unlink"):
            follow(name)


class Tell(TrainerCallback):
    """Callback that writes every loss to a file, bit for bit."""

    def __init__(self, path: Path, moment: Moment | None) -> None:
        self.path, self.moment = path, moment

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        with self.path.open("a") as file:
            file.write(json.dumps([state.global_step, logs["loss"].hex(), logs["grad_norm"].hex()]) + "\n")
        if self.moment is not None:
            self.moment.step_is_told()


def main(folder: Path, losses: Path, num_steps: int, moment: Moment | None) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(folder.parent / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if moment is not None:
        moment.follow_the_disk()
    train(folder, losses, num_steps, moment)


def train(folder: Path, losses: Path, num_steps: int, moment: Moment | None = None) -> None:
    """Train with dropout, several epochs, gradient accumulation and stochastic rounding in the optimizer."""
    torch.set_num_threads(1)
    options = {"max_steps": num_steps, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = oomb.Trainer(
        tiny_model("phi", num_hidden_layers=1, resid_pdrop=0.1, dtype=torch.bfloat16),
        arguments(folder, gradient_accumulation_steps=2, **options),
        train_dataset=Samples(18, 20),
        engine_config=CHUNKED,
        optimizer="offloaded_adamw_8bit",
        callbacks=[Tell(losses, moment)],
    )
    trainer.train(resume_from_checkpoint=checkpoints.latest(folder))


# Progress bars share a lock across forked processes. A process killed while holding it would block all later ones.
tqdm.tqdm.set_lock(threading.RLock())

if os.environ.get("OOMB_TESTS_WARM_UP"):
    # Runs are forked from this process. What it imports here, they need not import.
    with tempfile.TemporaryDirectory() as place:
        train(Path(place), Path(place) / "losses", 1)
