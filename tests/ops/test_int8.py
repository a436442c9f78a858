"""Check 8-bit pages: quantization, the kernel that quantizes and dequantizes them, and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, random_ids, relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oomb
from oomb.memory import batch_copy
from oomb.memory.rows import LayerRows, RowLayout, kv_row
from oomb.memory.selections import SelectionSpec
from oomb.memory.store import PageStore
from oomb.memory.tiers import Tiers
from oomb.ops.int8 import LEVELS, dequantize, quantize
from oomb.ops.rounding import add_stochastic_
from oomb.planner import placement

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@given(st.integers(1, 40), st.floats(-30, 30), st.one_of(st.none(), st.integers(0, 2**31 - 1)))
def test_errors_are_below_one_step(size: int, exponent: float, seed: int | None) -> None:
    x = torch.randn(7, size, generator=torch.Generator().manual_seed(size)) * 2.0**exponent
    numbers, scale = quantize(x, seed)
    assert numbers.dtype == torch.int8 and int(numbers.abs().max()) <= LEVELS
    steps = 0.5 if seed is None else 1.0
    off = (dequantize(numbers, scale, torch.float32) - x).abs()
    assert (off <= steps * 1.001 * scale.float().unsqueeze(-1)).all()
    assert (scale.float() <= 1.02 * x.abs().amax(-1) / LEVELS).all(), "no level is wasted"


def test_zero_stays_zero() -> None:
    for seed in (None, 3):
        numbers, scale = quantize(torch.zeros(2, 5), seed)
        assert not dequantize(numbers, scale, torch.float64).any()


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.randn(4, 64)
    mean = torch.stack([dequantize(*quantize(x, seed), torch.float32) for seed in range(400)]).mean(0)
    nearest = dequantize(*quantize(x), torch.float32)
    assert (mean - x).norm() < 0.25 * (nearest - x).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_row_returns_what_was_written(dtype: torch.dtype) -> None:
    row = kv_row((2, 3, 5), (2, 3, 4), dtype)
    data = torch.full((7 * row.num_bytes,), 0x55, dtype=torch.uint8)
    k, v = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 4)
    row.write(row.views(data, 7), [k, v])
    for found, expected in zip(row.read(row.views(data, 7), torch.float32), (k, v), strict=True):
        assert relative_error(found, expected) < (1e-2 if dtype == torch.int8 else 1e-12)


def test_eight_bits_take_half_of_sixteen() -> None:
    """Qwen2.5-7B: 4 heads of 128."""
    short, wide = (kv_row((1, 4, 128), (1, 4, 128), dtype).num_bytes for dtype in (torch.int8, torch.bfloat16))
    assert (short, wide) == (1040, 2048)


@pytest.mark.parametrize(("num_rows", "edge"), [(0, 5), (2, 5), (0, 2), (2, 0)])
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((2, 3, 24, 16, 8), {}),
        ((2, 3, 24, 16, 9), {"TILE_S": 2}),
        ((1, 1, 64, 64, 40), {"TILE_S": 16}),
        ((1, 2, 80, 128, 16), {}),
    ],
    ids=str,
)
def test_dequantize_kernel(shape: tuple[int, ...], tiles: dict[str, int], num_rows: int, edge: int) -> None:
    """Compare with `oomb.ops.int8`, for pages at scattered addresses; those from `edge` on are in the buffer."""
    pytest.importorskip("triton")
    from oomb.ops.triton_kernels.page_copy import dequantize_pages, dequantize_tiles

    B, K, D, V, S = shape
    P, selected = 5, (3, 0, 4)
    row, wide = kv_row((B, K, D), (B, K, V), torch.int8), kv_row((B, K, D), (B, K, V), torch.float32)
    pages = torch.zeros(P, S * row.num_bytes, dtype=torch.uint8, device=DEVICE)
    values = [torch.randn(B, K, P * S, size, device=DEVICE) for size in (D, V)]
    row.write(row.views(pages.flatten(), P * S), values)
    addresses = torch.tensor([pages[p].data_ptr() for p in range(P)], device=DEVICE)
    which = torch.tensor([*selected, -1], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    buffer = torch.zeros(3, S * wide.num_bytes // 4, device=DEVICE)
    places = buffer.view(torch.uint8)
    flags = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 0]], dtype=torch.uint8, device=DEVICE)
    held = [num_rows == 0 or p != 4 for p in selected]

    def move(is_out: bool, rows: int, seed: int = 0) -> None:
        dequantize_pages[(2,)](
            which, count, addresses, buffer, flags, seed, S, B * K, D, V, row.num_bytes, row.fields[1][0],
            row.fields[2][0], wide.num_bytes // 4, wide.fields[1][0] // 4, rows, P, edge, OUT=is_out, DROPPED=0,
            **{**dequantize_tiles(B * K, max(D, V)), **tiles}, num_warps=16,
        )  # fmt: skip

    for place, p, holds in zip(places, selected, held, strict=True):
        if p >= edge and holds:
            place[-pages.shape[1] :] = pages[p]
            # Nothing is read where it was.
            addresses[p] = 0
    move(False, num_rows)
    found = wide.views(places.flatten(), 3 * S)
    expected = row.read(row.views(pages.flatten(), P * S))
    for x, y in zip(found, expected, strict=True):
        for i, p in enumerate(selected):
            assert torch.equal(x[:, :, i * S : (i + 1) * S], y[:, :, p * S : (p + 1) * S] * held[i])
    # Quantize again: values on the grid stay unchanged with any seed; others are rounded stochastically.
    before = pages.clone()
    for x in found:
        x.copy_(torch.randn_like(x) * 3)
    given = [x.clone() for x in found]
    move(True, 0, seed=9)
    assert torch.equal(pages[[1, 2]], before[[1, 2]]), "what was not selected is left alone"
    for place, p in zip(places, selected, strict=True):
        if p >= edge:
            assert torch.equal(pages[p], before[p])
            pages[p] = place[: pages.shape[1]]
    narrowed = row.read(row.views(pages.flatten(), P * S))
    for x, y in zip(given, narrowed, strict=True):
        for i, p in enumerate(selected):
            here = x[:, :, i * S : (i + 1) * S]
            off = (y[:, :, p * S : (p + 1) * S] - here).abs()
            assert (off <= 1.03 / LEVELS * here.abs().amax(-1, keepdim=True)).all()
            assert off.mean() > 0


def test_dequantizing_is_unbiased() -> None:
    """An 8-bit value times a scale has more bits than bfloat16. Gradients are loaded and stored for every chunk that
    adds to them: with round-to-nearest, a sum of a thousand updates would be off by several percent."""
    pytest.importorskip("triton")
    from oomb.ops.triton_kernels.page_copy import dequantize_pages, dequantize_tiles

    K, D, S = 2, 32, 8
    row, wide = kv_row((1, K, D), (1, K, D), torch.int8), kv_row((1, K, D), (1, K, D), torch.bfloat16)
    page = torch.zeros(S * row.num_bytes, dtype=torch.uint8, device=DEVICE)
    row.write(row.views(page, S), [torch.randn(1, K, S, D, device=DEVICE) for _ in range(2)])
    numbers = [torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (0, 1)]
    address = torch.tensor([page.data_ptr()], device=DEVICE)

    def brought_in(seed: int, dropped: int) -> Tensor:
        buffer = torch.zeros(S * wide.num_bytes, dtype=torch.uint8, device=DEVICE)
        dequantize_pages[(1,)](
            *numbers, address, buffer.view(torch.bfloat16), page, seed, S, K, D, D, row.num_bytes, row.fields[1][0],
            row.fields[2][0], wide.num_bytes // 2, wide.fields[1][0] // 2, 0, 0, 1, OUT=False, DROPPED=dropped,
            **dequantize_tiles(K, D), num_warps=16,
        )  # fmt: skip
        return torch.cat([x.float().flatten() for x in wide.views(buffer, S)])

    exact = torch.cat([x.flatten() for x in row.read(row.views(page, S))])
    nearest = (brought_in(0, 0) - exact).norm()
    mean = torch.stack([brought_in(seed, 16) for seed in range(64)]).mean(0)
    assert nearest > 0 and (mean - exact).norm() < 0.4 * nearest


@pytest.mark.parametrize("gpu_tokens", [0, 10_000])
def test_hundreds_of_updates_survive(gpu_tokens: int) -> None:
    """Every chunk selects the first page and adds the same update to its gradient. The sum has the right size and
    direction, although each 8-bit value is off by up to a step."""
    num_chunks, size = 400, 4
    spec = LayerRows(
        kv=kv_row((1, 8, 64), (1, 8, 64), torch.bfloat16),
        grad=kv_row((1, 8, 64), (1, 8, 64), torch.int8),
        out=RowLayout(((1, 8, 64), torch.bfloat16)),
        dtype=torch.bfloat16,
    )
    selection_spec = SelectionSpec(budget=1, tile_size=size, num_means=1, means_dtype=torch.float32)
    store = PageStore(
        Tiers(torch.device("cpu")), {0: spec}, capacity=num_chunks * size, chunk_size=size, page_size=size,
        gpu_tokens=gpu_tokens, selection_spec=selection_spec,
    )  # fmt: skip
    share = torch.randn(1, 1, size, 1024).to(torch.bfloat16)
    for start in range(num_chunks * size, 0, -size):
        past = store.past(0, start, start + size)
        past.set_selection(torch.zeros(1, 1, 1, dtype=torch.int32), reads_in_place=False)
        with past.grads() as view:
            first = view.base[int(view.offsets_P[0]) :][: size * view.row_size].view(1, 1, size, view.row_size)
            if not view.touched_BP[0, 0]:
                first.zero_()
            add_stochastic_(first, share, view.seed)
    nothing = torch.zeros(1, 8, size, 64)
    later = store.past(0, 0, size).add_future_grads(nothing, nothing)
    arrived = torch.cat([x.transpose(1, 2).reshape(1, 1, size, 512) for x in later], -1) / num_chunks
    wanted = share.float()
    assert abs(float((arrived * wanted).sum() / wanted.square().sum()) - 1) < 0.006
    assert relative_error(arrived, wanted) < 0.15


def gradients(model: Any, ids: Tensor, **config: Any) -> Tensor:
    model.zero_grad()
    settings: dict[str, Any] = {"chunk_size": 16, "page_size": 8, "fuse": "off", **config}
    oomb.Engine(model, oomb.Config(**settings)).loss(ids).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_training_on_pages_in_eight_bits(family: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "TILE_SIZE", 8)
    model, ids = build(family), random_ids(2, 101)
    exact = gradients(model, ids, page_budget=budget)
    for kv, grad, tolerance in (("int8", "auto", 0.03), ("auto", "int8", 0.03), ("int8", "int8", 0.04)):
        found = gradients(model, ids, page_budget=budget, kv_dtype=kv, grad_dtype=grad)
        assert 1e-6 < relative_error(found, exact) < tolerance
    # The last run had only 8-bit pages.
    for place in ({"gpu_memory": 0}, {"gpu_memory": 30_000}, {"checkpoint_layers": True, "keep_attention": False}):
        again = gradients(model, ids, page_budget=budget, kv_dtype="int8", grad_dtype="int8", **place)
        assert torch.equal(found, again), "with any placement"


@pytest.mark.slow
@pytest.mark.parametrize("place", [{"gpu_memory": "1GiB"}, {"gpu_memory": 0}, {"gpu_memory": 60_000}], ids=str)
def test_training_with_kernels(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from page_kernels import go_the_way_of_a_gpu

    model, ids = build("llama", dtype=torch.float32, num_hidden_layers=1).to(DEVICE), random_ids(2, 70)
    # Read all pages: small rounding differences could select others.
    config: dict[str, Any] = {"chunk_size": 32, "page_size": 16, "page_budget": 9, **place}
    exact = gradients(model, ids, **config)
    with monkeypatch.context() as patch:
        go_the_way_of_a_gpu(patch)
        short = {"kv_dtype": "int8", "grad_dtype": "int8"}
        found = gradients(model, ids, **config, **short)
        with patch.context() as inner:
            inner.setattr(batch_copy, "is_available", lambda device: False)
            assert torch.equal(found, gradients(model, ids, **config, **short)), "pages moved by kernels throughout"
        if ON_GPU:
            assert torch.equal(found, gradients(model, ids, **config, **short)), "twice the same"
    assert relative_error(found, exact) < 0.05
