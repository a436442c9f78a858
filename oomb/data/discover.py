"""The files that `--dataset` names, and which of them are records. What may be meant in two ways is refused."""

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
"""The name of the embedded default dataset: the source of the Python standard library that runs this program."""

LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
RECORD_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
LIKE_RECORDS = (".json", ".csv", ".tsv")
"""Files that one may take for records."""

# Tests come with some Python installations and not with others; without them the text is nearly the same everywhere.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

# Of these nobody wants to train beside records. Other Markdown may well be what is meant.
_ABOUT = re.compile(
    r"readme.*|(licen[cs]e|copying|notice|citation|changelog|contributing|datasheet|data(set)?_card)([.-].*)?"
    r"|dataset_infos?\.json",
    re.IGNORECASE,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_KEYS = ("text", "messages", "conversations", "completion")
_HEAD_BYTES = 1 << 16


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
        raise ValueError(_not_there(dataset, root))
    files = [path for path in files_under(root) if not _is_hidden(path.relative_to(root))]
    if not files:
        raise ValueError(f"the folder {root} holds no files; name a text file or a folder of them")
    return _in_fixed_order(files, root), root


def find_records(paths: Sequence[Path], root: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of records among these, and what to tell of the choice. Raises where text lies beside them.

    >>> find_records([Path("d/train.jsonl"), Path("d/README.md")], Path("d"))
    ([PosixPath('d/train.jsonl')], ('left out beside the records: README.md',))
    """
    records = sorted(path for path in paths if path.name.endswith(RECORD_SUFFIXES))
    others = sorted(path for path in paths if not path.name.endswith(RECORD_SUFFIXES))
    if not records:
        return [], ()
    texts = [path for path in others if not _ABOUT.fullmatch(path.name)]
    if texts:
        what = "JSON lines" if all(path.name.endswith(LINE_SUFFIXES) for path in records) else "records"
        raise ValueError(
            f"{root} holds {what} ({_listed_under(root, records)}) beside other files ({_listed_under(root, texts)}): "
            "name the file, or --dataset_join repository (--join of oomb tokenize) to read all of it as text"
        )
    notes = []
    if len(records) > 1:
        all_of_them = _listed_under(root, records)
        notes.append(f"{all_of_them} are read as one dataset; name a file to leave the others out")
    if others:
        notes.append(f"left out beside the records: {_listed_under(root, others)}")
    return records, tuple(notes)


def reject_json(paths: Sequence[Path]) -> None:
    """Raises where .json files, alone but for what is about them, hold records that would be learnt as plain text."""
    files = [path for path in paths if not _ABOUT.fullmatch(path.name)]
    if any(path.suffix != ".json" for path in files):
        return
    for path in sorted(files):
        remedy = _remedy_for_json(path)
        if remedy is not None:
            raise ValueError(f"{path} {remedy}")


def join_names(names: Sequence[str], most: int = 4) -> str:
    """A handful of them, then a count."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def files_under(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def _not_there(dataset: str, root: Path) -> str:
    siblings = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
    near = difflib.get_close_matches(root.name, siblings, n=1)
    is_file_name = dataset.endswith((*RECORD_SUFFIXES, *LIKE_RECORDS, ".txt", ".md", ".py"))
    # Where the folder is there, a name within it was mistyped.
    if _HUB_ID.fullmatch(dataset) and not is_file_name and not root.parent.is_dir():
        return (
            f"the dataset {dataset!r} is not there, and hub datasets are not read: in Python, "
            f"datasets.load_dataset({dataset!r}).save_to_disk('FOLDER'), then --dataset FOLDER"
        )
    hint = f"; did you mean {str(root.parent / near[0])!r}?" if near else "."
    return f"the dataset {dataset!r} is not there{hint} Name a text file, a folder of them, or {STDLIB!r}"


def _remedy_for_json(path: Path) -> str | None:
    """None where it is no list of records, nor lines of them."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"[", b"{")):
            return None
        raw = path.read_bytes()
    except OSError:
        # Whoever reads it says so.
        return None
    lines = str(path.with_suffix(".jsonl"))
    try:
        rows = json.loads(raw)
    except (ValueError, RecursionError):
        first = raw.strip().split(b"\n", 1)[0]
        return f"holds JSON lines: rename it to {lines}" if _is_record(first) else None
    if not isinstance(rows, list) or not rows or not _has_keys(rows[0]):
        return None
    program = "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin.buffer)]"
    command = f"python -c {shlex.quote(program)} < {shlex.quote(str(path))} > {shlex.quote(lines)}"
    return f"is a list of records, which are read from JSON lines. To make them: {command}"


def _is_record(line: bytes) -> bool:
    try:
        return _has_keys(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _has_keys(row: object) -> bool:
    return isinstance(row, dict) and any(key in row for key in _KEYS)


def _listed_under(root: Path, paths: Sequence[Path]) -> str:
    return join_names([path.relative_to(root).as_posix() for path in paths])


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _in_fixed_order(files: list[Path], root: Path) -> list[Path]:
    """One that looks random, by a checksum of the names, so that the first files are a fair sample of all."""

    def key(path: Path) -> tuple[int, str]:
        name = path.relative_to(root).as_posix()
        return zlib.crc32(name.encode("utf-8", "surrogateescape")), name

    return sorted(files, key=key)
