"""Read and write the settings of a run as YAML. Errors name file, line and key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from oomb.cli.report.events import OPENING, metrics_lines, parse_event
from oomb.cli.train.aliases import setting_of
from oomb.cli.train.schema import KNOWN, by_panel, from_yaml
from oomb.cli.train.settings import TrainSettings
from oomb.config import SettingError

CONFIG = "config.yaml"
"""The settings file in the folder of a run."""


@dataclass(frozen=True)
class FileSettings:
    """Settings of a file, and the lines they are on."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    @property
    def moved_to(self) -> Path | None:
        """The folder of this file if it names another `output_dir`, because the run was moved or copied; else None."""
        named, folder = self.values.get("output_dir"), self.path.parent
        if self.path.name != CONFIG or named is None or Path(named).expanduser().resolve() == folder.resolve():
            return None
        # If the file was edited to name another folder, the user means that one.
        return folder.absolute() if named == _wrote_to(folder) else None

    def where(self, key: str) -> str:
        return f"{self.path}, line {self.lines[key]}"


def _wrote_to(folder: Path) -> str | None:
    """Return the folder that a run wrote to when it last started, as its metrics tell."""
    try:
        events = [parse_event(line) for line in metrics_lines(folder) if line.startswith(f'{OPENING}"start"')]
    except OSError:
        return None
    last = events[-1] if events else None
    return None if last is None else last.get("output_dir")


def read(path: Path) -> FileSettings:
    """Return the settings of a YAML file.

    Raises:
        ValueError: The file is not a mapping of known keys, each given once and with a value of its type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}), so it is not a YAML file") from None
    except OSError as error:
        raise ValueError(f"the settings file {path} cannot be read: {error.strerror or error}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: this is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: this is not YAML: {str(error).splitlines()[0]}") from None
    if root is None:
        return FileSettings(path, {}, {})
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}, line {root.start_mark.line + 1}: settings are lines of the form `max_length: 32K`")
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    names: dict[str, str] = {}
    constructor = yaml.SafeLoader("")
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        written = str(key_node.value)
        try:
            key = setting_of(written)
            if key not in KNOWN:
                raise ValueError(f"{path}, line {line}: unknown setting {key!r}{_nearest(key, KNOWN)}")
            value = from_yaml(key, constructor.construct_object(value_node, deep=True))
        except SettingError as error:
            raise ValueError(f"{path}, line {line}: {written} {error.problem}") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path}, line {line}: {written} cannot be read: {str(error).splitlines()[0]}") from None
        if names.get(key) == written:
            raise ValueError(f"{path}, line {line}: {written} is given twice, first in line {lines[key]}")
        if key in values and values[key] != value:
            first = f"{names[key]} in line {lines[key]}"
            raise ValueError(
                f"{path}, line {line}: {written} and {first} are the same setting with different values: "
                "give one of them"
            )
        names[key], lines[key], values[key] = written, line, value
    return FileSettings(path, values, lines)


def _nearest(key: str, known: Iterable[str]) -> str:
    # The most common slip is a hyphen for an underscore.
    near = difflib.get_close_matches(key.replace("-", "_").lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; `oomb train --help` lists them all"


def write(settings: TrainSettings) -> str:
    """Return settings as YAML that `read` accepts. An empty value stands for a default."""
    blocks = []
    for panel, values in by_panel(settings):
        lines = [_line(key, value) for key, value in values.items()]
        blocks.append("\n".join([f"# {panel}", *lines]))
    return "\n\n".join(blocks) + "\n"


def _line(key: str, value: Any) -> str:
    if value is None:
        return f"{key}:"
    return yaml.safe_dump({key: value}, allow_unicode=True, width=float("inf")).rstrip("\n")
