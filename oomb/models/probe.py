"""Measure the shapes of a Hugging Face causal LM and its layers, with weights or on the meta device."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oomb.attention.call import AttentionCall
from oomb.models import adapters
from oomb.models.causal_lm import CausalLM
from oomb.models.shape import LayerShape, ModelShape


def model_shape(
    model: nn.Module, layers: tuple[LayerShape, ...] | None = None, *, autocast: bool = False
) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: A Hugging Face causal LM, PEFT-wrapped or not, with weights or on the meta device.
        layers: Shapes of its attention layers, if they are known. By default they are recorded on the meta device.
        autocast: Whether the model will run under autocast.
    """
    lm = CausalLM(model, check=False)
    top_k = getattr(lm.config, "num_experts_per_tok", None) or 1
    head_weight = getattr(lm.lm.get_output_embeddings(), "weight", None)
    parameters = list(lm.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    narrow = [p for p in trainable if p.dtype.itemsize < 4]
    active = trained = 0
    for shape, parameter, owner in matrices(lm.lm, top_k):
        # Looking up a token costs nothing, unless the same matrix is the head.
        if not isinstance(owner, nn.Embedding) or parameter is head_weight:
            num_elements = shape[0] * shape[1]
            active += num_elements
            trained += num_elements if parameter.requires_grad else 0
    width = sum(sum(shape) for shape, _, _ in matrices(lm.layers, top_k))
    has_frozen_matrix = any(not p.requires_grad and p.ndim > 1 for p in lm.layers.parameters())
    has_adapters = has_frozen_matrix and any(p.requires_grad for p in lm.layers.parameters())
    return ModelShape(
        layers=attention_layers(lm) if layers is None else layers,
        hidden_size=lm.config.hidden_size,
        vocab_size=lm.vocab_size,
        itemsize=adapters.base_dtype(lm.lm).itemsize,
        weight_bytes=sum(p.nbytes for p in parameters) + sum(b.nbytes for b in lm.lm.buffers()),
        grad_bytes=sum(p.nbytes for p in trainable),
        float32_sum_bytes=4 * sum(p.numel() for p in narrow),
        wide_grad_bytes=sum(p.nbytes for p in trainable if p.dtype.itemsize >= 4),
        head_grad_bytes=head_weight.nbytes if head_weight is not None and head_weight.requires_grad else 0,
        layer_io_width=-(-width // len(lm.layers)),
        has_adapters=has_adapters,
        has_float32_adapters=has_adapters and not autocast and adapters.are_wider_than_base(lm.lm),
        active_params=active,
        trained_params=trained,
        trainable_params=sum(p.numel() for p in trainable),
        num_positions=lm.num_positions,
    )


def matrices(module: nn.Module, top_k: int) -> Iterator[tuple[tuple[int, int], nn.Parameter, nn.Module]]:
    """Yield (input and output width, parameter, owner) of every matrix that a token is multiplied with.

    The first `top_k` experts stand for those the token is routed to.
    """
    seen = set()
    for path, owner in module.named_modules():
        expert = re.search(r"\bexperts\.(\d+)\b", path)
        if expert is not None and int(expert[1]) >= top_k:
            continue
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if parameter.ndim == 3:
                for _ in range(min(top_k, parameter.shape[0])):
                    yield (parameter.shape[1], parameter.shape[2]), parameter, owner
            elif name == "weight" and hasattr(owner, "in_features") and hasattr(owner, "out_features"):
                # A quantized layer stores its weight in another shape than the one it multiplies with.
                yield (owner.in_features, owner.out_features), parameter, owner
            elif parameter.ndim == 2:
                yield (parameter.shape[0], parameter.shape[1]), parameter, owner


def attention_layers(model: CausalLM) -> tuple[LayerShape, ...]:
    """Return the shape of every attention layer, without computing anything.

    Shapes come from a forward on the meta device if it reaches every layer, otherwise from the config: experts, for
    example, cannot be routed without numbers.
    """
    recorded = record_shapes(model, on_meta=True)
    if set(recorded) == set(range(model.config.num_hidden_layers)):
        return tuple(recorded[index] for index in sorted(recorded))
    # The layers that ran before the forward failed have the sizes of all.
    return shapes_from_config(model.config, adapters.base_dtype(model.lm), like=recorded.get(0))


def record_shapes(model: CausalLM, *, on_meta: bool) -> dict[int, LayerShape]:
    """Return the shape of each layer's attention, in call order, from a forward over one token.

    Configs have no common names for these sizes, and adapters and autocast may change them.

    Args:
        model: The model; active, unless `on_meta`.
        on_meta: Run a copy on the meta device, which costs neither memory nor time. If its forward fails because it
            needs real numbers, the layers before that point are returned.
    """
    recorded: dict[int, LayerShape] = {}
    if not on_meta:
        _run_one_token(model, recorded)
        return recorded
    with suppress(Exception):  # of any type: whatever modeling code raises without numbers
        _run_one_token(CausalLM(_meta_copy(model.lm), check=False), recorded)
    return recorded


def _run_one_token(model: CausalLM, recorded: dict[int, LayerShape]) -> None:
    ids, positions = torch.zeros(2, 1, 1, dtype=torch.long, device=model.device)
    recorder, total_length = _Recorder(model, recorded), max(1, model.total_length)
    with torch.no_grad(), model.activate(recorder, total_length, model.state()):
        model.hidden(ids, positions)


def _meta_copy(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares no tensor with the model, because some models remember the lengths they have seen."""
    memo: dict[int, Any] = {id(x): torch.empty_like(x, device="meta") for x in (*lm.parameters(), *lm.buffers())}
    memo |= {id(p): nn.Parameter(memo[id(p)], requires_grad=False) for p in lm.parameters()}
    # Attention dropout, which the engine refuses in training mode, changes no shape.
    return copy.deepcopy(lm, memo).eval()


class _Recorder:
    """An attention that computes nothing and records the shapes it is called with."""

    def __init__(self, model: CausalLM, recorded: dict[int, LayerShape]) -> None:
        self.model, self.recorded = model, recorded

    def attend(self, call: AttentionCall) -> Tensor:
        self.model.count_attention(call.layer, call.window)
        self.recorded[call.layer] = LayerShape(
            num_kv_heads=call.k.shape[1],
            head_size=call.k.shape[3],
            value_size=call.v.shape[3],
            num_query_heads=call.q.shape[1],
            window=call.window,
            dtype=call.k.dtype,
        )
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])


def shapes_from_config(config: Any, dtype: torch.dtype, like: LayerShape | None = None) -> tuple[LayerShape, ...]:
    """Return the shape of every attention layer according to the config.

    Args:
        config: Config of the text model.
        dtype: Dtype the model computes in.
        like: The shape of one layer, if it is known. Its sizes are used for all layers.
    """
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_size, kv_heads = head_size, getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):
        # Multi-head latent attention expands K and V to all heads before they reach attention.
        head_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        value_size, kv_heads = config.v_head_dim, heads
    if like is None:
        like = LayerShape(
            num_kv_heads=kv_heads, head_size=head_size, value_size=value_size, num_query_heads=heads, dtype=dtype
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(replace(like, window=window if kind == "sliding_attention" else None) for kind in kinds)
