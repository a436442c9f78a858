"""Run a Hugging Face causal LM chunk by chunk: hidden states of a chunk, logits, and the model's state.

Nothing in the model is patched. The model calls a registered attention function, which hands q, k and v to the active
pass. The head is the model's own `forward` with the backbone replaced by a stub, so logit scaling and soft caps are the
model's own, too.
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
    """A Hugging Face causal LM as the engine uses it.

    Args:
        model: The model, possibly wrapped by PEFT or `torch.compile`.
        check: Raise `UnsupportedModelError` if the model cannot be trained exactly.
    """

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
        """The active pass."""
        self.total_length = 0
        self._windows: dict[int, int | None] | None = None
        """Window of each layer that has called attention in the current forward."""
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}

    def hidden(self, ids_BT: Tensor, positions_1T: Tensor) -> Tensor:
        """Return the last hidden states [B, T, D] of tokens at these positions."""
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
        """Let this thread compute a chunk of the active pass. Any other call of the model raises during a pass."""
        outer, thread_state.chunk_of = thread_state.chunk_of, self._pass
        try:
            yield
        finally:
            thread_state.chunk_of = outer

    def count_attention(self, layer: int, window: int | None) -> None:
        """Note that a layer calls attention, except when a backward recomputes it."""
        if self._windows is not None:
            if layer in self._windows:
                raise UnsupportedModelError(
                    f"layer {layer} of {type(self.lm).__name__} attends more than once per forward, but it has only "
                    "one set of pages: use a model whose layers attend once"
                )
            self._windows[layer] = window

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the logits of the model's own head, looked up each time because users wrap and resize heads."""
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
        """Return whether the forward may draw random numbers, as dropout and router noise do in training mode.

        Raises ValueError for attention dropout, which cannot be replayed.
        """
        check_attention_dropout(self.backbone)
        return any(module.training for module in self.lm.modules())

    def state(self, *, with_checksums: bool = False) -> ModelState:
        """Return the model's state as the user left it, without the changes of a pass that is active elsewhere."""
        with engine_lock:
            return ModelState.capture(self.lm, with_checksums=with_checksums)

    @contextmanager
    def activate(
        self, pass_: Attention, total_length: int, state: ModelState, *, with_checksums: bool = False
    ) -> Iterator[None]:
        """Make a pass active for the duration of a `with`, and leave the model as it was.

        Args:
            pass_: Gets the attention calls.
            total_length: Length of the whole sequence, for RoPE that depends on it.
            state: State of the model at the start of the sequence, which both passes must see.
            with_checksums: Compare checksums of all weights with that state.
        """
        with engine_lock, ExitStack() as undo:
            now = self.state()
            state.check_unchanged(now, with_checksums=with_checksums)
            # Gate first, so that no other caller sees the changes below.
            for module in self._parts():
                route(undo, module, gate(module, vars(module).get(CALL) or module._call_impl))
            for module, mode, mode_now in zip(self.lm.modules(), state.modes, now.modes, strict=True):
                if mode != mode_now:
                    undo.callback(setattr, module, "training", mode_now)
                    module.training = mode
            for config in _configs(self.lm):
                # Restore fields, not by `set_attn_implementation`: a part may reject what another part uses.
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
        """Return the modules to gate: where a forward can enter (the backbone, models in it and their children), and
        the layers, which a pass wraps."""
        models = [module for module in self.backbone.modules() if isinstance(module, PreTrainedModel)]
        return list(dict.fromkeys([self.backbone, *models, *self.layers, *(c for m in models for c in m.children())]))

    @contextmanager
    def wrap_layers(self, *, compiled: bool, checkpointed: bool) -> Iterator[None]:
        """Run layers compiled, or checkpointed (recomputed in the backward), for the duration of a `with`."""
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
    """Return the layers of the text decoder, not those of a vision tower, which may have as many and come first."""
    count = lm.config.get_text_config(decoder=True).num_hidden_layers
    for part in (lm.get_decoder(), getattr(lm, lm.base_model_prefix)):
        for module in part.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
    raise UnsupportedModelError(f"{type(lm).__name__} has no list of {count} decoder layers: use another architecture")


def _configs(lm: PreTrainedModel) -> list[Any]:
    """Return the configs of the model and of all its parts."""
    waiting = [module.config for module in lm.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _own_pad_token(config: Any, whole: Any) -> int | None:
    """Return the padding token, or None if it also begins or ends texts.

    Args:
        config: Config of the text model.
        whole: Config of the whole model, which may define tokens that the text config lacks.
    """
    pad = getattr(config, "pad_token_id", None)
    for name in ("bos_token_id", "eos_token_id"):
        for ids in (getattr(part, name, None) for part in (config, whole)):
            if pad in (ids if isinstance(ids, list) else [ids]):
                return None
    return pad


def _placeholders(configs: list[Any]) -> dict[int, str]:
    """Return the placeholder ids of images, video and audio, with their names in the config."""
    named = {name: getattr(config, name, None) for config in configs for name in PLACEHOLDERS}
    return {token: name for name, token in named.items() if isinstance(token, int)}


def learned_positions(backbone: nn.Module, config: Any) -> int | None:
    """Return how many positions the model has learned, or None if it computes positions."""
    tables = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    return config.max_position_embeddings if tables & {"wpe", "embed_positions", "position_embeddings"} else None


class _HiddenOnly(BaseModelOutputWithPast):
    """Output of a backbone with hidden states only. All other fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _BackboneStub(nn.Module):
    """Stand-in for the backbone that returns the hidden states it is given."""

    @property
    def decoder(self) -> _BackboneStub:
        # Some heads call a decoder inside the backbone.
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly(last_hidden_state=inputs_embeds)


def _head_only(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a shallow copy of the model that maps hidden states to logits, sharing the model's head."""
    head = copy.copy(lm)
    # Some libraries (accelerate's mixed precision) wrap `forward` on the instance, bound to the original model.
    head.__dict__.pop("forward", None)
    head._modules = {**lm._modules, lm.base_model_prefix: _BackboneStub()}
    return head
