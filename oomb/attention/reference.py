"""Compute attention and its log-sum-exp in plain PyTorch, forward and backward.

Every backend is tested against this module. It also serves what no other backend supports: float32 and float64 on a
GPU, soft-capped scores, odd head sizes. B batch, H query heads, K key/value heads (H = K x G), T queries, S keys,
D head size (V may have its own).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE_ELEMENTS = 2**25
"""Scores computed at once: 128 MiB in float32, whatever the context."""


def forward(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, T, Dv] and its LSE [B, H, T].

    `causal` is aligned to the bottom right: the last query sees the last key. With `window` w, query i sees keys
    i-w+1 to i. Two queries over three keys, causal: query 0 sees keys 0 and 1, query 1 sees all three.
    """
    B, H, T, _ = q_BHTD.shape
    out = q_BHTD.new_empty(B, H, T, v_BKSD.shape[-1])
    lse = torch.empty(B, H, T, dtype=_compute_dtype(q_BHTD), device=q_BHTD.device)
    for rows, _, q, k, v, hidden in _tiles(q_BHTD, k_BKSD, v_BKSD, causal, window):
        scores, _ = _scores(q, k, scale, softcap, hidden)
        tile_lse = scores.logsumexp(-1)
        probs = (scores - tile_lse.unsqueeze(-1)).exp()
        out[:, :, rows] = (probs @ v).reshape(B, H, -1, v.shape[-1]).to(out.dtype)
        lse[:, :, rows] = tile_lse.reshape(B, H, -1)
    return out, lse


def backward(
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `out` and `lse` may belong to a softmax over more keys than `k`: then these are exactly the parts due to `k`.
    """
    B, H, _, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    compute = _compute_dtype(q_BHTD)
    dq = torch.empty_like(q_BHTD)
    dk = torch.zeros(k_BKSD.shape, dtype=compute, device=k_BKSD.device)
    dv = torch.zeros(v_BKSD.shape, dtype=compute, device=v_BKSD.device)
    for rows, keys, q, k, v, hidden in _tiles(q_BHTD, k_BKSD, v_BKSD, causal, window):
        scores, slope = _scores(q, k, scale, softcap, hidden)
        dout = _fold(dout_BHTD[:, :, rows], K).to(compute)
        delta = (dout * _fold(out_BHTD[:, :, rows], K).to(compute)).sum(-1, keepdim=True)
        probs = (scores - _fold(lse_BHT[:, :, rows].unsqueeze(-1), K).to(compute)).exp()
        dv[:, :, keys] += probs.mT @ dout
        dscores = probs * (dout @ v.mT - delta)
        if slope is not None:
            dscores = dscores * slope
        dq[:, :, rows] = (dscores @ k * scale).reshape(B, H, -1, D).to(dq.dtype)
        dk[:, :, keys] += dscores.mT @ q * scale
    return dq, dk.to(k_BKSD.dtype), dv.to(v_BKSD.dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _fold(x_BHTD: Tensor, num_kv_heads: int) -> Tensor:
    """Reshape [B, H, T, D] to [B, K, G*T, D]: heads of a group become rows, so K and V need no copy per head."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.reshape(B, num_kv_heads, H // num_kv_heads * T, D)


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield tiles of queries whose scores are small enough, with the keys that any of their queries can see."""
    B, H, T, _ = q.shape
    K, S = k.shape[1], k.shape[2]
    compute = _compute_dtype(q)
    tile = max(1, TILE_ELEMENTS // (B * H * S))
    for start in range(0, T, tile):
        rows = slice(start, min(T, start + tile))
        first, last = S - T + rows.start, S - T + rows.stop - 1
        low = max(0, first - window + 1) if window else 0
        keys = slice(low, last + 1 if causal else S)
        hidden = None
        if causal or window:
            query_at = torch.arange(first, last + 1, device=q.device).unsqueeze(-1)
            key_at = torch.arange(keys.start, keys.stop, device=q.device)
            hidden = key_at > query_at
            if window:
                hidden |= key_at <= query_at - window
            hidden = hidden.repeat(H // K, 1)
        yield (
            rows,
            keys,
            _fold(q[:, :, rows], K).to(compute),
            k[:, :, keys].to(compute),
            v[:, :, keys].to(compute),
            hidden,
        )


def _scores(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, hidden: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores, and the derivative of the soft cap if there is one."""
    scores = q @ k.mT * scale
    slope = None
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = squashed * softcap, 1 - squashed.square()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, slope
