"""What the README and docs/ say of steps that fill both memories, from files of known rows."""

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


def test_nothing_is_said_of_what_was_not_measured(folder: Path) -> None:
    assert long_tables.long_steps() == [] and long_tables.memory() == long_tables.optimizer() == ""
    write(folder / long_tables.LORA, row(problem="stopped"), row(layers=2))
    write(folder / long_tables.FULL, full(problem=REFUSED))
    assert long_tables.long_steps() == [] and long_tables.memory() == long_tables.optimizer() == ""


def test_a_row_for_each_step_with_what_was_predicted(folder: Path) -> None:
    write(folder / long_tables.LORA, row(7, problem="stopped"), row(), row(8, layers=2))
    text = "\n".join(long_tables.long_steps())
    assert (
        "| LoRA, AdamW | **4,194,304** | 13 m 11 s (11 m 43 s) | 128.0 (64.0) | 100.0 (32.0) | 6.0, 5.0 TiB | 11 s |"
        in text
    )
    assert text.count("\n| ") == 2 and "keeps its speed" not in text
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22), full(reserve_seconds=52.0))
    write(folder / long_tables.SMALL, row(2**20), limit="24GiB")
    text = "\n".join(long_tables.long_steps())
    assert "| all weights, AdamW with states of 8 bits on the host | **3,000,000** | 13 m 15 s (11 m 43 s)" in text
    assert "| LoRA, AdamW; the GPU held to 24 GiB | **1,048,576** |" in text
    assert text.count("\n| ") == 4 and "keeps its speed" in text and "up to 52 s" in text


def test_what_fills_the_memories_and_why_no_more_fits(folder: Path) -> None:
    write(folder / long_tables.LORA, row(optimizer_seconds=0.013))
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22))
    assert "the plan says" not in long_tables.memory() and "curve" not in long_tables.memory()
    write(folder / long_tables.FULL, full(problem=REFUSED, context=2**22), full())
    text = long_tables.memory()
    assert "on one GPU X," in text
    assert "| on the GPU: weights | 14.00 |  |" in text and "| on the host: optimizer states |  | 15.00 |" in text
    assert "| **on the host, predicted** | 32.00 | 32.00 |" in text
    assert "| **on the GPU, measured** | 128.00 | 128.00 |" in text and "| of it optimizer | 0.01 s | 5.00 s |" in text
    assert "the plan says: 4,194,304 tokens do not fit: pages take 9 GiB (or so), and 8 GiB are there. That" in text
    assert text.endswith("but for 4 GiB. By the plan 3,001,000 tokens are the most.")
    write(folder / long_tables.FULL, full(problem=REFUSED.partition("; ")[0], context=2**22), full())
    assert long_tables.memory().endswith(
        "are there. That is what is free beside the optimizer's states, but for 4 GiB."
    )
    said = long_tables.optimizer()
    assert "memory is full: 5.0 s," in said and said.endswith("before it took 13 m 10 s, on 3,000,000 tokens.")


@pytest.mark.parametrize(("sooner", "activation_bytes"), [(105.0, 1.5 * GIB), (None, 18 * GIB)])
def test_growth_is_told_with_that_of_the_buffers(folder: Path, sooner: float | None, activation_bytes: float) -> None:
    before = {"mb_per_10_000_tokens": sooner, "contexts": [100_000, 200_000]}
    growth = {"mb_per_10_000_tokens": 2.0, "contexts": [200_000, 300_000], "before": before}
    points = [{"activation_bytes": num_bytes} for num_bytes in (18 * GIB, activation_bytes)]
    (folder / "curve.json").write_text(json.dumps({"growth": growth, "points": points}))
    write(folder / long_tables.LORA, row())
    text = long_tables.memory()
    assert "(../benchmarks/results/curve.png)" in text
    assert "grows by 2.0 MB per 10,000 tokens from 200,000 to 300,000 tokens." in text
    assert ("From 100,000 to 200,000 it grows by 105 MB" in text) == (sooner is not None)
    assert ("take 1.5 GiB and not 18.0" in text) == (activation_bytes < 2 * GIB)
    (folder / "curve.json").write_text(json.dumps({"growth": {"mb_per_10_000_tokens": None}}))
    assert "grows by" not in long_tables.memory()
