"""Vision-language models: text alone is trained exactly through the text decoder, and images are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check_family, engine_for
from families import VOCAB, mark_full, random_ids, randomize
from transformers import AutoConfig, AutoModelForImageTextToText

import oomb
from oomb.models.causal_lm import CausalLM

IMAGE, VIDEO = 90, 91
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
PATCHES = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"depth": 3, "deepstack_visual_indexes": [0], **PATCHES},
    "qwen2_5_vl": {"depth": 3, **PATCHES},
    "glm4v": {"depth": 3, **PATCHES},
    "gemma3": {"num_hidden_layers": 3, **SIGLIP},
    "internvl": {"num_hidden_layers": 3, **SIGLIP},
}
"""Each tower has as many blocks as the decoder has layers."""


def build_with_tower(model_type: str) -> Any:
    config = AutoConfig.for_model(
        model_type, text_config=dict(TEXT), vision_config=VISION[model_type], image_token_id=IMAGE, video_token_id=VIDEO
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float64, attn_implementation={"": "sdpa", "text_config": "whole_float64"}
    )
    randomize(model, torch.Generator().manual_seed(0))
    return model.eval()


@pytest.mark.parametrize("model_type", mark_full(VISION, quick={"qwen3_vl"}))
def test_text_alone_is_exact(model_type: str, in_float64: None) -> None:
    """Some of these configs lack bos_token_id, eos_token_id or pad_token_id."""
    check_family(build_with_tower(model_type), random_ids(2, 23, high=IMAGE), 7, 1e-10, checkpoint_layers=True)


@pytest.mark.parametrize("model_type", VISION)
def test_layers_belong_to_the_text_decoder(model_type: str) -> None:
    """Checkpointing and compiling apply to these layers."""
    model = build_with_tower(model_type)
    layers, tower = CausalLM(model).layers, {name for name, _ in model.named_modules() if "vis" in name}
    assert not [name for name, module in model.named_modules() if module in set(layers) and name in tower]
    assert all(hasattr(layer.self_attn, "layer_idx") for layer in layers)


@pytest.mark.parametrize("model_type", VISION)
def test_image_placeholders_are_refused(model_type: str) -> None:
    engine = engine_for(build_with_tower(model_type))
    ids = random_ids(2, 12, high=IMAGE)
    ids[1, 4:6] = IMAGE
    message = rf"id {IMAGE}, the model's config.image_token\w+, at \[\d, 4\] \(2 times\)"
    for call in (engine.loss, engine.logprobs, lambda ids: engine.loss([ids[0], ids[1]])):
        with pytest.raises(ValueError, match=message):
            call(ids)


@pytest.mark.parametrize("padding", [IMAGE, VIDEO])
def test_placeholders_in_padding_are_accepted(padding: int) -> None:
    engine = engine_for(build_with_tower("qwen2_5_vl"))
    ids, mask = random_ids(2, 12, high=IMAGE), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    expected = engine.loss(ids, attention_mask=mask)
    ids[1, 8:] = padding
    assert engine.loss(ids, attention_mask=mask) == expected
    ids[0, 9] = padding
    with pytest.raises(ValueError, match=r"at \[0, 9\] \(1 times\)"):
        engine.loss(ids, attention_mask=mask)


def test_video_placeholders_are_refused() -> None:
    ids = random_ids(1, 12, high=IMAGE)
    ids[0, 3] = VIDEO
    with pytest.raises(ValueError, match="video_token_id"):
        oomb.Engine(build_with_tower("qwen2_5_vl")).loss(ids)
