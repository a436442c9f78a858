"""`oomb verify`: verdicts, input errors and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import invoke
from transformers import AutoModelForCausalLM, Gemma2Config

from oomb.config import Config
from oomb.eval import verify
from oomb.models import load, presets


def test_verify_trusts_a_saved_model(saved_model: Path) -> None:
    result = invoke("verify", saved_model, "--context", "160", "--chunk_size", "48", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("trust it: gradients match ")
    assert "21 parameters, 160 tokens in 4 chunks, float32" in result.output
    assert "model.layers." in result.output


@pytest.fixture
def capped_model(tmp_path: Path) -> Path:
    """A model whose logit soft cap changes attention, which SDPA does not support."""
    config = Gemma2Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=1, attn_logit_softcapping=0.1, initializer_range=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "capped")
    return tmp_path / "capped"


def test_the_reference_includes_soft_caps(capped_model: Path) -> None:
    options = ["--chunk_size", "32", "--device", "cpu"]
    result = invoke("verify", capped_model, "--context", "96", *options)
    assert result.exit_code == 0, result.output
    result = invoke("bench", "--model_name_or_path", capped_model, "--contexts", "96", *options)
    assert result.exit_code == 0 and "WRONG" not in result.output, result.output
    plain = load.load_model(str(capped_model), device="cpu")
    capped = plain(torch.arange(96)[None], labels=torch.arange(96)[None]).loss
    plain.config.attn_logit_softcapping = None
    for layer in plain.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert not torch.isclose(plain(torch.arange(96)[None], labels=torch.arange(96)[None]).loss, capped, rtol=1e-3)


def test_verify_truncates_no_name_in_a_narrow_terminal(saved_model: Path) -> None:
    options = ["--context", "96", "--chunk_size", "48", "--dtype", "bf16", "--device", "cpu"]
    result = invoke("verify", saved_model, *options, columns=80)
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    assert "closest to their limit" in result.output


def test_a_failing_verification_exits_with_2(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(verify.Engine, "loss", broken)
    result = invoke("verify", saved_model, "--context", "96", "--chunk_size", "48", "--device", "cpu")
    assert result.exit_code == 2
    assert "error: RuntimeError: a kernel failed" in result.output


def test_half_precision_is_compared_with_float32(saved_model: Path) -> None:
    options = ["--context", "256", "--chunk_size", "64", "--dtype", "bfloat16", "--device", "cpu"]
    result = invoke("verify", saved_model, *options)
    assert result.exit_code == 0, result.output
    assert "rounding error is" in result.output
    assert "ratio" in result.output


def test_wrong_gradients_are_not_trusted(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = verify.Engine.loss
    monkeypatch.setattr(verify.Engine, "loss", lambda *args, **options: loss(*args, **options) * 1.001)
    options = ["--context", "128", "--chunk_size", "48", "--device", "cpu"]
    result = invoke("verify", saved_model, *options)
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("do not trust: the losses differ by 1.0e-03, more than 1e-04")
    # An error of 40% must show in bfloat16 noise.
    monkeypatch.setattr(verify.Engine, "loss", lambda *args, **options: loss(*args, **options) * 1.4)
    result = invoke("verify", saved_model, *options, "--dtype", "bfloat16")
    assert result.exit_code == 1, result.output
    assert "x standard training's, more than 1.2" in result.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_parameter_is_found(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    model = load.load_model("demo", device="cpu", dtype=dtype)
    wrong = "model.layers.1.mlp.up_proj.weight"
    gradients = verify._gradients
    calls: list[int] = []

    def spoil_the_first(*args: Any) -> Any:
        loss, found = gradients(*args)
        if not calls:
            found[wrong] = found[wrong] * 1.05
        calls.append(1)
        return loss, found

    assert verify.compare(model, Config(chunk_size=48), context=160).trusted
    monkeypatch.setattr(verify, "_gradients", spoil_the_first)
    comparison = verify.compare(model, Config(chunk_size=48), context=160)
    assert not comparison.trusted
    assert comparison.rows[0].name == wrong
    assert wrong in comparison.verdict


def test_a_mixture_of_experts_needs_float32() -> None:
    config = presets.preset_config("demo", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    assert verify.compare(model, Config(chunk_size=24), context=64).trusted
    with pytest.raises(ValueError, match="float32"):
        verify.compare(model.bfloat16(), Config(chunk_size=24), context=64)


def test_verify_leaves_the_model_unchanged() -> None:
    model = load.load_model("demo", device="cpu", dtype="bfloat16").train()
    before = {name: (value.dtype, value.clone()) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    verify.compare(model, Config(chunk_size=32), context=64)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.dtype == before[name][0], name
        assert torch.equal(value, before[name][1]), name
        assert value.grad is None
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--chunk_size", "64", "--context", "64"], "set chunk_size below"),
        (["demo", "--layers", "9"], "this model has 2 layers"),
        (["demmo"], "did you mean 'demo'?"),
    ],
)
def test_bad_arguments_are_one_message(arguments: list[str], message: str) -> None:
    result = invoke("verify", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_verify_keeps_only_the_first_layers() -> None:
    result = invoke(
        "verify", "smollm2-135m", "--layers", "1", "--context", "24", "--chunk_size", "8", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert "11 parameters" in result.output


def test_adapters_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"LoRA adapters without their base model.*merge_and_unload"):
        load.check_model_name(str(tmp_path))


def test_a_folder_takes_precedence_over_a_preset_in_other_case(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert presets.is_preset("SmolLM2-135M") and presets.is_preset("smollm2-135m")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M").symlink_to(saved_model)
    assert not presets.is_preset("SmolLM2-135M") and presets.is_preset("smollm2-135m")
    assert load.load_model("SmolLM2-135M", device="cpu").config.vocab_size < 1000
