"""Accumulate gradients in float32 and store them with stochastic rounding.

Adding a thousand small updates to a bfloat16 value with round-to-nearest loses all of them; stochastic rounding is
unbiased, so their sum survives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oomb.ops.triton_support import can_launch, power_of_two

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Mantissa bits of float32 that these dtypes drop."""
BLOCK_SIZE = 2**22
"""Elements added at once without a kernel: the temporaries are several times as large as the operands."""


def add_stochastic_(total: Tensor, update: Tensor, seed: int) -> None:
    """Add `update` to `total` in float32 and store the sum with stochastic rounding if `total` has 16 bits.

    Args:
        total: [B, K, T, D] with any strides.
        update: The same shape, any strides.
        seed: Below 2**31. The random bits depend on it and on the shape, not on the memory layout.
    """
    if can_launch(total, update):
        launch_add_stochastic(total, update, seed)
    else:
        add_stochastic_reference(total, update, random_bits(total, _generator(total, seed)))


def add_(total: Tensor, update: Tensor, seed: int) -> None:
    """Do the same for tensors of any shape. PyTorch's mixed-dtype kernel does not vectorize its loads; ours does."""
    is_flat = total.is_contiguous() and update.is_contiguous()
    if is_flat and can_launch(total, update):
        launch_add(total, update, seed)
    elif total.dtype in DROPPED_BITS:
        flat = total.view(-1) if total.is_contiguous() else total.reshape(-1)
        blocks = zip(flat.split(BLOCK_SIZE), update.reshape(-1).split(BLOCK_SIZE), strict=True)
        for index, (block, update_block) in enumerate(blocks):
            bits = random_bits(block, _generator(block, mix(seed, index)))
            add_stochastic_reference(block, update_block, bits)
        if not total.is_contiguous():
            total.copy_(flat.view(total.shape))
    else:
        total.add_(update)


def stochastic_round(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Return x in `dtype`, rounded stochastically if that has 16 bits."""
    rounded = torch.zeros_like(x, dtype=dtype)
    add_stochastic_reference(rounded, x, random_bits(rounded, _generator(rounded, seed)))
    return rounded


def stochastic_round_next(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return x in `dtype`, rounded with the next bits of `generator` if that has 16 bits."""
    if dtype not in DROPPED_BITS:
        return x.to(dtype)
    # Not `random_bits`, which draws from a range smaller by one: optimizer runs resume with the same bits.
    bits = torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(generator=generator)
    rounded = torch.zeros(x.shape, dtype=dtype, device=x.device)
    add_stochastic_reference(rounded, x, bits)
    return rounded


def stochastic_floor(x: Tensor, seed: int) -> Tensor:
    """Return x rounded to integers: 2.25 becomes 3 with probability 1/4, otherwise 2."""
    return (x + torch.rand(x.shape, generator=_generator(x, seed), dtype=torch.float32, device=x.device)).floor()


def mix(*numbers: int) -> int:
    """Combine numbers into one seed below 2**31."""
    return hash(numbers) % (2**31)


def random_bits(x: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return random bits for every element of x, or None if its dtype needs no stochastic rounding."""
    if x.dtype not in DROPPED_BITS:
        return None
    return torch.randint(0, 2**31 - 1, x.shape, generator=generator, dtype=torch.int32, device=x.device)


def add_stochastic_reference(total: Tensor, update: Tensor, bits: Tensor | None) -> None:
    """Add `update` to `total` with the given random bits; None: rounded to nearest.

    1 + 2**-8 is halfway between two bfloat16 numbers, 1 and 1 + 2**-7: half of all random bits give each of them.
    """
    summed = total.to(torch.promote_types(total.dtype, torch.float32)) + update
    if bits is not None:
        dropped = (1 << DROPPED_BITS[total.dtype]) - 1
        # Float bits are ordered like magnitudes: adding below the cut carries over with the right probability.
        rounded = (summed.float().view(torch.int32) + (bits & dropped)) & ~dropped
        summed = torch.where(summed.isfinite(), rounded.view(torch.float32), summed)
    total.copy_(summed)


def launch_add_stochastic(total: Tensor, update: Tensor, seed: int) -> None:
    """Launch the kernel of `add_stochastic_`."""
    from oomb.ops.triton_kernels.elementwise import accumulate_kernel

    B, K, T, D = total.shape
    assert total.stride(-1) == update.stride(-1) == 1 and total.numel() < 2**31
    with torch.cuda.device_of(total):
        accumulate_kernel[(-(-T // 32), K, B)](
            total, update, seed, T, D, *total.stride()[:3], *update.stride()[:3],
            DROPPED=DROPPED_BITS.get(total.dtype, 0), TILE_T=32, TILE_D=power_of_two(D),
        )  # fmt: skip


def launch_add(total: Tensor, update: Tensor, seed: int) -> None:
    """Launch the kernel of `add_`."""
    from oomb.ops.triton_kernels.elementwise import add_share_kernel

    tile = 4096
    with torch.cuda.device_of(total):
        add_share_kernel[(-(-total.numel() // tile),)](
            total, update, seed, total.numel(), DROPPED=DROPPED_BITS.get(total.dtype, 0), TILE=tile
        )


def _generator(x: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(x.device).manual_seed(seed)
