"""Checkpoints are complete or absent, whenever the process ends, and on a full disk."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from checkpoint_runs import names, train, trainer_in, write
from trainings import logged, quick_collection
from transformers import TrainerCallback
from waiting import HANG_S

from oomb.trainers import checkpoints
from oomb.utils import files

ROOT = Path(__file__).parents[2]
NO_PROCESS = 2**30
"""A process number that no system assigns. The number of an ended process could be assigned again."""
pytestmark = pytest.mark.usefixtures(quick_collection.__name__)


def test_a_checkpoint_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-2"
    with checkpoints.write(folder) as partial:
        (partial / "model.safetensors").write_text("weights")
        assert names(folder.parent) == {f".checkpoint-2.partial-{os.getpid()}"}
        assert checkpoints.find(folder.parent) == []
    assert names(folder.parent) == {"checkpoint-2"}
    assert names(folder) == {"model.safetensors", checkpoints.MANIFEST}
    checkpoints.check(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_a_failed_checkpoint_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    write(tmp_path / "checkpoint-1")
    raised = checkpoints.CheckpointNotSaved if error is OSError else error
    with pytest.raises(raised), checkpoints.write(tmp_path / "checkpoint-2") as partial:
        (partial / "model.safetensors").write_text("half")
        raise error
    assert names(tmp_path) == {"checkpoint-1"}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda path: os.truncate(path, 69), "model.safetensors has 69 bytes, but 70"),
        ("adapter/config.json", Path.unlink, "adapter/config.json is missing"),
        ("model.safetensors", lambda path: path.write_bytes(bytes(70)), "checksum of model.safetensors"),
        (checkpoints.MANIFEST, lambda path: os.truncate(path, 30), f"{checkpoints.MANIFEST} cannot be read"),
    ],
)
def test_the_error_for_a_damaged_checkpoint_names_the_file(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    for step in (9, 10, 100):
        write(tmp_path / f"checkpoint-{step}")
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-100"
    damage(tmp_path / "checkpoint-100" / name)
    with pytest.raises(checkpoints.BrokenCheckpoint, match=message):
        checkpoints.check(tmp_path / "checkpoint-100")
    with pytest.warns(UserWarning, match=message):
        assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-10"


def test_a_checkpoint_of_transformers_is_complete_with_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    with pytest.raises(checkpoints.BrokenCheckpoint, match=r"trainer_state\.json"):
        checkpoints.check(folder)
    (folder / "trainer_state.json").write_text('{"global_step"')
    with pytest.raises(checkpoints.BrokenCheckpoint, match=r"trainer_state\.json cannot be read"):
        checkpoints.check(folder)
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    assert checkpoints.latest(tmp_path) == folder
    with pytest.raises(checkpoints.BrokenCheckpoint, match="checkpoint-6"):
        checkpoints.check(tmp_path / "checkpoint-6")
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_a_manifest_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Its checksums of large files cover 64 pieces of 1 MiB."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    content = os.urandom(1 << 20) * 65
    (folder / "optimizer.pt").write_bytes(content)
    starts = [index * (len(content) - 2**20) // 63 for index in range(64)]
    checksum = 0
    for start in starts:
        checksum = crc32(content[start : start + 2**20], checksum)
    files = {"optimizer.pt": {"bytes": len(content), "crc32": checksum}}
    (folder / checkpoints.MANIFEST).write_text(json.dumps({"version": 1, "files": files}, indent=1))
    checkpoints.check(folder)
    with (folder / "optimizer.pt").open("r+b") as file:
        file.write(b"other")
    with pytest.raises(checkpoints.BrokenCheckpoint, match="checksum"):
        checkpoints.check(folder)
    (folder / checkpoints.MANIFEST).write_text(json.dumps({"version": 3, "files": files}))
    with pytest.raises(checkpoints.BrokenCheckpoint, match="version is 3"):
        checkpoints.check(folder)


def test_rotation_deletes_the_oldest_and_keeps_the_best(tmp_path: Path) -> None:
    for step in (2, 4, 10, 6, 8):
        write(tmp_path / f"checkpoint-{step}")
    checkpoints.rotate(tmp_path, None, set())
    checkpoints.rotate(tmp_path, 5, set())
    assert len(names(tmp_path)) == 5
    checkpoints.rotate(tmp_path, 3, {tmp_path / "checkpoint-2", tmp_path / "checkpoint-10"})
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-8", "checkpoint-10"}
    checkpoints.rotate(tmp_path, 1, {tmp_path / "checkpoint-2", tmp_path / "checkpoint-10"})
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-10"}
    checkpoints.rotate(tmp_path, 1, set())
    assert names(tmp_path) == {"checkpoint-10"}


@pytest.mark.timing
def test_leftovers_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid = NO_PROCESS
    try:
        write(tmp_path / "checkpoint-1")
        write(tmp_path / "checkpoint-3", "new")
        write(tmp_path / f".checkpoint-2.old-{pid}")
        write(tmp_path / f".checkpoint-3.old-{pid}", "old")
        for name in (
            f".checkpoint-4.partial-{pid}",
            f".checkpoint-0.gone-{pid}",
            f".checkpoint-5.partial-{os.getpid()}",
        ):
            (tmp_path / name / "checkpoint-4").mkdir(parents=True)
        alive, reused = (
            tmp_path / f".checkpoint-6.partial-{process.pid}",
            tmp_path / f".checkpoint-7.gone-{process.pid}",
        )
        alive.mkdir()
        reused.mkdir()
        # Written before the process with this number started.
        os.utime(reused, times=(1e9, 1e9))
        (tmp_path / ".checkpoint-8.notes").mkdir()
        files.remove_leftovers(tmp_path)
    finally:
        process.communicate(b"\n")
    kept = {"checkpoint-1", "checkpoint-2", "checkpoint-3", alive.name, ".checkpoint-8.notes"}
    assert names(tmp_path) == kept
    assert (tmp_path / "checkpoint-3" / "model.safetensors").read_text() == "new" * 10
    checkpoints.check(tmp_path / "checkpoint-2")


class Killed(BaseException):
    pass


def end_at(patch: pytest.MonkeyPatch, operation: int) -> None:
    """Let file system calls fail from the given one on, as if the process had been killed there."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count >= operation:
                raise Killed
            return function(*positional, **options)

        return call

    # This is not about power cuts, and fsync is slow.
    patch.setattr(os, "fsync", lambda descriptor: None)
    for module, names_of_calls in (
        (os, ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "open", "chmod", "sendfile")),
        (io, ("open",)),
        (builtins, ("open",)),
    ):
        for name in names_of_calls:
            patch.setattr(module, name, counted(getattr(module, name)))


def rewrite(folder: Path) -> None:
    """Write a new checkpoint, replace another and delete the oldest."""
    write(folder / "checkpoint-3")
    write(folder / "checkpoint-2", "second")
    checkpoints.rotate(folder, 2, {folder / "checkpoint-3"})


def test_a_process_that_ends_at_any_moment_leaves_no_broken_checkpoint(tmp_path: Path) -> None:
    in_the_middle = set()
    for operation in range(1, 1000):
        folder = tmp_path / str(operation)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)
            patch.setattr(files, "_in_use", set())
            write(folder / "checkpoint-1")
            write(folder / "checkpoint-2", "first")
            end_at(patch, operation)
            try:
                rewrite(folder)
                is_done = True
            except Killed:
                is_done = False
        found = names(folder)
        for path in checkpoints.find(folder):
            checkpoints.check(path)
            assert len(names(path)) == 4
        in_the_middle |= {name.rsplit("-", 1)[0] for name in found if name.startswith(".")}
        files.remove_leftovers(folder)
        assert not [name for name in names(folder) if name.startswith(".")]
        assert checkpoints.latest(folder) in (folder / "checkpoint-2", folder / "checkpoint-3")
        text = (folder / "checkpoint-2" / "model.safetensors").read_text()
        assert text in ("first" * 10, "second" * 10)
        if is_done:
            assert found == {"checkpoint-2", "checkpoint-3"} and text == "second" * 10
            break
    assert operation > 50
    assert in_the_middle == {
        ".checkpoint-3.partial", ".checkpoint-2.partial", ".checkpoint-2.old", ".checkpoint-1.gone",
    }  # fmt: skip


def fail_from(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, step: int) -> None:
    """Let calls for the checkpoint of one step write half a file and find the disk full."""
    function = getattr(module, name)

    def full(*positional: Any, **options: Any) -> Any:
        path = next(str(value) for value in (*positional, *options.values()) if isinstance(value, str | Path))
        if f"checkpoint-{step}" not in path:
            return function(*positional, **options)
        if not Path(path).is_dir():
            Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, full)


class Saves(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.parametrize("what", ["weights", "optimizer", "manifest"])
def test_a_full_disk_costs_one_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "weights":
        import safetensors.torch
        from transformers import modeling_utils

        assert modeling_utils.safe_save_file is safetensors.torch.save_file
        fail_from(monkeypatch, modeling_utils, "safe_save_file", 3)
    elif what == "optimizer":
        fail_from(monkeypatch, torch, "save", 3)
    else:
        fail_from(monkeypatch, checkpoints, "seal", 3)
    saves = Saves()
    with pytest.warns(UserWarning) as caught:
        trainer = train(tmp_path, save_total_limit=2, callbacks=[saves])
    [message] = [str(warning.message) for warning in caught if "TRAINING CONTINUES" in str(warning.message)]
    assert f"{tmp_path / 'checkpoint-3'} was not written (No space left on device): it takes about" in message
    assert f"are free in {tmp_path}. " in message
    assert "the newest is checkpoint-2" in message
    assert saves.steps == [1, 2, 4]
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-4"}
    assert len(logged(trainer, "loss")) == 4


def test_a_failed_last_checkpoint_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_from(monkeypatch, torch, "save", 4)
    trainer = trainer_in(tmp_path)
    for attempt in (trainer.train, trainer.save_checkpoint):
        with pytest.raises(
            checkpoints.CheckpointNotSaved, match=r"checkpoint-4 was not written .* the newest is checkpoint-3"
        ):
            attempt()
        assert names(tmp_path) == {f"checkpoint-{step}" for step in (1, 2, 3)}
    # There is space again.
    monkeypatch.undo()
    assert trainer.save_checkpoint() == tmp_path / "checkpoint-4"
    checkpoints.check(tmp_path / "checkpoint-4")


def test_a_disk_known_to_be_too_small_is_not_filled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(
        checkpoints.CheckpointNotSaved, match=r"it takes about [\d,]+ bytes.*, 100 bytes are free in"
    ) as caught:
        train(tmp_path, save_steps=4)
    assert names(tmp_path) == set()
    needed = int(str(caught.value).split("about ")[1].split(" bytes")[0].replace(",", ""))
    monkeypatch.undo()
    train(tmp_path, save_steps=4)
    taken = sum(path.stat().st_size for path in (tmp_path / "checkpoint-4").iterdir())
    assert 0.5 * taken < needed <= taken


FULL = """
import sys, warnings
from pathlib import Path
import torch
from checkpoint_runs import checkpoints, train
torch.set_num_threads(1)
written = checkpoints.write
for name in ("foreseen", "weights", "optimizer"):
    if name != "foreseen":
        # Free space does not include quotas, for example.
        checkpoints.write = lambda folder, needed, **rest: written(folder)
    folder = Path(sys.argv[1]) / name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(folder)
        except checkpoints.CheckpointNotSaved as error:
            print("FULL the last:", error)
    for warning in caught:
        if "TRAINING" in str(warning.message):
            print("FULL", warning.message)
    print("FULL", sorted(path.name for path in folder.iterdir()), checkpoints.latest(folder).name)
"""


@pytest.mark.timing
@pytest.mark.slow
def test_a_disk_that_really_is_full(tmp_path: Path) -> None:
    """How safetensors and torch.save fail on file systems with space for two checkpoints and a part of a third."""
    sizes = {"foreseen": "480k", "weights": "420k", "optimizer": "480k"}
    mounts = [f'mkdir "$0/{name}" && mount -t tmpfs -o size={size} none "$0/{name}"' for name, size in sizes.items()]
    command = " && ".join([*mounts, 'exec "$@"'])
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command]
    (tmp_path / "trial").mkdir()
    (tmp_path / "run").mkdir()
    trial = [*shell, str(tmp_path / "trial"), "true"]
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    program = [*shell, str(tmp_path / "run"), sys.executable, "-c", FULL, str(tmp_path / "run")]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("FULL ") for line in done.stdout.splitlines() if line.startswith("FULL")]
    causes = ["No space left on device", "SafetensorError", "RuntimeError"]
    for cause, (last, third, left) in zip(causes, [lines[:3], lines[3:6], lines[6:]], strict=True):
        assert last.startswith("the last:") and "checkpoint-4 was not written" in last
        assert "checkpoint-3 was not written" in third and "TRAINING CONTINUES" in third
        assert cause in last and cause in third and "bytes are free in" in third, third
        assert left == "['checkpoint-1', 'checkpoint-2'] checkpoint-2"


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    os.truncate(tmp_path / "checkpoint-4" / "optimizer.pt", 1000)
    with pytest.raises(checkpoints.BrokenCheckpoint, match=r"checkpoint-4 is damaged: optimizer\.pt has 1,000 bytes"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.warns(UserWarning, match="Looking for an older one"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.log_history[0]["step"] == 1 and trainer.state.global_step == 4


@pytest.mark.timing
def test_a_run_deletes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / f".checkpoint-2.partial-{NO_PROCESS}" / "checkpoint-2").mkdir(parents=True)
    train(tmp_path, save_total_limit=1)
    assert names(tmp_path) == {"checkpoint-4"}
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
