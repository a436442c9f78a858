"""benchmarks/curve.py on rows of known growth."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import curve

KIB = 1024


def row(context: int, gpu_bytes: int, place: str = "host-brim", **fields: Any) -> dict[str, Any]:
    return {
        "case": "lora-8bit", "optimizer": "adamw", "place": place, "context": context, "problem": None,
        "measured_gpu_bytes": gpu_bytes, "measured_host_bytes": 100 * context, "measured_seconds": context / 8192,
        "optimizer_seconds": 1.0, **fields,
    }  # fmt: skip


def call(folder: Path, *reports: list[dict[str, Any]]) -> Any:
    paths = []
    for index, rows in enumerate(reports):
        paths.append(folder / f"{index}.json")
        paths[-1].write_text(json.dumps({"rows": rows}))
    app = typer.Typer()
    app.command()(curve.main)
    return CliRunner().invoke(app, [*map(str, paths), "--out", str(folder / "curve.png")])


@pytest.mark.parametrize(("more", "exit_code"), [(4_000_000, 0), (6_000_000, 1)])
def test_growth_is_held_to_what_was_asked_for(tmp_path: Path, more: int, exit_code: int) -> None:
    host = [row(64 * KIB + i * 100_000, 2**30 + i * 10 * more) for i in (1, 0)]
    brim = [row(2**22, 2**36, "brim"), row(2**23, 0, "brim", problem="predicted not to fit")]
    result = call(tmp_path, host, brim)
    assert result.exit_code == exit_code, result.output
    assert f"{more / 1e6:.2f} MB" in result.output and ("NOT MET" in result.output) == bool(exit_code)
    assert "4,194,304" in result.output and "8,388,608" not in result.output
    assert "513.0 s" in result.output, "512 s and 1 s of optimizer"
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_one_row_has_no_growth_and_unlike_files_no_curve(tmp_path: Path) -> None:
    assert curve.growth([row(2**20, 1)]) is None
    assert call(tmp_path, [row(2**20, 1)]).exit_code == 0
    assert call(tmp_path, [row(2**20, 1)], [row(2**21, 1, case="full-8bit")]).exit_code == 2
