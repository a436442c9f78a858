"""Fine-tune with TRL's SFT and LoRA on the engine. Only the import of `SFTTrainer` differs from a TRL script.

python examples/sft.py                      # a toy model, seconds on a CPU
python examples/sft.py Qwen/Qwen2.5-0.5B    # a real model; replace `sums` with your own data
"""

import sys

import torch
import toy
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig

from oomb import SFTTrainer

name = sys.argv[1] if len(sys.argv) > 1 else toy.model_folder()


def sums(first: int, last: int) -> Dataset:
    """Return prompts and completions. The loss is on the completions only."""
    lists = [[(i * 7 + j * 3) % 10 for j in range(5 + i % 17)] for i in range(first, last)]
    return Dataset.from_dict(
        {
            "prompt": [" + ".join(map(str, numbers)) + " = " for numbers in lists],
            "completion": [str(sum(numbers)) for numbers in lists],
        }
    )


trainer = SFTTrainer(
    model=name,
    args=SFTConfig(
        output_dir="out_sft",
        max_length=None,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=sums(0, 40),
    eval_dataset=sums(100, 106),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("out_sft/adapter")
