"""Create a toy model with a character tokenizer, so the examples run without a download or a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from oomb.models.presets import preset_config

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:?=+-\n"
SPECIAL = ("<eos>", "<pad>", "<unk>")


def model_folder(folder: str = "toy_model") -> str:
    """Write the model unless it exists, and return its folder, which works like the name of a model."""
    if not Path(folder, "config.json").exists():
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *LETTERS))}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        words.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
        ).save_pretrained(folder)
        torch.manual_seed(0)
        config = preset_config(
            "demo", vocab_size=64, hidden_size=64, intermediate_size=128, eos_token_id=0, pad_token_id=1
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
