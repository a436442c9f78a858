"""Route a model's attention to the active pass, and its calls through gates, until the pass ends."""

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
"""Attribute of `nn.Module` that `nn.Module.compile` sets and that calls of the module go to."""


LIKE_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
"""Options of torch.compile. Compiled layers use PyTorch's generator, because Inductor's own could drop different
activations in the fill pass and in the gradient pass."""


OUTSIDE = (
    "{} was called by another thread or a callback while an engine was running a pass over the model: wait until the "
    "pass is over, or use engine.loss or engine.logprobs, which wait for it"
)


KNOWN_ARGUMENTS = ("position_ids", "cache_position")
"""Tensors that models pass to attention without changing its result."""


class Attention(Protocol):
    """A pass over the chunks, which computes the attention of every layer."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, H, T, D] of a chunk in one layer."""
        ...


engine_lock = threading.RLock()
"""Held while a pass runs, and while its memory is allocated or freed."""


class _ThreadState(threading.local):
    """What the current thread computes."""

    chunk_of: Attention | None = None
    """The pass whose chunk this thread computes. Other threads may call the model for reasons of their own."""


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
    """Compute attention for a model, as registered with transformers. Takes [B, H, T, D], returns [B, T, H, D]."""
    layer = getattr(module, "layer_idx", None)
    name = f"{type(module).__name__} of layer {layer}"
    if thread_state.chunk_of is None:
        raise RuntimeError(OUTSIDE.format(name))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extra = [key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in KNOWN_ARGUMENTS]
    if layer is None or attention_mask is not None or not causal or extra:
        raise UnsupportedModelError(
            f"{name} does not use plain causal attention{f' (it passes {extra[0]})' if extra else ''}, which is all "
            "that chunks can compute: use another model"
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
    """Replace calls of a module by `call` until `undo`, through the attribute that `nn.Module.compile` uses."""
    users_own = vars(module).get(CALL)
    if users_own is None:
        undo.callback(delattr, module, CALL)
    else:
        undo.callback(setattr, module, CALL, users_own)
    setattr(module, CALL, call)


def gate(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` that raises in any thread but the one that computes a chunk: the model is half changed."""

    def gated(*args: Any, **kwargs: Any) -> Any:
        if thread_state.chunk_of is None:
            raise RuntimeError(OUTSIDE.format(type(module).__name__))
        return call(*args, **kwargs)

    # Users may have compiled the modules around it; tracing this function would recompile them in every pass.
    return torch.compiler.disable(gated, recursive=False)


def within_chunk(pass_: Attention | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` as part of a pass's chunk, in whatever thread autograd repeats it."""

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
    """Return the active autocast, to enter it again in the backward.

    Its cache is off: it would hand weights cast without a graph to a pass that needs one.
    """
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )


def is_running() -> bool:
    """Return whether this thread computes a chunk of an engine's pass."""
    return thread_state.chunk_of is not None


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether the model's own gradient checkpointing is on in any layer."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def set_checkpointing(model: nn.Module, *, on: bool) -> None:
    """Switch the model's own gradient checkpointing, which newer transformers call activation checkpointing."""
    end = "enable" if on else "disable"
    name = f"activation_checkpointing_{end}"
    getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{end}")()
