"""Arrange ranks in a mesh, and start the processes that `torchrun` launched."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oomb.distributed import watch
from oomb.distributed.collectives import Group
from oomb.distributed.topology import Topology, TopologyError

DIMS = ("dp", "sp")
"""Mesh dimensions the engine knows, from the outside in. Along dp, ranks train on different sequences; along sp, they
share sequences, each with a part of the tokens and heads. All hold the same weights."""
TIMEOUT = timedelta(hours=2)
"""Time limit for one collective. Failures end a run earlier, through `oomb.distributed.watch`."""
JOIN_S = 300.0
"""How long ranks wait for each other at the start."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "oomb")
"""Packages whose version must be the same on all ranks."""


def world_size() -> int:
    """Return how many processes `torchrun`, or another launcher that sets its variables, has started."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def ranks_per_host() -> int:
    """Return how many processes share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world_size() > 1 else 1


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same on all ranks."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def init_mesh(device_type: str | None = None, *, sp: int = 1) -> DeviceMesh:
    """Join the processes that `torchrun` started, and return a mesh with the dimensions dp and sp.

    On GPUs each process uses the one with its local rank. A process that fails afterwards ends all others with its
    message. Without a launcher the mesh has one rank, so the same script runs with `python`.

    Args:
        device_type: "cuda" or "cpu". Defaults to "cuda" if there is a GPU.
        sp: number of neighboring ranks that share each sequence. The others train on different ones.

    Raises:
        TopologyError: `sp` does not divide the number of ranks, a rank did not arrive, or there is no GPU for it. It is
            a ValueError.

    Examples:
        >>> import oomb, torch
        >>> mesh = oomb.init_mesh("cpu")
        >>> mesh.size()
        1
        >>> torch.distributed.destroy_process_group()
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        if device_type == "cuda":
            _use_own_gpu()
        rank, size = int(os.environ.get("RANK", 0)), world_size()
        limit_s = float(os.environ.get("OOMB_JOIN_S", JOIN_S))
        store = dist.HashStore() if size == 1 else meet(_store(rank, size, limit_s), rank, size, limit_s)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    watch.start()
    shape = Topology(sp=sp).num_replicas(dist.get_world_size()), sp
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMS)


def meet(store: dist.Store, rank: int, size: int, limit_s: float) -> dist.Store:
    """Wait until all ranks have reached a store, and return a part of it that earlier processes have not written to.

    torchrun keeps its store when it restarts failed processes, with what they wrote. So every process publishes a
    unique id, rank 0 collects the ids under a session name, and the session is valid once all ranks have confirmed it.

    Args:
        store: Store of the launcher.
        rank: This rank.
        size: Number of ranks.
        limit_s: How long to wait.

    Raises:
        TopologyError: Some have not arrived in time. The message names them.
    """
    own, session = uuid.uuid4().hex, ""
    store.set(f"oomb/hello/{rank}", own)
    give_up_at = time.monotonic() + limit_s
    while True:
        if rank == 0:
            hellos = _present(store, "oomb/hello", size)
            if len(hellos) == size and not session.endswith(tag := _checksum(hellos.values())):
                session = f"{uuid.uuid4().hex}-{tag}"
                store.set("oomb/session", json.dumps([session, hellos]))
        elif store.check(["oomb/session"]):
            proposed, hellos = json.loads(store.get("oomb/session"))
            session = proposed if hellos[str(rank)] == own else ""
        if session:
            store.set(f"{session}/{rank}", "confirmed")
        confirmed = _present(store, session, size) if session else {}
        if len(confirmed) == size:
            return dist.PrefixStore(session, store)
        if time.monotonic() > give_up_at:
            known = confirmed or _present(store, "oomb/hello", size)
            missing = [other for other in range(size) if str(other) not in known] or [0]
            names = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
            raise TopologyError(
                f"{'ranks' if len(missing) > 1 else 'rank'} {names} of {size} did not arrive within {limit_s:.0f} s: "
                "did each machine start its processes, with the same --nnodes and --nproc-per-node? OOMB_JOIN_S sets "
                "how long to wait"
            )
        time.sleep(0.05)


def _checksum(texts: Iterable[str]) -> str:
    return f"{crc32(' '.join(texts).encode()):08x}"


def _present(store: dist.Store, prefix: str, size: int) -> dict[str, str]:
    """Return the values of all ranks that have set one."""
    keys = {str(rank): f"{prefix}/{rank}" for rank in range(size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def _store(rank: int, size: int, limit_s: float) -> dist.Store:
    """Return the store that the launcher's variables name."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=limit_s)
    try:
        return dist.TCPStore(host, port, size, is_master, timeout=limit, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        raise TopologyError(
            f"rank {rank} did not reach {host}:{port} within {limit_s:.0f} s: is rank 0 running there, and is the port "
            "open?"
        ) from error


def _use_own_gpu() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise TopologyError(
            f"process {local_rank} of this machine has no GPU. Start at most {torch.cuda.device_count()} with "
            "--nproc-per-node, the number of GPUs here"
        )
    torch.cuda.set_device(local_rank)


@dataclass(frozen=True)
class Ranks:
    """The groups of ranks that an engine works with."""

    all: Group
    dp: Group
    """Ranks that train on different sequences."""
    sp: Group
    """Ranks that share a sequence."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Ranks:
        """Return the groups of a mesh; None stands for this process alone.

        Raises:
            TopologyError: The mesh has dimensions that the engine does not know, or not all ranks.
        """
        if mesh is None or mesh.size() == 1:
            return cls(Group(), Group(), Group())
        names = mesh.mesh_dim_names or ()
        if not names:
            raise TopologyError('the mesh has no names: pass mesh_dim_names=("dp",) to init_device_mesh')
        if unknown := [name for name in names if name not in DIMS]:
            known = " and ".join(DIMS)
            raise TopologyError(f"the mesh has the dimension {unknown[0]!r}, but the engine only knows {known}")
        if mesh.size() != dist.get_world_size():
            raise TopologyError(
                f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks: pass a mesh of all ranks"
            )
        groups = {
            name: Group(mesh.get_group(name)) if name in names and mesh[name].size() > 1 else Group() for name in DIMS
        }
        return cls(Group(dist.group.WORLD), **groups)
