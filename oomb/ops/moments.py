"""Encode AdamW's moments in float32, in bfloat16, or in 8 bits with one scale per block of 256 elements.

Lossy encodings use stochastic rounding. A step moves a second moment by a thousandth of the way to its target, less
than the distance between neighboring bfloat16 or 8-bit values: with round-to-nearest it would never move.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from oomb.ops.rounding import stochastic_round_next

STATE_DTYPES = ("float32", "bfloat16", "8bit")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in a state dict, as in torch."""
BLOCK = 256
"""Consecutive elements that share a scale in 8 bits."""
LEVELS = {torch.int8: (0, 127, 3), torch.uint8: (1, 256, 6)}
"""8-bit codes of the first and second moment: (first level, last level, power). Level k stands for (k / last) ** power
of the block's largest magnitude. The powers minimize the distance from float32 AdamW on small regressions
(tests/ops/test_moments.py has two). With gradients that differ by up to 10x within a block, the result is 1.4 times
closer to float32 than the dynamic code of bitsandbytes, and 16 times closer at up to 300x; square and fourth power are
slightly better at 10x and worse at 300x. The second moment has no level for zero, since updates divide by its root."""


def field_sizes(parameter: Tensor, state_dtype: str) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and number of elements of every stored field of a parameter's moments."""
    size = parameter.numel()
    fields: dict[str, tuple[torch.dtype, int]] = {}
    for name, code in zip(MOMENTS, LEVELS, strict=True):
        if state_dtype == "8bit":
            fields |= {name: (code, size), scale_of(name): (torch.float32, -(-size // BLOCK))}
        elif state_dtype == "bfloat16":
            fields[name] = torch.bfloat16, size
        else:
            fields[name] = torch.promote_types(parameter.dtype, torch.float32), size
    return fields


def scale_of(name: str) -> str:
    """Return the name of the field with a moment's scales."""
    return f"{name}_scale"


def part(rows: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Return the fields of elements [start, end). `start` is a multiple of BLOCK."""
    scales = slice(start // BLOCK, -(-end // BLOCK))
    return {name: row[scales if name.endswith("_scale") else slice(start, end)] for name, row in rows.items()}


def decode(fields: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """Return a moment in `dtype`: the field itself if it has that dtype."""
    codes, scales = fields[name], fields.get(scale_of(name))
    if scales is None:
        return codes.to(dtype)
    first, last, power = LEVELS[codes.dtype]
    ratios = codes.to(dtype).add_(first).div_(last).pow_(power)
    return ratios.mul_(scales[:, None].expand(-1, BLOCK).reshape(-1)[: codes.numel()])


def encode_(fields: dict[str, Tensor], name: str, moment: Tensor, generator: torch.Generator) -> None:
    """Write a moment to its fields, unless `decode` returned the field itself.

    If the largest magnitude of a block is 2, a first moment of 2 becomes level 127, and -0.25 becomes level -63 or -64,
    the closer one more likely.
    """
    codes, scales = fields[name], fields.get(scale_of(name))
    if scales is None:
        if codes is not moment:
            codes.copy_(stochastic_round_next(moment, codes.dtype, generator))
        return
    first, last, power = LEVELS[codes.dtype]
    blocks = pad(moment, (0, -len(moment) % BLOCK)).view(-1, BLOCK)
    scales.copy_(blocks.abs().amax(1))
    ratios = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(moment)]
    sizes = ratios.abs()
    levels = sizes.pow(1 / power).mul_(last).floor_().clamp_(first, last - 1)
    below, above = (levels / last).pow_(power), ((levels + 1) / last).pow_(power)
    draws = torch.rand(sizes.shape, generator=generator, device=sizes.device)
    levels.add_(sizes - below > above.sub_(below).mul_(draws)).sub_(first)
    codes.copy_(levels.copysign_(ratios) if codes.dtype.is_signed else levels)
