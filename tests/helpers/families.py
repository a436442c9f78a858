"""Build tiny models of many families and compute their whole-sequence reference.

The reference is an ordinary forward and backward of the Hugging Face model over the whole sequence. Whatever its
dtype, it drops to float32 in three places: the softmax of eager attention, rotary tables and norms in the modeling
code, and the model's own loss (`logits.float()`). `whole_attention` and `whole_logprobs` replace the first and the last
in float64, and tests/engine/test_exact.py compares them with the originals. The second limits agreement to about 1e-7
unless `float64_throughout` lifts it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

VOCAB = 97
LENGTH = 41
"""Odd, and not a multiple of any chunk size or window below."""
WINDOW = 10
"""Between chunk sizes 7 and 16, and not a multiple of either."""


@dataclass(frozen=True)
class Family:
    """A tiny model of one architecture, and how closely its gradients must match."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    native_float64: bool = False
    """Whether the modeling code keeps float64, so that gradients match to 1e-10 as they are."""
    is_moe: bool = False
    """Whether to test it in float32, too, because the grouped matmul of experts has no float64 kernel."""


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}

MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

SLIDING_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def longrope(original_max_position_embeddings: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": original_max_position_embeddings,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.5, 4.0, 6.0],
            "original_max_position_embeddings": original_max_position_embeddings,
        },
    }


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama_tied": Family("llama", {"tie_word_embeddings": True}),
    # The whole sequence is longer than max_position_embeddings but its first chunks are not.
    "llama_dynamic_rope": Family(
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama_yarn": Family(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": Family("qwen2"),
    "qwen2_sliding": Family("qwen2", {"use_sliding_window": True, **SLIDING_FULL}),
    "qwen3": Family("qwen3"),
    "mistral_sliding": Family("mistral", {"sliding_window": WINDOW}),
    "gemma2": Family(
        "gemma2",
        # Caps small enough to change scores and logits of a tiny model.
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, **SLIDING_FULL},
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "query_pre_attn_scalar": 8,
            **SLIDING_FULL,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": Family("phi3", {"num_key_value_heads": 3}),
    "phi3_sliding": Family("phi3", {"sliding_window": WINDOW}),
    "phi3_longrope_short": Family("phi3", longrope(64)),
    # The whole sequence is longer than the original context; chunks before position 24 are not.
    "phi3_longrope_long": Family("phi3", longrope(24)),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", SLIDING_FULL),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
    ),
    "starcoder2": Family(
        "starcoder2",
        {"sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "glm4": Family("glm4"),
    "gpt_neox": Family("gpt_neox", {"hidden_dropout": 0.0, "num_key_value_heads": 6, "use_parallel_residual": True}),
    "gpt2": Family(
        "gpt2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "scale_attn_by_inverse_layer_idx": True,
        },
        native_float64=True,
    ),
    "opt": Family(
        "opt",
        {"ffn_dim": 64, "word_embed_proj_dim": 48, "dropout": 0.0, "layerdrop": 0.0, "pad_token_id": 0},
        native_float64=True,
    ),
    "phi": Family("phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "cohere": Family("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": Family("cohere2", {"logit_scale": 0.5, **SLIDING_FULL}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "stablelm": Family("stablelm", {"hidden_dropout": 0.0, "use_qkv_bias": True}),
    "nemotron": Family("nemotron"),
    "exaone4": Family("exaone4", SLIDING_FULL),
    "ernie4_5": Family("ernie4_5"),
    "apertus": Family("apertus"),
    "helium": Family("helium"),
    "seed_oss": Family("seed_oss", {"residual_dropout": 0.0}),
    # A window that is switched off, as in the default config.
    "smollm3_idle_window": Family("smollm3", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen2_moe": Family("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}, is_moe=True),
    "mixtral": Family("mixtral", {**MOE, "sliding_window": None}, is_moe=True),
    "qwen3_moe": Family("qwen3_moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}, is_moe=True),
    "olmoe": Family("olmoe", MOE, is_moe=True),
    "gpt_oss": Family("gpt_oss", {**MOE, **SLIDING_FULL}, is_moe=True),
    # Keys of 8 + 8, values of 12.
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        is_moe=True,
    ),
}


FEATURES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "multi-head attention": ("gpt2", lambda c: c.model_type == "gpt2"),
    "grouped queries": ("llama", lambda c: c.num_key_value_heads < c.num_attention_heads),
    "untied embeddings": ("llama", lambda c: not c.tie_word_embeddings),
    "tied embeddings": ("llama_tied", lambda c: c.tie_word_embeddings),
    "sliding window": ("mistral_sliding", lambda c: c.sliding_window == WINDOW),
    "window in some layers": ("gemma3", lambda c: set(c.layer_types) == {"sliding_attention", "full_attention"}),
    "soft-capped scores": ("gemma2", lambda c: c.attn_logit_softcapping is not None),
    "attention sinks": ("gpt_oss", lambda c: c.model_type == "gpt_oss"),
    "mixture of experts": ("mixtral", lambda c: c.num_local_experts > 1),
    "dynamic RoPE": ("llama_dynamic_rope", lambda c: c.rope_parameters["rope_type"] == "dynamic"),
    "longrope": ("phi3_longrope_long", lambda c: c.rope_parameters["rope_type"] == "longrope"),
    "parallel blocks": ("gpt_neox", lambda c: c.use_parallel_residual),
    "latent attention": ("deepseek_v3", lambda c: c.kv_lora_rank is not None),
    "learned positions": ("opt", lambda c: c.model_type == "opt"),
}
"""For each feature of attention a family that has it, and how its config shows that."""
REPRESENTATIVES = {name for name, _ in FEATURES.values()}


def mark_full(names: Iterable[str], quick: Container[str] = REPRESENTATIVES) -> list[Any]:
    """Mark all names as `full` but a quick subset, for `pytest.mark.parametrize`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Set weights so large that attention is far from uniform and gradients are far above rounding errors."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        with torch.no_grad():
            if parameter.dim() == 1:
                # Norm weights stay near their initial 0 or 1; biases and sinks become non-zero.
                parameter.copy_((parameter.nan_to_num().clamp(-1, 1) + 0.3 * noise) if "sinks" not in name else noise)
            elif "embed" in name or ".wte" in name or ".wpe" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.3 * parameter.shape[-1] ** -0.5)


def build(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> Any:
    """Return the tiny model of a family or model type in training mode, with `whole_attention`."""
    family = FAMILIES.get(name) or Family(name)
    config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.config, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="whole_float64")
    if family.is_moe and dtype == torch.float64:
        model.set_experts_implementation("eager")
    randomize(model, torch.Generator().manual_seed(seed))
    return model.train()


def random_ids(batch: int, length: int, *, seed: int = 0, low: int = 3, high: int = VOCAB) -> torch.Tensor:
    """Return random token ids, none of them special."""
    return torch.randint(low, high, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole_attention(
    module: nn.Module,
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute eager attention like the modeling code, but with the softmax in the model's dtype."""
    assert dropout == 0.0
    groups = q_BHTD.shape[1] // k_BHTD.shape[1]
    k_BHTD, v_BHTD = k_BHTD.repeat_interleave(groups, 1), v_BHTD.repeat_interleave(groups, 1)
    scores_BHTT = q_BHTD @ k_BHTD.mT * (scaling if scaling is not None else q_BHTD.shape[-1] ** -0.5)
    if softcap is not None:
        scores_BHTT = softcap * torch.tanh(scores_BHTT / softcap)
    if attention_mask is not None:
        scores_BHTT = scores_BHTT + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores_BHTT.shape[:3], 1)
        scores_BHTT = torch.cat([scores_BHTT, sinks], -1)
    weights_BHTT = scores_BHTT.softmax(-1)[..., : k_BHTD.shape[2]]
    return (weights_BHTT @ v_BHTD).transpose(1, 2).contiguous(), None


AttentionInterface.register("whole_float64", whole_attention)
AttentionMaskInterface.register("whole_float64", eager_mask)


def whole_logprobs(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return log p(token t | tokens before t) from one ordinary forward, 0 at position 0."""
    logits_BTV = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    logp_BT = logits_BTV[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None].long()).squeeze(-1)
    return nn.functional.pad(logp_BT, (1, 0))


def whole_loss(
    model: Any,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    num_items: int | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the Hugging Face loss (labels shifted inside, -100 ignored) in the model's dtype."""
    labels = (input_ids if labels is None else labels).long()
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, -100)
    logits_BTV = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    total = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / (num_items if num_items is not None else (labels[:, 1:] != -100).sum())


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_gradients(model: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return loss and gradients, computed on a copy: some RoPE variants keep state that must not reach the engine."""
    model = copy.deepcopy(model)
    loss = whole_loss(model, *args, **kwargs)
    loss.backward()
    return loss.detach(), grads(model)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor, in float64."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    return (difference / torch.linalg.vector_norm(expected.double())).item()


def assert_same_gradients(
    actual: dict[str, torch.Tensor | None],
    expected: dict[str, torch.Tensor | None],
    tolerance: float,
    *,
    may_vanish: float = 1e-8,
) -> None:
    """Assert that every parameter's gradient is within `tolerance`, and None exactly where None is expected.

    A gradient that is zero in exact arithmetic (a key bias, which the softmax cancels) is pure rounding on both sides.
    It must be smaller than `may_vanish` relative to the largest gradient.
    """
    assert actual.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert largest > 1e-6, "the reference gradients vanish: the test would pass on anything"
    compared = 0
    errors = {}
    for name, reference in expected.items():
        if reference is None:
            assert actual[name] is None, f"{name} got a gradient; it should have none"
            continue
        gradient = actual[name]
        assert gradient is not None, f"{name} got no gradient"
        assert gradient.shape == reference.shape and gradient.isfinite().all(), name
        if reference.abs().max() <= may_vanish * largest:
            assert gradient.abs().max() <= 10 * may_vanish * largest, f"{name} should vanish"
            continue
        errors[name] = relative_error(gradient, reference)
        compared += 1
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative error above {tolerance:.0e} in {len(wrong)} of {compared}: {wrong}"
    assert compared, "every gradient vanishes"


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Compute in float64 where modeling code asks for float32: RMSNorm, rotary tables, router softmax.

    Chunked and whole-sequence training of a float64 model then agree to rounding, and an error of 1e-9 shows.
    """

    def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in kwargs.items()}
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        for place, name in LIFTED:
            stack.enter_context(mock.patch.object(place, name, lifted(getattr(place, name))))
        yield


LIFTED = [
    *((torch.Tensor, name) for name in ("to", "type", "softmax", "log_softmax")),
    *((torch, name) for name in ("softmax", "log_softmax")),
    *((nn.functional, name) for name in ("softmax", "log_softmax")),
]
