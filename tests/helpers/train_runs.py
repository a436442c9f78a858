"""Runs of `oomb train` on a toy model."""

from __future__ import annotations

import json
from pathlib import Path

from command import TOY_RUN

TOY = [*TOY_RUN, "--max_steps", "3"]


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
