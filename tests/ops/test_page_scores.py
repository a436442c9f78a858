"""Compare the page score kernels with plain PyTorch, on a GPU or in Triton's interpreter, and check the selection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oomb.config import MEANS_OF_RULE, means_per_page
from oomb.ops import page_scores
from oomb.ops.page_scores import PageRule

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FP8 = torch.float8_e4m3fn
RULES = {name: page_scores.rule_named(name, 64) for name in MEANS_OF_RULE}
Shape = tuple[int, int, int, int, int, int, int, PageRule]
"""B, K, group, T, D, tile_size, P, rule."""

SHAPES: list[Shape] = [
    (1, 2, 7, 100, 128, 32, 33, PageRule(4, 8, True)),
    (2, 1, 3, 37, 80, 16, 11, PageRule(3, 5, True)),
    (1, 3, 1, 48, 64, 16, 9, PageRule(1, 8, True)),
    (2, 1, 8, 33, 256, 32, 5, PageRule(2, 4, False)),
    (1, 2, 3, 70, 64, 32, 67, PageRule(1, None, False)),
    (1, 1, 1, 1, 64, 128, 1, PageRule(4, 8, True)),
]
# Of queries and means. The interpreter's bfloat16 products are wrong.
DTYPES = [(torch.float16, FP8), (torch.float32, torch.float32)]
MORE_DTYPES = [(torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, FP8)]
if ON_GPU:
    DTYPES += [(torch.bfloat16, FP8)]
    MORE_DTYPES += [(torch.bfloat16, torch.bfloat16)]
CASES = [(shape, dtypes) for shape in SHAPES for dtypes in DTYPES] + [(SHAPES[0], dtypes) for dtypes in MORE_DTYPES]


def normal(*shape: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
    return (torch.randn(shape) * by).to(dtype).to(DEVICE)


def queries_and_means(shape: Shape, q_dtype: torch.dtype, means_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make queries in the layout of models, [B, T, H, D] in memory, and means as a slice of a table of NaN."""
    B, K, group, T, D, _, P, rule = shape
    q = normal(B, T, K * group, D, dtype=q_dtype, by=2.0).transpose(1, 2)
    M = P * rule.num_means
    table = torch.full((B, K, M + 5, D), torch.nan, device=DEVICE).to(means_dtype)
    table[:, :, 2 : M + 2] = normal(B, K, M, D, dtype=means_dtype)
    return q, table[:, :, 2 : M + 2]


def launch(q: Tensor, means: Tensor, rule: PageRule, tile_size: int, scale: float | None = None) -> Tensor:
    pytest.importorskip("triton")
    scale = scale or q.shape[3] ** -0.5
    return page_scores.launch_page_scores(q, means, rule=rule, scale=scale, tile_size=tile_size)


def expected_scores(q: Tensor, means: Tensor, rule: PageRule, tile_size: int, scale: float | None = None) -> Tensor:
    scale = scale or q.shape[3] ** -0.5
    return page_scores.page_scores_reference(q.cpu(), means.cpu(), rule=rule, scale=scale, tile_size=tile_size).to(
        DEVICE
    )


def assert_same_scores(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=5e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dtypes"), CASES, ids=str)
def test_scores(shape: Shape, dtypes: tuple[torch.dtype, torch.dtype], poisoned_empty: None) -> None:
    q, means = queries_and_means(shape, *dtypes)
    tile_size, rule = shape[5], shape[7]
    assert_same_scores(launch(q, means, rule, tile_size), expected_scores(q, means, rule, tile_size))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_scores_in_tiles_of_128(rule: PageRule, poisoned_empty: None) -> None:
    """Real sizes. If all queries are sampled, a tile has more rows than a program holds at a time."""
    shape = (1, 2, 7, 131, 64, 128, 37, rule)
    q, means = queries_and_means(shape, torch.float16, FP8)
    assert_same_scores(launch(q, means, rule, 128), expected_scores(q, means, rule, 128))


@pytest.mark.parametrize("min_programs", [1, 10, 10_000])
def test_scores_in_any_number_of_splits(
    min_programs: int, monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    monkeypatch.setattr(page_scores, "MIN_PROGRAMS", min_programs)
    shape = (1, 2, 1, 20, 64, 16, 81, PageRule(4, 8, True))
    q, means = queries_and_means(shape, torch.float16, FP8)
    assert_same_scores(launch(q, means, shape[7], 16), expected_scores(q, means, shape[7], 16))


def test_reference_scores_query_by_query() -> None:
    shape = (2, 2, 3, 37, 16, 16, 5, PageRule(3, 5, True))
    B, K, group, _, _, tile_size, P, rule = shape
    q, means = queries_and_means(shape, torch.float64, torch.float64)
    found = page_scores.page_scores(q, means, rule=rule, scale=0.3, tile_size=tile_size)
    expected = torch.zeros(B, 3, P, device=DEVICE, dtype=torch.float64)
    # A tile of 16 samples at 16/5, 32/5, 48/5, 64/5 and 16, rounded down, minus 1; the last tile has five queries.
    for t in [2, 5, 8, 11, 15, 18, 21, 24, 27, 31, 32, 33, 34, 35, 36]:
        for h in range(K * group):
            shares = torch.einsum("bd,bmd->bm", q[:, h, t], means[:, h // group] * 0.3).softmax(-1)
            expected[:, t // tile_size] += shares.view(B, P, rule.num_means).sum(-1)
    torch.testing.assert_close(found, expected.float())


def test_scores_of_a_tile_add_up() -> None:
    shape = (1, 2, 3, 37, 64, 16, 13, PageRule(4, 8, True))
    q, means = queries_and_means(shape, torch.float16, FP8)
    total = launch(q, means, shape[7], 16).sum(-1)
    torch.testing.assert_close(total, torch.tensor([[8 * 6.0, 8 * 6.0, 5 * 6.0]], device=DEVICE))


def test_scores_far_apart() -> None:
    """A mean with all of the mass, and means with none, do not cause NaN."""
    shape = (1, 1, 2, 16, 64, 16, 40, PageRule(4, 8, True))
    q, means = queries_and_means(shape, torch.float16, torch.float16)
    found = launch(q, means * 100, shape[7], 16, scale=1.0)
    torch.testing.assert_close(found.sum(), torch.tensor(16.0, device=DEVICE), rtol=1e-4, atol=0)
    assert_same_scores(found, expected_scores(q, means * 100, shape[7], 16, scale=1.0))


def test_scores_are_deterministic() -> None:
    q, means = queries_and_means(SHAPES[0], torch.float16, FP8)
    assert torch.equal(launch(q, means, SHAPES[0][7], 32), launch(q, means, SHAPES[0][7], 32))


@pytest.mark.parametrize("compute", [page_scores.page_scores, page_scores.launch_page_scores])
def test_no_pages_yet(compute: Callable[..., Tensor]) -> None:
    pytest.importorskip("triton")
    q, means = queries_and_means(SHAPES[0], torch.float16, FP8)
    nothing = compute(q, means[:, :, :0], rule=RULES["mass"], scale=1.0, tile_size=32)
    assert nothing.shape == (1, 4, 0)
    assert page_scores.top_pages(nothing, 3, has_sink=True).shape == (1, 4, 0)


@pytest.mark.gpu
def test_scores_take_little_memory() -> None:
    """A chunk of 4096 and two million tokens: 32 x 16,384 scores, and the LSE of 14,336 rows in some splits."""
    q = normal(1, 28, 4096, 128, dtype=torch.bfloat16)
    means = normal(1, 4, 32768, 128, dtype=FP8)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    page_scores.page_scores(q, means, rule=RULES["mass"], scale=0.1, tile_size=128)
    assert torch.cuda.max_memory_allocated() - before < 3 << 20


@given(st.integers(1, 300), st.one_of(st.none(), st.integers(1, 300)))
def test_sampled_queries_are_evenly_spaced(tile_size: int, num_queries: int | None) -> None:
    sampled = PageRule(1, num_queries, False).sampled_queries(tile_size)
    assert len(sampled) == min(tile_size, num_queries or tile_size) and sampled[-1] == tile_size - 1
    gaps = {after - before for before, after in zip([-1, *sampled], sampled)}
    assert min(gaps) > 0 and max(gaps) - min(gaps) <= 1


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_no_split_is_empty(programs: int, mean_tiles: int) -> None:
    splits = page_scores._num_splits(programs, mean_tiles)
    assert splits.bit_count() == 1 and splits <= mean_tiles


def naive_selection(scores: list[float], budget: int, has_sink: bool) -> list[int]:
    ranked = sorted(range(len(scores)), key=lambda page: (not (has_sink and page == 0), -scores[page], page))
    return sorted(ranked[:budget])


@given(st.data())
def test_top_pages_is_the_naive_selection(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 40))
    # Few distinct values, so that there are ties.
    value = st.one_of(st.sampled_from([0.0, 1e-40, 0.5, 1.0]), st.floats(0, 1e4, width=32))
    rows = data.draw(st.lists(st.lists(value, min_size=num_pages, max_size=num_pages), min_size=1, max_size=4))
    budget, has_sink = data.draw(st.integers(1, 50)), data.draw(st.booleans())
    selected = page_scores.top_pages(torch.tensor([rows], device=DEVICE), budget, has_sink)
    assert selected.dtype == torch.int32
    assert selected[0].tolist() == [naive_selection(row, budget, has_sink) for row in rows]


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 9, 100])
def test_budget_and_sink(budget: int, has_sink: bool) -> None:
    scores = torch.rand(2, 3, 9, device=DEVICE) + 0.1
    scores[:, :, 0] = 0.0
    before = scores.clone()
    selected = page_scores.top_pages(scores, budget, has_sink)
    assert selected.shape == (2, 3, min(budget, 9)) and (selected.diff(dim=-1) > 0).all()
    assert (selected == 0).any(-1).all() == (has_sink or budget >= 9)
    assert torch.equal(scores, before), "the scores are not modified"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("means_dtype", [FP8, torch.float16], ids=str)
def test_the_matching_page_is_selected(means_dtype: torch.dtype, rule: PageRule) -> None:
    """The queries of each tile resemble the keys of one page."""
    page_size, num_pages, tile_size, sought = 16, 12, 32, [7, 3]
    keys = normal(1, 2, num_pages, page_size, 64)
    directions = normal(2, 64)
    for direction, page in zip(directions, sought):
        keys[:, :, page] += direction
    q = directions.repeat_interleave(tile_size, 0).expand(1, 6, -1, -1).half()
    means = torch.empty(1, 2, num_pages * rule.num_means, 64, dtype=means_dtype, device=DEVICE)
    page_scores.summarize(keys.flatten(2, 3).half(), page_size, rule.num_means, means)
    for scores in (
        page_scores.page_scores(q, means, rule=rule, scale=0.125, tile_size=tile_size),
        launch(q, means, rule, tile_size, scale=0.125),
    ):
        selected = page_scores.top_pages(scores, 2 if rule.has_sink else 1, rule.has_sink)
        assert selected.tolist() == [[[0, page] if rule.has_sink else [page] for page in sought]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_summarize_writes_to_a_slice_of_the_table(dtype: torch.dtype) -> None:
    k = normal(2, 24, 3, 8, dtype=dtype).transpose(1, 2)
    table = torch.full((2, 3, 20, 8), 7.0, dtype=dtype, device=DEVICE)
    page_scores.summarize(k, page_size=12, num_means=3, out_BKMD=table[:, :, 4:10])
    for mean in range(6):
        expected = k[:, :, 4 * mean : 4 * mean + 4].double().mean(2).to(dtype)
        torch.testing.assert_close(table[:, :, 4 + mean], expected)
    assert (table[:, :, :4] == 7).all() and (table[:, :, 10:] == 7).all()


@pytest.mark.parametrize(("dtype", "largest"), [(FP8, 448.0), (torch.float16, 65504.0)], ids=str)
def test_means_stay_in_range(dtype: torch.dtype, largest: float) -> None:
    k = torch.tensor([1e6, -1e6, largest, largest * 1.1, 0.3125, 2**-9], device=DEVICE).expand(1, 1, 4, 6)
    means = torch.empty(1, 1, 2, 6, dtype=dtype, device=DEVICE)
    page_scores.summarize(k, page_size=2, num_means=1, out_BKMD=means)
    assert means.float()[0, 0].tolist() == [[largest, -largest, largest, largest, 0.3125, 2**-9]] * 2


def test_means_must_divide_a_page() -> None:
    out = torch.empty(1, 1, 4, 8)
    with pytest.raises(ValueError, match="means_per_page"):
        page_scores.summarize(torch.zeros(1, 1, 6, 8), page_size=6, num_means=4, out_BKMD=out)
    with pytest.raises(ValueError, match="whole pages"):
        page_scores.summarize(torch.zeros(1, 1, 7, 8), page_size=6, num_means=2, out_BKMD=out)
    assert [means_per_page("mass", size) for size in (128, 6, 7, 1)] == [2, 2, 1, 1]
