"""Write the tables that come from the code: settings in docs/config.md and docs/train.md, modules in architecture.md.

python docs/generate.py            # rewrite the pages
python docs/generate.py --check    # exit 1 if a page differs
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from oomb.cli.train.schema import FIELDS, as_text, help_text
from oomb.cli.train.settings import PANELS
from oomb.config import ENGINE, Config

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "oomb"
START, END = "<!-- generated:start -->\n", "<!-- generated:end -->"
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


def module_tables() -> str:
    """Return every module with the first sentence of its docstring, by folder, from the top floor down."""
    tables = []
    for folder in (
        "cli",
        "trainers",
        "eval",
        "engine",
        "planner",
        "models",
        "attention",
        "memory",
        "data",
        "ops",
        "distributed",
    ):
        rows = [module_row(path) for path in sorted((PACKAGE / folder).rglob("*.py"))]
        title = f"### {folder}\n\n{summary(PACKAGE / folder / '__init__.py')}\n"
        tables.append("\n".join([title, "| module | what it does |", "|---|---|", *filter(None, rows)]))
    others = (PACKAGE / "config.py", PACKAGE / "__main__.py", *sorted((PACKAGE / "utils").glob("*.py")))
    rows = [module_row(path) for path in others]
    title = "### config and utils\n\nSettings of the engine, `python -m oomb`, and helpers that know nothing of oomb.\n"
    tables.append("\n".join([title, "| module | what it does |", "|---|---|", *filter(None, rows)]))
    return "\n\n".join(tables) + "\n"


def module_row(path: Path) -> str:
    """Return the row of a module, or nothing for a package."""
    if path.name == "__init__.py":
        return ""
    return f"| `{path.relative_to(PACKAGE.parent).as_posix()}` | {summary(path)} |"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?= [A-Z]|$)", text)
    return (sentence[0] if sentence else text).rstrip(".:").replace("|", "\\|")


PAGES = {"config.md": config_table, "train.md": train_tables, "architecture.md": module_tables}


def generated(page: str) -> str:
    """Return a page with its table replaced."""
    text = (DOCS / page).read_text(encoding="utf-8")
    before, rest = text.split(START)
    return before + START + PAGES[page]() + END + rest.split(END)[1]


def main() -> None:
    changed = [page for page in PAGES if generated(page) != (DOCS / page).read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        sys.exit(f"out of date: {', '.join(changed)}; run python docs/generate.py" if changed else 0)
    for page in changed:
        (DOCS / page).write_text(generated(page), encoding="utf-8")
        print(f"wrote docs/{page}")


if __name__ == "__main__":
    main()
