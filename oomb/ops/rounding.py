"""Adding to gradients: in float32, and rounded up or down at random where they are kept in 16 bits.

A thousand small shares added to a bfloat16 number by rounding to nearest get lost, each of them in the same way.
Rounded up with the probability that is due, they arrive on average.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 fraction that these have no room for."""
PIECE = 2**22
"""Numbers that are added at once where no kernel does it."""


def add_stochastic_(total: Tensor, share: Tensor, seed: int) -> None:
    """total += share, both [B, K, T, D] with any strides. `seed` is a number below 2**31; what it draws depends on the
    shape alone, not on where the tensors lie."""
    if HAS_TRITON and total.is_cuda and total.dtype.itemsize < 8 and share.dtype.itemsize < 8:
        launch_add_stochastic(total, share, seed)
    else:
        add_stochastic_reference(total, share, random_bits(total, seed))


def add_(total: Tensor, share: Tensor, seed: int) -> None:
    """The same, of any shape. PyTorch's own kernel for two different dtypes does not load vectors, ours does."""
    is_flat = total.is_contiguous() and share.is_contiguous()
    if HAS_TRITON and total.is_cuda and is_flat and total.dtype.itemsize < 8 and share.dtype.itemsize < 8:
        launch_add(total, share, seed)
    elif total.dtype in DROPPED_BITS:
        # Piece by piece: what is made on the way is several times as large as what is added.
        flat = total.view(-1) if total.is_contiguous() else total.reshape(-1)
        for index, (part, piece) in enumerate(zip(flat.split(PIECE), share.reshape(-1).split(PIECE), strict=True)):
            add_stochastic_reference(part, piece, random_bits(part, mix(seed, index)))
        if not total.is_contiguous():
            total.copy_(flat.view(total.shape))
    else:
        total.add_(share)


def stochastic_round(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """x in `dtype`, rounded at random where that has 16 bits."""
    total = torch.zeros_like(x, dtype=dtype)
    add_stochastic_reference(total, x, random_bits(total, seed))
    return total


def mix(*numbers: int) -> int:
    """A seed of several numbers."""
    return hash(numbers) % (2**31)


def random_bits(x: Tensor, seed: int) -> Tensor | None:
    """For every number of x, where it is to be rounded at random."""
    if x.dtype not in DROPPED_BITS:
        return None
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randint(0, 2**31 - 1, x.shape, generator=generator, dtype=torch.int32, device=x.device)


def add_stochastic_reference(total: Tensor, share: Tensor, random_bits: Tensor | None) -> None:
    """The same, with the random bits given.

    1 + 2**-8 lies halfway between two bfloat16 numbers, 1 and 1 + 2**-7: half of all random bits give each of them.
    """
    summed = total.to(torch.promote_types(total.dtype, torch.float32)) + share
    if random_bits is not None:
        dropped = (1 << DROPPED_BITS[total.dtype]) - 1
        # The bits of a float are ordered as its magnitude is: adding below the cut carries with the right probability.
        moved = (summed.float().view(torch.int32) + (random_bits & dropped)) & ~dropped
        summed = torch.where(summed.isfinite(), moved.view(torch.float32), summed)
    total.copy_(summed)


def launch_add_stochastic(total: Tensor, share: Tensor, seed: int) -> None:
    from oomb.ops.triton_kernels.elementwise import accumulate_kernel

    B, K, T, D = total.shape
    assert total.stride(-1) == share.stride(-1) == 1 and total.numel() < 2**31
    with torch.cuda.device_of(total):
        accumulate_kernel[(-(-T // 32), K, B)](
            total, share, seed, T, D, *total.stride()[:3], *share.stride()[:3],
            DROPPED=DROPPED_BITS.get(total.dtype, 0), TILE_T=32, TILE_D=1 << (D - 1).bit_length(),
        )  # fmt: skip


def launch_add(total: Tensor, share: Tensor, seed: int) -> None:
    from oomb.ops.triton_kernels.elementwise import add_share_kernel

    tile = 4096
    with torch.cuda.device_of(total):
        add_share_kernel[(-(-total.numel() // tile),)](
            total, share, seed, total.numel(), DROPPED=DROPPED_BITS.get(total.dtype, 0), TILE=tile
        )
