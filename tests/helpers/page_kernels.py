"""Run engines on a CPU as if kernels moved their pages."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from oomb.attention import sparse
from oomb.memory import batch_copy
from oomb.memory import selected as chosen_module
from oomb.memory.selected import SelectedPages
from oomb.planner import placement

ON_GPU = torch.cuda.is_available()


def go_the_way_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """If need be in the interpreter."""
    patch.setattr(placement, "TILE_SIZE", 16)
    if ON_GPU:
        return
    init = SelectedPages.__init__

    def with_triton(self: SelectedPages, *args: Any) -> None:
        init(self, *args)
        self.uses_kernels = True
        self.reads_in_place = dict.fromkeys(self.layers, True)

    patch.setattr(chosen_module.SelectedPages, "__init__", with_triton)
    patch.setattr(sparse, "_runs_kernels", lambda q, spec: True)
    patch.setattr(batch_copy, "is_available", lambda device: True)
    patch.setattr(batch_copy, "copy_all", copy_all)


def copy_all(targets: Tensor, sources: Tensor, num_bytes: int, stream: int) -> None:
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, num_bytes)
