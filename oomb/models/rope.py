"""RoPE variants whose frequencies depend on the sequence length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind) for kind in kinds)


def length_state(rotary: nn.Module) -> dict[str, Any]:
    """What such a RoPE remembers of the sequences it has seen."""
    names = [name for name in (*vars(rotary), *rotary._buffers) if name.endswith(("inv_freq", "max_seq_len_cached"))]
    return {name: getattr(rotary, name) for name in names}


def append_last_position(total_length: int, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def drop_last_position(rotary: nn.Module, args: Any, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(x[..., :-1, :] for x in cos_sin)
