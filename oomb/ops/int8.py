"""Vectors in 8 bits: whole numbers from -127 to 127, and one scale for each vector.

A scale is rounded up, so that the largest number of a vector is never cut off. What is added to again and again is
rounded up or down at random (`oomb.rounding` says why). D is the size of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
SCALE_DTYPE = torch.bfloat16
UP = 1 + 2**-7
"""Rounding to bfloat16 takes off less than this factor puts on."""


def quantize(x: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Numbers in int8 and scales [...] of vectors [..., D]; with a seed, rounded at random by it.

    [1.0, -2.0, 0.5] has the scale 2.0 / 127 (a little more in bfloat16), and so becomes [63, -126, 31] or thereabouts.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1) / LEVELS * UP).to(SCALE_DTYPE)
    steps = wide / scale.to(wide.dtype).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if seed is None:
        steps = steps.round()
    else:
        generator = torch.Generator(x.device).manual_seed(seed)
        steps = (steps + torch.rand(steps.shape, generator=generator, dtype=torch.float32, device=x.device)).floor()
    return steps.clamp(-LEVELS, LEVELS).to(torch.int8), scale


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., D] again."""
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)
