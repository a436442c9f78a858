"""Turn records into token ids and the spans that loss is computed on. Without a tokenizer, a token is a byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from oomb.data.chat import SHAREGPT, Chat, Spans, checked_messages, is_sharegpt
from oomb.data.discover import join_names
from oomb.data.sources import EXPECTED, Record, Source
from oomb.data.tokenizers import PROBE
from oomb.utils.units import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR_ID = 256
PAD_ID = 257
NUM_BYTE_IDS = 258
"""Vocabulary needed to read bytes: 256 byte values, the separator and padding."""

TEXT, MESSAGES, COMPLETION = "text", "messages", "completion"
"""Kinds of records. Loss is computed on all of a text, on the assistant's turns of messages, and on completions."""


@dataclass(frozen=True)
class Encoded:
    """A document, or a part of one."""

    ids: np.ndarray
    spans: np.ndarray | None
    """[R, 2]: token spans that loss is computed on. None: every token."""
    ends_document: bool
    record: int = 0
    """Index of its record in the source."""


@dataclass
class EncodeStats:
    """Counts of what was read and what was skipped. Its fields are stored in manifests, so their names are fixed."""

    num_documents: int = 0
    num_empty: int = 0
    first_empty: str | None = None
    num_unlearnt: int = 0
    """Conversations without a token that loss is computed on."""
    first_unlearnt: str | None = None
    not_text: list[str] = field(default_factory=list)
    """Paths of files that are not text."""
    left_out: list[str] = field(default_factory=list)
    """The same files by their names in the folder, each with the reason."""
    max_id: int = -1

    def add(self, other: EncodeStats) -> None:
        """Add the counts of what was read next."""
        self.num_documents += other.num_documents
        self.num_empty += other.num_empty
        self.first_empty = self.first_empty or other.first_empty
        self.num_unlearnt += other.num_unlearnt
        self.first_unlearnt = self.first_unlearnt or other.first_unlearnt
        self.not_text += other.not_text
        self.left_out += other.left_out
        self.max_id = max(self.max_id, other.max_id)

    def notes(self) -> tuple[str, ...]:
        """Return remarks for the user on what was skipped."""
        notes = []
        if self.num_empty:
            notes.append(f"{count(self.num_empty, 'empty document')} skipped, the first {self.first_empty}")
        if self.num_unlearnt:
            what = count(self.num_unlearnt, "conversation")
            notes.append(f"{what} without a token to predict skipped, the first {self.first_unlearnt}")
        if self.not_text:
            # Folders tokenized by earlier releases have no reasons.
            names = join_names(sorted(self.left_out or self.not_text))
            notes.append(f"{count(len(self.not_text), 'file')} skipped, not text: {names}")
        return tuple(notes)

    def require_documents(self, name: str) -> None:
        """Raise ValueError if there is no document to train on."""
        if self.num_documents:
            return
        raise ValueError(f"{name} has nothing to train on: {'; '.join(self.notes()) or 'it is empty'}")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def record_kind(record: Record) -> str:
    """Return the kind of a record from its keys. Raise ValueError if it has none of the expected ones."""
    fields = record.fields if record.fields is not None else {TEXT: b""}
    if "messages" in fields:
        return MESSAGES
    if "prompt" in fields and "completion" in fields:
        return COMPLETION
    if "text" in fields:
        return TEXT
    found = ", ".join(f'"{key}"' for key in fields) or "no key"
    turns = fields.get("conversations")
    if is_sharegpt(turns):
        found += f": {SHAREGPT}"
    elif isinstance(turns, list):
        found += '; rename "conversations" to "messages"'
    raise ValueError(f"{record.where}: expected {EXPECTED}, found {found}")


class Encoder:
    """Encoder of one kind of record, by a tokenizer or, without one, by bytes.

    Args:
        tokenizer: None: a token is a byte.
        kind: Kind of every record (see `record_kind`).
        vocab_size: Vocabulary of the model; larger ids are refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, kind: str, vocab_size: int | None = None) -> None:
        self.kind = kind
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._chat: Chat | None = None
        self.separator = [SEPARATOR_ID] if tokenizer is None else _separator_of(tokenizer)
        self.prefix = [] if tokenizer is None else _prefix_of(tokenizer)
        needed = NUM_BYTE_IDS if tokenizer is None else int(getattr(tokenizer, "vocab_size", 0))
        if vocab_size is not None and needed > vocab_size:
            what = "bytes need" if tokenizer is None else "the tokenizer has"
            raise ValueError(
                f"the model has a vocabulary of {vocab_size} and {what} {needed} ids; "
                "pass the model's own tokenizer with --tokenizer_name"
            )

    @property
    def num_ids(self) -> int:
        """One more than the largest possible id."""
        if self._tokenizer is None:
            return NUM_BYTE_IDS
        vocabulary = self._tokenizer.get_vocab()
        return max(len(vocabulary), max(vocabulary.values()) + 1)

    @property
    def dtype(self) -> str:
        """NumPy dtype of the ids on disk."""
        return "<u2" if self.num_ids <= 1 << 16 else "<u4"

    def fingerprint(self) -> str:
        """Return a hash that is equal for tokenizers that give the same ids, chat template included if it is used."""
        if self._tokenizer is None:
            return "bytes"
        facts: list[Any] = [sorted(self._tokenizer.get_vocab().items()), self.prefix, self.separator]
        facts.append(self._ids(PROBE, "the probe"))
        if self.kind != TEXT:
            facts.append(getattr(self._tokenizer, "chat_template", None))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def check_first(self, source: Source, order: np.ndarray) -> None:
        """Raise what is wrong with the first record of the source: if all are wrong, that is the one to name."""
        if order[0] != 0:
            for _ in self.documents(source, [0], EncodeStats()):
                pass

    def documents(self, source: Source, indices: Iterable[int], stats: EncodeStats) -> Iterator[Encoded]:
        """Yield the encoded records of these indices, and count them and what is skipped in `stats`."""
        for index in indices:
            record = source.read(int(index))
            if record.fields is None:
                stats.not_text.append(record.where)
                stats.left_out.append(record.left_out)
            found = self._encode(record)
            if found is None:
                if record.fields is not None:
                    stats.num_empty += 1
                    stats.first_empty = stats.first_empty or record.where
                continue
            # The first token of a document is never predicted.
            if found.spans is not None and not (found.spans[:, 1] > np.maximum(found.spans[:, 0], 1)).any():
                stats.num_unlearnt += 1
                stats.first_unlearnt = stats.first_unlearnt or record.where
                continue
            largest = int(found.ids.max(initial=-1))
            stats.max_id = max(stats.max_id, largest)
            if self._vocab_size is not None and largest >= self._vocab_size:
                raise ValueError(
                    f"{record.where}: the tokenizer gives the id {largest}, but the model has a vocabulary of "
                    f"{self._vocab_size}; pass the model's own tokenizer with --tokenizer_name"
                )
            stats.num_documents += found.ends_document
            yield replace(found, record=int(index))

    def _encode(self, record: Record) -> Encoded | None:
        """Return the token ids of a record, or None if it is empty."""
        fields = record.fields if record.fields is not None else {TEXT: b""}
        if record.fields is not None and record_kind(record) != self.kind:
            raise ValueError(
                f'{record.where}: expected "{self.kind}" as in the first document, found '
                + ", ".join(f'"{key}"' for key in fields)
            )
        if self.kind == MESSAGES:
            messages = checked_messages(fields["messages"], "messages", record.where)
            if not messages:
                return None
            return _encoded(*self._chat_of(record).assistant_turns(messages, _tools(record), record.where))
        if self.kind == COMPLETION:
            return self._completion(fields["prompt"], fields["completion"], record)
        text = fields["text"]
        if not isinstance(text, str | bytes):
            raise ValueError(f'{record.where}: "text" must be a string, found a {type(text).__name__}')
        is_whole = record.starts_document and record.ends_document
        if is_whole and not text.strip():
            return None
        before, after = self.prefix if record.starts_document else [], self.separator if record.ends_document else []
        ids = np.concatenate([np.asarray(ids, np.int32) for ids in (before, self._ids(text, record.where), after)])
        return Encoded(ids, None, record.ends_document)

    def _completion(self, prompt: Any, completion: Any, record: Record) -> Encoded | None:
        where = record.where
        if isinstance(prompt, list) and isinstance(completion, list):
            if not completion:
                return None
            question = checked_messages(prompt, "prompt", where)
            reply = checked_messages(completion, "completion", where)
            return _encoded(*self._chat_of(record).answer(question, reply, _tools(record), where))
        for key, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise ValueError(f'{where}: "{key}" must be a string, found a {type(value).__name__}')
        if not completion.strip():
            return None
        begin = list(self._ids(prompt, where))
        whole = list(self._ids(prompt + completion, where))
        if whole[: len(begin)] != begin:
            # A token spans the boundary. At inference the prompt is tokenized alone, so do the same here.
            whole = begin + list(self._ids(completion, where))
        ids = [*self.prefix, *whole, *self.separator]
        return _encoded(ids, [(len(self.prefix) + len(begin), len(ids))])

    def _chat_of(self, record: Record) -> Chat:
        if self._tokenizer is None:
            raise ValueError(
                f"{record.where}: messages need a tokenizer with a chat template, but this model reads bytes; "
                "pass one with --tokenizer_name"
            )
        if self._chat is None:
            self._chat = Chat(self._tokenizer, record.where)
        return self._chat

    def _ids(self, text: str | bytes, where: str) -> Any:
        if isinstance(text, str):
            try:
                raw = text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: not valid text: half a surrogate pair at character {error.start}"
                ) from error
        else:
            raw = text
        if self._tokenizer is None:
            return np.frombuffer(raw, dtype=np.uint8)
        text = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        # Not verbose: it would warn that a document is longer than the model's context, which is the point of oomb.
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _encoded(ids: list[int], spans: Spans) -> Encoded:
    return Encoded(
        np.asarray(ids, dtype=np.int32), np.asarray(spans, dtype=np.int64).reshape(-1, 2), ends_document=True
    )


def _tools(record: Record) -> Any:
    """Return the tools of a conversation, given as a list of schemas or its JSON."""
    tools = (record.fields or {}).get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f'{record.where}: "tools" is not JSON ({error.msg})') from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f'{record.where}: "tools" must be a list, found a {type(tools).__name__}')
    return tools or None


def _separator_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token that ends a document: end-of-text, or the nearest thing the tokenizer has."""
    for special in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id):
        if special is not None:
            return [special]
    return list(tokenizer("\n\n", add_special_tokens=False)["input_ids"])


def _prefix_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as beginning-of-text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for first in range(len(whole) - len(bare) + 1):
        if whole[first : first + len(bare)] == bare:
            return whole[:first]
    return []
