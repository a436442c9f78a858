"""Test that a trained model is saved elsewhere if the disk of its run fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from train_runs import TOY, events

from oomb.cli import errors
from oomb.cli.train import output_dir, save
from oomb.cli.train.display import TrainingDisplay
from oomb.trainers import checkpoints
from oomb.utils import files


def stale(*args: object, **kwargs: object) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_an_inaccessible_home_is_skipped(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_dir = Path.is_dir

    def forbidden(self: Path) -> bool:
        if self == places / "home":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return is_dir(self)

    monkeypatch.setattr(Path, "is_dir", forbidden)
    assert list(save._other_places()) == [places / "work", places / "temporary"]
    # Other places are not even looked at if the run's folder works.
    monkeypatch.setattr(save, "_other_places", lambda: (stale() for _ in range(1)))
    done = invoke("train", *TOY)
    assert done.exit_code == 0, done.output
    assert Path("out/model/config.json").exists()


def test_a_disk_that_cannot_be_listed_fails_like_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "find", stale)
    monkeypatch.setattr(files, "free_bytes", lambda folder: 10)
    with (
        pytest.raises(checkpoints.CheckpointNotSaved, match=r"cannot be listed \(Stale file handle\)"),
        checkpoints.write(tmp_path / "checkpoint-1", 11),
    ):
        pass
    assert output_dir.newest_checkpoint(tmp_path) is None


def test_a_run_ended_by_a_failing_disk_saves_its_model_elsewhere(
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the second step on, every access to the run's folder fails."""
    on_log, failing = TrainingDisplay.on_log, []
    iterdir, free_bytes = Path.iterdir, files.free_bytes

    def fail(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        on_log(self, args, state, control, **kwargs)
        if state.global_step == 2:
            failing.append(True)
            stale()

    def is_gone(path: Path) -> bool:
        return bool(failing) and (places / "work" / "out") in (path.absolute(), *path.absolute().parents)

    monkeypatch.setattr(TrainingDisplay, "on_log", fail)
    monkeypatch.setattr(Path, "iterdir", lambda self: stale() if is_gone(self) else iterdir(self))
    monkeypatch.setattr(files, "free_bytes", lambda folder: stale() if is_gone(folder) else free_bytes(folder))
    done = invoke("train", *TOY, "--save_total_limit", "2")
    assert done.exit_code == errors.EXIT_INCOMPLETE, done.output
    [folder] = (places / "home").glob("oomb-out-*")
    assert f"THE MODEL IS NOT IN out, BUT IN {folder / 'model'}." in done.output
    assert (folder / "model" / "model.safetensors").exists() and events(folder).count("step") == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_fsync_can_hold_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with checkpoints.write(tmp_path / "checkpoint-1") as folder:
        (folder / "file").write_text("text")
    checkpoints.check(tmp_path / "checkpoint-1")
