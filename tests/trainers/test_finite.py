"""NaN and infinity stop training before they reach the weights or a checkpoint."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command import TOY_RUN, invoke
from tokenizer import small_tokenizer
from torch import Tensor
from trainings import CHUNKED, VOCAB, Samples, arguments, quick_collection, tiny_model

import oomb
from oomb.trainers import checkpoints

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)
NUM_STEPS = 6


class Spoiled(Samples):
    """One example has a token whose embedding overflows."""

    def __init__(self, at: int, count: int = NUM_STEPS) -> None:
        super().__init__(count, 33, padded=False)
        for sample in self.samples:
            for ids in (sample["input_ids"], sample["labels"]):
                ids[ids == 1] = 2
        self.at = at
        self.samples[at]["input_ids"][5] = 1


def spoiled_model() -> Any:
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = 3e38
    return model


def trainer_on(samples: Any, folder: Path, model: Any = None, kind: Any = oomb.Trainer, **options: Any) -> Any:
    more = {name: options.pop(name) for name in ("optimizer", "max_skipped_steps") if name in options}
    steps = {"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 1}
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1, **steps, **options}
    model = spoiled_model() if model is None else model
    return kind(model, arguments(folder, **options), train_dataset=samples, engine_config=CHUNKED, **more)


def trained(trainer: Any) -> Exception | None:
    try:
        trainer.train()
    except Exception as error:
        return error
    return None


def is_finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in tensors.values())


def assert_checkpoints_finite(folder: Path, steps: list[int]) -> None:
    assert [checkpoints.step_of(path) for path in checkpoints.find(folder)] == steps
    for path in checkpoints.find(folder):
        assert is_finite(safetensors.torch.load_file(path / "model.safetensors"))


class Overflowing(oomb.Trainer):
    """Has an infinite loss instead of an infinite gradient."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * math.inf if (inputs["input_ids"] == 1).any() else loss


@pytest.mark.parametrize("optimizer", [None, "offloaded_adamw"])
@pytest.mark.parametrize(("kind", "what"), [(oomb.Trainer, "gradient norm is nan"), (Overflowing, "loss is inf")])
def test_a_nonfinite_loss_never_reaches_the_weights(
    tmp_path: Path, kind: Any, what: str, optimizer: str | None
) -> None:
    trainer = trainer_on(Spoiled(at=3), tmp_path, kind=kind, optimizer=optimizer)
    error = trained(trainer)
    assert is_finite(trainer.model.state_dict())
    assert_checkpoints_finite(tmp_path, [1, 2, 3])
    assert isinstance(error, oomb.NonFiniteError) and error.step == 4 and not error.weights_lost
    assert f"the {what} in step 4 of 6, on example 3" in str(error)


def test_a_nonfinite_gradient_never_reaches_the_weights(tmp_path: Path) -> None:
    class Infinite(oomb.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step == 2:
                self.model.lm_head.weight.grad[3, 3] = math.inf
            return loss

    for max_grad_norm in (0.0, 1.0):
        folder = tmp_path / str(max_grad_norm)
        samples = Samples(NUM_STEPS, 33, padded=False)
        trainer = trainer_on(samples, folder, tiny_model(), Infinite, max_grad_norm=max_grad_norm)
        error = trained(trainer)
        assert is_finite(trainer.model.state_dict()), max_grad_norm
        assert_checkpoints_finite(folder, [1, 2])
        assert isinstance(error, oomb.NonFiniteError) and "the gradient norm is inf in step 3" in str(error)


def test_weights_that_an_update_made_nan_are_not_saved(tmp_path: Path) -> None:
    """In pure float16 AdamW's epsilon and second moment underflow, so its update is 0 / 0."""
    model = tiny_model(num_hidden_layers=1)
    samples = Samples(NUM_STEPS, 33, padded=False)
    trainer = trainer_on(samples, tmp_path, model, adam_epsilon=0.0, warmup_steps=0)
    error = trained(trainer)
    assert not is_finite(model.state_dict()), "the update did not do what this test needs"
    assert_checkpoints_finite(tmp_path, [])
    assert isinstance(error, oomb.NonFiniteError) and error.weights_lost and "max_skipped_steps" not in str(error)
    assert trainer.is_stepping, "and such a step cannot be saved later"


def test_weights_that_were_infinite_before_training_are_accepted(tmp_path: Path) -> None:
    """A bias of -inf keeps unused tokens from being predicted."""
    model = tiny_model("phi", num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.bias[VOCAB - 1] = -math.inf
    samples = Samples(NUM_STEPS, 33, padded=False)
    for sample in samples.samples:
        sample["labels"][sample["labels"] == VOCAB - 1] = -100
    assert trained(trainer_on(samples, tmp_path, model)) is None


def test_the_examples_of_the_step_are_named(tmp_path: Path) -> None:
    """In a shuffled second epoch with accumulated batches, only the example at fault is named."""
    seen: list[str] = []
    for at in (0, 3, 5):
        trainer = trainer_on(
            Spoiled(at), tmp_path / str(at), per_device_train_batch_size=1, gradient_accumulation_steps=2,
            train_sampling_strategy="random", max_skipped_steps=1, seed=at, max_steps=6, kind=Overflowing,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = trained(trainer)
        assert isinstance(error, oomb.NonFiniteError) and 4 <= error.step <= 6
        [skipped] = [str(one.message) for one in caught if "skipping the step (1 of at most 1)" in str(one.message)]
        for text in (skipped, str(error)):
            assert re.findall(r"example (\d+)", text) == [str(at)], text
        seen += error.examples
    assert len(set(seen)) == 3


def test_skipped_steps_change_nothing_and_are_counted(tmp_path: Path) -> None:
    trainer = trainer_on(Spoiled(at=1), tmp_path, max_skipped_steps=2, max_steps=2 * NUM_STEPS)
    with pytest.warns(UserWarning, match="skipping"):
        trainer.train()
    assert trainer.num_skipped_steps == 2 and is_finite(trainer.model.state_dict())
    before, after = (
        safetensors.torch.load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    # A resumed run counts the steps that were skipped before.
    resumed = trainer_on(Spoiled(at=1), tmp_path, max_skipped_steps=1, max_steps=2 * NUM_STEPS)
    with pytest.raises(oomb.NonFiniteError, match="with 1 steps skipped before"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_the_check_can_be_turned_off(tmp_path: Path) -> None:
    trainer = trainer_on(Spoiled(at=1), tmp_path / "off", max_skipped_steps=None)
    assert trained(trainer) is None and not is_finite(trainer.model.state_dict())
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="max_skipped_steps is"):
            trainer_on(Spoiled(at=1), tmp_path / "wrong", max_skipped_steps=wrong)


def test_trl_trainers_stop_as_well(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{name: sample[name].tolist() for name in ("input_ids", "labels")} for sample in Spoiled(at=3).samples]
    settings = {"max_steps": NUM_STEPS, "save_steps": 1, "report_to": "none", "max_length": None, "use_cpu": True,
                "per_device_train_batch_size": 1, "dataset_kwargs": {"skip_prepare_dataset": True},
                "train_sampling_strategy": "sequential", "eos_token": None}  # fmt: skip
    trainer = oomb.SFTTrainer(
        spoiled_model(),
        trl.SFTConfig(str(tmp_path), **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=small_tokenizer(),
        engine_config=CHUNKED,
    )
    error = trained(trainer)
    assert is_finite(trainer.model.state_dict())
    assert_checkpoints_finite(tmp_path, [1, 2, 3])
    assert isinstance(error, oomb.NonFiniteError) and error.step == 4


@pytest.mark.parametrize("report", [True, False])
def test_oomb_train_ends_with_an_error_and_saves_no_nan(places: Path, report: bool) -> None:
    flags = [flag for flag in TOY_RUN if flag != "--no_report" or not report]
    broken = ["--dtype", "float16", "--learning_rate", "5", "--max_grad_norm", "0"]
    done = invoke("train", *flags, *broken, "--max_steps", "8", "--save_steps", "1")
    for path in Path("out").rglob("*.safetensors"):
        assert is_finite(safetensors.torch.load_file(path)), path
    assert done.exit_code == 1, done.output
    events = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    [error] = [event["error"] for event in events if event["event"] == "error"]
    # The dataset is one file; its examples are parts of it.
    assert re.search(r"in step \d of 8, on example \d+ \(.*text\.txt, tokens [\d,]+ to [\d,]+ of the data\)", error)
    assert "error: " in done.output and "Lower the learning rate" in done.output
    reported = invoke("report", "out")
    assert reported.exit_code == 0, reported.output
    assert "An error ended training" in Path("out/report.html").read_text()
