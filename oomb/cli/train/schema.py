"""Convert settings to and from YAML values, flags and Markdown, using what their fields declare."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import Field, asdict, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from oomb.cli.train.settings import LATEST, PANELS, TrainSettings, tokens_of, train_fields
from oomb.config import ENGINE, Config, SettingError
from oomb.utils.dtypes import SHORT_DTYPES

FIELDS: dict[str, Field[Any]] = {
    **{described.name: described for described in train_fields()},
    **{described.name: described for described in fields(Config) if described.metadata["has_flag"]},
}
"""Every key of a run's YAML file, with what its field declares."""
KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def plain_type(annotation: Any) -> tuple[type, bool]:
    """Return (type, whether None is allowed) of an annotation such as `int | None`."""
    if get_origin(annotation) in (types.UnionType, Union):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0], True
    return annotation, False


def _engine_type(described: Field[Any], hint: Any) -> tuple[type, bool]:
    """Return the type that flags have: text wherever a value can also be a word."""
    is_text = described.metadata["choices"] is not None or described.metadata["unit"] is not None
    return (str, False) if is_text else plain_type(hint)


TYPES: dict[str, tuple[type, bool]] = {
    name: plain_type(hint) for name, hint in get_type_hints(TrainSettings).items() if name != "engine"
}
ENGINE_TYPES: dict[str, tuple[type, bool]] = {
    name: _engine_type(FIELDS[name], hint) for name, hint in get_type_hints(Config).items() if name in FIELDS
}
KNOWN = {**TYPES, **ENGINE_TYPES}
"""Type of every key of a run's YAML file."""


def from_yaml(key: str, value: Any) -> Any:
    """Return a value from a YAML file, converted to the type of its setting.

    Raises:
        SettingError: The value has another type.
    """
    (type_, optional), described = KNOWN[key], FIELDS[key].metadata
    kind = described["kind"]
    if kind == "checkpoint" and isinstance(value, bool):
        return LATEST if value else None
    if kind == "words" and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return ",".join(value)
    if kind == "strategy" and value is False:
        return "no"  # YAML reads no as false
    if value is None:
        if optional:
            return None
        raise SettingError(key, f"is empty; it must be {KIND_NAMES[type_]}")
    if key in ENGINE_TYPES and type_ is str and isinstance(value, bool):
        # YAML reads off as false.
        return "off" if value is False and "off" in (described["choices"] or ()) else str(value).lower()
    if key == "packing" and isinstance(value, bool):
        return str(value).lower()
    if described["unit"] == "tokens":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise SettingError(key, f"is {value!r}; it must be a number of tokens, 16384 or 16K")
        return tokens_of(key, value)
    converted = _convert(type_, value)
    if converted is None:
        raise SettingError(key, f"is {value!r}; it must be {KIND_NAMES[type_]}")
    return converted


def _convert(type_: type, value: Any) -> Any:
    """Return the value as that type, or None if it cannot be."""
    if type_ is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if type_ is int:
        return value if isinstance(value, int) else None
    if type_ is float and isinstance(value, int | float | str):
        # YAML reads 1e-5, without a decimal point, as text.
        try:
            return float(value)
        except ValueError:
            return None
    if type_ is str and isinstance(value, str | int | float):
        return str(value)
    return None


def from_flag(key: str, value: Any) -> Any:
    """Return a value from the command line. The parser has converted it already, except for tokens."""
    return tokens_of(key, value) if value is not None and FIELDS[key].metadata["unit"] == "tokens" else value


def engine_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return flags or YAML values as settings of `oomb.Config`, checked.

    Raises:
        SettingError: A value is wrong.
    """
    words: dict[str, Any] = {"true": True, "false": False, **SHORT_DTYPES}
    chosen = {name: from_flag(name, value) for name, value in options.items() if value is not None}
    chosen = {
        name: words.get(value.lower(), value) if isinstance(value, str) else value for name, value in chosen.items()
    }
    Config(**chosen)
    return chosen


def by_panel(settings: TrainSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (panel, its keys and values), the engine's last."""
    values = asdict(settings)
    for panel in PANELS:
        yield panel, {f.name: values[f.name] for f in train_fields() if f.metadata["panel"] == panel}
    defaults = asdict(Config())
    yield ENGINE, {name: defaults[name] for name in Config.flag_names()} | settings.engine


def help_text(described: Field[Any]) -> str:
    """Return what a setting does and the values it takes, for `--help` and docs/train.md."""
    help, choices = described.metadata["help"], described.metadata["choices"]
    values = [as_text(choice) for choice in choices or ()]
    is_told = set(values) <= set(re.findall(r"[\w]+", help))
    return help if is_told else f"{help} Values: {', '.join(values)}."


def as_text(value: Any) -> str:
    """Return a value as flags and YAML write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
