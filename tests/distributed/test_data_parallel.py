"""Several ranks train as one process would, through the engine, the trainers and `oomb train`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, fences
from rank_runs import RUN, events, expect_same, losses, step_losses, train, worker
from ranks import finish, run_cases, torchrun
from waiting import HANG_S, wait_until

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timing]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_engines_of_all_ranks_compute_as_one(world_size: int, tmp_path: Path) -> None:
    run_cases("data_parallel_cases", world_size, tmp_path)


def test_trainers_of_two_ranks_train_as_one_and_resume_as_one(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"max_steps": 4, "data_seed": 5, "per_device_eval_batch_size": 1}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    alone = train(1, tmp_path / "alone", gradient_accumulation_steps=4, **shared, **evaluated)
    pair = train(
        2, tmp_path / "pair", gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, **shared, **evaluated
    )
    expect_same(pair, alone)
    assert pair["wrapper"] == "LlamaForCausalLM"
    evaluations = [[entry["eval_loss"] for entry in found["log"] if "eval_loss" in entry] for found in (pair, alone)]
    assert len(evaluations[0]) == 2 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-9)
    checkpoint = tmp_path / "pair" / "run" / "checkpoint-2"
    resumed = train(1, tmp_path / "resumed", gradient_accumulation_steps=4, resume=str(checkpoint), **shared)
    expect_same(resumed, alone)


@pytest.mark.full
def test_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"max_steps": 6, "data_seed": 5}
    alone = train(1, tmp_path / "alone", gradient_accumulation_steps=4, save_strategy="steps", save_steps=3, **shared)
    four = train(4, tmp_path / "four", gradient_accumulation_steps=1, save_strategy="steps", save_steps=3, **shared)
    expect_same(four, alone)
    for origin in ("alone", "four"):
        for world_size in (1, 2, 4):
            out, resume = tmp_path / f"{origin}{world_size}", str(tmp_path / origin / "run" / "checkpoint-3")
            found = train(world_size, out, gradient_accumulation_steps=4 // world_size, resume=resume, **shared)
            expect_same(found, alone)


@pytest.mark.full
def test_adapters_offloaded_states_dropout_and_the_best_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "lora": "dropout",
        "optimizer": "offloaded_adamw",
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "data_seed": 5,
    }
    whole = train(2, tmp_path / "whole", load_best_model_at_end=True, **settings)
    best = Path(whole["best"])
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_global_step"] == state["global_step"] == int(best.name.split("-")[1])
    assert best.parent == tmp_path / "whole" / "run"
    # Dropout is drawn from the seed, the step and the rank, so a resumed run repeats it.
    part = train(2, tmp_path / "part", **settings)
    checkpoint = tmp_path / "part" / "run" / "checkpoint-2"
    shutil.rmtree(tmp_path / "part" / "run" / "checkpoint-4")
    resumed = train(2, tmp_path / "resumed", resume=str(checkpoint), **settings)
    assert losses(resumed) == losses(part) == losses(whole)
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in part["weights"].items())


def test_a_bad_loss_on_one_rank_skips_the_step_on_all_or_stops_all(tmp_path: Path) -> None:
    skipped = train(2, tmp_path / "skipped", nan_at=2, nan_rank=1, max_skipped_steps=1, max_steps=3)
    assert len(losses(skipped)) == 3 and all(w.isfinite().all() for w in skipped["weights"].values())
    (tmp_path / "stopped").mkdir()
    settings = json.dumps({"nan_at": 2, "nan_rank": 1, "max_steps": 3})
    process = torchrun(2, HERE / "trainer_run.py", tmp_path / "stopped", settings, cwd=tmp_path)
    printed = finish(process)
    assert process.returncode != 0
    assert "NonFiniteError: the loss is nan in step 2 of 3, on example" in printed


# oomb train


def test_oomb_train_on_two_ranks(one_process: dict[int, float], tmp_path: Path) -> None:
    process = torchrun(2, *RUN, "--gradient_accumulation_steps", "2", "--output_dir", "out", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    out = tmp_path / "out"
    assert step_losses(out) == pytest.approx(one_process, rel=1e-6)
    assert {path.name for path in out.iterdir()} >= {"model", "metrics.jsonl", "config.yaml", "report.html"}
    assert "parallel: dp=2" in (out / "config.yaml").read_text()
    step = events(out, "step")[-1]
    assert len(step["ranks"]) == 2 and step["tokens"] == 4 * 1024
    # Rank 1 printed nothing: each line is there once.
    assert printed.count("held-out loss before training") == printed.count("Done") == 1


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_killed_rank_is_restarted_and_the_losses_are_the_same(
    rank: int, one_process: dict[int, float], tmp_path: Path
) -> None:
    command = [*RUN, "--gradient_accumulation_steps", "2", "--output_dir", "out"]
    process = torchrun(2, *command, cwd=tmp_path, restarts=2)
    out = tmp_path / "out"
    # Later than the first checkpoint: without one the run starts from scratch, and so does its metrics file.
    wait_until(lambda: len(step_losses(out)) > 2 or process.poll() is not None, lambda: "no step was taken")
    worker(process, rank).send_signal(signal.SIGKILL)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    assert len(events(out, "start")) == 2
    assert step_losses(out) == pytest.approx(one_process, rel=1e-6)


@pytest.mark.full
def test_ranks_killed_at_any_moment(one_process: dict[int, float], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(int(time.time()))
    for number in range(5):
        name = f"out{number}"
        command = [*RUN, "--gradient_accumulation_steps", "1", "--output_dir", name]
        process = torchrun(4, *command, cwd=tmp_path, restarts=3)
        delay, rank = 25 * float(torch.rand((), generator=generator)), int(torch.randint(4, (), generator=generator))
        victim = worker(process, rank)
        time.sleep(delay)
        if victim.is_running():
            victim.send_signal(signal.SIGKILL)
        printed = finish(process)
        assert process.returncode == 0, f"rank {rank} after {delay:.2f} s\n{printed[-5000:]}"
        assert step_losses(tmp_path / name) == pytest.approx(one_process, rel=1e-6), f"rank {rank} after {delay:.2f} s"


def test_ctrl_c_stops_all_ranks_and_saves(one_process: dict[int, float], tmp_path: Path) -> None:
    command = [*RUN, "--gradient_accumulation_steps", "2", "--output_dir", "out"]
    process = torchrun(2, *command, cwd=tmp_path)
    out = tmp_path / "out"
    wait_until(lambda: bool(step_losses(out)) or process.poll() is not None, lambda: "no step was taken")
    # Only one rank gets it. In a terminal, all ranks and torchrun do.
    worker(process, 1).send_signal(signal.SIGINT)
    printed = finish(process)
    assert "stopped after step" in printed and (out / "model" / "model.safetensors").is_file(), printed[-5000:]
    resume = ["--resume_from_checkpoint", "--output_dir", "out", "--gradient_accumulation_steps", "4"]
    process = torchrun(1, *RUN, *resume, cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    assert step_losses(out) == pytest.approx(one_process, rel=1e-6)
    assert "training will not resume at the same position" not in printed


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path) -> None:
    process = torchrun(2, *RUN, "--parallel", "dp=3", "--output_dir", "out", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode != 0 and "--parallel dp=3 needs 3 processes, but 2 are running" in printed
    assert not (tmp_path / "out").exists()


def test_the_script_of_the_page_runs_on_one_and_two_ranks(tmp_path: Path) -> None:
    (script,) = fences(ROOT / "docs" / "parallel.md", "python")
    path = tmp_path / "script.py"
    path.write_text(script + '\nprint(f"rank {mesh.get_rank()}: {float(loss)!r}")\n')
    printed = finish(torchrun(2, path, cwd=tmp_path))
    found = dict(re.findall(r"rank (\d): ([\d.]+)", printed))
    assert set(found) == {"0", "1"} and found["0"] == found["1"], printed[-5000:]
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path, timeout=HANG_S)
    assert re.search(r"rank 0: [\d.]+", alone.stdout), alone.stderr[-3000:]
