"""Recipes: with what `oomb plan` says, a context that did not fit does, in the time and the memory that were told."""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import invoke
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import TINY

from oomb.config import Config
from oomb.models.shape import ModelShape
from oomb.planner import report, suggest
from oomb.planner.forecast import OPTIMIZERS, StepForecast, forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.placement import place
from oomb.planner.suggest import Suggestion, Suggestions, suggest_settings
from oomb.utils.units import GIB, parse_bytes

MIB = 1 << 20
ADAPTED = replace(
    TINY, has_adapters=True, layer_io_width=2000, head_grad_bytes=0, grad_bytes=MIB // 4, float32_sum_bytes=0,
    wide_grad_bytes=MIB // 4, trained_params=MIB // 16, trainable_params=MIB // 16,
)  # fmt: skip


@functools.cache
def facts_for(lora: bool) -> ModelShape:
    return report.shape_for("qwen2.5-7b", lora=lora)


def asked_of(
    plan: StepForecast, facts: ModelShape, lora: bool = False, adapted: ModelShape | None = None
) -> Suggestions:
    return suggest_settings("a model", "bfloat16", lora, facts, plan, lambda: adapted)


def seven_billion(
    length: int, host: float = 119, lora: bool = False, **config: Any
) -> tuple[StepForecast, Suggestions]:
    machine, facts = machine_named("H200", int(host * GIB)), facts_for(lora)
    plan = forecast_step(facts, Config(**config), machine, length=length)
    return plan, asked_of(plan, facts, lora, facts_for(True))


@pytest.mark.parametrize("host", [116, 119, 120])
def test_four_million_tokens_on_one_h200(host: float) -> None:
    """LoRA, at every amount of free memory that such a machine was seen to have."""
    plan, told = seven_billion(1 << 22, host, lora=True)
    assert not plan.fits and told.suggestion is not None and told.longest == () and told.larger_machine is None
    found, changes = told.suggestion.plan, told.suggestion.changes
    assert found.fits and found.length == 1 << 22
    assert (changes["kv_dtype"], changes["grad_dtype"], changes["page_budget"]) == ("int8", "int8", 64)
    assert "lora" not in changes and "optimizer" not in changes
    assert parse_bytes(changes["host_memory"]) <= (host - 3) * GIB
    assert found.seconds is not None and 11 * 60 < found.seconds < 15 * 60
    # Attention to all of the past takes most of a day, and less memory.
    assert (
        told.without_sparse is not None
        and told.without_sparse.plan.fits
        and "page_budget" not in told.without_sparse.changes
    )
    assert told.without_sparse.plan.seconds is not None and told.without_sparse.plan.seconds > 7 * 3600


def test_full_training_is_told_how_far_it_reaches() -> None:
    plan, told = seven_billion(1 << 22)
    assert (
        told.suggestion is not None
        and told.suggestion.changes["lora"] is True
        and "optimizer" not in told.suggestion.changes
    )
    [longest] = told.longest
    assert not longest.lora and longest.plan.fits and 3_600_000 < longest.plan.length < 1 << 22
    assert longest.changes["optimizer"] == "offloaded_adamw_8bit"
    text = "\n".join(told.lines())
    assert f"Full training reaches {longest.plan.length:,} tokens with --host_memory" in text
    # With exactly these settings it is the longest.
    further = longest.plan.length + plan.config.chunk_size
    options: dict[str, Any] = {"optimizer": longest.plan.optimizer}
    assert not forecast_step(facts_for(False), longest.plan.config, plan.machine, length=further, **options).fits


def test_a_recipe_is_as_mild_as_can_be() -> None:
    """The longer the context, the more it costs: time, then margins, then bits, then what is trained."""
    mild = {"host_memory", "gpu_memory", "optimizer", "page_budget"}
    _, told = seven_billion(1504 << 10)
    assert told.suggestion is not None and set(told.suggestion.changes) == {"host_memory", "page_budget"}
    _, told = seven_billion(1700 << 10, keep_attention=False)
    assert told.suggestion is not None and set(told.suggestion.changes) <= mild | {"param_grad_dtype"}
    _, told = seven_billion(2 << 20)
    assert told.suggestion is not None and set(told.suggestion.changes) <= mild | {"grad_dtype"}
    _, told = seven_billion(3 << 20)
    assert told.suggestion is not None and {"grad_dtype", "kv_dtype"} <= set(told.suggestion.changes)
    # What somebody has switched on, or limited, goes first.
    limited = {"gpu_memory": "1GiB", "host_memory": "1GiB", "keep_attention": True, "checkpoint_layers": False}
    _, told = seven_billion(1 << 17, **limited)
    assert told.suggestion is not None and told.suggestion.changes == {"host_memory": "auto"}


@pytest.mark.parametrize("lora", [False, True])
def test_a_smaller_batch_comes_before_all_that_is_approximate(lora: bool) -> None:
    """One sequence at a time gives the same gradient, and its pages are a fourth."""
    machine, facts = machine_named("A100-80GB", 100 * GIB), report.shape_for("smollm2-135m", lora=lora)
    plan = forecast_step(facts, Config(), machine, batch_size=4, length=1 << 20)
    # Four sequences take more than an hour, one does not: no pages are chosen.
    assert not plan.fits and plan.seconds is not None and plan.seconds > 3600
    told = asked_of(plan, facts, lora)
    assert told.suggestion is not None and told.suggestion.changes == {"batch_size": 1} and told.without_sparse is None
    assert told.suggestion.plan.fits and told.suggestion.plan.batch_size == 1 and told.suggestion.accumulation == 4
    assert " --batch_size 1 " in told.suggestion.command
    words = "--per_device_train_batch_size 1 --gradient_accumulation_steps 4"
    assert words in (told.suggestion.train_command or "")
    assert "per_device_train_batch_size=1, gradient_accumulation_steps=4" in told.suggestion.python
    text = "\n".join(told.lines())
    assert "\n  --batch_size 1  one sequence at a time" in text
    assert "each of the 4 sequences of a step takes about 1" in text
    # A limit that somebody has set goes first, and the batch stays.
    limited = forecast_step(facts, Config(host_memory=0, gpu_memory=0), machine, batch_size=2, length=1 << 17)
    stays = asked_of(limited, facts, lora).suggestion
    assert stays is not None and stays.changes == {"host_memory": "auto"} and stays.accumulation == 1
    # Where a sequence alone is too long, it is one by one, and what else it takes.
    longer = asked_of(forecast_step(facts, Config(), machine, batch_size=4, length=1 << 22), facts, lora)
    assert longer.suggestion is not None and longer.suggestion.changes["batch_size"] == 1
    assert longer.suggestion.changes["grad_dtype"] == "int8"


def test_states_go_to_the_host_where_the_gpu_is_short() -> None:
    """Weights and gradients of a 7B model fit into 48 GiB, AdamW's states do not."""
    machine, facts = Machine(gpu_bytes=48 * GIB, host_bytes=200 * GIB), facts_for(False)
    plan = forecast_step(facts, Config(), machine, length=1 << 16)
    told = asked_of(plan, facts)
    assert told.suggestion is not None and told.suggestion.changes == {"optimizer": "offloaded_adamw_bf16"}
    states = [term for term in told.suggestion.plan.terms if term.name == "optimizer states"]
    assert [(term.tier, term.num_bytes) for term in states] == [("host", 4 * facts.trainable_params)]
    # A host that is too small for those, but not for smaller ones.
    crowded = forecast_step(
        facts, Config(), replace(machine, host_bytes=24 * GIB), length=1 << 16, optimizer="offloaded_adamw_bf16"
    )
    assert crowded.problem is not None and crowded.longest_context == 0
    assert crowded.problem.endswith("states take 28.37 GiB of host memory, and 24.00 GiB are free.")
    plan = forecast_step(facts, Config(), replace(machine, host_bytes=24 * GIB), length=1 << 16)
    smaller = asked_of(plan, facts).suggestion
    assert smaller is not None and smaller.changes["optimizer"] == "offloaded_adamw_8bit"
    # Where the host is too small for any, they stay, and something else gives way.
    tight = replace(H200, host_bytes=8 * GIB)
    plan = forecast_step(facts, Config(), tight, length=800_000)
    stays = asked_of(plan, facts).suggestion
    assert stays is not None and stays.plan.fits and "optimizer" not in stays.changes
    for optimizer in ("none", "sgd", "momentum"):
        plan = forecast_step(facts, Config(), replace(machine, gpu_bytes=30 * GIB), length=1 << 16, optimizer=optimizer)
        found = asked_of(plan, facts, adapted=facts_for(True)).suggestion
        assert found is not None and "optimizer" not in found.changes


H200 = machine_named("H200", 119 * GIB)

plans = st.builds(
    lambda config, length, gpu, host, batch_size, optimizer, lora: (
        forecast_step(
            ADAPTED if lora else TINY,
            config,
            Machine(gpu_bytes=GIB // 2 + gpu, host_bytes=host, gpu_name="H200"),
            batch_size=batch_size,
            length=length,
            optimizer=optimizer,
        ),
        lora,
    ),
    st.builds(
        Config,
        chunk_size=st.sampled_from([256, 1024, 1000]),
        page_size=st.just(8),
        page_budget=st.sampled_from([None, None, 5]),
        checkpoint_layers=st.sampled_from(["auto", False]),
        keep_attention=st.sampled_from(["auto", True]),
        gpu_memory=st.sampled_from(["auto", 0, "1GiB"]),
        host_memory=st.sampled_from(["auto", 0, "2MiB"]),
    ),
    st.integers(2, 10**6),
    st.integers(90 * MIB, 200 * MIB),
    st.integers(0, 200 * MIB),
    st.integers(1, 2),
    st.sampled_from(OPTIMIZERS),
    st.booleans(),
)


@settings(max_examples=60)
@given(plans)
def test_what_is_told_is_true(given: tuple[StepForecast, bool]) -> None:
    plan, lora = given
    facts = ADAPTED if lora else TINY
    told = asked_of(plan, facts, lora, ADAPTED)
    if plan.fits:
        assert told == Suggestions(), "a step of minutes needs no advice"
        return
    assert (told.suggestion is None) == (told.larger_machine is not None)
    for found in (told.suggestion, *told.longest, told.larger_machine):
        if found is None:
            continue
        assert found.plan.fits and found.changes.keys() <= suggest.EXPLANATIONS.keys()
        # Applied as a Config, it is the same plan.
        changes = dict(found.changes)
        optimizer = changes.pop("optimizer", plan.optimizer)
        batch_size = changes.pop("batch_size", plan.batch_size)
        mine = ADAPTED if changes.pop("lora", lora) else TINY
        again = forecast_step(
            mine,
            replace(plan.config, **changes),
            found.plan.machine,
            batch_size=batch_size,
            length=found.plan.length,
            optimizer=optimizer,
        )
        assert again == found.plan
    for found in told.longest:
        assert found.plan.length < plan.length and found.plan.machine == plan.machine
    if told.suggestion is None:
        assert told.larger_machine is not None
        there, here = told.larger_machine.plan.machine, plan.machine
        assert there.gpu_bytes > here.gpu_bytes or there.host_bytes > here.host_bytes
        mine = ADAPTED if told.larger_machine.lora else TINY
        for name in ("gpu_bytes", "host_bytes"):
            if getattr(there, name) > getattr(here, name):
                smaller = replace(there, **{name: int(0.9 * getattr(there, name))})
                sizes: dict[str, Any] = {"batch_size": plan.batch_size, "length": plan.length}
                less = forecast_step(mine, plan.config, smaller, optimizer=plan.optimizer, **sizes)
                assert not less.fits and asked_of(less, mine, told.larger_machine.lora).suggestion is None, name
        return
    assert told.suggestion.plan.machine == plan.machine and told.suggestion.plan.length == plan.length
    # And nothing of it is needless. Brims are worth what the rest leaves them, so they stay as they are.
    for name in set(told.suggestion.changes) - {"page_budget", "page_size", "lora"}:
        config, optimizer = told.suggestion.plan.config, told.suggestion.plan.optimizer
        batch_size = told.suggestion.plan.batch_size
        if name == "optimizer":
            optimizer = plan.optimizer
        elif name == "batch_size":
            batch_size = plan.batch_size
        else:
            config = replace(config, **{name: getattr(plan.config, name)})
        mine = ADAPTED if told.suggestion.lora else TINY
        without = forecast_step(
            mine, config, plan.machine, batch_size=batch_size, length=plan.length, optimizer=optimizer
        )
        assert not without.fits or "gpu_memory" in told.suggestion.changes, name


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
    assert "\n  MODEL: the folder or hub id of the trained model." in asked.output
    train(found, CASES[case][1])


def train(found: dict[str, Any], model: str) -> None:
    """The command for training reads as the same settings, for a model in place of the preset."""
    words = shlex.split(found["train_command"])
    assert words[:4] == ["oomb", "train", "--model_name_or_path", "MODEL"]
    words[3] = model
    result = invoke(*words[1:], "--print_config")
    assert result.exit_code == 0, result.output
    run = yaml.safe_load(result.output)
    usual = asdict(Config())
    for name, value in found["settings"].items():
        assert str(run.get(name, usual[name])) == str(value), name
    assert run.get("use_peft", False) == found["lora"]
    assert run.get("per_device_train_batch_size", 1) == found["batch_size"]
    assert run.get("gradient_accumulation_steps", 1) == found["gradient_accumulation_steps"]
    is_offloaded = found["optimizer"].startswith("offloaded")
    assert run.get("optim", "adamw_torch") == ("offloaded_adamw" if is_offloaded else "adamw_torch")


def test_the_command_in_numbers(tmp_path: Path) -> None:
    """The case that this is for, as a person meets it."""
    arguments = ["--model", "qwen2.5-7b", "--context", "4M", "--gpu", "H200", "--host", "119GiB"]
    result = invoke("plan", *arguments, "--output", tmp_path / "plan.json")
    assert result.exit_code == 1, result.output
    assert "It fits with:\n  --lora " in result.output and "a step takes about 13 m" in result.output
    assert "Full training reaches 3,6" in result.output and "With attention to all of the past" in result.output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["recipe"]["lora"] and not written["fits"] and written["exact"]["seconds"] > 7 * 3600
    shown = invoke(*shlex.split(written["recipe"]["command"])[1:])
    assert shown.exit_code == 0 and "time of a step: about 13 m" in shown.output


def test_the_documents_show_what_it_prints() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    [(command, shown)] = re.findall(r"```bash\noomb ([^\n]*)\n```\n\n```\n(It fits with:.*?)```", text, re.DOTALL)
    assert shown in invoke(*shlex.split(command)).output


def test_hours_are_remarked_on() -> None:
    plan, told = seven_billion(1536 << 10, host=200)
    assert plan.fits and plan.seconds is not None and plan.seconds > 3600
    assert told.suggestion is None and told.with_sparse is not None and told.with_sparse.changes == {"page_budget": 64}
    [line] = told.lines()
    assert line.startswith("With --page_budget 64 it takes about 4 m") and "an approximation" in line
    # Not where it takes minutes, where pages are chosen as it is, or where chunks are no whole pages.
    assert seven_billion(1 << 18)[1] == Suggestions()
    assert seven_billion(1536 << 10, host=200, page_budget=32)[1] == Suggestions()
    assert seven_billion(1536 << 10, host=200, chunk_size=4000)[1] == Suggestions()
    facts, unknown = facts_for(False), Machine(gpu_bytes=H200.gpu_bytes, host_bytes=200 * GIB)
    told = asked_of(forecast_step(facts, Config(), unknown, length=1536 << 10), facts)
    [line] = told.lines()
    assert line.startswith("With --page_budget 64 it is more than 3 times as fast"), "whatever GPU it is"
    # A window does what chosen pages would.
    windowed = replace(facts, layers=tuple(replace(layer, window=1 << 17) for layer in facts.layers))
    slow = forecast_step(windowed, Config(keep_attention=False), replace(H200, host_bytes=2**42), length=1 << 24)
    assert slow.fits and slow.seconds is not None and slow.seconds > 3600
    assert asked_of(slow, windowed) == Suggestions()


def test_short_chunks_make_no_promise() -> None:
    pace = forecast_step(facts_for(True), Config(chunk_size=512), H200, length=1 << 17).step_time_text
    assert pace.startswith("more than ") and "not measured" not in pace
    assert forecast_step(facts_for(True), Config(), H200, length=1 << 17).step_time_text.startswith("about ")
    assert forecast_step(
        facts_for(True), Config(), machine_named("H100", 2**37), length=1 << 17
    ).step_time_text.endswith("measured")


def test_where_nothing_helps() -> None:
    _, told = seven_billion(1 << 24)
    assert told.suggestion is None and [found.lora for found in told.longest] == [False, True]
    assert told.larger_machine is not None and told.larger_machine.plan.length == 1 << 24
    text = "\n".join(told.lines())
    [size] = re.findall(r"No setting makes it fit here. It takes ([\d.]+) GiB of free host memory, with --lora", text)
    _, there = seven_billion(1 << 24, host=float(size), lora=True)
    assert there.suggestion is not None and there.suggestion.plan.length == 1 << 24
    assert seven_billion(1 << 24, host=float(size) * 0.9, lora=True)[1].suggestion is None
    # A GPU on which the weights do not fit: no host helps.
    small = Machine(gpu_bytes=8 * GIB, host_bytes=64 * GIB)
    plan = forecast_step(facts_for(False), Config(), small, length=8192)
    told = asked_of(plan, facts_for(False), adapted=facts_for(True))
    [size] = re.findall(r"It takes a GPU of ([\d.]+) GiB, with --lora", "\n".join(told.lines()))
    for gpu, fits in ((float(size), True), (float(size) - 0.1, False)):
        plan = forecast_step(facts_for(False), Config(), replace(small, gpu_bytes=int(gpu * GIB)), length=8192)
        assert (asked_of(plan, facts_for(False), adapted=facts_for(True)).suggestion is not None) == fits
    # Positions that nobody has learned are not to be had for memory.
    learned = replace(TINY, num_positions=1000)
    assert asked_of(forecast_step(learned, Config(), H200, length=1001), learned) == Suggestions()


@pytest.mark.parametrize("lora", [False, True])
def test_where_the_gpu_and_the_host_are_too_small(lora: bool) -> None:
    """The smallest GPU is named with the host memory that it takes: a GPU that makes up for the host is larger."""
    small, length = Machine(gpu_bytes=12 * GIB, host_bytes=8 * GIB), 1 << 19
    plan = forecast_step(facts_for(lora), Config(), small, length=length)
    told = asked_of(plan, facts_for(lora), lora, facts_for(True))
    text = "\n".join(told.lines())
    [(gpu, host)] = re.findall(r"It takes a GPU of ([\d.]+) GiB and ([\d.]+) GiB of free host memory, with ", text)
    assert float(gpu) < 20 and float(host) < 40

    def fits(gpu: float, host: float) -> bool:
        machine = Machine(gpu_bytes=int(gpu * GIB), host_bytes=int(host * GIB))
        plan = forecast_step(facts_for(True), Config(), machine, length=length)
        return plan.fits or asked_of(plan, facts_for(True), True).suggestion is not None

    assert fits(float(gpu), float(host))
    assert not fits(0.9 * float(gpu), float(host)) and not fits(float(gpu), 0.9 * float(host))
    assert not fits(0.9 * float(gpu), 1000)
    remark = "oomb train --load_in_4bit keeps them in about a quarter; the plan does not count it."
    assert text.endswith(remark)
    # The weights fit, all else does not.
    plan = forecast_step(facts_for(True), Config(), replace(small, gpu_bytes=int(15.5 * GIB)), length=length)
    text = "\n".join(asked_of(plan, facts_for(True), True).lines())
    assert "It takes a GPU of " in text and "4bit" not in text
    # And full training has none that are frozen.
    text = "\n".join(
        asked_of(forecast_step(facts_for(False), Config(), small, length=length), facts_for(False)).lines()
    )
    assert "It takes a GPU of " in text and "4bit" not in text


def test_without_peft_it_says_what_to_install() -> None:
    small = Machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB)
    plan = forecast_step(facts_for(False), Config(), small, length=8192)
    text = "\n".join(asked_of(plan, facts_for(False)).lines())
    assert "where peft is installed: pip install peft." in text and "--lora" not in text
    assert "install" not in "\n".join(asked_of(plan, facts_for(False), adapted=facts_for(True)).lines())


def test_the_search_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing pages takes milliseconds, with chosen pages about ten of them."""
    calls = []
    monkeypatch.setattr(suggest, "place", lambda request: calls.append(1) or place(request))
    for length in (1 << 21, 1 << 22, 1 << 24):
        calls.clear()
        seven_billion(length)
        assert len(calls) < 120


def test_a_recipe_reads_well() -> None:
    plan = forecast_step(TINY, Config(), H200, length=100)
    whole: Suggestion = replace(
        Suggestion(model="my model", dtype="bfloat16", lora=True, was_lora=False, asked=plan, plan=plan),
        plan=replace(
            plan,
            optimizer="offloaded_adamw_8bit",
            config=Config(checkpoint_layers=True, kv_dtype="int8", host_memory="2GiB"),
        ),
    )
    assert whole.flags == [
        "--lora", "--host_memory 2GiB", "--checkpoint_layers true", "--optimizer offloaded_adamw_8bit",
        "--kv_dtype int8",
    ]  # fmt: skip
    assert whole.python == (
        'oomb.Config(host_memory="2GiB", checkpoint_layers=True, kv_dtype="int8"), '
        'oomb.Trainer(..., optimizer="offloaded_adamw_8bit"), on a PEFT model'
    )
    assert whole.command == (
        "oomb plan --model 'my model' --context 100 --gpu H200 --host 119GiB --lora --optimizer offloaded_adamw_8bit "
        "--host_memory 2GiB --checkpoint_layers true --kv_dtype int8"
    )
    assert "--use_peft --optim offloaded_adamw --optim_args state_dtype=8bit,master_weights=false" in (
        whole.train_command or ""
    )
    # A model of one's own is named; a preset would be trained from random weights.
    assert (whole.train_command or "").startswith("oomb train --model_name_or_path 'my model' --max_length 100")
    assert "random weights" not in "\n".join(whole.lines())
    preset = replace(whole, model="Demo")
    assert (preset.train_command or "").startswith("oomb train --model_name_or_path MODEL --max_length 100")
    assert "random weights" in "\n".join(preset.lines()) and "--model Demo" in preset.command
    assert "  --kv_dtype int8                   K and V rest in 8 bits: an approximation" in whole.lines()
    # This machine's own GPU, whose memory is not that of the table, needs no name; its optimizer may have none.
    mine = replace(plan, optimizer="sgd", machine=Machine(gpu_bytes=123, host_bytes=5, gpu_name="NVIDIA H200"))
    assert "--gpu" not in replace(whole, plan=mine).command and "--host 5B" in replace(whole, plan=mine).command
    assert replace(whole, plan=mine).train_command is None
