"""A run that is stopped and resumed is bitwise equal to one that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainings import CHUNKED, Samples, arguments, logged, quick_collection, tiny_model
from transformers import TrainerCallback

import oomb
from oomb.trainers import checkpoints

NUM_STEPS = 7
pytestmark = pytest.mark.usefixtures(quick_collection.__name__)


def dropout_model(seed: int) -> Any:
    return tiny_model("phi", seed, num_hidden_layers=1, resid_pdrop=0.1, embd_pdrop=0.1)


def lora_model(seed: int) -> Any:
    peft = pytest.importorskip("peft")
    model = tiny_model(num_hidden_layers=1)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def bfloat16_model(seed: int) -> Any:
    return tiny_model(seed=seed, num_hidden_layers=1, dtype=torch.bfloat16)


# Model, further arguments of `oomb.Trainer`, and training arguments. Ten sequences in batches of two: an epoch has five
# steps. A batch without padding has three chunks, so `progress` is called six times per step.
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dropout": (dropout_model, {}, {}),
    "padded": (dropout_model, {}, {}),
    "lora": (lora_model, {}, {}),
    "accumulation": (dropout_model, {}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}),
    "offloaded": (dropout_model, {"optimizer": "offloaded_adamw"}, {"weight_decay": 0.1}),
    "bfloat16": (bfloat16_model, {"optimizer": "offloaded_adamw_bf16"}, {}),
    "8bit": (bfloat16_model, {"optimizer": "offloaded_adamw_8bit"}, {}),
    "grouped": (dropout_model, {}, {"train_sampling_strategy": "group_by_length"}),
    "logged seldom": (dropout_model, {}, {"logging_steps": 3}),
    "evaluated": (dropout_model, {}, {"eval_strategy": "steps", "eval_steps": 2}),
}


def trainer_of(name: str, folder: Path, *, seed: int = 1, **more: Any) -> oomb.Trainer:
    model, extra, settings = RUNS[name]
    samples = Samples(10, 37, padded=name == "padded")
    options = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 1, **settings, **more}
    return oomb.Trainer(
        model(seed),
        arguments(folder, **options),
        train_dataset=samples,
        eval_dataset=samples,
        engine_config=CHUNKED,
        **extra,
    )


def assert_same_run(one: oomb.Trainer, other: oomb.Trainer) -> None:
    for kind in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert logged(one, kind) == logged(other, kind), kind
    assert len(logged(one, "loss")) >= 2
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path: Path, name: str) -> None:
    whole = trainer_of(name, tmp_path / "whole")
    whole.train()
    # Within the first epoch, at its end, and in the second; with "accumulation" an epoch has three steps.
    for step in {"dropout": (2, 5, 6), "accumulation": (1, 3, 5)}.get(name, (2, 6)):
        resumed = trainer_of(name, tmp_path / f"from-{step}", seed=9, save_strategy="no")
        # A script need not use the same seed before it resumes.
        torch.manual_seed(1000 + step)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert resumed.state.global_step == NUM_STEPS
        assert_same_run(whole, resumed)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """What the tests above compare depends on the random numbers."""
    one, other = trainer_of("dropout", tmp_path / "a"), trainer_of("dropout", tmp_path / "b", seed=1)
    one.train()
    other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    torch.save(torch.load(tmp_path / "a" / "checkpoint-4" / "rng_state.pth", weights_only=False), tmp_path / "rng")
    assert_same_run(one, other)
    shutil.copy(tmp_path / "rng", tmp_path / "a" / "checkpoint-5" / "rng_state.pth")
    (tmp_path / "a" / "checkpoint-5" / checkpoints.MANIFEST).unlink()
    drawn_again = trainer_of("dropout", tmp_path / "c")
    drawn_again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert logged(drawn_again, "loss")[:5] == logged(one, "loss")[:5]
    assert logged(drawn_again, "loss")[5:] != logged(one, "loss")[5:]


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "event"),
    [("accumulation", 34), ("evaluated", 14), ("evaluated", 58), ("logged seldom", 23), ("8bit", 13)],
)
def test_a_run_stopped_within_a_step_saves_the_step_before(tmp_path: Path, name: str, event: int) -> None:
    """A stop does not wait for the end of a step that may take minutes."""
    whole = trainer_of(name, tmp_path / "whole", save_strategy="no")
    whole.train()
    stopped = trainer_of(name, tmp_path / "run", save_strategy="no")
    stop_at(stopped, event)
    step = stopped.state.global_step
    assert 0 < step < NUM_STEPS
    folder = stopped.save_checkpoint()
    assert folder == tmp_path / "run" / f"checkpoint-{step}"
    assert stopped.save_checkpoint() == folder
    resumed = trainer_of(name, tmp_path / "run", seed=9, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    if event == 14:
        # The interrupted evaluation is not repeated, and training is not affected.
        assert len(logged(resumed, "eval_loss")) == len(logged(whole, "eval_loss")) - 1
        whole.state.log_history = [record for record in whole.state.log_history if record.get("step") != step]
        resumed.state.log_history = [record for record in resumed.state.log_history if record.get("step") != step]
    assert_same_run(whole, resumed)


def test_a_run_stopped_in_its_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    trainer = trainer_of("dropout", tmp_path / "a")
    stop_at(trainer, 2)
    assert trainer.save_checkpoint() is None
    assert not checkpoints.find(tmp_path / "a")
    trainer_of("dropout", tmp_path / "a", max_steps=2).train()
    kept = (tmp_path / "a" / "checkpoint-2").rename(tmp_path / "kept")
    resumed = trainer_of("dropout", tmp_path / "b", save_strategy="no")
    stop_at(resumed, 2, resume_from_checkpoint=str(kept))
    assert resumed.save_checkpoint() == kept
    assert not checkpoints.find(tmp_path / "b")
    stop_at(resumed, 14, resume_from_checkpoint=str(kept))
    assert resumed.save_checkpoint() == tmp_path / "b" / "checkpoint-4"


def stop_at(trainer: oomb.Trainer, event: int, **options: Any) -> None:
    """Train until the engine has reported progress `event` times."""
    seen = 0

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen == event:
            raise Stop

    trainer.engine.progress = progress
    with pytest.raises(Stop):
        trainer.train(**options)


def test_saving_during_training_changes_nothing(tmp_path: Path) -> None:
    whole = trainer_of("accumulation", tmp_path / "whole", save_strategy="no", include_num_input_tokens_seen="all")
    whole.train()
    saving = trainer_of("accumulation", tmp_path / "run", save_strategy="no", include_num_input_tokens_seen="all")
    saving.engine.progress = lambda *_: saving.save_checkpoint()
    saving.train()
    assert [checkpoints.step_of(path) for path in checkpoints.find(tmp_path / "run")] == list(range(1, NUM_STEPS))
    assert_same_run(whole, saving)
    assert saving.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    assert saving.state.total_flos == pytest.approx(whole.state.total_flos)


def test_half_an_optimizer_step_is_not_saved(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = trainer_of("dropout", tmp_path)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(RuntimeError, match="checkpoint-2"):
        trainer.save_checkpoint()


def test_a_stop_at_the_end_of_a_step_saves(tmp_path: Path) -> None:
    class StopAtThree(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                control.should_save = control.should_training_stop = True

    trainer = trainer_of("dropout", tmp_path, save_strategy="no")
    trainer.add_callback(StopAtThree())
    trainer.train()
    assert [path.name for path in checkpoints.find(tmp_path)] == ["checkpoint-3"]


def test_checkpoints_are_interchangeable_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def standard(folder: Path) -> transformers.Trainer:
        options = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 1}
        samples = Samples(10, 37, padded=False)
        return transformers.Trainer(tiny_model(), arguments(folder, **options), train_dataset=samples)

    # Without dropout, which draws other masks in chunks.
    monkeypatch.setitem(RUNS, "plain", (lambda seed: tiny_model(seed=seed), {}, {}))
    theirs, ours = standard(tmp_path / "theirs"), trainer_of("plain", tmp_path / "ours")
    theirs.train()
    ours.train()
    resumed = standard(tmp_path / "a")
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert logged(resumed, "loss")[:3] == logged(ours, "loss")[:3]
    assert logged(resumed, "loss") == pytest.approx(logged(theirs, "loss"), rel=2e-5)
    back = trainer_of("plain", tmp_path / "b")
    back.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-3"))
    assert logged(back, "loss")[:3] == logged(theirs, "loss")[:3]
    assert logged(back, "loss") == pytest.approx(logged(ours, "loss"), rel=2e-5)


def test_resuming_from_weights_only_warns(tmp_path: Path) -> None:
    trainer = trainer_of("dropout", tmp_path, save_only_model=True)
    trainer.train()
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert "model.safetensors" in names and not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    with pytest.warns(UserWarning, match="only weights"):
        trainer_of("dropout", tmp_path / "b").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    """An epoch has five steps, so the run ends within its second epoch."""
    whole = trainer_of("dropout", tmp_path)
    whole.train()
    again = trainer_of("dropout", tmp_path, seed=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == NUM_STEPS
    assert again.state.log_history[:-1] == whole.state.log_history[:-1]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint in"):
        trainer_of("dropout", tmp_path).train(resume_from_checkpoint=True)


def test_a_run_interrupted_twice_continues(tmp_path: Path) -> None:
    """Ctrl-C within a chunk, without a signal handler."""
    whole = trainer_of("dropout", tmp_path / "whole", save_strategy="no")
    whole.train()
    out = tmp_path / "out"
    for event in (14, 8, 1000):
        trainer, seen = trainer_of("dropout", out, save_strategy="no"), 0

        def progress(*_: Any, until: int = event) -> None:
            nonlocal seen
            seen += 1
            if seen == until:
                raise KeyboardInterrupt

        trainer.engine.progress = progress
        try:
            trainer.train(resume_from_checkpoint=checkpoints.latest(out))
        except KeyboardInterrupt:
            trainer.save_checkpoint()
    assert len(checkpoints.find(out)) == 2
    assert_same_run(whole, trainer)
