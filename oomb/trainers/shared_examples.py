"""Give ranks that share examples the same batches, and count each example once."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def share_examples(accelerator: Accelerator, size: int) -> None:
    """Let an accelerator give each `size` neighboring ranks the same batches.

    Its data loaders and metrics know such ranks from tensor parallelism, which is how they are told here.

    Args:
        accelerator: Accelerator of a trainer.
        size: Ranks that share examples.
    """
    shape, names = (dist.get_world_size() // size, size), ("dp_replicate", "tp")
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
    accelerator._prepare_device_mesh = lambda: mesh
    gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def gather_once(tensors: Any) -> Any:
        return _of_first_ranks(gather(tensors), size)

    def gather_metrics_once(data: Any, use_gather_object: bool = False) -> Any:
        # It also cuts off what the last batch was filled up with, counted in examples.
        accelerator.gather = gather_once
        try:
            return gather_for_metrics(data, use_gather_object)
        finally:
            accelerator.gather = gather

    accelerator.gather_for_metrics = gather_metrics_once


def _of_first_ranks(gathered: Any, size: int) -> Any:
    """Return what the first rank of each group gave, from tensors of all ranks in one."""
    if isinstance(gathered, Tensor):
        by_rank = gathered.unflatten(0, (dist.get_world_size(), -1))
        return by_rank[::size].flatten(0, 1)
    if isinstance(gathered, dict):
        return {name: _of_first_ranks(value, size) for name, value in gathered.items()}
    return type(gathered)(_of_first_ranks(value, size) for value in gathered)
