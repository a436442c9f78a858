"""Test checkpoints by the clock, and warnings when a run resumes with other settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import TOY_RUN, invoke
from trainings import CHUNKED, Samples, arguments, tiny_model

import oomb
from oomb.cli.train import output_dir, save_timer
from oomb.cli.train.describe import when_saved
from oomb.cli.train.save_timer import SaveTimer
from oomb.cli.train.settings import TrainSettings
from oomb.trainers import checkpoints
from oomb.utils import files

TOY = [*TOY_RUN, "--max_steps", "4"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text())
    return tmp_path


def steps(folder: Path | str) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.find(folder)]


def logged_steps(folder: Path) -> list[int]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


class SlowSteps(SaveTimer):
    """Timer for a run whose steps take 10 minutes."""

    def __init__(self, minutes: float, clock: list[float]) -> None:
        super().__init__(minutes)
        self.clock, self.seen = clock, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock[0] += 600

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        self.seen.append((state.global_step, steps(args.output_dir)))


@pytest.mark.timing
@pytest.mark.parametrize(
    ("minutes", "options", "seen"),
    [
        # 9 steps. After the last, the model itself is saved.
        (30, {}, [(3, [3]), (6, [3, 6])]),
        (20, {}, [(2, [2]), (4, [2, 4]), (6, [4, 6]), (8, [6, 8])]),
        (20, {"save_total_limit": 1}, [(2, [2]), (4, [4]), (6, [6]), (8, [8])]),
        # Checkpoints of --save_steps restart the clock, and are kept.
        (
            20,
            {"save_strategy": "steps", "save_steps": 3},
            [(2, [2]), (3, [2, 3]), (5, [2, 3, 5]), (6, [2, 3, 5, 6]), (8, [3, 5, 6, 8]), (9, [3, 5, 6, 8, 9])],
        ),
        (90, {}, []),
    ],
)
def test_checkpoints_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, options: dict[str, Any], seen: list[Any]
) -> None:
    clock = [1e6]
    monkeypatch.setattr(save_timer, "monotonic", lambda: clock[0])
    callback = SlowSteps(minutes, clock)
    # The timer is created long before training starts.
    clock[0] += 9e6
    model = tiny_model(num_hidden_layers=1)
    trainer = oomb.Trainer(
        model,
        arguments(tmp_path, max_steps=9, per_device_train_batch_size=1, **options),
        train_dataset=Samples(9, 20),
        engine_config=CHUNKED,
        callbacks=[callback],
    )
    trainer.train()
    assert callback.seen == seen
    for folder in checkpoints.find(tmp_path):
        checkpoints.check(folder)


@pytest.mark.timing
def test_a_timed_checkpoint_that_does_not_fit_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(save_timer, "monotonic", lambda: clock[0])
    monkeypatch.setattr(files, "free_bytes", lambda folder: 0)
    trainer = oomb.Trainer(
        tiny_model(num_hidden_layers=1),
        arguments(tmp_path, max_steps=7, per_device_train_batch_size=1),
        train_dataset=Samples(9, 20),
        engine_config=CHUNKED,
        callbacks=[SlowSteps(30, clock)],
    )
    with pytest.warns(UserWarning, match="was not written") as said:
        trainer.train()
    assert [w for w in ("checkpoint-3 ", "checkpoint-6 ") if any(w in str(one.message) for one in said)] == [
        "checkpoint-3 ", "checkpoint-6 ",
    ]  # fmt: skip
    assert len([one for one in said if "was not written" in str(one.message)]) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "a checkpoint every 30 minutes; the newest 2 are kept"),
        ({"save_steps": 5}, "a checkpoint every 5 steps and every 30 minutes; the newest 2 of the latter are kept"),
        ({"save_steps": 5, "save_total_limit": 3}, "every 5 steps and every 30 minutes; the newest 3 are kept"),
        ({"save_minutes": 0, "save_steps": 5}, "a checkpoint every 5 steps"),
        ({"save_minutes": 0}, "no checkpoints (--save_minutes 0)"),
    ],
)
def test_the_description_says_when_checkpoints_are_written(flags: dict[str, Any], said: str) -> None:
    assert when_saved(TrainSettings(**flags)).endswith(said)


@pytest.mark.timing
def test_one_command_starts_and_resumes_a_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["train", *TOY, "--resume_from_checkpoint", "auto"]
    assert (
        "needs --output_dir, to find its latest checkpoint"
        in invoke("train", "--resume_from_checkpoint", "auto").output
    )
    # Killed before its first checkpoint: only metrics are left.
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 5.0}\n')
    assert "already holds the metrics of a run" in invoke("train", *TOY).output
    clock = [0.0]

    def monotonic() -> float:
        clock[0] += 600  # and so does a step take more than 10 minutes
        return clock[0]

    with monkeypatch.context() as patched:
        patched.setattr(save_timer, "monotonic", monotonic)
        first = invoke(*job, "--save_minutes", "10")
    assert first.exit_code == 0, first.output
    assert "no checkpoint in out: starting from scratch" in first.output
    assert "a checkpoint every 10 minutes; the newest 2 are kept" in first.output
    assert logged_steps(here / "out") == [1, 2, 3, 4]
    assert steps("out") == [2, 3]
    second = invoke(*job)
    assert second.exit_code == 0, second.output
    assert "resuming from out/checkpoint-3" in second.output
    assert logged_steps(here / "out") == [1, 2, 3, 4, 4]
    # A trained model without checkpoints is not overwritten.
    for folder in checkpoints.find("out"):
        files.remove_folder(folder)
    assert "out already holds a trained model" in invoke(*job).output
    assert output_dir.checkpoint_of(TrainSettings(output_dir="out", resume_from_checkpoint="auto")) is None


def test_settings_that_change_the_data_are_reported(here: Path) -> None:
    run = ["train", *TOY, "--per_device_train_batch_size", "2", "--max_steps", "2", "--save_steps", "1"]
    begun = invoke(*run)
    assert begun.exit_code == 0, begun.output
    (here / "other.txt").write_text((here / "text.txt").read_text() + "And more.")
    # The same examples, written or batched in another way.
    same = invoke(
        *run, "--dataset", here / "text.txt", "--packing", "windows", "--per_device_train_batch_size", "1",
        "--gradient_accumulation_steps", "2", "--resume_from_checkpoint", "out/checkpoint-1",
    )  # fmt: skip
    assert same.exit_code == 0, same.output
    assert "but the checkpoint was trained with" not in same.output
    flags = ["--max_length", "1024", "--seed", "7", "--packing", "documents", "--dataset", "other.txt"]
    other = invoke(*run, *flags, "--resume_from_checkpoint", "out/checkpoint-1")
    assert other.exit_code == 0, other.output
    rest = ": training will not resume at the same position in the data"
    for key, now, before in (
        ("max_length", "1,024", "256"),
        ("seed", "7", "42"),
        ("packing", "documents", "windows"),
        ("dataset", str(here / "other.txt"), str(here / "text.txt")),
        # Changed by the run before, but their product is the same.
        ("per_device_train_batch_size", "2", "1"),
        ("gradient_accumulation_steps", "1", "2"),
    ):
        line = f"{key} is {now} but the checkpoint was trained with {before}{rest}"
        is_told = key not in ("per_device_train_batch_size", "gradient_accumulation_steps")
        assert other.output.count(line) == is_told, (key, other.output)
    third = invoke(*run, *flags, "--gradient_accumulation_steps", "3", "--resume_from_checkpoint", "out/checkpoint-1")
    assert third.output.count("but the checkpoint was trained with") == 1, third.output
    assert f"gradient_accumulation_steps is 3 but the checkpoint was trained with 1{rest}" in third.output


def test_settings_of_another_version_are_ignored(here: Path) -> None:
    Path("out/checkpoint-1").mkdir(parents=True)
    going_on = TrainSettings(output_dir="out", resume_from_checkpoint="out/checkpoint-1")
    assert output_dir.data_changes(going_on) == []
    Path("out/config.yaml").write_text("max_length: 8K\nno_such_setting: 1\n")
    assert output_dir.data_changes(going_on) == []
    # From a version that did not resolve packing.
    Path("out/config.yaml").write_text("packing: auto\nchunk_size: 64\n")
    assert output_dir.data_changes(dataclasses.replace(going_on, packing="documents")) == []
    Path("out/config.yaml").write_text("max_length: 8K\n")
    assert len(output_dir.data_changes(going_on)) == 1
    assert output_dir.data_changes(TrainSettings(output_dir="out")) == []


def test_a_run_can_be_resumed_from_any_folder(here: Path, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(saved_model, "my model")
    Path("elsewhere").mkdir()
    Path("stdlib").mkdir()
    begun = invoke("train", "--model", "my model", *TOY, "--save_steps", "2", "--max_steps", "3")
    assert begun.exit_code == 0, begun.output
    stored = yaml.safe_load(Path("out/config.yaml").read_text())
    paths = {"model_name_or_path": "my model", "dataset": "text.txt", "output_dir": "out"}
    assert stored | {key: str(here / path) for key, path in paths.items()} == stored
    files.remove_folder(Path("out/checkpoint-3"))
    monkeypatch.chdir("elsewhere")
    resumed = invoke("train", "../out/config.yaml", "--resume_from_checkpoint")
    assert resumed.exit_code == 0, resumed.output
    assert "but the checkpoint was trained with" not in resumed.output
    assert logged_steps(here / "out") == [1, 2, 3, 3]
    assert not list(Path().iterdir())
    # Words, and paths that do not exist, stay as they are.
    monkeypatch.chdir(here)
    Path("demo").mkdir()
    kept = TrainSettings(tokenizer_name="owner/name", output_dir="not there")
    assert output_dir.with_absolute_paths(kept) == kept
    assert output_dir.with_absolute_paths(TrainSettings(tokenizer_name="./demo")).tokenizer_name == str(here / "demo")
