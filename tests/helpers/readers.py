"""Stand-ins for engines with known behavior, for the tests of evaluation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oomb.engine.head import TokenHead


class Reader:
    """A stand-in for an engine whose model is a rule: `rule(ids)` returns the logits [T, V] of each next token."""

    class Model:
        device = torch.device("cpu")
        vocab_size = 264

        def __init__(self) -> None:
            self.lm = torch.nn.Identity()

        def logits(self, hidden_ND: Tensor) -> Tensor:
            return hidden_ND

    def __init__(self, rule: Any) -> None:
        self.rule, self.model = rule, self.Model()

    def pack(self, input_ids: Tensor) -> Tensor:
        return input_ids

    def forward(self, input_ids: Tensor, head: Any) -> dict[str, list[Tensor]]:
        """Hand the head logits instead of hidden states, in two chunks."""
        logits = self.rule(input_ids[0].tolist())[None]
        targets = torch.cat([input_ids[:, 1:], input_ids[:, :1]], 1)
        middle = input_ids.shape[1] // 3
        chunks = [
            head.forward(logits[:, a:b], targets[:, a:b], fused=False)[0] for a, b in ((0, middle), (middle, None))
        ]
        return {"logprob": [torch.cat(chunks, 1)]}

    def logprobs(self, input_ids: Tensor) -> Tensor:
        [logp] = self.forward(input_ids, TokenHead(self.model))["logprob"]
        return logp


def finder(ids: list[int]) -> Tensor:
    """Return logits that repeat what followed the last 16 tokens earlier in the text."""
    logits = torch.zeros(len(ids), 264)
    seen: dict[tuple[int, ...], int] = {}
    for at in range(16, len(ids) - 1):
        before = tuple(ids[at - 15 : at + 1])
        if before in seen:
            logits[at, seen[before]] = 20.0
        seen[before] = ids[at + 1]
    return logits


def blind(ids: list[int]) -> Tensor:
    """Return logits that prefer the latest codes and ignore names."""
    logits = torch.zeros(len(ids), 264)
    for at, (before, token) in enumerate(pairwise(ids), start=1):
        if before == ord(" ") and ord("0") <= token <= ord("9"):
            logits[at:, token] = 0.01 * at
    return logits
