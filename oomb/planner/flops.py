"""Count the floating-point operations of a training step: matrix products and causal attention."""

from __future__ import annotations

from oomb.models.shape import LayerShape, ModelShape


def step_flops(shape: ModelShape, length: int, keys: int | None = None) -> float:
    """Return the FLOPs of forward and backward over one sequence, without any recomputation.

    Args:
        shape: The model.
        length: Tokens in the sequence.
        keys: Maximum number of tokens that a query attends to in layers without a sliding window
            (`Config.keys_read`). None: all.
    """
    matrices = matrix_flops(2 * shape.active_params + shape.trained_params, length)
    attention = sum(
        attention_flops(layer, causal_pairs(length, layer.window if layer.window is not None else keys))
        for layer in shape.layers
    )
    # The backward of attention takes twice its forward.
    return matrices + 3 * attention


def matrix_flops(num_params: float, num_tokens: float) -> float:
    """Return the FLOPs of multiplying tokens with matrices of `num_params` elements, in one direction."""
    return 2 * num_params * num_tokens


def attention_flops(layer: LayerShape, num_pairs: float) -> float:
    """Return the FLOPs of one layer's attention forward over `num_pairs` (query, key) pairs."""
    return 2 * layer.num_query_heads * (layer.head_size + layer.value_size) * num_pairs


def causal_pairs(length: int, window: int | None = None) -> float:
    """Return the number of (query, visible key) pairs in one sequence.

    >>> causal_pairs(1000)
    500000.0
    >>> causal_pairs(1000, window=100)
    95000.0
    """
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2
