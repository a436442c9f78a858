"""Make a small tokenizer with merges and a chat template."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from oomb.models import presets

SPECIAL = ["<|end|>", "<|turn|>", "<|stop|>"]

CHAT = """\
{%- for message in messages -%}
<|turn|>{{ message['role'] }}
{{ message['content'] }}<|stop|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|turn|>assistant
{% endif -%}
"""

MARKED = """\
{%- for message in messages -%}
<|turn|>{{ message['role'] }}
{% if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] }}<|stop|>
{% endgeneration %}
{%- else -%}
{{ message['content'] }}<|stop|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|turn|>assistant
{% endif -%}
"""


@functools.cache
def _trained(text: str | None) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # Trims whitespace off token offsets, as the tokenizers of GPT-2, Llama 3 and Qwen do.
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text or Path(__file__).read_text()] * 2, trainer)
    return bpe.to_str()


def small_tokenizer(template: str | None = CHAT, *, first: str | None = None, text: str | None = None) -> Any:
    """Return a tokenizer.

    Args:
        template: Chat template.
        first: Token to put before every text.
        text: Text to learn merges from; a different text gives different ids.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer.from_str(_trained(text))
    if first is not None:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, bpe.token_to_id(first))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", additional_special_tokens=SPECIAL[1:], bos_token=first
    )
    tokenizer.chat_template = template
    return tokenizer


def save_chats(number: int) -> None:
    """Save a tiny model with this tokenizer in `model`, and conversations of several lengths in `chats.jsonl`."""
    from transformers import AutoModelForCausalLM

    tokenizer = small_tokenizer()
    config = presets.preset_config("demo", vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    with Path("chats.jsonl").open("w") as file:
        for index in range(number):
            turns = [("user", f"What is {index}?"), ("assistant", f"{index} is a number. " * (1 + index % 9))]
            print(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}), file=file)
