"""Compare the kernels of attention to selected pages with plain PyTorch, on a GPU or in Triton's interpreter, and train
with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from families import build, random_ids, relative_error
from page_kernels import ON_GPU, go_the_way_of_a_gpu
from torch import Tensor

pytest.importorskip("triton")

import oomb
from oomb.attention import reference, sparse_reference
from oomb.memory import batch_copy
from oomb.memory.selected import PageView
from oomb.ops import page_attention
from oomb.ops.triton_kernels import page_copy
from oomb.planner import placement

DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter's bfloat16 products are wrong.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3} | ({torch.bfloat16: 3e-2} if ON_GPU else {})


@dataclass(frozen=True)
class Case:
    B: int = 1
    K: int = 1
    G: int = 1
    T: int = 16
    D: int = 16
    V: int | None = None
    S: int = 16
    """Page size."""
    length: int = 64
    C: int = 2
    tile: int = 16
    pad: int = 0
    full: bool = False
    """Every tile selects C pages; otherwise some select fewer, or none."""

    def make(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, PageView, Tensor, Tensor, Tensor]:
        """Make queries, dout, pages at shuffled offsets among NaN, a selection, and attention to the own keys."""
        torch.manual_seed(0)
        P, V = -(-self.length // self.S), self.V or self.D
        widths = self.B * self.K * self.D, self.B * self.K * V
        row = sum(widths) + 2 * self.pad
        rows = torch.full((P + 3, self.S, row), torch.nan)
        places = torch.randperm(P + 3)[:P]
        rows[places, :, : widths[0]] = torch.randn(P, self.S, widths[0])
        value_at = widths[0] + self.pad
        rows[places, :, value_at : value_at + widths[1]] = torch.randn(P, self.S, widths[1])
        rows[places[-1], (self.length - 1) % self.S + 1 :] = torch.nan
        N = -(-self.T // self.tile)
        C = min(self.C, P)
        selected = torch.full((self.B, N, C), -1, dtype=torch.int32)
        for b in range(self.B):
            for n in range(N):
                some = torch.randperm(P)[: C if self.full else int(torch.randint(int(n == 0), C + 1, ()))]
                selected[b, n, : len(some)] = some
        pages = PageView(
            rows.to(DEVICE, dtype).flatten(), (places * self.S * row).to(DEVICE), self.length, self.S, row, self.K,
            self.D, V, value_at, torch.ones(self.B, P, dtype=torch.uint8, device=DEVICE), 0,
        )  # fmt: skip
        q, dout, own = (
            torch.randn(self.B, self.T, self.K * self.G, size).to(DEVICE, dtype).transpose(1, 2)
            for size in (self.D, V, V)
        )
        own_lse = torch.randn(self.B, self.K * self.G, self.T, device=DEVICE)
        return q, dout, pages, selected.to(DEVICE), own, own_lse


CASES = [
    Case(),
    Case(B=2, K=2, G=3, T=37, S=16, length=75, C=3, pad=8),
    Case(K=2, G=7, T=33, D=24, V=32, S=32, length=100, C=9, tile=32),
    Case(G=8, T=20, D=80, length=40, C=1),
    Case(K=2, G=2, T=32, D=64, S=24, length=96, C=2, full=True),
    Case(B=2, G=1, T=16, D=32, S=8, length=40, C=5, full=True),
    Case(K=2, G=7, T=19, D=128, length=45, C=2),
    Case(G=3, T=32, D=64, S=32, length=96, C=2, full=True),
    Case(T=16, D=256, S=16, length=32, C=2),
]
BIG = [
    Case(B=2, K=2, G=7, T=300, D=128, S=128, length=1500, C=5, tile=128),
    Case(K=1, G=8, T=256, D=256, S=64, length=640, C=4, tile=128, full=True),
    Case(K=3, G=3, T=512, D=64, S=64, length=1024, C=8, tile=128, full=True),
    Case(K=4, G=1, T=130, D=80, S=128, length=512, C=100, tile=128, full=True),
    Case(K=4, G=7, T=512, D=128, S=128, length=2048, C=8, tile=128, full=True),
]
ALL = CASES + (BIG if ON_GPU else [])


def grad_pages(pages: PageView, dtype: torch.dtype) -> PageView:
    """Make gradient pages at other offsets, half of them touched. The others hold garbage."""
    P, size = len(pages.offsets_P), pages.page_size * pages.row_size
    touched = (torch.rand(pages.touched_BP.shape) < 0.5).to(DEVICE, torch.uint8)
    base = torch.randn(P + 1, size).to(DEVICE, dtype).flatten()
    return replace(
        pages, base=base, offsets_P=(torch.randperm(P + 1)[:P] * size).to(DEVICE), touched_BP=touched, seed=7
    )


def clean(grads: PageView, B: int) -> PageView:
    """Return them with zeros in untouched pages, which the reference can add to."""
    base = grads.base.clone().view(-1, grads.page_size, grads.row_size)
    places = grads.offsets_P // base[0].numel()
    for field in sparse_reference.fields(grads, base, B):
        for b, page in (grads.touched_BP == 0).nonzero().tolist():
            field[places[page], :, b] = 0
    return replace(grads, base=base.flatten())


def rows_of(pages: PageView) -> Tensor:
    at = torch.arange(pages.page_size * pages.row_size, device=DEVICE)
    return pages.base[pages.offsets_P[:, None] + at].view(-1, pages.page_size, pages.row_size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_kernels_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    q, dout, pages, selected, own, own_lse = case.make(dtype)
    settings: dict[str, Any] = {"scale": 0.3, "tile_size": case.tile}
    gaps = {"has_gaps": not case.full}
    out, lse = page_attention.launch_forward(q, pages, selected, own, own_lse, **settings, **gaps)
    expected_out, expected_lse = sparse_reference.forward(q, pages, selected, own, own_lse, **settings)
    assert relative_error(out, expected_out) < tolerance
    assert relative_error(lse, expected_lse) < max(1e-5, tolerance / 10)

    # The softmax covers more than the pages and the own keys.
    whole = torch.logaddexp(expected_lse, torch.randn_like(expected_lse))
    merged = (expected_out * (expected_lse - whole).exp().unsqueeze(-1)).to(dtype)
    own_dq = torch.randn_like(q)
    dq, delta = page_attention.launch_dq(dout, q, pages, selected, merged, whole, own_dq, **settings, **gaps)
    expected_dq, expected_rows = sparse_reference.backward(dout, q, pages, selected, merged, whole, own_dq, **settings)
    assert relative_error(dq, expected_dq) < 2 * tolerance
    assert relative_error(delta, (dout.float() * merged.float()).sum(-1)) < 2 * tolerance
    grads = grad_pages(pages, torch.float32)
    raw, before, touched = rows_of(grads), rows_of(clean(grads, case.B)), grads.touched_BP.clone()
    page_attention.launch_dkv(dout, q, pages, selected, whole, delta, grads, **settings)
    assert torch.equal(touched, grads.touched_BP)
    read = torch.zeros_like(grads.touched_BP, dtype=torch.bool)
    for b in range(case.B):
        read[b, selected[b][selected[b] >= 0].long()] = True
    inside = torch.arange(len(raw) * case.S, device=DEVICE).view(len(raw), case.S) < case.length
    mask = (read.T[:, None, :] & inside[..., None])[..., None, None]
    shares = torch.zeros_like(raw).index_copy(0, sparse_reference.used(selected), expected_rows)
    by_field = (sparse_reference.fields(pages, x, case.B) for x in (rows_of(grads), raw, before, shares))
    for now, as_it_was, counted, share in zip(*by_field, strict=True):
        assert relative_error((now - counted) * mask, share * mask) < 2 * tolerance
        assert torch.equal(torch.where(mask, 0, now), torch.where(mask, 0, as_it_was)), "what nobody read is left alone"


def everything(
    q: Tensor,
    dout: Tensor,
    pages: PageView,
    selected: Tensor,
    own: Tensor,
    own_lse: Tensor,
    grads: PageView,
    case: Case,
) -> list[Tensor]:  # fmt: skip
    """Return the results of all kernels: output, LSE, dq, delta, and the bytes of the gradient pages."""
    settings: dict[str, Any] = {"scale": 0.3, "tile_size": case.tile}
    out, lse = page_attention.launch_forward(q, pages, selected, own, own_lse, **settings, has_gaps=not case.full)
    dq, delta = page_attention.launch_dq(
        dout, q, pages, selected, out, lse, torch.zeros_like(q), **settings, has_gaps=not case.full
    )
    page_attention.launch_dkv(dout, q, pages, selected, lse, delta, grads, **settings)
    return [out, lse, dq, delta, rows_of(grads).view(torch.uint8)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", BIG, ids=str)
def test_kernels_are_deterministic(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype)
    grads = grad_pages(inputs[2], dtype)
    first = everything(*inputs, replace(grads, base=grads.base.clone()), case)
    for _ in range(5):
        again = everything(*inputs, replace(grads, base=grads.base.clone()), case)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("full", [True, False])
def test_offsets_may_exceed_32_bits(full: bool) -> None:
    case = Case(G=2, T=32, D=16, S=16, length=64, C=3, full=full)
    q, dout, pages, selected, own, own_lse = case.make(torch.float16)
    grads = grad_pages(pages, torch.float16)
    near = everything(q, dout, pages, selected, own, own_lse, replace(grads, base=grads.base.clone()), case)
    page_size = case.S * pages.row_size

    def spread(view: PageView) -> PageView:
        # 4 GiB, of which a CPU only allocates what is touched.
        base = torch.empty(2**31 + 2 * page_size, dtype=view.base.dtype, device=DEVICE)
        places = torch.tensor([0, 2**30, 2**31 - page_size // 2, 2**31 + page_size], device=DEVICE)
        for there, page in zip(places.tolist(), rows_of(view), strict=True):
            base[there : there + page_size] = page.flatten()
        return replace(view, base=base, offsets_P=places)

    far = everything(q, dout, spread(pages), selected, own, own_lse, spread(grads), case)
    for name, a, b in zip(("out", "lse", "dq", "delta"), far, near, strict=False):
        assert torch.equal(a, b), name
    # Stochastic rounding depends on the position: equal up to the last bit.
    assert relative_error(far[4].view(torch.float16).float(), near[4].view(torch.float16).float()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * ON_GPU, ids=str)
def test_pages_in_another_precision(dtype: torch.dtype) -> None:
    """Stored K, V and gradients may be wider or narrower than the working precision."""
    case = Case(K=2, G=2, T=20, D=16, S=16, length=48, C=2, full=True)
    q, dout, pages, selected, own, own_lse = case.make(torch.float32)
    pages = replace(pages, base=pages.base.to(dtype))
    settings: dict[str, Any] = {"scale": 0.3, "tile_size": 16}
    found = page_attention.launch_forward(q, pages, selected, own, own_lse, **settings)
    expected = sparse_reference.forward(q, pages, selected, own, own_lse, **settings)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < 1e-5
    dq, delta = page_attention.launch_dq(dout, q, pages, selected, *expected, torch.zeros_like(q), **settings)
    expected_dq, rows = sparse_reference.backward(dout, q, pages, selected, *expected, torch.zeros_like(q), **settings)
    assert relative_error(dq, expected_dq) < 1e-5
    grads = replace(grad_pages(pages, torch.float32), touched_BP=torch.zeros_like(pages.touched_BP))
    page_attention.launch_dkv(dout, q, pages, selected, expected[1], delta, grads, **settings)
    assert relative_error(rows_of(grads)[sparse_reference.used(selected)], rows) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * ON_GPU, ids=str)
def test_16_bit_gradients_are_rounded_stochastically(dtype: torch.dtype) -> None:
    """Their mean over seeds equals the float32 gradients."""
    case = Case(K=2, G=2, T=32, D=16, S=16, length=48, C=2, full=True)
    q, dout, pages, selected, own, own_lse = case.make(torch.float32)
    out, lse = sparse_reference.forward(q, pages, selected, own, own_lse, scale=0.3, tile_size=16)
    delta = (dout * out).sum(-1)
    wide = clean(grad_pages(pages, torch.float32), 1)
    start = replace(wide, base=wide.base.to(dtype), touched_BP=torch.ones_like(wide.touched_BP))
    wide = replace(start, base=start.base.float())
    page_attention.launch_dkv(dout, q, pages, selected, lse, delta, wide, scale=0.3, tile_size=16)
    sums, count = torch.zeros_like(wide.base), 32
    for seed in range(count):
        short = replace(start, base=start.base.clone(), seed=seed)
        page_attention.launch_dkv(dout, q, pages, selected, lse, delta, short, scale=0.3, tile_size=16)
        sums += short.base.float()
    nearest = (wide.base.to(dtype).float() - wide.base).norm()
    assert (sums / count - wide.base).norm() < 0.5 * nearest


def test_selecting_every_page_is_dense_attention() -> None:
    case = Case(B=2, K=2, G=2, T=40, D=8, S=16, length=70, C=5, full=True)
    q, _, pages, _, own, own_lse = case.make(torch.float64)
    selected = torch.arange(5, device=DEVICE).expand(2, 3, 5).int()
    out, lse = sparse_reference.forward(
        q,
        pages,
        selected,
        torch.zeros_like(own),
        torch.full_like(own_lse, -torch.inf).double(),
        scale=0.3,
        tile_size=16,
    )
    rows = rows_of(pages).flatten(0, 1)[:70]
    k, v = (x.permute(1, 2, 0, 3) for x in sparse_reference.fields(pages, rows, 2))
    expected_out, expected_lse = reference.forward(q, k, v, scale=0.3, causal=False)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_readers_of_a_page() -> None:
    selected = torch.tensor([[[2, 0], [2, -1], [-1, -1]], [[1, 2], [0, 2], [2, 1]]], dtype=torch.int32)
    readers, ends, order = page_attention.invert(selected, num_pages=3)
    lists = [readers[a:b].tolist() for a, b in zip([0, *ends.tolist()], ends.tolist(), strict=False)]
    assert lists == [[0], [], [0, 1], [4], [3, 5], [3, 4, 5]]
    assert order.tolist() == [5, 2, 4, 0, 3, 1]


@pytest.mark.parametrize("edge", [0, 3])
def test_selected_pages_are_gathered_and_stored_back(edge: int) -> None:
    P, words = 9, 20
    away = torch.arange(P * words, dtype=torch.int32, device=DEVICE).view(P, words).clone()
    places = torch.tensor([away.data_ptr() + 4 * words * p for p in range(P)], device=DEVICE)
    table, buffer = places.clone(), torch.full((P, words), -1, dtype=torch.int32, device=DEVICE)
    which, count = (
        torch.full((P,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(4, dtype=torch.int32, device=DEVICE),
    )
    moved = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    selected = torch.tensor([7, 2, 4, 7, -1, 4, 8], dtype=torch.int16, device=DEVICE)
    touched = torch.tensor([[0] * 9, [1, 1, 1, 1, 1, 1, 1, 0, 1]], dtype=torch.uint8, device=DEVICE)
    page_copy.mark_pages[(2,)](places, selected, len(selected), edge, TILE=4)
    page_copy.assign_slots[(1,)](
        places, which, count, moved, touched, buffer.data_ptr(), 4 * words, 4 * words, edge, P, 2, P, TILE=4
    )
    pages = [p for p in (2, 4, 7, 8) if p >= edge]
    assert which[: count[0]].tolist() == pages and moved.tolist() == [4 * words * (len(pages) - 1), 0]
    for p in range(P):
        here = buffer.data_ptr() + 4 * words * pages.index(p) if p in pages else int(table[p])
        assert int(places[p]) == here
    page_copy.copy_pages[(3,)](which, count, table, buffer, touched, words, 2, P, OUT=False, TILE=16)
    for i, p in enumerate(pages):
        assert (buffer[i] == (away[p] if p != 7 else -1)).all(), "a page that holds nothing stays away"
    buffer.add_(1000)
    expected = away.clone()
    expected[pages] = buffer[: len(pages)]
    page_copy.copy_pages[(3,)](which, count, table, buffer, touched, words, 0, 0, OUT=True, TILE=16)
    assert torch.equal(away, expected)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    go_the_way_of_a_gpu(monkeypatch)


PLACES: list[dict[str, Any]] = [
    {"gpu_memory": "1GiB"},
    {"gpu_memory": 0},
    {"gpu_memory": 100_000, "keep_attention": False, "checkpoint_layers": False},
    {"gpu_memory": 0, "keep_attention": True, "checkpoint_layers": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("config", PLACES, ids=str)
def test_the_engine_with_kernels(config: dict[str, Any], with_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any placement the gradients equal those without kernels."""
    model, ids = build("llama", dtype=torch.float32).to(DEVICE), random_ids(2, 90)
    settings: dict[str, Any] = {"chunk_size": 32, "page_size": 16, "page_budget": 2, "fuse": "off", **config}

    def gradients(**changes: Any) -> Tensor:
        model.zero_grad()
        engine = oomb.Engine(model, oomb.Config(**settings, **changes))
        engine.loss(ids).backward()
        if config["gpu_memory"] == 0:
            assert engine.stats.loaded_bytes > 0 and engine.stats.stored_bytes > 0
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    found = gradients()
    with monkeypatch.context() as patch:
        patch.setattr(batch_copy, "is_available", lambda device: False)
        assert torch.equal(found, gradients()), "pages moved by kernels throughout"
    if ON_GPU:
        assert torch.equal(found, gradients()), "twice the same"
        expected = gradients(kernels="torch")
    else:
        monkeypatch.undo()
        monkeypatch.setattr(placement, "TILE_SIZE", 16)
        expected = gradients()
    assert relative_error(found, expected) < 1e-5
