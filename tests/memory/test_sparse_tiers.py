"""Check that placement and saved outputs do not change a single bit of training with selected pages."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from checks import engine_for
from families import build, random_ids
from tier_steps import Step, assert_equal, train

pytest.importorskip("triton")

from followed import follow, memory_for

from oomb.attention import sparse
from oomb.memory.store import PageStore
from oomb.planner import placement as placement_module

LENGTH = 90
SIZES = {
    8: {"chunk_size": 16, "page_size": 8, "page_budget": 4},
    16: {"chunk_size": 16, "page_size": 16, "page_budget": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen2_sliding": {
        "num_hidden_layers": 2,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""All layers are sparse, or one of two; the other has a window longer than a chunk."""
PLACES: dict[str, tuple[int | None, int | None]] = {
    "host": (0, 0),
    "K and V split": (3, 0),
    "gradients on the host": (None, 0),
    "gradients split": (None, 3),
    "gpu": (None, None),
}
"""Pages of K and V, and of their gradients, on the GPU. Three pages of 8 end inside a chunk."""
WAYS = ("copied", "followed")
"""Pages copied one by one as on a CPU, or kernels that take one pointer per page as on a GPU."""
KEPT = list(itertools.product((False, True), (False, True)))
"""keep_attention, checkpoint_layers."""
SETTINGS = [
    # Every placement meets both page sizes and both ways to move pages.
    (WAYS[(row + column) % 2], place, page_size, *KEPT[(row + 2 * column) % 4])
    for row, place in enumerate(PLACES)
    for column, page_size in enumerate(SIZES)
]
NAMES = ("way", "place", "page_size", "keep_attention", "checkpoint_layers")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "TILE_SIZE", 8)


@functools.lru_cache
def tiny(family: str, dtype: torch.dtype) -> Any:
    return build(family, dtype=dtype, **FAMILIES[family])


def trained(model: Any, place: str, sizes: dict[str, Any], length: int = LENGTH, **config: Any) -> list[Step]:
    """Train three steps with this many pages on the GPU."""
    model, pages = copy.deepcopy(model), PLACES[place]
    memory: int | str = memory_for(model, length, *pages, **sizes, **config)
    if config["keep_attention"] and place == "gpu":
        memory = "1GiB"
    # Plain PyTorch computes the chunk's own attention, because cuDNN's dq is not deterministic.
    engine = engine_for(model, kernels="torch", fuse="off", gpu_memory=memory, **sizes, **config)
    placement = engine.reserve(1, length)
    for tokens, count in zip((placement.gpu_tokens, placement.gpu_grad_tokens), pages, strict=True):
        assert tokens == (placement.capacity if count is None else count * sizes["page_size"])
    steps = train(model, engine, length=length)
    assert (engine.stats.loaded_bytes > 0) is (engine.stats.stored_bytes > 0) is (place != "gpu")
    return steps


@functools.lru_cache
def trajectory(family: str, dtype: torch.dtype, page_size: int) -> list[Step]:
    """Train with all pages on the model's device, no saved outputs and no kernels: the reference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_module, "TILE_SIZE", 8)
        return trained(tiny(family, dtype), "gpu", SIZES[page_size], keep_attention=False, checkpoint_layers=False)


def check(family: str, dtype: torch.dtype, way: str, place: str, page_size: int, **config: Any) -> None:
    expected = trajectory(family, dtype, page_size)
    with pytest.MonkeyPatch.context() as patch:
        if way == "followed":
            follow(patch)
        assert_equal(trained(tiny(family, dtype), place, SIZES[page_size], **config), expected)


@pytest.mark.parametrize(
    ("family", *NAMES), [("llama", *case) for case in SETTINGS] + [("qwen2_sliding", *case) for case in SETTINGS[1::2]]
)
def test_one_trajectory(
    family: str, way: str, place: str, page_size: int, keep_attention: bool, checkpoint_layers: bool
) -> None:
    kept = {"keep_attention": keep_attention, "checkpoint_layers": checkpoint_layers}
    check(family, torch.float64, way, place, page_size, **kept)


@pytest.mark.parametrize(NAMES, SETTINGS[::2])
def test_rounding_does_not_depend_on_the_placement(
    way: str, place: str, page_size: int, keep_attention: bool, checkpoint_layers: bool
) -> None:
    """bfloat16 gradients are rounded stochastically with seeds from the pages, not from the placement."""
    kept = {"keep_attention": keep_attention, "checkpoint_layers": checkpoint_layers}
    check("llama", torch.bfloat16, way, place, page_size, **kept)


def test_rounding_is_stochastic() -> None:
    """Otherwise the test above would pass for gradients that are never rounded."""
    wide = trained(
        tiny("llama", torch.bfloat16),
        "gpu",
        SIZES[8],
        keep_attention=False,
        checkpoint_layers=False,
        grad_dtype="float32",
    )
    with pytest.raises(AssertionError):
        assert_equal(wide, trajectory("llama", torch.bfloat16, 8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["evaluated", "dropped", "backward done"])
def test_pages_are_freed_without_the_garbage_collector(what: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables are freed by the gradient pass, even if the loss is still referenced."""
    if way == "followed":
        follow(monkeypatch)
    engine = engine_for(tiny("llama", torch.float64), gpu_memory=0, **SIZES[8])

    def stores() -> list[PageStore]:
        return [x for x in gc.get_objects() if type(x) is PageStore and x.tiers is engine.allocator.tiers]

    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(what != "evaluated"):
            loss = engine.loss(random_ids(1, LENGTH))
        if what == "backward done":
            loss.backward()
            (store,) = stores()
            assert store.selected is not None and not any(
                (
                    store.selected.selections.page_means,
                    store.selected.selections.touched,
                    store.selected.selections.tables,
                    store.selected.io._addresses,
                )
            )
            del store
        del loss
        assert not stores()
    finally:
        gc.enable()
        engine.model.lm.zero_grad()


GPU_LENGTH = 600
GPU_SIZES: dict[str, Any] = {"chunk_size": 64, "page_size": 16, "page_budget": 4}


@pytest.mark.gpu
@pytest.mark.parametrize(("keep_attention", "checkpoint_layers"), KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_trajectory_on_a_gpu(
    dtype: torch.dtype, keep_attention: bool, checkpoint_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from large_models import wide_llama

    monkeypatch.setattr(placement_module, "TILE_SIZE", 32)
    # Selected pages still use the kernels.
    monkeypatch.setattr(sparse, "_uses_kernels", lambda q, spec: True)
    model = wide_llama().to(dtype)
    config: dict[str, Any] = {
        "grad_dtype": "bfloat16", "keep_attention": keep_attention, "checkpoint_layers": checkpoint_layers
    }  # fmt: skip
    expected = trained(model, "gpu", GPU_SIZES, GPU_LENGTH, **config)
    assert_equal(trained(model, "gpu", GPU_SIZES, GPU_LENGTH, **config), expected, "it does not even repeat itself")
    for place in PLACES:
        assert_equal(trained(model, place, GPU_SIZES, GPU_LENGTH, **config), expected, place)
