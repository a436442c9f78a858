"""The files in benchmarks/results, as tables are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def exists(name: str) -> bool:
    return (RESULTS / name).exists()


def steps(name: str) -> list[dict[str, Any]]:
    """Rows of plan_check.py, but for rehearsals, which had a part of the model's layers."""
    return [row for row in load(name)["rows"] if row.get("layers") is None]
