"""Test how a run of `oomb train` starts: what it accepts in its folder, what it prints, and how it resumes."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import invoke

from oomb.cli.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from oomb.cli.train import describe, prepare
from oomb.cli.train import output_dir as output_dir_module
from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.settings import TrainSettings
from oomb.data.dataset import load
from oomb.engine.engine import Engine
from oomb.models import presets
from oomb.trainers.trainer import Trainer
from oomb.utils import files, lock

TOY = [
    "--dataset", "text.txt", "--max_length", "256", "--chunk_size", "64", "--max_steps", "2", "--device", "cpu",
    "--sample_tokens", "0", "--no_report", "--output_dir", "out",
]  # fmt: skip
OVERWRITTEN = "overwriting out: the run in it ended before its first step"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text())
    return tmp_path


def output_dir_of(settings: TrainSettings) -> Path:
    output_dir = output_dir_module.output_dir_of(settings)
    output_dir_module.check_unused(settings, output_dir)
    return output_dir


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in records(folder) if event["event"] == "step"}


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def ctrl_c_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("the GPU has fallen off the bus")


@pytest.mark.timing
@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (terminate, EXIT_TERMINATED, "stopped after step 0 of 2; nothing was saved; the same command starts again"),
        (ctrl_c_twice, EXIT_INTERRUPTED, "interrupted by Ctrl-C; nothing was saved; the same command starts again"),
        (fail, 2, "the GPU has fallen off the bus"),
    ],
)
def test_a_run_that_ended_before_its_first_step_can_be_repeated(
    here: Path, monkeypatch: pytest.MonkeyPatch, happens: Any, code: int, said: str
) -> None:
    evaluate = Trainer.evaluate
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "evaluate", lambda *args: (happens(), evaluate(*args))[1])
        broken = invoke("train", *TOY)
    assert broken.exit_code == code, broken.output
    assert said in broken.output
    assert OVERWRITTEN not in broken.output
    left = sorted(path.name for path in (here / "out").iterdir())
    assert left == ["config.yaml", "metrics.jsonl"]
    nothing = invoke("train", "out/config.yaml", "--resume_from_checkpoint")
    assert "holds no checkpoint to resume from: leave out --resume_from_checkpoint" in nothing.output

    again = invoke("train", *TOY)
    assert again.exit_code == 0, again.output
    assert again.output.count(OVERWRITTEN) == 1
    assert [event["event"] for event in records(here / "out")].count("start") == 1
    # The trained model is protected from the same command.
    before = (here / "out" / "metrics.jsonl").read_bytes()
    refused = invoke("train", *TOY)
    assert refused.exit_code == 2
    assert "out already holds a trained model" in refused.output
    assert (here / "out" / "metrics.jsonl").read_bytes() == before


START = {"event": "start", "settings": {"eval_steps": 5}}
HELD_OUT = {"event": "held_out", "step": 0, "loss": 5.0}


def lines(*events: Any) -> str:
    return "".join(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events)


@pytest.mark.parametrize(
    "left",
    [
        lines(),
        lines(START),
        lines(START, HELD_OUT, {"event": "sample", "when": "before", "step": 0}),
        lines(START, HELD_OUT, {"event": "end", "stopped": True, "steps": 0}),
        lines(START, '{"event": "held_o'),
    ],
)
def test_a_folder_without_a_completed_step_is_accepted(here: Path, left: str) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text(left)
    Path("out/config.yaml").write_text("seed: 1\n")
    assert output_dir_of(TrainSettings(output_dir="out")) == Path("out")
    assert output_dir_module.never_started(Path("out"))


@pytest.mark.parametrize(
    "left",
    [
        lines(START, {"event": "step", "step": 1, "loss": 5.0}),
        # With --logging_steps 100, and an evaluation or the end before step 100.
        lines(START, HELD_OUT, {"event": "held_out", "step": 50, "loss": 4.0}),
        lines(START, {"event": "end", "stopped": True, "steps": 50}),
        # A line that cannot be read may be a step.
        lines(START, "not JSON\n", HELD_OUT),
        lines(START, '{"event": "step", "step": 1, "lo'),
    ],
)
def test_a_folder_with_a_completed_step_is_protected(here: Path, left: str) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text(left)
    with pytest.raises(ValueError, match="out already holds the metrics of a run; name another --output_dir"):
        output_dir_of(TrainSettings(output_dir="out"))
    assert not output_dir_module.never_started(Path("out"))
    assert output_dir_of(TrainSettings(output_dir="out", overwrite_output_dir=True)) == Path("out")


def test_models_and_broken_checkpoints_are_protected(here: Path) -> None:
    for name, message in (("model", "a trained model"), ("checkpoint-3", "checkpoints, none of them complete")):
        folder = here / f"with {name}"
        (folder / name).mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(lines(START))
        assert not output_dir_module.never_started(folder)
        if name == "model":
            with pytest.raises(ValueError, match=f"already holds {message}"):
                output_dir_of(TrainSettings(output_dir=str(folder)))
        else:
            with pytest.warns(UserWarning, match="not a complete checkpoint"), pytest.raises(ValueError, match=message):
                output_dir_of(TrainSettings(output_dir=str(folder)))


@pytest.mark.timing
def test_a_folder_belongs_to_one_run_at_a_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before its first step, and whatever the flags."""
    holding = "import sys; from pathlib import Path; from oomb.utils.lock import locked\n"
    holding += "with locked(Path('out')): print('held', flush=True); input()"
    refused = "another run (process {}) writes to out"
    with subprocess.Popen(
        [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for flags in ([], ["--overwrite_output_dir"], ["--resume_from_checkpoint", "auto"]):
            result = invoke("train", *TOY, *flags)
            assert result.exit_code == 2
            assert refused.format(other.pid) in result.output
        assert [path.name for path in Path("out").iterdir()] == [".lock"]
        # A kill leaves the file, but releases the lock.
        other.kill()
    assert Path("out/.lock").read_text() == str(other.pid)
    seen: list[str] = []
    evaluate = Trainer.evaluate

    def evaluated(*args: Any) -> Any:
        if not seen:
            seen.append(Path("out/.lock").read_text())
            seen.append(invoke("train", *TOY).output)
        return evaluate(*args)

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    done = invoke("train", *TOY)
    assert done.exit_code == 0, done.output
    assert seen[0] == str(os.getpid()) and refused.format(os.getpid()) in seen[1]
    assert not Path("out/.lock").exists()


def test_a_lock_file_deleted_before_it_is_locked_does_not_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, times = fcntl.flock, [0]

    def late(descriptor: int, how: int) -> None:
        times[0] += 1
        if times[0] == 1:
            Path("out/.lock").unlink()  # as the run before does at its end
        flock(descriptor, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with lock.locked(Path("out")):
        assert times == [2]
        with pytest.raises(ValueError, match=f"process {os.getpid()}"), lock.locked(Path("out")):
            pass
    assert not Path("out").exists()


def test_file_systems_without_locks_work_without_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for change in (("fcntl", None), ("fcntl.flock", unsupported)):
        with monkeypatch.context() as patched:
            patched.setattr(f"oomb.utils.lock.{change[0]}", change[1])
            with lock.locked(Path("out")), lock.locked(Path("out")):
                (Path("out") / change[0]).touch()
        assert (Path("out") / change[0]).exists()


def test_a_run_that_is_refused_leaves_no_folder(here: Path) -> None:
    refused = invoke("train", *TOY, "--max_length", "1M", "--output_dir", "a new/folder")
    assert refused.exit_code == 2
    assert [path.name for path in here.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("num_documents", "flags", "said"),
    [
        (1, {}, "19 examples of 100 tokens, each read once; 1 held out"),
        (
            1,
            {"max_steps": 3},
            "19 examples of 100 tokens, the first 3 read once; 1 held out",
        ),
        (1, {"max_steps": 57}, "19 examples of 100 tokens, each read 3.0 times; 1 held out"),
        (1, {"num_train_epochs": 2.0}, "19 examples of 100 tokens, each read 2.0 times; 1 held out"),
        (1, {"num_train_epochs": 0.5}, "19 examples of 100 tokens, the first 10 read once"),
        (9, {}, "179 examples of 100 tokens, each read once; 1 held out"),
        (
            9,
            {"max_steps": 3},
            "at least 19 examples of 100 tokens, the first 3 read once;",
        ),
        (
            1,
            {"max_eval_samples": 0},
            "20 examples of 100 tokens, each read once; none held out (--max_ev",
        ),
        (
            1,
            {"max_eval_samples": 9},
            "each read once; 4 held out (--max_eval_samples 9, but at most a fifth ",
        ),
        (
            1,
            {"max_length": 2000},
            "1 example of 2,000 tokens, each read once; none held out: the data is a ",
        ),
        (
            9,
            {"packing": "documents", "max_length": 4000},
            "8 examples from 9 documents, up to 2,000 tokens long, each",
        ),
    ],
)
def test_the_description_says_what_is_read(here: Path, num_documents: int, flags: dict[str, Any], said: str) -> None:
    Path("texts").mkdir()
    for index in range(num_documents):
        Path(f"texts/{index}.txt").write_text("x" * 1999)
    settings = TrainSettings(**{"model_name_or_path": "other", "dataset": "texts", "max_length": 100, **flags})
    cpu = torch.device("cpu")
    split = prepare.load_examples(settings, None, 264, cpu)
    steps = prepare.resolved(settings, Path("out"), cpu, split.num_examples).max_steps
    assert steps is not None
    text = f"{describe.what_is_read(settings, split, steps)}; {describe.what_is_held_out(settings, split)}"
    assert said in text


def test_memory_is_reserved_for_the_longest_example(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("texts").mkdir()
    for index in range(9):
        Path(f"texts/{index}.txt").write_text("x" * (10 * index + 19))
    asked: list[tuple[int, int]] = []
    reserve = Engine.reserve
    monkeypatch.setattr(Engine, "reserve", lambda self, *size: (asked.append(size), reserve(self, *size))[1])
    flags = [*TOY, "--dataset", "texts", "--max_steps", "8", "--overwrite_output_dir"]
    for packing, length, said in (
        # 19 to 99 bytes, and an end token each.
        ("documents", 256, "up to 100 tokens long"),
        ("documents", 64, "up to 64 tokens long"),
        ("windows", 64, "examples of 64 tokens"),
    ):
        done = invoke("train", *flags, "--packing", packing, "--max_length", str(length))
        assert done.exit_code == 0, done.output
        assert said in done.output
        assert asked.pop() == (1, min(length, 100))


def test_the_built_in_example_is_short_unless_epochs_are_given(here: Path) -> None:
    Path("text.txt").write_text("x" * 9999)
    cpu = torch.device("cpu")
    for flags, num_read, num_steps in (({}, 20, 20), ({"num_train_epochs": 2.0}, 99, 198), ({"max_steps": 5}, 5, 5)):
        settings = TrainSettings(dataset="text.txt", max_length=100, **flags)
        split = prepare.load_examples(settings, None, 264, cpu)
        steps = prepare.resolved(settings, Path("out"), cpu, split.num_examples).max_steps
        assert (len(split.train), steps) == (num_read, num_steps)


def test_a_run_prints_what_it_reads(here: Path) -> None:
    result = invoke("train", *TOY, "--max_steps", "1", "--max_eval_samples", "0")
    assert result.exit_code == 0, result.output
    num_examples = (len(Path("text.txt").read_bytes()) + 1) // 256
    assert f"{num_examples} examples of 256 tokens, the first 1 read once; " in result.output
    assert "none held out (--max_eval_samples 0" in result.output
    assert load("text.txt", max_length=256, num_held_out=0).num_examples == num_examples


def test_a_preset_is_not_taken_for_the_trained_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "some-7b", presets.PRESETS["demo"])
    said = "is a preset: its weights are random, and text is read as bytes."
    for name in ("some-7b", "Some-7B"):
        done = invoke("train", "--model", name, *TOY, "--max_steps", "1", "--overwrite_output_dir")
        assert done.exit_code == 0, done.output
        assert done.output.count(f"{name} {said}") == 1
        assert done.output.index(said) < done.output.index("held-out loss before training")
    # No note for the built-in example, a folder or a hub id. With a tokenizer, text is not bytes.
    Path("Some-7B").mkdir()
    for name in ("demo", "Some-7B", "some/hub-id"):
        assert describe.preset_note(TrainSettings(model_name_or_path=name)) is None
    told = describe.preset_note(TrainSettings(model_name_or_path="some-7b", tokenizer_name="a/b"))
    assert told is not None and "are random. For" in told


def test_a_checkpoint_that_cannot_be_written_is_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for the model, about 1.6 MB, but not for AdamW's states as well.
    monkeypatch.setattr(files, "free_bytes", lambda folder: 3_000_000)
    done = invoke("train", *TOY, "--save_steps", "1", "--max_steps", "3")
    assert done.exit_code == 0, done.output
    [first] = [line for line in done.output.splitlines() if "checkpoint-1 was not written" in line]
    assert first.startswith(str(here / "out" / "checkpoint-1"))
    assert first.endswith("TRAINING CONTINUES WITHOUT THIS CHECKPOINT.")
    assert "UserWarning" not in done.output and "trainer.py" not in done.output


@pytest.mark.timing
@pytest.mark.parametrize("output_dir", ["out", "my runs/the 1st", "ABSOLUTE/with 'quotes' and $HOME"])
def test_the_command_to_resume_can_be_copied(here: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str) -> None:
    """For a run with a settings file and flags that reads its data less than once."""
    output_dir = output_dir.replace("ABSOLUTE", str(here / "elsewhere"))
    Path("my texts").mkdir()
    Path("my texts/a text.txt").write_bytes(Path("text.txt").read_bytes()[:6000])
    Path("my texts/run.yaml").write_text(
        "dataset: my texts/a text.txt\nmax_length: 256\nchunk_size: 64\nnum_train_epochs: 2\nsample_tokens: 0\n"
        "learning_rate: 1e-3\n"
    )
    run = ["train", "my texts/run.yaml", "--num_train_epochs", "0.2", "--device", "cpu", "--no_report"]
    assert invoke(*run, "--output_dir", "whole").exit_code == 0
    assert len(losses(here / "whole")) == 5

    chunk_done = TrainingDisplay.chunk_done

    def interrupted(self: Any, phase: str, done: int, total: int) -> None:
        if self._view.step == 2 and (phase, done) == ("gradient", 2):
            signal.raise_signal(signal.SIGINT)
        chunk_done(self, phase, done, total)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingDisplay, "chunk_done", interrupted)
        stopped = invoke(*run, "--output_dir", output_dir)
    assert stopped.exit_code == EXIT_INTERRUPTED, stopped.output
    [command] = re.findall(r"^  .*\boomb (train .*)$", stopped.output, re.MULTILINE)
    # The shell splits and expands it as intended.
    taken = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    assert taken.stdout.splitlines() == shlex.split(command)
    resumed = invoke(*taken.stdout.splitlines())
    assert resumed.exit_code == 0, resumed.output
    assert losses(Path(output_dir)) == pytest.approx(losses(here / "whole"), rel=1e-6)
    # So can the command in the error message.
    [place] = re.findall(
        r"--resume_from_checkpoint (.*), name another", invoke(*run, "--output_dir", output_dir).output
    )
    assert shlex.split(place) == [str(Path(output_dir) / "checkpoint-2")]
