"""Checksums of files, and JSON objects that carry a checksum of their own contents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

PIECE = 2**26
"""`file_crc32` reads files in pieces of this size, several at a time: one core sums about 1 GB/s."""
NUM_READERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class SignedJson:
    """A JSON format whose objects end with a checksum of everything before it."""

    key: str
    """The key of the checksum."""
    checksum: Callable[[bytes], int | str]
    indent: int | None = None

    def dumps(self, value: dict[str, Any]) -> str:
        """Return the text of an object with its checksum. A checksum that the object already has is replaced."""
        unsigned = self._unsigned(value)
        return json.dumps({**unsigned, self.key: self._sum(unsigned)}, indent=self.indent)

    def is_intact(self, value: dict[str, Any]) -> bool:
        """Return whether an object matches its checksum, however its text is laid out. False without a checksum."""
        return value.get(self.key) == self._sum(self._unsigned(value))

    def _unsigned(self, value: dict[str, Any]) -> dict[str, Any]:
        return {key: item for key, item in value.items() if key != self.key}

    def _sum(self, unsigned: dict[str, Any]) -> int | str:
        return self.checksum(json.dumps(unsigned).encode())


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file of up to one piece; of a larger file, the CRC-32 of the CRC-32s of its pieces, which
    are read in parallel."""

    def sum_piece(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return crc32(file.read(PIECE))

    starts = range(0, path.stat().st_size, PIECE)
    if len(starts) <= 1:
        return sum_piece(0)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        return crc32(b"".join(checksum.to_bytes(4, "little") for checksum in readers.map(sum_piece, starts)))


def sampled_crc32(path: Path, piece: int = 2**20, num_pieces: int = 64) -> int:
    """Return the CRC-32 of 64 pieces of 1 MiB spread over a large file, as earlier releases took it."""
    size = path.stat().st_size
    starts = list(range(0, size, piece))
    if len(starts) > num_pieces:
        starts = [index * (size - piece) // (num_pieces - 1) for index in range(num_pieces)]
    checksum = 0
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            checksum = crc32(file.read(piece), checksum)
    return checksum
