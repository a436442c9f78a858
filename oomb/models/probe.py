"""The shape of a Hugging Face causal LM as `oomb.plan` wants it. Shapes suffice: a model on the meta device will do."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oomb.models.causal_lm import decoder_layers, learned_positions
from oomb.models.shape import LayerFacts, ModelShape

RECORDER_NAME = "oomb_recorder"
_recording = threading.local()


def model_shape(
    model: nn.Module, layers: tuple[LayerFacts, ...] | None = None, *, autocast: bool = False
) -> ModelShape:
    """The facts of a model, PEFT-wrapped or not. `layers` are those of its attention, where they are known. `autocast`:
    it will run under one."""
    lm = _without_wrappers(model)
    config = lm.config.get_text_config(decoder=True)
    stack = decoder_layers(lm)
    top_k = getattr(config, "num_experts_per_tok", None) or 1
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    parameters = list(lm.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    narrow = [p for p in trainable if p.dtype.itemsize < 4]
    active = trained = 0
    for shape, parameter, owner in matrices(lm, top_k):
        # Looking up a token costs nothing, unless the same matrix is the head.
        if not isinstance(owner, nn.Embedding) or parameter is head_weight:
            num_elements = shape[0] * shape[1]
            active += num_elements
            trained += num_elements if parameter.requires_grad else 0
    width = sum(sum(shape) for shape, _, _ in matrices(stack, top_k))
    itemsize = next(p for p in parameters if p.is_floating_point()).dtype.itemsize
    has_frozen_matrix = any(not p.requires_grad and p.ndim > 1 for p in stack.parameters())
    has_adapters = has_frozen_matrix and any(p.requires_grad for p in stack.parameters())
    return ModelShape(
        layers=attention_layers(lm) if layers is None else layers,
        hidden_size=config.hidden_size,
        vocab_size=embedding.weight.shape[0],
        itemsize=itemsize,
        weight_bytes=sum(p.nbytes for p in parameters) + sum(b.nbytes for b in lm.buffers()),
        grad_bytes=sum(p.nbytes for p in trainable),
        float32_sum_bytes=4 * sum(p.numel() for p in narrow),
        wide_grad_bytes=sum(p.nbytes for p in trainable if p.dtype.itemsize >= 4),
        head_grad_bytes=head_weight.nbytes if head_weight is not None and head_weight.requires_grad else 0,
        layer_io_width=-(-width // len(stack)),
        has_adapters=has_adapters,
        has_float32_adapters=has_adapters and not autocast and any(p.dtype.itemsize > itemsize for p in trainable),
        active_params=active,
        trained_params=trained,
        trainable_params=sum(p.numel() for p in trainable),
        num_positions=learned_positions(getattr(lm, lm.base_model_prefix), config),
    )


def matrices(module: nn.Module, top_k: int) -> Iterator[tuple[tuple[int, int], nn.Parameter, nn.Module]]:
    """(inputs and outputs, parameter, owner) of every matrix that a token is multiplied with; of experts, the first
    `top_k` stand for those it is sent to."""
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
                # What quantized layers hold has another shape than what they multiply with.
                yield (owner.in_features, owner.out_features), parameter, owner
            elif parameter.ndim == 2:
                yield (parameter.shape[0], parameter.shape[1]), parameter, owner


def attention_layers(lm: Any) -> tuple[LayerFacts, ...]:
    """The attention of every layer: what the model itself hands to the attention function where that can be found out
    without computing, and what its config says otherwise (experts cannot be routed without numbers)."""
    config = lm.config.get_text_config(decoder=True)
    recorded = record_layers(lm)
    if set(recorded) == set(range(config.num_hidden_layers)):
        return tuple(recorded[index] for index in sorted(recorded))
    # The layers before the one that could not run tell the sizes of all.
    return shapes_from_config(config, recorded.get(0))


def record_layers(lm: Any) -> dict[int, LayerFacts]:
    """Runs a copy of the backbone on two tokens on the meta device; notes what reaches attention, as far as it gets."""
    tensors = [*lm.parameters(), *lm.buffers()]
    # A copy because some models note what they have seen (RoPE the lengths); one that shares no number with the model.
    on_meta = {id(x): torch.empty_like(x, device="meta") for x in tensors}
    on_meta |= {id(p): nn.Parameter(on_meta[id(p)], requires_grad=False) for p in lm.parameters()}
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    found: dict[int, LayerFacts] = {}
    _recording.layers = found
    try:
        shape = copy.deepcopy(lm, on_meta)
        shape.set_attn_implementation(RECORDER_NAME)
        with torch.no_grad():
            getattr(shape, shape.base_model_prefix)(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception:  # whatever a model does that needs numbers; the config has to do then
        pass
    finally:
        _recording.layers = None
    return found


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    if layer is None or _recording.layers is None:
        raise RuntimeError(f"{type(module).__name__} attends outside of a recording")
    _recording.layers[layer] = LayerFacts(
        num_kv_heads=key.shape[1],
        head_size=key.shape[-1],
        value_size=value.shape[-1],
        num_query_heads=query.shape[1],
        window=kwargs.get("sliding_window"),
    )
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(RECORDER_NAME, _record)


def shapes_from_config(config: Any, like: LayerFacts | None = None) -> tuple[LayerFacts, ...]:
    """The attention of every layer by the config; its sizes as in `like`, where one layer's are known."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_size, kv_heads = head_size, getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):
        # Latent attention: K and V are expanded to all heads before they reach attention.
        head_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        value_size, kv_heads = config.v_head_dim, heads
    if like is None:
        like = LayerFacts(
            num_kv_heads=kv_heads, head_size=head_size, value_size=value_size, num_query_heads=heads, window=None
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(
        LayerFacts(
            num_kv_heads=like.num_kv_heads,
            head_size=like.head_size,
            value_size=like.value_size,
            num_query_heads=like.num_query_heads,
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    )


def _without_wrappers(model: nn.Module) -> Any:
    while hasattr(model, "_orig_mod") or isinstance(getattr(model, "module", None), nn.Module):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
