"""Average gradients over ranks that hold the same weights and train on different sequences or tokens.

Every rank runs its own sequences, of any number and length, and the ranks meet once: at the end of the backward, or of
the last one of a step. Gradients are averaged, as in DistributedDataParallel, so averaging twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oomb.distributed.collectives import Group

BUCKET_BYTES = 64 << 20
"""Gradients are copied together until they take this much, and reduced at once."""


class GlobalSum(torch.autograd.Function):
    """The sum of a loss over ranks, the same number on all of them.

    Its gradient is scaled by the number of ranks, because gradients are averaged afterwards.
    """

    @staticmethod
    def forward(ctx: Any, share: Tensor, sync: GradientSync) -> Tensor:
        ctx.sync = sync
        sync.last_share = share.detach()
        # In float64, so that a rank's share need not have the precision of the others.
        return sync.group.sum_(share.double()).to(share.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A rank without sequences has nothing else that would call it.
        ctx.sync.queue()
        return grad * ctx.sync.group.size, None


class GradientSync:
    """Averages the gradients of a model over ranks at the end of each backward.

    Args:
        ranks: All ranks with the same weights.
        parameters: Returns the model's parameters.
        replicas: Those of them that train on different sequences. Defaults to all.
    """

    def __init__(
        self, ranks: Group, parameters: Callable[[], Iterable[nn.Parameter]], replicas: Group | None = None
    ) -> None:
        self.ranks, self._replicas, self._parameters = ranks, ranks if replicas is None else replicas, parameters
        self._is_on, self.is_alone = True, False
        self.waited_s = 0.0
        """Seconds that this rank has waited for others before averages. Set it to 0 to start over."""
        self.last_share: Tensor | None = None
        """This rank's share of the last loss that was summed over ranks."""
        self._queued_in = -1
        """The backward that will average at its end."""

    @property
    def group(self) -> Group:
        """The ranks whose losses are summed now."""
        return Group() if self.is_alone else self._replicas

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let each replica compute losses of its own for the duration of a `with`, without the others."""
        before, self.is_alone = self.is_alone, True
        try:
            yield
        finally:
            self.is_alone = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients as they are for the duration of a `with`."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def queue(self) -> None:
        """Average at the end of the backward that is running. Call this in the backward of an autograd function."""
        backward = torch._C._current_graph_task_id()
        if self.ranks.size > 1 and self._is_on and self._queued_in != backward:
            self._queued_in = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.average)

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean over ranks.

        If a rank lacks a gradient that others have, its gradient counts as zero. Gradients in 16 bits are summed in
        float32.
        """
        if self.ranks.size == 1:
            return
        trained = [p for p in self._parameters() if p.requires_grad]
        if not trained:
            return
        device = trained[0].device
        has_grad = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=device)
        began = time.monotonic()
        self.ranks.max_(has_grad)
        self.waited_s += time.monotonic() - began
        used = [p for p, flag in zip(trained, has_grad.tolist(), strict=True) if flag]
        pending: list[tuple[Any, Tensor, list[Tensor]]] = []
        for pieces in _buckets(used):
            # One more bucket is on its way while this one is copied.
            while len(pending) > 1:
                self._finish(*pending.pop(0))
            whole = _joined(pieces)
            pending.append((self.ranks.start_sum_(whole), whole, pieces))
        for work, whole, pieces in pending:
            self._finish(work, whole, pieces)

    def _finish(self, work: Any, whole: Tensor, pieces: list[Tensor]) -> None:
        self.ranks.finish(work)
        whole.div_(self.ranks.size)
        if len(pieces) > 1 or pieces[0].data_ptr() != whole.data_ptr():
            torch._foreach_copy_(pieces, list(whole.split([piece.numel() for piece in pieces])))


def _joined(pieces: list[Tensor]) -> Tensor:
    """Return the pieces in one tensor of at least 32 bits: a copy, or a single piece itself."""
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if len(pieces) == 1:
        return pieces[0].to(wide)
    return torch.cat([piece.to(wide) for piece in pieces])


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yield flat views of gradients of one dtype and device, up to `BUCKET_BYTES` at a time."""
    pieces: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()
        itemsize = max(4, parameter.grad.itemsize)
        for piece in parameter.grad.view(-1).split(max(1, BUCKET_BYTES // itemsize)):
            fits = not pieces or (piece.dtype, piece.device) == (pieces[0].dtype, pieces[0].device)
            if pieces and (not fits or size + piece.numel() * itemsize > BUCKET_BYTES):
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.numel() * itemsize
    if pieces:
        yield pieces
