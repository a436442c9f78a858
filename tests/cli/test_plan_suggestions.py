"""What `oomb plan` suggests, as text: commands that work, numbers that hold, and what the documents show."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import invoke
from plans import TINY, plan_qwen_7b, qwen_7b, report_of, shape_of, suggest_for

from oomb.cli.plan.suggestions import EXPLANATIONS, SuggestionText, step_time, suggestion_lines
from oomb.config import Config
from oomb.planner.forecast import StepForecast, forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.suggest import Suggestion, Suggestions
from oomb.utils.units import GIB

H200 = machine_named("H200", 119 * GIB)
CASES = {
    "a small card": ["--model", "qwen2.5-0.5b", "--context", "1M", "--gpu", "8GiB", "--host", "16GiB"],
    "quoted": ["--model", "smollm2-135m", "--context", "3M", "--gpu", "RTX 4090", "--host", "60GiB"],
    "odd numbers": [
        "--model", "demo", "--context", "10000001", "--gpu", "5000000001B", "--host", "7GB", "--batch_size", "2",
        "--optimizer", "offloaded_adamw", "--fuse", "off", "--dtype", "float32",
    ],
    "limits": [
        "--model", "demo", "--context", "2M", "--gpu", "24GiB", "--host", "64GiB", "--host_memory", "1GiB",
        "--gpu_memory", "0", "--keep_attention", "true", "--chunk_size", "8K",
    ],
    "a batch": [
        "--model", "smollm2-135m", "--context", "1M", "--gpu", "A100-80GB", "--host", "100GiB", "--batch_size", "4",
    ],
    "hours": ["--model", "smollm2-135m", "--context", "12M", "--gpu", "H200", "--host", "300GiB", "--page_size", "64"],
}  # fmt: skip


def text_of(forecast: StepForecast, suggestions: Suggestions, lora: bool = False) -> str:
    return "\n".join(suggestion_lines(report_of(forecast, suggestions, lora)))


@pytest.mark.parametrize("case", CASES)
def test_the_printed_commands_work(case: str, tmp_path: Path) -> None:
    asked = invoke("plan", *CASES[case], "--output", tmp_path / "asked.json")
    assert asked.exit_code == 1, asked.output
    found = json.loads((tmp_path / "asked.json").read_text())["recipe"]
    assert found is not None, asked.output
    [command] = re.findall(r"^the plan in full: oomb (.*)$", asked.output, re.MULTILINE)
    assert found["command"] == f"oomb {command}"
    shown = invoke(*shlex.split(command), "--output", tmp_path / "shown.json")
    assert shown.exit_code == 0 and "\nfits\n" in shown.output, shown.output
    plan = json.loads((tmp_path / "shown.json").read_text())
    for name in ("context", "batch_size", "settings", "lora", "optimizer", "peak_gpu_bytes", "host_bytes", "seconds"):
        assert plan[name] == found[name], name
    assert plan["fits"] and plan["recipe"] is None and plan["longest"] == []
    for name, value in found["changes"].items():
        flag = f"--{name}" if name == "lora" else f"--{name} {str(value).lower() if value in (True, False) else value}"
        assert f"\n  {flag} " in asked.output
    assert eval(found["python"].split(")")[0].removeprefix("oomb.") + ")", {"Config": Config}) == Config(
        **found["settings"]
    )
    assert "\n  MODEL: folder or hub id of the trained model." in asked.output
    check_train_command(found, CASES[case][1])


def check_train_command(found: dict[str, Any], model: str) -> None:
    """The `oomb train` command has the suggested settings, with a model in place of the preset."""
    words = shlex.split(found["train_command"])
    assert words[:4] == ["oomb", "train", "--model_name_or_path", "MODEL"]
    words[3] = model
    result = invoke(*words[1:], "--print_config")
    assert result.exit_code == 0, result.output
    run = yaml.safe_load(result.output)
    defaults = asdict(Config())
    for name, value in found["settings"].items():
        assert str(run.get(name, defaults[name])) == str(value), name
    assert run.get("use_peft", False) == found["lora"]
    assert run.get("per_device_train_batch_size", 1) == found["batch_size"]
    assert run.get("gradient_accumulation_steps", 1) == found["gradient_accumulation_steps"]
    is_offloaded = found["optimizer"].startswith("offloaded")
    assert run.get("optim", "adamw_torch") == ("offloaded_adamw" if is_offloaded else "adamw_torch")


def test_four_million_tokens_on_the_command_line(tmp_path: Path) -> None:
    arguments = ["--model", "qwen2.5-7b", "--context", "4M", "--gpu", "H200", "--host", "119GiB"]
    result = invoke("plan", *arguments, "--output", tmp_path / "plan.json")
    assert result.exit_code == 1, result.output
    assert "It fits with:\n  --lora " in result.output and "a step takes about 13 m" in result.output
    assert "Full training reaches 3,6" in result.output and "With attention to the whole past" in result.output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["recipe"]["lora"] and not written["fits"] and written["exact"]["seconds"] > 7 * 3600
    shown = invoke(*shlex.split(written["recipe"]["command"])[1:])
    assert shown.exit_code == 0 and "time of a step: about 13 m" in shown.output


def test_the_documents_show_what_is_printed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    [(command, shown)] = re.findall(r"```bash\noomb ([^\n]*)\n```\n\n```\n(It fits with:.*?)```", text, re.DOTALL)
    assert shown in invoke(*shlex.split(command)).output


def test_a_batch_is_accumulated() -> None:
    machine, shape = machine_named("A100-80GB", 100 * GIB), shape_of("smollm2-135m")
    forecast = forecast_step(shape, Config(), machine, batch_size=4, length=1 << 20)
    suggestions = suggest_for(forecast)
    assert suggestions.suggestion is not None
    text = SuggestionText(suggestions.suggestion, report_of(forecast, suggestions))
    assert " --batch_size 1 " in text.plan_command
    assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 4" in (text.train_command or "")
    assert "per_device_train_batch_size=1, gradient_accumulation_steps=4" in text.python
    shown = text_of(forecast, suggestions)
    assert "\n  --batch_size 1  one sequence at a time" in shown
    assert "each of the 4 sequences of a step takes about 1" in shown


def test_the_reach_of_full_training_is_shown() -> None:
    forecast, suggestions = plan_qwen_7b(1 << 22)
    reach = f"{suggestions.longest[0].forecast.length:,}"
    assert f"Full training reaches {reach} tokens with --host_memory" in text_of(forecast, suggestions)


def test_steps_of_hours_get_one_line() -> None:
    line = text_of(*plan_qwen_7b(1536 << 10, host=200))
    assert line.startswith("With --page_budget 64 it takes about 4 m") and "approximation" in line
    unknown = Machine(gpu_bytes=H200.gpu_bytes, host_bytes=200 * GIB)
    forecast = forecast_step(qwen_7b(), Config(), unknown, length=1536 << 10)
    line = text_of(forecast, suggest_for(forecast))
    assert line.startswith("With --page_budget 64 it is more than 3 times as fast"), "whatever GPU it is"


def test_times_say_how_sure_they_are() -> None:
    def shown(machine: Machine = H200, **config: Any) -> str:
        return step_time(forecast_step(qwen_7b(True), Config(**config), machine, length=1 << 17))

    assert shown(chunk_size=512).startswith("more than ") and "not measured" not in shown(chunk_size=512)
    assert shown().startswith("about ") and shown(machine_named("H100", 2**37)).endswith("not measured")


def test_a_larger_host_is_named_if_nothing_else_helps() -> None:
    forecast, suggestions = plan_qwen_7b(1 << 24)
    assert suggestions.suggestion is None and [found.lora for found in suggestions.longest] == [False, True]
    assert suggestions.larger_machine is not None and suggestions.larger_machine.forecast.length == 1 << 24
    text = text_of(forecast, suggestions)
    [size] = re.findall(r"No setting makes it fit here. It needs ([\d.]+) GiB of free host memory, with --lora", text)
    _, there = plan_qwen_7b(1 << 24, host=float(size), lora=True)
    assert there.suggestion is not None and there.suggestion.forecast.length == 1 << 24
    assert plan_qwen_7b(1 << 24, host=float(size) * 0.9, lora=True)[1].suggestion is None


def test_a_larger_gpu_is_named_if_the_weights_do_not_fit() -> None:
    small = Machine(gpu_bytes=8 * GIB, host_bytes=64 * GIB)

    def suggestions(machine: Machine) -> tuple[StepForecast, Suggestions]:
        forecast = forecast_step(qwen_7b(), Config(), machine, length=8192)
        return forecast, suggest_for(forecast, adapted=qwen_7b(True))

    [size] = re.findall(r"It needs a GPU with ([\d.]+) GiB, with --lora", text_of(*suggestions(small)))
    for gpu, fits in ((float(size), True), (float(size) - 0.1, False)):
        assert (suggestions(replace(small, gpu_bytes=int(gpu * GIB)))[1].suggestion is not None) == fits


@pytest.mark.parametrize("lora", [False, True])
def test_the_smallest_gpu_is_named_with_the_host_memory_it_takes(lora: bool) -> None:
    """A GPU that makes up for a small host would be larger."""
    small, length = Machine(gpu_bytes=12 * GIB, host_bytes=8 * GIB), 1 << 19
    forecast = forecast_step(qwen_7b(lora), Config(), small, length=length)
    text = text_of(forecast, suggest_for(forecast, lora, qwen_7b(True)), lora)
    [(gpu, host)] = re.findall(r"It needs a GPU with ([\d.]+) GiB and ([\d.]+) GiB of free host memory, with ", text)
    assert float(gpu) < 20 and float(host) < 40

    def fits(gpu: float, host: float) -> bool:
        machine = Machine(gpu_bytes=int(gpu * GIB), host_bytes=int(host * GIB))
        forecast = forecast_step(qwen_7b(True), Config(), machine, length=length)
        return forecast.fits or suggest_for(forecast, True).suggestion is not None

    assert fits(float(gpu), float(host))
    assert not fits(0.9 * float(gpu), float(host)) and not fits(float(gpu), 0.9 * float(host))
    assert not fits(0.9 * float(gpu), 1000)
    assert "--load_in_4bit" in text.splitlines()[-1]


def test_4_bit_weights_are_mentioned_only_for_frozen_weights_that_do_not_fit() -> None:
    machine, length = Machine(gpu_bytes=int(15.5 * GIB), host_bytes=8 * GIB), 1 << 19
    # Here the weights fit, and everything else does not.
    forecast = forecast_step(qwen_7b(True), Config(), machine, length=length)
    text = text_of(forecast, suggest_for(forecast, True), True)
    assert "It needs a GPU with " in text and "4bit" not in text
    # Full training has no frozen weights.
    forecast = forecast_step(qwen_7b(), Config(), replace(machine, gpu_bytes=12 * GIB), length=length)
    text = text_of(forecast, suggest_for(forecast))
    assert "It needs a GPU with " in text and "4bit" not in text


def test_without_peft_it_says_what_to_install() -> None:
    forecast = forecast_step(qwen_7b(), Config(), Machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB), length=8192)
    text = text_of(forecast, suggest_for(forecast))
    assert "pip install peft" in text and "--lora" not in text
    assert "install" not in text_of(forecast, suggest_for(forecast, adapted=qwen_7b(True)))


def test_flags_commands_and_python() -> None:
    asked = forecast_step(TINY, Config(), H200, length=100)

    def text(model: str = "my model", **changes: Any) -> SuggestionText:
        config = Config(checkpoint_layers=True, kv_dtype="int8", host_memory="2GiB")
        request = replace(asked.request, config=config)
        forecast = replace(asked, **{"request": request, "optimizer": "offloaded_adamw_8bit", **changes})
        suggestion = Suggestion(asked=asked, forecast=forecast, lora=True, was_lora=False)
        return SuggestionText(suggestion, report_of(asked, Suggestions(), model=model))

    whole = text()
    assert whole.flags == [
        "--lora", "--host_memory 2GiB", "--checkpoint_layers true", "--optimizer offloaded_adamw_8bit",
        "--kv_dtype int8",
    ]  # fmt: skip
    assert whole.python == (
        'oomb.Config(host_memory="2GiB", checkpoint_layers=True, kv_dtype="int8"), '
        'oomb.Trainer(..., optimizer="offloaded_adamw_8bit"), on a PEFT model'
    )
    assert whole.plan_command == (
        "oomb plan --model 'my model' --context 100 --gpu H200 --host 119GiB --lora --optimizer offloaded_adamw_8bit "
        "--host_memory 2GiB --checkpoint_layers true --kv_dtype int8"
    )
    assert "--use_peft --optim offloaded_adamw --optim_args state_dtype=8bit,master_weights=false" in (
        whole.train_command or ""
    )
    # A preset has random weights, so the command names a model of the user's.
    assert (whole.train_command or "").startswith("oomb train --model_name_or_path 'my model' --max_length 100")
    assert "random weights" not in "\n".join(whole.lines())
    preset = text("Demo")
    assert (preset.train_command or "").startswith("oomb train --model_name_or_path MODEL --max_length 100")
    assert "random weights" in "\n".join(preset.lines()) and "--model Demo" in preset.plan_command
    assert f"  --kv_dtype int8                   {EXPLANATIONS['kv_dtype'].format(bits='8 bits')}" in whole.lines()[4]
    # This machine's own GPU needs no name; some optimizers have no training command.
    here = text(optimizer="sgd", machine=Machine(gpu_bytes=123, host_bytes=5, gpu_name="NVIDIA H200"))
    assert "--gpu" not in here.plan_command and "--host 5B" in here.plan_command and here.train_command is None
