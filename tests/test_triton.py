"""Triton kernels against their references: on a GPU where there is one, else in Triton's interpreter.

The interpreter's bfloat16 is not to be trusted, so float16 stands for the half precisions there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from oomb import grads
from oomb.attention import combine

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def partial_result(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output of one run of keys, laid out as models do ([B, T, H, D] in memory), and its lse."""
    B, H, T, D = shape
    out = torch.randn(B, T, H, D, device=DEVICE).to(dtype).transpose(1, 2)
    return out, torch.randn(B, H, T, device=DEVICE) * 5


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 32, 64), (2, 3, 37, 80), (1, 1, 1, 128), (2, 7, 65, 256)], ids=str)
def test_merge(shape: tuple[int, int, int, int], wide_first: bool, dtype: torch.dtype, poisoned_empty: None) -> None:
    out, lse = partial_result(shape, torch.float32 if wide_first else HALF)
    out2, lse2 = partial_result(shape, HALF)
    merged, merged_lse = combine._launch(out, out2, dtype, lse, lse2)
    expected, expected_lse = combine.merge_reference(out, lse, out2, lse2, dtype)
    assert merged.dtype == dtype and merged_lse.dtype == torch.float32
    torch.testing.assert_close(merged, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_merge_of_far_apart_lses() -> None:
    """A run that carries no weight must not turn the result into NaN."""
    out, lse = partial_result((1, 2, 5, 64), HALF)
    out2, lse2 = partial_result((1, 2, 5, 64), HALF)
    merged, merged_lse = combine._launch(out, out2, torch.float32, lse - 1000, lse2 + 1000)
    torch.testing.assert_close(merged, out2.float())
    torch.testing.assert_close(merged_lse, lse2 + 1000)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
def test_sum_of_shares(dtype: torch.dtype, poisoned_empty: None) -> None:
    x, _ = partial_result((2, 3, 37, 80), torch.float32)
    y, _ = partial_result((2, 3, 37, 80), HALF)
    summed = combine._launch(x, y, dtype)[0]
    torch.testing.assert_close(summed, combine.add_reference(x, y, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("num_elements", [1, 4095, 4096, 10_000])
def test_add_to_float32(num_elements: int) -> None:
    total = torch.randn(num_elements, device=DEVICE)
    grad = torch.randn(num_elements, device=DEVICE).to(HALF)
    expected = total + grad
    grads.launch_add(total, grad)
    assert torch.equal(total, expected)
