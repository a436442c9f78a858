"""The tutorial and the how-tos: each command and each piece of Python runs at toy size, and the numbers are current."""

from __future__ import annotations

import argparse
import functools
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
import yaml
from command import invoke
from documents import ROOT, blocks, commands, fences
from scripts import load, toy
from torch import Tensor
from trainings import Samples, arguments, logged, tiny_model

import oomb
from oomb.cli.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from oomb.cli.train.display import TrainingDisplay
from oomb.planner import plan as plan_module
from oomb.planner.fit import SPARE_HOST_BYTES

DOCS = ROOT / "docs"
HUB_IDS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B")
SHORT_RUN = "--chunk_size 128 --learning_rate 1e-2 --sample_tokens 0 --device cpu"
STOP_AFTER = 3
DOES_NOT_FIT = ("does not fit", "", "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model where the documents name a large one, and with text."""
    monkeypatch.chdir(tmp_path)
    toy.model_folder("base")
    # As in the tokenizers of large models, so that their output can be passed to `generate` unchanged.
    settings = json.loads(Path("base/tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    Path("base/tokenizer_config.json").write_text(json.dumps(settings))
    Path("my_texts").mkdir()
    text = Path(argparse.__file__).read_text().lower()
    for index in range(4):
        Path(f"my_texts/{index}.txt").write_text(text[index * 2000 : index * 2000 + 2000])
    return tmp_path


@functools.cache
def facts_for(name: str, *, dtype: str, lora: bool) -> Any:
    return facts_for_model(name, dtype=dtype, lora=lora)


facts_for_model = plan_module.shape_for


@pytest.fixture(autouse=True)
def models_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build each large model once: building it without weights takes most of the time of a plan."""
    monkeypatch.setattr(
        plan_module, "shape_for", lambda name, *, dtype, lora, config: facts_for(name, dtype=dtype, lora=lora)
    )


def smaller(text: str, *swaps: tuple[str, str]) -> str:
    """Replace the sizes of the page by toy sizes. A swap that finds nothing is out of date."""
    for old, new in swaps:
        assert old in text, old
        text = text.replace(old, new)
    for name in HUB_IDS:
        text = text.replace(name, "base")
    return text


def run(command: str, *, code: int = 0) -> str:
    program, *words = shlex.split(command)
    assert program == "oomb", command
    result = invoke(*words)
    assert result.exit_code == code, f"{command}\n{result.output}"
    return result.output


def steps(folder: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def interrupted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Press Ctrl-C in the step after the third."""
    chunk_done = TrainingDisplay.chunk_done

    def pressed(self: Any, phase: str, done: int, total: int) -> None:
        if (self._view.step, phase, done) == (STOP_AFTER, "gradient", 2):
            signal.raise_signal(signal.SIGINT)
        chunk_done(self, phase, done, total)

    monkeypatch.setattr(TrainingDisplay, "chunk_done", pressed)
    return monkeypatch


def test_the_tutorial_leads_to_a_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "tutorial.md"
    swaps = {
        "plan": [("--context 32K", "--context 1K --gpu 24GiB --host 8GiB")],
        "verify": [("--layers 2", "--layers 2 --context 128 --chunk_size 32 --device cpu")],
        "tokenize": [("--output", "--num_proc 1 --output")],
        "eval": [("32K --needle", "512 --needle"), ("4K,32K", "2K --needle_haystacks 1 --chunk_size 512 --device cpu")],
        "train": [("32K", f"512 {SHORT_RUN}"), ("--save_steps 50", "--save_steps 2 --max_steps 5")],
        "report": [],
    }
    small_card = planned("--context 32K --gpu 8GiB --host 16GiB --model qwen2.5-0.5b --lora")
    assert f"takes {small_card[0]} of an 8 GiB card" in page.read_text()
    names: dict[str, Any] = {}
    done = []
    for language, text in blocks(page):
        if language == "python":
            exec(text, names)
            continue
        assert language == "bash"
        for command in commands(text):
            kind = command.split()[1]
            if command.startswith("make ") or command == "oomb verify demo":
                continue  # both in test_packaging.py
            if "config.yaml" in command:
                # The interrupted step is not among the completed ones.
                assert max(steps(here / "out")) == STOP_AFTER
                assert (here / "out" / f"checkpoint-{STOP_AFTER}").is_dir()
                run(command)
            elif kind == "train":
                with monkeypatch.context() as patched:
                    interrupted(patched)
                    run(smaller(command, *swaps[kind]), code=EXIT_INTERRUPTED)
            else:
                run(smaller(command, *swaps[kind]))
            done.append(kind)
    assert done == ["verify", "plan", "tokenize", "eval", "train", "train", "eval", "report"]
    assert list(steps(here / "out")) == [1, 2, 3, 4, 5]
    assert steps(here / "out")[5] < 0.9 * steps(here / "out")[1]
    assert "needles" in (here / "out" / "report.html").read_text()
    # The merged model equals the trained one and differs from the base model.
    ids = torch.randint(3, 40, (1, 30))
    adapted = names["AutoPeftModelForCausalLM"].from_pretrained("out/model")
    torch.testing.assert_close(names["model"](ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(names["model"](ids).logits, load("base")(ids).logits, atol=1e-2)


def planned(flags: str) -> tuple[str, str, str]:
    """Return GPU memory, host memory and the longest context of a plan, formatted as on the pages."""
    result = invoke("plan", *shlex.split(flags), "--output", "plan.json")
    assert result.exit_code in (0, 1), result.output
    plan = json.loads(Path("plan.json").read_text())
    if not plan["fits"]:
        return DOES_NOT_FIT
    gpu, host = (f"{plan[key] / 2**30:.1f} GiB" for key in ("peak_gpu_bytes", "host_bytes"))
    return gpu, host, f"{plan['longest_context']:,}"


@pytest.mark.parametrize(
    ("page", "common", "num_rows"),
    [("howto_24gb", "--context 128K --gpu 24GiB", 6), ("howto_full", "--context 128K --gpu H100 --host 256GiB", 7)],
)
def test_the_tables_are_what_the_plan_says(here: Path, page: str, common: str, num_rows: int) -> None:
    text = (DOCS / f"{page}.md").read_text()
    assert f"with `{common}`" in text
    shown = re.findall(r"^\| `(--[^`]+)` \| ([^|]*?) \| ?([^|]*?) ?\| ?([^|]*?) ?\|$", text, re.MULTILINE)
    assert len(shown) == num_rows
    for flags, *figures in shown:
        assert tuple(figures) == planned(f"{common} {flags}"), flags


@pytest.mark.parametrize(("page", "count"), [("howto_24gb", 3), ("howto_full", 1), ("out_of_memory", 1)])
def test_the_plans_shown_fit(here: Path, page: str, count: int) -> None:
    plans = [c for block in fences(DOCS / f"{page}.md", "bash") for c in commands(block) if c.startswith("oomb plan")]
    assert len(plans) == count
    for command in plans:
        assert run(command).rstrip().endswith("fits")


def measured(name: str) -> dict[str, Any]:
    """Return the only completed step of a result file."""
    rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    [row] = [row for row in rows if row["problem"] is None]
    return row


def test_figures_that_were_measured() -> None:
    text = " ".join((DOCS / "howto_24gb.md").read_text().split())
    for name, digits, said in (
        ("plan_check_24gib.json", 0, "{tokens} tokens, exact, took {gpu} GiB of it and {host} GiB on the host"),
        (
            "plan_check_24gib_1m.json",
            1,
            "{tokens} tokens, with [selected pages](sparse.md) in [8 bits](limits.md#pages-in-8-bits), {gpu} GiB and "
            "{host} GiB ([plan_check_24gib_1m",
        ),
    ):
        row = measured(name)
        gpu, host = (row[f"measured_{tier}_bytes"] / 2**30 for tier in ("gpu", "host"))
        figures = {"tokens": f"{row['context']:,}", "gpu": f"{gpu:.1f}", "host": f"{host:.{digits}f}"}
        assert said.format(**figures) in text
    row = measured("plan_check_full.json")
    states = next(term["num_bytes"] for term in row["terms"] if term["name"] == "optimizer states")
    free = (row["settings"]["host_memory"] + SPARE_HOST_BYTES + states) / 2**30
    said = " ".join((DOCS / "howto_full.md").read_text().split())
    assert f"with {free:.0f} GiB of free host memory" in said and f"in 8 bits: {row['context']:,} tokens" in said


def test_a_24_gb_card(here: Path) -> None:
    page = DOCS / "howto_24gb.md"
    [settings] = fences(page, "yaml")
    given = [c for block in fences(page, "bash") for c in commands(block) if c.startswith("oomb train")]
    (here / "run.yaml").write_text(settings)
    effective = yaml.safe_load(run(given[0]))
    expected = {**yaml.safe_load(settings), "max_length": 131_072}
    assert {key: effective[key] for key in expected} == expected
    (here / "run.yaml").write_text(smaller(settings, ("128K", "512"), ("save_steps: 50", "save_steps: 2")))
    run(f"{given[1]} {SHORT_RUN} --max_steps 2")
    assert (here / "out" / "model" / "adapter_config.json").is_file()
    [block] = fences(page, "python")
    names: dict[str, Any] = {}
    exec(smaller(block, ("4096", "32"), ("131_072", "200")), names)
    # All but the last chunk have pages: 168 tokens.
    assert names["placement"].capacity >= 168


def test_a_full_fine_tune(here: Path) -> None:
    page = DOCS / "howto_full.md"
    small_updates, block = fences(page, "python")
    names: dict[str, Any] = {}
    exec(small_updates, names)
    for name, value in re.findall(r"^(\w+) = moved\(.*# ([\d.]+)$", small_updates, re.MULTILINE):
        assert round(names[name], 5) == float(value), name
    assert names["plain"] == 0.0
    # The threshold that the text names.
    for value, moves in ((0.0039, True), (0.004, False), (0.5, False)):
        weight = torch.tensor(value, dtype=torch.bfloat16)
        assert bool(weight - 1e-5 != weight) == moves

    [command] = [c for text in fences(page, "bash") for c in commands(text) if c.startswith("oomb train")]
    swaps = ("128K", f"512 {SHORT_RUN} --dtype bfloat16"), ("--learning_rate 1e-5 --save_steps 50", "--save_steps 2")
    run(f"{smaller(command, *swaps)} --max_steps 2")
    numbers = load("out/model").num_parameters()
    written = [here / "out" / "checkpoint-2" / name for name in ("model.safetensors", "optimizer.pt")]
    assert sum(path.stat().st_size for path in written) / numbers == pytest.approx(14, rel=0.03)

    exec(smaller(block, ("131_072", "100"), ("chunk_size=4096", "chunk_size=32")), names)
    assert names["optimizer"].master_weights
    before = load("base").to(torch.bfloat16)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), names["model"].parameters(), strict=True))
    numbers = plan_module.shape_for("qwen2.5-7b", dtype="bfloat16", lora=False, config=None).trainable_params
    text = page.read_text()
    assert f"{4 * numbers / 2**30:.1f} GiB for\n  Qwen2.5-7B" in text
    assert 256 - 4 * numbers / 2**30 == pytest.approx(227, abs=1)
    planned_train = "--context 128K --gpu H100 --host 227GiB --optimizer offloaded_adamw --param_grad_dtype float32"
    assert planned(planned_train) != DOES_NOT_FIT
    assert f"{14 * numbers / 2**30:.0f} GiB for Qwen2.5-7B" in text


class Whole:
    """Stand-in for an engine that runs the model's ordinary forward on the whole sequence."""

    def __init__(self, model: Any, config: oomb.Config) -> None:
        self.model, self.config = model, config

    def logprobs(self, given: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        if isinstance(given, list):
            return [self.logprobs(row[None])[0] for row in given]
        logp = self.model(given).logits[:, :-1].log_softmax(-1).gather(-1, given[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(logp, (1, 0))


def gradients_by_block(page: list[str], names: dict[str, Any]) -> dict[str, Tensor]:
    """Run a page. Return the gradients that each of its blocks leaves, and the weights at the end."""
    found = {}
    for index, block in enumerate(page):
        torch.manual_seed(index)
        if "optimizer" in names:
            names["optimizer"].zero_grad()
        exec(block, names)
        grads = [p.grad.flatten() for p in names["model"].parameters() if p.grad is not None]
        if grads:
            found[block] = torch.cat(grads)
    found["weights"] = torch.cat([p.detach().flatten() for p in names["model"].parameters()])
    return found


def test_losses_of_ones_own_are_those_of_the_whole_sequence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = [
        smaller(block, *([("4096", "16")] if "4096" in block else []), *([("1e-6", "1e-3")] if "1e-6" in block else []))
        for block in fences(DOCS / "howto_own_loss.md", "python")
    ]
    names: dict[str, Any] = {}
    ours = gradients_by_block(page, names)
    assert float(names["error"]) < 1e-5  # the last block's own verdict
    assert (names["margin"] == 0).all()  # new adapters change nothing, so the reference is the model
    with monkeypatch.context() as patched:
        patched.setattr(oomb, "Engine", Whole)
        expected = gradients_by_block([block for block in page if "FocalTrainer" not in block], {})
    # Gradients from the preference, teacher, contrastive (twice) and check blocks, plus the weights; the rewards block
    # steps the optimizer and leaves none.
    assert len(ours) == len(expected) == 6 and set(ours) == set(expected)
    for block, value in expected.items():
        assert value.norm() > 0, block
        assert (ours[block] - value).norm() <= 1e-4 * value.norm(), block
    together, apart = (grads for block, grads in ours.items() if "log_softmax(10" in block)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-6)
    assert (ours["weights"] - torch.cat([p.flatten() for p in load("base").parameters()])).norm() > 1e-3

    losses = []
    for batch_size, accumulated in ((4, 1), (1, 4)):
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulated}
        trainer = names["FocalTrainer"](
            model=load("base"),
            args=arguments(here, max_steps=2, **sizes),
            train_dataset=Samples(4, 40),
            engine_config=oomb.Config(chunk_size=16),
        )
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_short_pieces_of_python_run(here: Path) -> None:
    """The short blocks, each of which shows one call."""
    from transformers import TrainingArguments

    model = load("base")
    rows = [torch.randint(3, 40, (length,)) for length in (70, 20, 30)]
    ids = torch.randint(3, 40, (2, 40))
    names: dict[str, Any] = {
        "oomb": oomb,
        "model": model,
        "dataset": Samples(4, 40),
        "training_arguments": arguments(here, max_steps=1),
        "TrainingArguments": functools.partial(TrainingArguments, max_steps=1, report_to="none", use_cpu=True),
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(20).repeat(2, 2),
        "numbers": torch.arange(1, 3).repeat_interleave(20).repeat(2, 1),
        **dict(zip(("document_a", "document_b", "document_c"), rows, strict=True)),
    }
    quickstart = [b for b in fences(DOCS / "quickstart.md", "python") if "LoraConfig" not in b and "yarn" not in b]
    readme = fences(ROOT / "README.md", "python")[1:]
    sparse, batches = fences(DOCS / "sparse.md", "python"), fences(DOCS / "batches.md", "python")
    assert [len(found) for found in (quickstart, readme, batches, sparse)] == [4, 1, 1, 1]
    for block in (*quickstart, *readme, *batches, *sparse):
        exec(block.replace("bf16=True", "bf16=False").replace("chunk_size=4096", "chunk_size=128"), names)
    assert names["trainer"].state.global_step == 1
    assert [len(logp) for logp in names["logp"]] == [70, 20]
    assert names["engine"].config.page_budget == 64


SCRIPT = """
import time
from pathlib import Path

from trainings import CHUNKED, Samples, arguments, tiny_model
from transformers import TrainerCallback

import oomb
from oomb.trainers import checkpoints

STOP_AFTER = None if checkpoints.latest("out") else 3


class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STOP_AFTER:
            print("waiting", flush=True)
            while not signals.state.stop_requested:
                time.sleep(0.01)


trainer = oomb.Trainer(
    tiny_model("phi", resid_pdrop=0.1),
    arguments(Path("out"), max_steps=6),
    train_dataset=Samples(10, 41),
    engine_config=CHUNKED,
    callbacks=[Wait()],
)
"""
"""Start of a script whose first run waits for SIGTERM; a block of the page that trains follows."""


@pytest.mark.timing
def test_a_script_of_ones_own_saves_at_sigterm_and_goes_on(here: Path) -> None:
    [block] = [b for b in fences(DOCS / "checkpoints.md", "python") if "SignalHandler" in b]
    (here / "script.py").write_text(f"{SCRIPT}\n{block}")
    paths = os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line == "waiting\n":
                process.send_signal(signal.SIGTERM)
                break
        output = process.stdout.read()
    assert process.returncode == EXIT_TERMINATED, output
    assert f"saved out/checkpoint-{STOP_AFTER}\n" in output
    assert [path.name for path in (here / "out").iterdir()] == [f"checkpoint-{STOP_AFTER}"]
    # Run the same script again: it resumes and finishes.
    names: dict[str, Any] = {}
    exec((here / "script.py").read_text(), names)
    resumed, whole = (
        names["trainer"],
        oomb.Trainer(
            tiny_model("phi", resid_pdrop=0.1),
            arguments(here / "whole", max_steps=6),
            train_dataset=Samples(10, 41),
            engine_config=oomb.Config(chunk_size=16),
        ),
    )
    whole.train()
    assert resumed.state.global_step == 6
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)", (DOCS / "README.md").read_text()))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"README.md"}
