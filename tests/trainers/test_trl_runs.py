"""Runs of the TRL trainers: offloaded optimizers, resuming, cached references."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load
from transformers import AutoTokenizer, ProcessorMixin

import oomb
from oomb.trainers import sft

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytest.importorskip("peft")

from trl_data import CHUNKED, SETTINGS, adapted, assert_same_weights, pairs, texts  # noqa: E402


@pytest.mark.parametrize("name", ["offloaded_adamw", "offloaded_adamw_8bit"])
@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_offloaded_states_stay_in_host_memory_and_resume(
    tmp_path: Path, folder: str, kind: str, data: Any, name: str
) -> None:
    rates = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "learning_rate": 1e-3}

    def trainer(home: Path, optimizer: str | None) -> Any:
        settings = {**SETTINGS, **rates, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        settings |= {"optim": "adamw_torch", "eval_strategy": "no"}
        return getattr(oomb, f"{kind}Trainer")(
            model=folder,
            args=getattr(trl, f"{kind}Config")(output_dir=str(home), **settings),
            train_dataset=data(),
            engine_config=CHUNKED,
            optimizer=optimizer,
        )

    whole, resumed, plain = trainer(tmp_path, name), trainer(tmp_path, name), trainer(tmp_path / "plain", None)
    assert whole.engine.allocator.optimizer_on_host and not plain.engine.allocator.optimizer_on_host
    for one in (whole, plain):
        one.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for key, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key
    ours, theirs = whole.optimizer.optimizer, plain.optimizer.optimizer
    assert type(ours) is oomb.OffloadedAdamW and type(theirs) is torch.optim.AdamW
    assert ours.state_dtype == ("8bit" if name.endswith("8bit") else "float32")
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert all(group[key] == other[key] for key in ("betas", "eps", "weight_decay", "initial_lr"))
    assert ours.param_groups[0]["weight_decay"] == 0.1
    assert_same_weights(
        whole.model, plain.model, load(folder).state_dict(), tolerance=0.3 if name.endswith("8bit") else 1e-3
    )


@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_unknown_or_conflicting_optimizers_raise(tmp_path: Path, folder: str, kind: str, data: Any) -> None:
    handed = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    known = "use one of offloaded_adamw, offloaded_adamw_bf16, offloaded_adamw_8bit"
    for options, message in (
        ({"optimizer": "lion"}, f"optimizer is 'lion'; {known}"),
        ({"optimizer": "offloaded_adamw", "optimizers": (handed, None)}, "pass only one"),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(oomb, f"{kind}Trainer")(
                model=folder,
                args=getattr(trl, f"{kind}Config")(
                    output_dir=str(tmp_path), **{**SETTINGS, "optim": "adamw_torch", "eval_strategy": "no"}
                ),
                train_dataset=data(),
                **options,
            )


class Processor(ProcessorMixin):
    """What TRL recognizes a vision-language model by."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("kind", "data"), [("SFT", texts), ("DPO", pairs)])
def test_images_raise_before_the_first_step(tmp_path: Path, folder: str, kind: str, data: Any) -> None:
    with pytest.raises(ValueError, match=rf"the training data has images.*trl\.{kind}Trainer"):
        getattr(oomb, f"{kind}Trainer")(
            model=load(folder),
            args=getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), **{**SETTINGS, "eval_strategy": "no"}),
            train_dataset=data().add_column("images", [[] for _ in data()]),
            processing_class=Processor(folder),
        )


@pytest.mark.parametrize(
    ("args", "config"),
    [({"ld_alpha": 0.1}, CHUNKED), ({}, oomb.Config(chunk_size=16, page_size=8, page_budget=2))],
    ids=["ld_alpha", "sparse attention"],
)
def test_cached_references_depend_on_the_settings(
    tmp_path: Path, folder: str, args: dict[str, Any], config: oomb.Config
) -> None:
    """TRL caches precomputed references on disk."""
    pairs().save_to_disk(str(tmp_path / "pairs"))

    def references(data: Any, args: dict[str, Any], config: oomb.Config) -> torch.Tensor:
        settings = {**SETTINGS, "eval_strategy": "no", "precompute_ref_log_probs": True, **args}
        trainer = oomb.DPOTrainer(
            folder,
            args=trl.DPOConfig(output_dir=str(tmp_path / "out"), **settings),
            train_dataset=data,
            engine_config=config,
        )
        return torch.tensor(trainer.train_dataset["ref_chosen_logps"])

    def on_disk() -> Any:
        return datasets.load_from_disk(str(tmp_path / "pairs"))

    plain = references(on_disk(), {}, CHUNKED)
    expected = references(pairs(), args, config)
    torch.testing.assert_close(references(on_disk(), args, config), expected)
    assert not torch.allclose(plain, expected)
    # They are reused if nothing changed.
    num_files = len(list((tmp_path / "pairs").iterdir()))
    torch.testing.assert_close(references(on_disk(), {}, CHUNKED), plain)
    assert len(list((tmp_path / "pairs").iterdir())) == num_files


def test_an_adapter_and_its_reference_copy_resume(tmp_path: Path, folder: str) -> None:
    """DPO's reference is a copy of the adapter in a subfolder of the checkpoint."""

    def trainer() -> Any:
        settings = {**SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        return oomb.DPOTrainer(
            model=adapted(folder),
            args=trl.DPOConfig(output_dir=str(tmp_path), **{**settings, "learning_rate": 1e-2, "optim": "adamw_torch"}),
            train_dataset=pairs(),
            processing_class=AutoTokenizer.from_pretrained(folder),
            engine_config=CHUNKED,
        )

    whole, resumed = trainer(), trainer()
    whole.train()
    assert any((tmp_path / "checkpoint-2").glob("*/adapter_model.safetensors"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trained = {name for name, p in whole.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in resumed.model.named_parameters() if p.requires_grad}
    for key, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], value), key


def test_without_trl_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(oomb), "SFTTrainer", raising=False)
    monkeypatch.delitem(vars(sft), "SFTTrainer", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "trl", None)
        with pytest.raises(ImportError, match=r"oomb\.SFTTrainer needs TRL: pip install trl "):
            from oomb import SFTTrainer  # noqa: F401
        names: dict[str, Any] = {}
        exec("from oomb import *", names)
        assert names["Trainer"] is oomb.Trainer and "SFTTrainer" in dir(oomb)
    monkeypatch.delattr("trl.trainer.utils.add_fused_lm_head")
    with pytest.raises(ImportError, match=rf"needs TRL 1\.15 or newer, but {re.escape(trl.__version__)}"):
        _ = oomb.SFTTrainer
    with pytest.raises(AttributeError, match="it has SFTTrainer"):
        _ = sft.GRPOTrainer
