"""Every causal LM of transformers, at a tiny size, is trained exactly or refused.

`make test` runs a few, `make test-full` all. Families that need their own settings are in tests/engine/test_exact.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from checks import CHUNK, check_family
from families import (
    FAMILIES,
    FEATURES,
    SIZES,
    VOCAB,
    WINDOW,
    build,
    float64_throughout,
    mark_full,
    random_ids,
    randomize,
    relative_error,
    whole_loss,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import oomb
from oomb.models.checks import UnsupportedModelError

SWEEP_SIZES = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "n_embd": 48,
    "n_head": 6,
    "d_model": 48,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "state_size": 8,
    "conv_kernel": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "hidden_dropout": 0.0,
    "residual_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

WINDOWS: dict[str, dict[str, Any]] = {"windowed": {"sliding_window": WINDOW, "use_sliding_window": True}, "default": {}}
"""A sliding window forced on the model, and the config's own default."""

# Tried one after another, because some architectures reject some settings.
SWEEP_VARIANTS = [
    {},
    {"pad_token_id": 0},
    {"num_key_value_heads": 6},
    {"head_dim": None},
    {"num_experts_per_tok": 1},
    {"use_sliding_window": None},
]

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (model_type, {})
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in {family.model_type for family in FAMILIES.values()}
}
# Traps: layers that share K and V of others, attention within fixed blocks, positions that do not start at 0, encoders
# turned decoders.
OTHERS |= {
    "gemma3n_text": (
        "gemma3n_text",
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 5,
            "intermediate_size": [64] * 5,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "global_head_dim": 8,
        },
    ),
    "llama4_chunked": ("llama4_text", {"attention_chunk_size": 8, "intermediate_size_mlp": 48}),
    "bert_decoder": ("bert", {"is_decoder": True}),
    "roberta_decoder": ("roberta", {"is_decoder": True}),
    "electra_decoder": ("electra", {"is_decoder": True}),
    "minimax_m3_sparse": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
    ),
    "lfm2_conv": ("lfm2", {"layer_types": ["full_attention", "conv"]}),
}

QUICK = {
    "gemma3n_text",
    "gemma4_text",
    "llama4_chunked",
    "gpt_bigcode",
    "granitemoe",
    "bert_decoder",
    "lfm2_conv",
    "bloom",
}
"""What `make test` runs: the traps, one more model of each kind that trains, and one of each that is refused."""
SWEEP = mark_full(OTHERS, QUICK)


def build_any(model_type: str, overrides: dict[str, Any]) -> Any:
    """Return a tiny model of any architecture in eval mode, where routers draw no random numbers, or skip the test."""
    reason = ""
    for variant in SWEEP_VARIANTS:
        left_out = {key for key, value in variant.items() if value is None}
        settings = {**SIZES, **SWEEP_SIZES, **variant, **overrides}
        try:
            config = AutoConfig.for_model(model_type, **{k: v for k, v in settings.items() if k not in left_out})
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > 7e6:
                pytest.skip(f"{model_type}: {size} parameters, no tiny configuration")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).double().eval()
            if getattr(config, "attn_logit_softcapping", None):
                # Some releases of transformers use SDPA here, which ignores the soft cap.
                model.set_attn_implementation("eager")
            with contextlib.suppress(ValueError, AttributeError):
                model.set_experts_implementation("eager")
            randomize(model, torch.Generator().manual_seed(0))
            whole_loss(model, random_ids(1, 3))
        except Exception as e:  # of any type: settings of one architecture can break another
            reason = f"{type(e).__name__}: {e}"
        else:
            return model
    pytest.skip(f"{model_type} cannot be built tiny: {reason[:200]}")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", SWEEP)
def test_model_is_trained_exactly_or_refused(name: str, window: str) -> None:
    """A refusal names a class of the model; anything else matches whole-sequence training."""
    model_type, overrides = OTHERS[name]
    model = build_any(model_type, {**WINDOWS[window], **overrides})
    ids = random_ids(2, 23)
    try:
        with float64_throughout():
            check_family(model, ids, CHUNK, 1e-10)
        # Again with the model's own mixture of dtypes.
        with torch.no_grad():
            loss = oomb.Engine(model, oomb.Config(chunk_size=CHUNK)).loss(ids)
            assert relative_error(loss, whole_loss(model, ids)) <= 1e-5
    except UnsupportedModelError as refusal:
        names = {type(module).__name__ for module in model.modules()}
        assert any(name in str(refusal) for name in names), f"names no class of the model: {refusal}"
        assert all(p.grad is None for p in model.parameters())


def test_every_model_type_is_swept() -> None:
    """Each causal LM of transformers is a family of test_exact.py or a case of the sweep above."""
    swept = {case if isinstance(case, str) else case.values[0] for case in SWEEP}
    types = {OTHERS[name][0] for name in swept} | {family.model_type for family in FAMILIES.values()}
    assert types >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(OTHERS) >= QUICK


@pytest.mark.parametrize("feature", FEATURES)
def test_every_attention_feature_has_a_representative(feature: str) -> None:
    """`make test` skips the other families, so these must have what they stand for."""
    name, shows_feature = FEATURES[feature]
    assert shows_feature(build(name).config)
