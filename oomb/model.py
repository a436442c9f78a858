"""What the engine needs of a Hugging Face causal LM, and which models it refuses.

No modelling code is patched. The model calls a registered attention function; while a pass runs, that function hands
q, k and v to the pass. The backbone runs chunk by chunk; the head is the model's own `forward` with the backbone taken
out, so that logit scaling and soft-capping are the model's own as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

ATTENTION_NAME = "oomb"
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


LIKE_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""Compiled layers draw random numbers as plain ones do. Inductor's own generator would let the code compiled for the
fill pass and that for the gradient pass drop different activations."""
KNOWN_ARGUMENTS = ("position_ids", "cache_position")
"""Tensors that models pass on to attention without a bearing on it."""


class UnsupportedModelError(ValueError):
    """The model cannot be trained exactly by chunk recurrence."""


class Pass(Protocol):
    """One walk over the chunks. The attention of every layer goes through it."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor: ...


_running: Pass | None = None
"""The pass whose chunk is being computed. A plain global, because autograd may recompute a layer on another thread."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that models call as their attention. Takes [B, H, T, D], returns [B, T, H, D]."""
    layer = getattr(module, "layer_idx", None)
    name = f"{type(module).__name__} of layer {layer}"
    if _running is None:
        raise RuntimeError(f"{name} was called outside of an engine's pass; use engine.loss or engine.logprobs")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extra = [key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in KNOWN_ARGUMENTS]
    if layer is None or attention_mask is not None or not causal or extra:
        raise UnsupportedModelError(
            f"{name} does not ask for plain causal attention{f' (it passes {extra[0]})' if extra else ''}, so chunks "
            "cannot stand for it"
        )
    if dropout:
        raise ValueError(_attention_dropout_text(name, dropout))
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = _running.attend(layer, query, key, value, s_aux, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))


class CausalLM:
    """A Hugging Face causal LM, PEFT-wrapped or not, as the engine uses it."""

    def __init__(self, model: nn.Module) -> None:
        self.lm = _unwrap(model)
        self.config = self.lm.config.get_text_config(decoder=True)
        self.backbone: nn.Module = getattr(self.lm, self.lm.base_model_prefix)
        self.layers = _decoder_layers(self.lm, self.backbone, self.config.num_hidden_layers)
        self.vocab_size = self.lm.get_input_embeddings().weight.shape[0]
        self.pad_token_id = _own_pad_token(self.config)
        self.num_positions = _learned_positions(self.backbone, self.config)
        self.head = _without_backbone(self.lm)
        self.rotaries = [m for m in self.backbone.modules() if _depends_on_length(m)]
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}

    def hidden(self, ids_BT: Tensor, start: int) -> Tensor:
        """Last hidden states [B, T, D] of tokens that stand at `start` and after."""
        positions = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device).unsqueeze(0)
        return self.backbone(input_ids=ids_BT, position_ids=positions, use_cache=False)[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(inputs_embeds=hidden_ND.unsqueeze(0), use_cache=False).logits.squeeze(0)

    @property
    def device(self) -> torch.device:
        return self.lm.get_input_embeddings().weight.device

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.lm.parameters()

    def draws_random_numbers(self) -> bool:
        """Whether the forward may be random: dropouts and router noise are, in training mode. Attention dropout, which
        attention kernels do not replay, is refused here."""
        for name, module in self.backbone.named_modules():
            if module.training and hasattr(module, "layer_idx"):
                for field in ("attention_dropout", "attn_dropout"):
                    p = getattr(module, field, 0.0)
                    p = p.p if isinstance(p, nn.Dropout) else p
                    if isinstance(p, float) and p > 0:
                        raise ValueError(_attention_dropout_text(name, p))
        return any(module.training for module in self.lm.modules())

    def check_attended(self, windows: dict[int, int | None], total_length: int) -> None:
        """Refuses a model some of whose layers have not attended, or whose window no layer has asked for. `windows` are
        what the layers asked for in a forward."""
        name = type(self.lm).__name__
        for index, layer in enumerate(self.layers):
            if index not in windows:
                raise UnsupportedModelError(
                    f"layer {index} of {name} ({type(layer).__name__}) did not call attention: what it carries from "
                    "token to token is not K and V, so chunks cannot stand for it"
                )
        window = getattr(self.config, "sliding_window", None)
        if isinstance(window, int) and window < total_length and not any(windows.values()):
            raise UnsupportedModelError(
                f"{name} has a sliding window of {window}, but its layers do not pass it on; use sequences of "
                f"at most {window} tokens, or set config.sliding_window = None if the model was trained without"
            )

    @contextmanager
    def running(self, pass_: Pass, total_length: int) -> Iterator[None]:
        """Routes attention to `pass_` and tells length-dependent RoPE the whole length; leaves the model as found."""
        global _running
        outer = _running
        with ExitStack() as undo:
            undo.callback(self.lm.set_attn_implementation, self.lm.config._attn_implementation)
            self.lm.set_attn_implementation(ATTENTION_NAME)
            for layer in self.layers:
                if getattr(layer, "gradient_checkpointing", False):
                    undo.callback(setattr, layer, "gradient_checkpointing", True)
                    setattr(layer, "gradient_checkpointing", False)  # noqa: B010
            for rotary in self.rotaries:
                undo.callback(
                    rotary.register_forward_pre_hook(partial(_append_last, total_length), with_kwargs=True).remove
                )
                undo.callback(rotary.register_forward_hook(_drop_last).remove)
            _running = pass_
            try:
                yield
            finally:
                _running = outer

    @contextmanager
    def layer_calls(self, *, compiled: bool, checkpointed: bool) -> Iterator[None]:
        """Layers run compiled, or recompute themselves in the backward, through the slot `nn.Module.compile` uses."""
        if not compiled and not checkpointed:
            yield
            return
        before = [vars(layer).get("_compiled_call_impl") for layer in self.layers]
        for layer in self.layers:
            call: Callable[..., Any] = layer._call_impl
            if compiled:
                if layer not in self._compiled:
                    self._compiled[layer] = torch.compile(layer._call_impl, dynamic=False, options=LIKE_EAGER)
                call = self._compiled[layer]
            if checkpointed:
                call = partial(checkpoint, call, use_reentrant=False)
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer, users_own in zip(self.layers, before, strict=True):
                if users_own is None:
                    del layer._compiled_call_impl
                else:
                    layer._compiled_call_impl = users_own

    def activation_bytes(self, num_tokens: int, compiled: bool) -> int:
        """About what a layer keeps for its backward, going by the inputs and outputs of its matrices. Measured on a
        Qwen2 layer in bfloat16: 0.9 times these when compiled, 1.3 times when not."""
        config = self.config
        top_k = getattr(config, "num_experts_per_tok", 1) or 1
        itemsize = next(self.backbone.parameters()).dtype.itemsize
        width = 0
        for parameter in self.layers[0].parameters():
            if parameter.ndim == 2:
                width += sum(parameter.shape)
            elif parameter.ndim == 3:
                width += top_k * sum(parameter.shape[1:])
        return int(num_tokens * width * itemsize * (1.0 if compiled else 1.4))


def callers_autocast(device_type: str) -> torch.autocast:
    """The autocast that is on now, to be entered again in the backward. Without its cache, which would hand weights
    that were cast without a graph to a pass that needs one."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )


def _unwrap(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} is not a model; pass a Hugging Face causal LM")
    while hasattr(model, "_orig_mod") or (hasattr(model, "module") and isinstance(model.module, nn.Module)):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    if hasattr(model, "get_base_model"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                "PEFT prompt learning adds tokens that are not in input_ids; use LoRA or the like"
            )
        model = model.get_base_model()  # type: ignore[operator]
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a Hugging Face model; pass one made by AutoModelForCausalLM")
    _refuse(model, name)
    return model


def _refuse(model: PreTrainedModel, name: str) -> None:
    """Raises where chunk recurrence would not be exact, going by what the model says of itself."""
    config = model.config.get_text_config(decoder=True)
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of {name} is of type {kind!r}: what it carries from token to token is not K and V of "
                "plain causal attention, so chunks cannot carry it. Models whose layers are all full or sliding-window "
                "attention can be trained"
            )
    if model.config.is_encoder_decoder or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not a causal decoder")
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{name} is set to add a load-balancing loss over the whole sequence (config.output_router_logits=True), "
            "which chunks do not see: set it to False"
        )
    backbone = getattr(model, model.base_model_prefix, None)
    if model.get_output_embeddings() is None or backbone is None or model.base_model_prefix not in model._modules:
        raise UnsupportedModelError(
            f"{name} has no language-model head on a backbone; pass a model made by AutoModelForCausalLM"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} carries a recurrent state ({_find(backbone, _has_state)}) that is not K and V, so chunks cannot "
            "carry it"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} computes attention in its own code ({_find(backbone, _is_attention)}) instead of calling "
            "transformers' attention interface; oomb cannot reach its K and V"
        )
    if any(_is_bidirectional(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} attends in both directions ({_find(backbone, _is_bidirectional)}); only causal decoders can be "
            "trained (some encoders become one by config.is_decoder=True)"
        )
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise UnsupportedModelError(f"{name} takes no position_ids, so a chunk cannot be placed in its sequence")
    if any(_counts_positions_itself(module) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} numbers positions by where padding is, so a chunk cannot be placed in its sequence"
        )
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedModelError(f"{name} has parameters on the meta device; load its weights first")


def _find(backbone: nn.Module, test: Callable[[nn.Module], bool]) -> str:
    for name, module in backbone.named_modules():
        if test(module):
            return f"{type(module).__name__} at {name}"
    return type(backbone).__name__


def _has_state(module: nn.Module) -> bool:
    return any(hasattr(module, mark) for mark in ("conv1d", "A_log", "ssm_state_size"))


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _is_bidirectional(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and getattr(module, "is_causal", True) is False


def _counts_positions_itself(module: nn.Module) -> bool:
    return getattr(getattr(module, "position_embeddings", None), "padding_idx", None) is not None


def _decoder_layers(lm: PreTrainedModel, backbone: nn.Module, count: int) -> nn.ModuleList:
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(lm).__name__} has no list of {count} decoder layers")


def _attention_dropout_text(name: str, p: float) -> str:
    return (
        f"{name} has attention dropout {p}, which attention kernels do not replay: load the model with "
        "attention_dropout=0 (GPT-2 calls it attn_pdrop), or train in eval mode; other dropouts are supported"
    )


def _own_pad_token(config: Any) -> int | None:
    """The padding token, if it stands for nothing else."""
    pad = getattr(config, "pad_token_id", None)
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return None if pad in (config.bos_token_id, *eos) else pad


def _learned_positions(backbone: nn.Module, config: Any) -> int | None:
    """How many positions a table of the model holds; None if it computes them."""
    tables = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    return config.max_position_embeddings if tables & {"wpe", "embed_positions", "position_embeddings"} else None


class _Hidden(BaseModelOutputWithPast):
    """A backbone's output of which only the hidden states are there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """In the place of the backbone: returns the hidden states it is given."""

    @property
    def decoder(self) -> _Given:
        # Some heads call a decoder inside of the backbone.
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


def _without_backbone(lm: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of the model that shares its head and maps given hidden states to logits."""
    head = copy.copy(lm)
    # Libraries that wrap `forward` on the instance (accelerate's mixed precision) have bound it to the original.
    head.__dict__.pop("forward", None)
    head._modules = {**lm._modules, lm.base_model_prefix: _Given()}
    return head


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind) for kind in kinds)


def _append_last(total_length: int, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Such a RoPE takes the largest position for the length, so it is shown the last one of the whole sequence too."""
    position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = position_ids.new_full((*position_ids.shape[:-1], 1), total_length - 1)
    position_ids = torch.cat([position_ids, last], dim=-1)
    # It may also remember the longest sequence so far. The two passes of a sequence must see the same frequencies
    # whatever ran in between, so it starts afresh.
    for field in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, field, rotary.original_max_seq_len)
    for field in [name for name in (*vars(rotary), *rotary._buffers) if name.endswith("original_inv_freq")]:
        frequencies = getattr(rotary, field).to(position_ids.device)
        setattr(rotary, field.removesuffix("original_inv_freq") + "inv_freq", frequencies)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": position_ids}
    return (args[0], position_ids, *args[2:]), kwargs


def _drop_last(rotary: nn.Module, args: Any, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(x[..., :-1, :] for x in cos_sin)
