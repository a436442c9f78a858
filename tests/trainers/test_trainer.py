"""oomb.Trainer against transformers.Trainer: the same arguments must give the same losses and the same weights."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import profile
from trainings import CHUNKED, VOCAB, Samples, arguments, logged, quick_collection, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    TrainerCallback,
    TrainingArguments,
)

import oomb
from oomb.engine import allocator
from oomb.models.hooks import is_checkpointing, set_checkpointing
from oomb.trainers import arguments as arguments_module
from oomb.trainers import trainer as trainer_module

pytestmark = pytest.mark.usefixtures(quick_collection.__name__)


def train_both(tmp_path: Path, samples: Samples, **options: Any) -> tuple[transformers.Trainer, oomb.Trainer]:
    standard = transformers.Trainer(
        model=tiny_model(), args=arguments(tmp_path / "a", **options), train_dataset=samples, eval_dataset=samples
    )
    ours = oomb.Trainer(
        model=tiny_model(),
        args=arguments(tmp_path / "b", **options),
        train_dataset=samples,
        eval_dataset=samples,
        engine_config=CHUNKED,
    )
    standard.train()
    ours.train()
    return standard, ours


def assert_same_weights(a: Any, b: Any, tolerance: float) -> None:
    start = tiny_model().state_dict()
    for name, value in a.state_dict().items():
        moved = (value - start[name]).norm()
        rounding = torch.finfo(value.dtype).eps * value.abs().max()
        assert (value - b.state_dict()[name]).norm() <= tolerance * moved + rounding, name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param({"max_grad_norm": 0.05, "weight_decay": 0.1}, id="clipped"),
        pytest.param({"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}, id="not-averaged"),
        pytest.param({"optim": "sgd", "learning_rate": 0.5, "gradient_accumulation_steps": 3}, id="sgd"),
        pytest.param(
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}, id="plateau"
        ),
    ],
)
def test_same_losses_and_weights_as_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    standard, ours = train_both(tmp_path, Samples(10, 41), **options)
    assert len(logged(ours, "loss")) == 4
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(standard, name), rel=2e-5), name
    # Adam divides by the root of a square, so a rounding difference in a near-zero gradient shows in the weights.
    assert_same_weights(standard.model, ours.model, tolerance=2e-3 if "optim" not in options else 2e-5)
    assert ours.evaluate()["eval_loss"] == pytest.approx(standard.evaluate()["eval_loss"], rel=1e-4)


def test_chunk_size_does_not_change_training_and_the_learning_rate_does(tmp_path: Path) -> None:
    def train(chunk_size: int, rate: float) -> Any:
        trainer = oomb.Trainer(
            model=tiny_model(),
            args=arguments(tmp_path, learning_rate=rate, optim="sgd"),
            train_dataset=Samples(8, 41),
            engine_config=oomb.Config(chunk_size=chunk_size),
        )
        trainer.train()
        return trainer.model

    reference = train(64, 0.5)
    assert_same_weights(reference, train(7, 0.5), tolerance=1e-4)
    with pytest.raises(AssertionError):
        assert_same_weights(reference, train(7, 0.4), tolerance=1e-4)


def test_mixed_precision_reaches_both_passes(tmp_path: Path) -> None:
    standard, ours = train_both(tmp_path, Samples(8, 41, padded=False), bf16=True)
    assert logged(ours, "loss") == pytest.approx(logged(standard, "loss"), rel=2e-3)

    dtypes: list[tuple[torch.dtype, bool]] = []
    projection = ours.model.model.layers[0].self_attn.k_proj
    projection.register_forward_hook(lambda module, args, out: dtypes.append((out.dtype, out.requires_grad)))
    ours.train()
    assert set(dtypes) == {(torch.bfloat16, False), (torch.bfloat16, True)}
    assert projection.weight.dtype == torch.float32


def test_left_padding_raises(tmp_path: Path) -> None:
    samples = Samples(4, 20)
    for sample in samples.samples:
        for name, value in sample.items():
            sample[name] = value.flip(0)
    with pytest.raises(ValueError, match="padded on the left"):
        oomb.Trainer(tiny_model(), arguments(tmp_path), train_dataset=samples).train()


def test_a_new_model_of_model_init_gets_a_new_engine(tmp_path: Path) -> None:
    options = {"args": arguments(tmp_path, bf16=True), "train_dataset": Samples(8, 41, padded=False)}
    trainer = oomb.Trainer(model_init=lambda: tiny_model(), engine_config=CHUNKED, **options)
    first = trainer.engine
    trainer.train()
    assert trainer.engine is not first
    losses = logged(trainer, "loss")
    standard = transformers.Trainer(
        model_init=lambda: tiny_model(), **{**options, "args": arguments(tmp_path, bf16=True)}
    )
    standard.train()
    assert losses == pytest.approx(logged(standard, "loss"), rel=2e-3)


def test_batches_without_labels_train_on_their_ids(tmp_path: Path) -> None:
    bare, labelled = Samples(8, 41, labels=False), Samples(8, 41, labels=False)
    for sample in labelled.samples:
        sample["labels"] = sample["input_ids"].masked_fill(sample["attention_mask"] == 0, -100)
    losses = []
    for samples in (bare, labelled):
        trainer = oomb.Trainer(
            tiny_model(),
            arguments(tmp_path, gradient_accumulation_steps=2),
            train_dataset=samples,
            engine_config=CHUNKED,
        )
        trainer.train()
        losses.append([*logged(trainer, "loss"), trainer.evaluate(samples)["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_metrics_get_logprobs(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["logprobs"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"perplexity": 1.0}

    samples = Samples(4, 41, padded=False)
    trainer = oomb.Trainer(
        tiny_model(), arguments(tmp_path), eval_dataset=samples, compute_metrics=metrics, engine_config=CHUNKED
    )
    result = trainer.evaluate()
    counted = seen["labels"][:, 1:] != -100
    assert seen["logprobs"].shape == (4, 41)
    assert -seen["logprobs"][:, 1:][counted].mean() == pytest.approx(result["eval_loss"], rel=1e-2)
    assert result["eval_perplexity"] == 1.0


def test_checkpoints_resume_and_callbacks_run(tmp_path: Path) -> None:
    calls: list[str] = []

    class Recorder(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            calls.append("step")

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            calls.append("save")

    options = {"save_strategy": "steps", "save_steps": 2}
    whole = oomb.Trainer(
        model=tiny_model(),
        args=arguments(tmp_path, **options),
        train_dataset=Samples(8, 41),
        callbacks=[Recorder()],
        engine_config=CHUNKED,
    )
    whole.train()
    assert calls == ["step", "step", "save", "step", "step", "save"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(saved.state_dict()[k], v) for k, v in whole.model.state_dict().items())
    assert saved.config._attn_implementation in ("sdpa", "eager")

    resumed = oomb.Trainer(
        model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=Samples(8, 41), engine_config=CHUNKED
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(whole.model, resumed.model, tolerance=1e-5)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_gradient_checkpointing_is_switched_off_with_a_warning(tmp_path: Path, name: str) -> None:
    if not hasattr(TrainingArguments, name):
        pytest.skip(f"this transformers has no {name}")
    asked = arguments(tmp_path, **{name: True, f"{name}_kwargs": {"use_reentrant": True}})
    with pytest.warns(UserWarning, match="checkpoint_layers=True") as warned:
        trainer = oomb.Trainer(tiny_model(), asked, train_dataset=Samples(8, 41))
    # The warning points at the line above.
    assert __file__ in [one.filename for one in warned if "checkpoint_layers" in str(one.message)]
    assert not getattr(trainer.args, name) and getattr(trainer.args, f"{name}_kwargs") is None
    trainer.train()
    assert not is_checkpointing(trainer.model)


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel], ids=["plain", "wrapped"])
def test_checkpointing_of_the_model_is_switched_off_with_a_warning(tmp_path: Path, wrap: Any) -> None:
    model = tiny_model()
    set_checkpointing(model, on=True)
    assert is_checkpointing(model)
    with pytest.warns(UserWarning, match="switched off"):
        oomb.Trainer(wrap(model), arguments(tmp_path, remove_unused_columns=False))
    assert not is_checkpointing(model)


def test_a_plain_trainer_does_not_warn(tmp_path: Path) -> None:
    """Deprecated names of transformers would cause a warning in every run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        trainer = oomb.Trainer(tiny_model(), arguments(tmp_path), train_dataset=Samples(8, 41))
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, "fuse="),
    ],
)
def test_arguments_it_cannot_honor_raise(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oomb.Trainer(tiny_model(), arguments(tmp_path, **options))


def test_a_loss_on_logits_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.logprobs"):
        oomb.Trainer(tiny_model(), arguments(tmp_path), compute_loss_func=lambda *a, **k: None)


def test_inputs_it_would_ignore_raise(tmp_path: Path) -> None:
    samples = Samples(4, 20)
    for sample in samples.samples:
        sample["inputs_embeds"] = torch.zeros(20, 4)
    trainer = oomb.Trainer(tiny_model(), arguments(tmp_path), train_dataset=samples)
    with pytest.raises(ValueError, match="inputs_embeds"):
        trainer.train()


def test_documents_in_one_row_are_told_apart_by_their_positions(tmp_path: Path) -> None:
    """Batches of transformers' flattening collator have the loss of padded batches."""
    generator = torch.Generator().manual_seed(0)
    documents = [{"input_ids": torch.randint(3, VOCAB, (n,), generator=generator).tolist()} for n in (30, 5, 9, 17)]
    trainer = oomb.Trainer(tiny_model(), arguments(tmp_path), data_collator=DataCollatorWithFlattening())
    batch = trainer.data_collator(documents)
    assert batch["input_ids"].shape == (1, 61)
    loss = trainer.compute_loss(trainer.model, dict(batch)).detach()
    logp = trainer.engine.logprobs([torch.tensor(document["input_ids"]) for document in documents])
    assert float(loss) == pytest.approx(-float(torch.cat(logp).detach().sum()) / 57, rel=1e-5)
    trainer.train_dataset = documents
    trainer.train()
    assert trainer.state.global_step > 0


def test_documents_in_one_row_are_told_apart_by_numbers_in_the_mask(tmp_path: Path) -> None:
    """Batches as Axolotl's and LLaMA-Factory's collators make them, with padding at the end."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCAB, (n,), generator=generator) for n in (30, 5, 9)]
    numbers = [torch.full((len(document),), 1 + i) for i, document in enumerate(documents)]
    ids, mask = (torch.cat([*parts, torch.zeros(6, dtype=torch.long)])[None] for parts in (documents, numbers))
    trainer = oomb.Trainer(tiny_model(), arguments(tmp_path), engine_config=CHUNKED)
    batch = {"input_ids": ids, "attention_mask": mask}
    loss = trainer.compute_loss(trainer.model, dict(batch)).detach()
    logp = trainer.engine.logprobs(documents)
    assert float(loss) == pytest.approx(-float(torch.cat(logp).detach().sum()) / 41, rel=1e-5)
    for labels in ({}, {"labels": ids.masked_fill(mask == 0, -100)}):
        _, count = trainer.get_batch_samples(iter([{**batch, **labels}]), 1, torch.device("cpu"))
        assert int(count) == 41, "first tokens, which nothing predicts, would take part in the mean"


def test_labels_are_made_once_for_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_made, with_labels = 0, arguments_module.with_labels

    def counted(inputs: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_made
        num_made += 1
        return with_labels(inputs)

    monkeypatch.setattr(trainer_module, "with_labels", counted)
    options = arguments(tmp_path, per_device_train_batch_size=2, max_steps=2, num_train_epochs=1)
    oomb.Trainer(tiny_model(), options, train_dataset=Samples(8, 20, labels=False), engine_config=CHUNKED).train()
    assert num_made == 2


@pytest.mark.parametrize("largest", [1, 2])
def test_making_labels_does_not_wait_for_the_device(largest: int) -> None:
    """The numbers in the mask decide only whether the labels change."""
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, largest, largest, largest, 0]])
    with profile() as ran:
        labels = arguments_module.with_labels({"input_ids": ids, "attention_mask": mask})["labels"]
    assert "aten::_local_scalar_dense" not in [event.key for event in ran.key_averages()]
    expected = torch.tensor([[0, 1, 2, 3, 4, -100], [6, 7, 8 if largest == 1 else -100, 9, 10, -100]])
    assert torch.equal(labels, expected)


def test_an_unsupported_model_raises_before_any_data_is_read(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(oomb.UnsupportedModelError):
        oomb.Trainer(AutoModelForCausalLM.from_config(config), arguments(tmp_path))


def test_lora_trains_only_the_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(5)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(tiny_model(), config)

    models = []
    for kind, extra in ((transformers.Trainer, {}), (oomb.Trainer, {"engine_config": CHUNKED})):
        model = adapted()
        before = copy.deepcopy(model.state_dict())
        trainer = kind(model=model, args=arguments(tmp_path, optim="sgd"), train_dataset=Samples(8, 41), **extra)
        trainer.train()
        models.append(model.state_dict())
    for name, value in models[0].items():
        if "lora" in name:
            assert not torch.equal(models[1][name], before[name]), name
            torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(models[1][name], before[name]), name


def test_an_adapter_is_saved_and_loaded_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = oomb.Trainer(model, arguments(tmp_path, **options), train_dataset=Samples(8, 41), engine_config=CHUNKED)
    trainer.train()
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "checkpoint-4")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The loss falls and rises again, so the best step is neither the first nor the last."""

    class Rates(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.3 if state.global_step < 2 else -5.0

    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = oomb.Trainer(
        tiny_model(),
        arguments(tmp_path, **each, optim="sgd", load_best_model_at_end=True, save_total_limit=1),
        train_dataset=Samples(8, 41),
        eval_dataset=Samples(8, 41),
        engine_config=CHUNKED,
        callbacks=[Rates()],
    )
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert losses.index(min(losses)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses))
    # Weights and optimizer states belong to different steps, so there is nothing to save.
    assert trainer.save_checkpoint() == tmp_path / "checkpoint-2"


def test_tensorboard_gets_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = oomb.Trainer(
        tiny_model(),
        arguments(tmp_path, report_to="tensorboard"),
        train_dataset=Samples(8, 41),
        engine_config=CHUNKED,
    )
    trainer.train()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(logged(trainer, "loss"))


@pytest.mark.parametrize("name", ["offloaded_adamw", "offloaded_adamw_bf16", "offloaded_adamw_8bit"])
def test_an_optimizer_with_its_states_in_host_memory(tmp_path: Path, name: str) -> None:
    settings = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainers = []
    for choice in (None, name):
        trainer = oomb.Trainer(
            tiny_model(),
            arguments(tmp_path, optim="adamw_torch", **settings),
            train_dataset=Samples(8, 41),
            engine_config=CHUNKED,
            optimizer=choice,
        )
        trainer.train()
        trainers.append(trainer)
    plain, ours = (trainer.optimizer.optimizer for trainer in trainers)
    assert type(ours) is oomb.OffloadedAdamW and type(plain) is torch.optim.AdamW
    assert ours.state_dtype == {"w": "float32", "6": "bfloat16", "t": "8bit"}[name[-1]]
    for theirs, group in zip(plain.param_groups, ours.param_groups, strict=True):
        assert [p.shape for p in group["params"]] == [p.shape for p in theirs["params"]]
        assert all(group[key] == theirs[key] for key in ("betas", "eps", "weight_decay", "initial_lr"))
    assert {group["weight_decay"] for group in ours.param_groups} == {0.1, 0.0}
    tolerance = 1e-4 if name == "offloaded_adamw" else 0.1
    assert_same_weights(trainers[0].model, trainers[1].model, tolerance)


@pytest.mark.parametrize(
    ("optimizer", "settings", "options", "message"),
    [
        ("adamw_9bit", {}, {}, "use one of offloaded_adamw, "),
        ("offloaded_adamw", {"optim": "sgd"}, {}, "optim='sgd'"),
        ("offloaded_adamw", {}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "pass only one"),
        (
            "offloaded_adamw",
            {},
            {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), None)},
            "pass only one",
        ),
        ("offloaded_adamw", {"optim_args": "state_dtype=4bit"}, {}, "optim_args 'state_dtype=4bit' is unknown"),
        ("offloaded_adamw_8bit", {"optim_args": "state_dtype=bfloat16"}, {}, "state_dtype=bfloat16 in optim_args"),
    ],
)
def test_two_optimizers_raise(
    tmp_path: Path, optimizer: str, settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        oomb.Trainer(tiny_model(), arguments(tmp_path, **settings), optimizer=optimizer, **options)


def test_optim_args_configure_the_offloaded_optimizer(tmp_path: Path) -> None:
    made = []
    for optim_args in (None, "state_dtype=bfloat16, master_weights=true"):
        trainer = oomb.Trainer(
            tiny_model(), arguments(tmp_path, optim_args=optim_args), optimizer="offloaded_adamw", engine_config=CHUNKED
        )
        optimizer = trainer.create_optimizer()
        made.append((optimizer.state_dtype, optimizer.master_weights))
    assert made == [("float32", False), ("bfloat16", True)]


def test_space_is_left_only_for_states_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer_bytes: list[int] = []
    place = allocator.place_or_raise

    def record(request: Any) -> Any:
        optimizer_bytes.append(request.optimizer_bytes)
        return place(request)

    monkeypatch.setattr(allocator, "place_or_raise", record)
    model, found = tiny_model(), []
    for options in (
        {},
        {"optimizer": "offloaded_adamw"},
        {"optimizers": (oomb.OffloadedAdamW(model.parameters()), None)},
        {"optimizer_cls_and_kwargs": (oomb.OffloadedAdamW, {"lr": 1e-3})},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})},
    ):
        trainer = oomb.Trainer(
            model, arguments(tmp_path, max_steps=1), train_dataset=Samples(8, 41), engine_config=CHUNKED, **options
        )
        trainer.train()
        found.append(optimizer_bytes[0] > 0)
        optimizer_bytes.clear()
    assert found == [True, False, False, False, True]
