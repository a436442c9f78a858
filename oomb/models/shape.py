"""The numbers that memory and time of a model depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Attention of one layer, as its tensors are."""

    num_kv_heads: int
    head_size: int
    value_size: int
    num_query_heads: int
    window: int | None = None
    itemsize: int | None = None
    """Bytes per number in which attention computes, as autocast has it; None: the model's."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All that memory and time depend on."""

    layers: tuple[LayerFacts, ...]
    hidden_size: int
    vocab_size: int
    itemsize: int
    """Bytes per number that the model computes in."""
    weight_bytes: int
    """Parameters and buffers."""
    grad_bytes: int
    """`.grad` of all trainable parameters, in their own dtype."""
    float32_sum_bytes: int
    """float32 sums of those that have less than 4 bytes."""
    wide_grad_bytes: int
    """`.grad` of the others, which need no sum."""
    head_grad_bytes: int
    """Gradient of the head's weight, made in one piece for each tile; 0 where it is frozen."""
    layer_io_width: int
    """Inputs and outputs of the matrices of a layer; of experts, those that a token uses."""
    has_adapters: bool
    """The base is frozen, small matrices beside it are trained."""
    has_float32_adapters: bool
    """They compute in more bytes than the base, as PEFT's float32 ones do outside of autocast."""
    active_params: int
    """Elements of the matrices that a token is multiplied with."""
    trained_params: int
    trainable_params: int
    num_positions: int | None = None
    """How many positions the model has learned; None if it computes them."""

    def missing_grad_bytes(self, float32_sums: bool) -> int:
        """What a gradient pass takes for parameter gradients when none exists yet."""
        return self.float32_sum_bytes + self.wide_grad_bytes if float32_sums else self.grad_bytes
