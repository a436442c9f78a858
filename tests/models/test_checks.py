"""Models and inputs that cannot be trained exactly are refused before any work, naming the cause and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import LENGTH, SIZES, VOCAB, build, random_ids
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import oomb
from oomb.models.checks import UnsupportedModelError


def config_for(model_type: str, **overrides: Any) -> Any:
    sizes = {**SIZES, "num_hidden_layers": 2, **overrides}
    return AutoConfig.for_model(model_type, **{key: value for key, value in sizes.items() if value != "leave out"})


LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA_HEADS = {"mamba_n_heads": 12, "mamba_d_head": 8}

# Layers that carry something else than K and V: the message names the layer, its model and its type.
STATEFUL: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": (
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24},
        r"layer 0 of Qwen3Next.*linear_attention",
    ),
    "qwen3_5_text": (LINEAR, r"layer 0 of Qwen3_5.*linear_attention"),
    "mamba": ({}, r"layer 0 of Mamba\w*"),
    "mamba2": ({"num_heads": 12, "n_groups": 2, "state_size": 8}, r"layer 0 of Mamba2\w*"),
    "falcon_mamba": ({}, r"layer 0 of FalconMamba\w*"),
    "lfm2": ({"layer_types": ["full_attention", "conv"]}, r"layer 1 of Lfm2.*conv"),
    "jamba": ({"num_experts": 2, "num_experts_per_tok": 1}, r"layer 0 of Jamba\w*"),
    "bamba": (MAMBA_HEADS, r"layer 0 of Bamba\w*"),
    "granitemoehybrid": (
        {**MAMBA_HEADS, "num_local_experts": 2, "layer_types": ["attention", "mamba"]},
        r"layer 1 of GraniteMoeHybrid\w*",
    ),
    "minimax": (
        {"num_local_experts": 2, "layer_types": ["full_attention", "linear_attention"]},
        r"layer 1 of MiniMax.*linear_attention",
    ),
    "recurrent_gemma": ({"num_hidden_layers": 3}, r"RecurrentGemma\w*.*(state|linear_attention)"),
    "rwkv": ({}, r"Rwkv\w*.*state"),
}

# Models that bypass the attention interface: the message names the class and its path.
OWN_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, r"BloomForCausalLM.*BloomAttention at h\.0"),
    "falcon": ({"head_dim": "leave out"}, r"FalconForCausalLM.*FalconAttention at h\.0"),
    "gptj": ({"n_layer": 2, "n_embd": 48, "n_head": 6, "rotary_dim": 4}, r"GPTJForCausalLM.*GPTJAttention at h\.0"),
    "mpt": ({"n_layers": 2, "n_heads": 6, "d_model": 48}, r"MptForCausalLM.*MptAttention at blocks\.0"),
    "codegen": ({"n_layer": 2, "n_embd": 48, "n_head": 4, "rotary_dim": 4}, r"CodeGenForCausalLM.*CodeGenAttention"),
}

# Bidirectional attention, which no order of chunks can compute.
BIDIRECTIONAL: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, r"BertLMHeadModel.*is_decoder"),
    "roberta": ({}, r"RobertaForCausalLM.*is_decoder"),
    "electra": ({}, r"ElectraForCausalLM.*is_decoder"),
}

UNSUPPORTED = {**STATEFUL, **OWN_ATTENTION, **BIDIRECTIONAL}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_model(model_type: str) -> None:
    overrides, names = UNSUPPORTED[model_type]
    model = AutoModelForCausalLM.from_config(config_for(model_type, **overrides))
    with pytest.raises(UnsupportedModelError, match=rf"(?s){names}"):
        oomb.Engine(model)


def test_unsupported_model_error_is_a_value_error() -> None:
    assert issubclass(UnsupportedModelError, ValueError)
    assert oomb.UnsupportedModelError is UnsupportedModelError


def sequence_classifier() -> nn.Module:
    return transformers.LlamaForSequenceClassification(config_for("llama"))


def prompt_tuned() -> nn.Module:
    return peft.get_peft_model(build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def encoder_decoder() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


@contextmanager
def one_process_group(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_parameters(tmp_path: Path) -> None:
    """DTensors of tp_plan and fully_shard: each gradient would cover one shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = build("llama")
    with one_process_group(tmp_path):
        module = model.model.layers[1].mlp.up_proj
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(UnsupportedModelError, match=r"(?s)LlamaForCausalLM.*DTensor.*tp_plan.*one process"):
            oomb.Engine(model)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_for("llama"))


NOT_A_CAUSAL_LM: dict[str, tuple[Callable[[], Any], str]] = {
    "linear": (lambda: nn.Linear(3, 3), r"Linear.*(Hugging Face|AutoModelForCausalLM)"),
    "not_a_module": (lambda: "gpt2", r"str.*(Hugging Face|AutoModelForCausalLM)"),
    "no_head": (lambda: transformers.LlamaModel(config_for("llama")), r"LlamaModel.*(head|AutoModelForCausalLM)"),
    "classifier": (sequence_classifier, r"LlamaForSequenceClassification.*(head|AutoModelForCausalLM)"),
    "masked_lm": (lambda: transformers.BertForMaskedLM(config_for("bert")), r"BertForMaskedLM"),
    "encoder_decoder": (encoder_decoder, r"T5ForConditionalGeneration"),
    "meta": (on_meta, r"LlamaForCausalLM.*meta.*load"),
    "prompt_tuning": (prompt_tuned, r"(?i)prompt.*LoRA"),
}


@pytest.mark.parametrize("case", NOT_A_CAUSAL_LM)
def test_not_a_causal_lm(case: str) -> None:
    make, names = NOT_A_CAUSAL_LM[case]
    with pytest.raises(UnsupportedModelError, match=rf"(?s){names}"):
        oomb.Engine(make())


# Input


def no_work_may_happen(model: nn.Module) -> None:
    """Fail the test as soon as any module runs."""

    def fail(module: nn.Module, *_: Any) -> None:
        pytest.fail(f"{type(module).__name__} ran before the refusal")

    for module in model.modules():
        module.register_forward_pre_hook(fail)


def left_padding(length: int = LENGTH) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :5] = 0
    return mask


def hole_in_the_mask() -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 9] = 0
    return mask


def changed(ids: Tensor, value: int) -> Tensor:
    ids = ids.clone()
    ids[1, 17] = value
    return ids


IDS = random_ids(2, LENGTH)
BAD_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    "no_rows": ({"input_ids": IDS[:0]}, r"empty.*\(0, 41\)"),
    "no_tokens": ({"input_ids": IDS[:, :0]}, r"empty.*\(2, 0\)"),
    "one_dimension": ({"input_ids": IDS[0]}, r"\(41,\).*batch"),
    "three_dimensions": ({"input_ids": IDS[None]}, r"\(1, 2, 41\)"),
    "float_ids": ({"input_ids": IDS.float()}, r"float32"),
    "id_too_large": ({"input_ids": changed(IDS, VOCAB)}, rf"{VOCAB}.*17.*vocabulary.*{VOCAB}"),
    "negative_id": ({"input_ids": changed(IDS, -1)}, r"-1.*17.*vocabulary"),
    "id_of_minus_100": ({"input_ids": changed(IDS, -100)}, r"-100.*17.*vocabulary"),
    "shorter_labels": ({"input_ids": IDS, "labels": IDS[:, :-1]}, r"labels.*\(2, 40\).*\(2, 41\)"),
    "fewer_labels": ({"input_ids": IDS, "labels": IDS[:1]}, r"labels.*\(1, 41\).*\(2, 41\)"),
    "flat_labels": ({"input_ids": IDS, "labels": IDS.flatten()}, r"labels.*\(82,\).*\(2, 41\)"),
    "label_too_large": ({"input_ids": IDS, "labels": changed(IDS, VOCAB)}, rf"labels.*{VOCAB}.*vocabulary"),
    "negative_label": ({"input_ids": IDS, "labels": changed(IDS, -1)}, r"labels.*-1.*vocabulary"),
    "mask_shape": ({"input_ids": IDS, "attention_mask": left_padding(7)}, r"attention_mask.*\(2, 7\).*\(2, 41\)"),
    "left_padding": ({"input_ids": IDS, "attention_mask": left_padding()}, r"row 1.*left.*right"),
    "hole": ({"input_ids": IDS, "attention_mask": hole_in_the_mask()}, r"row 1 .*gap at token \d+"),
    "nothing_counts": ({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, r"-100"),
    "one_token": ({"input_ids": IDS[:, :1]}, r"(?i)token|label"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    arguments, names = BAD_INPUT[case]
    model = build("llama")
    engine = oomb.Engine(model, oomb.Config(chunk_size=7))
    no_work_may_happen(model)
    with pytest.raises(ValueError, match=rf"(?s){names}"):
        engine.loss(**arguments)
    if "labels" not in arguments and case != "one_token":
        with pytest.raises(ValueError, match=rf"(?s){names}"):
            engine.logprobs(**arguments)


@pytest.mark.parametrize("case", ["left_padding", "hole"])
def test_padding_on_the_left_is_refused_without_gradients_too(case: str) -> None:
    arguments, names = BAD_INPUT[case]
    with torch.no_grad(), pytest.raises(ValueError, match=rf"(?s){names}"):
        oomb.Engine(build("llama")).loss(**arguments)


PAD = 0


@pytest.mark.parametrize(("pad", "refused"), [(PAD, True), (1, False), (2, False), (None, False)])
def test_left_padding_without_a_mask(pad: int | None, refused: bool) -> None:
    """A row that starts with the padding token and does not end with it is padded on the left, unless that token also
    begins (1) or ends (2) texts."""
    model = build("llama", pad_token_id=pad)
    ids = IDS.clone()
    ids[1, :4] = PAD if pad is None else pad
    engine = oomb.Engine(model, oomb.Config(chunk_size=7))
    if not refused:
        assert engine.loss(ids).isfinite()
        return
    no_work_may_happen(model)
    with pytest.raises(ValueError, match=r"(?s)row 1.*left.*right"):
        engine.loss(ids)


def test_right_padding_without_a_mask_is_accepted() -> None:
    """Its tokens count unless a mask or labels of -100 exclude them, as in Hugging Face."""
    ids = IDS.clone()
    ids[1, 30:] = PAD
    engine = oomb.Engine(build("llama", pad_token_id=PAD), oomb.Config(chunk_size=7))
    assert engine.loss(ids).isfinite()


def test_a_mask_of_ones_makes_padding_tokens_text() -> None:
    ids = IDS.clone()
    ids[1, :4] = PAD
    engine = oomb.Engine(build("llama", pad_token_id=PAD), oomb.Config(chunk_size=7))
    assert engine.loss(ids, attention_mask=torch.ones_like(ids)).isfinite()


ATTENTION_DROPOUTS = [
    ("llama", {"attention_dropout": 0.1}),
    ("gpt2", {"attn_pdrop": 0.1}),
    ("gpt_neox", {"attention_dropout": 0.1}),
]


@pytest.mark.parametrize(("name", "dropout"), ATTENTION_DROPOUTS, ids=lambda value: str(value))
def test_attention_dropout(name: str, dropout: dict[str, float]) -> None:
    """Refused in training mode, harmless in eval mode."""
    model = build(name, **dropout)
    engine = oomb.Engine(model, oomb.Config(chunk_size=7))
    model.eval()
    assert engine.loss(IDS).isfinite()
    model.train()
    no_work_may_happen(model)
    with pytest.raises(ValueError, match=r"(?si)attention.*dropout.*0\.1.*\b0\b"):
        engine.loss(IDS)


BAD_SETTINGS = [
    ({"chunk_size": 0}, r"chunk_size.*0"),
    ({"chunk_size": 2.5}, r"chunk_size.*2\.5"),
    ({"chunk_size": True}, r"chunk_size.*True"),
    ({"kernels": "magic"}, r"kernels.*magic.*auto"),
    ({"checkpoint_layers": 1}, r"checkpoint_layers.*1.*auto"),
    ({"kv_dtype": "int4"}, r"kv_dtype.*int4.*bfloat16"),
    ({"param_grad_dtype": None}, r"param_grad_dtype.*None.*float32"),
]


@pytest.mark.parametrize(("settings", "names"), BAD_SETTINGS, ids=str)
def test_bad_settings(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){names}"):
        oomb.Config(**settings)


def test_unknown_setting() -> None:
    with pytest.raises(ValueError, match=r"(?s)chunksize.*chunk_size"):
        oomb.Config.from_dict({"chunksize": 7})


def test_unavailable_kernel() -> None:
    engine = oomb.Engine(build("llama"), oomb.Config(chunk_size=7, kernels="cudnn"))
    if torch.cuda.is_available():
        pytest.skip("cuDNN attention can serve here")
    with pytest.raises(ValueError, match=r"(?s)cudnn.*auto"):
        engine.loss(IDS)


def test_more_tokens_than_learned_positions() -> None:
    model = build("gpt2", max_position_embeddings=32)
    engine = oomb.Engine(model, oomb.Config(chunk_size=7))
    engine.loss(random_ids(1, 32))
    with pytest.raises(ValueError, match=r"33 tokens.* 32 positions"):
        engine.loss(random_ids(1, 33))


def test_config_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match=r"oomb.Config"):
        oomb.Engine(build("llama"), {"chunk_size": 7})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [24, "24", " 24 "])
@pytest.mark.parametrize("name", ["gpu_memory", "host_memory"])
def test_sizes_without_a_unit(name: str, size: int | str) -> None:
    with pytest.raises(ValueError, match=rf'{name} is .*24.*, a number of bytes; did you mean "24GiB"'):
        oomb.Config(**{name: size})
    for meant in (0, "0", "24B", 24 << 30, "24GiB"):
        oomb.Config(**{name: meant})


def test_load_balancing_loss() -> None:
    with pytest.raises(oomb.UnsupportedModelError, match="output_router_logits"):
        oomb.Engine(build("mixtral", output_router_logits=True))
