"""Test `oomb train`: settings files, adapters, precision, optimizers, stopping and resuming."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import invoke
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import SchedulerType

from oomb.cli.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from oomb.cli.train import model as model_module
from oomb.cli.train import output_dir, prepare, save, yaml_file
from oomb.cli.train.command import normalized
from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.schema import KNOWN, TYPES, from_yaml
from oomb.cli.train.settings import SCHEDULES, TrainSettings
from oomb.cli.train.signals import SignalHandler
from oomb.cli.train.state import RunState
from oomb.data.dataset import pad_batch
from oomb.engine import allocator
from oomb.engine.optim import OffloadedAdamW
from oomb.models import adapters, load, presets
from oomb.trainers.trainer import Trainer
from oomb.utils import files

ROOT = Path(__file__).parents[2]
TOY = ["--dataset", "text.txt", "--max_length", "256", "--chunk_size", "64", "--max_steps", "3", "--device", "cpu"]
QUICK = [*TOY, "--max_eval_samples", "0", "--output_dir", "out", "--sample_tokens", "0", "--no_report"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text())
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def test_flags_override_the_file_and_the_file_overrides_defaults(here: Path) -> None:
    (here / "run.yaml").write_text("learning_rate: 1e-5\nmax_length: 32K\nuse_peft: true\nchunk_size: 2K\nfuse: off\n")
    for given in (["run.yaml"], ["--config", "run.yaml"]):
        shown = invoke("train", *given, "--max_length", "64K", "--no_use_peft", "--print_config")
        assert shown.exit_code == 0, shown.output
        effective = yaml.safe_load(shown.output)
        expected = {"learning_rate": 1e-5, "max_length": 65536, "use_peft": False, "chunk_size": 2048, "fuse": "off"}
        assert effective | expected | {"lora_r": 16, "page_size": 128} == effective
        assert set(effective) == set(KNOWN)
    # What it prints is a settings file with the same meaning.
    (here / "again.yaml").write_text(shown.output)
    assert invoke("train", "again.yaml", "--print_config").output == shown.output
    assert "got two settings files" in invoke("train", "run.yaml", "--config", "again.yaml").output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_length: 1K\n\nlearning_rte: 1", "run.yaml, line 3: unknown setting 'learning_rte'; did you mean 'learn"),
        ("lora-r: 8", "run.yaml, line 1: unknown setting 'lora-r'; did you mean 'lora_r'?"),
        ("zzz: 8", "unknown setting 'zzz'; `oomb train --help` lists them all"),
        ("seed: 1\nmax_steps: many", "run.yaml, line 2: max_steps is 'many'; it must be a whole number"),
        ("max_steps: 1.5", "run.yaml, line 1: max_steps is 1.5; it must be a whole number"),
        ("max_steps: true", "run.yaml, line 1: max_steps is True; it must be a whole number"),
        ("learning_rate: fast", "run.yaml, line 1: learning_rate is 'fast'; it must be a number"),
        ("use_peft: 3", "run.yaml, line 1: use_peft is 3; it must be true or false"),
        ("dataset: [a, b]", "run.yaml, line 1: dataset is ['a', 'b']; it must be text"),
        ("seed:", "run.yaml, line 1: seed is empty; it must be a whole number"),
        ("max_length: 12Q", "run.yaml, line 1: max_length '12Q' is not a number of tokens"),
        ("seed: 1\nmax_steps: 0", "run.yaml, line 2: max_steps is 0; it must be 1 or more"),
        ("seed: 1\n\n\noptim: sgd", "run.yaml, line 4: optim 'sgd' is unknown"),
        ("seed: 1\nkernels: magic", "run.yaml, line 2: kernels is 'magic'"),
        ("seed: 1\nchunk_size: 0", "run.yaml, line 2: chunk_size '0' is not a number of tokens"),
        ("seed: 1\nseed: 2", "run.yaml, line 2: seed is given twice, first in line 1"),
        ("- seed", "run.yaml, line 1: settings are lines of the form"),
        ("seed: 1\nmax_steps: [1", "run.yaml, line 2: this is not YAML"),
        ("seed: !!python/object:os.system x", "run.yaml, line 1: seed cannot be read"),
        # Found only once the model's config is read.
        ("use_peft: true\nlora_target_modules: q_prj", "run.yaml, line 2: lora_target_modules has 'q_prj'"),
    ],
)
def test_errors_in_a_settings_file_name_line_and_key(here: Path, text: str, message: str) -> None:
    (here / "run.yaml").write_text(text)
    result = invoke("train", "run.yaml")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml", "text.txt"]


def test_settings_files_that_cannot_be_read(here: Path) -> None:
    assert "nowhere.yaml cannot be read: No such file" in invoke("train", "nowhere.yaml").output
    (here / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml is not UTF-8 text" in invoke("train", "binary.yaml").output
    (here / "empty.yaml").write_text("# nothing\n")
    assert invoke("train", "empty.yaml", "--print_config").output == yaml_file.write(TrainSettings())


def test_yaml_as_people_write_it() -> None:
    read = {
        "learning_rate": "1e-5", "eval_strategy": False, "lora_target_modules": ["q_proj", "v_proj"],
        "resume_from_checkpoint": True, "checkpoint_layers": True, "gpu_memory": 0, "run_name": 7, "adam_beta1": 0,
    }  # fmt: skip
    assert {key: from_yaml(key, value) for key, value in read.items()} == {
        "learning_rate": 1e-5, "eval_strategy": "no", "lora_target_modules": "q_proj,v_proj",
        "resume_from_checkpoint": "latest", "checkpoint_layers": "true", "gpu_memory": "0", "run_name": "7",
        "adam_beta1": 0.0,
    }  # fmt: skip


def test_flags_can_be_written_as_for_hugging_face_scripts() -> None:
    given = [
        "--use_peft",
        "true",
        "--bf16=False",
        "--resume_from_checkpoint",
        "--seed",
        "1",
        "--load_in_4bit",
        "x.yaml",
    ]
    assert normalized(given) == [
        "--use_peft", "--no_bf16", "--resume_from_checkpoint", "latest", "--seed", "1", "--load_in_4bit", "x.yaml",
    ]  # fmt: skip
    assert normalized(["--resume_from_checkpoint"]) == ["--resume_from_checkpoint", "latest"]
    assert normalized(["--resume_from_checkpoint", "a.yaml"]) == ["--resume_from_checkpoint", "latest", "a.yaml"]
    assert normalized(["--resume_from_checkpoint", "a/checkpoint-3"]) == ["--resume_from_checkpoint", "a/checkpoint-3"]


def test_pages_of_settings_are_generated() -> None:
    """docs/config.md and docs/train.md list what the fields declare, and every setting is a flag."""
    script = [sys.executable, "docs/generate.py", "--check"]
    check = subprocess.run(
        script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr
    text = (ROOT / "docs" / "train.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text.split("generated:start")[1], re.MULTILINE)) == set(KNOWN)
    usage = invoke("train", "--help").output
    assert all(f"--{name}" in usage for name in KNOWN)
    assert set(SCHEDULES) <= {kind.value for kind in SchedulerType}
    assert {field.name for field in dataclasses.fields(TrainSettings)} == {*TYPES, "engine"}


def text_files(folder: Path) -> Path:
    folder.mkdir()
    for index in range(4):
        (folder / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return folder


def test_lora_trains_adapters_that_load_and_merge(here: Path, saved_model: Path) -> None:
    peft = pytest.importorskip("peft")
    run = [
        "train", "--model", saved_model, *QUICK, "--use_peft", "--lora_r", "4",
        "--lora_dropout", "0.1", "--learning_rate", "1e-2", "--save_steps", "2",
    ]  # fmt: skip
    result = invoke(*run)
    assert result.exit_code == 0, result.output
    assert re.search(r"0\.4\dM parameters \(trained: 0\.0\dM in adapters\), float32, on cpu", result.output)
    model = here / "out" / "model"
    assert (model / "adapter_config.json").is_file() and not (model / "config.json").exists()
    whole = losses(here / "out")
    assert whole[3] < whole[1]
    # The code it prints at the end runs as it is.
    lines = result.output.split("merge them into it:\n")[1].splitlines()
    exec("\n".join(line.strip() for line in lines if line.strip()))
    merged = AutoModelForCausalLM.from_pretrained(here / "out" / "merged")
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(model)
    ids = torch.arange(40)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(saved_model)(ids).logits)

    # A resumed run continues the same way, dropout included.
    again = invoke(*run, "--resume_from_checkpoint", "out/checkpoint-2")
    assert again.exit_code == 0, again.output
    assert losses(here / "out")[3] == pytest.approx(whole[3], rel=1e-6)
    refused = invoke(*run, "--resume_from_checkpoint", "out/checkpoint-2", "--no_use_peft")
    assert "out/checkpoint-2 holds adapters: add --use_peft" in refused.output


def test_adapters_of_a_preset_come_with_a_warning(here: Path) -> None:
    result = invoke("train", *QUICK, "--use_peft", "--max_steps", "1")
    assert result.exit_code == 0, result.output
    assert "its random weights are not saved" in result.output


def test_adapter_settings_without_adapters_come_with_a_note(here: Path) -> None:
    said = "--lora_r and --lora_dropout have no effect without --use_peft."
    flags = ["--max_steps", "1", "--lora_r", "8", "--lora_dropout", "0.1"]
    result = invoke("train", *QUICK, *flags)
    assert result.exit_code == 0 and said in result.output
    assert said not in invoke("train", *QUICK, *flags, "--use_peft", "--output_dir", "adapted").output


def test_missing_packages_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_is_installed", lambda package: False)
    for flags, message in (
        (["--use_peft"], "--use_peft needs peft: pip install peft"),
        (["--report_to", "trackio"], "--report_to trackio needs the package trackio: pip install trackio"),
    ):
        result = invoke("train", *QUICK, *flags)
        assert result.exit_code == 2
        assert message in result.output
    monkeypatch.setattr(prepare, "_is_installed", lambda package: True)
    monkeypatch.setattr(adapters, "find_spec", lambda package: None)
    result = invoke("train", *QUICK, "--use_peft", "--load_in_4bit")
    assert "load_in_4bit needs bitsandbytes" in result.output
    monkeypatch.setattr(adapters, "find_spec", lambda package: object())
    assert "--load_in_4bit needs a GPU" in invoke("train", *QUICK, "--use_peft", "--load_in_4bit").output
    assert [path.name for path in here.iterdir()] == ["text.txt"]


def test_the_offloaded_optimizer_trains_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OffloadedAdamW] = []
    reserve = OffloadedAdamW.reserve
    monkeypatch.setattr(OffloadedAdamW, "reserve", lambda self: (made.append(self), reserve(self))[1])
    reserved: list[int] = []
    place = allocator.place_or_raise
    monkeypatch.setattr(
        allocator, "place_or_raise", lambda request: (reserved.append(request.optimizer_bytes), place(request))[1]
    )
    rates = ["--weight_decay", "0.1", "--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-7"]
    found = []
    for flags in (
        [],
        ["--optim", "offloaded_adamw"],
        ["--optim", "offloaded_adamw", "--optim_args", "state_dtype=8bit"],
    ):
        result = invoke("train", *QUICK, *rates, *flags, "--overwrite_output_dir")
        assert result.exit_code == 0, result.output
        found.append(losses(here / "out"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=2e-2)
    assert found[2] != found[0]
    assert [(o.state_dtype, o.master_weights) for o in {id(o): o for o in made}.values()] == [
        ("float32", True),
        ("8bit", True),
    ]
    # The engine reserves no GPU memory for offloaded states.
    assert [num_bytes > 0 for num_bytes in reserved] == [True, False, False]
    group = made[0].param_groups[0]
    assert group["betas"] == (0.8, 0.95) and group["eps"] == 1e-7 and group["weight_decay"] == 0.1
    assert "AdamW states in host memory" in result.output


@pytest.mark.parametrize(
    ("flags", "gpu_gib", "dtype", "mixed", "warned"),
    [
        ({}, None, "float32", False, False),
        ({"bf16": True}, None, "float32", True, False),
        ({"dtype": "bf16"}, None, "bfloat16", False, True),
        ({}, 140, "float32", True, False),
        ({}, 8, "bfloat16", False, True),
        ({"bf16": True}, 8, "float32", True, False),
        ({"bf16": False}, 140, "float32", False, False),
        ({"dtype": "float32"}, 140, "float32", False, False),
        ({"dtype": "bfloat16"}, 140, "bfloat16", False, True),
        ({"optim": "offloaded_adamw"}, 140, "bfloat16", False, False),
        ({"use_peft": True}, 140, "bfloat16", True, False),
        ({"use_peft": True, "dtype": "bf16"}, 140, "bfloat16", True, False),
        ({"use_peft": True, "bf16": False}, 140, "bfloat16", False, False),
        ({"use_peft": True, "dtype": "float32"}, 140, "float32", False, False),
        ({"use_peft": True}, None, "float32", False, False),
    ],
)
def test_default_precision(flags: dict[str, Any], gpu_gib: int | None, dtype: str, mixed: bool, warned: bool) -> None:
    config = presets.preset_config("qwen2.5-0.5b")
    precision = model_module.choose_precision(
        TrainSettings(**flags), None if gpu_gib is None else gpu_gib << 30, config
    )
    assert (precision.dtype, precision.mixed, precision.warning is not None) == (dtype, mixed, warned)


def test_mixed_precision_keeps_float32_weights(here: Path) -> None:
    result = invoke("train", *QUICK, "--bf16")
    assert result.exit_code == 0, result.output
    assert "float32 computed in bfloat16, on cpu" in result.output
    assert AutoModelForCausalLM.from_pretrained(here / "out" / "model", dtype="auto").dtype == torch.float32
    assert invoke("train", *QUICK, "--overwrite_output_dir", "--dtype", "float32").exit_code == 0
    warned = invoke("train", *QUICK, "--overwrite_output_dir", "--dtype", "bfloat16", "--max_steps", "1")
    assert "AdamW on bfloat16 weights loses small updates" in warned.output


def test_epochs_evaluations_logs_and_checkpoints_are_on_schedule(here: Path) -> None:
    text = text_files(here / "text")
    result = invoke(
        "train", "--model", "demo", "--dataset", text, "--max_length", "256", "--chunk_size", "64", "--device", "cpu",
        "--num_train_epochs", "0.5", "--output_dir", "out", "--eval_steps", "2", "--logging_steps", "3",
        "--save_steps", "1", "--save_total_limit", "2", "--warmup_ratio", "0.5", "--lr_scheduler_type", "constant",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    # 12 examples to train on.
    assert list(losses(here / "out")) == [3, 6]
    events = [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "held_out"] == [0, 2, 4, 6]
    assert events[0]["budget"]["host_bytes"] > events[0]["budget"]["gpu_bytes"] > 0
    assert events[-1]["tokens"] == 6 * 256
    assert sorted(path.name for path in (here / "out").glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert "step 4/6  held-out loss" in result.output
    told = yaml.safe_load((here / "out" / "config.yaml").read_text())
    assert told | {"max_steps": 6, "warmup_steps": 3, "warmup_ratio": None, "output_dir": str(here / "out")} == told


def test_a_run_can_be_repeated_from_its_own_settings(here: Path) -> None:
    assert invoke("train", *QUICK).exit_code == 0
    first = losses(here / "out")
    again = invoke("train", "out/config.yaml", "--output_dir", "again")
    assert again.exit_code == 0, again.output
    assert losses(here / "again") == first
    assert "out already holds a trained model" in invoke("train", "out/config.yaml").output


def test_trackers_get_the_name_of_the_run(here: Path) -> None:
    asked = TrainSettings(report_to="wandb, tensorboard", output_dir="runs/mine", logging_steps=5)
    told = prepare.resolved(asked, Path("runs/mine"), torch.device("cpu"), num_examples=10)
    arguments = prepare.training_arguments(told, torch.device("cpu"), mixed=False)
    assert arguments.report_to == ["wandb", "tensorboard"]
    assert (arguments.run_name, arguments.logging_steps) == ("mine", 5)
    told = prepare.resolved(TrainSettings(run_name="other"), Path("runs/mine"), torch.device("cpu"), num_examples=10)
    arguments = prepare.training_arguments(told, torch.device("cpu"), mixed=False)
    assert (arguments.report_to, arguments.run_name) == ([], "other")


def test_examples_of_different_lengths_make_a_batch() -> None:
    short, long = ({"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (2, 4))
    batch = pad_batch([short, long])
    assert batch["input_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[0, 1, -100, -100], [0, 1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


STOP_AT = 2


@pytest.mark.timing
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)])
def test_a_run_stopped_within_a_step_resumes_exactly(
    here: Path, saved_model: Path, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    # With dropout: the interrupted step has used some of its random numbers.
    run = [
        "train", "--model", saved_model, *QUICK, "--max_steps", "5",
        "--use_peft", "--lora_dropout", "0.2", "--learning_rate", "1e-2",
    ]  # fmt: skip
    assert invoke(*run, "--output_dir", "whole").exit_code == 0

    chunk_done = TrainingDisplay.chunk_done

    def interrupted(self: Any, phase: str, done: int, total: int) -> None:
        if self._view.step == STOP_AT and (phase, done) == ("gradient", 2):
            signal.raise_signal(signum)
        chunk_done(self, phase, done, total)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingDisplay, "chunk_done", interrupted)
        stopped = invoke(*run)
    assert stopped.exit_code == code, stopped.output
    assert "stopped after step 2 of 5; the model after that step is in out/model" in stopped.output
    assert [path.name for path in (here / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    [command] = re.findall(r"^  .*\boomb (train .*)$", stopped.output, re.MULTILINE)
    assert command == "train out/config.yaml --resume_from_checkpoint"
    resumed = invoke(*command.split())
    assert resumed.exit_code == 0, resumed.output
    assert losses(here / "out") == pytest.approx(losses(here / "whole"), rel=1e-6)
    assert signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL)


@pytest.mark.timing
def test_sigterm_in_an_evaluation_ends_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda *args: (signal.raise_signal(signal.SIGTERM), evaluate(*args))[1])
    result = invoke("train", *TOY, "--output_dir", "out")
    assert result.exit_code == EXIT_TERMINATED, result.output
    assert "stopped after step 0 of 3; nothing was saved" in result.output
    assert not losses(here / "out")


def test_latest_skips_an_incomplete_checkpoint(here: Path) -> None:
    assert invoke("train", *QUICK, "--save_steps", "1").exit_code == 0
    before = losses(here / "out")
    # The newest checkpoint is incomplete.
    (here / "out" / "checkpoint-3" / "trainer_state.json").unlink()
    shutil.rmtree(here / "out" / "model")
    resumed = invoke("train", *QUICK, "--resume_from_checkpoint", "latest")
    assert resumed.exit_code == 0, resumed.output
    events = [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 3]
    assert losses(here / "out")[3] == pytest.approx(before[3], rel=1e-6)


def test_a_model_that_will_not_fit_on_the_disk_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)
    refused = invoke("train", *QUICK)
    assert refused.exit_code == 2
    assert re.search(
        r"the trained model needs [\d.]+ MiB, but only 0\.0 MiB are free in --output_dir out", refused.output
    )
    assert not (here / "out" / "metrics.jsonl").exists()


def test_an_output_dir_inside_a_file_is_refused(here: Path) -> None:
    refused = invoke("train", *TOY, "--output_dir", "text.txt/out")
    assert refused.exit_code == 2
    assert "--output_dir text.txt/out cannot be created: " in refused.output
    assert "text.txt is a file; name another" in refused.output


def test_the_model_is_saved_if_its_checkpoint_does_not_fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for the model, about 1.6 MB, but not for AdamW's states as well.
    monkeypatch.setattr(files, "free_bytes", lambda folder: 3_000_000)
    done = invoke("train", *QUICK, "--save_steps", "3")
    assert done.exit_code == 0, done.output
    assert "checkpoint-3 was not written" in done.output
    assert (here / "out" / "model" / "model.safetensors").is_file()


def test_a_model_that_cannot_be_saved_is_one_message(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(output_dir.Path, "rename", full)
        with pytest.raises(ValueError, match=r"saved in out/model \(No space left on device\): nothing of it was kept"):
            save.save(load.load_model("demo", device="cpu"), None, Path("out/model"))


@pytest.mark.timing
def test_signals_one_by_one() -> None:
    said: list[str] = []
    state = RunState()
    interrupts = SignalHandler(said.append, state)
    with interrupts:
        interrupts.stop("stopping")
        signal.raise_signal(signal.SIGINT)
        assert state.stop_requested and said == ["stopping"]
        interrupts.protect("saving")
        signal.raise_signal(signal.SIGINT)
        assert said == ["stopping", "saving"]
        # During saving, SIGTERM only changes the exit code, however often it comes.
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.exit_code == EXIT_TERMINATED
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
