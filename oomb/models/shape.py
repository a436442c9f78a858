"""Shapes of a model and of its layers: the numbers that memory and time depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of one layer's attention, as its tensors show it."""

    num_kv_heads: int
    head_size: int
    value_size: int
    num_query_heads: int
    window: int | None = None
    dtype: torch.dtype
    """Dtype of K and V when they reach attention: under autocast, that of autocast."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All numbers of a model that the planner needs."""

    layers: tuple[LayerShape, ...]
    hidden_size: int
    vocab_size: int
    itemsize: int
    """Bytes per element of the dtype the model computes in."""
    weight_bytes: int
    """Parameters and buffers."""
    grad_bytes: int
    """`.grad` of all trainable parameters, in their own dtypes."""
    float32_sum_bytes: int
    """float32 sums for the trainable parameters of less than 4 bytes per element."""
    wide_grad_bytes: int
    """`.grad` of the other trainable parameters, which need no separate sum."""
    head_grad_bytes: int
    """Gradient of the head's weight, which each tile of logits allocates whole; 0 if the head is frozen."""
    layer_io_width: int
    """Sum of input and output widths over a layer's matrices, counting only the experts that one token uses."""
    has_adapters: bool
    """Whether the base is frozen and small matrices next to it are trained."""
    has_float32_adapters: bool
    """Whether adapters compute in a wider dtype than the base, as PEFT's float32 adapters do without autocast."""
    active_params: int
    """Elements of the matrices that each token is multiplied with."""
    trained_params: int
    """Those of `active_params` that are trainable."""
    trainable_params: int
    num_positions: int | None = None
    """Number of learned positions; None if the model computes positions."""

    @property
    def head_params(self) -> int:
        """Elements of the LM head's matrix."""
        return self.vocab_size * self.hidden_size

    def missing_grad_bytes(self, float32_sums: bool) -> int:
        """Return the bytes a gradient pass allocates for parameter gradients if none exist yet."""
        return self.float32_sum_bytes + self.wide_grad_bytes if float32_sums else self.grad_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: a layer's dtype as its `itemsize`."""
        values = asdict(self)
        for layer in values["layers"]:
            layer["itemsize"] = layer.pop("dtype").itemsize
        return values
