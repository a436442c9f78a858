"""Tell whether Triton kernels can run, and size their tiles."""

from __future__ import annotations

from importlib.util import find_spec
from math import e, log2

from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
LOG2_E = log2(e)
"""Kernels compute softmax in base 2, which is one instruction on a GPU: exp(x) = 2 ** (x * LOG2_E)."""


def can_launch(*tensors: Tensor) -> bool:
    """Return whether Triton kernels can take these tensors: they are on a GPU and none is float64."""
    return HAS_TRITON and all(x.is_cuda and x.dtype.itemsize < 8 for x in tensors)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def matrix_tile(size: int) -> int:
    """Return the smallest tile side for `size` that tensor cores take: a power of two, at least 16."""
    return max(16, power_of_two(size))
