"""Check batch copies: the arguments of the driver call, and on a GPU that the bytes arrive."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from oomb.memory import batch_copy
from oomb.memory.host import HostSlab


def numbers(pointer: ctypes.c_void_p, count: int) -> list[int]:
    assert pointer.value is not None
    return list((ctypes.c_size_t * count).from_address(pointer.value))


@pytest.mark.parametrize("reports_failed", [False, True])
@pytest.mark.parametrize("code", [0, 1])
def test_driver_arguments(reports_failed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def function(targets: Any, sources: Any, sizes: Any, count: Any, *rest: Any) -> int:
        calls.append((numbers(targets, 2), numbers(sources, 2), numbers(sizes, 2), count.value, rest))
        return code

    monkeypatch.setattr(batch_copy, "_function", lambda: (function, reports_failed))
    targets, sources = torch.tensor([1 << 40, 7]), torch.tensor([16, 1 << 41])
    if code:
        with pytest.raises(RuntimeError, match="error 1"):
            batch_copy.copy_all(targets, sources, 96, 5)
    else:
        batch_copy.copy_all(targets, sources, 96, 5)
    [(*passed, rest)] = calls
    assert passed == [targets.tolist(), sources.tolist(), [96, 96], 2]
    assert (rest[2].value, rest[-1].value, len(rest)) == (1, 5, 5 if reports_failed else 4)
    batch_copy.copy_all(targets[:0], sources[:0], 96, 5)
    assert len(calls) == 1, "no call if there is nothing to copy"


def test_attributes_have_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(batch_copy.Attributes) == 24 and batch_copy.Attributes.flags.offset == 20


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert batch_copy._function.__wrapped__() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert batch_copy._function.__wrapped__() is None, "a driver from before CUDA 12.8"


@pytest.mark.gpu
def test_bytes_arrive() -> None:
    assert batch_copy.is_available(torch.device("cuda")) and not batch_copy.is_available(torch.device("cpu"))
    device, size, count = torch.device("cuda"), 1040 * 16, 300
    slab = HostSlab(count * size, device)
    slab.bytes.random_(0, 256)
    pages, order = slab.bytes.view(count, size), torch.randperm(count)[:200]
    here = torch.zeros(200, size, dtype=torch.uint8, device=device)
    places = here.data_ptr() + torch.arange(200) * size
    rests = pages.data_ptr() + order * size
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    batch_copy.copy_all(places, rests, size, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(here.cpu(), pages[order])
    before = pages.clone()
    # Stream order: the sources are changed before they are copied.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        here.bitwise_not_()
    batch_copy.copy_all(rests, places, size, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(pages[order], ~before[order])
    others = torch.ones(count, dtype=torch.bool)
    others[order] = False
    assert torch.equal(pages[others], before[others])
