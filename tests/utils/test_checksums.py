"""Checksums of files and of JSON objects."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from zlib import crc32

import pytest

from oomb.utils import checksums
from oomb.utils.checksums import SignedJson, file_sha256, sha256


def test_every_byte_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE", 16)
    path = tmp_path / "weights"
    for size in (0, 1, 15, 16, 17, 200):
        content = bytes(range(1, size + 1))
        path.write_bytes(content)
        whole = checksums.file_crc32(path)
        if size <= 16:
            assert whole == crc32(content)
        for at in range(size):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            assert checksums.file_crc32(path) != whole, at


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"tokens")
    assert file_sha256(tmp_path / "tokens") == sha256(b"tokens") == hashlib.sha256(b"tokens").hexdigest()


def test_the_formats_are_those_of_earlier_releases() -> None:
    """The texts are spelled out: files of earlier releases must stay readable."""
    manifest = {"version": 2, "files": {}}
    expected = json.dumps({**manifest, "crc32": crc32(json.dumps(manifest).encode())}, indent=1)
    assert SignedJson("crc32", crc32, indent=1).dumps(manifest) == expected
    expected = json.dumps({**manifest, "checksum": hashlib.sha256(json.dumps(manifest).encode()).hexdigest()})
    assert SignedJson("checksum", sha256).dumps(manifest) == expected


def test_a_changed_value_is_noticed() -> None:
    signed = SignedJson("checksum", sha256)
    value = json.loads(signed.dumps({"a": 1, "b": [2]}))
    assert signed.is_intact(value) and signed.is_intact(json.loads(json.dumps(value, indent=4)))
    assert not signed.is_intact({**value, "a": 2})
    assert not signed.is_intact({"a": 1, "b": [2]})
    assert signed.dumps(value) == signed.dumps({"a": 1, "b": [2]})
