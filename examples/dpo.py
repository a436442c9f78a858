"""Train on preferences with TRL's DPO on the engine. Only the import of `DPOTrainer` differs from a TRL script.

    python examples/dpo.py                      # a toy model, seconds on a CPU
    python examples/dpo.py Qwen/Qwen2.5-0.5B    # a real model; replace `pairs` with your own data

All weights are trained, so TRL loads a second copy of the model as the reference. With `peft_config=` the reference is
the model with its adapters off, and no copy is needed.
"""

import sys

import torch
import toy
from datasets import Dataset
from trl import DPOConfig

from oomb import DPOTrainer

name = sys.argv[1] if len(sys.argv) > 1 else toy.model_folder()


def pairs(first: int, last: int) -> Dataset:
    """Return prompts with a preferred and a rejected answer."""
    words = ["one", "two", "three", "four", "five"]
    texts = [" ".join(words[(i + j * j) % 5] for j in range(4 + i % 9)) for i in range(first, last)]
    return Dataset.from_dict(
        {
            "prompt": [f"the last word of: {text}? " for text in texts],
            "chosen": [text.split()[-1] for text in texts],
            "rejected": [text.split()[0] + " or so" for text in texts],
        }
    )


trainer = DPOTrainer(
    model=name,
    args=DPOConfig(
        output_dir="out_dpo",
        loss_type="sigmoid",
        beta=0.1,
        max_length=None,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        save_strategy="no",
        bf16=torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=pairs(0, 40),
    eval_dataset=pairs(100, 104),
)
trainer.train()
trainer.save_model("out_dpo/model")
