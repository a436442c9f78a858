"""Compare gradients of training with selected pages with autograd under the mask that the selections define."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checks import backward_gradients, engine_for, lora
from families import assert_same_gradients, build, random_ids, relative_error, whole_attention, whole_gradients
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import oomb
from oomb.memory.past import SparseLayerPast
from oomb.planner import placement

CHUNK, PAGE, TILE = 16, 8, 8
TOLERANCE = 1e-10
Selections = dict[tuple[int, int], Tensor]
"""Selections by layer and start of the chunk."""
_seen: dict[int, Tensor] = {}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "TILE_SIZE", TILE)


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> Selections:
    """Record selections while training."""
    found: Selections = {}
    set_selection = SparseLayerPast.set_selection

    def spy(past: SparseLayerPast, selected_BNC: Tensor, reads_in_place: bool) -> None:
        assert (past.layer, past.length) not in found, "selected twice"
        found[past.layer, past.length] = selected_BNC.clone()
        set_selection(past, selected_BNC, reads_in_place)

    monkeypatch.setattr(SparseLayerPast, "set_selection", spy)
    return found


def sparse_engine(model: Any, budget: int, **config: Any) -> oomb.Engine:
    return engine_for(model, **{"chunk_size": CHUNK, "page_size": PAGE, "page_budget": budget, **config})


def seen_keys(selections: Selections, B: int, T: int, chunk: int = CHUNK) -> dict[int, Tensor]:
    """Return the mask [B, T, T] of each layer: the own chunk and the selected pages."""
    chunk_of = torch.arange(T) // chunk
    own = chunk_of[:, None] == chunk_of[None, :]
    found = {layer: own.expand(B, T, T).clone() for layer, _ in selections}
    for (layer, start), selected_BNC in selections.items():
        for b, by_tile in enumerate(selected_BNC):
            for n, pages in enumerate(by_tile):
                first = start + n * TILE
                rows = slice(first, min(first + TILE, start + chunk, T))
                for page in pages.tolist():
                    found[layer][b, rows, page * PAGE : (page + 1) * PAGE] = True
    return found


def masked_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
    seen = _seen.get(module.layer_idx)
    if seen is not None:
        mask = mask.masked_fill(~seen.unsqueeze(1), -torch.inf)
    return whole_attention(module, q, k, v, mask, **kwargs)


AttentionInterface.register("whole_masked", masked_attention)
AttentionMaskInterface.register("whole_masked", eager_mask)


def masked_gradients(model: Any, seen: dict[int, Tensor], *args: Any, **kwargs: Any) -> Any:
    _seen.update(seen)
    model = copy.deepcopy(model)
    model.set_attn_implementation("whole_masked")
    try:
        return whole_gradients(model, *args, **kwargs)
    finally:
        _seen.clear()


def check(
    model: Any, ids: Tensor, selections: Selections, budget: int, tolerance: float = TOLERANCE, **config: Any
) -> None:
    selections.clear()
    loss = sparse_engine(model, budget, **config).loss(ids)
    found = backward_gradients(model, loss)
    seen = seen_keys(selections, *ids.shape)
    assert any(not x.equal(x | torch.ones_like(x).tril()) for x in seen.values()) or budget >= ids.shape[1] // PAGE
    expected_loss, expected = masked_gradients(model, seen, ids)
    assert relative_error(loss.detach(), expected_loss) <= tolerance
    assert_same_gradients(found, expected, tolerance)


PLACES: list[dict[str, Any]] = [
    {},
    {"gpu_memory": 0},
    {"gpu_memory": 40_000, "keep_attention": False},
    {"gpu_memory": 0, "keep_attention": True, "checkpoint_layers": True},
]


@pytest.mark.parametrize("config", PLACES, ids=str)
@pytest.mark.parametrize("budget", [1, 3])
def test_gradients_match_the_mask(selections: Selections, budget: int, config: dict[str, Any]) -> None:
    check(build("llama"), random_ids(2, 101), selections, budget, **config)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt_oss", "phi3", "gpt_neox"])
def test_every_kind_of_attention(selections: Selections, family: str) -> None:
    tolerance = {"gemma2": 1e-6, "gemma3": 1e-6, "gpt_oss": 2e-5}.get(family, 1e-10)
    dtype = torch.float32 if family == "gpt_oss" else torch.float64
    check(build(family, dtype=dtype), random_ids(1, 90), selections, 2, tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 95, 96])
def test_odd_lengths(selections: Selections, length: int) -> None:
    ids = random_ids(1, max(2, length))
    check(build("llama"), ids, selections, 2)


def assert_dense(model: Any, ids: Tensor, budget: int) -> None:
    """Check that training with this budget equals dense training."""
    expected_loss, expected = whole_gradients(model, ids)
    loss = sparse_engine(model, budget).loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_a_budget_that_covers_everything_is_dense() -> None:
    assert_dense(build("llama"), random_ids(2, 101), 100)


def test_windows_are_not_affected() -> None:
    assert_dense(build("mistral_sliding"), random_ids(1, 90), 1)


def test_lora(selections: Selections) -> None:
    check(lora(build("llama"), dropout=0.0), random_ids(1, 70), selections, 2)


def test_two_calls_alive_at_once() -> None:
    model, (a, b) = build("llama"), (random_ids(1, 90, seed=s) for s in range(2))
    engine = sparse_engine(model, 2, gpu_memory=0)
    expected = [backward_gradients(model, engine.loss(ids)) for ids in (a, b)]
    losses = [engine.loss(ids) for ids in (a, b)]
    for loss, one in zip(losses, expected, strict=True):
        assert_same_gradients(backward_gradients(model, loss), one, 1e-12)


def test_evaluation_selects_like_training() -> None:
    model, ids = build("llama"), random_ids(2, 90)
    engine = sparse_engine(model, 2)
    with torch.no_grad():
        scored = engine.logprobs(ids)
    torch.testing.assert_close(scored, engine.logprobs(ids).detach(), rtol=0, atol=0)


def test_the_first_page_is_always_selected(selections: Selections) -> None:
    sparse_engine(build("llama"), 2).loss(random_ids(1, 101))
    assert all((selection == 0).any(-1).all() for selection in selections.values())
    selections.clear()
    sparse_engine(build("llama"), 2, page_rule="paper").loss(random_ids(1, 101))
    assert not all((selection == 0).any(-1).all() for selection in selections.values())


@pytest.mark.parametrize("budget", [0, -1, True, "8", 2.5])
def test_a_budget_is_a_number_of_pages(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"page_budget is .* it must be a number of pages, 1 or more, or None"):
        oomb.Config(page_budget=budget)


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="chunk_size=1024"):
        oomb.Config(page_budget=8, chunk_size=1000)


def test_tables_that_do_not_fit_raise_out_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    engine = sparse_engine(model, 2)

    def refuse(shape: Any, dtype: Any) -> Tensor:
        raise oomb.OutOfPages("no room for tables")

    monkeypatch.setattr(engine.allocator.tiers, "table", refuse)
    with pytest.raises(oomb.OutOfPages, match="no room for tables"):
        engine.loss(random_ids(1, 90))
    monkeypatch.undo()
    tiers = engine.allocator.tiers
    assert not tiers.used_bytes("gpu") and not tiers.used_bytes("host") and not any(tiers.promised.values())


@pytest.mark.parametrize("kind", ["kv", "grad"])
def test_flags_are_integers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page means may be 8-bit floats, which kernels cannot compare."""
    flags = []
    past = SparseLayerPast.pages

    def spy(self: SparseLayerPast) -> Any:
        flags.append(self.selected.io._flags(kind, self.layer)[0])
        return past(self)

    monkeypatch.setattr(SparseLayerPast, "pages", spy)
    sparse_engine(build("llama"), 2).loss(random_ids(1, 90)).backward()
    assert flags and not any(x.is_floating_point() for x in flags)
