"""Test that a run of `oomb train` keeps what it trained when the disk is full or the terminal is gone."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import trainer_in
from command import invoke
from terminal import Terminal
from train_runs import TOY, events
from transformers import PreTrainedModel
from waiting import HANG_S

from oomb.cli import errors
from oomb.cli.errors import EXIT_HUNG_UP, EXIT_TERMINATED
from oomb.cli.train import run, save_timer
from oomb.cli.train import save as save_module
from oomb.cli.train.display import TrainingDisplay
from oomb.cli.train.save_timer import SaveTimer
from oomb.cli.train.signals import SafeStream, SignalHandler
from oomb.cli.train.state import RunState
from oomb.models import load
from oomb.trainers import checkpoints
from oomb.utils import files
from oomb.utils.metrics import JsonLines
from oomb.utils.units import gib

ROOT = Path(__file__).parents[2]


def full(*args: object, **kwargs: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Disk:
    """File on a disk that other programs fill and empty. A write stores as much as fits."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 10**9

    def write(self, text: bytes) -> int:
        if self.room == 0:
            full()
        written = self.file.write(text[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def log_on(path: Path) -> tuple[JsonLines, Disk]:
    log = JsonLines(path)
    log._file = Disk(log._file)
    return log, log._file


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, disk = log_on(path)
    log.write(step=1)
    for room in (0, 5, 12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            disk.room = room
            before = path.read_bytes()
            log.write(step=2, room=room)
            # Part of the line was written, and is removed again.
            assert path.read_bytes() == before
            log.write(step=3, room=room)
            assert path.read_bytes() == before
        # A garbage collection in between may warn of files that earlier tests left open.
        [said] = [str(one.message) for one in caught if one.category is UserWarning]
        assert said.startswith(f"{path} cannot be written (No space left on device)"), said
        disk.room = 10**9
        log.write(step=4, room=room)
    log.close()
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1}, *({"step": step, "room": room} for room in (0, 5, 12) for step in (2, 3, 4))]


def test_lines_that_never_fit_are_reported_at_the_end(tmp_path: Path) -> None:
    log, disk = log_on(tmp_path / "metrics.jsonl")
    disk.room = 20
    with pytest.warns(UserWarning, match="in memory"):
        for step in range(4):
            log.write(step=step)
    with pytest.warns(UserWarning, match=r"the last of .*metrics\.jsonl, 3 lines, could not be written \(No space"):
        log.close()
    assert log.path.read_text() == '{"step": 0}\n'


def test_a_partial_line_that_cannot_be_removed_at_once_is_removed_later(tmp_path: Path) -> None:
    log, disk = log_on(tmp_path / "metrics.jsonl")
    disk.room, disk.truncate = 5, full
    with pytest.warns(UserWarning):
        log.write(step=1)
    assert log.path.read_text() == '{"ste'
    del disk.truncate
    disk.room = 100
    log.close()
    assert log.path.read_text() == '{"step": 1}\n'


def test_all_lines_move_to_another_place(tmp_path: Path) -> None:
    log, disk = log_on(tmp_path / "metrics.jsonl")
    log.write(step=1)
    disk.room = 7
    with pytest.warns(UserWarning):
        log.write(step=2)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        log.move_to(tmp_path / "file" / "metrics.jsonl")
    other = tmp_path / "other" / "metrics.jsonl"
    log.move_to(other)
    assert disk.closed and log.path == other
    log.write(step=3)
    log.close()
    assert [json.loads(line)["step"] for line in other.read_text().splitlines()] == [1, 2, 3]
    assert names(other.parent) == {"metrics.jsonl"}
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_checkpoint_leaves_space_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)
    with checkpoints.write(tmp_path / "checkpoint-1", 400, keep_free_bytes=600):
        pass
    said = r"about 400 bytes, 601 bytes must stay free for the final save, 1,000 bytes are free in"
    too_much = checkpoints.write(tmp_path / "checkpoint-2", 400, keep_free_bytes=601)
    with pytest.raises(checkpoints.CheckpointNotSaved, match=said), too_much:
        pytest.fail("nothing is to be written")
    assert names(tmp_path) == {"checkpoint-1"}


def test_a_checkpoint_may_use_the_space_of_the_one_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, save_total_limit=1, max_steps=2)
    trainer.train()
    size = files.folder_bytes(tmp_path / "checkpoint-2")
    assert size > 100_000
    trainer.state.global_step = 3
    needed = trainer._checkpoint_bytes()
    trainer.keep_free_bytes = size + 1000
    monkeypatch.setattr(files, "free_bytes", lambda folder: needed + 999)
    with pytest.raises(checkpoints.CheckpointNotSaved, match="1,000 bytes must stay free"):
        trainer._save_checkpoint(trainer.model, None)
    monkeypatch.setattr(files, "free_bytes", lambda folder: needed + 1000)
    trainer._save_checkpoint(trainer.model, None)
    assert names(tmp_path) == {"checkpoint-3"}
    # The same holds for checkpoints by the clock.
    trainer.args.save_total_limit, trainer.state.global_step = None, 4
    trainer.about_to_delete = lambda: [tmp_path / "checkpoint-3"]
    trainer._save_checkpoint(trainer.model, None)
    trainer.about_to_delete, trainer.state.global_step = list, 5
    with pytest.raises(checkpoints.CheckpointNotSaved, match=f"{size + 1000:,} bytes"):
        trainer._save_checkpoint(trainer.model, None)


def test_what_a_checkpoint_by_the_clock_replaces(tmp_path: Path) -> None:
    by_time = SaveTimer(30)
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 2:
            (tmp_path / f"checkpoint-{step}" / save_timer.MARK).touch()
    assert by_time.about_to_delete(tmp_path) == []
    by_time._is_ours = True
    assert by_time.about_to_delete(tmp_path) == [tmp_path / "checkpoint-1"]
    (tmp_path / "checkpoint-1" / save_timer.MARK).unlink()
    assert by_time.about_to_delete(tmp_path) == []


def test_a_run_reserves_space_for_its_model(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    written = checkpoints.write

    def spied(folder: Path, needed_bytes: int = 0, keep_free_bytes: int = 0) -> Any:
        asked.append(keep_free_bytes)
        return written(folder, needed_bytes, keep_free_bytes)

    monkeypatch.setattr(checkpoints, "write", spied)
    done = invoke("train", *TOY, "--save_steps", "2")
    assert done.exit_code == 0, done.output
    weights = Path("out/model/model.safetensors").stat().st_size
    assert len(asked) == 2
    assert all(weights - 100_000 < kept - save_module.EXTRA_BYTES <= weights for kept in asked)


def test_a_failure_to_delete_or_mark_a_checkpoint_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.warns(UserWarning, match=r"checkpoint-1 could not be deleted \(No space left"):
            checkpoints.rotate(tmp_path, 1, {tmp_path / "checkpoint-2"})
    by_time = SaveTimer(30)
    by_time._is_ours = True
    state = argparse.Namespace(
        output_dir=str(tmp_path), save_total_limit=None, global_step=2, is_world_process_zero=True
    )
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", full)
        with pytest.warns(UserWarning, match=r"checkpoint-2 could not be marked"):
            by_time.on_save(state, state, None)  # type: ignore[arg-type]


def fail_to_save(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Let `save_pretrained` fail halfway in these places."""
    save = PreTrainedModel.save_pretrained

    def save_pretrained(self: Any, folder: Path, *args: Any, **kwargs: Any) -> None:
        save(self, folder, *args, **kwargs)
        # Checkpoints next to the model are complete.
        if "checkpoint" not in str(folder) and any(place in str(Path(folder).absolute()) for place in places):
            (Path(folder) / "config.json").unlink()
            full()

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_pretrained)


@pytest.mark.parametrize(("failing", "found"), [(["/out/"], "home"), (["/out/", "/home/"], "work")])
def test_a_model_that_does_not_fit_is_saved_elsewhere(
    places: Path, monkeypatch: pytest.MonkeyPatch, failing: list[str], found: str
) -> None:
    fail_to_save(monkeypatch, *failing)
    done = invoke("train", *[flag for flag in TOY if flag != "--no_report"])
    assert done.exit_code == errors.EXIT_INCOMPLETE == 1, done.output
    [folder] = (places / found).glob("oomb-out-*")
    assert re.fullmatch(r"oomb-out-\d{8}-\d{6}", folder.name)
    assert f"THE MODEL IS NOT IN out, BUT IN {folder / 'model'}." in done.output
    assert re.search(r"could not be saved in out \(No space left on device; [\d.]+ GiB were free\)", done.output)
    assert load.load_model(str(folder / "model"), device="cpu") is not None
    assert events(folder) == ["start", "step", "step", "step", "end"]
    assert names(folder) == {"model", "metrics.jsonl", "config.yaml", "report.html"}
    # The failed attempt left nothing.
    assert names(Path("out")) == {"metrics.jsonl", "config.yaml"}
    assert events(Path("out")) == ["start", "step", "step", "step"]
    assert [path for path in places.glob("*/oomb-*") if path != folder] == []


def test_places_known_to_be_too_small_are_not_tried(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(folder: Path) -> int:
        is_there = (places / "temporary") in (folder, *folder.parents)
        return 10**9 if is_there or not Path("out/metrics.jsonl").exists() else 1000

    monkeypatch.setattr(files, "free_bytes", free)
    done = invoke("train", *TOY)
    assert done.exit_code == 1, done.output
    [folder] = (places / "temporary").glob("oomb-out-*")
    small = [f"{places / name} (0.0 MiB free)" for name in ("home", "work")]
    assert f"saved in out (0.0 MiB free), {', '.join(small)}" in done.output
    assert (folder / "model" / "model.safetensors").is_file()
    assert names(places / "home") == set()


def test_a_model_that_fits_nowhere_is_one_message(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load.load_model("demo", device="cpu")
    (places / "home").rmdir()
    monkeypatch.setattr(files, "sync_files", full)
    with pytest.raises(save_module.ModelNotSaved) as caught:
        save_module.save_somewhere(model, None, Path("out"), print)
    said = str(caught.value)
    assert f"needs {gib(checkpoints.weight_bytes(model))} and could not be saved in any of out (No space left" in said
    assert f"{places / 'work'} (No space" in said and f"{places / 'temporary'} (No space" in said
    assert said.endswith("name an --output_dir on another disk, and train again: there is no checkpoint")
    assert [*places.rglob("*model*"), *places.rglob("oomb-*")] == []
    Path("out/checkpoint-3").mkdir(parents=True)
    Path("out/checkpoint-3/trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(save_module.ModelNotSaved, match="resume from out/checkpoint-3"):
        save_module.save_somewhere(model, None, Path("out"), print)


def test_an_existing_folder_is_not_written_to(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module.time, "strftime", lambda form: "now")
    (places / "home" / "oomb-out-now" / "model").mkdir(parents=True)
    fail_to_save(monkeypatch, "/out/")
    said: list[str] = []
    found = save_module.save_somewhere(load.load_model("demo", device="cpu"), None, Path("out"), said.append)
    assert found == places / "work" / "oomb-out-now" / "model"
    assert f"{places / 'home'} (File exists" in said[0]
    assert names(places / "home" / "oomb-out-now" / "model") == set()


def test_a_report_that_fails_is_a_warning(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError("by zero")):
        monkeypatch.setattr(run, "write_report", lambda folder, error=error: (_ for _ in ()).throw(error))
        done = invoke("train", *[flag for flag in TOY if flag != "--no_report"], "--overwrite_output_dir")
        assert done.exit_code == 0, done.output
        assert f"the report was not written ({type(error).__name__}: {error}); to try again:" in done.output
        assert "report out" in done.output and "Done" in done.output


def test_an_os_error_during_training_loses_no_step(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_log = TrainingDisplay.on_log

    def failing(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_log(self, args, state, control, **kwargs)
        if state.global_step == 2:
            # Like a tracker that writes files of its own.
            full()

    monkeypatch.setattr(TrainingDisplay, "on_log", failing)
    done = invoke("train", *TOY)
    assert done.exit_code == errors.EXIT_INCOMPLETE, done.output
    assert "error: [Errno 28] No space left on device" in done.output
    assert "stopped after step 2 of 3; the model after that step is in out/model" in done.output
    checkpoints.check(Path("out/checkpoint-2"))
    monkeypatch.undo()
    monkeypatch.chdir(places / "work")
    resumed = invoke("train", "out/config.yaml", "--resume_from_checkpoint")
    assert resumed.exit_code == 0, resumed.output
    assert events(Path("out")).count("step") == 3


FULL = """
import os, sys, warnings
from pathlib import Path
import torch
from oomb.cli import main
from oomb.cli.train.display import TrainingDisplay
torch.set_num_threads(1)
on_step_end = TrainingDisplay.on_step_end

def fill(self, args, state, control, **kwargs):
    on_step_end(self, args, state, control, **kwargs)
    if state.global_step == 2:
        with open("out/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1000))
            except OSError as error:
                print("FULL", error)

TrainingDisplay.on_step_end = fill
raise SystemExit(main.app(["train", *sys.argv[1:]], standalone_mode=False))
"""


@pytest.mark.timing
@pytest.mark.slow
def test_a_disk_that_fills_up_during_training(places: Path) -> None:
    """On a real file system: metrics, checkpoints and the model no longer fit after the second step."""
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounted = 'mkdir out && mount -t tmpfs -o size=8m none out && "$@"; code=$?; cp -r out left; exit $code'
    if shutil.which("unshare") is None or subprocess.run([*shell, mounted, "sh", "true"]).returncode:
        pytest.skip("this user may not mount a file system")
    for name in ("out", "left"):
        shutil.rmtree(name)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "COLUMNS": "200", "TMPDIR": str(places / "temporary")}
    flags = [*TOY, "--max_steps", "20", "--save_steps", "4"]
    program = [*shell, mounted, "sh", sys.executable, "-c", FULL, *flags]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert "FULL [Errno 28] No space left on device" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("out/metrics.jsonl cannot be written (No space left on device)") == 1
    assert "checkpoint-4 was not written" in done.stdout
    [folder] = (places / "home").glob("oomb-out-*")
    assert f"THE MODEL IS NOT IN out, BUT IN {folder / 'model'}" in done.stdout
    assert (folder / "model" / "model.safetensors").stat().st_size > 1_000_000
    assert events(folder) == ["start", *["step"] * 20, "end"]
    assert names(Path("left")) == {"metrics.jsonl", "config.yaml", "filler"}
    # Only complete lines, as many as fit.
    assert 2 <= events(Path("left")).count("step") < 20


@pytest.fixture
def hangup_by_default() -> Iterator[None]:
    """Restore the default, because nohup makes the tests ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.timing
@pytest.mark.usefixtures("hangup_by_default")
def test_a_lost_connection_stops_the_run() -> None:
    said: list[str] = []
    state = RunState()
    with SignalHandler(said.append, state) as interrupts:
        interrupts.stop("stopping")
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert state.stop_requested and state.terminated
        assert said == ["SIGHUP: stopping at the next chunk"]
        # The first signal decides the exit code.
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.exit_code == EXIT_HUNG_UP == 129
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    state = RunState()
    with SignalHandler(said.append, state) as interrupts:
        interrupts.protect("saving")
        interrupts.release()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.exit_code == EXIT_TERMINATED
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    state = RunState()
    with SignalHandler(said.append, state) as interrupts:
        signal.raise_signal(signal.SIGHUP)
        assert not state.terminated
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.timing
def test_printing_raises_no_os_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        lasting = SafeStream(pipe)
        assert lasting.write("dropped") == 7
        lasting.flush()
        print("dropped", file=lasting, flush=True)
        lasting.writelines(["dropped\n"])
        assert lasting.encoding == pipe.encoding and lasting.fileno() == writing
        # Closing the pipe discards what is left in it.
    buffer = io.StringIO()
    print("kept", file=SafeStream(buffer))
    assert buffer.getvalue() == "kept\n"


@pytest.mark.timing
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_tried_again(tmp_path: Path) -> None:
    with open("/dev/full", "w", buffering=1) as stream, (tmp_path / "log").open("w") as file:
        lasting = SafeStream(stream)
        lasting.write("one\n")
        lasting.flush()
        os.dup2(file.fileno(), stream.fileno())
        lasting.write("two\n")
        assert (tmp_path / "log").read_text().endswith("two\n")
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream.fileno())
        lasting.write("three\n")
        lasting.end()


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_whose_output_does_not_fit_ends_normally(places: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    # Only during training: a disk that is full before is an error.
    program = "import sys; from oomb.cli import main; from oomb.cli.train import display\n"
    program += "own = display.TrainingDisplay.on_train_begin\n"
    program += "def begin(*args, **kwargs):\n    import os\n    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    program += (
        "    own(*args, **kwargs)\ndisplay.TrainingDisplay.on_train_begin = begin\nmain.app(['train', *sys.argv[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", program, *TOY], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("out/model/model.safetensors").is_file()


@pytest.mark.timing
@pytest.mark.parametrize("on_hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_run_outlives_its_terminal(places: Path, on_hangup: signal.Handlers) -> None:
    pytest.importorskip("pyte")
    terminal = Terminal(places / "work", on_hangup)
    try:
        terminal.train(*TOY, columns=100, lines=30, stops=[[1, "gradient", 2]])
        assert "at" in terminal.report()
        terminal.hang_up()
        terminal.resume()
        is_ignored = on_hangup == signal.SIG_IGN
        assert terminal.report() == {"exit": 0 if is_ignored else EXIT_HUNG_UP}
        checkpoint = Path("out/checkpoint-1")
        assert checkpoint.is_dir() != is_ignored
        assert Path("out/model/model.safetensors").is_file()
        assert events(Path("out")) == ["start", *["step"] * (3 if is_ignored else 1), "end"]
        # Python would exit with 120 if it could not flush its output.
        assert terminal.end() == 0
    finally:
        terminal.close()
