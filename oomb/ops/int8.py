"""Quantize vectors to int8 with one scale each.

Scales are rounded up, so the largest element of a vector is never clipped. Values that are read, changed and written
again and again need stochastic rounding (`oomb.ops.rounding` says why). D is the size of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomb.ops.rounding import stochastic_floor

LEVELS = 127
SCALE_DTYPE = torch.bfloat16
UP = 1 + 2**-7
"""Rounding a scale to bfloat16 shrinks it by less than this factor."""


def quantize(x: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Return vectors [..., D] in int8 and their scales [...]; with a seed, round stochastically.

    [1.0, -2.0, 0.5] has the scale 2.0 / 127 (a little more in bfloat16), so it becomes about [63, -126, 31].
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1) / LEVELS * UP).to(SCALE_DTYPE)
    steps = wide / scale.to(wide.dtype).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    steps = steps.round() if seed is None else stochastic_floor(steps, seed)
    return steps.clamp(-LEVELS, LEVELS).to(torch.int8), scale


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the vectors [..., D] in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)
