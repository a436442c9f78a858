"""Runs of trainers and of `oomb train` on several ranks, and what they leave."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import finish, torchrun
from waiting import wait_until

HERE = Path(__file__).parent


def train(world_size: int, out: Path, **settings: Any) -> dict[str, Any]:
    """Run `trainer_run.py`, and return what it left."""
    out.mkdir()
    process = torchrun(world_size, HERE / "trainer_run.py", out, json.dumps(settings), cwd=out)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    return torch.load(out / "result.pt", weights_only=False)


def losses(found: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in found["log"] if "loss" in entry]


def expect_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # The trainer keeps losses in float32.
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-12)


RUN = [
    "-m", "oomb", "train", "--dataset", "stdlib", "--max_length", "1K", "--chunk_size", "64", "--device", "cpu",
    "--max_eval_samples", "2", "--sample_tokens", "0", "--max_steps", "6", "--dtype", "float64", "--warmup_steps", "0",
    "--save_steps", "2",
]  # fmt: skip


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # the end of a line is not written yet
            continue
    return [event for event in found if event.get("event") == kind]


def step_losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder, "step")}


def worker(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Return the process of a rank."""
    found: list[psutil.Process] = []

    def has_started() -> bool:
        found[:] = []
        for child in psutil.Process(process.pid).children():
            try:
                if child.environ().get("RANK") == str(rank):
                    found.append(child)
            except psutil.Error:
                continue
        return bool(found)

    wait_until(has_started, lambda: f"rank {rank} did not start")
    return found[0]
