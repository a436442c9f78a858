"""The page store on its own: what it holds, how it cuts segments, when it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomb import memory
from oomb.memory import SEGMENT_SIZE, OutOfPages, PageStore, segment_bounds


@given(st.integers(1, 5000), st.integers(0, 300), st.integers(0, 5000))
def test_segments_cover_the_past_once_in_few_sizes(chunk_size: int, num_chunks: int, skipped: int) -> None:
    end = chunk_size * num_chunks
    first = min(skipped, end)
    bounds = list(segment_bounds(first, end, chunk_size))
    covered = first
    for start, stop in bounds:
        assert start == covered < stop
        covered = stop
    assert covered == end
    sizes = [stop - start for start, stop in bounds]
    allowed = {chunk_size * 2**i for i in range(20)}
    ragged = [size for size in sizes if size not in allowed]
    assert len(ragged) <= 1 and all(size < chunk_size for size in ragged)
    assert max(sizes, default=0) <= max(SEGMENT_SIZE, chunk_size)
    largest = chunk_size << max(0, (SEGMENT_SIZE // chunk_size).bit_length() - 1)
    assert len(sizes) <= (end - first) // largest + SEGMENT_SIZE.bit_length()


def filled_store(num_tokens: int = 12, chunk_size: int = 4, **settings: torch.dtype) -> tuple[PageStore, torch.Tensor]:
    store = PageStore(num_tokens, chunk_size=chunk_size, num_layers=1, **settings)  # type: ignore[arg-type]
    k = torch.randn(2, 3, num_tokens, 5, dtype=torch.float64)
    for start in range(0, num_tokens, chunk_size):
        chunk = k[:, :, start : start + chunk_size]
        store.append(0, start, chunk, -chunk)
    return store, k


def test_segments_return_what_was_appended() -> None:
    store, k = filled_store()
    for first in (0, 3, 8):
        segments = list(store.past(0, 8, 12).segments(first))
        torch.testing.assert_close(torch.cat([s[1] for s in segments] or [k[:, :, :0]], 2), k[:, :, first:8])
        torch.testing.assert_close(torch.cat([s[2] for s in segments] or [k[:, :, :0]], 2), -k[:, :, first:8])


def test_gradients_add_up_and_reach_their_chunk() -> None:
    store, k = filled_store()
    ones = torch.ones_like(k)
    store.past(0, 8, 12).add_grad(0, ones[:, :, :8], 2 * ones[:, :, :8])
    store.past(0, 8, 12).add_grad(6, ones[:, :, :2], ones[:, :, :2])
    dk, dv = store.past(0, 4, 8).own_grad() or (None, None)
    assert dk is not None and dv is not None
    assert dk[0, 0, :, 0].tolist() == [1, 1, 2, 2] and dv[0, 0, :, 0].tolist() == [2, 2, 3, 3]
    assert store.past(0, 12, 16).own_grad() is None, "the last chunk has no pages"


def test_pages_rest_in_the_precision_asked_for() -> None:
    store, k = filled_store(kv_dtype=torch.float32, grad_dtype=torch.float64)
    _, read, _ = next(store.past(0, 4, 8).segments(0))
    assert read.dtype == torch.float64
    torch.testing.assert_close(read, k[:, :, :4].float().double(), rtol=0, atol=0)
    assert store.num_bytes() == 2 * k.numel() * 4
    store.past(0, 4, 8).add_grad(0, k[:, :, :4], k[:, :, :4])
    assert store.num_bytes() == 2 * k.numel() * (4 + 8)
    assert store.grad_bytes() == 2 * k.numel() * 8


def test_what_is_kept_beside_the_pages_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 4 * 2 * 2 * 3 * 1000 * 5 * 8)
    chunk = torch.zeros(2, 3, 10, 5, dtype=torch.float64)
    PageStore(1000, chunk_size=10, num_layers=2).append(0, 0, chunk, chunk)
    with pytest.raises(OutOfPages):
        PageStore(1000, chunk_size=10, num_layers=2).append(0, 0, chunk, chunk, kept_bytes=10)
    PageStore(1000, chunk_size=10, num_layers=2, with_grads=False).append(0, 0, chunk, chunk, kept_bytes=10)


def test_pages_that_cannot_fit_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 4 * 2 * 2 * 3 * 1000 * 5 * 8
    for room, fits in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, room=room: room)
        store = PageStore(1000, chunk_size=10, num_layers=2)
        chunk = torch.zeros(2, 3, 10, 5, dtype=torch.float64)
        if fits:
            store.append(0, 0, chunk, chunk)
        else:
            with pytest.raises(OutOfPages, match=r"1,000 tokens need .* GiB .* free: shorten the context to about \d+"):
                store.append(0, 0, chunk, chunk)
            assert store.num_bytes() == 0
