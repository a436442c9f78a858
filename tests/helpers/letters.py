"""A tokenizer of letters."""

from __future__ import annotations

from typing import Any

import torch


class Letters:
    """A token for each character."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) % 97 for c in text]])}
