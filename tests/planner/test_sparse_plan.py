"""Placement of selected pages, and that their tables and buffers are as large as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import build, random_ids
from plans import MIB, TINY, ask

import oomb
from oomb.config import Config
from oomb.engine.batch import Batch
from oomb.engine.head import TokenHead
from oomb.engine.passes import ChunkedForward
from oomb.memory.pool import GPU
from oomb.memory.rows import row_bytes
from oomb.planner.forecast import forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.placement import selection_spec
from oomb.planner.plan import shape_for
from oomb.utils.units import GIB

SPARSE = {"chunk_size": 256, "page_size": 64, "page_budget": 3}


def test_with_a_page_budget_k_and_v_go_to_the_gpu_first() -> None:
    kv = row_bytes(64, 64) + row_bytes(64, 32)
    whole = ask(config=Config(**SPARSE), length=100_000)
    tables = next(term.num_bytes for term in whole.terms if term.name == "page summaries and choices")
    some = ask(config=Config(**SPARSE, gpu_memory=tables + 300 * 64 * kv), length=100_000)
    assert (some.gpu_tokens, some.gpu_grad_tokens) == (300 * 64, 0)
    all_kv = whole.capacity * kv
    more = ask(config=Config(**SPARSE, gpu_memory=tables + all_kv + 50 * 64 * kv), length=100_000)
    assert (more.gpu_tokens, more.gpu_grad_tokens) == (more.capacity, 50 * 64)
    # K and V that are all on the GPU need no buffers.
    assert more.fixed_bytes < some.fixed_bytes


@pytest.mark.parametrize("gpu_memory", [0, 60_000, "1GiB"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tables_and_buffers_are_as_large_as_planned(family: str, dtype: str, gpu_memory: int | str) -> None:
    """Compare those of a real store with the terms of its placement."""
    model = build(family, dtype=torch.float32)
    settings = {"chunk_size": 16, "page_size": 8, "page_budget": 2, "gpu_memory": gpu_memory, "fuse": "off"}
    settings |= {"kv_dtype": dtype, "grad_dtype": dtype}
    engine = oomb.Engine(model, Config(**settings))
    placement = engine.reserve(2, 120)
    batch = Batch(ids=random_ids(2, 120), targets=random_ids(2, 120))
    sequence = ChunkedForward(engine, batch, TokenHead(engine.model), needs_grad=True, state=engine.model.state())
    sequence.allocate()
    try:
        assert sequence.store is not None and sequence.store.selected is not None
        selections = sequence.store.selected.selections
        tables = [*selections.page_means.values(), *selections.touched.values(), *selections.tables.values()]
        planned = {term.name: term.num_bytes for term in placement.terms if term.tier == GPU}
        addresses = 32 * selections.pages.num_pages * len(selections.layers)
        assert sum(x.nbytes for x in tables) + addresses == planned["page summaries and choices"]
        rings = sum(ring.num_bytes for ring in engine.allocator.tiers.rings.values())
        on_gpu = gpu_memory == "1GiB" and dtype == "auto"
        assert rings == planned.get("staging buffers", 0) or (on_gpu and "staging buffers" not in planned)
    finally:
        sequence.close()


MEASURED = {49_152: (6.47, 74.91), 65_536: (9.11, 79.76)}
"""Seconds and GiB of steps of Qwen2.5-7B on one H200, chunks of 4096, 64 pages of 128, outputs kept."""


@pytest.mark.parametrize("context", MEASURED)
def test_a_sparse_step_matches_the_measurement(context: int) -> None:
    machine = Machine(gpu_bytes=int(139.8 * GIB), host_bytes=100 * GIB, gpu_name="NVIDIA H200")
    plan = forecast_step(shape_for("qwen2.5-7b"), Config(page_budget=64), machine, length=context, optimizer="none")
    seconds, gib = MEASURED[context]
    assert plan.seconds == pytest.approx(seconds, rel=0.06)
    assert plan.peak_gpu_bytes == pytest.approx(gib * GIB, rel=0.01)


def test_time_per_token_hardly_grows_with_a_page_budget() -> None:
    machine = Machine(gpu_bytes=int(139.8 * GIB), host_bytes=300 * GIB, gpu_name="NVIDIA H200")
    facts = shape_for("qwen2.5-7b")

    def per_token(context: int, budget: int | None) -> float:
        config = Config(page_budget=budget, keep_attention=False)
        seconds = forecast_step(facts, config, machine, length=context, optimizer="none").seconds
        assert seconds is not None
        return seconds / context

    assert per_token(1 << 20, 64) < 1.15 * per_token(1 << 17, 64)
    assert per_token(1 << 20, None) > 4 * per_token(1 << 17, None)


def test_8_bit_pages_are_suggested_if_nothing_cheaper_helps() -> None:
    """LoRA, chunks that cannot be smaller, and no GPU memory left for pages."""
    lean = {"shape": replace(TINY, has_adapters=True), "length": 100_000, "float32_sums": False}
    settings = {**SPARSE, "checkpoint_layers": True, "keep_attention": False}
    needed = ask(**lean, config=Config(**settings, gpu_memory=0))
    pages = sum(term.num_bytes for term in needed.terms if "pages of" in term.name)
    tight = needed.fixed_bytes + needed.gpu_bytes + MIB
    lean["config"] = Config(**settings)
    with pytest.raises(oomb.OutOfPages, match='It fits with grad_dtype="int8", or with') as error:
        ask(**lean, free_gpu_bytes=tight, free_host_bytes=int(pages / 0.9 * 0.8))
    assert 'kv_dtype="int8"' not in str(error.value)
    with pytest.raises(oomb.OutOfPages, match='grad_dtype="int8" and kv_dtype="int8" together'):
        ask(**lean, free_gpu_bytes=tight, free_host_bytes=int(pages / 0.9 * 0.65))


@pytest.mark.parametrize("gpu, itemsize", [("H200", 1), ("A100-80GB", 2)])
def test_page_means_are_float8_only_on_gpus_that_have_it(gpu: str, itemsize: int) -> None:
    """As the engine stores them, which asks the GPU for its compute capability."""
    forecast = forecast_step(
        shape_for("qwen2.5-7b"), Config(page_budget=64), machine_named(gpu, 64 * GIB), length=65536
    )
    spec = selection_spec(forecast.config, forecast.request.shape.layers, forecast.request.has_float8)
    assert spec is not None and spec.means_dtype.itemsize == itemsize
