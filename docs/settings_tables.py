"""Write the tables of settings in docs/config.md and docs/train.md from what the settings' fields declare.

python docs/settings_tables.py            # rewrite both pages
python docs/settings_tables.py --check    # exit 1 if a page differs
"""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from oomb.cli.train.schema import FIELDS, as_text, help_text
from oomb.cli.train.settings import PANELS
from oomb.config import ENGINE, Config

DOCS = Path(__file__).parent
START, END = "<!-- settings:start -->\n", "<!-- settings:end -->"
VALUES = {"bytes": '`"auto"`, bytes, `"24GiB"`', "tokens": "1 or more"}


def config_table() -> str:
    """Return the fields of `oomb.Config` with their values in Python."""
    rows = []
    for described in fields(Config):
        default, values = literal(described.default), values_of(described)
        rows.append(f"| `{described.name}` | `{default}` | {values} | {described.metadata['help']} |")
    return "\n".join(["| field | default | values | meaning |", "|---|---|---|---|", *rows]) + "\n"


def values_of(described: Field[Any]) -> str:
    choices, unit = described.metadata["choices"], described.metadata["unit"]
    if choices is not None:
        return ", ".join(f"`{literal(choice)}`" for choice in choices)
    if unit is not None:
        return VALUES[unit]
    return f"`None`, {described.metadata['minimum']} or more"


def literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def train_tables() -> str:
    """Return every setting of `oomb train`, by panel, as flags and YAML write it."""
    tables = []
    for panel in (*PANELS, ENGINE):
        rows = [row(described) for described in FIELDS.values() if described.metadata["panel"] == panel]
        tables.append("\n".join([f"### {panel}\n", "| setting | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(tables) + "\n"


def row(described: Field[Any]) -> str:
    default = "" if described.default is None else f"`{as_text(described.default)}`"
    return f"| `{described.name}` | {default} | {help_text(described)} |"


PAGES = {"config.md": config_table, "train.md": train_tables}


def generated(page: str) -> str:
    """Return a page with its table replaced."""
    text = (DOCS / page).read_text(encoding="utf-8")
    before, rest = text.split(START)
    return before + START + PAGES[page]() + END + rest.split(END)[1]


def main() -> None:
    changed = [page for page in PAGES if generated(page) != (DOCS / page).read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        sys.exit(f"out of date: {', '.join(changed)}; run python docs/settings_tables.py" if changed else 0)
    for page in changed:
        (DOCS / page).write_text(generated(page), encoding="utf-8")
        print(f"wrote docs/{page}")


if __name__ == "__main__":
    main()
