"""Test what users see during training: on terminals of any width, on a dumb one, and without one."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from terminal import Terminal
from transformers import TrainerControl, TrainerState, TrainingArguments

import oomb
from oomb.cli.train import panel
from oomb.cli.train.clock import Clock
from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.panel import PanelState, lines_of, sparkline
from oomb.cli.train.recorder import StepRecorder
from oomb.cli.train.signals import SignalHandler, StopRequested
from oomb.cli.train.state import RunInfo, RunState
from oomb.cli.train.summary import results_table
from oomb.models import load
from oomb.planner.hardware import peak_flops
from oomb.utils.metrics import JsonLines, MemoryMeter
from oomb.utils.units import GIB

TOY = [
    "--max_length", "256", "--chunk_size", "64", "--max_steps", "3", "--device", "cpu", "--output_dir", "out",
    "--overwrite_output_dir", "--dataset", "text.txt", "--sample_tokens", "0",
]  # fmt: skip
DURATION = r"(?:\d+ h \d\d m|\d+ m \d\d s|\d+\.\d s)"
EVERYTHING = PanelState(
    title="a model on some text, 1,048,576 tokens a step",
    step=7,
    max_steps=1000,
    phase="gradient",
    chunk=120,
    num_chunks=256,
    batch=2,
    num_batches=4,
    pass_done=120 / 256,
    done=0.61,
    left_s=754.0,
    run_elapsed_s=9000.0,
    run_left_s=300_000.0,
    losses=[3.5, 3.1, 2.9, 2.95, 2.7],
    held_out=2.9123,
    grad_norm=1.234,
    learning_rate=1.5e-5,
    tokens_per_s=2381.0,
    mfu=0.4567,
    step_s=440.0,
    memory=[
        ("GPU peak", 120 * GIB, 140 * GIB),
        ("GPU pages", 80 * GIB, 90 * GIB),
        ("host pages", 10 * GIB, 100 * GIB),
    ],
    waited_s=12.0,
)
SHOWN = [
    "8/1000", "run 83 h 20 m left", "gradient, chunk 120/256", "batch 2/4", "step 12 m 34 s left", "2.7000",
    "held out 2.9123", "gradient norm 1.23", "lr 1.50e-05", "2,381 tokens/s", "MFU 45.7%", "last step 7 m 20 s",
    "waited 12.0 s", "running 2 h 30 m", "GPU peak 120.00 of 140.00 GiB", "GPU pages 80.00 of 90.00 GiB",
    "host pages 10.00 of 100.00 GiB",
]  # fmt: skip


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    pytest.importorskip("pyte")
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    opened = Terminal(folder)
    yield opened
    opened.close()


@pytest.mark.timing
@pytest.mark.parametrize(
    ("flags", "columns", "lines", "env"), [([], 80, 24, {}), (["--use_peft"], 120, 40, {"NO_COLOR": "1"})]
)
def test_the_panel_is_there_during_training_and_gone_afterwards(
    terminal: Terminal, flags: list[str], columns: int, lines: int, env: dict[str, str]
) -> None:
    terminal.train(*TOY, *flags, columns=columns, lines=lines, stops=[[0, "fill", 3], [2, "gradient", 2]], **env)
    assert terminal.report() == {"at": [0, "fill", 3]}
    _, evaluation = terminal.panel(columns - panel.MARGIN, "chunk 3/4")
    assert re.search(r"held-out loss ━+─+  75%  ", evaluation[1])
    assert "pass   fill, chunk 3/4  ━" in evaluation[2]

    terminal.resume()
    assert terminal.report() == {"at": [2, "gradient", 2]}
    shown, training = terminal.panel(columns - panel.MARGIN, "gradient, chunk 2/4")
    assert "demo on text.txt, 256 tokens a step" in training[0]
    assert re.search(rf"step   3/3  ━+─+  \d\d%  run {DURATION} left", training[1])
    assert re.search(rf"pass   gradient, chunk 2/4  (━+)(─+)  step {DURATION} left", training[2])
    assert re.search(r"loss   \d\.\d{4}   [▁█]{2}   gradient norm [\d.]+   lr \d\.\d\de-0\d", training[3])
    assert re.search(rf"speed  [\d,]+ tokens/s   last step {DURATION}   running {DURATION}", training[4])
    assert re.search(r"memory RAM peak \d\.\d\d of [\d.]+ GiB   RAM pages 0\.\d of 0\.\d MiB", training[5])
    # Above it is what was printed, and nothing else.
    above = shown[: shown.index(training[0])]
    # A wrapped line continues with a space.
    assert [line.split(":")[0] for line in above if not line.startswith(" ")] == [
        "demo", "text.txt", "3 steps of 1 example, learning rate 0.004, chunks of 64 tokens",
        "a checkpoint every 30 minutes; the newest 2 are kept", "K, V and their gradients, attention outputs",
        "held-out loss before training",
    ]  # fmt: skip
    assert terminal.screen.cursor.hidden
    # Bold and dim are not colors.
    assert bool(re.search(rb"\x1b\[[\d;]*[34]\d[;m]", terminal.raw)) == (not env)

    terminal.resume()
    assert terminal.report() == {"exit": 0}
    text = terminal.text()
    assert not set("╭╮╰╯━▁█") & set(text), text
    assert "│ steps         │ 3 " in text and ("Next:" if not flags else "These adapters are of no use") in text
    assert not terminal.screen.cursor.hidden


@pytest.mark.timing
def test_the_panel_follows_a_resized_window(terminal: Terminal) -> None:
    terminal.train(*TOY, columns=80, lines=24, stops=[[1, "gradient", 1]])
    assert terminal.report() == {"at": [1, "gradient", 1]}
    words = ["step   2/3", "gradient, chunk 1/4", "tokens/s", "running", "RAM peak", "RAM pages", "gradient norm"]
    for columns, lines in ((120, 24), (60, 24), (44, 40), (100, 40)):
        terminal.resize(columns, lines)
        shown, _ = terminal.panel(columns - panel.MARGIN, *words)
        # What was printed before is still there, once.
        assert "\n".join(shown).count("held-out loss before training") == 1, "\n".join(shown)
    terminal.resume()
    assert terminal.report() == {"exit": 0}
    assert "╭" not in terminal.text()


@pytest.mark.timing
def test_ctrl_c_is_echoed_and_the_panel_stays_whole(terminal: Terminal) -> None:
    terminal.train(*TOY, columns=80, lines=24, stops=[[2, "gradient", 2]])
    assert terminal.report() == {"at": [2, "gradient", 2]}
    terminal.panel(80 - panel.MARGIN, "gradient, chunk 2/4")
    terminal.press_ctrl_c()
    said = "stopping at the next chunk and saving; Ctrl-C again exits without saving"
    shown, _ = terminal.panel(80 - panel.MARGIN, "gradient, chunk 2/4", above=said)
    assert "\n".join(shown).count(said) == 1
    terminal.resume()
    assert terminal.report() == {"exit": 130}
    text = terminal.text()
    assert "stopped after step 2 of 3; the model after that step is in out/model" in text
    assert "oomb train out/config.yaml --resume_from_checkpoint" in text
    assert "╭" not in text and not terminal.screen.cursor.hidden


@pytest.mark.timing
def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal) -> None:
    terminal.train(*TOY, columns=80, lines=60, TERM="dumb")
    assert terminal.report() == {"exit": 0}
    text = terminal.text()
    assert b"\x1b" not in terminal.raw
    assert len(re.findall(r"^step \d/3  loss \d\.\d{4}  [\d,]+ tok/s  RSS peak", text, re.MULTILINE)) == 3


@pytest.mark.parametrize("width", [40, 56, 76, 92, 116])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_everything_is_shown_at_any_width(width: int, ascii_only: bool) -> None:
    lines = lines_of(EVERYTHING, width, ascii_only=ascii_only)
    assert all(line.cell_len <= width for line in lines)
    text = "\n".join(line.plain for line in lines)
    assert all(word in text for word in SHOWN), text
    assert not ascii_only or text.isascii()
    # A wider panel has fewer lines.
    assert len(lines) >= len(lines_of(EVERYTHING, width + 20))
    assert len(lines_of(EVERYTHING, 116)) == 5


def test_sparkline() -> None:
    assert sparkline([8.0, 4.5, 1.0]) == "█▅▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([3.0, float("nan"), 1.0]) == "█ ▁"
    assert sparkline([float("inf")]) == " "
    assert sparkline([]) == ""


@pytest.mark.timing
def test_the_clock_learns_how_a_step_spends_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def chunk(seconds: float, phase: str, done: int) -> None:
        now[0] += seconds
        clock.chunk_done(phase, done, 2)

    clock = Clock()
    clock.begin(1)
    assert clock.left_s() is None and clock.mean_step_s() is None
    chunk(10.0, "fill", 1)
    # An eighth of the step, by the rule of thumb.
    assert clock.left_s() == pytest.approx(70.0)
    assert clock.mean_step_s() == pytest.approx(80.0)
    now[0] += 5
    assert clock.left_s() == pytest.approx(65.0)
    chunk(5.0, "fill", 2)
    chunk(20.0, "gradient", 1)
    chunk(10.0, "gradient", 2)
    clock.step_done(50.0)
    assert clock.left_s() is None and clock.mean_step_s() == pytest.approx(50.0)
    # The last step shows that the first chunk takes a fifth. This step is 50% slower.
    clock.begin(1)
    assert clock.left_s() == pytest.approx(50.0)
    chunk(15.0, "fill", 1)
    assert clock.done == pytest.approx(0.2)
    assert clock.left_s() == pytest.approx(60.0)
    # An evaluation has one pass and does not count as a step.
    clock.begin(2, forward_only=True)
    chunk(4.0, "fill", 1)
    assert clock.done == pytest.approx(0.25)
    assert clock.left_s() == pytest.approx(12.0)
    assert clock.mean_step_s() == pytest.approx(50.0)


def test_mfu_uses_the_peak_of_the_datasheet() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == pytest.approx(989e12)
    assert peak_flops("NVIDIA GeForce RTX 4090") == pytest.approx(165e12)
    assert peak_flops("Some GPU") is None and peak_flops(None) is None
    info = RunInfo(title="", tokens_per_step=100, flops_per_step=4e14, peak_flops=1e15)
    assert info.mfu(50.0) == pytest.approx(0.2)
    assert RunInfo(title="", tokens_per_step=1).mfu(2.0) is None


class Log:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, **record: Any) -> None:
        self.records.append(json.loads(json.dumps(record)))


class Observed:
    """A run's state with everything that observes it, called as the trainer calls its callbacks."""

    def __init__(self, engine: oomb.Engine, info: RunInfo, trainer_state: TrainerState) -> None:
        self.screen, self.log, self.state = StringIO(), Log(), RunState()
        console, self.meter = Console(file=self.screen, width=200), MemoryMeter(torch.device("cpu"))
        self.recorder = StepRecorder(self.state, self.log, self.meter, engine, info)  # type: ignore[arg-type]
        self.display = TrainingDisplay(console, self.state, self.meter, engine, info)
        self.arguments = TrainingArguments(output_dir="unused", use_cpu=True), trainer_state, TrainerControl()

    def call(self, event: str, **details: Any) -> None:
        for callback in (self.recorder, self.display):
            getattr(callback, event)(*self.arguments, **details)

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()


@pytest.mark.timing
def test_plain_output_reports_within_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = oomb.Engine(load.load_model("demo", device="cpu").train())
    info = RunInfo(title="", tokens_per_step=1000, flops_per_step=1e15, peak_flops=1e14)
    trainer_state = TrainerState(max_steps=2)
    run = Observed(engine, info, trainer_state)
    run.call("on_train_begin")
    run.call("on_step_begin")
    for done in (1, 2):
        now[0] += 20
        run.display.chunk_done("fill", done, 2)
    now[0] += 60
    run.display.chunk_done("gradient", 1, 2)
    now[0] += 60
    run.display.chunk_done("gradient", 2, 2)
    trainer_state.global_step = 1
    run.call("on_step_end")
    logs = {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-4}
    run.call("on_log", logs=logs)
    assert run.lines[0] == "step 1/2  fill pass, chunk 2/2, 25%, 2 m 00 s left"
    assert run.lines[1] == "step 1/2  gradient pass, chunk 1/2, 62%, 1 m 00 s left"
    assert re.fullmatch(
        r"step 1/2  loss 1\.2500  6 tok/s  MFU 6\.2%  RSS peak [\d.]+ GiB  2 m 40 s  2 m 40 s left", run.lines[-1]
    )
    records = run.log.records
    assert records[0] | {"event": "step", "loss": 1.25, "step_s": 160.0, "mfu": 0.0625} == records[0]
    # Trackers get the speed too.
    assert logs["tokens_per_second"] == pytest.approx(6.2, abs=0.1) and logs["mfu"] == 0.0625

    # An evaluation between two steps goes by its name.
    engine.model.lm.eval()
    now[0] += 60
    run.display.chunk_done("fill", 1, 2)
    assert run.lines[-1].startswith("held-out loss  chunk 1/2, 50%")
    run.call("on_evaluate", metrics={"eval_loss": 1.5})
    assert records[-1] == {"event": "held_out", "step": 1, "loss": 1.5}
    assert run.state.held_out == {1: 1.5}
    engine.model.lm.train()
    run.call("on_step_begin")
    now[0] += 60
    run.display.chunk_done("fill", 1, 2)
    assert run.lines[-1].startswith("step 2/2  fill pass, chunk 1/2, ")


def test_a_stop_flag_ends_training_between_two_chunks_or_steps() -> None:
    engine = oomb.Engine(load.load_model("demo", device="cpu"))
    run = Observed(engine, RunInfo(title="", tokens_per_step=1), TrainerState(max_steps=2))
    signals = SignalHandler(print, run.state)
    signals.check()
    run.state.stop_requested = True
    with pytest.raises(StopRequested):
        signals.check()
    run.call("on_step_begin")
    run.call("on_step_end")
    assert run.arguments[2].should_training_stop


def test_a_summary_says_where_a_resumed_run_stands(tmp_path: Path) -> None:
    engine = oomb.Engine(load.load_model("demo", device="cpu"))
    trainer_state, info = TrainerState(max_steps=20, global_step=10), RunInfo(title="", tokens_per_step=100)
    run = Observed(engine, info, trainer_state)
    assert not run.state.has_trained
    run.call("on_train_begin")
    for step in (11, 12):
        run.call("on_step_begin")
        trainer_state.global_step = step
        run.call("on_step_end")
    assert run.state.has_trained and run.state.step == 12
    with run.display.evaluating("held-out loss", 1):
        pass
    console = Console(file=StringIO(), width=100)
    with console.capture() as captured:
        places = {"model": tmp_path}
        console.print(results_table(run.state, info, run.meter, held_out=(2.0, None), wall_s=5.0, places=places))
    assert "2, up to step 12" in captured.get()
    assert "2.0000 → not computed" in captured.get()
    assert "200 (100 a step)" in captured.get()
    run.state.are_weights_lost = True
    assert not run.state.has_trained


def test_half_a_line_of_a_killed_run_stays_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start"}\n{"event": "st')
    with JsonLines(path, append=True) as log:
        log.write(event="start", again=True)
    assert path.read_text().splitlines()[-1] == '{"event": "start", "again": true}'
    with JsonLines(path, append=True) as log:
        log.write(event="end")
    assert len(path.read_text().splitlines()) == 4
