"""Pack documents of any length into sequences of chunks without padding, and map results back.

A document longer than a chunk gets a sequence of its own. Short documents fill up the last chunks of long ones, and the
rest share chunks; no document attends to another. Long documents start at a chunk boundary, so all pages of a sequence
belong to one document.

    lengths 10, 3, 2, 5 in chunks of 4:   [0 0 0 0][0 0 0 0][0 0 2 2]   [3 3 3 3][3 1 1 1]
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


def best_fit(lengths: Sequence[int], chunk_size: int, can_share: bool = True) -> list[list[int]]:
    """Return the documents of each sequence, in order.

    Documents are placed from longest to shortest, each where it leaves the least space (best-fit decreasing).

    Args:
        lengths: Tokens of each document.
        chunk_size: Tokens of a chunk.
        can_share: False gives every document a sequence of its own.

    >>> best_fit([10, 3, 2, 5], chunk_size=4)
    [[0, 2], [3, 1]]
    """
    sequences: list[list[int]] = []
    spaces: list[tuple[int, int]] = []
    """(free tokens of the last chunk, sequence), ascending."""
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        at = bisect_left(spaces, (length, -1))
        if can_share and length <= chunk_size and at < len(spaces):
            free, index = spaces.pop(at)
            sequences[index].append(document)
        else:
            free, index = -(-length // chunk_size) * chunk_size, len(sequences)
            sequences.append([document])
        if free > length:
            insort(spaces, (free - length, index))
    return sequences


@dataclass(frozen=True)
class PackedInputs:
    """Batches to compute for a caller's inputs, and the way back."""

    batches: tuple[Batch, ...]
    places: tuple[tuple[int, int, int, int, int], ...] | None = None
    """For each document: its row and first column in the inputs, then its batch, first token and length. None: the
    only batch is the inputs unchanged."""
    shape: tuple[int, int] | None = None
    """Shape of the inputs; None for a list of documents."""

    @property
    def num_counted(self) -> int:
        """Number of positions with a target."""
        return sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in self.batches)

    def unpack(self, values: Sequence[Tensor]) -> Any:
        """Return values per token, [B, T] for each batch, in the format of the inputs, with 0 for padding."""
        if self.places is None:
            return values[0]
        parts = [(row, at, values[batch][0, first : first + n]) for row, at, batch, first, n in self.places]
        if self.shape is None:
            return [part for _, _, part in parts]
        whole = values[0].new_zeros(self.shape)
        rows = torch.cat([torch.full((len(part),), row) for row, _, part in parts])
        columns = torch.cat([torch.arange(at, at + len(part)) for _, at, part in parts])
        return whole.index_put((rows.to(whole.device), columns.to(whole.device)), torch.cat([p for *_, p in parts]))


def pack_documents(
    documents: Sequence[tuple[int, int, Tensor, Tensor]],
    chunk_size: int,
    can_share: bool,
    shape: tuple[int, int] | None = None,
) -> PackedInputs:
    """Return batches of documents, given as (row, first column, ids, targets)."""
    layout = best_fit([len(ids) for *_, ids, _ in documents], chunk_size, can_share)
    batches, places = [], {}
    for batch, members in enumerate(layout):
        starts, pairs = [0], [documents[i][2:] for i in members]
        for i in members:
            row, at, ids, _ = documents[i]
            places[i] = row, at, batch, starts[-1], len(ids)
            starts.append(starts[-1] + len(ids))
        whole_ids, targets = (torch.cat([pair[i] for pair in pairs]).unsqueeze(0) for i in (0, 1))
        batches.append(Batch(ids=whole_ids, targets=targets, starts=tuple(starts[:-1])))
    return PackedInputs(tuple(batches), tuple(places[i] for i in range(len(documents))), shape)


def pack_inputs(
    input_ids: Tensor | list[Tensor],
    labels: Tensor | list[Tensor] | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    chunk_size: int,
    can_share: bool,
    may_be_empty: bool = False,
    **limits: Any,
) -> PackedInputs:
    """Check a caller's inputs and pack them.

    A batch without padding is kept. Lists, and rows with padding or several documents, are split into documents.

    Args:
        input_ids: [B, T], or a list of documents.
        labels: In the same format, or None for `input_ids`.
        attention_mask: [B, T]: 0 for padding, and 1 or the number of the document otherwise.
        position_ids: [B, T], starting over at 0 for each document of a row.
        chunk_size: Tokens of a chunk.
        can_share: Documents may share a chunk.
        may_be_empty: Accept an empty list.
        limits: Limits of the model, as in `Batch.validate`.
    """
    if isinstance(input_ids, list) and not input_ids and may_be_empty:
        return PackedInputs((), ())
    if isinstance(input_ids, list):
        return _pack_list(input_ids, labels, attention_mask, position_ids, chunk_size, can_share, limits)
    if isinstance(labels, list):
        raise ValueError(f"input_ids is a tensor but labels is a list of {len(labels)}; both must have the same format")
    # A padded row may exceed the model's positions if its documents do not.
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
                    f"row {row}: documents start at {own} according to position_ids, but at {other} according to "
                    "attention_mask: make them agree, or leave one of them out"
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
                targets[-1] = IGNORE_INDEX  # The next token belongs to another document, or is padding.
                documents.append((row, a, batch.ids[row, a:b], targets))
    if not documents:
        raise ValueError("attention_mask is 0 everywhere: there are no tokens")
    return pack_documents(documents, chunk_size, can_share, (num_rows, length))


def _pack_list(
    input_ids: list[Tensor],
    labels: Tensor | list[Tensor] | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    chunk_size: int,
    can_share: bool,
    limits: dict[str, Any],
) -> PackedInputs:
    if not input_ids:
        raise ValueError("input_ids is an empty list; give at least one document")
    if attention_mask is not None or position_ids is not None:
        raise ValueError("a list of documents takes neither attention_mask nor position_ids: leave them out")
    if labels is not None and (isinstance(labels, Tensor) or len(labels) != len(input_ids)):
        count = "a tensor" if isinstance(labels, Tensor) else f"a list of {len(labels)}"
        raise ValueError(
            f"input_ids is a list of {len(input_ids)} documents but labels is {count}; they must correspond"
        )
    documents = []
    for index, ids in enumerate(input_ids):
        try:
            if not isinstance(ids, Tensor):
                raise ValueError(f"input_ids is a {type(ids).__name__}; a document is a tensor of token ids")
            if ids.ndim != 1:
                raise ValueError(f"input_ids has shape {tuple(ids.shape)}; a document is a one-dimensional tensor")
            row, own = ids[None], None if labels is None else labels[index][None]
            # A list has no padding, so a document may start with the padding token.
            batch = Batch.validate(row, own, None, **{**limits, "pad_token_id": None})
        except ValueError as error:
            raise ValueError(f"document {index}: {error}") from None
        documents.append((index, 0, batch.ids[0], batch.targets[0]))
    return pack_documents(documents, chunk_size, can_share)


def _numbered_starts(mask: Tensor, ends: Sequence[int]) -> list[list[int]]:
    """Return where documents start in each row of a mask that numbers them: where the number changes."""
    found = []
    for index, (row, end) in enumerate(zip(mask, ends, strict=True)):
        starts = [0, *((row[1:end] != row[: max(0, end - 1)]).nonzero().flatten() + 1).tolist()] if end else []
        numbers = row[starts].tolist()
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"row {index} of attention_mask numbers its documents {numbers}, using a number twice: number each "
                "document of a row differently"
            )
        found.append(starts)
    return found


def _starts(position_ids: Tensor, shape: torch.Size, ends: Sequence[int]) -> list[list[int]]:
    """Return where documents start in each row: where positions start over at 0."""
    positions = torch.as_tensor(position_ids).to("cpu")
    if positions.ndim == 1:
        positions = positions.unsqueeze(0)
    if positions.shape != shape and positions.shape != (1, shape[1]):
        raise ValueError(f"position_ids have shape {tuple(positions.shape)}, input_ids {tuple(shape)}")
    found = []
    for row, end in zip(positions.expand(shape), ends, strict=True):
        begins = row[:end] == 0
        continues = torch.cat([row.new_full((1,), -1), row[: end - 1] if end else row[:0]])[:end] + 1 == row[:end]
        if end and not (begins | continues).all():
            at = int((~(begins | continues)).nonzero()[0])
            raise ValueError(
                f"position_ids go from {int(row[at - 1]) if at else 'nothing'} to {int(row[at])} at {at}: in each "
                "document they must count up from 0"
            )
        found.append(begins.nonzero().flatten().tolist())
    return found
