"""Damaged or foreign checkpoints raise one clear error, and errors during training lose no step."""

from __future__ import annotations

import contextlib
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_flips import flip, flipped, num_undetected
from checkpoint_runs import names, train, trainer_in, write
from command import TOY_RUN, invoke
from tokenizer import small_tokenizer
from trainings import CHUNKED, Samples, arguments, quick_collection, tiny_model

import oomb
from oomb.cli.train import save
from oomb.data.tokens import Examples
from oomb.models import load
from oomb.trainers import checkpoints

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)
TOY = [*TOY_RUN, "--max_steps", "5"]


def test_a_changed_byte_anywhere_in_a_large_file_is_detected(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    with checkpoints.write(folder) as partial:
        (partial / "optimizer.pt").write_bytes(os.urandom(1 << 20) * 80)
        (partial / checkpoints.STATE).write_text('{"global_step": 1}')
    checkpoints.check(folder)
    chance = random.Random(0)
    for _ in range(10):
        refused = pytest.raises(checkpoints.BrokenCheckpoint, match=r"checksum of optimizer\.pt")
        with flipped(folder / "optimizer.pt", chance.randrange(80 << 23)), refused:
            checkpoints.check(folder)
    checkpoints.check(folder)


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    write(folder)
    manifest = folder / checkpoints.MANIFEST
    unseen = []
    for bit in range(8 * manifest.stat().st_size):
        with flipped(manifest, bit):
            try:
                checkpoints.check(folder)
            except checkpoints.BrokenCheckpoint:
                continue
            unseen.append(bit)
    assert not unseen


def test_random_bit_flips_in_a_checkpoint_are_detected(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    assert num_undetected(tmp_path / "checkpoint-2", 60, checkpoints.check) == 0


def resume_error(trainer: Any, folder: Path) -> Exception | None:
    try:
        trainer.train(resume_from_checkpoint=str(folder))
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_the_error_for_a_truncated_file_names_an_older_checkpoint(tmp_path: Path, name: str) -> None:
    """Checkpoints of transformers have no manifest, so damage shows only when a file is read."""
    train(tmp_path)
    broken = tmp_path / "checkpoint-4"
    (broken / checkpoints.MANIFEST).unlink()
    os.truncate(broken / name, (broken / name).stat().st_size // 2)
    error = resume_error(trainer_in(tmp_path / "resumed", max_steps=6), broken)
    assert isinstance(error, checkpoints.BrokenCheckpoint), repr(error)
    assert "damaged" in str(error) and name in str(error)
    assert f"resume from {tmp_path / 'checkpoint-3'} instead" in str(error)


def test_optimizer_states_of_another_shape_raise(tmp_path: Path) -> None:
    train(tmp_path)
    folder = tmp_path / "checkpoint-4"
    (folder / checkpoints.MANIFEST).unlink()
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    optimizer["state"][0]["exp_avg"] = optimizer["state"][0]["exp_avg"][:, :31].clone()
    torch.save(optimizer, folder / "optimizer.pt")
    # The run is at its last step: a step with such a state could crash the process.
    error = resume_error(trainer_in(tmp_path / "resumed"), folder)
    assert isinstance(error, checkpoints.BrokenCheckpoint), repr(error)
    assert "exp_avg in optimizer.pt has shape (61, 31), but its parameter (61, 32)" in str(error)
    assert "checkpoint-3 instead" in str(error)


def test_a_checkpoint_of_other_adapters_is_not_called_damaged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def trainer(rank: int, folder: Path) -> Any:
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=rank, target_modules=["q_proj"]))
        options = {"save_strategy": "steps", "save_steps": 1}
        return oomb.Trainer(model, arguments(folder, **options), train_dataset=Samples(8, 33), engine_config=CHUNKED)

    trainer(4, tmp_path).train()
    error = resume_error(trainer(8, tmp_path / "resumed"), tmp_path / "checkpoint-4")
    assert isinstance(error, RuntimeError) and "damaged" not in str(error), repr(error)
    assert "size mismatch" in str(error)
    assert any("this model, adapters and arguments" in note for note in error.__notes__)


class LowRank(torch.optim.Optimizer):
    """Keeps a projected moment that is smaller than its parameter, as GaLore does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("exp_avg", p.new_zeros(1)).add_(p.grad.mean())
                    p.sub_(self.state[p]["exp_avg"], alpha=group["lr"])


def test_other_optimizers_may_have_moments_of_other_shapes(tmp_path: Path) -> None:
    def trainer(folder: Path, steps: int) -> Any:
        model = tiny_model()
        options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        return oomb.Trainer(
            model,
            arguments(folder, **options),
            train_dataset=Samples(8, 33),
            engine_config=CHUNKED,
            optimizers=(LowRank(model.parameters()), None),
        )

    trainer(tmp_path, 2).train()
    assert resume_error(trainer(tmp_path / "resumed", 3), tmp_path / "checkpoint-2") is None


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_damaged_best_checkpoint_does_not_fail_a_finished_run(tmp_path: Path, name: str) -> None:
    """Only its weights are loaded. If those are damaged, the model keeps the weights of the last step."""
    from scored_runs import BEST, Scores

    class Damaging(Scores):
        def _load_best_model(self) -> None:
            flip(tmp_path / "checkpoint-2" / name, 80_001)
            super()._load_best_model()

    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 1, **BEST}
    samples = Samples(8, 20)
    trainer = Damaging(
        tiny_model(num_hidden_layers=1),
        arguments(tmp_path, **options),
        train_dataset=samples,
        eval_dataset=samples,
        engine_config=CHUNKED,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(one.message) for one in caught if "keeps the weights of the last step" in str(one.message)]
    if name == "optimizer.pt":
        assert not said and names(tmp_path) == {"checkpoint-2"}
    else:
        assert "checksum of model.safetensors" in said[0]
        assert names(tmp_path) == {"checkpoint-2", "checkpoint-4"}


def test_oomb_train_names_the_older_checkpoint(places: Path) -> None:
    assert invoke("train", *TOY, "--save_steps", "1").exit_code == 0
    flip(Path("out/checkpoint-5/optimizer.pt"), 80_001)
    done = invoke("train", "out/config.yaml", "--max_steps", "6", "--resume_from_checkpoint", "out/checkpoint-5")
    assert done.exit_code == 2, done.output
    assert "out/checkpoint-5 is damaged: the checksum of optimizer.pt" in done.output
    assert "resume from out/checkpoint-4 instead" in done.output
    flip(Path("out/checkpoint-4/model.safetensors"), 80_001)
    done = invoke("train", "out/config.yaml", "--max_steps", "6", "--resume_from_checkpoint", "out/checkpoint-5")
    assert "resume from out/checkpoint-3 instead" in done.output


@pytest.mark.parametrize("fault", ["token id", "RuntimeError"])
def test_an_error_between_two_steps_loses_no_step(places: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    read, calls = Examples.__getitem__, 0

    def spoiled(self: Any, index: int) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        example = read(self, index)
        if calls == 5 and fault == "RuntimeError":
            raise RuntimeError("the data set broke")
        if calls == 5:
            example["input_ids"][7] = 9999
        return example

    monkeypatch.setattr(Examples, "__getitem__", spoiled)
    done = invoke("train", *TOY)
    monkeypatch.undo()
    monkeypatch.chdir(places / "work")
    step = max((checkpoints.step_of(path) for path in checkpoints.find(Path("out"))), default=None)
    assert step in (2, 3), done.output
    assert done.exit_code == 1 and f"stopped after step {step} of 5; the model after that step is in" in done.output
    assert ("has the id 9999" if fault == "token id" else "RuntimeError: the data set broke") in done.output
    assert load.load_model("out/model", device="cpu") is not None
    events = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[-2:]] == ["error", "end"]
    resumed = invoke("train", "out/config.yaml", "--resume_from_checkpoint")
    assert resumed.exit_code == 0, resumed.output
    invoke("train", *TOY, "--output_dir", "whole")
    assert Path("out/model/model.safetensors").read_bytes() == Path("whole/model/model.safetensors").read_bytes()


def test_the_model_is_saved_if_the_tokenizer_cannot_be(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Object of type function is not JSON serializable")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", broken)
    model, said = load.load_model("demo", device="cpu"), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ValueError):
            save.save_somewhere(model, tokenizer, Path("out"), said.append)
    assert (Path("out") / "model" / "model.safetensors").is_file(), "the trained model was discarded"
    assert names(Path("out")) == {"model"} and not said
    assert any("the tokenizer could not be saved with the model" in str(one.message) for one in caught)
