"""Putting partial attention results together: merging outputs by lse, and summing shares of dq.

Plain PyTorch takes several passes over the tensors for this; on a GPU one Triton kernel does it in one. B batch, H heads,
T queries, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None
if TYPE_CHECKING:
    import triton
    import triton.language as tl


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint keys as one over their union; the output in `dtype` (default: float32 or wider).

    One query, scores log 1 and log 3, values 4 and 8: out 4, lse log 1 and out2 8, lse2 log 3 give 4/4 + 8*3/4 = 7, log 4.
    """
    dtype = dtype or torch.promote_types(out2.dtype, torch.float32)
    if _use_triton(out2):
        return _launch(out, out2, dtype, lse, lse2)
    return merge_reference(out, lse, out2, lse2, dtype)


def add(x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x + y, computed in float32 or wider and returned in `dtype` (default: float32 or wider)."""
    dtype = dtype or torch.promote_types(y.dtype, torch.float32)
    if _use_triton(y):
        return _launch(x, y, dtype)[0]
    return add_reference(x, y, dtype)


def merge_reference(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole = torch.logaddexp(lse, lse2)
    share, share2 = ((part - whole).exp().unsqueeze(-1) for part in (lse, lse2))
    return (out * share + out2 * share2).to(dtype), whole


def add_reference(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    return (x.to(wide) + y).to(dtype)


def _use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype.itemsize < 8


def _launch(
    x: Tensor, y: Tensor, dtype: torch.dtype, lse_x: Tensor | None = None, lse_y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    B, H, T, D = y.shape
    assert x.stride(-1) == y.stride(-1) == 1
    out = torch.empty_like(y, dtype=dtype)
    weighted = lse_x is not None and lse_y is not None
    lse = torch.empty(B, H, T, dtype=torch.float32, device=y.device) if weighted else out
    lse_x, lse_y = (part.contiguous() if part is not None else out for part in (lse_x, lse_y))
    # 32 x 128 elements a program: wide loads, and enough programs for any GPU at 4096 queries.
    grid = (triton.cdiv(T, 32), H, B)
    _combine_kernel[grid](
        x, y, out, lse_x, lse_y, lse, T, D, *x.stride()[:3], *y.stride()[:3], *out.stride()[:3],
        WEIGHTED=weighted, TILE_T=32, TILE_D=triton.next_power_of_2(D),
    )  # fmt: skip
    return out, lse


def _combine_kernel(
    x, y, out, lse_x, lse_y, lse_out, T, D,
    x_b, x_h, x_t, y_b, y_h, y_t, out_b, out_h, out_t,
    WEIGHTED: tl.constexpr, TILE_T: tl.constexpr, TILE_D: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out = x + y, or with WEIGHTED x and y each times exp(its lse - the merged lse), which goes to lse_out."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    d = tl.arange(0, TILE_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    x_at = b * x_b + h * x_h + t[:, None] * x_t + d[None, :]
    y_at = b * y_b + h * y_h + t[:, None] * y_t + d[None, :]
    x_tile = tl.load(x + x_at, inside, other=0.0).to(tl.float32)
    y_tile = tl.load(y + y_at, inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        rows = (b * tl.num_programs(1) + h) * T + t
        first = tl.load(lse_x + rows, t < T, other=0.0)
        second = tl.load(lse_y + rows, t < T, other=0.0)
        top = tl.maximum(first, second)
        whole = top + tl.log(tl.exp(first - top) + tl.exp(second - top))
        tl.store(lse_out + rows, whole, t < T)
        x_tile *= tl.exp(first - whole)[:, None]
        y_tile *= tl.exp(second - whole)[:, None]
    out_at = b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    tl.store(out + out_at, (x_tile + y_tile).to(out.dtype.element_ty), inside)


if triton is not None:
    _combine_kernel = triton.jit(_combine_kernel)
