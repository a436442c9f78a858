"""Runs that are copied, moved, overwritten or started twice keep to their own folder and checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import names
from command import TOY_RUN, invoke
from scored_runs import BEST, Scores
from trainings import CHUNKED, Samples, arguments, logged, quick_collection, tiny_model
from transformers import TrainerCallback

from oomb.trainers import checkpoints
from oomb.utils import lock

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)
TOY = [*TOY_RUN, "--max_steps", "4"]


def trainer_in(folder: Path, max_steps: int = 4, **options: Any) -> Scores:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": max_steps, **options}
    callbacks = settings.pop("callbacks", None)
    model, samples = tiny_model(num_hidden_layers=1), Samples(8, 20)
    return Scores(
        model,
        arguments(folder, **settings),
        train_dataset=samples,
        eval_dataset=samples,
        engine_config=CHUNKED,
        callbacks=callbacks,
    )


def resume(folder: Path, **options: Any) -> Scores:
    trainer = trainer_in(folder, 6, **options)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copied_run_leaves_the_original_alone(tmp_path: Path) -> None:
    original, copied = tmp_path / "original", tmp_path / "copied"
    trainer_in(original, save_total_limit=2, **BEST).train()
    assert names(original) == {"checkpoint-2", "checkpoint-4"}
    shutil.copytree(original, copied)
    before = contents(original)
    trainer = resume(copied, save_total_limit=1, **BEST)
    assert contents(original) == before
    # Step 2 is still the best, and the copy has its own checkpoint of it.
    assert names(copied) == {"checkpoint-2"}
    assert Path(trainer.state.best_model_checkpoint) == copied / "checkpoint-2"


def test_a_moved_run_remembers_its_best_checkpoint(tmp_path: Path) -> None:
    original, moved = tmp_path / "original", tmp_path / "moved"
    trainer_in(original, save_total_limit=2, **BEST).train()
    original.rename(moved)
    trainer = resume(moved, save_total_limit=1, **BEST)
    assert trainer.state.best_model_checkpoint == str(moved / "checkpoint-2")
    assert names(moved) == {"checkpoint-2"}
    assert not original.exists()


def test_a_copy_without_the_best_checkpoint_chooses_another(tmp_path: Path) -> None:
    """The best checkpoint was not copied."""
    for is_deleted in (False, True):
        original, copied = tmp_path / f"original-{is_deleted}", tmp_path / f"copied-{is_deleted}"
        trainer_in(original, save_total_limit=2, **BEST).train()
        shutil.copytree(original / "checkpoint-4", copied / "checkpoint-4")
        if is_deleted:
            shutil.rmtree(original / "checkpoint-2")
        before = contents(original)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = resume(copied, save_total_limit=1, **BEST)
        assert names(copied), "the copy ends with no checkpoint at all"
        assert contents(original) == before
        said = [str(warning.message) for warning in caught if "the best checkpoint so far" in str(warning.message)]
        if is_deleted:
            # Step 5 is the best since the resume.
            assert names(copied) == {"checkpoint-5"} and trainer.state.best_metric == 2.0
            assert len(said) == 1 and "checkpoint-2" in said[0]
        else:
            assert trainer.state.best_model_checkpoint == str(original / "checkpoint-2") and not said


def test_a_state_that_names_another_folder_deletes_nothing_there(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    trainer_in(run, save_total_limit=2, **BEST).train()
    for step in (7, 8, 9):
        shutil.copytree(run / "checkpoint-2", other / f"checkpoint-{step}")
    for folder in checkpoints.find(run):
        state = json.loads((folder / checkpoints.STATE).read_text())
        state["best_model_checkpoint"] = str(other / "checkpoint-8")
        (folder / checkpoints.STATE).write_text(json.dumps(state))
        (folder / checkpoints.MANIFEST).unlink()
    before = contents(other)
    resume(run, save_total_limit=1, **BEST)
    assert contents(other) == before
    assert names(run)


def test_a_copied_run_of_oomb_train_continues_in_its_own_folder(places: Path) -> None:
    assert invoke("train", *TOY, "--save_steps", "2").exit_code == 0
    shutil.copytree("out", "copy")
    before = contents(Path("out"))
    done = invoke("train", "copy/config.yaml", "--resume_from_checkpoint", "--max_steps", "6")
    assert done.exit_code == 0, done.output
    assert contents(Path("out")) == before
    assert "checkpoint-6" in names(Path("copy"))
    assert "was moved or copied to" in done.output
    # A settings file in another place means the folder that it names.
    shutil.copy("out/config.yaml", "config.yaml")
    done = invoke("train", "config.yaml", "--resume_from_checkpoint", "--max_steps", "8")
    assert done.exit_code == 0 and "checkpoint-8" in names(Path("out")), done.output


class Crash(TrainerCallback):
    """Stands in for a kill."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("flags", [[], ["--save_total_limit", "2"]])
def test_an_overwritten_run_is_not_resumed(places: Path, flags: list[str], monkeypatch: Any) -> None:
    """After an overwrite and a kill, a resume takes the new run's checkpoint, although the old run got further."""
    from oomb.cli.train import run

    assert invoke("train", *TOY, "--save_steps", "1", "--max_steps", "6").exit_code == 0
    build_trainer = run.prepare.build_trainer

    def crashing(*args: Any, **kwargs: Any) -> Any:
        trainer = build_trainer(*args, **kwargs)
        trainer.add_callback(Crash(3))
        return trainer

    monkeypatch.setattr(run.prepare, "build_trainer", crashing)
    anew = [*TOY, "--save_steps", "1", "--seed", "7", "--max_steps", "6", "--overwrite_output_dir", *flags]
    invoke("train", *anew)
    monkeypatch.undo()
    monkeypatch.chdir(places / "work")
    steps = [checkpoints.step_of(path) for path in checkpoints.find(Path("out"))]
    assert max(steps, default=None) == 3, f"the newest checkpoint of the new run is 3, and there are {steps}"
    assert len(steps) == (2 if flags else 3)
    done = invoke("train", "out/config.yaml", "--resume_from_checkpoint")
    assert done.exit_code == 0, done.output
    invoke("train", *TOY, "--seed", "7", "--max_steps", "6", "--output_dir", "whole")
    assert Path("out/model/model.safetensors").read_bytes() == Path("whole/model/model.safetensors").read_bytes()
    # The checkpoints to keep are still there.
    assert [checkpoints.step_of(path) for path in checkpoints.find(Path("out/_replaced-1"))] == [1, 2, 3, 4, 5, 6]


def test_a_trainer_that_starts_over_does_not_resume_the_earlier_run(tmp_path: Path) -> None:
    trainer_in(tmp_path, 4).train()
    second = trainer_in(tmp_path, 4, callbacks=[Crash(2)], seed=8, save_total_limit=2)
    with pytest.raises(KeyboardInterrupt):
        second.train()
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-2"
    resumed = trainer_in(tmp_path, 4, seed=8, save_total_limit=2)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer_in(tmp_path / "whole", 4, seed=8)
    whole.train()
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_going_back_to_an_earlier_checkpoint_sets_later_ones_aside(tmp_path: Path) -> None:
    trainer_in(tmp_path, 4).train()
    back = trainer_in(tmp_path, 4, callbacks=[Crash(2)], learning_rate=1e-4)
    with pytest.raises(KeyboardInterrupt):
        back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-2"


def test_a_run_that_saves_nothing_moves_nothing(tmp_path: Path) -> None:
    trainer_in(tmp_path, 3).train()
    trainer_in(tmp_path, 2, save_strategy="no").train()
    with pytest.raises(KeyboardInterrupt):
        trainer_in(tmp_path, 4, callbacks=[Crash(0)]).train()
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def test_checkpoints_that_cannot_be_moved_cost_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_in(tmp_path, 3).train()
    mkdir, calls = Path.mkdir, 0

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        if self.name.startswith("_replaced"):
            calls += 1
            if calls == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.warns(UserWarning, match=r"No space left.*TRAINING CONTINUES"):
        trainer_in(tmp_path, 2).train()
    assert names(tmp_path) == {"checkpoint-2", "_replaced-1"}


def test_the_best_checkpoint_stays_when_a_run_goes_back_and_forth(tmp_path: Path) -> None:
    trainer_in(tmp_path, 3, **BEST).train()
    trainer_in(tmp_path, 3, **BEST, seed=9).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2", "checkpoint-3", "_replaced-1"}
    forth = trainer_in(tmp_path, 4, **BEST)
    forth.train(resume_from_checkpoint=str(tmp_path / "_replaced-1" / "checkpoint-3"))
    assert Path(forth.state.best_model_checkpoint) == tmp_path / "checkpoint-2"
    assert forth.state.best_metric == 1.0


def test_the_best_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    """A checkpoint was copied into another run that has a checkpoint with the name of its best."""
    own, other = tmp_path / "own", tmp_path / "other"
    trainer_in(own, 4, **BEST).train()
    trainer_in(other, 3, **BEST, learning_rate=1e-4).train()
    shutil.copytree(own / "checkpoint-4", other / "checkpoint-4")
    trainer = trainer_in(other, 5, **BEST)
    trainer.train(resume_from_checkpoint=str(other / "checkpoint-4"))
    assert trainer.state.best_model_checkpoint == str(own / "checkpoint-2")


def test_a_checkpoint_that_is_a_link_is_resumed_and_kept(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    trainer_in(run, 3).train()
    store.mkdir()
    for step in (2, 3):
        (run / f"checkpoint-{step}").rename(store / f"checkpoint-{step}")
        (run / f"checkpoint-{step}").symlink_to(Path("..") / "store" / f"checkpoint-{step}")
    trainer_in(run, 4).train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert (run / "checkpoint-2").is_symlink() and (run / "_replaced-1" / "checkpoint-3").is_symlink()
    checkpoints.check(run / "_replaced-1" / "checkpoint-3")
    trainer_in(run, 5, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(store) == {"checkpoint-2", "checkpoint-3"}


def test_edited_settings_are_honored(places: Path) -> None:
    assert invoke("train", *TOY).exit_code == 0
    config = Path("out/config.yaml")
    config.write_text(config.read_text().replace(str(places / "work" / "out"), str(places / "work" / "other")))
    before = contents(Path("out"))
    done = invoke("train", "out/config.yaml", "--overwrite_output_dir")
    assert done.exit_code == 0, done.output
    assert contents(Path("out")) == before and "model" in names(Path("other"))


@pytest.mark.timing
def test_a_lock_held_by_workers_of_a_killed_run_is_waited_for(tmp_path: Path) -> None:
    """A forked process keeps the lock, as data loader workers do until they notice that their parent is gone."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from oomb.utils import lock\n"
        "with lock.locked(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n"
        "        sys.stdin.read()\n"
        "        time.sleep(1)\n"
        "        os._exit(0)\n"
        "    print('locked', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    process.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "ORPHANS_S", 0.0)
        with pytest.raises(ValueError, match="another run"), lock.locked(tmp_path):
            pass
        patch.setattr(lock, "ORPHANS_S", 900.0)
        process.stdin.close()
        with lock.locked(tmp_path):
            pass


@pytest.mark.timing
def test_two_trainers_on_one_folder_are_refused(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Wait(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inside.set()
            go_on.wait()

    first, second = trainer_in(tmp_path, callbacks=[Wait()]), trainer_in(tmp_path, max_steps=1)
    thread = threading.Thread(target=first.train)
    thread.start()
    try:
        while not inside.wait(0.1):
            assert thread.is_alive()
        refused = None
        # If this does not raise, it would wait for the lock of the first trainer on its model.
        try:
            second.train()
        except ValueError as error:
            refused = str(error)
    finally:
        go_on.set()
        thread.join()
    assert refused is not None, "two trainers wrote to one folder"
    assert "another run" in refused and str(tmp_path) in refused
    assert second.state.global_step == 0
    # The folder is unlocked again.
    trainer_in(tmp_path, max_steps=1).train()
