"""Check the files of a tokenized folder against its manifest, before anything is trained on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oomb.data.manifest import DOCUMENTS, LEARNT, MANIFEST, SUMS, damaged
from oomb.utils.checksums import file_sha256

Report = Callable[[int, int], None]
"""Progress callback: called with the bytes done and the bytes in total."""

SHOWN = 12
"""Digits of a checksum in a message."""


def no_report(done: int, total: int) -> None:
    """Ignore progress."""


def read_index(folder: Path, manifest: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return where documents end, and the spans that loss is computed on (None: all tokens).

    Raises:
        ValueError: One of them is damaged, or a file of the folder is missing or has the wrong size.
    """
    for name, num_bytes in manifest["bytes"].items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "it is missing")
        if path.stat().st_size != num_bytes:
            raise _damaged(path, f"it has {path.stat().st_size:,} bytes, but {MANIFEST} says {num_bytes:,}")
    ends = _index(folder, manifest, DOCUMENTS, (manifest["tally"]["num_documents"],))
    if len(ends) == 0 or ends[-1] != manifest["num_tokens"]:
        last = int(ends[-1]) if len(ends) else 0
        raise _damaged(
            folder / DOCUMENTS, f"the last document ends at {last:,}, but there are {manifest['num_tokens']:,} tokens"
        )
    if LEARNT not in manifest["bytes"]:
        return ends, None
    spans = _index(folder, manifest, LEARNT, (-1, 2))
    if len(spans) and spans[-1, 1] > manifest["num_tokens"]:
        raise _damaged(
            folder / LEARNT,
            f"the last span ends at {int(spans[-1, 1]):,}, but there are {manifest['num_tokens']:,} tokens",
        )
    return ends, spans


def _index(folder: Path, manifest: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a sorted array of token indices. -1 in `shape` matches any size."""
    path = folder / name
    if SUMS in manifest:
        _check_sum(path, manifest[SUMS][name])
    indices = np.array(_mapped(path, "int64", shape))
    flat = indices.ravel()
    steps = np.diff(flat, prepend=0)
    if (steps < 0).any():
        first = int(np.argmax(steps < 0))
        before = int(flat[first - 1]) if first else 0
        raise _damaged(path, f"{int(flat[first]):,} follows {before:,}, but indices must not decrease")
    return indices


def check_shards(
    folder: Path,
    manifest: dict[str, Any],
    dtype: str,
    *,
    is_full: bool = True,
    report: Report = no_report,
) -> None:
    """Raise ValueError naming the first damaged shard.

    Args:
        folder: The tokenized folder.
        manifest: Its manifest.
        dtype: Expected NumPy dtype of token ids.
        is_full: Read all token ids, in several threads, rather than only the headers.
        report: Progress callback.
    """
    sizes = manifest["bytes"]
    total = sum(sizes[shard["name"]] for shard in manifest["shards"])

    def check(shard: dict[str, Any]) -> int:
        _check_shard(folder / shard["name"], shard, dtype, manifest["tally"]["max_id"], is_full)
        return sizes[shard["name"]]

    with ThreadPoolExecutor() as pool:
        done = 0
        try:
            for num_bytes in pool.map(check, manifest["shards"]):
                done += num_bytes
                report(done, total)
        except BaseException:
            # Otherwise the executor would read all waiting shards before it exits.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_shard(path: Path, shard: dict[str, Any], dtype: str, max_id: int, is_full: bool) -> None:
    ids = _mapped(path, dtype, (shard["num_tokens"],))
    if not is_full:
        return
    _check_sum(path, shard["sha256"])
    # The dtype is unsigned, so no id is negative.
    largest = int(ids.max(initial=0))
    if largest > max_id:
        raise _damaged(path, f"it has the token id {largest:,}, but {MANIFEST} says that {max_id:,} is the largest")


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the memory-mapped array of a file. Raise ValueError if its dtype or shape is not as expected."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy passes on whatever its header parser raises.
        raise _damaged(path, f"NumPy cannot read it ({str(error).splitlines()[0]})") from error
    if array.dtype != np.dtype(dtype):
        raise _damaged(path, f"its dtype is {array.dtype}, but must be {np.dtype(dtype)}")
    if array.ndim != len(shape) or any(size not in (-1, found) for size, found in zip(shape, array.shape, strict=True)):
        raise _damaged(path, f"its shape is {list(array.shape)}, but must be {list(shape)}")
    return array


def _check_sum(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise _damaged(path, f"its sha256 is {found[:SHOWN]}…, but {MANIFEST} says {expected[:SHOWN]}…")


def _damaged(path: Path, what: str) -> ValueError:
    return damaged(path, what, "to repair it")
