"""The examples at toy size, and the code in docs/howto_trl.md."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, fences
from scripts import EXAMPLES, load, logged, run_example, toy

import oomb


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy.model_folder(str(tmp_path_factory.mktemp("toy") / "model"))


def test_every_example_is_tested_and_documented() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"toy"}
    assert names == {"sft", "dpo", "grpo_style", "own_loss"}  # the first two in test_trl.py
    documents = "".join((ROOT / "docs" / f"howto_{page}.md").read_text() for page in ("trl", "own_loss"))
    assert all(f"../examples/{name}.py" in documents for name in names)


def test_reward_weighted_training_earns_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_style

    monkeypatch.chdir(tmp_path)
    rewards = grpo_style.train(toy.model_folder())
    assert len(rewards) == grpo_style.STEPS
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])


@pytest.mark.parametrize("name", ["grpo_style", "own_loss"])
def test_gradients_of_own_losses_match_the_whole_sequence(folder: str, name: str) -> None:
    module = __import__(name)
    ids = torch.randint(3, 40, (4, 50))
    mask = torch.arange(50) < torch.tensor([50, 44, 50, 31])[:, None]
    noise = 0.3 * torch.randn(2, 4, 50)

    def loss(logp: torch.Tensor) -> torch.Tensor:
        if name == "own_loss":
            return module.focal_loss(logp, mask)
        old, reference = logp.detach() + noise
        is_sampled = mask & (torch.arange(50) >= 20)
        return module.grpo_loss(logp, old, reference, torch.tensor([1.0, -1.0, 0.5, -0.5]), is_sampled)

    whole = load(folder)
    chunked = copy.deepcopy(whole)
    logits = whole(ids).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]
    expected = loss(torch.cat([torch.zeros(4, 1), picked], dim=1))
    expected.backward()
    ours = loss(oomb.Engine(chunked, oomb.Config(chunk_size=16)).logprobs(ids, attention_mask=mask))
    ours.backward()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    for (key, a), b in zip(chunked.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm(), key


def test_an_own_loss_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = [record["loss"] for record in logged(run_example("own_loss")["trainer"]) if "loss" in record]
    assert losses[-1] < 0.6 * losses[0]


def test_the_code_in_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = [f"{i} and {i * i}, " * 4 for i in range(8)]
    datasets.Dataset.from_dict({"text": words}).to_json("documents.jsonl")
    datasets.Dataset.from_dict({"prompt": words, "chosen": ["yes"] * 8, "rejected": ["no"] * 8}).to_json("pairs.jsonl")
    small = {"bf16": False, "use_cpu": True, "max_steps": 2, "save_strategy": "no", "report_to": "none"}
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, **small))
    monkeypatch.setattr(trl, "DPOConfig", partial(trl.DPOConfig, **small))
    blocks = fences(ROOT / "docs" / "howto_trl.md", "python")
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("Qwen/Qwen2.5-0.5B", folder).replace("4096", "16"), names)
        if "trainer" in names:
            assert names["trainer"].state.global_step == 2, block
