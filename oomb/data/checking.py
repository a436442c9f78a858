"""The files of a folder that `oomb tokenize` wrote, checked against its manifest before anything is trained on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oomb.data.manifest import DOCUMENTS, LEARNT, MANIFEST, SUMS
from oomb.utils.checksums import file_sha256

Report = Callable[[int, int], None]
"""Called with the bytes that are checked, and with all of them."""

SHOWN = 12
"""Digits of a checksum in a message."""


def read_index(folder: Path, manifest: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return where documents end, and the spans that are learnt. Raises ValueError if either is damaged, or if a file
    of the folder is missing or of another size."""
    for name, num_bytes in manifest["bytes"].items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "it is missing")
        if path.stat().st_size != num_bytes:
            raise _damaged(path, f"it has {path.stat().st_size:,} bytes, and {MANIFEST} says {num_bytes:,}")
    ends = _index(folder, manifest, DOCUMENTS, (manifest["tally"]["num_documents"],))
    if len(ends) == 0 or ends[-1] != manifest["num_tokens"]:
        last = int(ends[-1]) if len(ends) else 0
        raise _damaged(
            folder / DOCUMENTS, f"the last document ends at {last:,}, and there are {manifest['num_tokens']:,} tokens"
        )
    if LEARNT not in manifest["bytes"]:
        return ends, None
    spans = _index(folder, manifest, LEARNT, (-1, 2))
    if len(spans) and spans[-1, 1] > manifest["num_tokens"]:
        raise _damaged(
            folder / LEARNT,
            f"the last span ends at {int(spans[-1, 1]):,}, and there are {manifest['num_tokens']:,} tokens",
        )
    return ends, spans


def _index(folder: Path, manifest: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of places in the sequence, in order. -1 in its shape is any number."""
    path = folder / name
    if SUMS in manifest:
        _check_sum(path, manifest[SUMS][name])
    places = np.array(_mapped(path, "int64", shape))
    flat = places.ravel()
    steps = np.diff(flat, prepend=0)
    if (steps < 0).any():
        first = int(np.argmax(steps < 0))
        before = int(flat[first - 1]) if first else 0
        raise _damaged(path, f"{int(flat[first]):,} comes after {before:,}, and no place may lie before the last one")
    return places


def check_shards(
    folder: Path,
    manifest: dict[str, Any],
    dtype: str,
    *,
    is_full: bool = True,
    report: Report = lambda done, total: None,
) -> None:
    """Raise ValueError naming the first shard that is not as it was written. Reads all of them, in several threads;
    unless `is_full`, only how they begin."""
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
            # Those that wait would be read too before this returns.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_shard(path: Path, shard: dict[str, Any], dtype: str, max_id: int, is_full: bool) -> None:
    ids = _mapped(path, dtype, (shard["num_tokens"],))
    if not is_full:
        return
    _check_sum(path, shard["sha256"])
    # Unsigned, so none is negative.
    most = int(ids.max(initial=0))
    if most > max_id:
        raise _damaged(path, f"it has the token id {most:,}, and {MANIFEST} says that {max_id:,} is the largest")


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of a file, left on disk. Raises ValueError if it is another than expected."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # of NumPy, which raises what its parser of headers does
        raise _damaged(path, f"it is no array that NumPy can read ({str(error).splitlines()[0]})") from error
    if array.dtype != np.dtype(dtype):
        raise _damaged(path, f"its numbers are of the type {array.dtype}, and must be {np.dtype(dtype)}")
    if array.ndim != len(shape) or any(size not in (-1, found) for size, found in zip(shape, array.shape, strict=True)):
        raise _damaged(path, f"its shape is {list(array.shape)}, and must be {list(shape)}")
    return array


def _check_sum(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise _damaged(path, f"its sha256 is {found[:SHOWN]}…, and {MANIFEST} says {expected[:SHOWN]}…")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged: {what}. Run the same oomb tokenize command again to repair it")
