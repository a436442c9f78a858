"""Small training runs for the tests of trainers and checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import oomb

VOCAB = 61
CHUNKED = oomb.Config(chunk_size=16)


class Samples(Dataset):
    """Dataset of sequences of different lengths, padded on the right, with the padding masked out."""

    def __init__(self, count: int, length: int, *, padded: bool = True, labels: bool = True) -> None:
        generator = torch.Generator().manual_seed(count)
        self.samples = []
        for index in range(count):
            ids = torch.randint(1, VOCAB, (length,), generator=generator)
            mask = torch.ones(length, dtype=torch.int64)
            if padded:
                mask[length - 5 * (index % 4) :] = 0
            sample = {"input_ids": ids * mask, "attention_mask": mask}
            if labels:
                sample["labels"] = ids.masked_fill(mask == 0, -100)
                sample["labels"][: index % 3] = -100
            self.samples.append(sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def tiny_model(kind: str = "llama", seed: int = 1, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(kind, **{**shape, **settings})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    return TrainingArguments(**settings)


@pytest.fixture(scope="module")
def quick_collection() -> Iterator[None]:
    """Freeze imported objects, because each run starts with a full garbage collection of half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def logged(trainer: transformers.Trainer, name: str) -> list[float]:
    return [record[name] for record in trainer.state.log_history if name in record]
