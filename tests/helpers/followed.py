"""Emulate a GPU's page kernels and copy engines in plain PyTorch, by address, with the arguments of the kernels.

`streams.Watch` sees which bytes they touch, `streams.LateCopies` can delay them, and the results equal those of the
plain path bit for bit. `memory_for` tells how much GPU memory holds a given number of pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import engine_for
from streams import Clocks
from torch import Tensor

from oomb.attention import sparse, sparse_reference
from oomb.memory import batch_copy, selected
from oomb.memory.pool import GPU, HOST
from oomb.memory.selected import PageView, SelectedPages
from oomb.memory.tiers import Tiers
from oomb.ops.int8 import SCALE_DTYPE, dequantize, quantize
from oomb.ops.triton_kernels import page_copy


def follow(patch: pytest.MonkeyPatch) -> None:
    """Make engines use the emulated kernels from here on."""
    memory = Memory()
    init = SelectedPages.__init__

    def init_and_track(self: SelectedPages, *args: Any) -> None:
        init(self, *args)
        memory.tiers = tiers = self.pages.tiers
        if isinstance(tiers.streams, Clocks):
            for tables in (self.selections.page_means, self.selections.touched, self.selections.tables):
                for table in tables.values():
                    tiers.streams.track(table)

    patch.setattr(selected, "has_kernels", lambda device: True)
    patch.setattr(SelectedPages, "__init__", init_and_track)
    patch.setattr(sparse, "_uses_kernels", lambda q, spec: spec.softcap is None)
    for name in ("launch_forward", "launch_dq", "launch_dkv"):
        patch.setattr(sparse, name, getattr(memory, name))
    patch.setattr(batch_copy, "is_available", lambda device: True)
    patch.setattr(batch_copy, "copy_all", memory.copy_all)
    for name in ("mark_pages", "assign_slots", "copy_pages", "dequantize_pages"):
        patch.setattr(page_copy, name, Kernel(getattr(memory, name)))


class Kernel:
    """A function called like a Triton kernel: kernel[grid](...)."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run


class Memory:
    """Slabs and buffers by address, and the emulated kernels."""

    tiers: Tiers

    def at(self, address: int, num_bytes: int) -> Tensor:
        slabs = [slab for arena in self.tiers.arenas.values() for _, slab, _ in arena.slabs]
        buffers = [slot.bytes for ring in self.tiers.rings.values() for slot in ring.slots]
        for memory in (*slabs, *buffers):
            first = address - memory.data_ptr()
            if first >= 0 and first + num_bytes <= memory.nbytes:
                return memory[first : first + num_bytes]
        raise AssertionError(f"no slab or buffer at address {address}")

    def page(self, pages: PageView, number: int) -> Tensor:
        size, dtype = pages.page_size * pages.row_size, pages.base.dtype
        address = pages.base.data_ptr() + int(pages.offsets_P[number]) * dtype.itemsize
        return self.at(address, size * dtype.itemsize).view(dtype)

    def gather(self, pages: PageView, selected_BNC: Tensor) -> tuple[PageView, list[int]]:
        """Return the selected pages side by side, and their numbers."""
        numbers = selected_BNC.unique().tolist()
        base = torch.stack([self.page(pages, number) for number in numbers])
        offsets = torch.zeros_like(pages.offsets_P)
        offsets[numbers] = torch.arange(len(numbers)) * base.shape[1]
        return dataclasses.replace(pages, base=base.flatten(), offsets_P=offsets), numbers

    def launch_forward(self, q: Tensor, pages: PageView, selected_BNC: Tensor, *own: Tensor, **settings: Any) -> Any:
        return sparse_reference.forward(q, self.gather(pages, selected_BNC)[0], selected_BNC, *own, **settings)

    def launch_dq(
        self, dout: Tensor, q: Tensor, pages: PageView, selected_BNC: Tensor, *rest: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of K and V instead of delta, which only `launch_dkv` reads."""
        return sparse_reference.backward(dout, q, self.gather(pages, selected_BNC)[0], selected_BNC, *rest, **settings)

    def launch_dkv(
        self, dout: Tensor, q: Tensor, pages: Any, selected_BNC: Tensor, lse: Tensor, drows: Tensor, grads: PageView,
        **settings: Any,
    ) -> None:  # fmt: skip
        near, numbers = self.gather(grads, selected_BNC)
        sparse_reference.add_grads(near, drows, selected_BNC, grads.touched_BP, grads.seed)
        for number, page in zip(numbers, near.base.chunk(len(numbers)), strict=True):
            self.page(grads, number).copy_(page)

    def copy_all(self, targets: Tensor, sources: Tensor, num_bytes: int, stream: int) -> None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self.at(target, num_bytes).copy_(self.at(source, num_bytes))

    def mark_pages(self, places: Tensor, chosen: Tensor, num_chosen: int, edge: int, **_: Any) -> None:
        page = chosen.flatten()[:num_chosen].long()
        places[page[page >= edge]] = -1

    def assign_slots(
        self, places: Tensor, which: Tensor, count: Tensor, moved: Tensor, touched: Tensor, buffer: int,
        place_bytes: int, page_bytes: int, edge: int, num_pages: int, num_rows: int, *_: int, **__: Any,
    ) -> None:  # fmt: skip
        pages = (places == -1).nonzero().flatten()
        places[pages] = buffer + torch.arange(len(pages)) * place_bytes
        which[: len(pages)] = pages.int()
        count[0] = len(pages)
        away = pages[pages >= edge]
        moved[0] += page_bytes * (int(touched[:, away].any(0).sum()) if num_rows else len(away))

    def copy_pages(
        self, which: Tensor, count: Tensor, addresses: Tensor, buffer: Tensor, touched: Tensor, page_words: int,
        num_rows: int, *_: int, OUT: bool, **__: Any,
    ) -> None:  # fmt: skip
        for index, page in enumerate(which[: int(count[0])].tolist()):
            if not num_rows or touched[:, page].any():
                away = self.at(int(addresses[page]), 4 * page_words).view(torch.int32)
                here = buffer[index * page_words : (index + 1) * page_words]
                (away if OUT else here).copy_(here if OUT else away)

    def dequantize_pages(
        self, which: Tensor, count: Tensor, addresses: Tensor, buffer: Tensor, touched: Tensor, seed: int, size: int,
        num_heads: int, k_size: int, v_size: int, row_bytes: int, value_at: int, scale_at: int, wide_row: int,
        wide_value_at: int, num_rows: int, flags_b: int, edge: int, *, OUT: bool, **__: Any,
    ) -> None:  # fmt: skip
        for index, page in enumerate(which[: int(count[0])].tolist()):
            if num_rows and not touched[:, page].any():
                continue
            place = buffer[index * size * wide_row : (index + 1) * size * wide_row]
            wide = place.view(size, wide_row)
            at_rest = self.at(int(addresses[page]), size * row_bytes)
            if page >= edge:
                whole = place.view(torch.uint8)
                at_rest = whole[: size * row_bytes] if OUT else whole[-size * row_bytes :].clone()
                wide = wide.clone() if OUT else wide
            rest = at_rest.view(size, row_bytes)
            scales = rest[:, scale_at : scale_at + 4 * num_heads].view(SCALE_DTYPE).view(size, num_heads, 2)
            for part, (at, wide_at, width) in enumerate(((0, 0, k_size), (value_at, wide_value_at, v_size))):
                numbers = rest[:, at : at + num_heads * width].view(torch.int8).view(size, num_heads, width)
                here = wide[:, wide_at : wide_at + num_heads * width].view(size, num_heads, width)
                if OUT:
                    steps, scale = quantize(here, (seed + 2 * page + part) % 2**31)
                    numbers.copy_(steps)
                    scales[..., part] = scale
                else:
                    here.copy_(dequantize(numbers, scales[..., part], buffer.dtype))


def memory_for(model: Any, length: int, kv_pages: int | None, grad_pages: int | None = 0, **config: Any) -> int:
    """Return the `gpu_memory` for this many pages on the GPU (None: all). Gradients come after all of K and V."""
    config = {**config, "gpu_memory": 0, "keep_attention": False}
    placement = engine_for(model, **config).reserve(1, length)
    num_pages = placement.capacity // config["page_size"]
    sizes = {(term.name, term.tier): term.num_bytes for term in placement.terms}
    assert kv_pages is None or (kv_pages < num_pages and not grad_pages)
    kinds = (("pages of K and V", kv_pages), ("pages of their gradients", grad_pages))
    pages = sum(sizes[name, HOST] * (num_pages if count is None else count) // num_pages for name, count in kinds)
    return sizes["page summaries and choices", GPU] + pages
