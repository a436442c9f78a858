"""Read records by index from text files, a repository, JSON lines or a table."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oomb.data.discover import (
    LIKE_RECORDS,
    RECORD_SUFFIXES,
    STDLIB,
    files_under,
    find_documents,
    find_records,
    reject_json,
)

JOINS = ("documents", "repository")
SPLIT = "train"
"""Split to read from a `datasets` folder with several."""

EXPECTED = '{"text": "…"}, {"messages": […]} or {"prompt": "…", "completion": "…"}'

_SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class Record:
    """A document, or with `join="repository"` a part of one."""

    where: str
    """Name in messages: file, or file:line."""
    fields: dict[str, Any] | None
    """None for a file that is not text."""
    starts_document: bool = True
    ends_document: bool = True
    left_out: str = ""
    """For a file that is not text: its name in the folder, and the reason."""


class Source(ABC):
    """Records, read by index in the order of `order`."""

    name: str
    notes: tuple[str, ...] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Record:
        """Return one record."""

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """Return the bytes of each record, at least roughly."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that are read."""

    def order(self, seed: int) -> np.ndarray:
        """Return a shuffled order: records are often sorted, so the first ones are not a representative sample."""
        return shuffled(len(self), seed)


class TextFiles(Source):
    """Text files, each a document."""

    def __init__(self, paths: list[Path], root: Path, *, any_encoding: bool = False) -> None:
        self.paths, self.root, self.name = paths, root, str(root)
        self._any_encoding = any_encoding

    def __len__(self) -> int:
        return len(self.paths)

    def sizes(self) -> np.ndarray:
        return np.array([path.stat().st_size for path in self.paths], dtype=np.int64)

    def files(self) -> list[Path]:
        return self.paths

    def order(self, seed: int) -> np.ndarray:
        """Return the order in which files were found, which looks random already."""
        return np.arange(len(self))

    def read(self, index: int) -> Record:
        path = self.paths[index]
        raw = _read_bytes(path)
        problem = None if self._any_encoding else _why_not_text(raw)
        if problem is None:
            return Record(str(path), {"text": raw})
        if len(self) == 1:
            raise ValueError(f"{path} is {problem}; give a UTF-8 text file")
        return Record(str(path), None, left_out=f"{path.relative_to(self.root).as_posix()} ({problem})")


class Repository(TextFiles):
    """All files as one document, in the order of their paths, each after a line with its name."""

    def __init__(self, paths: list[Path], root: Path, *, any_encoding: bool = False) -> None:
        base = root if root.is_dir() else root.parent
        self._names = {path: path.relative_to(base).as_posix() for path in paths}
        super().__init__(sorted(paths, key=self._names.__getitem__), root, any_encoding=any_encoding)

    def read(self, index: int) -> Record:
        record = super().read(index)
        fields = record.fields
        if fields is not None:
            text = fields["text"]
            end = b"" if text.endswith(b"\n") or not text else b"\n"
            head = f"=== {self._names[self.paths[index]]} ===\n".encode("utf-8", "replace")
            fields = {"text": head + text + end}
        return replace(record, fields=fields, starts_document=index == 0, ends_document=index == len(self) - 1)


class JsonRecords(Source):
    """The lines of a JSON Lines file, without blank ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._read_from = path
        self._removal: Any = None
        if path.suffix == ".gz":
            # A compressed file cannot be read from the middle.
            self._read_from = _unpack(path)
            self._removal = weakref.finalize(self, self._read_from.unlink, missing_ok=True)
        self._spans, self._numbers = _find_lines(self._read_from, self.path)
        if len(self._spans) == 0:
            raise ValueError(f"{path} has no lines; expected one document per line: {EXPECTED}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the removal of the unpacked file: worker processes read it, and only this process deletes it."""
        return {**self.__dict__, "_removal": None}

    def __len__(self) -> int:
        return len(self._spans)

    def sizes(self) -> np.ndarray:
        return self._spans[:, 1] - self._spans[:, 0]

    def files(self) -> list[Path]:
        return [self.path]

    def read(self, index: int) -> Record:
        start, stop = map(int, self._spans[index])
        where = f"{self.path}:{self._numbers[index]}"
        with _open(self._read_from, self.path) as file:
            file.seek(start)
            line = file.read(stop - start)
        try:
            fields = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 (byte {error.start} of the line)") from error
        except (json.JSONDecodeError, RecursionError) as error:
            what = (
                f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            )
            raise ValueError(f"{where}: not JSON ({what}); expected {EXPECTED}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: expected {EXPECTED}, found a {type(fields).__name__}")
        return Record(where, fields)


class Table(Source):
    """The rows of a `datasets.Dataset`."""

    def __init__(self, rows: Any, path: Path, files: list[Path], notes: tuple[str, ...] = ()) -> None:
        self.name, self.notes = str(path), notes
        self._rows, self._files = rows, files
        if len(rows) == 0:
            raise ValueError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def sizes(self) -> np.ndarray:
        return np.full(len(self), max(self._rows.data.nbytes // len(self), 1), dtype=np.int64)

    def files(self) -> list[Path]:
        return self._files

    def read(self, index: int) -> Record:
        # A row without a column has None there.
        fields = {name: value for name, value in self._rows[int(index)].items() if value is not None}
        return Record(f"{self.name}, row {index}", fields)


class ConcatSource(Source):
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source], root: Path) -> None:
        self.name = str(root)
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sizes(self) -> np.ndarray:
        return np.concatenate([source.sizes() for source in self._sources])

    def files(self) -> list[Path]:
        return [path for source in self._sources for path in source.files()]

    def read(self, index: int) -> Record:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[which].read(index - (int(self._ends[which - 1]) if which else 0))


def open_source(dataset: str, join: str = "documents") -> Source:
    """Return the source for what `dataset` names. Raise ValueError if there is nothing to read."""
    if join not in JOINS:
        raise ValueError(f"join is {join!r}; it must be one of {', '.join(JOINS)}")
    paths, root = find_documents(dataset)
    is_table = dataset != STDLIB and root.is_dir() and _is_saved_table(root)
    if join == "repository":
        if is_table or all(path.name.endswith(RECORD_SUFFIXES) for path in paths):
            raise ValueError(f"join is 'repository', but {root} has records, not text files: leave join out")
        return Repository(paths, root, any_encoding=dataset == STDLIB)
    if is_table:
        return _saved_table(root)
    if dataset != STDLIB:
        records, notes = find_records(paths, root)
        if records:
            opened = [_open_records(path) for path in records]
            source = opened[0] if len(opened) == 1 else ConcatSource(opened, root)
            source.notes += notes
            return source
        reject_json(paths)
    # A few old modules of the standard library are in Latin-1.
    source = TextFiles(paths, root, any_encoding=dataset == STDLIB)
    if len(paths) == 1 and root.suffix in LIKE_RECORDS:
        source.notes = (f"{root} is read as plain text; for records, give lines of JSON in a .jsonl file",)
    return source


SEED = 42
"""Default seed for the order of records, shared by all commands: `oomb eval` reads what `oomb train` holds out, and
`oomb tokenize` writes what it would read."""


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return a permutation of `range(count)` that no release of NumPy can change, so old folders can be finished.

    Indices are sorted by a hash, the finalizer of splitmix64.
    """
    keys = np.arange(count, dtype=np.uint64) + np.uint64(((seed + 1) * 0x9E3779B97F4A7C15) % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(keys, kind="stable")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _open(path: Path, name: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error


def _why_not_text(raw: bytes) -> str | None:
    if b"\0" in raw:
        return "binary"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8, byte {error.start}"
    return None


def _find_lines(path: Path, name: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return where the lines that are not blank begin and end [N, 2], and their line numbers."""
    breaks: list[np.ndarray] = []
    offset = 0
    with _open(path, name) as file:
        while piece := file.read(_SCAN_BYTES):
            breaks.append(np.flatnonzero(np.frombuffer(piece, dtype=np.uint8) == ord("\n")) + offset)
            offset += len(piece)
        stops = np.concatenate([*breaks, [offset]]).astype(np.int64)
        starts = np.concatenate([[0], stops[:-1] + 1])
        is_blank = stops <= starts
        for index in np.flatnonzero(stops - starts == 1):  # a carriage return
            file.seek(starts[index])
            is_blank[index] = not file.read(1).strip()
    return np.stack([starts, stops], axis=1)[~is_blank], np.flatnonzero(~is_blank) + 1


def _unpack(path: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="oomb-", suffix=".jsonl")
    try:
        with open(descriptor, "wb") as unpacked, gzip.open(path) as packed:
            shutil.copyfileobj(packed, unpacked, _SCAN_BYTES)
        return Path(name)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        raise _unpacking_failed(path, error) from error


def _unpacking_failed(path: Path, error: BaseException) -> BaseException:
    if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
        return ValueError(f"{path} is not a complete gzip file: {error}")
    if isinstance(error, PermissionError):
        return ValueError(f"{path} cannot be read: {error.strerror}")
    if isinstance(error, OSError):
        return ValueError(
            f"{path} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror or error}; "
            "set TMPDIR to a folder with more space"
        )
    return error


def _open_records(path: Path) -> Source:
    if path.suffix != ".parquet":
        return JsonRecords(path)
    try:
        rows = _datasets(path).Dataset.from_parquet(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {_last_line(error)}") from error
    return Table(rows, path, [path])


def _is_saved_table(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _saved_table(folder: Path) -> Source:
    datasets = _datasets(folder)
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read as a dataset: {_last_line(error)}") from error
    files = sorted(files_under(folder))
    if not isinstance(saved, datasets.DatasetDict):
        return Table(saved, folder, files)
    if SPLIT not in saved:
        raise ValueError(f"{folder} has the splits {', '.join(saved)} but no {SPLIT!r}: name the folder of one of them")
    others = [name for name in saved if name != SPLIT]
    return Table(saved[SPLIT], folder / SPLIT, files, (f"splits not read: {', '.join(others)}",) if others else ())


def _datasets(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"reading {path} needs the datasets package: pip install datasets") from error
    datasets.disable_progress_bars()
    return datasets


def _last_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
