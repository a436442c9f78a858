"""Run `oomb train` on the processes that torchrun started: rank 0 writes and displays, the others only train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from oomb.cli.train.settings import AUTO, TrainSettings
from oomb.config import SettingError
from oomb.distributed import watch
from oomb.distributed.collectives import Group, require_same
from oomb.distributed.mesh import init_mesh, versions, world_size
from oomb.distributed.topology import Topology, TopologyError
from oomb.utils.lock import locked

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Variable of torchrun: how often it has started this run again after a failure."""


def is_first() -> bool:
    """Return whether this process writes and displays."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_restarted() -> bool:
    """Return whether torchrun has started this run again, because a rank failed."""
    return int(os.environ.get(RESTARTS, 0)) > 0


def check_parallel(parallel: str) -> None:
    """Raise `SettingError` if `--parallel` is wrong or does not match the number of processes."""
    try:
        topology = Topology.parse(parallel)
    except TopologyError as error:
        raise SettingError("parallel", str(error)) from error
    try:
        topology.num_replicas(world_size())
    except TopologyError as error:
        advice = "start as many with torchrun --nproc-per-node, or leave out --parallel to train data parallel on those"
        raise SettingError("parallel", f"{error}: {advice}") from error


@contextmanager
def joined(settings: TrainSettings, device: torch.device) -> Iterator[TrainSettings]:
    """Join the other ranks for the duration of a `with`, and yield the settings of this start of the run.

    Raises:
        TopologyError: A rank is missing, or has other settings or packages.
    """
    if is_restarted() and settings.resume_from_checkpoint is None:
        # A rank failed, and torchrun started all of them again with the same command.
        settings = replace(settings, resume_from_checkpoint=AUTO, overwrite_output_dir=False)
    if world_size() == 1:
        yield settings
        return
    init_mesh(device.type, sp=settings.topology.sp)
    with watch.ending_together():
        group = Group(dist.group.WORLD)
        require_same(group, "package", versions())
        require_same(group, "setting", {**asdict(settings), "device": device.type})
        yield settings


def own_console(console: Console) -> Console:
    """Return a console that prints on rank 0 only."""
    return console if is_first() else Console(file=open(os.devnull, "w"))


def locked_by_first(output_dir: Path) -> AbstractContextManager[None]:
    """Lock the folder of the run, on rank 0."""
    return locked(output_dir) if is_first() else nullcontext()


def part() -> None:
    """Leave the other ranks at the end of a run. Rank 0 may still be saving, and a launcher would stop it."""
    if (known := watch.current()) is not None:
        if known.rank > 0:
            known.settle()
        known.finish()
