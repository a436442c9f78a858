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


def seconds(row: dict[str, Any]) -> float:
    """Of a whole step of plan_check.py, the optimizer's included."""
    return row["measured_seconds"] + (row["optimizer_seconds"] or 0.0)


def term_bytes(row: dict[str, Any], name: str) -> int:
    """What the plan of such a step counted under this name, on both tiers."""
    return sum(term["num_bytes"] for term in row.get("terms") or () if term["name"] == name)
