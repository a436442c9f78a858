"""The folder that `oomb tokenize` writes.

    manifest.json      what it was made of, and its shards; "complete" once all is there
    tokens-00000.npy   the token ids of a shard; one shard goes on where the one before ends
    documents.npy      where documents end in the whole sequence
    learnt.npy         [R, 2]: the spans that have a loss; only where not all has

The manifest holds a checksum of each of these, and of itself.

    shard-00000.json   while it is being written: what the last three will have of a finished shard

Files appear under their names when they are whole. A shard counts as finished once its .json is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oomb.data.checking import Report, check_shards, read_index
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

OURS = (MANIFEST, DOCUMENTS, LEARNT, SHARDS, "shard-*.json", ".*partial-*")


def open_tokens(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int | None,
    *,
    skip_check: bool = False,
    report: Report = lambda done, total: None,
) -> tuple[Tokens, EncodeStats, str]:
    """Return its tokens, left on disk; what was left out of them; the kind of its records.

    Raises ValueError if a file is not as it was written. `skip_check` leaves out reading all token ids.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    if not manifest["complete"]:
        raise ValueError(f"{folder} is not finished: run the same oomb tokenize command again, it goes on from there")
    made_by, plan = manifest["plan"]["tokenizer_name"] or "bytes", manifest["plan"]
    encoder = Encoder(tokenizer, plan["kind"])
    if encoder.fingerprint() != plan["tokenizer"]:
        raise ValueError(
            f"{folder} was tokenised with {made_by}, and the tokenizer here is another: tokenise it again with "
            "--tokenizer_name of the model, or name that one here"
        )
    tally = EncodeStats(**manifest["tally"])
    if vocab_size is not None and tally.max_id >= vocab_size:
        raise ValueError(
            f"{folder} has the token id {tally.max_id} and the model has a vocabulary of {vocab_size}: it was "
            f"tokenised with {made_by}, which does not belong to this model"
        )
    ends, spans = read_index(folder, manifest)
    check_shards(folder, manifest, encoder.dtype, is_full=not skip_check, report=report)
    parts = [MappedArray(folder / shard["name"], shard["num_tokens"]) for shard in manifest["shards"]]
    return Tokens(parts, ends, spans), tally, plan["kind"]


def tokens_name(number: int) -> str:
    return f"tokens-{number:05d}.npy"


def record_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def write_shard(
    folder: Path, number: int, digest: str, dtype: str, documents: Iterable[Encoded], tally: EncodeStats
) -> None:
    """Tokens first, the record last. `tally` is complete once the documents have been read."""
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
    if tally.max_id > np.iinfo(dtype).max:
        raise ValueError(f"the tokenizer gives the id {tally.max_id}, more than it has in its vocabulary")
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    record = {
        "digest": digest,
        "name": tokens_name(number),
        "num_tokens": num_tokens,
        "sha256": write_array(folder / tokens_name(number), ids),
        "ends": ends,
        "spans": spans if has_spans else None,
        "tally": tally.as_dict(),
    }
    write_json(record_path(folder, number), record)


def is_finished(folder: Path, number: int, digest: str) -> bool:
    """Whether a shard is there, of this plan, and whole."""
    try:
        record = json.loads(record_path(folder, number).read_text())
        found = file_sha256(folder / tokens_name(number))
    except (OSError, ValueError):
        return False
    return is_intact(record) and record.get("digest") == digest and record.get("sha256") == found


def is_whole(folder: Path, manifest: dict[str, Any], dtype: str) -> bool:
    """Return whether the files of a complete folder are those that were written."""
    try:
        read_index(folder, manifest)
        check_shards(folder, manifest, dtype)
    except (OSError, ValueError):
        return False
    return True


def begin(folder: Path, plan: dict[str, Any], num_shards: int) -> None:
    write_json(
        folder / MANIFEST,
        {"format": FORMAT, "version": VERSION, "complete": False, "num_shards": num_shards, "plan": plan},
    )


def finish(folder: Path, plan: dict[str, Any], num_shards: int, source: str) -> dict[str, Any]:
    """Joins what the shards know of their documents, and declares the folder complete."""
    num_tokens, tally = 0, EncodeStats()
    kept: list[dict[str, Any]] = []
    ends: list[np.ndarray] = []
    learnt: list[np.ndarray] = []
    for number in range(num_shards):
        record = json.loads(record_path(folder, number).read_text())
        ends.append(np.asarray(record["ends"], dtype=np.int64) + num_tokens)
        if record["spans"] is not None:
            learnt.append(np.asarray(record["spans"], dtype=np.int64).reshape(-1, 2) + num_tokens)
        num_tokens += record["num_tokens"]
        tally.add(EncodeStats(**record["tally"]))
        kept.append({key: record[key] for key in ("name", "num_tokens", "sha256")})
    tally.require_documents(source)
    sums = {DOCUMENTS: write_array(folder / DOCUMENTS, np.concatenate(ends))}
    if learnt:
        sums[LEARNT] = write_array(folder / LEARNT, np.concatenate(learnt))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "complete": True,
        "num_shards": num_shards,
        "num_tokens": num_tokens,
        "plan": plan,
        "tally": tally.as_dict(),
        "bytes": {name: (folder / name).stat().st_size for name in [*(shard["name"] for shard in kept), *sums]},
        "shards": kept,
        SUMS: sums,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """With a checksum of its own."""
    _write(path, lambda file: file.write(SIGNED.dumps(value).encode()))


def write_array(path: Path, values: np.ndarray) -> str:
    """Returns the checksum of the file."""
    return _write(path, lambda file: np.save(file, values))


class _Summed:
    """A file whose checksum is taken as it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self._file.write(data)


def _write(path: Path, write: Any) -> str:
    """Return the checksum of a file that is written whole or not at all."""
    try:
        with files.atomic_file(path) as file:
            summed = _Summed(file)
            write(summed)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}; finished shards are kept: mend that, and run the "
            "same command again"
        ) from error
    return summed.sum.hexdigest()
