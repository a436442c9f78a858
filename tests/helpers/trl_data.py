"""Data and settings for tests of the TRL trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import load

import oomb
import oomb.trainers.trl_base

datasets = pytest.importorskip("datasets")


peft = pytest.importorskip("peft")


CHUNKED = oomb.Config(chunk_size=16)


LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def assert_same_weights(ours: Any, theirs: Any, start: dict[str, torch.Tensor], tolerance: float) -> None:
    moved = 0
    for name, value in theirs.state_dict().items():
        other, before = ours.state_dict()[name], start.get(name, torch.zeros_like(value))
        change = (value - before).norm()
        moved += bool(change > 0)
        # Adam divides by the root of a square, so a rounding difference in a near-zero gradient shows in the weights.
        assert (value - other).norm() <= tolerance * change + 1e-9, name
    assert moved


SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.5,
    "optim": "sgd",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": None,
}


def pairs() -> Any:
    return datasets.Dataset.from_dict(
        {
            "prompt": [f"say {'very ' * (i % 5)}well: " * 2 for i in range(8)],
            "chosen": ["good" * (1 + i % 3) for i in range(8)],
            "rejected": ["no, not " * (1 + i % 2) for i in range(8)],
        }
    )


def adapted(folder: str) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(load(folder), peft.LoraConfig(**LORA, init_lora_weights=False))


def texts() -> Any:
    return datasets.Dataset.from_dict({"text": [f"{i} and {i * i}, " * (2 + i % 4) for i in range(8)]})
