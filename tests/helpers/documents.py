"""Read the fenced blocks and shell commands of the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return (language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def fences(path: Path, *languages: str) -> list[str]:
    return [text for language, text in blocks(path) if language in languages]


def commands(block: str) -> list[str]:
    """Return the commands of a shell block, without comments."""
    lines = (line.split("  #")[0].strip() for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
