"""Resuming from a checkpoint that an earlier release wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from earlier_run import FOLDER, NUM_STEPS, RUNS, digest, environment, trainer_for, weights


@pytest.mark.parametrize("name", RUNS)
def test_an_earlier_checkpoint_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    """The checkpoint and the final weights are those of a commit before the package was reorganized."""
    halfway = f"checkpoint-{NUM_STEPS // 2}"
    shutil.copytree(FOLDER / name / halfway, tmp_path / halfway)
    record = json.loads((FOLDER / name / "final.json").read_text())
    expected = torch.load(FOLDER / name / "final.pt")
    assert digest(expected) == record["sha256"]

    trainer = trainer_for(name, tmp_path)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.train(resume_from_checkpoint=True)
    finally:
        torch.set_num_threads(num_threads)
    assert trainer.state.global_step == NUM_STEPS
    found = weights(trainer.model)
    if environment() == record["environment"]:
        assert digest(found) == record["sha256"]
    # Another CPU or another torch multiplies matrices with other last bits.
    tolerance = 1e-5 if RUNS[name]["dtype"] == torch.float32 else 2e-2
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


def test_a_changed_moment_changes_the_final_weights(tmp_path: Path) -> None:
    """The hash covers what the optimizer has in the checkpoint."""
    halfway = f"checkpoint-{NUM_STEPS // 2}"
    shutil.copytree(FOLDER / "adamw" / halfway, tmp_path / halfway)
    state = torch.load(tmp_path / halfway / "optimizer.pt")
    for moments in state["state"].values():
        moments["exp_avg"].mul_(1.01)
    torch.save(state, tmp_path / halfway / "optimizer.pt")
    (tmp_path / halfway / "oomb_manifest.json").unlink()
    trainer = trainer_for("adamw", tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / halfway))
    record = json.loads((FOLDER / "adamw" / "final.json").read_text())
    assert digest(weights(trainer.model)) != record["sha256"]
