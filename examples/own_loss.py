"""Train with a loss of your own in the Hugging Face trainer: any function of per-token log-probabilities.

    python examples/own_loss.py                 # a toy model, seconds on a CPU

The example is the focal loss, in which tokens that the model finds easy count less. B batch, T tokens.
"""

import toy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import oomb


class FocalTrainer(oomb.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self.accelerator.autocast():
            logp_BT = self.engine.logprobs(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = focal_loss(logp_BT, inputs["attention_mask"], num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


def focal_loss(logp_BT: Tensor, mask_BT: Tensor, num_items: Tensor | None = None) -> Tensor:
    """Return the mean focal loss. The first token of a row has no prediction, so it does not count."""
    counted = mask_BT[:, 1:].bool()
    logp = logp_BT[:, 1:][counted]
    hard = (1 - logp.exp()).detach() ** 2
    return -(hard * logp).sum() / (counted.sum() if num_items is None else num_items)


if __name__ == "__main__":
    name = toy.model_folder()
    texts = [f"{i} plus {j} is {i + j}. " * (1 + j) for i in range(6) for j in range(6)]
    tokenizer = AutoTokenizer.from_pretrained(name)
    trainer = FocalTrainer(
        model=AutoModelForCausalLM.from_pretrained(name),
        args=TrainingArguments(
            output_dir="out_own_loss",
            max_steps=10,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[tokenizer(text, return_token_type_ids=False) for text in texts],
        processing_class=tokenizer,
        engine_config=oomb.Config(chunk_size=64),
    )
    trainer.train()
