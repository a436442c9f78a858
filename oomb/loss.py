"""Log-probabilities of target tokens without a [tokens, vocabulary] tensor: the head runs in tiles, both ways.

N rows (tokens of a chunk), V vocabulary, D hidden size. Sums over the vocabulary are in float32 (float64 for a float64
model). The head is any differentiable function from hidden states to logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
Function = Callable[..., Any]

PLAIN_TILE = 2**26
"""Logits computed at once when plain PyTorch holds several float32 copies of them: 256 MiB each."""
FUSED_TILE = 5 * 2**26
"""The same when the arithmetic is fused and only bfloat16 logits exist: 640 MiB, 2048 rows at Qwen's vocabulary, enough
to keep a GPU's matrix units busy and to add to the head's gradient seldom."""


class TiledHead:
    """From hidden states to log-probabilities of targets and back, a tile of rows at a time.

    With `fuse`, the arithmetic between logits and log-probabilities is compiled for the first number of rows seen, that
    of a full chunk; other numbers take the plain path with smaller tiles.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, fuse: bool = False) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.fused = (torch.compile(_forward, dynamic=False), torch.compile(_backward, dynamic=False)) if fuse else None
        self.fused_rows: int | None = None

    def logprobs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """log p(target) of each row, 0 where the target is ignored, without a graph."""
        with torch.no_grad():
            math, tiles = self._plan(hidden_ND, targets_N)
            return torch.cat([math[0](self.head(h), t)[0] for h, t in tiles])

    def backward(self, hidden_ND: Tensor, targets_N: Tensor, dlogp_N: Tensor) -> Tensor:
        """d hidden from d logp; the head's own parameters receive their gradients on the way."""
        dhidden = torch.empty_like(hidden_ND)
        math, tiles = self._plan(hidden_ND, targets_N, dlogp_N, dhidden)
        for h, t, dlogp, out in tiles:
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                logp = _TargetLogProb.apply(self.head(h), t, *math)
            torch.autograd.backward(logp, dlogp)
            assert h.grad is not None
            out.copy_(h.grad)
        return dhidden

    def _plan(
        self, *rows: Tensor
    ) -> tuple[tuple[Callable[..., Any], Callable[..., Any]], Iterator[tuple[Tensor, ...]]]:
        total = rows[0].shape[0]
        if self.fused_rows is None:
            self.fused_rows = total
        if self.fused is not None and total == self.fused_rows:
            return self.fused, _tiles(FUSED_TILE // self.vocab_size, *rows)
        return (_forward, _backward), _tiles(PLAIN_TILE // self.vocab_size, *rows)


class _TargetLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, forward: Function, backward: Function) -> Tensor:
        logp, lse = forward(logits_NV, targets_N)
        ctx.save_for_backward(logits_NV, lse, targets_N)
        ctx.math = backward
        return logp

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.math(*ctx.saved_tensors, dlogp_N), None, None, None


def _forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, targets_N.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets_N == IGNORED, 0.0, picked - lse), lse


def _backward(logits_NV: Tensor, lse_N: Tensor, targets_N: Tensor, dlogp_N: Tensor) -> Tensor:
    logits = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    scale = torch.where(targets_N == IGNORED, 0.0, dlogp_N).unsqueeze(-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets_N.unsqueeze(-1)
    probs = (logits - lse_N.unsqueeze(-1)).exp()
    return (scale * (is_target.to(probs.dtype) - probs)).to(logits_NV.dtype)


def _tiles(most_rows: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of one size (but the last) of all tensors along their first dimension, of `most_rows` at the most."""
    total = rows[0].shape[0]
    num_tiles = -(-total // max(1, most_rows))
    tile = -(-total // num_tiles)
    for start in range(0, total, tile):
        yield tuple(x[start : start + tile] for x in rows)
