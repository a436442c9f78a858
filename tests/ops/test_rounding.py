"""Check stochastic rounding: unbiased, exact where possible, reproducible by seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomb.ops import rounding
from oomb.ops.rounding import add_, add_stochastic_, add_stochastic_reference


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values of `dtype` next to x, toward zero and away from it."""
    below = x.to(dtype)
    bits = below.view(torch.int16)
    too_far = below.float().abs() > x.abs()
    below = torch.where(too_far, bits - 1, bits).view(dtype)
    above = torch.where(below.float() == x, below.view(torch.int16), below.view(torch.int16) + 1).view(dtype)
    return below, above


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_to_a_neighbor(dtype: torch.dtype) -> None:
    total = torch.randn(4000).to(dtype)
    share = torch.randn(4000) * 10 ** torch.randint(-4, 2, (4000,)).float()
    summed = total.float() + share
    below, above = neighbours(summed, dtype)
    bits = torch.randint(0, 2**31 - 1, (4000,), dtype=torch.int32)
    add_stochastic_reference(total, share, bits)
    is_subnormal = summed.abs() < torch.finfo(dtype).tiny
    assert ((total == below) | (total == above) | is_subnormal).all() and not is_subnormal.all()
    assert (total == below).any() and ((total == above) & (above != below)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0, 2**31 - 1])
def test_representable_sums_are_exact(dtype: torch.dtype, bits: int) -> None:
    total = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5]).to(dtype)
    share = torch.tensor([0.5, 0.25, 0.0, -3.0, 1 / 128])
    add_stochastic_reference(total, share, torch.full((5,), bits, dtype=torch.int32))
    assert total.tolist() == [1.5, -1.75, 0.0, 0.0, 0.5078125]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_many_small_updates_survive(dtype: torch.dtype, sign: int) -> None:
    """1024 updates of 1/16 of half the distance to the next value: round-to-nearest loses all of them."""
    step = torch.finfo(dtype).eps
    shape = (1, 2, 16, 32)
    total = torch.full(shape, float(sign)).to(dtype)
    share = torch.full(shape, sign * step / 32)
    nearest = total.clone()
    for seed in range(1024):
        add_stochastic_(total, share, seed)
        nearest += share.to(dtype)
    arrived = (total.double().abs().mean() - 1).item() / (1024 * step / 32)
    if dtype == torch.float32:
        assert arrived == 0, "float32 is rounded to nearest"
        return
    assert (nearest == sign).all()
    # The mean of 1024 walks of 1024 steps with variance 1/32 x 31/32 has a deviation of 0.5% of the distance.
    assert abs(arrived - 1) < 0.03
    assert total.double().std() > 0, "all of them went the same way"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_and_nan_are_kept(dtype: torch.dtype) -> None:
    """Including the NaN whose bits are all ones, which GPUs produce: random bits would overflow it."""
    inf, nan = float("inf"), float("nan")
    total = torch.tensor([inf, -inf, 1.0, 1.0, nan, inf]).to(dtype)
    share = torch.tensor([1.0, 1.0, -inf, nan, 1.0, -inf])
    share.view(torch.int32)[3] = 2**31 - 1
    add_stochastic_reference(total, share, torch.full((6,), 2**31 - 1, dtype=torch.int32))
    assert total[:3].tolist() == [inf, -inf, -inf] and total[3:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounding_repeats_with_the_seed(dtype: torch.dtype) -> None:
    shape = (2, 3, 9, 5)
    start, share = torch.randn(shape).to(dtype), torch.randn(shape)

    def summed(seed: int, total: Tensor) -> Tensor:
        torch.rand(3)  # what else is drawn does not matter
        add_stochastic_(total, share, seed)
        return total

    strided = start.transpose(1, 2).contiguous().transpose(1, 2)
    state = torch.get_rng_state()
    first = summed(7, start.clone())
    assert torch.equal(summed(7, start.clone()), first)
    assert torch.equal(summed(7, strided), first)
    is_rounded = dtype in (torch.bfloat16, torch.float16)
    assert torch.equal(summed(8, start.clone()), first) is not is_rounded
    torch.set_rng_state(state)
    add_stochastic_(start.clone(), share, 7)
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"


@pytest.mark.parametrize("transposed", [False, True])
def test_large_sums_are_computed_in_blocks(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BLOCK_SIZE", 100)
    total, share = torch.randn(37, 29).to(torch.bfloat16), torch.randn(37, 29)
    if transposed:
        total, share = total.t().contiguous().t(), share.t().contiguous().t()
    summed = total.float() + share
    below, above = neighbours(summed, torch.bfloat16)
    add_(total, share, 3)
    assert ((total == below) | (total == above)).all() and ((total == above) & (above != below)).any()
    for first in (0, 100, 1000):
        assert (total.flatten()[first : first + 100] == below.flatten()[first : first + 100]).any(), "random everywhere"
