"""Send a model's attention to the pass that computes a chunk, and undo it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oomb.attention.call import AttentionCall
from oomb.models.checks import UnsupportedModelError, attention_dropout_text

ATTENTION_NAME, ATTENTION_FIELD = "oomb", "_attn_implementation_internal"


CALL = "_compiled_call_impl"


LIKE_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""Compiled layers draw random numbers as plain ones do. Inductor's own generator would let the code compiled for the
fill pass and that for the gradient pass drop different activations."""


OUTSIDE = (
    "{} was called from outside of an engine's pass over its model, by another thread or by a callback: call the model "
    "while no engine computes it, or use engine.loss or engine.logprobs, which wait for their turn"
)


KNOWN_ARGUMENTS = ("position_ids", "cache_position")
"""Tensors that models pass on to attention without a bearing on it."""


class Attention(Protocol):
    """One walk over the chunks. The attention of every layer goes through it."""

    def attend(self, call: AttentionCall) -> Tensor: ...


engine_lock = threading.RLock()
"""Held while a pass runs, and while its memory is taken or given back."""


class _ThreadState(threading.local):
    """What this thread computes."""

    chunk_of: Attention | None = None
    """The pass whose chunk it is. Of no other thread: theirs may call the model for reasons of their own."""


thread_state = _ThreadState()


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
    if thread_state.chunk_of is None:
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
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = AttentionCall(layer, query, key, value, scale, sliding_window, softcap, s_aux)
    out = thread_state.chunk_of.attend(call)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention))


def route(undo: ExitStack, module: nn.Module, call: Callable[..., Any]) -> None:
    """Have calls of a module go to `call`, through the slot that `nn.Module.compile` uses, until `undo`."""
    users_own = vars(module).get(CALL)
    if users_own is None:
        undo.callback(delattr, module, CALL)
    else:
        undo.callback(setattr, module, CALL, users_own)
    setattr(module, CALL, call)


def gate(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, for the thread that computes a chunk. Others would compute with half of the model changed."""

    def gated(*args: Any, **kwargs: Any) -> Any:
        if thread_state.chunk_of is None:
            raise RuntimeError(OUTSIDE.format(type(module).__name__))
        return call(*args, **kwargs)

    # Users may have compiled the modules around it. Traced, it would be compiled anew in every pass.
    return torch.compiler.disable(gated, recursive=False)


def within_chunk(pass_: Attention | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, as a part of this pass's chunk in whatever thread autograd makes it again."""

    def called(*args: Any, **kwargs: Any) -> Any:
        outer, thread_state.chunk_of = thread_state.chunk_of, pass_
        try:
            return call(*args, **kwargs)
        finally:
            thread_state.chunk_of = outer

    return called


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of the active autocast, or None if there is none."""
    # The meta device, where shapes are recorded, has no autocast.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def current_autocast(device_type: str) -> torch.autocast:
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
    return thread_state.chunk_of is not None


def is_checkpointing(model: nn.Module) -> bool:
    """Whether a layer recomputes itself in the backward because the model's own switch says so."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def set_checkpointing(model: nn.Module, *, on: bool) -> None:
    """That switch. Releases of transformers call it activation checkpointing or gradient checkpointing."""
    end = "enable" if on else "disable"
    name = f"activation_checkpointing_{end}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{end}")()
