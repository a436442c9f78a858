"""What the engine needs of a Hugging Face causal LM.

No modelling code is patched. The model calls a registered attention function; while a pass computes a chunk, that
function hands q, k and v to the pass. The backbone runs chunk by chunk; the head is the model's own `forward` with the
backbone taken out, so that logit scaling and soft-capping are the model's own as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from oomb.models.checks import (
    UnsupportedModelError,
    check_attention_dropout,
    check_every_layer_attended,
    unwrap,
)
from oomb.models.hooks import (
    ATTENTION_FIELD,
    ATTENTION_NAME,
    CALL,
    LIKE_EAGER,
    Attention,
    engine_lock,
    gate,
    route,
    thread_state,
    within_chunk,
)
from oomb.models.rope import append_last_position, depends_on_length, drop_last_position, length_state
from oomb.models.state import ModelState

PLACEHOLDERS = (
    *(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")),
    *(f"{kind}_context_token_id" for kind in ("img", "video")),
)


class CausalLM:
    """A Hugging Face causal LM, PEFT-wrapped or not, as the engine uses it."""

    def __init__(self, model: nn.Module, *, check: bool = True) -> None:
        self.lm = unwrap(model, check=check)
        self.config = self.lm.config.get_text_config(decoder=True)
        self.backbone: nn.Module = getattr(self.lm, self.lm.base_model_prefix)
        self.layers = decoder_layers(self.lm)
        self.pad_token_id = _own_pad_token(self.config, self.lm.config)
        self.placeholders = _placeholders(_configs(self.lm))
        self.num_positions = learned_positions(self.backbone, self.config)
        self.rotaries = [m for m in self.backbone.modules() if depends_on_length(m)]
        self._pass: Attention | None = None
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
            check_every_layer_attended(self.lm, self.layers, self._windows, self.total_length)
        finally:
            self._windows = None
        return hidden

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let this thread compute a chunk of the pass that is running. Without it, calls of the model raise."""
        outer, thread_state.chunk_of = thread_state.chunk_of, self._pass
        try:
            yield
        finally:
            thread_state.chunk_of = outer

    def count_attention(self, layer: int, window: int | None) -> None:
        """Called for every attention of a layer. Those that a backward computes again are not counted."""
        if self._windows is not None:
            if layer in self._windows:
                raise UnsupportedModelError(
                    f"layer {layer} of {type(self.lm).__name__} attends more than once; it has one set of pages"
                )
            self._windows[layer] = window

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The model's own head. It is looked up every time: users wrap and resize heads."""
        head = _head_only(self.lm)
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

    def uses_rng(self) -> bool:
        """Whether the forward may be random: dropouts and router noise are, in training mode. Attention dropout is
        refused here."""
        check_attention_dropout(self.backbone)
        return any(module.training for module in self.lm.modules())

    def state(self, *, with_sums: bool = False) -> ModelState:
        """Return the model's state as its owner knows it: the modes that a pass sets do not show."""
        with engine_lock:
            return ModelState.capture(self.lm, with_sums=with_sums)

    @contextmanager
    def activate(
        self, pass_: Attention, total_length: int, state: ModelState, *, with_sums: bool = False
    ) -> Iterator[None]:
        """Routes attention to `pass_` and tells length-dependent RoPE the whole length; leaves the model as found.
        `state` is the model's at the start of the sequence, which both of its passes must see; `with_sums` compares
        the numbers in its weights as well."""
        with engine_lock, ExitStack() as undo:
            now = self.state()
            state.check_unchanged(now, with_sums=with_sums)
            # First of all: whoever calls the model from here on must not see what follows.
            for module in self._parts():
                route(undo, module, gate(module, vars(module).get(CALL) or module._call_impl))
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
                for name, value in length_state(rotary).items():
                    undo.callback(setattr, rotary, name, value)
                show_all = rotary.register_forward_pre_hook(
                    partial(append_last_position, total_length), with_kwargs=True
                )
                undo.callback(show_all.remove)
                undo.callback(rotary.register_forward_hook(drop_last_position).remove)
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
    def wrap_layers(self, *, compiled: bool, checkpointed: bool) -> Iterator[None]:
        """Layers run compiled, or recompute themselves in the backward."""
        with ExitStack() as undo:
            for layer in self.layers if compiled or checkpointed else ():
                call: Callable[..., Any] = layer._call_impl
                if compiled:
                    if layer not in self._compiled:
                        self._compiled[layer] = torch.compile(layer._call_impl, dynamic=False, options=LIKE_EAGER)
                    call = self._compiled[layer]
                if checkpointed:
                    call = partial(checkpoint, within_chunk(self._pass, call), use_reentrant=False)
                route(undo, layer, gate(layer, call))
            yield


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


class _HiddenOnly(BaseModelOutputWithPast):
    """A backbone's output of which only the hidden states are there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _BackboneStub(nn.Module):
    """In the place of the backbone: returns the hidden states it is given."""

    @property
    def decoder(self) -> _BackboneStub:
        # Some heads call a decoder inside of the backbone.
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly(last_hidden_state=inputs_embeds)


def _head_only(lm: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of the model that shares its head and maps given hidden states to logits."""
    head = copy.copy(lm)
    # Libraries that wrap `forward` on the instance (accelerate's mixed precision) have bound it to the original.
    head.__dict__.pop("forward", None)
    head._modules = {**lm._modules, lm.base_model_prefix: _BackboneStub()}
    return head
