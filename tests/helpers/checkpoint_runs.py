"""Small runs that write checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainings import CHUNKED, Samples, arguments, tiny_model

import oomb
from oomb.trainers import checkpoints


def write(folder: Path, text: str = "weights") -> None:
    with checkpoints.write(folder) as partial:
        (partial / "model.safetensors").write_text(text * 10)
        (partial / "adapter").mkdir()
        (partial / "adapter" / "config.json").write_text("{}")
        (partial / "trainer_state.json").write_text('{"global_step": 1}')


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def trainer_in(folder: Path, *, callbacks: list[Any] | None = None, **options: Any) -> oomb.Trainer:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **options}
    return oomb.Trainer(
        tiny_model(num_hidden_layers=1),
        arguments(folder, **settings),
        train_dataset=Samples(8, 33),
        engine_config=CHUNKED,
        callbacks=callbacks,
    )


def train(folder: Path, **options: Any) -> oomb.Trainer:
    trainer = trainer_in(folder, **options)
    trainer.train()
    return trainer
