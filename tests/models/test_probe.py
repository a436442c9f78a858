"""Model shapes: read from tensors, recorded on the meta device, or taken from the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, SIZES, build
from transformers import AutoConfig

from oomb.models.causal_lm import CausalLM
from oomb.models.load import meta_model
from oomb.models.probe import attention_layers, model_shape, record_shapes, shapes_from_config

SOME_FAMILIES = [
    "llama", "llama_tied", "qwen2_sliding", "gemma3", "gpt2", "opt", "mixtral", "gpt_oss", "deepseek_v3",
    "phi3_longrope_long",
]  # fmt: skip


class Caller:
    """A pass that is active while shapes are recorded, and must not be called."""

    def attend(self, call: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("name", SOME_FAMILIES)
def test_shape_matches_the_tensors(name: str) -> None:
    model = build(name, dtype=torch.float32)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    attention = model.config._attn_implementation
    shape = model_shape(model)
    assert model.config._attn_implementation == attention
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert shape.weight_bytes == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert shape.grad_bytes == shape.wide_grad_bytes == 4 * shape.trainable_params and shape.float32_sum_bytes == 0
    assert (shape.itemsize, shape.hidden_size, shape.vocab_size) == (4, 48, SIZES["vocab_size"])


@pytest.mark.parametrize("name", SOME_FAMILIES)
def test_layers_without_weights_match_a_real_forward(name: str) -> None:
    model = build(name, dtype=torch.float32)
    lm = CausalLM(model)
    with lm.activate(Caller(), 1, lm.state()):
        recorded = record_shapes(lm, on_meta=False)
    shape = model_shape(model)
    assert shape.layers == tuple(recorded[index] for index in sorted(recorded))
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.config})
    assert model_shape(meta_model(config, dtype=torch.float32)) == shape


def test_layers_from_the_config_alone() -> None:
    for name in ("llama", "qwen2_sliding", "gemma3", "gpt_oss", "deepseek_v3"):
        model = build(name, dtype=torch.float32)
        assert shapes_from_config(model.config, torch.float32) == attention_layers(CausalLM(model))


def test_attention_dropout_does_not_stop_the_recording() -> None:
    model = build("llama", dtype=torch.float32, attention_dropout=0.1)
    assert model.training and len(record_shapes(CausalLM(model), on_meta=True)) == 3


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_active_params(name: str) -> None:
    model = build(name, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not model.get_input_embeddings().weight]
    # A tied embedding is the head; a token is routed to two experts of four.
    head = model.get_output_embeddings().weight
    expected = sum(p.numel() // (2 if p.ndim == 3 else 1) for p in {*matrices, head})
    assert model_shape(model).active_params == model_shape(model).trained_params == expected


def test_layer_io_width() -> None:
    layer = build("llama", dtype=torch.float32).model.layers[0]
    assert model_shape(build("llama")).layer_io_width == sum(sum(p.shape) for p in layer.parameters() if p.ndim == 2)
    # Queries and output, keys and values, two experts of four, the router.
    mixtral = model_shape(build("mixtral", dtype=torch.float32))
    assert mixtral.layer_io_width == 2 * (48 + 48) + 2 * (48 + 16) + 2 * (48 + 128 + 64 + 48) + (48 + 4)


def lora(dtype: torch.dtype) -> Any:
    return peft.get_peft_model(build("llama", dtype=dtype), peft.LoraConfig(r=4, target_modules="all-linear"))


def test_shape_with_adapters() -> None:
    base, model = model_shape(build("llama", dtype=torch.bfloat16)), lora(torch.bfloat16)
    adapted = model_shape(model)
    assert adapted.has_adapters and not base.has_adapters
    # PEFT's adapters are float32, and compute in it without autocast.
    assert adapted.has_float32_adapters and not base.has_float32_adapters
    assert model_shape(model, autocast=True) == replace(adapted, has_float32_adapters=False)
    # On a float32 base they are not wider.
    wide = model_shape(lora(torch.float32))
    assert wide.has_adapters and not wide.has_float32_adapters
    assert adapted == model_shape(model.get_base_model())
    assert adapted.layers == base.layers and adapted.head_grad_bytes == 0
    assert adapted.grad_bytes == adapted.wide_grad_bytes
    assert adapted.grad_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert adapted.trained_params == adapted.trainable_params
    assert adapted.layer_io_width == 2 * base.layer_io_width + 7 * 2 * 4
    assert base.float32_sum_bytes == 2 * base.grad_bytes
