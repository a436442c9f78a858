"""Trainers never change the caller's training arguments."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from scripts import load
from trainings import CHUNKED, Samples, arguments, quick_collection, tiny_model
from transformers import AutoTokenizer, TrainingArguments

import oomb

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

import toy  # noqa: E402  (of examples/, which `scripts` has put on the path)
from trl_data import SETTINGS, pairs, texts  # noqa: E402

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)


def values(args: TrainingArguments) -> dict[str, Any]:
    return {**args.to_dict(), "_n_gpu": args._n_gpu}


def changed_by_training(args: TrainingArguments, make: Any) -> dict[str, Any]:
    """Return what a trainer changed in the caller's arguments."""
    before = values(args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(gradient checkpointing|activation_offloading=True)")
        trainer = make(args)
    trainer.train()
    assert not trainer.args.gradient_checkpointing and trainer.args.n_gpu <= 1
    # The device setup is cached and does not run again.
    assert trainer.args.distributed_state is args.distributed_state and trainer.args.device == args.device
    return {name: value for name, value in values(args).items() if value != before[name]}


def trainer_with(args: TrainingArguments) -> oomb.Trainer:
    return oomb.Trainer(tiny_model(), args, train_dataset=Samples(8, 41), engine_config=CHUNKED)


@pytest.mark.parametrize(
    "asked",
    [{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"_n_gpu": 2}],
    ids=["checkpointing", "GPUs"],
)
def test_the_trainer_leaves_the_callers_arguments_alone(tmp_path: Path, asked: dict[str, Any]) -> None:
    args = arguments(tmp_path)
    for name, value in asked.items():
        setattr(args, name, value)
    assert changed_by_training(args, trainer_with) == {}
    # If nothing is switched off, the trainer uses the caller's object, so later changes count.
    plain = arguments(tmp_path)
    assert trainer_with(plain).args is plain


@pytest.mark.parametrize("asked", [{}, {"activation_offloading": True}], ids=["defaults", "offloading"])
@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_trls_trainers_leave_the_callers_arguments_alone(
    tmp_path: Path, kind: str, data: Any, asked: dict[str, Any]
) -> None:
    folder = toy.model_folder(str(tmp_path / "model"))
    args = getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), **{**SETTINGS, "eval_strategy": "no"}, **asked)
    assert args.gradient_checkpointing
    found = changed_by_training(
        args,
        lambda args: getattr(oomb, f"{kind}Trainer")(
            model=load(folder),
            args=args,
            train_dataset=data(),
            processing_class=AutoTokenizer.from_pretrained(folder),
            engine_config=CHUNKED,
        ),
    )
    assert found == {}
