"""Write the checkpoints that tests/trainers/test_earlier_release.py resumes, with an earlier commit of oomb.

    git worktree add /tmp/earlier COMMIT
    PYTHONPATH=/tmp/earlier:tests/helpers python tests/helpers/earlier_run.py COMMIT

Each run trains to the end. What is kept of it is the checkpoint from halfway and the weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from trainings import CHUNKED, Samples, arguments, tiny_model

import oomb

FOLDER = Path(__file__).parents[1] / "data_files" / "earlier_run"
NUM_STEPS = 6
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"dtype": torch.float32},
    "offloaded_adamw_8bit": {"dtype": torch.bfloat16, "optimizer": "offloaded_adamw_8bit"},
}


def trainer_for(name: str, folder: Path) -> oomb.Trainer:
    """Return the trainer of a run. The order of its data, its rounding and its schedule are all part of the result."""
    settings = dict(RUNS[name])
    model = tiny_model(hidden_size=16, intermediate_size=24, dtype=settings.pop("dtype"))
    training = {"max_steps": NUM_STEPS, "gradient_accumulation_steps": 2, "weight_decay": 0.1}
    saving = {"save_strategy": "steps", "save_steps": NUM_STEPS // 2}
    return oomb.Trainer(
        model,
        arguments(folder, **training, **saving),
        train_dataset=Samples(24, 33),
        engine_config=CHUNKED,
        **settings,
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of names, shapes and every bit of the values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)}\0".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def environment() -> dict[str, str]:
    """Return what the last bits of a matrix product depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kind = [
        next((line for line in lines if line.startswith(key)), "") for key in ("vendor_id", "cpu family", "model\t")
    ]
    cpu = ", ".join(line.split(":", 1)[-1].strip() for line in kind) or platform.processor()
    return {"torch": torch.__version__, "cpu": cpu, "capability": torch.backends.cpu.get_cpu_capability()}


def main(commit: str) -> None:
    torch.set_num_threads(1)
    for name in RUNS:
        with tempfile.TemporaryDirectory() as place:
            trainer = trainer_for(name, Path(place))
            trainer.train()
            final = weights(trainer.model)
            halfway = f"checkpoint-{NUM_STEPS // 2}"
            folder = FOLDER / name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(place) / halfway, folder / halfway)
            torch.save(final, folder / "final.pt")
            record = {"commit": commit, "sha256": digest(final), "environment": environment()}
            (folder / "final.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
