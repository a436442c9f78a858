"""Open a dataset as examples: source -> records -> tokens -> examples -> train and held-out.

Everything that will be trained on is read and tokenized here, or was by `oomb tokenize`, so bad data is reported before
training begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from oomb.data import shards
from oomb.data.checking import Report, no_report
from oomb.data.discover import STDLIB
from oomb.data.encode import TEXT, Encoder, EncodeStats, record_kind
from oomb.data.manifest import find
from oomb.data.sources import SEED, Source, open_source
from oomb.data.tokens import Examples, Origins, Split, Tokens, has_targets, pieces
from oomb.ops.logprob import IGNORE_INDEX
from oomb.utils.units import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKINGS = ("auto", "windows", "documents")

SHORTEST_ADVISED = 512
"""The smallest max_length to suggest for a short text: less is too little to train on."""

MANY_TOKENS = 500_000_000
"""In-memory tokens from which to suggest `oomb tokenize`, which saves time and memory."""


def load(
    dataset: str,
    *,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_train: int | None = None,
    num_held_out: int = 1,
    seed: int = SEED,
) -> Split:
    """Open a dataset with all documents joined (`packing="windows"`); see `open_dataset`."""
    return open_dataset(
        dataset,
        tokenizer=tokenizer,
        max_length=max_length,
        packing="windows",
        num_train=num_train,
        num_held_out=num_held_out,
        seed=seed,
    )


def open_dataset(
    dataset: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    packing: str = "auto",
    join: str = "documents",
    vocab_size: int | None = None,
    num_held_out: int = 1,
    num_train: int | None = None,
    seed: int = SEED,
    skip_check: bool = False,
    report: Report = no_report,
) -> Split:
    """Return the examples of a text file, a folder, JSON lines, a table, or a folder written by `oomb tokenize`.

    The order of documents is fixed and looks random: files are sorted by a checksum of their names, records by `seed`.

    Args:
        dataset: Path, or "stdlib" for the source of Python's standard library.
        tokenizer: None: a token is a byte.
        max_length: Maximum tokens per example.
        packing: "windows" joins documents and cuts examples of exactly `max_length` tokens. "documents" makes each
            document an example and cuts longer ones. "auto" is "windows" for text and "documents" otherwise.
        join: "documents", or "repository" to read a folder as one document.
        vocab_size: Vocabulary of the model; larger token ids are an error.
        num_held_out: Held-out examples: the first ones, whatever `num_train` is. At most a fifth of all.
        num_train: Training examples needed; the rest of the dataset is not read. None: all.
        seed: Seed for the order of records.
        skip_check: Do not read the token ids of a tokenized folder to check them, which takes minutes for hundreds of
            gigabytes. All other files are checked.
        report: Called with bytes checked and bytes in total, for a tokenized folder.

    Raises:
        ValueError: The dataset cannot be trained on; the message names the file and line.
    """
    if max_length < 2:
        raise ValueError(
            f"max_length is {max_length}; an example needs at least 2 tokens, one to read and one to predict"
        )
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; it must be one of {', '.join(PACKINGS)}")
    # Five times what is held out, so that "a fifth of all" does not depend on `num_train`.
    enough = None if num_train is None else max(num_train + num_held_out, 5 * num_held_out)
    folder = _tokenized(dataset)
    notes: tuple[str, ...] = ()
    is_all_read = True
    if folder is not None:
        if join != "documents":
            raise ValueError(f"{folder} is tokenized already: pass join={join!r} to oomb tokenize instead")
        tokens, stats, kind = shards.open_tokens(folder, tokenizer, vocab_size, skip_check=skip_check, report=report)
        name = str(folder)
        packing = _packing(packing, kind)
    else:
        source = open_source(dataset, join)
        order = source.order(seed)
        kind = record_kind(source.read(0))
        packing = _packing(packing, kind)
        encoder = Encoder(tokenizer, kind, vocab_size)
        encoder.check_first(source, order)
        tokens, stats, is_all_read = _tokenize(source, order, encoder, packing, max_length, enough)
        name, notes = source.name, source.notes
        if len(tokens) >= MANY_TOKENS:
            notes += (f"{len(tokens):,} tokens are held in memory; oomb tokenize writes them to disk once",)
    bounds_N2 = tokens.blocks(max_length) if packing == "windows" else tokens.pieces(max_length)
    if len(bounds_N2) == 0:
        _check_enough_text(name, tokens, stats, max_length, "tokens (bytes)" if tokenizer is None else "tokens")
    if tokens.loss_spans is not None and packing == "windows" and len(bounds_N2) < len(tokens) // max_length:
        left_out = len(tokens) // max_length - len(bounds_N2)
        notes += (f"{count(left_out, 'example')} without a token to predict left out",)
    # At most a fifth, but always at least one if there are two or more.
    split_at = min(num_held_out, max(len(bounds_N2) // 5, 1), len(bounds_N2) - 1)
    end = None if num_train is None else split_at + num_train
    return Split(
        train=Examples(tokens, bounds_N2[split_at:end]),
        held_out=Examples(tokens, bounds_N2[:split_at]) if split_at else None,
        num_tokens=len(tokens),
        num_documents=stats.num_documents,
        skipped=tuple(Path(path) for path in stats.not_text),
        packing=packing,
        num_examples=len(bounds_N2) - split_at,
        is_all_read=is_all_read,
        notes=(*stats.notes(), *notes),
    )


class DatasetSettings(Protocol):
    """Settings of a command that decide which examples it reads; see `open_dataset`."""

    dataset: str
    packing: str
    dataset_join: str
    max_length: int
    max_eval_samples: int
    seed: int


def open_configured(
    settings: DatasetSettings,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    num_train: int | None,
    skip_check: bool,
    report: Report,
) -> Split:
    """Open the dataset of a command. `oomb train` and `oomb eval` hold out the same examples: both call this."""
    return open_dataset(
        settings.dataset,
        tokenizer=tokenizer,
        max_length=settings.max_length,
        packing=settings.packing,
        join=settings.dataset_join,
        vocab_size=vocab_size,
        num_train=num_train,
        num_held_out=settings.max_eval_samples,
        seed=settings.seed,
        skip_check=skip_check,
        report=report,
    )


def pad_batch(examples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate examples of different lengths into one batch, padded on the right.

    >>> pad_batch([{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5, 6, 7], [8])])["labels"]
    tensor([[   5,    6,    7],
            [   8, -100, -100]])
    """
    ids = [example["input_ids"] for example in examples]
    lengths = torch.tensor([len(x) for x in ids])
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence([x["labels"] for x in examples], batch_first=True, padding_value=IGNORE_INDEX),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }


def unchecked(dataset: str) -> str | None:
    """Return a warning for a dataset whose check is skipped, or None if there is nothing to check."""
    if _tokenized(dataset) is None:
        return None
    return f"the token ids of {dataset} are not checked: damaged files would be trained on (--skip_dataset_check)"


def _tokenized(dataset: str) -> Path | None:
    """Return the folder of a dataset that `oomb tokenize` wrote."""
    return None if dataset == STDLIB else find(Path(dataset).expanduser())


def _packing(packing: str, kind: str) -> str:
    """Resolve "auto": conversations have nothing to do with each other and stay apart."""
    if packing != "auto":
        return packing
    return "windows" if kind == TEXT else "documents"


def _tokenize(
    source: Source, order: np.ndarray, encoder: Encoder, packing: str, max_length: int, enough: int | None
) -> tuple[Tokens, EncodeStats, bool]:
    """Return the tokens of enough examples, what was read, and whether the whole source was."""
    stats = EncodeStats()
    is_all_read = True
    parts: list[np.ndarray] = []
    records: list[int] = []
    spans: list[np.ndarray] = []
    ends: list[int] = []
    num_tokens = num_examples = document_start = 0
    for document in encoder.documents(source, order, stats):
        if document.spans is not None:
            spans.append(document.spans + num_tokens)
        parts.append(document.ids)
        records.append(document.record)
        num_tokens += len(document.ids)
        if document.ends_document:
            ends.append(num_tokens)
        if enough is None:
            continue
        if packing == "documents":
            bounds_N2 = pieces(np.array([num_tokens - document_start]), max_length)
            if document.spans is not None:
                bounds_N2 = bounds_N2[has_targets(bounds_N2, document.spans)]
            num_known = num_examples + len(bounds_N2)
            if document.ends_document:
                num_examples, document_start = num_known, num_tokens
        else:
            # Some examples of joined conversations have no targets and are left out; which ones is not known yet.
            num_known = num_tokens // max_length if document.spans is None else 0
        if num_known >= enough:
            # If there are several records, those after this one have not been read.
            is_all_read = len(order) == 1 and document.ends_document
            break
    if num_tokens and (not ends or ends[-1] < num_tokens):
        # Reading stopped inside a repository, which is one document.
        ends.append(num_tokens)
        stats.num_documents += 1
    stats.require_documents(source.name)
    joined = np.concatenate(spans) if spans else None
    origins = Origins(source, np.array(records), np.cumsum([len(part) for part in parts], dtype=np.int64))
    tokens = Tokens([np.concatenate(parts)], np.array(ends, dtype=np.int64), joined, origins)
    return tokens, stats, is_all_read


def _check_enough_text(name: str, tokens: Tokens, stats: EncodeStats, max_length: int, unit: str) -> None:
    if len(tokens) >= max_length:
        raise ValueError(f"{name} has nothing to train on: no document has a token to predict")
    remedy = "give more text"
    if len(tokens) >= SHORTEST_ADVISED:
        remedy = f"set --max_length to {len(tokens)} or less, or give more text"
    left_out = f" ({len(stats.not_text)} of its files are not text)" if stats.not_text else ""
    raise ValueError(f"{name} has {len(tokens)} {unit}{left_out}, but one example needs {max_length}: {remedy}")
