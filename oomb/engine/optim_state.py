"""Keep AdamW states in host memory and lay them out in staging buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomb.memory.host import HostSlab
from oomb.memory.rows import row_bytes
from oomb.ops.moments import MOMENTS, decode, encode_, part, scale_of

BLOCK_SIZE = 2**22
"""Maximum number of elements in a block; a multiple of 256. Copying 32 MiB of float32 moments takes 0.7 ms on the link
of an H200, longer than Python needs to launch a block. Buffers and temporaries together stay below 256 MiB of GPU
memory."""
MASTER = "master"
"""The state that holds the float32 copy of a 16-bit parameter."""


def flat(x: Tensor, parameter: Tensor) -> Tensor:
    """Return x, which has the parameter's shape, flattened in the memory order of the parameter."""
    return x.permute(memory_order(parameter)).reshape(-1)


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions by stride, the largest first."""
    order = sorted(range(x.dim()), key=lambda d: (x.shape[d] == 1, -x.stride()[d]))
    if not x.permute(order).is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(x.shape)} has gaps or overlaps in memory (strides {x.stride()}): make it "
            "contiguous"
        )
    return order


def block_bounds(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks of at most BLOCK_SIZE elements, from element `first` on."""
    for start in range(first, end, BLOCK_SIZE):
        yield start, min(start + BLOCK_SIZE, end)


class HostState:
    """The states of one parameter in host memory. Each has a slab of its own, so it can be saved as it is."""

    def __init__(self, parameter: Tensor, fields: dict[str, tuple[torch.dtype, int]]) -> None:
        self.device, self.order = parameter.device, memory_order(parameter)
        self.is_blank = True
        self.slabs: list[HostSlab] = []
        self.rows: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        """The rows in the parameter's shape, as users see them."""
        shape = [parameter.shape[d] for d in self.order]
        back = [self.order.index(d) for d in range(parameter.dim())]
        for name, (dtype, count) in fields.items():
            slab = HostSlab(count * dtype.itemsize, parameter.device)
            self.slabs.append(slab)
            row = self.rows[name] = slab.bytes[: count * dtype.itemsize].view(dtype)
            self.state[name] = row if name.endswith("_scale") else row.view(shape).permute(back)

    def fits(self, parameter: Tensor) -> bool:
        """Return whether the parameter still has the device and the memory order that the states were made for."""
        return self.device == parameter.device and self.order == memory_order(parameter)

    def fill(self, parameter: Tensor, state: dict[str, Any], seed: int) -> None:
        """Copy a state from elsewhere, converted if its format differs, zero if there is none."""
        generator = torch.Generator().manual_seed(seed)
        was_blank, self.is_blank = self.is_blank, False
        given: dict[str, Tensor] = {}
        for name in {*MOMENTS, MASTER} & state.keys():
            x, scales = state[name], state.get(scale_of(name))
            if scales is not None and memory_order(x) != self.order:
                # Its scales cover other elements.
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
    """Where the states of a block go in a staging buffer. Every kind of state has room for the largest block."""

    def __init__(self, blocks: list[dict[str, Tensor]]) -> None:
        self.offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name in sorted({name for block in blocks for name in block}):
            self.offsets[name] = self.num_bytes
            self.num_bytes += row_bytes(max(block[name].nbytes for block in blocks if name in block))

    def placed(self, block: dict[str, Tensor]) -> tuple[tuple[int, Tensor], ...]:
        """Return (offset, bytes on the host) of each state."""
        return tuple((self.offsets[name], host.view(torch.uint8)) for name, host in block.items())

    def views(self, buffer: Tensor, block: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the states of a block in a staging buffer."""
        return {
            name: buffer[self.offsets[name] : self.offsets[name] + host.nbytes].view(host.dtype)
            for name, host in block.items()
        }


@dataclass(frozen=True)
class _Opaque:
    """A wrapper that hides a state from torch's casts."""

    state: dict[str, Any]
