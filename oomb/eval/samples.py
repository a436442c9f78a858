"""A sample of a model's text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomb.data.encode import SEPARATOR_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oomb.engine.engine import Engine

PROMPT_SIZE = 64
"""Tokens of text that a sample continues."""


def sample_text(
    engine: Engine,
    prompt_ids: Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    num_tokens: int = 128,
    temperature: float = 0.8,
    seed: int = 0,
) -> dict[str, str]:
    """{"prompt", "text"}: how the model goes on from `prompt_ids`, by its own `generate`. The same seed gives the same
    text; the program's random numbers are left as they are."""
    model: Any = engine.model.lm
    ids = torch.as_tensor(prompt_ids).flatten().to(engine.model.device, torch.int64)[None]
    device = engine.model.device
    with eval_mode(engine), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=0.95,
            pad_token_id=model.config.get_text_config().pad_token_id or 0,
        )
    prompt, text = (decode(part, tokenizer) for part in (ids[0], written[0, ids.shape[1] :]))
    return {"prompt": prompt, "text": text}


def decode(ids_T: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return bytes(i for i in ids_T.tolist() if i < SEPARATOR_ID).decode(errors="replace")
    return str(tokenizer.decode(ids_T.tolist(), skip_special_tokens=True))


@contextmanager
def eval_mode(engine: Engine) -> Iterator[None]:
    """No graph, no dropout."""
    module = engine.model.lm
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
