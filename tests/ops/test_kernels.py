"""Compare Triton kernels with their references, on a GPU or in Triton's interpreter.

The interpreter's bfloat16 is unreliable, so it uses float16 instead.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from oomb.memory.rows import RowLayout
from oomb.ops import merge, rounding
from oomb.ops.triton_kernels.elementwise import mixed_bits

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def partial_result(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output of one block of keys in the layout of models ([B, T, H, D] in memory), and its LSE."""
    B, H, T, D = shape
    out = torch.randn(B, T, H, D, device=DEVICE).to(dtype).transpose(1, 2)
    return out, torch.randn(B, H, T, device=DEVICE) * 5


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 32, 64), (2, 3, 37, 80), (1, 1, 1, 128), (2, 7, 65, 256)], ids=str)
def test_merge(shape: tuple[int, int, int, int], wide_first: bool, dtype: torch.dtype, poisoned_empty: None) -> None:
    out, lse = partial_result(shape, torch.float32 if wide_first else HALF)
    out2, lse2 = partial_result(shape, HALF)
    merged, merged_lse = merge._launch(out, out2, dtype, lse, lse2)
    expected, expected_lse = merge.merge_reference(out, lse, out2, lse2, dtype)
    assert merged.dtype == dtype and merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_merge_of_far_apart_lses() -> None:
    """A block without weight must not turn the result into NaN."""
    out, lse = partial_result((1, 2, 5, 64), HALF)
    out2, lse2 = partial_result((1, 2, 5, 64), HALF)
    merged, merged_lse = merge._launch(out, out2, torch.float32, lse - 1000, lse2 + 1000)
    torch.testing.assert_close(merged, out2.float())
    torch.testing.assert_close(merged_lse, lse2 + 1000)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_add(dtype: torch.dtype, poisoned_empty: None) -> None:
    x, _ = partial_result((2, 3, 37, 80), torch.float32)
    y, _ = partial_result((2, 3, 37, 80), HALF)
    summed = merge._launch(x, y, dtype)[0]
    torch.testing.assert_close(summed, merge.add_reference(x, y, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("num_elements", [1, 4095, 4096, 10_000])
def test_add_to_float32(num_elements: int) -> None:
    total = torch.randn(num_elements, device=DEVICE)
    grad = torch.randn(num_elements, device=DEVICE).to(HALF)
    expected = total + grad
    rounding.launch_add(total, grad, 0)
    assert torch.equal(total, expected)


@triton.jit
def random_bits_kernel(bits, seed, num_elements, TILE: tl.constexpr):
    """Return the random bits of elements 0, 1, 2, ..."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    drawn = mixed_bits(seed, index).to(tl.int32, bitcast=True)
    tl.store(bits + index, drawn, index < num_elements)


def random_bits(shape: tuple[int, ...], seed: int) -> Tensor:
    bits = torch.empty(shape, dtype=torch.int32, device=DEVICE)
    random_bits_kernel[(triton.cdiv(bits.numel(), 1024),)](bits, seed, bits.numel(), TILE=1024)
    return bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_add_to_16_bits_equals_the_reference(dtype: torch.dtype) -> None:
    shape = (3, 70, 91)
    total, grad = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    expected = total.clone()
    rounding.add_stochastic_reference(expected, grad, random_bits(shape, 11))
    rounding.launch_add(total, grad, 11)
    assert torch.equal(total, expected)


def rows_of_pages(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the second of two fields of rows, as in gradient pages, and all their bytes."""
    B, K, T, D = shape
    row = RowLayout(((B, K, 24), dtype), ((B, K, D), dtype))
    data = torch.full((T * row.num_bytes,), 0x55, dtype=torch.uint8, device=DEVICE)
    return row.views(data, T)[1], data


SHAPES = [(1, 2, 64, 64), (2, 3, 33, 80), (1, 1, 1, 1), (2, 1, 65, 33)]


@pytest.mark.parametrize("seed", [1, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_stochastic_equals_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
    B, K, T, D = shape
    total, data = rows_of_pages(shape, dtype)
    total.copy_(torch.randn(shape))
    # Updates are [B, T, K, D] in memory, or slices of longer ones.
    for share_dtype in (HALF, torch.float32):
        share = torch.randn(B, T + 3, K, D, device=DEVICE).to(share_dtype).transpose(1, 2)[:, :, 2 : T + 2]
        expected, expected_data = rows_of_pages(shape, dtype)
        expected_data.copy_(data)
        bits = None if dtype == torch.float32 else random_bits(shape, seed)
        rounding.add_stochastic_reference(expected, share, bits)
        rounding.launch_add_stochastic(total, share, seed)
        assert torch.equal(data, expected_data), "the other bytes of the rows are left alone"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_add_stochastic_keeps_infinities_and_nan() -> None:
    inf, nan = float("inf"), float("nan")
    total = torch.tensor([inf, -inf, 1.0, 1.0, nan, inf], device=DEVICE).to(HALF).view(1, 1, 2, 3)
    share = torch.tensor([1.0, 1.0, -inf, nan, 1.0, -inf], device=DEVICE)
    share.view(torch.int32)[3] = 2**31 - 1  # a GPU's usual NaN: all ones, so that random bits would carry into the sign
    rounding.launch_add_stochastic(total, share.view(1, 1, 2, 3), 3)
    total = total.flatten()
    assert total[:3].tolist() == [inf, -inf, -inf] and total[3:].isnan().all()


@pytest.mark.skipif(not ON_GPU, reason="a thousand launches are too many for the interpreter")
def test_small_updates_survive_in_the_kernel() -> None:
    """Different seeds draw independent bits, so updates that round-to-nearest loses survive on average."""
    total = torch.ones(1, 2, 16, 32, device=DEVICE, dtype=torch.bfloat16)
    share = torch.full((1, 2, 16, 32), 2**-12, device=DEVICE)
    for seed in range(1024):
        rounding.add_stochastic_(total, share, seed)
    assert abs((total.double().mean().item() - 1) / (1024 * 2**-12) - 1) < 0.03
