"""oomb's SFTTrainer and DPOTrainer against TRL's: the same arguments must give the same numbers."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load, logged, run_example
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
from trl_data import CHUNKED, LORA, SETTINGS, adapted, assert_same_weights, datasets, pairs, peft, texts

import oomb
import oomb.trainers.trl_base
from oomb.ops.logprob import IGNORE_INDEX, token_stats
from oomb.trainers.trl_base import EngineForward

trl = pytest.importorskip("trl")

import toy  # noqa: E402  (of examples/, which `scripts` has put on the path)

SOME_MODULES = {**LORA, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"], "use_dora": True}
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}a: {% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}u: {{ m.content }} {% endif %}{% endfor %}"
)


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Exclude what the imports created from garbage collection, which every `train` runs."""
    gc.freeze()
    yield
    gc.unfreeze()


def assert_same_logs(ours: Any, theirs: Any, rel: float = 1e-5) -> None:
    assert len(logged(ours)) == len(logged(theirs))
    for a, b in zip(logged(ours), logged(theirs), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            # Rewards and margins are small differences of large sums.
            assert a[key] == pytest.approx(b[key], rel=rel, abs=rel / 2 if "loss" not in key else None), (key, a, b)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_scripts_changed_in_one_line_train_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    line = f"\nfrom oomb import {name.upper()}Trainer\n"
    theirs = run_example(name, (line, line.replace("oomb", "trl")))["trainer"]
    ours = run_example(name)["trainer"]
    # A toy example fits in one default chunk, so train once more in several.
    with_chunks = f"\nimport functools, oomb\n{name.upper()}Trainer = functools.partial(\n    "
    with_chunks += f"oomb.{name.upper()}Trainer, engine_config=oomb.Config(chunk_size=16)\n)\n"
    chunked = run_example(name, (line, with_chunks))["trainer"]
    losses = [record["loss"] for record in logged(theirs) if "loss" in record]
    assert len(losses) >= 5 and losses[-1] < 0.95 * losses[0]
    assert sum("eval_loss" in record for record in logged(ours)) == 2
    batch = next(iter(chunked.get_train_dataloader()))
    assert batch["input_ids"].shape[1] > 2 * chunked.engine.config.chunk_size
    start = load("toy_model").state_dict()
    for trainer in (ours, chunked):
        assert isinstance(trainer, (oomb.Trainer, getattr(trl, f"{name.upper()}Trainer")))
        assert_same_logs(trainer, theirs)
        assert_same_weights(trainer.model, theirs.model, start, tolerance=2e-3)
    if name == "sft":
        assert theirs.args.gradient_accumulation_steps > 1 and isinstance(ours.model, peft.PeftModel)
        again = peft.PeftModel.from_pretrained(load("toy_model"), "out_sft/adapter")
    else:
        again = load("out_dpo/model")  # by the last of the three
        other = run_example("dpo", ("learning_rate=1e-3", "learning_rate=1.001e-3"))["trainer"]
        with pytest.raises(AssertionError):
            assert_same_logs(other, theirs)
    for key, value in chunked.model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, msg=key)


def both(kind: str, tmp_path: Path, folder: str, data: Any, make: Any = load, **options: Any) -> tuple[Any, Any]:
    """Return our trainer and TRL's, both trained. Options are for the config or, if callable, for the trainer."""
    trainers = []
    for home, extra in ((oomb, {"engine_config": CHUNKED}), (trl, {})):
        settings = {**SETTINGS, **{k: v for k, v in options.items() if not callable(v)}}
        trainer = getattr(home, f"{kind}Trainer")(
            model=make(folder),
            args=getattr(trl, f"{kind}Config")(output_dir=str(tmp_path / home.__name__), **settings),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            processing_class=AutoTokenizer.from_pretrained(folder),
            **{key: value(folder) for key, value in options.items() if callable(value)},
            **extra,
        )
        trainer.train()
        trainers.append(trainer)
    return trainers[0], trainers[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, id="sum of two losses"),
        pytest.param({"loss_type": "ipo", "gradient_accumulation_steps": 2, "learning_rate": 1e-2}, id="ipo"),
        pytest.param({"loss_type": "hinge", "ld_alpha": 0.5, "max_grad_norm": 0.05}, id="hinge"),
        pytest.param({"loss_type": "robust", "label_smoothing": 0.1, "use_weighting": True}, id="weighted"),
        pytest.param({"f_divergence_type": "js_divergence", "max_length": 50}, id="other divergence, cut"),
        pytest.param({"precompute_ref_log_probs": True}, id="references beforehand"),
        pytest.param({"peft_config": lambda folder: peft.LoraConfig(**LORA)}, id="adapters off"),
        pytest.param({"make": adapted, "precompute_ref_log_probs": True}, id="copy of the adapter"),
        pytest.param({"ref_model": load, "sync_ref_model": True, "ref_model_sync_steps": 1}, id="synchronised"),
    ],
)
def test_every_kind_of_dpo_matches_trl(tmp_path: Path, folder: str, options: dict[str, Any]) -> None:
    make = options.pop("make", load)
    ours, theirs = both("DPO", tmp_path, folder, pairs(), make=make, **options)
    losses = [record["loss"] for record in logged(theirs) if "loss" in record]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert_same_logs(ours, theirs)
    assert_same_weights(ours.model, theirs.model, make(folder).state_dict(), tolerance=1e-4)
    assert ours.precompute_ref_logps == ours.args.precompute_ref_log_probs


def completions() -> Any:
    return datasets.Dataset.from_dict(
        {"prompt": [f"say {i}: " for i in range(8)], "completion": ["well, " * (1 + i % 4) for i in range(8)]}
    )


def chats() -> Any:
    talk = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "it is a test."},
        {"role": "user", "content": "is it long?"},
        {"role": "assistant", "content": "no."},
    ]
    return datasets.Dataset.from_dict({"messages": [talk[: 2 + 2 * (i % 2)] for i in range(8)]})


def chat_tokenizer(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize(
    ("data", "options"),
    [
        pytest.param(texts, {"gradient_accumulation_steps": 2}, id="whole texts"),
        pytest.param(texts, {"loss_type": "dft"}, id="dft"),
        pytest.param(texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 40}, id="a stream"),
        pytest.param(texts, {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1}, id="adamw"),
        pytest.param(chats, {"assistant_only_loss": True}, id="answers alone"),
        pytest.param(completions, {"max_length": 12}, id="completions, cut"),
        pytest.param(texts, {"peft_config": lambda _: peft.LoraConfig(**SOME_MODULES)}, id="some modules"),
    ],
)
def test_every_kind_of_sft_matches_trl(tmp_path: Path, folder: str, data: Any, options: dict[str, Any]) -> None:
    if data is chats:
        folder = str(tmp_path / "chat")
        toy.model_folder(folder)
        chat_tokenizer(folder).save_pretrained(folder)
    ours, theirs = both("SFT", tmp_path, folder, data(), **options)
    assert_same_logs(ours, theirs)
    assert_same_weights(ours.model, theirs.model, load(folder).state_dict(), tolerance=1e-3)
    if data is chats:
        labels = next(iter(ours.get_train_dataloader()))["labels"]
        assert 0 < (labels != IGNORE_INDEX).sum() < 0.6 * labels.numel()


def test_rows_without_padding_train_as_padded_ones(tmp_path: Path, folder: str) -> None:
    """TRL's own padding-free batches need a flash attention kernel, so compare with padded batches."""
    logs = []
    for padding_free in (False, True):
        args = trl.SFTConfig(output_dir=str(tmp_path / str(padding_free)), **{**SETTINGS, "padding_free": padding_free})
        trainer = oomb.SFTTrainer(folder, args, None, texts(), texts(), engine_config=CHUNKED)
        batch = next(iter(trainer.get_train_dataloader()))
        assert ("position_ids" in batch) is padding_free and (len(batch["input_ids"]) == 1) is padding_free
        trainer.train()
        logs.append(trainer)
    assert_same_logs(*logs)


def test_packed_documents_do_not_attend_to_each_other(tmp_path: Path, folder: str) -> None:
    args = trl.SFTConfig(output_dir=str(tmp_path), **{**SETTINGS, "packing": True, "max_length": 256})
    trainer = oomb.SFTTrainer(folder, args, None, texts(), texts(), engine_config=CHUNKED)
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    documents = batch["input_ids"][0].tensor_split(starts[1:])
    with torch.no_grad():
        loss = float(trainer.compute_loss(trainer.model, dict(batch)))
        alone = [trainer.engine.logprobs(document[None]).sum() for document in documents]
    assert loss == pytest.approx(-float(sum(alone)) / sum(len(d) - 1 for d in documents), rel=1e-5)


def test_mixed_precision_reaches_the_engine(tmp_path: Path, folder: str) -> None:
    ours, theirs = both("SFT", tmp_path, folder, texts(), bf16=True, learning_rate=0.05)
    assert_same_logs(ours, theirs, rel=2e-2)
    dtypes: set[torch.dtype] = set()
    ours.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, a, out: dtypes.add(out.dtype))
    ours.evaluate()
    assert dtypes == {torch.bfloat16}


def test_checkpoints_resume_and_callbacks_run(tmp_path: Path, folder: str) -> None:
    steps = []

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    def trainer() -> Any:
        settings = {**SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
        return oomb.SFTTrainer(
            folder,
            trl.SFTConfig(output_dir=str(tmp_path), **{**settings, "learning_rate": 1e-3}),
            train_dataset=texts(),
            eval_dataset=texts(),
            callbacks=[Recorder()],
            engine_config=CHUNKED,
        )

    whole, resumed = trainer(), trainer()
    whole.train()
    assert steps == [1, 2, 3, 4]
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    saved = load(str(tmp_path / "checkpoint-4")).state_dict()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key
        assert torch.equal(saved[key], value), key


@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_metrics_get_logprobs(tmp_path: Path, folder: str, kind: str, data: Any) -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["predictions"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"seen": 1.0}

    trainer = getattr(oomb, f"{kind}Trainer")(
        model=folder,
        args=getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), per_device_eval_batch_size=8, **SETTINGS),
        train_dataset=data(),
        eval_dataset=data(),
        compute_metrics=metrics,
        engine_config=CHUNKED,
    )
    result = trainer.evaluate()
    assert result["eval_seen"] == 1.0
    assert seen["predictions"].shape == seen["labels"].shape
    assert seen["predictions"].min() < -1 and seen["predictions"].max() == 0
    if kind == "SFT":
        counted = seen["labels"][:, 1:] != IGNORE_INDEX
        assert -seen["predictions"][:, 1:][counted].mean() == pytest.approx(result["eval_loss"], rel=1e-5)


def test_the_reference_runs_first_and_releases_its_memory(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    trainer = oomb.DPOTrainer(
        folder,
        args=trl.DPOConfig(output_dir=str(tmp_path), **{**SETTINGS, "max_steps": 1, "eval_strategy": "no"}),
        train_dataset=pairs(),
        engine_config=oomb.Config(chunk_size=1024),
    )
    assert trainer.reference_engine is not trainer.engine
    release = oomb.Engine.release
    for name, engine in (("reference", trainer.reference_engine), ("model", trainer.engine)):
        engine.progress = lambda phase, done, total, name=name: events.append(f"{name} {phase}")
        monkeypatch.setattr(
            engine, "release", lambda name=name, engine=engine: (events.append(f"{name} released"), release(engine))
        )
    trainer.train()
    assert events == ["model released", "reference fill", "reference released", "model fill", "model gradient"]


def test_without_arguments_and_with_plain_ones(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert trl.SFTConfig("x", bf16=False).gradient_checkpointing
    for name in ("SFTConfig", "DPOConfig"):
        # TRL's default is bfloat16, which raises on a CPU.
        monkeypatch.setattr(trl, name, partial(getattr(trl, name), bf16=False, report_to="none"))
    for class_, data in ((oomb.SFTTrainer, texts), (oomb.DPOTrainer, pairs)):
        trainer = class_(folder, train_dataset=data())
        assert trainer.args.output_dir == f"model-{class_.__name__.removesuffix('Trainer')}"
        assert not trainer.args.gradient_checkpointing and not getattr(trainer.args, "activation_checkpointing", False)
    plain = TrainingArguments(output_dir="plain", max_steps=1, report_to="none", save_strategy="no", use_cpu=True)
    trainer = oomb.SFTTrainer(folder, plain, train_dataset=texts())
    assert trainer.train().training_loss > 1


def mixture() -> Any:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "mixtral", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=2, eos_token_id=0, pad_token_id=1, router_aux_loss_coef=0.02,
        )
    )  # fmt: skip


def bloom() -> Any:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    )


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("SFT", {"label_smoothing_factor": 0.1}, ValueError, "label_smoothing_factor is 0.1"),
        ("SFT", {"compute_loss_func": len}, ValueError, r"compute_loss_func .*engine\.logprobs"),
        ("SFT", {"preprocess_logits_for_metrics": len}, ValueError, "preprocess_logits_for_metrics"),
        ("SFT", {"model": mixture}, ValueError, r"router_aux_loss_coef is 0.02.*router_aux_loss_coef=0\.0"),
        ("DPO", {"model": mixture}, ValueError, "router_aux_loss_coef=0.0 in the trainer's config"),
        ("DPO", {"model": bloom}, oomb.UnsupportedModelError, "Bloom"),
        ("DPO", {"ref_model": bloom}, oomb.UnsupportedModelError, "Bloom"),
        ("DPO", {"neftune_noise_alpha": 5.0}, ValueError, "neftune_noise_alpha"),
        ("DPO", {"peft_confg": len}, TypeError, "peft_confg"),
    ],
)
def test_unsupported_options_raise_at_once(
    tmp_path: Path, folder: str, kind: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = {key: value() for key, value in options.items() if value in (mixture, bloom)}
    given = {key: value for key, value in options.items() if value is len} | made
    settings = {key: value for key, value in options.items() if not callable(value)}
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        getattr(oomb, f"{kind}Trainer")(
            **{"model": folder, **given},
            args=getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), **{**SETTINGS, **settings}),
            train_dataset=texts() if kind == "SFT" else pairs(),
            eval_dataset=texts() if kind == "SFT" else pairs(),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )


def test_a_mixture_of_experts_without_router_loss_trains(tmp_path: Path, folder: str) -> None:
    def make(_: str) -> Any:
        torch.manual_seed(0)
        return mixture()

    ours, theirs = both("SFT", tmp_path, folder, texts(), make=make, router_aux_loss_coef=0.0)
    assert_same_logs(ours, theirs, rel=1e-4)
    saved = str(tmp_path / "mixture")
    mixture().save_pretrained(saved)
    args = trl.SFTConfig(output_dir=str(tmp_path), **{**SETTINGS, "eval_strategy": "no"})
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.02"):
        oomb.SFTTrainer(saved, args, None, texts(), processing_class=AutoTokenizer.from_pretrained(folder))


def test_batches_it_would_misread_raise(tmp_path: Path, folder: str) -> None:
    def collate(examples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([example["input_ids"][:10] for example in examples])
        return {"input_ids": ids, "labels": ids, "token_type_ids": torch.ones_like(ids)}

    args = trl.SFTConfig(output_dir=str(tmp_path), **{**SETTINGS, "eval_strategy": "no"})
    trainer = oomb.SFTTrainer(folder, args, collate, texts(), engine_config=CHUNKED)
    with pytest.raises(ValueError, match=r"the batch has token_type_ids.*padded on the right"):
        trainer.train()
    ids = torch.arange(20)[None]
    forward = EngineForward(trainer.engine, trainer.accelerator.autocast)
    with pytest.raises(ValueError, match=r"engine\.logprobs"):
        forward(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="no labels"):
        forward(input_ids=ids, fused_lm_head=True)


def test_activation_offloading_is_switched_off_with_a_warning(tmp_path: Path, folder: str) -> None:
    args = trl.SFTConfig(output_dir=str(tmp_path), activation_offloading=True, **{**SETTINGS, "eval_strategy": "no"})
    with pytest.warns(UserWarning, match="activation_offloading"):
        trainer = oomb.SFTTrainer(folder, args, None, texts())
    assert not trainer.args.activation_offloading


def test_token_statistics_match_the_full_distribution(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = oomb.Engine(load(folder), oomb.Config(chunk_size=8))
    stats = ("entropy", "mean_logits", "log_sum_sq_probs", "is_top1")
    ids = torch.randint(3, 40, (2, 45))
    labels = ids.clone()
    labels[0, :30] = labels[1, 5:26] = IGNORE_INDEX
    logits = engine.model.lm(ids).logits[:, :-1].detach()
    logp = logits.log_softmax(-1)
    # One label is the most likely token, so not all predictions are wrong.
    labels[:, 40] = logits[:, 39].argmax(-1)
    counts = labels[:, 1:] != IGNORE_INDEX
    answer = EngineForward(engine, torch.enable_grad, stats)(input_ids=ids, labels=labels, fused_lm_head=True)
    expected = {
        "entropy": -(logp.exp() * logp).sum(-1),
        "mean_logits": logits.mean(-1),
        "log_sum_sq_probs": logp.exp().square().sum(-1).log(),
        "is_top1": logits.argmax(-1) == labels[:, 1:],
        "log_probs": logp.gather(-1, labels[:, 1:, None].clamp_min(0)).squeeze(-1),
    }
    assert torch.equal(answer.label_mask, counts)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(answer, name), value.masked_fill(~counts, 0), msg=name)
    assert 2 <= answer.is_top1.sum() < counts.sum()

    rows = logits.flatten(0, 1), labels[:, 1:].flatten()
    whole = token_stats(*rows, stats)
    monkeypatch.setattr("oomb.ops.logprob.PLAIN_TILE", 7 * logits.shape[-1])
    for name, value in token_stats(*rows, stats).items():
        torch.testing.assert_close(value, whole[name])


def test_documents_are_told_apart_by_numbers_in_the_mask(folder: str) -> None:
    """Batches as Axolotl's and LLaMA-Factory's collators make them."""
    engine = oomb.Engine(load(folder), CHUNKED)
    documents = [torch.randint(3, 40, (n,)) for n in (20, 9)]
    ids = torch.cat(documents)[None]
    mask = torch.cat([torch.full((len(document),), 1 + i) for i, document in enumerate(documents)])[None]
    answer = EngineForward(engine, torch.enable_grad)(
        input_ids=ids, labels=ids, attention_mask=mask, fused_lm_head=True
    )
    expected = torch.cat(engine.logprobs(documents))[None, 1:]
    torch.testing.assert_close(answer.log_probs, expected)
    assert torch.equal(answer.label_mask, expected != 0)


def test_a_batch_without_labels_has_zero_loss(folder: str) -> None:
    model = load(folder)
    forward = EngineForward(oomb.Engine(model, CHUNKED), torch.enable_grad, ("entropy", "is_top1"))
    ids = torch.randint(3, 40, (1, 40))
    answer = forward(input_ids=ids, labels=torch.full_like(ids, IGNORE_INDEX), fused_lm_head=True)
    assert answer.log_probs.sum() == 0 and answer.entropy.sum() == 0 and not answer.label_mask.any()
    answer.log_probs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
