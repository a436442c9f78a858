"""Compute log-probabilities of target tokens from the logits of one tile of rows, forward and backward.

The head runs tile by tile, so no [tokens, vocabulary] tensor exists. Sums over the vocabulary are in float32 (float64
for a float64 model). B batch, T tokens, N rows (tokens that have a target), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
Function = Callable[..., Any]

PLAIN_TILE = 2**26
"""Logits computed at once in plain PyTorch, which holds several float32 copies of them: 256 MiB each."""
FUSED_TILE = 5 * 2**26
"""The same if the arithmetic is compiled and only bfloat16 logits exist: 640 MiB, 2048 rows with Qwen's vocabulary.
That keeps a GPU's tensor cores busy, and adds to the head's gradient rarely."""


class TargetLogProb(torch.autograd.Function):
    """`target_logprob` as an autograd function. `forward` and `backward` are the functions below, compiled or not."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, forward: Function, backward: Function) -> Tensor:
        logp, lse = forward(logits_NV, targets_N)
        ctx.save_for_backward(logits_NV, lse, targets_N)
        ctx.math = backward
        return logp

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.math(*ctx.saved_tensors, dlogp_N), None, None, None


def target_logprob(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [N] of the targets (0 for `IGNORE_INDEX`) and the LSE [N] of the logits."""
    logits = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, targets_N.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets_N == IGNORE_INDEX, 0.0, picked - lse), lse


def target_logprob_backward(logits_NV: Tensor, lse_N: Tensor, targets_N: Tensor, dlogp_N: Tensor) -> Tensor:
    """Return the gradient of the logits [N, V]."""
    logits = logits_NV.float() if logits_NV.dtype.itemsize < 4 else logits_NV
    scale = torch.where(targets_N == IGNORE_INDEX, 0.0, dlogp_N).unsqueeze(-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets_N.unsqueeze(-1)
    probs = (logits - lse_N.unsqueeze(-1)).exp()
    return (scale * (is_target.to(probs.dtype) - probs)).to(logits_NV.dtype)


def token_stats(logits_NV: Tensor, targets_N: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return statistics [N] of each row's distribution by name, 0 where the target is ignored.

    Computed a tile at a time: the logits of a fused head are too large for float32 copies.

    Args:
        logits_NV: logits of every row.
        targets_N: target of every row.
        names: any of "entropy", "mean_logits", "log_sum_sq_probs" (log of the sum of squared probabilities) and
            "is_top1" (whether the target is the most likely token).
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    if not found:
        return {}
    for logits, targets in split_tiles(PLAIN_TILE // logits_NV.shape[1], logits_NV, targets_N):
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        lse = logits.logsumexp(-1)
        is_counted = targets != IGNORE_INDEX
        for name, parts in found.items():
            parts.append(torch.where(is_counted, _STATS[name](logits, lse, targets), 0))
    return {name: torch.cat(parts) for name, parts in found.items()}


_STATS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda logits, lse, targets: lse - (logits.softmax(-1) * logits).sum(-1),
    "mean_logits": lambda logits, lse, targets: logits.mean(-1),
    "log_sum_sq_probs": lambda logits, lse, targets: (2 * logits).logsumexp(-1) - 2 * lse,
    "is_top1": lambda logits, lse, targets: logits.argmax(-1) == targets,
}


def rows_with_targets(targets_BT: Tensor, device: torch.device) -> tuple[Tensor | slice, Tensor]:
    """Return the rows that have a target, and their targets. If almost all have one, return all: the shape is regular.

    The rows index the flattened [B * T] tokens.
    """
    targets = targets_BT.flatten()
    rows = (targets != IGNORE_INDEX).nonzero().flatten()
    if len(rows) > 0.9 * len(targets):
        return slice(None), targets.to(device)
    return rows.to(device), targets[rows].to(device)


def split_tiles(most_rows: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal slices of all tensors along their first dimension, each of at most `most_rows`.

    >>> [len(tile) for tile, in split_tiles(4, torch.zeros(10))]
    [4, 4, 2]
    """
    total = rows[0].shape[0]
    if total == 0:
        return
    num_tiles = -(-total // max(1, most_rows))
    tile = -(-total // num_tiles)
    for start in range(0, total, tile):
        yield tuple(x[start : start + tile] for x in rows)
