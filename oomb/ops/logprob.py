"""Log-probabilities of target tokens without a [tokens, vocabulary] tensor: the head runs in tiles, both ways.

B batch, T tokens, N rows (tokens that count), V vocabulary, D hidden size. Sums over the vocabulary are in float32
(float64 for a float64 model). The head is any differentiable function from hidden states to logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
Function = Callable[..., Any]

PLAIN_TILE = 2**26
"""Logits computed at once when plain PyTorch holds several float32 copies of them: 256 MiB each."""
FUSED_TILE = 5 * 2**26
"""The same when the arithmetic is fused and only bfloat16 logits exist: 640 MiB, 2048 rows at Qwen's vocabulary, enough
to keep a GPU's matrix units busy and to add to the head's gradient seldom."""


class Model(Protocol):
    """What has a head."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, hidden_ND: Tensor) -> Tensor: ...


class TiledHead:
    """From hidden states to log-probabilities of targets and back, a tile of rows at a time.

    With `fuse`, the arithmetic between logits and log-probabilities is compiled, for each number of rows anew: ask for
    it where many chunks are alike.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.fused = torch.compile(_forward, dynamic=False), torch.compile(_backward, dynamic=False)

    def logprobs(self, hidden_BTD: Tensor, targets_BT: Tensor, fuse: bool = False) -> Tensor:
        """[B, T]: log p(target), 0 where the target is ignored. Without a graph."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        rows, targets = _counted(targets_BT, hidden_ND.device)
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        logp = torch.zeros(len(hidden_ND), dtype=wide, device=hidden_ND.device)
        math, tiles = self._plan(fuse and isinstance(rows, slice), hidden_ND[rows], targets)
        with torch.no_grad():
            parts = [math[0](self.model.logits(h), t)[0] for h, t in tiles]
        if parts:
            logp[rows] = torch.cat(parts).to(wide)
        return logp.view(targets_BT.shape)

    def backward(self, hidden_BTD: Tensor, targets_BT: Tensor, dlogp_BT: Tensor, fuse: bool = False) -> Tensor:
        """d hidden from d logp; the head's own parameters receive their gradients on the way."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        rows, targets = _counted(targets_BT, hidden_ND.device)
        dhidden = torch.zeros_like(hidden_ND)
        counted = dhidden[rows]
        dlogp_N = dlogp_BT.flatten()[rows]
        math, tiles = self._plan(fuse and isinstance(rows, slice), hidden_ND[rows], targets, dlogp_N, counted)
        for h, t, dlogp, out in tiles:
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                logp = _TargetLogProb.apply(self.model.logits(h), t, *math)
            torch.autograd.backward(logp, dlogp)
            assert h.grad is not None
            out.copy_(h.grad)
        dhidden[rows] = counted
        return dhidden.view_as(hidden_BTD)

    def _plan(self, fuse: bool, *rows: Tensor) -> tuple[tuple[Function, Function], Iterator[tuple[Tensor, ...]]]:
        if fuse:
            return self.fused, _tiles(FUSED_TILE // self.model.vocab_size, *rows)
        return (_forward, _backward), _tiles(PLAIN_TILE // self.model.vocab_size, *rows)


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


def _counted(targets_BT: Tensor, device: torch.device) -> tuple[Tensor | slice, Tensor]:
    """The rows that the head must run on, and their targets. All of them if most count: leaving out a few would only
    spoil the shape."""
    targets = targets_BT.flatten()
    rows = (targets != IGNORED).nonzero().flatten()
    if len(rows) > 0.9 * len(targets):
        return slice(None), targets.to(device)
    return rows.to(device), targets[rows].to(device)


def _tiles(most_rows: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of one size (but the last) of all tensors along their first dimension, of `most_rows` at the most."""
    total = rows[0].shape[0]
    if total == 0:
        return
    num_tiles = -(-total // max(1, most_rows))
    tile = -(-total // num_tiles)
    for start in range(0, total, tile):
        yield tuple(x[start : start + tile] for x in rows)
