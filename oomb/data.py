"""Text to windows of `max_length` tokens: documents in a fixed order, joined with a separator, cut without padding.

    stdlib | file | folder  ->  documents  ->  one token sequence  ->  windows  ->  (held-out, train)

Without a tokenizer a token is a byte, which every preset can read.
"""

from __future__ import annotations

import difflib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDLIB = "stdlib"
"""The name of the embedded default dataset: the source of the Python standard library that runs this program."""

SEPARATOR_ID = 256
PAD_ID = 257
NUM_BYTE_IDS = 258
"""Ids a model needs to read bytes: 256 byte values, the separator and the padding."""

SHORTEST_ADVISED = 512
"""For a text shorter than this no smaller window is advised: it is too little to train on."""

# Tests come with some Python installations and not with others; without them the text is nearly the same everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class Windows(Dataset):
    """Non-overlapping windows over one token sequence; each is `input_ids` and equal `labels`."""

    def __init__(self, token_ids: torch.Tensor, max_length: int) -> None:
        self.max_length = max_length
        self._windows = token_ids[: len(token_ids) // max_length * max_length].view(-1, max_length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        input_ids = self._windows[index].to(torch.int64)
        return {"input_ids": input_ids, "labels": input_ids.clone()}


@dataclass(frozen=True)
class Split:
    """What `load` returns. `held_out` is None where the text is a single window."""

    train: Windows
    held_out: Windows | None
    num_tokens: int
    num_documents: int
    skipped: tuple[Path, ...]
    """Files of a folder left out because they hold no text."""


def load(
    dataset: str,
    *,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_train: int | None = None,
    num_held_out: int = 1,
) -> Split:
    """Read "stdlib", a text file or a folder of text files. `num_train` windows are enough: the rest is not used.

    The order of the documents is fixed and looks random (by a checksum of their names), so the held-out windows,
    which are the first ones whatever `num_train` is, are a fair sample of a folder. Of a single file they are its
    beginning.
    """
    if max_length < 2:
        raise ValueError(
            f"max_length is {max_length}; a window needs at least 2 tokens, one to read and one to predict"
        )
    documents, root = find_documents(dataset)
    # Five times what is to be held out, so that the share below does not depend on `num_train`.
    enough = None if num_train is None else max(num_train + num_held_out, 5 * num_held_out) * max_length
    skipped: list[Path] = []
    pieces: list[np.ndarray] = []
    num_tokens = 0
    for path in documents:
        # Old modules of the standard library are in Latin-1 here and there.
        token_ids = _read(path, tokenizer, is_only=len(documents) == 1, any_encoding=dataset == STDLIB)
        if token_ids is None:
            skipped.append(path)
            continue
        if len(token_ids) == 0:
            continue
        pieces.append(token_ids)
        num_tokens += len(token_ids)
        if enough is not None and num_tokens >= enough:
            break
    if num_tokens < max_length:
        unit = "tokens" if tokenizer is not None else "tokens (bytes)"
        remedy = "give more text"
        if num_tokens >= SHORTEST_ADVISED:
            remedy = f"set --max_length to {num_tokens} or less, or give more text"
        left_out = f" ({len(skipped)} of its files hold no text)" if skipped else ""
        raise ValueError(f"{root} has {num_tokens} {unit}{left_out} and one window needs {max_length}: {remedy}")
    windows = torch.from_numpy(np.concatenate(pieces))
    windows = windows[: len(windows) // max_length * max_length]
    num_windows = len(windows) // max_length
    # A fifth of the text at most, but one window as soon as there are two.
    num_held_out = min(num_held_out, max(num_windows // 5, 1), num_windows - 1)
    border = num_held_out * max_length
    end = len(windows) if num_train is None else border + num_train * max_length
    return Split(
        train=Windows(windows[border:end], max_length),
        held_out=Windows(windows[:border], max_length) if num_held_out else None,
        num_tokens=num_tokens,
        num_documents=len(pieces),
        skipped=tuple(skipped),
    )


def find_documents(dataset: str) -> tuple[list[Path], Path]:
    """The files of a dataset in their fixed order, and what they belong to. Raises where there is nothing to read."""
    if dataset == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts)]
        if not files:
            raise ValueError(
                f"no .py files under {root}: this Python has no source of its standard library; "
                "name a text file or folder with --dataset"
            )
        return _in_fixed_order(files, root), root
    root = Path(dataset).expanduser()
    if root.is_file():
        return [root], root
    if not root.is_dir():
        siblings = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
        near = difflib.get_close_matches(root.name, siblings, n=1)
        hint = f"; did you mean {str(root.parent / near[0])!r}?" if near else "."
        raise ValueError(
            f"the dataset {dataset!r} is not there{hint} Name a text file, a folder of them, or {STDLIB!r}"
        )
    files = [path for path in _files_under(root) if not _is_hidden(path.relative_to(root))]
    if not files:
        raise ValueError(f"the folder {root} holds no files; name a text file or a folder of them")
    return _in_fixed_order(files, root), root


def _files_under(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _in_fixed_order(files: list[Path], root: Path) -> list[Path]:
    def key(path: Path) -> tuple[int, str]:
        name = path.relative_to(root).as_posix()
        return zlib.crc32(name.encode("utf-8", "surrogateescape")), name

    return sorted(files, key=key)


def _read(
    path: Path, tokenizer: PreTrainedTokenizerBase | None, *, is_only: bool, any_encoding: bool
) -> np.ndarray | None:
    """Token ids of one document and its separator. None, or an error if it is the only one, where it is not text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    problem = None if any_encoding else _why_not_text(raw)
    if problem is not None:
        if not is_only:
            return None
        raise ValueError(f"{path} {problem}; give a UTF-8 text file")
    if not raw.strip():
        return np.empty(0, dtype=np.int32)
    if tokenizer is None:
        return np.append(np.frombuffer(raw, dtype=np.uint8).astype(np.int32), np.int32(SEPARATOR_ID))
    text = raw.decode("utf-8", errors="replace")
    # verbose=False: the tokenizer would warn that a document is longer than the model's context, which is the point.
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray([*token_ids, *_separator_of(tokenizer)], dtype=np.int32)


def _why_not_text(raw: bytes) -> str | None:
    if b"\0" in raw:
        return "is binary, not text"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start})"
    return None


def _separator_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    for special in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id):
        if special is not None:
            return [special]
    return tokenizer("\n\n", add_special_tokens=False)["input_ids"]
