"""Check a batch of tokens and divide it into chunks and spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from oomb.attention.call import Span
from oomb.ops.logprob import IGNORE_INDEX


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a batch, the part whose activations exist at one time."""

    index: int
    start: int
    end: int
    span_end: int
    """The end of its first span, the only one with a past."""


@dataclass(frozen=True)
class Batch:
    """Token ids, and for every position the token to predict there. Both [B, T], on the CPU."""

    ids: Tensor
    targets: Tensor
    """-100: nothing to predict."""
    starts: tuple[int, ...] = (0,)
    """Where documents start. Only a batch of one row can have several."""

    @classmethod
    def validate(
        cls,
        input_ids: Tensor,
        labels: Tensor | None,
        attention_mask: Tensor | None,
        *,
        vocab_size: int,
        num_positions: int | None,
        pad_token_id: int | None,
        placeholders: Mapping[int, str] = MappingProxyType({}),
    ) -> Batch:
        """Return the batch, or raise ValueError saying what is wrong with it.

        Args:
            input_ids: [B, T] token ids.
            labels: [B, T], not shifted, -100 where nothing is predicted. None: `input_ids`.
            attention_mask: [B, T]: 0 for padding, which must be on the right.
            vocab_size: Ids and labels must be below this.
            num_positions: Learned positions of the model; None if it has no limit.
            pad_token_id: Recognizes left padding if there is no attention mask.
            placeholders: Ids that stand for images and the like, and the config fields that name them.
        """
        ids = _to_token_ids("input_ids", input_ids)
        if ids.ndim != 2:
            raise ValueError(
                f"input_ids has shape {tuple(ids.shape)}; it must be [batch, tokens] (unsqueeze a single sequence)"
            )
        if ids.numel() == 0:
            raise ValueError(f"input_ids is empty: its shape is {tuple(ids.shape)}")
        check_length(ids.shape[1], num_positions)
        _check_range("input_ids", ids, ids, vocab_size)
        text = ids
        targets = ids if labels is None else _to_token_ids("labels", labels)
        if targets.shape != ids.shape:
            raise ValueError(
                f"labels has shape {tuple(targets.shape)} but input_ids has {tuple(ids.shape)}; they must be equal"
            )
        if labels is not None:
            _check_range("labels", targets, targets[targets != IGNORE_INDEX], vocab_size)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask).to("cpu", torch.bool)
            if mask.shape != ids.shape:
                raise ValueError(f"attention_mask has shape {tuple(mask.shape)} but input_ids has {tuple(ids.shape)}")
            for row in (mask[:, 1:] & ~mask[:, :-1]).any(1).nonzero().flatten().tolist():
                raise ValueError(_left_padding_text(row) if not mask[row, 0] else _gap_text(row, mask[row]))
            targets, text = (x.masked_fill(~mask, IGNORE_INDEX) for x in (targets, ids))
        elif pad_token_id is not None and ids.shape[1] > 1:
            for row in ((ids[:, 0] == pad_token_id) & (ids[:, -1] != pad_token_id)).nonzero().flatten().tolist():
                raise ValueError(_left_padding_text(row) + "; if this is text, pass an attention_mask of ones")
        _reject_placeholders(text, placeholders)
        return cls(ids=ids, targets=shift_labels(targets))

    @property
    def longest_document(self) -> int:
        """Length of the longest document in tokens."""
        return max(b - a for a, b in pairwise((*self.starts, self.ids.shape[1])))

    def chunks(self, chunk_size: int) -> list[Chunk]:
        """Return the chunks up to the last one with a target: later ones have no gradient."""
        length = self.ids.shape[1]
        counted = (self.targets != IGNORE_INDEX).any(0).nonzero().flatten()
        last = int(counted[-1]) if len(counted) else 0
        bounds = [(start, min(length, start + chunk_size)) for start in range(0, last + 1, chunk_size)]
        return [
            Chunk(index, start, end, start + self.spans(start, end)[0].end) for index, (start, end) in enumerate(bounds)
        ]

    def spans(self, start: int, end: int) -> tuple[Span, ...]:
        """Return the spans of the chunk [start, end). The first continues a document if its start is not here."""
        cuts = [0, *(at - start for at in self.starts if start < at < end), end - start]
        first = self._document_start(start)
        visible = ((first, start),) if first < start else ()
        return tuple(Span(a, b, visible if a == 0 else ()) for a, b in pairwise(cuts))

    def positions(self, start: int, end: int, device: torch.device) -> Tensor:
        """Return [1, T]: the position of each token of the chunk in its document."""
        first = self._document_start(start)
        found = torch.arange(start - first, end - first, device=device)
        for span in self.spans(start, end)[1:]:
            found[span.start : span.end] = torch.arange(span.end - span.start, device=device)
        return found.unsqueeze(0)

    def _document_start(self, token: int) -> int:
        """Return the start of the document that a token is in."""
        return self.starts[bisect_right(self.starts, token) - 1]


def check_length(length: int, num_positions: int | None) -> None:
    """Raise ValueError if a document is longer than the model's learned positions."""
    if num_positions is not None and length > num_positions:
        raise ValueError(
            f"input_ids has {length} tokens but the model has learned only {num_positions} positions: cut the sequence"
        )


def shift_labels(labels: Tensor) -> Tensor:
    """Return the target of every position: the label of the next one, along the last dimension.

    >>> shift_labels(torch.tensor([5, 6, 7]))
    tensor([   6,    7, -100])
    """
    last = labels.new_full((*labels.shape[:-1], 1), IGNORE_INDEX)
    return torch.cat([labels[..., 1:], last], dim=-1)


def _to_token_ids(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; pass a tensor of token ids")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {x.dtype}; token ids must be integers".replace("torch.", ""))
    # A copy, since the caller may reuse the buffer before the gradient pass reads it.
    return x.detach().to("cpu", torch.int64, copy=True)


def _check_range(name: str, x: Tensor, counted: Tensor, vocab_size: int) -> None:
    wrong = counted[(counted < 0) | (counted >= vocab_size)]
    if len(wrong):
        where = (x == wrong[0]).nonzero()[0].tolist()
        raise ValueError(
            f"{name} has the id {int(wrong[0])} at {where}, outside the model's vocabulary of {vocab_size}: "
            "is this the model's own tokenizer?"
        )


def _reject_placeholders(ids: Tensor, placeholders: Mapping[int, str]) -> None:
    for token, name in placeholders.items():
        where = (ids == token).nonzero().tolist()
        if where:
            raise ValueError(
                f"input_ids has the id {token}, the model's config.{name}, at {where[0]} ({len(where)} times): images, "
                "video and audio are not supported; pass text only"
            )


def _gap_text(row: int, mask: Tensor) -> str:
    return (
        f"row {row} of attention_mask has a gap at token {int(mask.int().argmin())}: padding may only come after the "
        "text. Remove those tokens, or unmask them and set their labels to -100"
    )


def _left_padding_text(row: int) -> str:
    return (
        f"row {row} is padded on the left, so positions would be wrong. Pad on the right "
        '(tokenizer.padding_side = "right")'
    )
