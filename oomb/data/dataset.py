"""`--dataset` to examples: source -> records -> one token sequence -> windows, or pieces of documents -> split.

What is wrong with the data is raised here, before any training: all that will be trained on is read and tokenised now,
or was so by `oomb tokenize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from oomb.data import shards
from oomb.data.checking import Report
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
"""For a text shorter than this no smaller window is advised: it is too little to train on."""

MANY_TOKENS = 500_000_000
"""From here on a run is told that `oomb tokenize` would spare it time and memory."""


def load(
    dataset: str,
    *,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_train: int | None = None,
    num_held_out: int = 1,
    seed: int = SEED,
) -> Split:
    """`open_dataset` with every document joined to the next."""
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
    report: Report = lambda done, total: None,
) -> Split:
    """Examples of a text file, a folder, JSON lines, a table, or a folder that `oomb tokenize` wrote.

    `num_train` examples are enough: the rest is not read. The held-out examples are the first ones, whatever
    `num_train` is. The order of the documents is fixed and looks random: files go by a checksum of their names,
    records by `seed`. Without a tokenizer a token is a byte.

    All files that `oomb tokenize` wrote are checked against its manifest first; `report` hears how far that is.
    `skip_check` leaves out reading all token ids, which takes minutes for hundreds of gigabytes.
    """
    if max_length < 2:
        raise ValueError(
            f"max_length is {max_length}; a window needs at least 2 tokens, one to read and one to predict"
        )
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}; it is one of {', '.join(PACKINGS)}")
    # Five times what is to be held out, so that the share below does not depend on `num_train`.
    enough = None if num_train is None else max(num_train + num_held_out, 5 * num_held_out)
    folder = _tokenized(dataset)
    notes: tuple[str, ...] = ()
    is_all_read = True
    if folder is not None:
        if join != "documents":
            raise ValueError(f"{folder} is tokenised already, and join is {join!r}: say so to oomb tokenize instead")
        tokens, tally, kind = shards.open_tokens(folder, tokenizer, vocab_size, skip_check=skip_check, report=report)
        name = str(folder)
        packing = _packing(packing, kind)
    else:
        source = open_source(dataset, join)
        order = source.order(seed)
        kind = record_kind(source.read(0))
        packing = _packing(packing, kind)
        encoder = Encoder(tokenizer, kind, vocab_size)
        encoder.check_first(source, order)
        tokens, tally, is_all_read = _tokenize(source, order, encoder, packing, max_length, enough)
        name, notes = source.name, source.notes
        if len(tokens) >= MANY_TOKENS:
            notes += (f"{len(tokens):,} tokens are held in memory; oomb tokenize writes them to disk, once",)
    bounds_N2 = tokens.windows(max_length) if packing == "windows" else tokens.pieces(max_length)
    if len(bounds_N2) == 0:
        _check_enough_text(name, tokens, tally, max_length, "tokens (bytes)" if tokenizer is None else "tokens")
    if tokens.loss_spans is not None and packing == "windows" and len(bounds_N2) < len(tokens) // max_length:
        left_out = len(tokens) // max_length - len(bounds_N2)
        notes += (f"{count(left_out, 'window')} without a word to learn left out",)
    # A fifth of the text at most, but one window as soon as there are two.
    border = min(num_held_out, max(len(bounds_N2) // 5, 1), len(bounds_N2) - 1)
    end = None if num_train is None else border + num_train
    return Split(
        train=Examples(tokens, bounds_N2[border:end]),
        held_out=Examples(tokens, bounds_N2[:border]) if border else None,
        num_tokens=len(tokens),
        num_documents=tally.num_documents,
        skipped=tuple(Path(path) for path in tally.not_text),
        packing=packing,
        num_examples=len(bounds_N2) - border,
        is_all_read=is_all_read,
        notes=(*tally.notes(), *notes),
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
    """Return what to tell someone who skips the check of a dataset. None if there is nothing that it would check."""
    if _tokenized(dataset) is None:
        return None
    return f"the token ids of {dataset} are not checked: damage to its files would be trained on (--skip_dataset_check)"


def _tokenized(dataset: str) -> Path | None:
    """Return the folder of a dataset that `oomb tokenize` wrote."""
    return None if dataset == STDLIB else find(Path(dataset).expanduser())


def _packing(packing: str, kind: str) -> str:
    """Conversations are apart by default: one has nothing to say to the next."""
    if packing != "auto":
        return packing
    return "windows" if kind == TEXT else "documents"


def _tokenize(
    source: Source, order: np.ndarray, encoder: Encoder, packing: str, max_length: int, enough: int | None
) -> tuple[Tokens, EncodeStats, bool]:
    """The tokens, what was found, and whether all of the source was read."""
    tally = EncodeStats()
    is_all_read = True
    parts: list[np.ndarray] = []
    records: list[int] = []
    spans: list[np.ndarray] = []
    ends: list[int] = []
    num_tokens = num_examples = opened_at = 0
    for document in encoder.documents(source, order, tally):
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
            of_this = pieces(np.array([num_tokens - opened_at]), max_length)
            if document.spans is not None:
                of_this = of_this[has_targets(of_this, document.spans)]
            num_known = num_examples + len(of_this)
            if document.ends_document:
                num_examples, opened_at = num_known, num_tokens
        else:
            # Of windows of conversations some are left out, which ones is not known yet.
            num_known = num_tokens // max_length if document.spans is None else 0
        if num_known >= enough:
            # Of several records, those after this one have not been looked at.
            is_all_read = len(order) == 1 and document.ends_document
            break
    if num_tokens and (not ends or ends[-1] < num_tokens):
        # As much of a repository as was needed.
        ends.append(num_tokens)
        tally.num_documents += 1
    tally.require_documents(source.name)
    joined = np.concatenate(spans) if spans else None
    origins = Origins(source, np.array(records), np.cumsum([len(part) for part in parts], dtype=np.int64))
    tokens = Tokens([np.concatenate(parts)], np.array(ends, dtype=np.int64), joined, origins)
    return tokens, tally, is_all_read


def _check_enough_text(name: str, tokens: Tokens, tally: EncodeStats, max_length: int, unit: str) -> None:
    if len(tokens) >= max_length:
        raise ValueError(f"{name} has nothing to train on: no document has a token to learn")
    remedy = "give more text"
    if len(tokens) >= SHORTEST_ADVISED:
        remedy = f"set --max_length to {len(tokens)} or less, or give more text"
    left_out = f" ({len(tally.not_text)} of its files hold no text)" if tally.not_text else ""
    raise ValueError(f"{name} has {len(tokens)} {unit}{left_out} and one window needs {max_length}: {remedy}")
