"""Run engines on a CPU as if kernels moved their pages."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from oomb.attention import sparse
from oomb.memory import batch_copy, selected
from oomb.planner import placement

ON_GPU = torch.cuda.is_available()


def go_the_way_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Make engines use the page kernels, in the interpreter if there is no GPU."""
    patch.setattr(placement, "TILE_SIZE", 16)
    if ON_GPU:
        return
    patch.setattr(selected, "has_kernels", lambda device: True)
    patch.setattr(sparse, "_uses_kernels", lambda q, spec: True)
    patch.setattr(batch_copy, "is_available", lambda device: True)
    patch.setattr(batch_copy, "copy_all", copy_all)


def copy_all(targets: Tensor, sources: Tensor, num_bytes: int, stream: int) -> None:
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, num_bytes)
