"""Run collectives over the ranks of one mesh dimension. A wait ends early if another rank has failed."""

from __future__ import annotations

import pickle
import time
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oomb.distributed import watch
from oomb.distributed.topology import TopologyError

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5e-5, 5e-3
"""Polling interval of a collective. It doubles from the first to the longest."""


class Group:
    """The ranks along one dimension of a mesh. With one rank every collective returns at once.

    All ranks must call the same collectives in the same order.

    Args:
        process_group: PyTorch's group of these ranks; None for a single rank.

    Attributes:
        rank: position of this process in the group.
        size: number of ranks.
        sent_bytes: bytes this rank has sent so far, if collectives use a ring.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.sent_bytes = 0

    def sum_(self, x: Tensor) -> Tensor:
        """Replace a tensor by its sum over all ranks, in place, and return it."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max_(self, x: Tensor) -> Tensor:
        """Replace a tensor by its maximum over all ranks, in place, and return it."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def start_sum_(self, x: Tensor) -> dist.Work | None:
        """Start `sum_`. Pass the result to `finish` before reading the tensor."""
        if self.size == 1:
            return None
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        return dist.all_reduce(x, group=self._group, async_op=True)

    def finish(self, work: dist.Work | None) -> None:
        """Wait for a collective.

        Raises:
            RankFailed: Another rank failed, so the collective will never end.
        """
        if work is None:
            return
        try:
            pause = FIRST_PAUSE_S
            while not work.is_completed():
                watch.check()
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            work.wait()
        except RuntimeError as error:
            # The connection to a rank that failed is closed before its message is read.
            watch.check(at_once=True, cause=error)
            raise

    def broadcast_(self, x: Tensor, source: int = 0) -> Tensor:
        """Replace a tensor by that of one rank, in place, and return it."""
        if self.size > 1:
            assert self._group is not None
            self.sent_bytes += x.nbytes
            at = dist.get_global_rank(self._group, source)
            self.finish(dist.broadcast(x, src=at, group=self._group, async_op=True))
        return x

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order. A value is any object that can be pickled."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        lengths = self.gather_tensor(torch.tensor([len(data)], device=self._device))
        longest = max(int(length) for length in lengths)
        parts = self.gather_tensor(torch.nn.functional.pad(data, (0, longest - len(data))))
        return [
            pickle.loads(part[: int(length)].cpu().numpy().tobytes())
            for part, length in zip(parts, lengths, strict=True)
        ]

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send part r of a contiguous tensor [ranks, ...] to rank r, and return the parts that all ranks sent here."""
        received = torch.empty_like(x)
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size
        self._wait(dist.all_to_all_single(received, x, group=self._group, async_op=True), x)
        return received

    def gather_tensor(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.sent_bytes += x.nbytes * (self.size - 1)
        self._wait(dist.all_gather(parts, x, group=self._group, async_op=True), x)
        return parts

    def _wait(self, work: dist.Work, x: Tensor) -> None:
        """Wait for a collective in the middle of a pass: on a GPU only the stream waits, so kernels stay queued."""
        if x.is_cuda:
            work.wait()
        else:
            self.finish(work)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.max_(torch.tensor(int(flag), device=self._device))) if self.size > 1 else flag

    def min(self, number: int) -> int:
        """Return the smallest of a number over all ranks."""
        return -int(self.max_(torch.tensor(-number, device=self._device))) if self.size > 1 else number

    def sum(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        return int(self.sum_(torch.tensor(number, device=self._device))) if self.size > 1 else number

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.size > 1:
            self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
            self._wait(dist.all_reduce(x, op=op, group=self._group, async_op=True), x)
        return x

    @property
    def _device(self) -> torch.device:
        """Device of small messages: the CPU, unless the group's backend supports only GPU tensors."""
        backend = dist.get_backend(self._group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def require_same(group: Group, what: str, own: dict[str, Any]) -> None:
    """Raise `TopologyError` on all ranks if their values differ.

    Args:
        group: The ranks.
        what: What the values are called.
        own: This rank's values by name.
    """
    everywhere = group.gather(own)
    for rank, found in enumerate(everywhere):
        for name in sorted({*found, *everywhere[0]}):
            here, first = found.get(name, "absent"), everywhere[0].get(name, "absent")
            if here != first:
                raise TopologyError(f"{what} {name} is {here} on rank {rank} but {first} on rank 0: make them the same")
