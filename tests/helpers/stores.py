"""Make small page stores whose rows need padding, and fill them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oomb.memory.rows import LayerRows, RowLayout
from oomb.memory.store import PageStore
from oomb.memory.tiers import Tiers

CPU = torch.device("cpu")
B, K, H, D, V = 2, 3, 6, 5, 4
"""Batch size, key/value heads, query heads, key and value size. Rows need padding."""
CHUNK = 7
PLACEMENTS = (1000, 0, 13, 16, 24)
"""How many of 35 tokens are on the GPU: all, none, and edges inside a segment and inside a page."""


def layer_spec(
    dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    window: int | None = None,
) -> LayerRows:
    k, v = (B, K, D), (B, K, V)
    return LayerRows(
        kv=RowLayout((k, kv_dtype or dtype), (v, kv_dtype or dtype)),
        grad=RowLayout((k, grad_dtype or dtype), (v, grad_dtype or dtype)),
        out=RowLayout(((B, H, V), dtype), ((B, H), torch.promote_types(dtype, torch.float32))),
        dtype=dtype,
        window=window,
    )


def make_store(
    tiers: Tiers,
    num_chunks: int = 5,
    *,
    layers: dict[int, LayerRows] | None = None,
    keeps: bool = False,
    **changes: Any,
) -> PageStore:
    layers = layers or {0: layer_spec(), 3: layer_spec(torch.float32)}
    sizes = {"capacity": num_chunks * CHUNK, "chunk_size": CHUNK, "page_size": 4, "gpu_tokens": 0}
    sizes["out_tokens"] = sizes["capacity"] if keeps else 0
    return PageStore(tiers, layers, **{**sizes, **changes})


def fill(store: PageStore) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Fill a store chunk by chunk, with one chunk more than has pages. Return K, V, outputs and LSEs by layer."""
    filled = {}
    length = store.capacity + CHUNK
    for layer, spec in store.layers.items():
        k, v, out, lse = (
            torch.randn(B, length, *shape, dtype=spec.dtype).transpose(1, 2) for shape in ((K, D), (K, V), (H, V), (H,))
        )
        filled[layer] = k, v, out, lse
    for start in range(0, length, store.chunk_size):
        for layer, tensors in filled.items():
            k, v, out, lse = (x[:, :, start : start + store.chunk_size] for x in tensors)
            store.append(layer, start, k, v)
            store.save_output(layer, start, out, lse)
    return filled


def keys(store: PageStore, end: int) -> Tensor:
    """Return K of layer 0. A segment is valid until the next is requested."""
    return torch.cat([k.clone() for _, k, _ in store.segments(0, 0, end)], 2)
