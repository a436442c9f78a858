"""Test the commands as users see them: what they print and write, and their errors."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from transformers import AutoModelForCausalLM

from oomb.cli.errors import EXIT_INTERRUPTED
from oomb.cli.train import save as save_module
from oomb.cli.train.display import TrainingDisplay
from oomb.data.dataset import load
from oomb.models import load as load_module
from oomb.models import presets
from oomb.trainers import trainer
from oomb.utils import metrics, units

TOY = ["--max_length", "256", "--chunk_size", "64", "--max_steps", "3", "--device", "cpu", "--dtype", "float32"]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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

    # Plain lines, because this is not a terminal: no bar, no escape codes, one line per step.
    assert "\x1b" not in result.output
    assert len(re.findall(r"^step \d/8  loss \d+\.\d+ ", result.output, re.MULTILINE)) == 8
    for word in ("held-out loss", "tokens/s", "RSS peak", "runs/demo/model", "oomb verify runs/demo/model"):
        assert word in result.output

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config._attn_implementation in ("sdpa", "eager")
    held_out = load("stdlib", max_length=512, num_train=8, num_held_out=1).held_out
    assert held_out is not None
    ids = held_out[0]["input_ids"][None]
    assert float(model(input_ids=ids, labels=ids).loss.detach()) == pytest.approx(after, rel=1e-4)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    # The suggested commands exist, and repeat the given settings.
    proposed = re.findall(r"^  (\S*oomb|\S+ -m oomb) (.*)$", result.output, re.MULTILINE)
    assert len(proposed) == 3
    assert "--max_length 1024 --max_steps 10 --device cpu --dtype float32 --chunk_size 64" in proposed[1][1]
    assert shutil.which(proposed[0][0].split()[0])


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
    # 4 x 881 tokens are 13 examples: 1 held out, 12 to train on, 4 per step, one epoch.
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
    # The held-out loss before training is that of the checkpoint, at its step.
    first = next(event for event in records(here / "resumed") if event["event"] == "held_out")
    start = next(event for event in records(here / "out") if event["event"] == "held_out")
    assert first["step"] == 2
    assert first["loss"] < start["loss"]
    assert f"--dataset {text}" in again.output
    assert "train --dataset FOLDER" not in again.output


def test_each_run_has_its_own_folder_and_is_overwritten_only_on_request(here: Path) -> None:
    for _ in range(2):
        assert invoke("train", *TOY, "--max_steps", "1", "--max_eval_samples", "0").exit_code == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["demo", "demo-2"]
    refused = invoke("train", *TOY, "--output_dir", "runs/demo")
    assert refused.exit_code == 2
    assert "runs/demo already holds a trained model" in refused.output
    assert "--overwrite_output_dir" in refused.output
    replaced = invoke("train", *TOY, "--output_dir", "runs/demo", "--overwrite_output_dir")
    assert replaced.exit_code == 0
    left = ["config.yaml", "metrics.jsonl", "model", "report.html"]
    assert sorted(path.name for path in (here / "runs" / "demo").iterdir()) == left


def test_a_failed_save_leaves_the_old_model(here: Path, saved_model: Path) -> None:
    model = load_module.load_model(str(saved_model), device="cpu")
    save_module.save(model, None, here / "model")
    before = (here / "model" / "model.safetensors").read_bytes()

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")
            raise OSError("disk full")

    with pytest.raises(ValueError, match=r"could not be saved.*disk full"):
        save_module.save(Broken(), None, here / "model")
    assert (here / "model" / "model.safetensors").read_bytes() == before
    assert [path.name for path in here.iterdir()] == ["model"]


def test_a_run_with_checkpoints_is_resumed_not_overwritten(here: Path) -> None:
    run = ["train", *TOY, "--max_eval_samples", "0", "--output_dir", "out"]
    assert invoke(*run, "--save_steps", "2").exit_code == 0
    shutil.rmtree(here / "out" / "model")
    refused = invoke(*run)
    assert refused.exit_code == 2
    assert "--resume_from_checkpoint out/checkpoint-3" in refused.output
    assert "--overwrite_output_dir" in refused.output
    # It writes to the run's folder and appends to its metrics.
    assert invoke(*run[:-2], "--resume_from_checkpoint", "out/checkpoint-2").exit_code == 0
    assert [event["step"] for event in records(here / "out") if event["event"] == "step"] == [1, 2, 3, 3]
    finished = invoke(*run, "--resume_from_checkpoint", "out/checkpoint-3")
    assert finished.exit_code == 2
    assert "--max_steps is 3, and out/checkpoint-3 is at step 3 already" in finished.output
    # A run that was killed while it saved its model saves it when it is resumed.
    weights = here / "out" / "model" / "model.safetensors"
    trained = weights.read_bytes()
    shutil.rmtree(weights.parent)
    saved = invoke(*run, "--resume_from_checkpoint")
    assert saved.exit_code == 0, saved.output
    assert weights.read_bytes() == trained and "Done" in saved.output
    for folder in (here / "out").glob("checkpoint-*"):
        shutil.rmtree(folder)
    shutil.rmtree(here / "out" / "model")
    assert "out already holds the metrics of a run" in invoke(*run).output


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.timing
def test_ctrl_c_in_an_evaluation_skips_it_and_keeps_the_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = trainer.Trainer.evaluate
    monkeypatch.setattr(trainer.Trainer, "evaluate", lambda *args: (ctrl_c(), evaluate(*args))[1])
    result = invoke("train", *TOY, "--output_dir", "out", "--sample_tokens", "0")
    assert result.exit_code == 0, result.output
    assert result.output.count("skipping the held-out loss at the next chunk; Ctrl-C again exits") == 2
    assert [event["event"] for event in records(here / "out")] == ["start", *["step"] * 3, "end"]
    assert AutoModelForCausalLM.from_pretrained(here / "out" / "model")
    # A second Ctrl-C ends the program, but the model is saved by then.
    calls = []

    def twice_after_training(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            ctrl_c()
            ctrl_c()
        return evaluate(*args)

    monkeypatch.setattr(trainer.Trainer, "evaluate", twice_after_training)
    result = invoke("train", *TOY, "--output_dir", "ended")
    assert result.exit_code == EXIT_INTERRUPTED
    assert "interrupted by Ctrl-C; the trained model is in ended/model" in result.output
    assert AutoModelForCausalLM.from_pretrained(here / "ended" / "model")


def test_an_error_in_the_last_evaluation_keeps_the_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([{"eval_loss": 5.0}])
    monkeypatch.setattr(trainer.Trainer, "evaluate", lambda *args: next(losses))
    result = invoke("train", *TOY, "--output_dir", "out")
    assert result.exit_code == 0, result.output
    assert "the held-out loss failed and is left out (StopIteration" in result.output
    assert "5.0000 → not computed" in result.output
    assert (here / "out" / "model" / "config.json").is_file()


@pytest.mark.timing
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_training(here: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    step_end = TrainingDisplay.on_step_end

    def interrupted(self: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
        step_end(self, args, state, control, **options)
        if state.global_step == 2:
            for _ in range(times):
                ctrl_c()

    # Once more while it saves, which must change nothing.
    save = save_module.save
    monkeypatch.setattr(save_module, "save", lambda *args: (ctrl_c(), save(*args))[1])
    monkeypatch.setattr(TrainingDisplay, "on_step_end", interrupted)
    result = invoke("train", *TOY, "--output_dir", "out", "--max_steps", "9", "--save_steps", "1")
    assert result.exit_code == EXIT_INTERRUPTED, result.output
    assert "stopping at the next chunk and saving; Ctrl-C again exits without saving" in result.output
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if times == 2:
        assert "interrupted by Ctrl-C; nothing was saved" in result.output
        assert not (here / "out" / "model").exists()
        return
    assert "stopped after step 2 of 9; the model after that step is in out/model" in result.output
    assert "saving, then exiting; press Ctrl-C again to exit without saving" in result.output
    assert "training loss" in result.output
    assert re.search(r"^  \S*oomb train out/config.yaml --resume_from_checkpoint$", result.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_name_or_path", "qwen2.5-7"], "did you mean 'qwen2.5-7b'?"),
        (["--model_name_or_path", "./nowhere"], "is not a preset, a folder here or a hub id"),
        (["--model_name_or_path", "no-such/model"], "the hub id 'no-such/model' could not be loaded"),
        (["--dataset", "nowhere.txt"], "the dataset 'nowhere.txt' does not exist"),
        (["--max_length", "12Q"], "write 4096, 32K or 1M"),
        (["--max_length", "1"], "--max_length is 1"),
        (["--max_steps", "0"], "--max_steps is 0"),
        (["--learning_rate", "-1"], "--learning_rate is -1.0"),
        (["--lr_scheduler_type", "square"], "--lr_scheduler_type 'square' is unknown"),
        (["--chunk_size", "0"], "--chunk_size '0' is not a number of tokens"),
        (["--kernels", "magic"], "kernels is 'magic'"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--device", "cuda:99"], "device 'cuda:99' does not exist"),
        (["--device", "abacus"], "device 'abacus' is unknown"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere is not a checkpoint"),
        (["--tokenizer_name", "demo"], "has no tokenizer"),
        (["--resume_from_checkpoint"], "needs --output_dir, to find its latest checkpoint"),
        (["--resume_from_checkpoint", "--output_dir", "none"], "--output_dir none holds no checkpoint to resume from"),
        (["--load_in_4bit"], "--load_in_4bit needs --use_peft"),
        (["--use_peft", "--lora_target_modules", "q_prj"], "has 'q_prj', but the model's linear layers are "),
        (["--use_peft", "--lora_r", "0"], "--lora_r is 0; it must be 1 or more"),
        (["--lora_dropout", "nan"], "--lora_dropout is nan"),
        (["--optim", "adamw"], "--optim 'adamw' is unknown; use one of adamw_torch, offloaded_adamw"),
        (["--optim_args", "state_dtype=8bit"], "--optim_args needs --optim offloaded_adamw"),
        (
            ["--optim", "offloaded_adamw", "--optim_args", "state=8"],
            "--optim_args 'state=8' is unknown; it takes state",
        ),
        (["--eval_strategy", "steps"], "steps needs --eval_steps"),
        (["--eval_steps", "2", "--max_eval_samples", "0"], "needs held-out examples"),
        (["--warmup_steps", "1", "--warmup_ratio", "0.1"], "--warmup_ratio and --warmup_steps are both given"),
        (["--report_to", "paper"], "--report_to 'paper' is unknown; use none, tensorboard, wandb, trackio"),
        (["--adam_beta1", "1"], "--adam_beta1 is 1.0; it must be below 1"),
        (["--num_train_epochs", "0"], "--num_train_epochs is 0; it must be above 0"),
    ],
)
def test_train_refuses_in_one_message_before_any_work(here: Path, arguments: list[str], message: str) -> None:
    result = invoke("train", *TOY, *arguments)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(here.iterdir()) == []


def test_an_unreachable_hub_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def unreachable() -> None:
        asked.append(1)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", unreachable)
    load_module._why_offline.cache_clear()
    for _ in range(2):
        result = invoke("train", *TOY, "--model", "no-such/model")
        assert result.exit_code == 2
        assert "cannot be reached (no route; HF_HUB_OFFLINE=1" in result.output
        assert "Name a local folder" in result.output
    load_module._why_offline.cache_clear()
    assert len(asked) == 1


def test_a_context_beyond_the_models_positions_is_a_warning(here: Path) -> None:
    short = presets.preset_config("demo", max_position_embeddings=128)
    AutoModelForCausalLM.from_config(short).save_pretrained(here / "short")
    result = invoke("train", *TOY, "--model", "short", "--chunk_size", "1k", "--max_steps", "1", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "--max_length 256 is more than the 128 positions this model was made for" in result.output
    assert "1 step of 1 example, learning rate 5e-05, chunks of 1,024 tokens" in result.output
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    assert load_module.max_positions(short) == 128
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    for rope in (yarn, dynamic, {"full_attention": dynamic, "sliding_attention": dynamic}):
        scaled = presets.preset_config("demo", max_position_embeddings=128, rope_parameters=rope)
        assert load_module.max_positions(scaled) == 512


def test_a_model_without_its_tokenizer_is_named(here: Path) -> None:
    config = presets.preset_config("demo", vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(here / "bare")
    assert "bare has no tokenizer: name one with --tokenizer_name" in invoke("train", "--model", "bare").output
    assert "; did you mean 'bare'? The presets are" in invoke("train", "--model", "baer").output
    assert "(owner/name). The presets are" in invoke("train", "--model", "./zzz").output


def test_train_refuses_text_that_is_too_short(here: Path) -> None:
    (here / "short.txt").write_text("hello")
    result = invoke("train", *TOY, "--dataset", "short.txt")
    assert result.exit_code == 2
    assert "short.txt has 6 tokens (bytes), but one example needs 256" in result.output


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
        (["--modes", "fast"], "--modes has 'fast'"),
        (["--repeats", "0"], "--repeats is 0"),
    ],
)
def test_bench_refuses_in_one_message(arguments: list[str], message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_numbers_of_tokens() -> None:
    assert units.parse_list("4096, 32K,1m", units.parse_tokens) == [4096, 32768, 1048576]
    for wrong in ("", "0", "-1", "1.5K", "K"):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            units.parse_tokens(wrong)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["train", "verify", "bench", "exact gradients"]),
        (
            ["train"],
            [
                "─ Optimizer ─",
                "─ LoRA ─",
                "a few minutes on two",
                "--max_length",
                "owner/name",
                "qwen2.5-7b",
                "metrics.jsonl",
                "--print_config",
                "oomb train run.yaml",
            ],
        ),
        (["verify"], ["--layers", "Exit code", "float32 reference"]),
        (["bench"], ["--contexts", "32K,64K,1M", "without the optimizer"]),
    ],
)
def test_help_teaches(command: list[str], words: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    for word in words:
        assert word in result.output


def test_the_fingerprint_depends_only_on_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = metrics.source()
    assert metrics.machine()["source"] == first
    copy = tmp_path / "oomb"
    shutil.copytree(Path(metrics.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(metrics, "__file__", str(copy / "utils" / "metrics.py"))
    assert metrics.source() == first
    (copy / "config.py").write_text((copy / "config.py").read_text() + "\n")
    assert metrics.source() != first
