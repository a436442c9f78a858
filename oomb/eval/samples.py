"""Generate a sample of a model's text."""

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
    """Continue a prompt with the model's own `generate`, and return {"prompt": ..., "text": ...}.

    The same seed gives the same text, and the state of the random number generators is restored afterwards.

    Args:
        engine: Engine of the model to sample from.
        prompt_ids: Token ids to continue.
        tokenizer: Tokenizer that decodes the tokens; None for models that read bytes.
        num_tokens: Number of new tokens, at most.
        temperature: Sampling temperature.
        seed: Seed for the sampling.
    """
    model: Any = engine.model.lm
    ids = torch.as_tensor(prompt_ids).flatten().to(engine.model.device, torch.int64)[None]
    device = engine.model.device
    with eval_mode(engine), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=0.95,
            pad_token_id=model.config.get_text_config().pad_token_id or 0,
        )
    prompt, text = (decode(part, tokenizer) for part in (ids[0], generated[0, ids.shape[1] :]))
    return {"prompt": prompt, "text": text}


def decode(ids_T: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the text of token ids; without a tokenizer they are bytes."""
    if tokenizer is None:
        return bytes(i for i in ids_T.tolist() if i < SEPARATOR_ID).decode(errors="replace")
    return str(tokenizer.decode(ids_T.tolist(), skip_special_tokens=True))


@contextmanager
def eval_mode(engine: Engine) -> Iterator[None]:
    """Switch off autograd and dropout within the block."""
    module = engine.model.lm
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
