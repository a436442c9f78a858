"""How AdamW's moments rest: in float32, in bfloat16, or in 8 bits with a scale for every run of 256 numbers.

Where precision is lost they are rounded up or down at random. A second moment moves by a thousandth of the way in a
step, less than the distance between neighbouring bfloat16 or 8-bit numbers: rounded to the nearest, it would not move.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from oomb.ops.rounding import stochastic_round_next

STATE_DTYPES = ("float32", "bfloat16", "8bit")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Their names in a state dict, as torch has them."""
RUN = 256
"""Neighbouring numbers that share a scale in 8 bits."""
LEVELS = {torch.int8: (0, 127, 3), torch.uint8: (1, 256, 6)}
"""The 8-bit codes of the first and of the second moment: (first level, last level, power). Level k stands for
(k / last) ** power of the largest magnitude in the run. The powers were chosen by the distance from float32 AdamW on
small regressions (tests/test_moments.py has two of them). Where gradients within a run differ by factors up to 10,
these end 1.4 times nearer to it than the dynamic code of bitsandbytes, at factors up to 300 16 times; square and fourth
power are a little better at the former and worse at the latter. The second moment has no level for zero: one divides by
its root."""


def field_sizes(parameter: Tensor, state_dtype: str) -> dict[str, tuple[torch.dtype, int]]:
    """What rests for the moments of a parameter: precision and number of each field."""
    size = parameter.numel()
    fields: dict[str, tuple[torch.dtype, int]] = {}
    for name, code in zip(MOMENTS, LEVELS, strict=True):
        if state_dtype == "8bit":
            fields |= {name: (code, size), scale_of(name): (torch.float32, -(-size // RUN))}
        elif state_dtype == "bfloat16":
            fields[name] = torch.bfloat16, size
        else:
            fields[name] = torch.promote_types(parameter.dtype, torch.float32), size
    return fields


def scale_of(name: str) -> str:
    return f"{name}_scale"


def part(rows: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """The fields of the numbers from `start`, a multiple of RUN, to `end` - 1."""
    scales = slice(start // RUN, -(-end // RUN))
    return {name: row[scales if name.endswith("_scale") else slice(start, end)] for name, row in rows.items()}


def decode(fields: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A moment as numbers; the field itself if it is of that precision."""
    codes, scales = fields[name], fields.get(scale_of(name))
    if scales is None:
        return codes.to(dtype)
    first, last, power = LEVELS[codes.dtype]
    shares = codes.to(dtype).add_(first).div_(last).pow_(power)
    return shares.mul_(scales[:, None].expand(-1, RUN).reshape(-1)[: codes.numel()])


def encode_(fields: dict[str, Tensor], name: str, moment: Tensor, generator: torch.Generator) -> None:
    """Writes a moment into its fields. One that was decoded into its own field is there already.

    Where the largest magnitude of a run is 2, a first moment of 2 is level 127, and -0.25 lies between the levels -63
    and -64, the nearer one of which is the more likely.
    """
    codes, scales = fields[name], fields.get(scale_of(name))
    if scales is None:
        if codes is not moment:
            codes.copy_(stochastic_round_next(moment, codes.dtype, generator))
        return
    first, last, power = LEVELS[codes.dtype]
    runs = pad(moment, (0, -len(moment) % RUN)).view(-1, RUN)
    scales.copy_(runs.abs().amax(1))
    shares = runs.div(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[: len(moment)]
    sizes = shares.abs()
    levels = sizes.pow(1 / power).mul_(last).floor_().clamp_(first, last - 1)
    below, above = (levels / last).pow_(power), ((levels + 1) / last).pow_(power)
    draws = torch.rand(sizes.shape, generator=generator, device=sizes.device)
    levels.add_(sizes - below > above.sub_(below).mul_(draws)).sub_(first)
    codes.copy_(levels.copysign_(shares) if codes.dtype.is_signed else levels)
