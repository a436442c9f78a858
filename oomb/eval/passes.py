"""A pass that is looked at and not trained on. T tokens, V vocabulary, D hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from oomb.engine.engine import Engine


@contextmanager
def noting(engine: Engine, rows: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within it, the engine's passes leave the log-probabilities of the whole vocabulary [V] at `rows`. The engine
    hands out those of given tokens, and to compare candidates by it would take a pass for each."""
    notes: dict[int, Tensor] = {}
    head = engine.head
    engine.head = _NotingHead(head, sorted(set(rows)), notes)  # type: ignore[assignment]
    try:
        yield notes
    finally:
        engine.head = head


class _NotingHead:
    """An engine's head that takes notes of some rows. Chunks come to it in order."""

    def __init__(self, head: Any, rows: list[int], notes: dict[int, Tensor]) -> None:
        self.head, self.rows, self.notes = head, rows, notes
        self.start = 0

    def logprobs(self, hidden_BTD: Tensor, targets_BT: Tensor, fuse: bool = False) -> Tensor:
        end = self.start + hidden_BTD.shape[1]
        wanted = [row for row in self.rows if self.start <= row < end]
        if wanted:
            chosen = torch.tensor([row - self.start for row in wanted], device=hidden_BTD.device)
            logits_NV = self.head.model.logits(hidden_BTD[0, chosen])
            wide = torch.promote_types(logits_NV.dtype, torch.float32)
            self.notes.update(zip(wanted, logits_NV.to(wide).log_softmax(-1).cpu()))
        self.start = end
        return self.head.logprobs(hidden_BTD, targets_BT, fuse)
