"""Find the files that `--dataset` names and decide which of them are records; refuse what is ambiguous."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

STDLIB = "stdlib"
"""Name of the built-in default dataset: the source of the running Python's standard library."""

LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
RECORD_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
LIKE_RECORDS = (".json", ".csv", ".tsv")
"""Files that look like records but are read as text."""

# Some Python installations ship their tests and some do not; without them the text is nearly the same everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

# Files about a dataset, which are never training data next to records. Other Markdown may be.
_ABOUT = re.compile(
    r"readme.*|(licen[cs]e|copying|notice|citation|changelog|contributing|datasheet|data(set)?_card)([.-].*)?"
    r"|dataset_infos?\.json",
    re.IGNORECASE,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_KEYS = ("text", "messages", "conversations", "completion")
_HEAD_BYTES = 1 << 16


def find_documents(dataset: str) -> tuple[list[Path], Path]:
    """Return the files of a dataset in their fixed order, and their root. Raise ValueError if there are none."""
    if dataset == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts)]
        if not files:
            raise ValueError(
                f"no .py files under {root}: this Python ships without the source of its standard library; "
                "name a text file or folder with --dataset"
            )
        return _in_fixed_order(files, root), root
    root = Path(dataset).expanduser()
    if root.is_file():
        return [root], root
    if not root.is_dir():
        raise ValueError(_missing(dataset, root))
    files = [path for path in files_under(root) if not _is_hidden(path.relative_to(root))]
    if not files:
        raise ValueError(f"the folder {root} has no files; name a text file or a folder of them")
    return _in_fixed_order(files, root), root


def find_records(paths: Sequence[Path], root: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files of records, and notes for the user. Raise ValueError if there are text files as well.

    >>> find_records([Path("d/train.jsonl"), Path("d/README.md")], Path("d"))
    ([PosixPath('d/train.jsonl')], ('skipped next to the records: README.md',))
    """
    records = sorted(path for path in paths if path.name.endswith(RECORD_SUFFIXES))
    others = sorted(path for path in paths if not path.name.endswith(RECORD_SUFFIXES))
    if not records:
        return [], ()
    texts = [path for path in others if not _ABOUT.fullmatch(path.name)]
    if texts:
        what = "JSON lines" if all(path.name.endswith(LINE_SUFFIXES) for path in records) else "records"
        raise ValueError(
            f"{root} has {what} ({_names_under(root, records)}) and other files ({_names_under(root, texts)}): "
            "name the file of records, or read it all as text with --dataset_join repository (--join of oomb tokenize)"
        )
    notes = []
    if len(records) > 1:
        notes.append(f"{_names_under(root, records)} are read as one dataset; name a file to read only that one")
    if others:
        notes.append(f"skipped next to the records: {_names_under(root, others)}")
    return records, tuple(notes)


def reject_json(paths: Sequence[Path]) -> None:
    """Raise ValueError if a dataset is .json files with records, which would be trained on as plain text."""
    files = [path for path in paths if not _ABOUT.fullmatch(path.name)]
    if any(path.suffix != ".json" for path in files):
        return
    for path in sorted(files):
        remedy = _remedy_for_json(path)
        if remedy is not None:
            raise ValueError(f"{path} {remedy}")


def join_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def files_under(root: Path) -> Iterator[Path]:
    """Return all files of a folder and its subfolders."""
    return (path for path in root.rglob("*") if path.is_file())


def _missing(dataset: str, root: Path) -> str:
    siblings = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
    near = difflib.get_close_matches(root.name, siblings, n=1)
    is_file_name = dataset.endswith((*RECORD_SUFFIXES, *LIKE_RECORDS, ".txt", ".md", ".py"))
    # If its folder exists, this is a mistyped file name.
    if _HUB_ID.fullmatch(dataset) and not is_file_name and not root.parent.is_dir():
        return (
            f"the dataset {dataset!r} does not exist here, and oomb does not download from the hub: in Python, "
            f"datasets.load_dataset({dataset!r}).save_to_disk('FOLDER'), then --dataset FOLDER"
        )
    hint = f"; did you mean {str(root.parent / near[0])!r}?" if near else "."
    return f"the dataset {dataset!r} does not exist{hint} Name a text file, a folder of them, or {STDLIB!r}"


def _remedy_for_json(path: Path) -> str | None:
    """Return what a .json file of records is and how to convert it, or None if it has no records."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"[", b"{")):
            return None
        raw = path.read_bytes()
    except OSError:
        # Reported by whoever reads it.
        return None
    lines = str(path.with_suffix(".jsonl"))
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError):
        first = raw.strip().split(b"\n", 1)[0]
        return f"has JSON lines: rename it to {lines}" if _is_record(first) else None
    if not isinstance(rows, list) or not rows or not _has_keys(rows[0]):
        return None
    program = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin.buffer)]"
    command = f"python -c {shlex.quote(program)} < {shlex.quote(str(path))} > {shlex.quote(lines)}"
    return f"is a list of records; oomb reads records from JSON lines. To convert it: {command}"


def _is_record(line: bytes) -> bool:
    try:
        return _has_keys(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _has_keys(row: object) -> bool:
    return isinstance(row, dict) and any(key in row for key in _KEYS)


def _names_under(root: Path, paths: Sequence[Path]) -> str:
    return join_names([path.relative_to(root).as_posix() for path in paths])


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _in_fixed_order(files: list[Path], root: Path) -> list[Path]:
    """Sort files by a checksum of their names. That looks random, so the first files are a representative sample."""

    def key(path: Path) -> tuple[int, str]:
        name = path.relative_to(root).as_posix()
        return zlib.crc32(name.encode("utf-8", "surrogateescape")), name

    return sorted(files, key=key)
