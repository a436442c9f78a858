"""Hold a token sequence, in memory or on disk, and cut examples from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from oomb.ops.logprob import IGNORE_INDEX


class MappedArray:
    """A .npy file that is read slice by slice.

    The file is opened for every read: a thousand shards would exceed a process's limit of open files.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path, self._length = path, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice) -> np.ndarray:
        return np.load(self._path, mmap_mode="r")[place]


@dataclass(frozen=True)
class Origins:
    """The records of a source that tokens came from, in order, for messages."""

    source: Any
    records: np.ndarray
    """Index of each record in the source."""
    ends: np.ndarray
    """Where each record's tokens end in the sequence."""

    def names(self, start: int, stop: int) -> list[str]:
        """Return the names of the first and the last record between two tokens."""
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        return [self.source.read(int(self.records[at])).where for at in sorted({int(first), int(last)})]


class Tokens:
    """One token sequence, its document ends, and the spans that loss is computed on.

    Args:
        parts: Arrays that make up the sequence.
        ends: Where each document ends.
        spans: [R, 2], sorted: the spans that loss is computed on. None: every token.
        origins: The records that the tokens came from, if they are known.
    """

    def __init__(
        self, parts: Sequence[Any], ends: np.ndarray, spans: np.ndarray | None = None, origins: Origins | None = None
    ) -> None:
        self._parts = parts
        self._origins = origins
        self._part_ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.ends = ends
        self.loss_spans = spans

    def __len__(self) -> int:
        return int(self._part_ends[-1]) if len(self._part_ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the token ids from `start` to `stop` as int64."""
        found = []
        which = int(np.searchsorted(self._part_ends, start, side="right"))
        while start < stop:
            end = int(self._part_ends[which])
            first = end - len(self._parts[which])
            found.append(np.asarray(self._parts[which][start - first : min(stop, end) - first]))
            start, which = min(stop, end), which + 1
        return np.concatenate(found).astype(np.int64)

    def where(self, start: int, stop: int) -> str:
        """Return the documents between two tokens, for a message: files and lines, or else document numbers."""
        if self._origins is not None:
            return " to ".join(self._origins.names(start, stop))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right") + 1
        return f"document {first:,}" if first == last else f"documents {first:,} to {last:,}"

    def labels(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Return the labels of `ids`, which begin at token `start` of the sequence."""
        if self.loss_spans is None:
            return ids.copy()
        labels = np.full_like(ids, IGNORE_INDEX)
        first = int(np.searchsorted(self.loss_spans[:, 1], start, side="right"))
        last = int(np.searchsorted(self.loss_spans[:, 0], start + len(ids), side="left"))
        for begin, end in self.loss_spans[first:last] - start:
            place = slice(max(int(begin), 0), int(end))
            labels[place] = ids[place]
        return labels

    def blocks(self, max_length: int) -> np.ndarray:
        """Return the bounds [N, 2] of consecutive examples of `max_length` tokens, dropping the rest at the end."""
        starts = np.arange(len(self) // max_length, dtype=np.int64) * max_length
        return self._with_targets(np.stack([starts, starts + max_length], axis=1))

    def pieces(self, max_length: int) -> np.ndarray:
        """Return the bounds [N, 2] of documents, long ones cut into pieces (see `pieces`)."""
        return self._with_targets(pieces(self.ends, max_length))

    def _with_targets(self, bounds_N2: np.ndarray) -> np.ndarray:
        return bounds_N2 if self.loss_spans is None else bounds_N2[has_targets(bounds_N2, self.loss_spans)]


def pieces(ends: np.ndarray, max_length: int) -> np.ndarray:
    """Return the bounds [N, 2] of the documents that end at `ends`, in pieces of at most `max_length` tokens.

    Neighboring pieces share one token. The first token of an example is not predicted, so every token of a document
    but its first is predicted exactly once.

    >>> pieces(np.array([8]), max_length=4).tolist()
    [[0, 4], [3, 7], [6, 8]]
    """
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    stride = max_length - 1
    counts = -(-np.maximum(ends - begins - 1, 0) // stride)
    which = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[which] + number * stride
    return np.stack([starts, np.minimum(starts + max_length, ends[which])], axis=1)


def has_targets(bounds_N2: np.ndarray, spans_R2: np.ndarray) -> np.ndarray:
    """Return for each example whether it has a token to predict. Without one, its loss would be 0 / 0."""
    targets = bounds_N2[:, 0] + 1
    first = np.searchsorted(spans_R2[:, 1], targets, side="right")
    begins = np.append(spans_R2[:, 0], np.iinfo(np.int64).max)
    return begins[first] < bounds_N2[:, 1]


class Examples(Dataset):
    """Map-style dataset of `input_ids` and `labels`; an index always gives the same example."""

    def __init__(self, tokens: Tokens, bounds_N2: np.ndarray) -> None:
        self._tokens = tokens
        self._bounds_N2 = bounds_N2

    def __len__(self) -> int:
        return len(self._bounds_N2)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start, stop = (int(place) for place in self._bounds_N2[index])
        ids = self._tokens.read(start, stop)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(self._tokens.labels(ids, start))}

    def where(self, index: int) -> str:
        """Return where an example comes from, for a message."""
        start, stop = (int(place) for place in self._bounds_N2[index])
        return f"{self._tokens.where(start, stop)}, tokens {start:,} to {stop:,} of the data"

    def first(self, number: int) -> Examples:
        """Return the first `number` examples, or all if there are fewer."""
        return Examples(self._tokens, self._bounds_N2[:number])

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        return (self._bounds_N2[:, 1] - self._bounds_N2[:, 0]).tolist()


@dataclass(frozen=True)
class Split:
    """A dataset as `open_dataset` returns it."""

    train: Examples
    held_out: Examples | None
    """None if nothing is held out."""
    num_tokens: int
    num_documents: int
    skipped: tuple[Path, ...]
    """Files of a folder that were skipped because they are not text."""
    packing: str = "windows"
    num_examples: int = 0
    """Training examples found in what was read; `train` may be the first few of them."""
    is_all_read: bool = True
    """Whether the whole dataset was read, rather than only as much as was requested."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
