"""From hidden states to log-probabilities of targets and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from oomb.ops.logprob import (
    FUSED_TILE,
    PLAIN_TILE,
    Function,
    TargetLogProb,
    rows_with_targets,
    split_tiles,
    target_logprob,
    target_logprob_backward,
)


class Model(Protocol):
    """What has a head."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, hidden_ND: Tensor) -> Tensor: ...


class TokenHead:
    """From hidden states to log-probabilities of targets and back, a tile of rows at a time.

    With `fuse`, the arithmetic between logits and log-probabilities is compiled, for each number of rows anew: ask for
    it where many chunks are alike.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.fused = torch.compile(target_logprob, dynamic=False), torch.compile(target_logprob_backward, dynamic=False)

    def logprobs(self, hidden_BTD: Tensor, targets_BT: Tensor, fuse: bool = False) -> Tensor:
        """[B, T]: log p(target), 0 where the target is ignored. Without a graph."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        rows, targets = rows_with_targets(targets_BT, hidden_ND.device)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        logp = torch.zeros(len(hidden_ND), dtype=wide, device=hidden_ND.device)
        math, tiles = self._tiles(fuse and isinstance(rows, slice), hidden_ND[rows], targets)
        with torch.no_grad():
            parts = [math[0](self.model.logits(h), t)[0] for h, t in tiles]
        if parts:
            logp[rows] = torch.cat(parts).to(wide)
        return logp.view(targets_BT.shape)

    def backward(self, hidden_BTD: Tensor, targets_BT: Tensor, dlogp_BT: Tensor, fuse: bool = False) -> Tensor:
        """d hidden from d logp; the head's own parameters receive their gradients on the way."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        rows, targets = rows_with_targets(targets_BT, hidden_ND.device)
        dhidden = torch.zeros_like(hidden_ND)
        counted = dhidden[rows]
        dlogp_N = dlogp_BT.flatten()[rows]
        math, tiles = self._tiles(fuse and isinstance(rows, slice), hidden_ND[rows], targets, dlogp_N, counted)
        for h, t, dlogp, out in tiles:
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                logp = TargetLogProb.apply(self.model.logits(h), t, *math)
            torch.autograd.backward(logp, dlogp)
            assert h.grad is not None
            out.copy_(h.grad)
        dhidden[rows] = counted
        return dhidden.view_as(hidden_BTD)

    def _tiles(self, fuse: bool, *rows: Tensor) -> tuple[tuple[Function, Function], Iterator[tuple[Tensor, ...]]]:
        if fuse:
            return self.fused, split_tiles(FUSED_TILE // self.model.vocab_size, *rows)
        return (target_logprob, target_logprob_backward), split_tiles(PLAIN_TILE // self.model.vocab_size, *rows)
