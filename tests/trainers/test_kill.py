"""A run that is killed with SIGKILL at random moments and resumed each time equals the run that was never killed.

Three of four kills hit an operation on files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers.trainer_utils import get_last_checkpoint
from waiting import HANG_S

from oomb.trainers import checkpoints

ROOT = Path(__file__).parents[2]
LATEST_S = {"step": 0.08, "partial": 0.05, "named": 0.01, "gone": 0.03}
"""How long after the start of an event to kill. A step takes about 60 ms, a checkpoint about 100."""


def read(losses: Path) -> list[tuple[int, str, str]]:
    """Return the events of a run, without a line that the kill cut short."""
    lines = losses.read_text().splitlines(keepends=True) if losses.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def assert_loadable(checkpoint: Path) -> None:
    """Load every file of a checkpoint, without looking at the manifest."""
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert torch.load(checkpoint / name, weights_only=False)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == checkpoints.step_of(checkpoint)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [10, pytest.param(60, marks=pytest.mark.full)])
def test_kills_change_nothing(num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import killed_run

    num_steps = 6 + 3 * num_kills  # a process is killed up to three steps after it starts

    # Every process is forked from one that has imported torch, so starting is fast and many kills are possible.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")]))
    monkeypatch.setenv("OOMB_TESTS_WARM_UP", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run"])

    def place(name: str) -> tuple[Path, Path]:
        folder, losses = tmp_path / name / "run", tmp_path / name / "losses"
        folder.mkdir(parents=True)
        return folder, losses

    def start(folder: Path, losses: Path, moment: Any = None) -> Any:
        process = context.Process(target=killed_run.main, args=(folder, losses, num_steps, moment))
        process.start()
        return process

    whole_folder, whole_losses = place("whole")
    whole = start(whole_folder, whole_losses)
    whole.join(HANG_S)
    assert whole.exitcode == 0, (tmp_path / "whole" / "stderr").read_text()
    reference = read(whole_losses)
    assert [step for step, _, _ in reference] == list(range(1, num_steps + 1))

    chance = random.Random(6)
    caught: list[str] = []
    resumed_at: list[int] = []
    folder, losses = place("killed")
    for kill in range(num_kills):
        told = len(read(losses))
        moment = ("partial", "named", "gone", "step")[kill % 4]
        has_come, tells = context.Pipe(duplex=False)
        process = start(folder, losses, killed_run.Moment(moment, chance.randint(1, 3), tells))
        tells.close()
        # Readable as well when the process has ended, which it must not have.
        assert has_come.poll(HANG_S) and process.is_alive(), (folder.parent / "stderr").read_text()
        assert has_come.recv() == moment
        time.sleep(chance.uniform(0, LATEST_S[moment]))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        resumed_at.append(read(losses)[told][0])
        caught += [path.name.split(".")[2].split("-")[0] for path in folder.glob(".checkpoint-*")]
        # Every folder named like a checkpoint is complete.
        for checkpoint in checkpoints.find(folder):
            checkpoints.check(checkpoint)
            assert_loadable(checkpoint)
        newest = get_last_checkpoint(str(folder))
        assert (Path(newest) if newest else None) == checkpoints.latest(folder)

    process = start(folder, losses)
    process.join(HANG_S)
    assert process.exitcode == 0, (tmp_path / "killed" / "stderr").read_text()

    # Every loss that any process logged is bitwise that of the run that was never killed.
    told_in_all = read(losses)
    assert set(told_in_all) == set(reference)
    last = num_steps
    assert [checkpoints.step_of(path) for path in checkpoints.find(folder)] == [last - 1, last]
    assert not list(folder.glob(".*"))
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        one, other = (path / f"checkpoint-{last}" / name for path in (whole_folder, folder))
        assert one.read_bytes() == other.read_bytes(), name
    # The kills hit what they were meant to hit: later and later steps, writes and deletions.
    assert resumed_at == sorted(resumed_at) and resumed_at[-1] > resumed_at[0]
    assert {"partial", "gone"} <= set(caught), caught
