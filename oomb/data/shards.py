"""Write and open the folders of `oomb tokenize`.

    manifest.json      source, tokenizer and shards; "complete" once the folder is
    tokens-00000.npy   token ids of a shard; each shard continues the one before
    documents.npy      where documents end in the whole sequence
    learnt.npy         [R, 2]: the spans that loss is computed on, unless that is every token

The manifest has a checksum of each of these files and of itself.

    shard-00000.json   until the folder is complete: a finished shard's part of the other files

Every file is written under a temporary name and renamed once it is complete. A shard is finished once its .json exists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oomb.data.checking import Report, check_shards, no_report, read_index
from oomb.data.encode import Encoded, Encoder, EncodeStats
from oomb.data.manifest import (
    DOCUMENTS,
    FORMAT,
    LEARNT,
    MANIFEST,
    SHARDS,
    SIGNED,
    SUMS,
    VERSION,
    is_intact,
    read_manifest,
)
from oomb.data.tokens import MappedArray, Tokens
from oomb.utils import files
from oomb.utils.checksums import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATTERNS = (MANIFEST, DOCUMENTS, LEARNT, SHARDS, "shard-*.json", ".*partial-*")
"""Files that `oomb tokenize` may have written in a folder."""


def open_tokens(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int | None,
    *,
    skip_check: bool = False,
    report: Report = no_report,
) -> tuple[Tokens, EncodeStats, str]:
    """Return the memory-mapped tokens of a folder, its statistics, and the kind of its records.

    Args:
        folder: A folder that `oomb tokenize` wrote.
        tokenizer: Must be the one that the folder was written with.
        vocab_size: Vocabulary of the model; larger ids are an error.
        skip_check: Do not read all token ids to check them.
        report: Progress callback of the check.

    Raises:
        ValueError: The folder is unfinished or damaged, or does not match the tokenizer or the model.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    if not manifest["complete"]:
        raise ValueError(f"{folder} is not finished: run the same oomb tokenize command again to continue")
    made_by, plan = manifest["plan"]["tokenizer_name"] or "bytes", manifest["plan"]
    encoder = Encoder(tokenizer, plan["kind"])
    if encoder.fingerprint() != plan["tokenizer"]:
        raise ValueError(
            f"{folder} was tokenized with {made_by}, but this run uses a different tokenizer: tokenize it again with "
            "the model's tokenizer, or pass --tokenizer_name"
        )
    stats = EncodeStats(**manifest["tally"])
    if vocab_size is not None and stats.max_id >= vocab_size:
        raise ValueError(
            f"{folder} has the token id {stats.max_id}, but the model has a vocabulary of {vocab_size}: it was "
            f"tokenized with {made_by}, which is not this model's tokenizer"
        )
    ends, spans = read_index(folder, manifest)
    check_shards(folder, manifest, encoder.dtype, is_full=not skip_check, report=report)
    parts = [MappedArray(folder / shard["name"], shard["num_tokens"]) for shard in manifest["shards"]]
    return Tokens(parts, ends, spans), stats, plan["kind"]


def tokens_name(number: int) -> str:
    """Return the file name of a shard's token ids."""
    return f"tokens-{number:05d}.npy"


def record_path(folder: Path, number: int) -> Path:
    """Return the path of the .json that marks a shard as finished."""
    return folder / f"shard-{number:05d}.json"


def write_shard(
    folder: Path, number: int, digest: str, dtype: str, documents: Iterable[Encoded], stats: EncodeStats
) -> None:
    """Write a shard: first its token ids, then the .json that marks it as finished.

    Args:
        folder: Where to write.
        number: Number of the shard.
        digest: Hash of everything the shards depend on.
        dtype: NumPy dtype of token ids.
        documents: The documents of the shard.
        stats: Statistics that reading `documents` updates.
    """
    parts: list[np.ndarray] = []
    ends: list[int] = []
    spans: list[list[int]] = []
    num_tokens, has_spans = 0, False
    for document in documents:
        if document.spans is not None:
            has_spans = True
            spans += (document.spans + num_tokens).tolist()
        parts.append(document.ids.astype(dtype))
        num_tokens += len(document.ids)
        if document.ends_document:
            ends.append(num_tokens)
    if stats.max_id > np.iinfo(dtype).max:
        raise ValueError(f"the tokenizer gives the id {stats.max_id}, which is outside its own vocabulary")
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    record = {
        "digest": digest,
        "name": tokens_name(number),
        "num_tokens": num_tokens,
        "sha256": write_array(folder / tokens_name(number), ids),
        "ends": ends,
        "spans": spans if has_spans else None,
        "tally": stats.as_dict(),
    }
    write_json(record_path(folder, number), record)


def is_finished(folder: Path, number: int, digest: str) -> bool:
    """Return whether a shard exists, belongs to this plan and is undamaged."""
    try:
        record = json.loads(record_path(folder, number).read_text())
        found = file_sha256(folder / tokens_name(number))
    except (OSError, ValueError):
        return False
    return is_intact(record) and record.get("digest") == digest and record.get("sha256") == found


def is_undamaged(folder: Path, manifest: dict[str, Any], dtype: str) -> bool:
    """Return whether all files of a complete folder match its manifest."""
    try:
        read_index(folder, manifest)
        check_shards(folder, manifest, dtype)
    except (OSError, ValueError):
        return False
    return True


def begin(folder: Path, plan: dict[str, Any], num_shards: int) -> None:
    """Write the manifest of an unfinished folder."""
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, "version": VERSION, "complete": False, "num_shards": num_shards, "plan": plan},
    )


def finish(folder: Path, plan: dict[str, Any], num_shards: int, source: str) -> dict[str, Any]:
    """Join the shards' document ends and spans, and write the manifest of the complete folder."""
    num_tokens, stats = 0, EncodeStats()
    kept: list[dict[str, Any]] = []
    ends: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    for number in range(num_shards):
        record = json.loads(record_path(folder, number).read_text())
        ends.append(np.asarray(record["ends"], dtype=np.int64) + num_tokens)
        if record["spans"] is not None:
            spans.append(np.asarray(record["spans"], dtype=np.int64).reshape(-1, 2) + num_tokens)
        num_tokens += record["num_tokens"]
        stats.add(EncodeStats(**record["tally"]))
        kept.append({key: record[key] for key in ("name", "num_tokens", "sha256")})
    stats.require_documents(source)
    sums = {DOCUMENTS: write_array(folder / DOCUMENTS, np.concatenate(ends))}
    if spans:
        sums[LEARNT] = write_array(folder / LEARNT, np.concatenate(spans))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "complete": True,
        "num_shards": num_shards,
        "num_tokens": num_tokens,
        "plan": plan,
        "tally": stats.as_dict(),
        "bytes": {name: (folder / name).stat().st_size for name in [*(shard["name"] for shard in kept), *sums]},
        "shards": kept,
        SUMS: sums,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def remove(folder: Path, *patterns: str) -> None:
    """Delete the files of a folder that match one of the patterns."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that includes its own checksum."""
    _write(path, lambda file: file.write(SIGNED.dumps(value).encode()))


def write_array(path: Path, values: np.ndarray) -> str:
    """Write a .npy file and return its checksum."""
    return _write(path, lambda file: np.save(file, values))


class _HashingFile:
    """A file that is hashed as it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self._file.write(data)


def _write(path: Path, write: Any) -> str:
    """Write a file, complete or not at all, and return its checksum."""
    try:
        with files.atomic_file(path) as file:
            hashing = _HashingFile(file)
            write(hashing)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}. Finished shards are kept: fix this and run the same "
            "command again"
        ) from error
    return hashing.hash.hexdigest()
