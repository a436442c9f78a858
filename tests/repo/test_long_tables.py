"""The text on the longest steps in the README and docs/, from files of known rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
import long_tables
import pytest

GIB, TIB = 2**30, 2**40


def row(context: int = 2**22, **changes: Any) -> dict[str, Any]:
    terms = [
        {"name": "weights", "tier": "gpu", "num_bytes": 14 * GIB, "grows": False},
        {"name": "pages of their gradients", "tier": "host", "num_bytes": 30 * GIB, "grows": True},
    ]
    return {
        "case": "lora-8bit", "optimizer": "adamw", "context": context, "problem": None, "layers": None, "terms": terms,
        "measured_seconds": 790.0, "predicted_seconds": 703.0, "optimizer_seconds": 1.0, "waited_seconds": 11.0,
        "reserve_seconds": 40.0, "loaded_bytes": 6 * TIB, "stored_bytes": 5 * TIB, "measured_gpu_bytes": 128 * GIB,
        "measured_host_bytes": 100 * GIB, "predicted_gpu_bytes": 64 * GIB, "predicted_host_bytes": 32 * GIB, **changes,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def write(path: Path, *rows: dict[str, Any], limit: str | None = None) -> None:
    path.write_text(json.dumps({"limit": limit, "machine": {"gpu": {"name": "GPU X"}}, "rows": rows}))


def full(**changes: Any) -> dict[str, Any]:
    terms = [{"name": "optimizer states", "tier": "host", "num_bytes": 15 * GIB, "grows": False}]
    given = {"case": "full-8bit", "optimizer": "offloaded_adamw_8bit", "terms": terms, "optimizer_seconds": 5.0}
    return row(**{"context": 3_000_000, **given, **changes})


REFUSED = (
    "predicted not to fit: 4,194,304 tokens do not fit: pages take 9 GiB (or so), and 8 GiB are there. "
    "(12 GiB of host memory are free); 3,001,000 tokens would"
)


def test_missing_results_leave_no_text(folder: Path) -> None:
    assert long_tables.long_steps() == [] and long_tables.memory() == long_tables.optimizer() == ""
    write(folder / long_tables.LORA, row(problem="stopped"), row(layers=2))
    write(folder / long_tables.FULL, full(problem=REFUSED))
    assert long_tables.long_steps() == [] and long_tables.memory() == long_tables.optimizer() == ""


def test_every_step_has_a_row_with_its_forecast(folder: Path) -> None:
    write(folder / long_tables.LORA, row(7, problem="stopped"), row(), row(8, layers=2))
    text = "\n".join(long_tables.long_steps())
    assert "| LoRA, AdamW | **4,194,304** | 13 m 11 s (11 m 43 s) | 128.0 (64.0) | 100.0 (32.0) |" in text
    assert text.count("\n| ") == 2 and "limited" not in text
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22), full(reserve_seconds=52.0))
    write(folder / long_tables.SMALL, row(2**20), limit="24GiB")
    text = "\n".join(long_tables.long_steps())
    assert "| all weights, offloaded 8-bit AdamW | **3,000,000** | 13 m 15 s (11 m 43 s)" in text
    assert "| LoRA, AdamW, GPU limited to 24 GiB | **1,048,576** |" in text
    assert text.count("\n| ") == 4 and "on the same H200 with its memory limited" in text and "another 52 s" in text


def test_the_memory_terms_and_the_longest_context(folder: Path) -> None:
    write(folder / long_tables.LORA, row(optimizer_seconds=0.013))
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22))
    assert "longer context" not in long_tables.memory() and "curve" not in long_tables.memory()
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22), full())
    text = long_tables.memory()
    assert "on one GPU X" in text
    assert "| GPU: weights | 14.00 |  |" in text and "| host: optimizer states |  | 15.00 |" in text
    assert "| **host, predicted** | 32.00 | 32.00 |" in text
    assert "| **GPU, measured** | 128.00 | 128.00 |" in text and "| of which optimizer | 0.01 s | 5.00 s |" in text
    assert '"4,194,304 tokens do not fit: pages take 9 GiB (or so), but only 8 GiB are available."' in text
    assert text.endswith("The longest context that fits is 3,001,000 tokens.")
    write(folder / long_tables.FULL, full(problem=REFUSED.partition("; ")[0], context=2**22), full())
    assert long_tables.memory().endswith("that stay free.")
    text = long_tables.optimizer()
    assert "the optimizer took 5.0 s" in text and text.endswith("took 13 m 10 s, on 3,000,000 tokens.")


@pytest.mark.parametrize(("rate", "activation_bytes"), [(105.0, 1.5 * GIB), (None, 18 * GIB)])
def test_growth_with_and_without_staging_buffers(folder: Path, rate: float | None, activation_bytes: float) -> None:
    before = {"mb_per_10_000_tokens": rate, "contexts": [100_000, 200_000]}
    growth = {"mb_per_10_000_tokens": 2.0, "contexts": [200_000, 300_000], "before": before}
    points = [{"activation_bytes": num_bytes} for num_bytes in (18 * GIB, activation_bytes)]
    (folder / "curve.json").write_text(json.dumps({"growth": growth, "points": points}))
    write(folder / long_tables.LORA, row())
    text = long_tables.memory()
    assert "(../benchmarks/results/curve.png)" in text
    assert "grows by 2.0 MB per 10,000 tokens from 200,000 to 300,000 tokens." in text
    assert ("From 100,000 to 200,000 tokens it grows by 105 MB" in text) == (rate is not None)
    assert ("take 1.5 GiB instead of 18.0" in text) == (activation_bytes < 2 * GIB)
    (folder / "curve.json").write_text(json.dumps({"growth": {"mb_per_10_000_tokens": None}}))
    assert "grows by" not in long_tables.memory()
