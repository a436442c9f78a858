"""Map hidden states to numbers per token, such as log-probabilities, and back, one tile of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
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
    token_stats,
)


class Head(Protocol):
    """What the engine runs on the last hidden states of every chunk.

    `forward` runs in the fill pass, chunk by chunk in order; `backward` runs in the gradient pass. The engine returns
    the fields of all chunks joined along the sequence.
    """

    fields: tuple[str, ...]
    """Names of the outputs of `forward`."""
    constant_fields: tuple[str, ...]
    """The fields without a gradient."""

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        """Return each field [B, T]. Runs without a graph."""

    def backward(
        self, hidden_BTD: Tensor, targets_BT: Tensor, grads_BT: Sequence[Tensor | None], *, fused: bool
    ) -> Tensor:
        """Return the gradient of `hidden_BTD`, given those of the fields (None: zero), and accumulate the gradients of
        the head's own parameters."""


class LMHead(Protocol):
    """A model with a language modeling head."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, hidden_ND: Tensor) -> Tensor: ...


class TokenHead:
    """Log-probability of each target, and statistics of its distribution if asked for.

    Args:
        model: the model whose head to apply.
        stats: names of token statistics to return as fields of their own; see `oomb.ops.logprob.token_stats`. They
            have no gradient.
    """

    def __init__(self, model: LMHead, stats: Sequence[str] = ()) -> None:
        self.model = model
        self.fields = ("logprob", *stats)
        self.constant_fields = tuple(stats)

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        """Return log p(target) and the statistics, each [B, T], 0 where the target is ignored."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        rows, targets_N = rows_with_targets(targets_BT, hidden_ND.device)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        fields = {
            name: torch.zeros(len(hidden_ND), dtype=torch.bool if name == "is_top1" else dtype, device=hidden_ND.device)
            for name in self.fields
        }
        (logprob, _), tiles = self._tiles(fused and isinstance(rows, slice), hidden_ND[rows], targets_N)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.fields}
        with torch.no_grad():
            for hidden, targets in tiles:
                logits_NV = self.model.logits(hidden)
                parts["logprob"].append(logprob(logits_NV, targets)[0])
                for name, values in token_stats(logits_NV, targets, self.constant_fields).items():
                    parts[name].append(values)
        for name, values_N in fields.items():
            if parts[name]:
                values_N[rows] = torch.cat(parts[name]).to(values_N.dtype)
        return tuple(values_N.view(targets_BT.shape) for values_N in fields.values())

    def backward(
        self, hidden_BTD: Tensor, targets_BT: Tensor, grads_BT: Sequence[Tensor | None], *, fused: bool
    ) -> Tensor:
        """Return d hidden from d log p; the head's own parameters accumulate their gradients."""
        hidden_ND = hidden_BTD.detach().flatten(0, 1)
        dhidden_ND = torch.zeros_like(hidden_ND)
        dlogp_BT = grads_BT[0]
        if dlogp_BT is None:
            return dhidden_ND.view_as(hidden_BTD)
        rows, targets_N = rows_with_targets(targets_BT, hidden_ND.device)
        counted = dhidden_ND[rows]
        dlogp_N = dlogp_BT.flatten()[rows]
        math, tiles = self._tiles(fused and isinstance(rows, slice), hidden_ND[rows], targets_N, dlogp_N, counted)
        for hidden, targets, dlogp, dhidden in tiles:
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad():
                logp = TargetLogProb.apply(self.model.logits(hidden), targets, *math)
            torch.autograd.backward(logp, dlogp)
            assert hidden.grad is not None
            dhidden.copy_(hidden.grad)
        dhidden_ND[rows] = counted
        return dhidden_ND.view_as(hidden_BTD)

    def _tiles(self, fused: bool, *rows: Tensor) -> tuple[tuple[Function, Function], Iterator[tuple[Tensor, ...]]]:
        if fused:
            return _compiled(), split_tiles(FUSED_TILE // self.model.vocab_size, *rows)
        return (target_logprob, target_logprob_backward), split_tiles(PLAIN_TILE // self.model.vocab_size, *rows)


class VocabRowsHead(TokenHead):
    """A `TokenHead` that also keeps the log-probabilities of the whole vocabulary at a few positions.

    Comparing candidates by the log-probabilities of their tokens alone would take one pass per candidate.

    Args:
        model: the model whose head to apply.
        positions: positions of the first row of the batch.
    """

    def __init__(self, model: LMHead, positions: Sequence[int]) -> None:
        super().__init__(model)
        self.positions = sorted(set(positions))
        self.logprobs_V: dict[int, Tensor] = {}
        """Log-probabilities [V] by position, on the CPU. Filled by the fill pass."""
        self._start = 0

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
        """Return log p(target) [B, T], and keep the rows that lie in this chunk."""
        start, self._start = self._start, self._start + hidden_BTD.shape[1]
        positions = [position for position in self.positions if start <= position < self._start]
        if positions:
            rows = torch.tensor([position - start for position in positions], device=hidden_BTD.device)
            logits_NV = self.model.logits(hidden_BTD[0, rows])
            dtype = torch.promote_types(logits_NV.dtype, torch.float32)
            self.logprobs_V.update(zip(positions, logits_NV.to(dtype).log_softmax(-1).cpu(), strict=True))
        return super().forward(hidden_BTD, targets_BT, fused=fused)


@cache
def _compiled() -> tuple[Function, Function]:
    """Return the arithmetic between logits and log-probabilities, compiled once per shape."""
    return torch.compile(target_logprob, dynamic=False), torch.compile(target_logprob_backward, dynamic=False)
