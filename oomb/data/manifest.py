"""Read and write the manifest of a folder that `oomb tokenize` wrote, and check it against its own checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomb.data.encode import EncodeStats
from oomb.utils.checksums import SignedJson, sha256

FORMAT = "oomb tokens"
VERSION = 1
MANIFEST, DOCUMENTS, LEARNT = "manifest.json", "documents.npy", "learnt.npy"
SHARDS = "tokens-*.npy"

CHECKSUM = "checksum"
"""Key of a JSON file's own checksum. Folders of earlier releases lack it."""
SIGNED = SignedJson(CHECKSUM, sha256)
SUMS = "sha256"
"""Key of the checksums of documents.npy and learnt.npy, introduced together with `CHECKSUM`."""

PLAN = {
    "tokenizer_name": str | None,
    "tokenizer": str,
    "kind": str,
    "join": str,
    "seed": int,
    "shard_size": int,
    "files": dict,
}
COMPLETE = {"num_shards": int, "num_tokens": int, "tally": dict, "bytes": dict, "shards": list}
SHARD = {"name": str, "num_tokens": int, "sha256": str}
STATS = {key: str | None if value is None else type(value) for key, value in EncodeStats().as_dict().items()}
NEEDED = ("num_documents", "max_id")
"""The keys of a tally that every release has written."""


def find(path: Path) -> Path | None:
    """Return the folder if `oomb tokenize` wrote it, even if its manifest is damaged; otherwise None."""
    if not path.is_dir():
        return None
    is_ours = _parsed(path) is not None or ((path / MANIFEST).is_file() and any(path.glob(SHARDS)))
    return path if is_ours else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder, or None if there is none. Raise ValueError if it is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = _parsed(folder)
    if manifest is None:
        raise damaged(path, "it cannot be read as JSON")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{folder} was written by another version of oomb (format {manifest.get('version')}; this version reads "
            f"format {VERSION}): run oomb tokenize with --overwrite"
        )
    if not is_intact(manifest) or (SUMS in manifest and CHECKSUM not in manifest):
        raise damaged(path, "its contents do not match its own checksum")
    _check_form(path, manifest)
    return manifest


def is_intact(value: dict[str, Any]) -> bool:
    """Return whether a value matches its checksum, or has none."""
    return CHECKSUM not in value or SIGNED.is_intact(value)


def _parsed(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def _check_form(path: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError unless all keys have the right type, and all files are in this folder."""
    _check_keys(path, manifest, {"complete": bool, "plan": dict})
    _check_keys(path, manifest["plan"], PLAN)
    if not manifest["complete"]:
        return
    _check_keys(path, manifest, COMPLETE)
    tally = manifest["tally"]
    _check_keys(path, tally, {key: kind for key, kind in STATS.items() if key in NEEDED or key in tally})
    unknown = sorted(tally.keys() - STATS)
    if unknown:
        raise damaged(path, f'"tally" has the unknown key {unknown[0]!r}')
    for shard in manifest["shards"]:
        _check_keys(path, shard, SHARD)
    _check_keys(path, manifest["bytes"], dict.fromkeys(manifest["bytes"], int))
    names = [shard["name"] for shard in manifest["shards"]]
    for name in (*names, *manifest["bytes"]):
        if Path(name).name != name or name == ".." or "\\" in name:
            raise damaged(path, f"it names the file {name!r}, but may only name files in its own folder")
    if sorted([*names, DOCUMENTS]) != sorted(manifest["bytes"].keys() - {LEARNT}):
        raise damaged(path, '"shards" and "bytes" list different files')
    if CHECKSUM in manifest:
        _check_keys(path, manifest, {SUMS: dict})
        _check_keys(path, manifest[SUMS], dict.fromkeys(manifest["bytes"].keys() - names, str))
    num_tokens = sum(shard["num_tokens"] for shard in manifest["shards"])
    if num_tokens != manifest["num_tokens"] or any(shard["num_tokens"] < 0 for shard in manifest["shards"]):
        raise damaged(path, f"its shards have {num_tokens:,} tokens, but it says {manifest['num_tokens']:,}")


def _check_keys(path: Path, value: Any, types: Mapping[str, Any]) -> None:
    for key, kind in types.items():
        if not isinstance(value, dict) or key not in value:
            raise damaged(path, f'the key "{key}" is missing')
        if not isinstance(value[key], kind):
            expected = getattr(kind, "__name__", kind)
            raise damaged(path, f'"{key}" must be {expected}, found {type(value[key]).__name__}')


def damaged(path: Path, what: str, purpose: str = "with --overwrite") -> ValueError:
    """Return the error for a damaged file. `purpose` completes "Run the same oomb tokenize command again"."""
    return ValueError(f"{path} is damaged: {what}. Run the same oomb tokenize command again {purpose}")
