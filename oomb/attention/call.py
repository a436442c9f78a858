"""Define what a layer asks of attention and which past each query of a chunk sees.

Shapes: B batch, T tokens of the chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of its attention function for the current chunk.

    Args:
        layer: index of the decoder layer.
        q: queries [B, query heads, T, D] after RoPE.
        k: this chunk's own keys [B, KV heads, T, D] after RoPE.
        v: this chunk's own values [B, KV heads, T, value size].
        scale: factor of the scores before the softmax.
        window: size of the sliding window in tokens, if the layer has one.
        softcap: bound of the scores, if the layer has one.
        sinks: learned attention sinks [query heads], if the layer has any.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Span:
    """Consecutive queries of a chunk that see the same past.

    Args:
        start: first query, counted from the start of the chunk.
        end: one past the last query.
        visible: ranges of earlier tokens the queries attend to; () for a document that starts in this chunk.
    """

    start: int
    end: int
    visible: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AttentionSpec:
    """How to compute the attention of a call: everything but its tensors.

    Args:
        scale: factor of the scores before the softmax.
        window: size of the sliding window in tokens, or None.
        softcap: bound of the scores, or None.
        kernels: backend to use, as in `Config.kernels`.
        rule: how pages are scored, as in `Config.page_rule`.
        spans: spans of the chunk, in order. Only the first can see a past; the others are packed documents. Empty if
            the whole chunk is one span.
        sum_scores: sums page scores over ranks that hold other heads of the layer, in place.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    kernels: str = "auto"
    rule: str = "mass"
    spans: tuple[Span, ...] = ()
    sum_scores: Callable[[Tensor], Tensor] | None = None

    @property
    def packed_starts(self) -> tuple[int, ...]:
        """Where the packed documents after the first span start, counted from the first of them."""
        return tuple(span.start - self.spans[1].start for span in self.spans[1:])
