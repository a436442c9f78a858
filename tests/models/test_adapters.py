"""Quantized weights with LoRA: the settings of bitsandbytes, or an error that says what to install."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import CHUNKED, Samples, arguments, logged, tiny_model

import oomb
from oomb.models import adapters

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bits", [4, 8])
def test_missing_bitsandbytes(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    assert adapters.bnb_config() is None
    with pytest.raises(ValueError, match=rf"load_in_{bits}bit.*qlora.*pip install bitsandbytes"):
        adapters.bnb_config(**{f"load_in_{bits}bit": True})
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(entry.startswith("bitsandbytes") for entry in extras["qlora"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_8bit": True}, "both set"),
        ({"quant_type": "int4"}, "use nf4 or fp4"),
        ({"compute_dtype": "float8"}, "use bfloat16, float16 or float32"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapters.bnb_config(load_in_4bit=True, **options)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_trains_the_adapter_and_resumes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = adapters.bnb_config(load_in_4bit=True, compute_dtype="float32")
    assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")

    def trainer(folder: str) -> oomb.Trainer:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
        )
        torch.manual_seed(5)
        lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 2e-2, "max_steps": 4}
        return oomb.Trainer(
            peft.get_peft_model(model, lora),
            arguments(tmp_path / folder, **options),
            train_dataset=Samples(8, 41),
            engine_config=CHUNKED,
        )

    whole, resumed = trainer("a"), trainer("b")
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    after = whole.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora" in name for name in changed)
    assert any(value.dtype == torch.uint8 for value in after.values())
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(whole, "loss")
