"""Ranks that share each sequence train as one process would."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import RUN, expect_same, losses, step_losses, train, worker
from ranks import finish, run_cases, torchrun
from waiting import wait_until

from oomb.distributed.topology import Topology, TopologyError

HERE = Path(__file__).parent
on_ranks = [pytest.mark.slow, pytest.mark.timing]


def mark(*marks: Any) -> Any:
    return [*on_ranks, *marks]


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=mark()), pytest.param(4, marks=mark(pytest.mark.full))], ids=["2", "4"]
)
def test_engines_of_all_ranks_compute_as_one(world_size: int, tmp_path: Path) -> None:
    run_cases("sequence_parallel_cases", world_size, tmp_path)


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.full
def test_all_families_whose_heads_divide(tmp_path: Path) -> None:
    run_cases("sequence_parallel_cases", 2, tmp_path, OOMB_TESTS_ALL_FAMILIES="1")


TRAINERS = [
    pytest.param(2, "sp=2", 4, marks=mark(), id="sp=2"),
    pytest.param(4, "dp=2,sp=2", 2, marks=mark(pytest.mark.full), id="dp=2,sp=2"),
]


@pytest.mark.parametrize(("world_size", "parallel", "accumulation"), TRAINERS)
def test_trainers_train_and_evaluate_as_one(world_size: int, parallel: str, accumulation: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {
        "data_seed": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 1,
        "include_num_input_tokens_seen": "non_padding",
    }
    alone = train(1, tmp_path / "alone", gradient_accumulation_steps=4, **shared)
    settings = {"gradient_accumulation_steps": accumulation, "parallel": parallel}
    together = train(world_size, tmp_path / "together", **settings, **shared)
    expect_same(together, alone)
    for name in ("eval_loss", "num_input_tokens_seen"):
        found, expected = ([entry[name] for entry in run["log"] if name in entry] for run in (together, alone))
        assert len(expected) >= 2 and found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("world_size", "parallel", "accumulation"), TRAINERS)
def test_oomb_train(
    world_size: int, parallel: str, accumulation: int, one_process: dict[int, float], tmp_path: Path
) -> None:
    settings = ["--gradient_accumulation_steps", str(accumulation), "--parallel", parallel, "--output_dir", "out"]
    printed = finish(process := torchrun(world_size, *RUN, *settings, cwd=tmp_path))
    assert process.returncode == 0, printed[-5000:]
    assert step_losses(tmp_path / "out") == pytest.approx(one_process, rel=1e-6)
    dp = world_size // Topology.parse(parallel).sp
    assert f"parallel: dp={dp},sp=2" in (tmp_path / "out" / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.full
def test_a_killed_rank_is_restarted_and_resumed_on_another_topology(
    one_process: dict[int, float], tmp_path: Path
) -> None:
    command = [*RUN, "--output_dir", "out", "--gradient_accumulation_steps"]
    process = torchrun(4, *command, "2", "--parallel", "sp=2", cwd=tmp_path, restarts=2)
    out = tmp_path / "out"
    wait_until(lambda: len(step_losses(out)) > 2 or process.poll() is not None, lambda: "no step was taken")
    worker(process, 3).send_signal(signal.SIGKILL)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    assert step_losses(out) == pytest.approx(one_process, rel=1e-6)
    for world_size, accumulation, parallel in ((1, "4", "auto"), (2, "2", "dp=2"), (2, "4", "sp=2")):
        resume = ["--resume_from_checkpoint", "out/checkpoint-2", "--parallel", parallel, "--report_to", "none"]
        (tmp_path / "out" / "metrics.jsonl").unlink()
        printed = finish(process := torchrun(world_size, *command, accumulation, *resume, cwd=tmp_path))
        assert process.returncode == 0, printed[-5000:]
        found = step_losses(out)
        assert found == pytest.approx({step: one_process[step] for step in (3, 4, 5, 6)}, rel=1e-6), parallel


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.full
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_trainers_train_as_one(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import scripts  # noqa: F401  (puts examples/ on the path)
    import toy

    folder, runs = toy.model_folder(str(tmp_path / "model")), []
    for world_size, accumulation, parallel in ((1, "4", "auto"), (2, "2", "auto"), (2, "4", "sp=2")):
        out = tmp_path / f"{world_size}{parallel}"
        out.mkdir()
        process = torchrun(world_size, HERE / "trl_run.py", out, folder, kind, accumulation, parallel, cwd=out)
        printed = finish(process)
        assert process.returncode == 0, printed[-5000:]
        runs.append(torch.load(out / "result.pt", weights_only=False))
    alone = runs[0]
    for together in runs[1:]:
        assert losses(together) == pytest.approx(losses(alone), rel=1e-4)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(together["weights"][name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timing
def test_oomb_verify_compares_what_ranks_compute_together(tmp_path: Path) -> None:
    command = ["-m", "oomb", "verify", "demo", "--device", "cpu", "--context", "64", "--chunk_size", "16"]
    process = torchrun(2, *command, "--dtype", "float64", "--parallel", "sp=2", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode == 0 and printed.count("trust it") == 1 and "2 ranks" in printed, printed[-5000:]
    process = torchrun(2, *command, "--parallel", "sp=3", cwd=tmp_path)
    printed = finish(process)
    assert process.returncode != 0 and "--parallel sp=3 needs a multiple of 3 processes, but 2 are running" in printed


@pytest.mark.parametrize(
    ("text", "world_size", "replicas"),
    [("auto", 6, 6), ("dp=3", 3, 3), ("sp=4", 8, 2), ("sp=2,dp=3", 6, 3), ("dp=1,sp=1", 1, 1)],
)
def test_topologies(text: str, world_size: int, replicas: int) -> None:
    topology = Topology.parse(text)
    assert topology.num_replicas(world_size) == replicas
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=2", "pp=2 is not supported"),
        ("sp=0", "is 'sp=0'"),
        ("sp", "is 'sp'"),
        ("dp=2,dp=2", "is 'dp=2,dp=2'"),
        ("two", "is 'two'"),
        ("sp=-1", "is 'sp=-1'"),
    ],
)
def test_wrong_topologies(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.parse(text)


@pytest.mark.parametrize(("text", "world_size"), [("sp=4", 6), ("dp=2", 3), ("dp=2,sp=2", 8)])
def test_topologies_that_do_not_fit(text: str, world_size: int) -> None:
    with pytest.raises(TopologyError, match=f"processes, but {world_size} are running"):
        Topology.parse(text).num_replicas(world_size)
