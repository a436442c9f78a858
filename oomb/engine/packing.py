"""Documents of any lengths, laid out in sequences of chunks without padding.

A document that is longer than a chunk has a sequence to itself. What its last chunk leaves free is filled with short
documents, and the other short ones share chunks among themselves; none of them sees another. Long ones begin at a
chunk's beginning, so all pages of a sequence belong to one document.

    lengths 10, 3, 2, 5, chunks of 4:   [0 0 0 0][0 0 0 0][0 0 2 2]   [3 3 3 3][3 1 1 1]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oomb.engine.batch import Batch, check_length
from oomb.ops.logprob import IGNORE_INDEX


def best_fit(lengths: Sequence[int], chunk_size: int, may_share: bool = True) -> list[list[int]]:
    """Which documents make up each sequence, in this order. Each goes, the longest first, where it leaves the least
    room (best fit); `may_share=False` gives everyone a sequence of its own."""
    found: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """(free tokens of the last chunk, sequence), ascending."""
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        at = bisect_left(rooms, (length, -1))
        if may_share and length <= chunk_size and at < len(rooms):
            room, index = rooms.pop(at)
            found[index].append(document)
        else:
            room, index = -(-length // chunk_size) * chunk_size, len(found)
            found.append([document])
        if room > length:
            insort(rooms, (room - length, index))
    return found


@dataclass(frozen=True)
class PackedInputs:
    """What a caller gave, as batches to compute, and the way back."""

    batches: tuple[Batch, ...]
    spans: tuple[tuple[int, int, int, int, int], ...] | None = None
    """Of every document: row and first column in what was given, then batch, first token and length. None: the one
    batch is what was given."""
    shape: tuple[int, int] | None = None
    """Of what was given; None: a list of documents."""

    @property
    def num_counted(self) -> int:
        return sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in self.batches)

    def join(self, found: Sequence[Tensor]) -> Any:
        """One number per token, [B, T] of each batch, in the shape of what was given; 0 where nothing was."""
        if self.spans is None:
            return found[0]
        parts = [(row, at, found[batch][0, first : first + n]) for row, at, batch, first, n in self.spans]
        if self.shape is None:
            return [part for _, _, part in parts]
        whole = found[0].new_zeros(self.shape)
        rows = torch.cat([torch.full((len(part),), row) for row, _, part in parts])
        columns = torch.cat([torch.arange(at, at + len(part)) for _, at, part in parts])
        return whole.index_put((rows.to(whole.device), columns.to(whole.device)), torch.cat([p for *_, p in parts]))


def pack_documents(
    documents: Sequence[tuple[int, int, Tensor, Tensor]],
    chunk_size: int,
    may_share: bool,
    shape: tuple[int, int] | None = None,
) -> PackedInputs:
    """Batches of `documents`: row and first column of each, its ids and its targets."""
    layout = best_fit([len(ids) for *_, ids, _ in documents], chunk_size, may_share)
    batches, spans = [], {}
    for batch, members in enumerate(layout):
        starts, pairs = [0], [documents[i][2:] for i in members]
        for i in members:
            row, at, ids, _ = documents[i]
            spans[i] = row, at, batch, starts[-1], len(ids)
            starts.append(starts[-1] + len(ids))
        whole_ids, targets = (torch.cat([pair[i] for pair in pairs]).unsqueeze(0) for i in (0, 1))
        batches.append(Batch(ids=whole_ids, targets=targets, starts=tuple(starts[:-1])))
    return PackedInputs(tuple(batches), tuple(spans[i] for i in range(len(documents))), shape)


def pack_inputs(
    input_ids: Tensor | list[Tensor],
    labels: Tensor | list[Tensor] | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    chunk_size: int,
    may_share: bool,
    **limits: Any,
) -> PackedInputs:
    """Checks what a caller passes and arranges it. A batch without padding stays as it is; what has padding, several
    documents in a row or is a list is taken apart. `limits` are those of `Batch.check`."""
    if isinstance(input_ids, list):
        return _read_list(input_ids, labels, attention_mask, position_ids, chunk_size, may_share, limits)
    if isinstance(labels, list):
        raise ValueError(f"input_ids is a tensor and labels a list of {len(labels)}; they must be alike")
    # A row may be longer than all that stands in it.
    batch = Batch.validate(input_ids, labels, attention_mask, **{**limits, "num_positions": None})
    num_rows, length = batch.ids.shape
    ends, numbered = [length] * num_rows, None
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask).to("cpu")
        ends = mask.to(torch.bool).sum(1).tolist()
        if (mask > 1).any():
            numbered = _numbered_starts(mask, ends)
    starts = numbered or [[0]] * num_rows
    if position_ids is not None:
        starts = _starts(position_ids, batch.ids.shape, ends)
        for row, (own, other) in enumerate(zip(starts, numbered or starts, strict=True)):
            if own != other:
                raise ValueError(
                    f"in row {row} documents begin at {own} by position_ids and at {other} by the numbers in "
                    "attention_mask: make them agree, or leave one of the two out"
                )
    bounds = [(*(at for at in first if at < end), end) for first, end in zip(starts, ends, strict=True)]
    check_length(max(b - a for row in bounds for a, b in pairwise((0, *row))), limits["num_positions"])
    if all(end == length and row == [0] for end, row in zip(ends, starts, strict=True)):
        return PackedInputs((batch,))
    documents = []
    for row, marks in enumerate(bounds):
        for a, b in pairwise(marks):
            if a < b:
                targets = batch.targets[row, a:b].clone()
                targets[-1] = IGNORE_INDEX  # it is another document's token, or padding
                documents.append((row, a, batch.ids[row, a:b], targets))
    if not documents:
        raise ValueError("attention_mask is 0 everywhere: there is nothing to compute")
    return pack_documents(documents, chunk_size, may_share, (num_rows, length))


def _read_list(
    input_ids: list[Tensor],
    labels: Tensor | list[Tensor] | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    chunk_size: int,
    may_share: bool,
    limits: dict[str, Any],
) -> PackedInputs:
    if not input_ids:
        raise ValueError("input_ids is an empty list; give one document or more")
    if attention_mask is not None or position_ids is not None:
        raise ValueError("a list of documents has neither padding nor position_ids: leave attention_mask and those out")
    if labels is not None and (isinstance(labels, Tensor) or len(labels) != len(input_ids)):
        count = "a tensor" if isinstance(labels, Tensor) else f"a list of {len(labels)}"
        raise ValueError(f"input_ids is a list of {len(input_ids)} documents and labels {count}; they must be alike")
    documents = []
    for index, ids in enumerate(input_ids):
        try:
            if not isinstance(ids, Tensor):
                raise ValueError(f"input_ids is a {type(ids).__name__}; a document is a tensor of token ids")
            if ids.ndim != 1:
                raise ValueError(f"input_ids has shape {tuple(ids.shape)}; a document is a tensor of one dimension")
            row, own = ids[None], None if labels is None else labels[index][None]
            # A document may begin with the padding token: there is no padding in a list.
            batch = Batch.validate(row, own, None, **{**limits, "pad_token_id": None})
        except ValueError as error:
            raise ValueError(f"document {index}: {error}") from None
        documents.append((index, 0, batch.ids[0], batch.targets[0]))
    return pack_documents(documents, chunk_size, may_share)


def _numbered_starts(mask: Tensor, ends: Sequence[int]) -> list[list[int]]:
    """Where documents begin in each row of a mask that numbers them: where the number changes."""
    found = []
    for index, (row, end) in enumerate(zip(mask, ends, strict=True)):
        starts = [0, *((row[1:end] != row[: max(0, end - 1)]).nonzero().flatten() + 1).tolist()] if end else []
        numbers = row[starts].tolist()
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"row {index} of attention_mask numbers its documents {numbers}: a number is reused after another one; "
                "give each document, from its first token to its last, a number of its own"
            )
        found.append(starts)
    return found


def _starts(position_ids: Tensor, shape: torch.Size, ends: Sequence[int]) -> list[list[int]]:
    """Where documents begin in each row: where positions begin anew."""
    positions = torch.as_tensor(position_ids).to("cpu")
    if positions.ndim == 1:
        positions = positions.unsqueeze(0)
    if positions.shape != shape and positions.shape != (1, shape[1]):
        raise ValueError(f"position_ids have shape {tuple(positions.shape)}, input_ids {tuple(shape)}")
    found = []
    for row, end in zip(positions.expand(shape), ends, strict=True):
        begins = row[:end] == 0
        goes_on = torch.cat([row.new_full((1,), -1), row[: end - 1] if end else row[:0]])[:end] + 1 == row[:end]
        if end and not (begins | goes_on).all():
            at = int((~(begins | goes_on)).nonzero()[0])
            raise ValueError(
                f"position_ids go from {int(row[at - 1]) if at else 'nothing'} to {int(row[at])} at {at}: within a "
                "document they must count up from 0"
            )
        found.append(begins.nonzero().flatten().tolist())
    return found
