"""Give length-dependent RoPE the length of the whole sequence instead of the chunk's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies depend on the sequence length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind) for kind in kinds)


def length_state(rotary: nn.Module) -> dict[str, Any]:
    """Return what a length-dependent RoPE remembers of earlier sequences, by attribute name."""
    names = [name for name in (*vars(rotary), *rotary._buffers) if name.endswith(("inv_freq", "max_seq_len_cached"))]
    return {name: getattr(rotary, name) for name in names}


def append_last_position(total_length: int, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append the last position of the whole sequence (a forward pre-hook), which RoPE takes for the length."""
    position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = position_ids.new_full((*position_ids.shape[:-1], 1), total_length - 1)
    position_ids = torch.cat([position_ids, last], dim=-1)
    # Reset what it remembers of earlier sequences: both passes must use the same frequencies, whatever ran in between.
    for field in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, field, rotary.original_max_seq_len)
    for field in [name for name in (*vars(rotary), *rotary._buffers) if name.endswith("original_inv_freq")]:
        # Copy, outside of inference mode: some releases of transformers write new frequencies into this tensor.
        with torch.inference_mode(False):
            frequencies = getattr(rotary, field).to(position_ids.device, copy=True)
        setattr(rotary, field.removesuffix("original_inv_freq") + "inv_freq", frequencies)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": position_ids}
    return (args[0], position_ids, *args[2:]), kwargs


def drop_last_position(rotary: nn.Module, args: Any, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Drop the position that `append_last_position` added (a forward hook)."""
    return tuple(x[..., :-1, :] for x in cos_sin)
