"""Split the tokens of a chunk over ranks and, inside attention, its heads (DeepSpeed-Ulysses).

Outside of attention a rank computes a part of each chunk's tokens. An all-to-all before attention gives it all tokens
of a part of the heads, and one after attention gives the tokens back. Pages hold the rank's own heads, so pages and
activations are divided by the number of ranks.

B batch, H heads, T tokens of a chunk, D head size, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomb.distributed.collectives import Group
from oomb.distributed.topology import TopologyError


class TokenShards:
    """The tokens and heads of this rank. With one rank, everything.

    Args:
        group: Ranks that share sequences.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size

    def share(self, x_BT: Tensor, filler: int = 0) -> Tensor:
        """Return this rank's tokens of a chunk. The last ranks are padded if the tokens do not divide evenly."""
        if self.size == 1:
            return x_BT
        length = x_BT.shape[1]
        each = -(-length // self.size)
        padded = torch.nn.functional.pad(x_BT, (0, each * self.size - length), value=filler)
        return padded[:, self.rank * each : (self.rank + 1) * each].contiguous()

    def whole(self, x_BT: Tensor, length: int) -> Tensor:
        """Return a chunk's values of all tokens, given those of this rank's tokens."""
        return x_BT if self.size == 1 else torch.cat(self.group.gather_tensor(x_BT.contiguous()), dim=1)[:, :length]

    def to_heads(self, x_BHTD: Tensor, length: int) -> Tensor:
        """Return this rank's heads of all tokens, given all heads of its tokens. Differentiable."""
        if self.size == 1:
            return x_BHTD
        num_heads = x_BHTD.shape[1]
        if num_heads < self.size:
            # Several ranks hold the same key and value head, each for its own query heads.
            x_BHTD = x_BHTD.repeat_interleave(self.size // num_heads, dim=1)
        parts = _Exchange.apply(x_BHTD.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)
        return parts.movedim(0, 2).flatten(2, 3)[:, :, :length]

    def to_tokens(self, x_BHTD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, given its heads of all tokens. Differentiable."""
        if self.size == 1:
            return x_BHTD
        length = x_BHTD.shape[2]
        each = -(-length // self.size)
        padded = torch.nn.functional.pad(x_BHTD, (0, 0, 0, each * self.size - length))
        parts = _Exchange.apply(padded.unflatten(2, (self.size, each)).movedim(2, 0), self.group)
        return parts.movedim(0, 1).flatten(1, 2)

    def own_heads(self, x_H: Tensor | None) -> Tensor | None:
        """Return this rank's part of a value per query head."""
        return x_H if x_H is None or self.size == 1 else x_H.unflatten(0, (self.size, -1))[self.rank]

    def heads_per_rank(self, layer: int, num_query_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Return how many query heads, and key and value heads, a rank holds.

        Raises:
            TopologyError: They cannot be divided.
        """
        divides = num_kv_heads % self.size == 0 or self.size % num_kv_heads == 0
        if num_query_heads % self.size or not divides:
            raise TopologyError(
                f"layer {layer} has {num_query_heads} query heads and {num_kv_heads} key and value heads, which cannot "
                f"be divided over {self.size} ranks: choose sp from "
                f"{', '.join(map(str, possible_sizes(num_query_heads, num_kv_heads)))}"
            )
        return num_query_heads // self.size, max(1, num_kv_heads // self.size)


def possible_sizes(num_query_heads: int, num_kv_heads: int) -> list[int]:
    """Return the numbers of ranks that heads can be divided over.

    >>> possible_sizes(28, 4)
    [1, 2, 4, 28]
    """
    return [
        size
        for size in range(1, num_query_heads + 1)
        if num_query_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]


class _Exchange(torch.autograd.Function):
    """All-to-all of [R, ...]: part r goes to rank r. So does the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_to_all(x.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_to_all(grad.contiguous()), None
