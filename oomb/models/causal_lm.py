"""What the engine needs of a Hugging Face causal LM.

No modelling code is patched. The model calls a registered attention function; while a pass computes a chunk, that
function hands q, k and v to the pass. The backbone runs chunk by chunk; the head is the model's own `forward` with the
backbone taken out, so that logit scaling and soft-capping are the model's own as well.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from oomb.models.checks import (
    UnsupportedModelError,
    attention_dropout_text,
    refuse_attention_dropout,
    refuse_idle_layers,
    unwrap,
)
from oomb.models.state import ModelState

ATTENTION_NAME, ATTENTION_FIELD = "oomb", "_attn_implementation_internal"
CALL = "_compiled_call_impl"
LIKE_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""Compiled layers draw random numbers as plain ones do. Inductor's own generator would let the code compiled for the
fill pass and that for the gradient pass drop different activations."""
OUTSIDE = (
    "{} was called from outside of an engine's pass over its model, by another thread or by a callback: call the model "
    "while no engine computes it, or use engine.loss or engine.logprobs, which wait for their turn"
)
PLACEHOLDERS = (
    *(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")),
    *(f"{kind}_context_token_id" for kind in ("img", "video")),
)
KNOWN_ARGUMENTS = ("position_ids", "cache_position")
"""Tensors that models pass on to attention without a bearing on it."""


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


@dataclass(frozen=True)
class LayerShape:
    """What a layer's attention is made of, as its first call showed."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    window: int | None
    dtype: torch.dtype


one_at_a_time = threading.RLock()
"""Held while a pass runs, and while its memory is taken or given back."""


class _Here(threading.local):
    """What this thread computes."""

    chunk_of: Pass | None = None
    """The pass whose chunk it is. Of no other thread: theirs may call the model for reasons of their own."""


_here = _Here()


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
    if _here.chunk_of is None:
        raise RuntimeError(OUTSIDE.format(name))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extra = [key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in KNOWN_ARGUMENTS]
    if layer is None or attention_mask is not None or not causal or extra:
        raise UnsupportedModelError(
            f"{name} does not ask for plain causal attention{f' (it passes {extra[0]})' if extra else ''}, so chunks "
            "cannot stand for it"
        )
    if dropout:
        raise ValueError(attention_dropout_text(name, dropout))
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = _here.chunk_of.attend(layer, query, key, value, s_aux, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))


class CausalLM:
    """A Hugging Face causal LM, PEFT-wrapped or not, as the engine uses it."""

    def __init__(self, model: nn.Module) -> None:
        self.lm = unwrap(model)
        self.config = self.lm.config.get_text_config(decoder=True)
        self.backbone: nn.Module = getattr(self.lm, self.lm.base_model_prefix)
        self.layers = decoder_layers(self.lm)
        self.pad_token_id = _own_pad_token(self.config, self.lm.config)
        self.placeholders = _placeholders(_configs(self.lm))
        self.num_positions = learned_positions(self.backbone, self.config)
        self.rotaries = [m for m in self.backbone.modules() if _depends_on_length(m)]
        self._pass: Pass | None = None
        """The one that is running."""
        self.total_length = 0
        self._windows: dict[int, int | None] | None = None
        """Window of every layer that has attended in the forward under way."""
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}

    def hidden(self, ids_BT: Tensor, positions_1T: Tensor) -> Tensor:
        """Last hidden states [B, T, D] of tokens that stand at these positions."""
        self._windows = {}
        try:
            with self.computing():
                hidden = self.backbone(input_ids=ids_BT, position_ids=positions_1T, use_cache=False)[0]
            refuse_idle_layers(self.lm, self.layers, self._windows, self.total_length)
        finally:
            self._windows = None
        return hidden

    def layer_shapes(self) -> dict[int, LayerShape]:
        """The shape of every layer's attention, in the order of their calls, from one token sent through the model.
        Configs have no common words for it, and adapters and autocast may change it. Must be called while running."""
        outer, self._pass = self._pass, (recorder := _Recorder(self))
        try:
            with torch.no_grad():
                self.hidden(*torch.zeros(2, 1, 1, dtype=torch.long, device=self.device))
        finally:
            self._pass = outer
        return recorder.shapes

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let this thread compute a chunk of the pass that is running. Without it, calls of the model raise."""
        outer, _here.chunk_of = _here.chunk_of, self._pass
        try:
            yield
        finally:
            _here.chunk_of = outer

    def note_attention(self, layer: int, window: int | None) -> None:
        """Called for every attention of a layer. Those that a backward computes again are not counted."""
        if self._windows is not None:
            if layer in self._windows:
                raise UnsupportedModelError(
                    f"layer {layer} of {type(self.lm).__name__} attends more than once; it has one set of pages"
                )
            self._windows[layer] = window

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The model's own head. It is looked up every time: users wrap and resize heads."""
        head = _without_backbone(self.lm)
        return head(inputs_embeds=hidden_ND.unsqueeze(0), use_cache=False, return_dict=True).logits.squeeze(0)

    @property
    def vocab_size(self) -> int:
        return self.lm.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.lm.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.lm.parameters()

    def draws_random_numbers(self) -> bool:
        """Whether the forward may be random: dropouts and router noise are, in training mode. Attention dropout is
        refused here."""
        refuse_attention_dropout(self.backbone)
        return any(module.training for module in self.lm.modules())

    def state(self, *, with_sums: bool = False) -> ModelState:
        """Return the model's state as its owner knows it: the modes that a pass sets do not show."""
        with one_at_a_time:
            return ModelState.of(self.lm, with_sums=with_sums)

    @contextmanager
    def running(self, pass_: Pass, total_length: int, state: ModelState, *, with_sums: bool = False) -> Iterator[None]:
        """Routes attention to `pass_` and tells length-dependent RoPE the whole length; leaves the model as found.
        `state` is the model's at the start of the sequence, which both of its passes must see; `with_sums` compares
        the numbers in its weights as well."""
        with one_at_a_time, ExitStack() as undo:
            now = self.state()
            state.refuse_changes(now, with_sums=with_sums)
            # First of all: whoever calls the model from here on must not see what follows.
            for module in self._parts():
                _route(undo, module, _gate(module, vars(module).get(CALL) or module._call_impl))
            for module, mode, mode_now in zip(self.lm.modules(), state.modes, now.modes, strict=True):
                if mode != mode_now:
                    undo.callback(setattr, module, "training", mode_now)
                    module.training = mode
            for config in _configs(self.lm):
                # Not by the model's own method: parts of a model may differ in it, and refuse what others had.
                undo.callback(setattr, config, ATTENTION_FIELD, getattr(config, ATTENTION_FIELD))
            self.lm.set_attn_implementation(ATTENTION_NAME)
            for layer in self.layers:
                if getattr(layer, "gradient_checkpointing", False):
                    undo.callback(setattr, layer, "gradient_checkpointing", True)
                    setattr(layer, "gradient_checkpointing", False)  # noqa: B010
            for rotary in self.rotaries:
                for name, value in _frequencies(rotary).items():
                    undo.callback(setattr, rotary, name, value)
                show_all = rotary.register_forward_pre_hook(partial(_append_last, total_length), with_kwargs=True)
                undo.callback(show_all.remove)
                undo.callback(rotary.register_forward_hook(_drop_last).remove)
            outer, outer_length = self._pass, self.total_length
            self._pass, self.total_length = pass_, total_length
            try:
                yield
            finally:
                self._pass, self.total_length = outer, outer_length

    def _parts(self) -> list[nn.Module]:
        """The modules by which a forward comes in, or meets what a pass changes: the backbone and the models in it,
        what they call first, and the layers."""
        models = [module for module in self.backbone.modules() if isinstance(module, PreTrainedModel)]
        return list(dict.fromkeys([self.backbone, *models, *self.layers, *(c for m in models for c in m.children())]))

    @contextmanager
    def layer_calls(self, *, compiled: bool, checkpointed: bool) -> Iterator[None]:
        """Layers run compiled, or recompute themselves in the backward."""
        with ExitStack() as undo:
            for layer in self.layers if compiled or checkpointed else ():
                call: Callable[..., Any] = layer._call_impl
                if compiled:
                    if layer not in self._compiled:
                        self._compiled[layer] = torch.compile(layer._call_impl, dynamic=False, options=LIKE_EAGER)
                    call = self._compiled[layer]
                if checkpointed:
                    call = partial(checkpoint, _as_part_of(self._pass, call), use_reentrant=False)
                _route(undo, layer, _gate(layer, call))
            yield


def _route(undo: ExitStack, module: nn.Module, call: Callable[..., Any]) -> None:
    """Have calls of a module go to `call`, through the slot that `nn.Module.compile` uses, until `undo`."""
    users_own = vars(module).get(CALL)
    if users_own is None:
        undo.callback(delattr, module, CALL)
    else:
        undo.callback(setattr, module, CALL, users_own)
    setattr(module, CALL, call)


def _gate(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, for the thread that computes a chunk. Others would compute with half of the model changed."""

    def gated(*args: Any, **kwargs: Any) -> Any:
        if _here.chunk_of is None:
            raise RuntimeError(OUTSIDE.format(type(module).__name__))
        return call(*args, **kwargs)

    # Users may have compiled the modules around it. Traced, it would be compiled anew in every pass.
    return torch.compiler.disable(gated, recursive=False)


def _as_part_of(pass_: Pass | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, as a part of this pass's chunk in whatever thread autograd makes it again."""

    def called(*args: Any, **kwargs: Any) -> Any:
        outer, _here.chunk_of = _here.chunk_of, pass_
        try:
            return call(*args, **kwargs)
        finally:
            _here.chunk_of = outer

    return called


class _Recorder:
    """A pass that attends to nothing and writes down what it was asked."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.shapes: dict[int, LayerShape] = {}

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
    ) -> Tensor:
        self.model.note_attention(layer, window)
        self.shapes[layer] = LayerShape(q.shape[1], k.shape[1], k.shape[3], v.shape[3], window, k.dtype)
        return q.new_zeros(*q.shape[:3], v.shape[3])


def callers_autocast(device_type: str) -> torch.autocast:
    """The autocast that is on now, to be entered again in the backward. Without its cache, which would hand weights
    that were cast without a graph to a pass that needs one."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )


def is_running() -> bool:
    """Whether this thread computes a chunk of an engine's pass."""
    return _here.chunk_of is not None


def is_checkpointing(model: nn.Module) -> bool:
    """Whether a layer recomputes itself in the backward because the model's own switch says so."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def switch_checkpointing(model: nn.Module, *, on: bool) -> None:
    """That switch. Releases of transformers call it activation checkpointing or gradient checkpointing."""
    end = "enable" if on else "disable"
    name = f"activation_checkpointing_{end}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{end}")()


def decoder_layers(lm: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of the text decoder. Towers for images may have as many, and come first."""
    count = lm.config.get_text_config(decoder=True).num_hidden_layers
    for part in (lm.get_decoder(), getattr(lm, lm.base_model_prefix)):
        for module in part.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise UnsupportedModelError(f"{type(lm).__name__} has no list of {count} decoder layers")


def _configs(lm: PreTrainedModel) -> list[Any]:
    """Of the model and of all its parts."""
    waiting = [module.config for module in lm.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _own_pad_token(config: Any, whole: Any) -> int | None:
    """Return the padding token, if it stands for nothing else. Of a model with several parts, `config` is that of the
    text and need not have all tokens; that of the whole has them."""
    pad = getattr(config, "pad_token_id", None)
    for name in ("bos_token_id", "eos_token_id"):
        for ids in (getattr(part, name, None) for part in (config, whole)):
            if pad in (ids if isinstance(ids, list) else [ids]):
                return None
    return pad


def _placeholders(configs: list[Any]) -> dict[int, str]:
    """Return the ids that stand for images, video or audio in a text, and what configs call them."""
    named = {name: getattr(config, name, None) for config in configs for name in PLACEHOLDERS}
    return {token: name for name, token in named.items() if isinstance(token, int)}


def learned_positions(backbone: nn.Module, config: Any) -> int | None:
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


def _frequencies(rotary: nn.Module) -> dict[str, Any]:
    """What such a RoPE remembers of the sequences it has seen."""
    names = [name for name in (*vars(rotary), *rotary._buffers) if name.endswith(("inv_freq", "max_seq_len_cached"))]
    return {name: getattr(rotary, name) for name in names}


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
        # A copy, and one that can be written at any time: some releases of transformers write the frequencies of long
        # sequences into the tensor that they find.
        with torch.inference_mode(False):
            frequencies = getattr(rotary, field).to(position_ids.device, copy=True)
        setattr(rotary, field.removesuffix("original_inv_freq") + "inv_freq", frequencies)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": position_ids}
    return (args[0], position_ids, *args[2:]), kwargs


def _drop_last(rotary: nn.Module, args: Any, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(x[..., :-1, :] for x in cos_sin)
