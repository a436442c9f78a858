"""AdamW states in host memory and in staging buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomb.memory.host import HostSlab
from oomb.memory.rows import row_bytes
from oomb.ops.moments import MOMENTS, decode, encode_, part, scale_of

PIECE_SIZE = 2**22
"""Most numbers in a piece; a multiple of 256. 32 MiB of float32 moments take 0.7 ms on the link of an H200, and Python
less than that to launch a piece. Buffers and temporaries together stay below 256 MiB of GPU memory."""


MASTER = "master"


def flat(x: Tensor, parameter: Tensor) -> Tensor:
    """x, of the parameter's shape, as one row of numbers in the order in which the parameter lies in memory."""
    return x.permute(memory_order(parameter)).reshape(-1)


def memory_order(x: Tensor) -> list[int]:
    """The dimensions, the one with the largest strides first."""
    order = sorted(range(x.dim()), key=lambda d: (x.shape[d] == 1, -x.stride()[d]))
    if not x.permute(order).is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(x.shape)} has gaps or overlaps in memory (strides {x.stride()}): make it "
            "contiguous"
        )
    return order


def block_bounds(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks of at most PIECE_SIZE numbers, from number `first` on."""
    for start in range(first, end, PIECE_SIZE):
        yield start, min(start + PIECE_SIZE, end)


class HostState:
    """The states of one parameter in host memory, each field in a slab of its own: so it can be saved as it is."""

    def __init__(self, parameter: Tensor, fields: dict[str, tuple[torch.dtype, int]]) -> None:
        self.device, self.order = parameter.device, memory_order(parameter)
        self.is_blank = True
        self.slabs: list[HostSlab] = []
        self.rows: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        """The same in the parameter's shape, as users see it."""
        shape = [parameter.shape[d] for d in self.order]
        back = [self.order.index(d) for d in range(parameter.dim())]
        for name, (dtype, count) in fields.items():
            slab = HostSlab(count * dtype.itemsize, parameter.device)
            self.slabs.append(slab)
            row = self.rows[name] = slab.bytes[: count * dtype.itemsize].view(dtype)
            self.state[name] = row if name.endswith("_scale") else row.view(shape).permute(back)

    def suits(self, parameter: Tensor) -> bool:
        return self.device == parameter.device and self.order == memory_order(parameter)

    def fill(self, parameter: Tensor, state: dict[str, Any], seed: int) -> None:
        """With a state from elsewhere: as it is if it has the same form, converted if not, zero if there is none."""
        generator = torch.Generator().manual_seed(seed)
        was_blank, self.is_blank = self.is_blank, False
        given: dict[str, Tensor] = {}
        for name in {*MOMENTS, MASTER} & state.keys():
            x, scales = state[name], state.get(scale_of(name))
            if scales is not None and memory_order(x) != self.order:
                # Its runs are others.
                row = decode({name: flat(x, x), scale_of(name): scales}, name, torch.float32)
                x, scales = row.as_strided(x.shape, x.stride()), None
            given[name] = flat(x, parameter)
            if scales is not None:
                given[scale_of(name)] = scales
        values = flat(parameter.detach(), parameter)
        for start, end in block_bounds(0, values.numel()):
            own, other = part(self.rows, start, end), part(given, start, end)
            for name in MOMENTS:
                keys = [key for key in (name, scale_of(name)) if key in own]
                if all(key in other and other[key].dtype == own[key].dtype for key in keys):
                    for key in keys:
                        own[key].copy_(other[key])
                elif name in other:
                    on_host = {key: x.cpu() for key, x in other.items()}
                    encode_(own, name, decode(on_host, name, torch.float32), generator)
                elif not was_blank:
                    for key in keys:
                        own[key].zero_()
            if MASTER in own:
                own[MASTER].copy_(other.get(MASTER, values[start:end]))


class Layout:
    """How the states of a piece lie in a staging buffer: each where the largest of its kind leaves room for it."""

    def __init__(self, pieces: list[dict[str, Tensor]]) -> None:
        self.offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name in sorted({name for piece in pieces for name in piece}):
            self.offsets[name] = self.num_bytes
            self.num_bytes += row_bytes(max(piece[name].nbytes for piece in pieces if name in piece))

    def placed(self, piece: dict[str, Tensor]) -> tuple[tuple[int, Tensor], ...]:
        """(offset, bytes on the host) of each state."""
        return tuple((self.offsets[name], host.view(torch.uint8)) for name, host in piece.items())

    def views(self, buffer: Tensor, piece: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: buffer[self.offsets[name] : self.offsets[name] + host.nbytes].view(host.dtype)
            for name, host in piece.items()
        }


@dataclass(frozen=True)
class _Opaque:
    """A state in a wrapping that torch does not look into."""

    state: dict[str, Any]
