"""The commands as a person meets them: what they print, what they write, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from oomb import cli, presets, train, verify
from oomb.config import Config

TOY = ["--max_length", "256", "--chunk_size", "64", "--max_steps", "3", "--device", "cpu", "--dtype", "float32"]


def invoke(*arguments: str | Path) -> Result:
    # Wide, so that no message is broken over two lines where a test looks for it.
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(a) for a in arguments])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    presets.load_model("demo", device="cpu", dtype="float32").save_pretrained(folder)
    return folder


def test_train_learns_saves_and_sums_up(here: Path) -> None:
    result = invoke("train", *TOY, "--max_steps", "8", "--max_length", "512", "--learning_rate", "1e-2")
    assert result.exit_code == 0, result.output
    run = here / "runs" / "demo"
    events = records(run)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    before, after = (event["loss"] for event in events if event["event"] == "held_out")
    assert after < before - 0.5
    assert events[0]["machine"]["cpu"]
    assert events[-1] | {"tokens": 8 * 512, "stopped": False} == events[-1]

    # Plain lines, since this is no terminal: no bar, no escape codes, one line per step.
    assert "\x1b" not in result.output
    assert len(re.findall(r"^step \d/8  loss \d+\.\d+ ", result.output, re.MULTILINE)) == 8
    for word in ("held-out loss", "tokens/s", "RSS peak", "runs/demo/model", "oomb verify runs/demo/model"):
        assert word in result.output

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config._attn_implementation in ("sdpa", "eager")
    held_out = train.data.load("stdlib", max_length=512, num_train=8, num_held_out=1).held_out
    assert held_out is not None
    ids = held_out[0]["input_ids"][None]
    assert float(model(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(after, rel=1e-4)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_train_is_repeatable_and_the_seed_matters(here: Path) -> None:
    losses = []
    for seed, name in (("1", "a"), ("1", "b"), ("2", "c")):
        assert invoke("train", *TOY, "--seed", seed, "--output_dir", name).exit_code == 0
        losses.append([event["loss"] for event in records(here / name) if "loss" in event])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_train_on_own_text_from_a_saved_model(here: Path, saved_model: Path) -> None:
    text = here / "text"
    text.mkdir()
    for index in range(4):
        (text / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    result = invoke(
        "train", "--model_name_or_path", saved_model, "--dataset", text, "--max_length", "256", "--chunk_size", "64",
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--device", "cpu",
        "--output_dir", "out", "--save_steps", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    # 4 x 881 tokens are 13 windows: 1 held out, 12 to train on, 4 a step, one epoch.
    steps = [event for event in records(here / "out") if event["event"] == "step"]
    assert len(steps) == 3
    assert records(here / "out")[-1]["tokens"] == 3 * 4 * 256
    checkpoint = here / "out" / "checkpoint-2"
    assert checkpoint.is_dir()
    again = invoke(
        "train", "--model_name_or_path", saved_model, "--dataset", text, "--max_length", "256", "--chunk_size", "64",
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--device", "cpu",
        "--output_dir", "resumed", "--resume_from_checkpoint", checkpoint,
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    resumed = [event for event in records(here / "resumed") if event["event"] == "step"]
    assert [event["step"] for event in resumed] == [3]
    assert resumed[0]["loss"] == pytest.approx(steps[2]["loss"], rel=1e-5)


def test_each_run_has_its_own_folder_and_none_is_overwritten_unasked(here: Path) -> None:
    for _ in range(2):
        assert invoke("train", *TOY, "--max_steps", "1", "--max_eval_samples", "0").exit_code == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["demo", "demo-2"]
    refused = invoke("train", *TOY, "--output_dir", "runs/demo")
    assert refused.exit_code == 2
    assert "--overwrite_output_dir" in refused.output
    replaced = invoke("train", *TOY, "--output_dir", "runs/demo", "--overwrite_output_dir")
    assert replaced.exit_code == 0
    assert sorted(path.name for path in (here / "runs" / "demo").iterdir()) == ["metrics.jsonl", "model"]


def test_a_failed_save_leaves_the_old_model(here: Path, saved_model: Path) -> None:
    model = presets.load_model(str(saved_model), device="cpu")
    train.save(model, None, here / "model")
    before = (here / "model" / "model.safetensors").read_bytes()

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train.save(Broken(), None, here / "model")
    assert (here / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_ctrl_c_saves_and_says_so(here: Path) -> None:
    # A process of its own, interrupted once its second step is on disk.
    command = [sys.executable, "-m", "oomb.cli", "train", *TOY, "--max_steps", "500", "--output_dir", "out"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=here)
    metrics = here / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count('"step"') > 2):
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == train.EXIT_INTERRUPTED, output
    assert re.search(r"stopped after step \d+ of 500; the model as of then is in out/model", output), output
    assert "Traceback" not in output
    assert AutoModelForCausalLM.from_pretrained(here / "out" / "model")
    assert records(here / "out")[-1]["stopped"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_name_or_path", "qwen2.5-7"], "did you mean 'qwen2.5-7b'?"),
        (["--model_name_or_path", "./nowhere"], "is not a preset, not a folder here and not a hub id"),
        (["--model_name_or_path", "no-such/model"], "the hub id 'no-such/model' could not be loaded"),
        (["--dataset", "nowhere.txt"], "the dataset 'nowhere.txt' is not there"),
        (["--max_length", "12Q"], "write 4096, 32K or 1M"),
        (["--max_length", "1"], "--max_length is 1"),
        (["--max_steps", "0"], "--max_steps is 0"),
        (["--learning_rate", "-1"], "--learning_rate is -1.0"),
        (["--lr_scheduler_type", "square"], "--lr_scheduler_type 'square' is unknown"),
        (["--chunk_size", "0"], "chunk_size is 0"),
        (["--kernels", "magic"], "kernels is 'magic'"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--device", "cuda:99"], "is not here: this machine shows"),
        (["--device", "abacus"], "device 'abacus' is unknown"),
        (["--resume_from_checkpoint", "nowhere"], "holds no trainer_state.json"),
        (["--tokenizer_name", "demo"], "has no tokenizer"),
    ],
)
def test_train_refuses_in_one_message_before_any_work(here: Path, arguments: list[str], message: str) -> None:
    result = invoke("train", *TOY, *arguments)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(here.iterdir()) == []


def test_train_refuses_text_that_is_too_short(here: Path) -> None:
    (here / "short.txt").write_text("hello")
    result = invoke("train", *TOY, "--dataset", "short.txt")
    assert result.exit_code == 2
    assert "short.txt has 6 tokens (bytes) and one window needs 256" in result.output


def test_verify_trusts_a_saved_model(saved_model: Path) -> None:
    result = invoke("verify", saved_model, "--context", "160", "--chunk_size", "48", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("trust it: gradients equal whole-sequence training to ")
    assert "21 parameters, 160 tokens in 4 chunks, float32" in result.output
    assert "model.layers." in result.output


def test_verify_in_half_precision_compares_both_to_float32(saved_model: Path) -> None:
    options = ["--context", "256", "--chunk_size", "64", "--dtype", "bfloat16", "--device", "cpu"]
    result = invoke("verify", saved_model, *options)
    assert result.exit_code == 0, result.output
    assert "x the rounding error of standard training" in result.output
    assert "ratio" in result.output


def test_verify_does_not_trust_wrong_gradients(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = verify.Engine.loss
    monkeypatch.setattr(verify.Engine, "loss", lambda *args, **options: loss(*args, **options) * 1.001)
    options = ["--context", "128", "--chunk_size", "48", "--device", "cpu"]
    result = invoke("verify", saved_model, *options)
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("do not trust: the losses differ by 1.0e-03, more than 1e-04")
    # A gradient of 40% in bfloat16 noise must be seen as well.
    monkeypatch.setattr(verify.Engine, "loss", lambda *args, **options: loss(*args, **options) * 1.4)
    result = invoke("verify", saved_model, *options, "--dtype", "bfloat16")
    assert result.exit_code == 1, result.output
    assert "x standard training's, more than 1.2" in result.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_sees_one_wrong_parameter_among_many(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    model = presets.load_model("demo", device="cpu", dtype=dtype)
    wrong = "model.layers.1.mlp.up_proj.weight"
    gradients = verify._gradients
    calls: list[int] = []

    def spoil_the_first(*args: Any) -> Any:
        loss, found = gradients(*args)
        if not calls:
            found[wrong] = found[wrong] * 1.05
        calls.append(1)
        return loss, found

    assert verify.compare(model, Config(chunk_size=48), context=160).trusted
    monkeypatch.setattr(verify, "_gradients", spoil_the_first)
    comparison = verify.compare(model, Config(chunk_size=48), context=160)
    assert not comparison.trusted
    assert comparison.rows[0].name == wrong
    assert wrong in comparison.verdict


def test_verify_of_a_mixture_of_experts_needs_full_precision() -> None:
    config = presets.preset_config("demo", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    assert verify.compare(model, Config(chunk_size=24), context=64).trusted
    with pytest.raises(ValueError, match="compare a mixture of experts in float32"):
        verify.compare(model.bfloat16(), Config(chunk_size=24), context=64)


def test_verify_leaves_the_model_as_it_was() -> None:
    model = presets.load_model("demo", device="cpu", dtype="bfloat16").train()
    before = {name: (value.dtype, value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    verify.compare(model, Config(chunk_size=32), context=64)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.dtype == before[name][0], name
        assert torch.equal(value, before[name][1]), name
        assert value.grad is None
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--chunk_size", "64", "--context", "64"], "cuts nothing"),
        (["demo", "--layers", "9"], "this model has 2 layers"),
        (["demmo"], "did you mean 'demo'?"),
    ],
)
def test_verify_refuses_in_one_message(arguments: list[str], message: str) -> None:
    result = invoke("verify", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_verify_keeps_only_some_layers_of_a_large_model() -> None:
    result = invoke(
        "verify", "smollm2-135m", "--layers", "1", "--context", "24", "--chunk_size", "8", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert "11 parameters" in result.output


def test_bench_prints_a_table_and_writes_json(here: Path) -> None:
    result = invoke(
        "bench", "--model_name_or_path", "demo", "--contexts", "128,256", "--chunk_size", "64", "--repeats", "1",
        "--device", "cpu", "--output", "out/bench.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    report = json.loads((here / "out" / "bench.json").read_text())
    assert {(row["context"], row["mode"]) for row in report["rows"]} == {
        (context, mode) for context in (128, 256) for mode in ("oomb", "standard")
    }
    assert report["machine"]["cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "32G"], "'32G' is not a number of tokens"),
        (["--contexts", ","], "the list is empty"),
        (["--modes", "fast"], "the modes are oomb and standard"),
        (["--repeats", "0"], "--repeats is 0"),
    ],
)
def test_bench_refuses_in_one_message(arguments: list[str], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_numbers_of_tokens() -> None:
    assert cli.parse_list("4096, 32K,1m", cli.parse_tokens) == [4096, 32768, 1048576]
    for wrong in ("", "0", "-1", "1.5K", "K"):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            cli.parse_tokens(wrong)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["train", "verify", "bench", "exact gradients"]),
        (["train"], ["--max_length", "Ctrl-C", "owner/name", "qwen2.5-7b", "metrics.jsonl"]),
        (["verify"], ["--layers", "exit code", "float32 reference"]),
        (["bench"], ["--contexts", "32K,64K,1M", "no optimizer"]),
    ],
)
def test_help_teaches(command: list[str], words: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    for word in words:
        assert word in result.output


def test_the_terminal_gets_a_bar() -> None:
    from io import StringIO

    from rich.console import Console
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from oomb.metrics import MemoryMeter
    from oomb.progress import StopRequested, TrainingDisplay

    class Log:
        def write(self, **record: Any) -> None:
            pass

    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    display = TrainingDisplay(console, Log(), MemoryMeter(torch.device("cpu")), 1024)  # type: ignore[arg-type]
    given = TrainingArguments(output_dir="unused", use_cpu=True), TrainerState(max_steps=2), TrainerControl()
    display.on_train_begin(*given)
    display.on_step_begin(*given)
    display.chunk_done("gradient", 3, 4)
    given[1].global_step = 1
    display.on_step_end(*given)
    display.on_log(*given, logs={"loss": 1.2345})
    display.on_train_end(*given)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"step 1/2 .*loss 1\.23\d [\d,]+ tok/s [\d.]+ [GM]iB", shown), shown
    display.stop_requested = True
    with pytest.raises(StopRequested):
        display.chunk_done("fill", 1, 4)
