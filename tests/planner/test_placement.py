"""Placements add up, never exceed a limit, and are what the engine then takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import build
from hypothesis import given
from plans import MIB, ask, bytes_of, requests

from oomb.config import Config
from oomb.memory.pool import GPU, HOST, OutOfPages
from oomb.memory.rows import row_bytes, staging_bytes
from oomb.planner.placement import place
from oomb.planner.request import PlacementRequest


@given(requests)
def test_every_token_has_a_tier_and_every_byte_a_term(request: PlacementRequest) -> None:
    placement, shortfall = place(request)
    config, capacity = request.config, request.capacity
    page = config.page_size
    assert capacity % config.chunk_size == 0 and 0 < request.length - capacity <= config.chunk_size
    assert placement.gpu_tokens + placement.host_tokens == placement.capacity == capacity
    assert placement.gpu_tokens % page == 0 or placement.gpu_tokens == capacity
    assert placement.gpu_out_tokens in (0, placement.out_tokens) and 0 <= placement.out_tokens <= capacity
    assert placement.out_tokens % config.chunk_size == 0 and placement.keep_attention == (placement.out_tokens > 0)
    assert placement.out_tokens == capacity or config.keep_attention is not True or not request.needs_grad
    assert placement.gpu_bytes + placement.fixed_bytes == bytes_of(placement, GPU)
    assert placement.host_bytes == bytes_of(placement, HOST)
    assert all(term.num_bytes > 0 for term in placement.terms)
    rows = request.rows
    pages = -(-capacity // page) * page * sum(kv + grad for kv, grad, _ in rows)
    pages_kept = -(-capacity // page) - (capacity - placement.out_tokens) // page if placement.keep_attention else 0
    outs = pages_kept * page * sum(out for _, _, out in rows)
    assert placement.gpu_bytes + placement.host_bytes == pages + outs
    # There are staging buffers if and only if something is on the host.
    assert any(term.name == "staging buffers" for term in placement.terms) == (placement.host_bytes > 0)
    if shortfall is None:
        assert bytes_of(placement, GPU) <= (float("inf") if request.free_gpu_bytes is None else request.free_gpu_bytes)
        assert placement.host_bytes <= request.free_host_bytes
        if request.free_gpu_bytes is None:
            assert placement.gpu_bytes + placement.host_bytes <= 0.9 * request.free_host_bytes
        if config.gpu_memory != "auto":
            assert placement.gpu_bytes <= int(config.gpu_memory)
        if config.host_memory != "auto":
            assert placement.host_bytes <= int(config.host_memory)
    if config.keep_attention == "auto" and placement.keep_attention and request.free_gpu_bytes is not None:
        assert placement.host_bytes <= 0.75 * request.free_host_bytes or config.host_memory != "auto"


def test_pages_fill_the_gpu_first_and_then_the_host() -> None:
    rows = [row_bytes(64, 64) * 2, (row_bytes(64, 32)) * 2]
    needed = ask(free_gpu_bytes=None, length=257).fixed_bytes
    budget = 300 * 64 * sum(rows)
    placement = ask(config=Config(chunk_size=256, page_size=64, gpu_memory=budget), length=100_000)
    assert placement.gpu_tokens == 300 * 64 and placement.host_tokens == placement.capacity - 300 * 64
    assert placement.gpu_bytes == budget
    staging = staging_bytes([(128, 128, 128 + 16)], [], chunk_size=256, keeps=True, needs_grad=True)
    assert placement.fixed_bytes == needed + staging
    assert placement.keep_attention and placement.gpu_out_tokens == 0


def test_auto_uses_what_is_left() -> None:
    roomy = ask()
    assert roomy.host_bytes == 0 and roomy.keep_attention and roomy.keep_last_chunk and not roomy.checkpoint_layers
    assert roomy.gpu_out_tokens == roomy.gpu_tokens == roomy.capacity == 4096 - 256
    # Too little for activations next to gradients: layers are checkpointed, and the last chunk's graph is not kept.
    whole = ask(length=512).fixed_bytes
    tight = ask(length=512, free_gpu_bytes=int(whole / 0.9) - 1000)
    assert tight.checkpoint_layers and not tight.keep_last_chunk and tight.fixed_bytes < whole
    # Optimizer states that follow the first step count too.
    assert not ask(length=512, free_gpu_bytes=int(whole / 0.9) + MIB).checkpoint_layers
    assert ask(length=256, free_gpu_bytes=int(whole / 0.9) + MIB, optimizer_bytes=2 * MIB).checkpoint_layers
    # Outputs are kept on the GPU if all fit, otherwise on the host up to three quarters of it: all, some or none.
    one_gib = Config(chunk_size=256, page_size=64, gpu_memory=0)
    outs = bytes_of(ask(config=one_gib), HOST)
    assert ask(config=one_gib, free_host_bytes=int(outs / 0.74)).out_tokens == roomy.capacity
    some = ask(config=one_gib, free_host_bytes=int(outs / 0.76))
    assert 0 < some.out_tokens < roomy.capacity and some.gpu_out_tokens == 0
    assert 0.7 * outs < some.host_bytes <= 0.75 * outs / 0.76
    # Next to other batches it is all or none, so that they find room too.
    assert ask(config=one_gib, free_host_bytes=int(outs / 0.74), is_exclusive=False).out_tokens == roomy.capacity
    assert not ask(config=one_gib, free_host_bytes=int(outs / 0.76), is_exclusive=False).keep_attention
    # If the host has no room, the GPU may have some for all pages and the last outputs.
    whole, none = (ask(config=Config(chunk_size=256, page_size=64, keep_attention=k)) for k in (True, False))
    halfway = (whole.gpu_bytes + none.gpu_bytes) / 2
    near = ask(free_gpu_bytes=none.fixed_bytes + int(halfway / 0.9), free_host_bytes=0)
    assert 0.4 < near.out_tokens / near.capacity < 0.5 and near.gpu_out_tokens == near.out_tokens
    pages = bytes_of(ask(config=replace(one_gib, keep_attention=False)), HOST)
    assert not ask(config=one_gib, free_host_bytes=int(pages / 0.7)).keep_attention, "too few to be worth it"
    assert not ask(needs_grad=False).keep_attention and not ask(length=256).keep_attention
    with pytest.raises(OutOfPages):
        ask(config=replace(one_gib, keep_attention=True), free_host_bytes=int(outs / 0.91))
    # A CPU has one memory.
    on_cpu = ask(free_gpu_bytes=None)
    assert on_cpu.gpu_tokens == on_cpu.capacity and not on_cpu.checkpoint_layers
    kept = next(term.num_bytes for term in on_cpu.terms if term.name == "kept attention outputs")
    assert ask(free_gpu_bytes=None, free_host_bytes=4 * kept).keep_attention
    assert not ask(free_gpu_bytes=None, free_host_bytes=4 * kept - 4).keep_attention


@given(requests)
def test_auto_never_refuses_what_checkpointed_layers_would_fit(request: PlacementRequest) -> None:
    auto, lean = (replace(request, config=replace(request.config, checkpoint_layers=x)) for x in ("auto", True))
    assert place(lean)[1] is not None or place(auto)[1] is None


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("gpu_tokens", [0, 40, 1000])
def test_the_engine_takes_what_was_planned(gpu_tokens: int, kept: bool) -> None:
    from oomb.engine.engine import Engine

    model = build("llama", dtype=torch.float32)
    row = 3 * 2 * 2 * row_bytes(2 * 2 * 8 * 4)
    config = Config(chunk_size=16, page_size=8, gpu_memory=gpu_tokens * row, keep_attention=kept)
    engine = Engine(model, config)
    placement = engine.reserve(2, 100)
    assert placement.capacity == 96 and placement.gpu_tokens == min(96, gpu_tokens)
    engine.reset_stats()
    engine.loss(torch.randint(3, 90, (2, 100))).backward()
    assert (engine.stats.gpu_peak_bytes, engine.stats.host_peak_bytes) == (placement.gpu_bytes, placement.host_bytes)
    assert (placement.host_bytes > 0) == (gpu_tokens < 96 or (kept and placement.gpu_out_tokens == 0))
