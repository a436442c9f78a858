"""Merge partial attention: outputs by their log-sum-exp, and parts of dq by adding them.

Plain PyTorch needs several passes over the tensors; on a GPU a Triton kernel needs one. B batch, H heads, T queries,
D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomb.ops.triton_support import can_launch, power_of_two


def merge(
    out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    The output is in `dtype`, by default float32 or wider.

    One query over keys with scores log 1 and log 3 and values 4 and 8: (4, log 1) and (8, log 3) merge to
    (4 * 1/4 + 8 * 3/4, log 4) = (7, log 4).
    """
    dtype = dtype or torch.promote_types(out2.dtype, torch.float32)
    if can_launch(out2):
        return _launch(out, out2, dtype, lse, lse2)
    return merge_reference(out, lse, out2, lse2, dtype)


def add(x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x + y, computed in float32 or wider, in `dtype` (by default float32 or wider)."""
    dtype = dtype or torch.promote_types(y.dtype, torch.float32)
    if can_launch(y):
        return _launch(x, y, dtype)[0]
    return add_reference(x, y, dtype)


def merge_reference(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge in plain PyTorch."""
    merged_lse = torch.logaddexp(lse, lse2)
    weight, weight2 = ((part - merged_lse).exp().unsqueeze(-1) for part in (lse, lse2))
    return (out * weight + out2 * weight2).to(dtype), merged_lse


def add_reference(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Add in plain PyTorch."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (x.to(wide) + y).to(dtype)


def _launch(
    x: Tensor, y: Tensor, dtype: torch.dtype, lse_x: Tensor | None = None, lse_y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    from oomb.ops.triton_kernels.elementwise import merge_kernel

    B, H, T, D = y.shape
    assert x.stride(-1) == y.stride(-1) == 1
    out = torch.empty_like(y, dtype=dtype)
    is_weighted = lse_x is not None and lse_y is not None
    lse = torch.empty(B, H, T, dtype=torch.float32, device=y.device) if is_weighted else out
    lse_x, lse_y = (part.contiguous() if part is not None else out for part in (lse_x, lse_y))
    # 32 x 128 elements per program: wide loads, and enough programs for any GPU at 4096 queries.
    with torch.cuda.device_of(y):
        merge_kernel[(-(-T // 32), H, B)](
            x, y, out, lse_x, lse_y, lse, T, D, *x.stride()[:3], *y.stride()[:3], *out.stride()[:3],
            WEIGHTED=is_weighted, TILE_T=32, TILE_D=power_of_two(D),
        )  # fmt: skip
    return out, lse
