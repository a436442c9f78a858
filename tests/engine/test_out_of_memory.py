"""Too little memory raises OutOfPages with the numbers before any work, and leaves nothing allocated."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import engine_for
from families import build, random_ids

import oomb
from oomb.memory import host
from oomb.memory import tiers as tiers_module
from oomb.memory.page_access import PageAccess
from oomb.memory.pool import OutOfPages

ROOT = Path(__file__).parents[2]
NUMBERS = r"(?s)\d[\d.]* [KMG]?i?B.*\d[\d.]* [KMG]?i?B"


def nothing_is_held(engine: oomb.Engine) -> bool:
    tiers = engine.allocator.tiers
    return not any((tiers.used_bytes("gpu"), tiers.used_bytes("host"), *tiers.promised.values()))


def test_memory_gone_since_the_plan_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Touching it would make the system kill the process."""
    left = iter([3000, 2000, 999])
    monkeypatch.setattr(host, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(host, "free_host_bytes", lambda: next(left))
    memory = torch.full((2500,), 7, dtype=torch.uint8)
    host.touch(memory)
    assert not memory.any(), "the last piece takes 500"
    left = iter([3000, 999])
    memory = torch.full((2500,), 7, dtype=torch.uint8)
    with pytest.raises(OutOfPages, match="host_memory"):
        host.touch(memory)
    assert not memory[:1000].any() and memory[1000:].all()


@pytest.mark.parametrize("limits", [{"gpu_memory": 0, "host_memory": 0}, {"gpu_memory": "100B", "host_memory": "1KiB"}])
def test_limits_that_are_too_small(limits: dict[str, Any], model: Any) -> None:
    engine = engine_for(model, **limits)
    for _ in range(2):
        with pytest.raises(OutOfPages, match=NUMBERS) as caught:
            engine.loss(random_ids(1, 60))
        assert "host_memory" in str(caught.value) or "gpu_memory" in str(caught.value)
        assert nothing_is_held(engine) and not engine.allocator.tiers.arenas
    engine.loss(random_ids(1, 7)).backward()  # one chunk needs no pages


@pytest.mark.parametrize("how", ["the system refuses", "pinning fails"])
def test_host_memory_that_cannot_be_allocated(how: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int, device: torch.device) -> None:
        raise OutOfPages(f"{num_bytes / 2**30:.1f} GiB of host memory could not be pinned: lower host_memory")

    engine = engine_for(model, gpu_memory=0)
    with monkeypatch.context() as patch:
        if how == "pinning fails":
            patch.setattr(tiers_module, "HostSlab", refuse)
        else:
            patch.setattr(host.mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError("Cannot allocate memory")))
        with pytest.raises(OutOfPages, match="host_memory"):
            engine.loss(random_ids(1, 60))
        assert nothing_is_held(engine) and not engine.allocator.tiers.arenas
    engine.loss(random_ids(1, 60)).backward()
    assert nothing_is_held(engine)


def test_memory_gone_since_the_last_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second step that cannot get the first one's slabs is placed again."""
    engine = engine_for(model)
    ids = random_ids(1, 60)
    engine.loss(ids).backward()
    assert engine.stats.gpu_peak_bytes and not engine.stats.host_peak_bytes
    engine.allocator.tiers.arenas.clear()
    placed = []
    place = engine.allocator._place
    monkeypatch.setattr(engine.allocator, "_place", lambda *args: placed.append(1) or place(*args))
    take, refusals = engine.allocator.tiers.allocate, [1]

    def refuse_once(num_bytes: int, purpose: str) -> torch.Tensor:
        if refusals:
            refusals.pop()
            raise OutOfPages("gone")
        return take(num_bytes, purpose)

    monkeypatch.setattr(engine.allocator.tiers, "allocate", refuse_once)
    engine.loss(ids).backward()
    assert placed == [1] and nothing_is_held(engine)


@pytest.mark.parametrize("set_by_user", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_configured_the_allocator(
    set_by_user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(set_by_user, "max_split_size_mb:512")
    host.use_expandable_segments(torch.device("cpu"))
    assert not settings
    host.use_expandable_segments(torch.device("cuda"))
    assert settings == ([] if set_by_user else ["expandable_segments:True"])


@pytest.fixture
def taken_gpu() -> Iterator[int]:
    """Have another process take all but about 4 GiB of the GPU's memory; yield what is free."""
    code = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - (4 << 30), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""
    torch.cuda.empty_cache()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    yield torch.cuda.mem_get_info()[0]
    process.communicate()


@pytest.mark.timing
@pytest.mark.gpu
def test_gpu_taken_by_another_process(taken_gpu: int) -> None:
    from large_models import wide_llama

    assert taken_gpu < 8 << 30
    model = wide_llama(num_hidden_layers=32).bfloat16()
    ids = random_ids(1, 1 << 19)  # 32 layers x 2 heads x 64 x (K, V, gradients) x bfloat16: 16 GiB
    gc.collect()
    torch.cuda.empty_cache()
    # cuBLAS allocates a workspace of 32 MiB at its first product and keeps it.
    square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    torch.mm(square, square)
    before = torch.cuda.memory_allocated()
    engine = oomb.Engine(model, oomb.Config(chunk_size=4096, fuse="off", host_memory=0, keep_attention=False))
    with pytest.raises(OutOfPages, match=NUMBERS):
        engine.loss(ids)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 24
    # With host memory it fits.
    placement = oomb.Engine(model, oomb.Config(chunk_size=4096, fuse="off", keep_attention=False)).reserve(1, 1 << 19)
    assert placement.host_bytes > 8 << 30


@pytest.mark.gpu
def test_failed_pinning_raises_and_leaves_nothing() -> None:
    """CUDA refuses to pin memory twice."""
    memory, device = torch.empty(1 << 24, dtype=torch.uint8), torch.device("cuda", 0)
    host.pin(memory, device)
    try:
        with pytest.raises(OutOfPages, match="cannot pin"):
            host.pin(memory, device)
        torch.cuda.synchronize()
        torch.ones(3, device="cuda").sum().item()
    finally:
        host.unpin(memory, device)


@pytest.mark.gpu
def test_process_limited_to_a_share_of_the_gpu_uses_the_host() -> None:
    from large_models import wide_llama

    model = wide_llama(num_hidden_layers=8).bfloat16()
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (1 << 30)) / total)
    try:
        engine = oomb.Engine(model, oomb.Config(chunk_size=1024, fuse="off"))
        engine.loss(random_ids(1, 200_000)).backward()  # 1.5 GiB of pages
        assert engine.stats.host_peak_bytes > 0 and nothing_is_held(engine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("failing", ["fill", "gradient"])
@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_step_that_fails_halfway_frees_its_pages(family: str, failing: str) -> None:
    model = build(family)
    engine = engine_for(model, gpu_memory=0)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == failing and done == 2:
            raise KeyboardInterrupt

    engine.progress = stop
    with pytest.raises(KeyboardInterrupt):
        engine.loss(random_ids(1, 60)).backward()
    assert nothing_is_held(engine)


@pytest.mark.parametrize("gpu_memory", [0, "auto"])
def test_memory_allocated_in_inference_mode_works_for_training(model: Any, gpu_memory: Any) -> None:
    engine, ids = engine_for(model, gpu_memory=gpu_memory), random_ids(1, 60)
    with torch.inference_mode():
        engine.logprobs(ids)
    engine.loss(ids).backward()
    with torch.inference_mode():
        engine.logprobs(random_ids(1, 120))
    engine.loss(random_ids(1, 120)).backward()


def test_interrupt_loses_no_buffer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = engine_for(model, gpu_memory=0), random_ids(1, 60)
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(PageAccess, "store", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.loss(ids)
    engine.loss(ids).backward()
    assert nothing_is_held(engine)


def test_optimizer_has_stepped(model: Any) -> None:
    engine, optimizer = engine_for(model), torch.optim.AdamW(model.parameters())
    for length in (30, 40):
        engine.loss(random_ids(1, length)).backward()
        assert not engine.allocator.optimizer_has_stepped
    optimizer.step()
    assert engine.allocator.optimizer_has_stepped


def test_reserve_leaves_no_trace(model: Any) -> None:
    engine = engine_for(model.train(), gpu_memory=0)
    state = torch.get_rng_state()
    placement = engine.reserve(2, 60)
    assert torch.equal(torch.get_rng_state(), state) and nothing_is_held(engine)
    assert placement.host_bytes == sum(arena.num_bytes for arena in engine.allocator.tiers.arenas.values())
    engine.release()
    assert not engine.allocator.tiers.arenas
    for wrong in ((0, 10), (1, 0), (1, 2.5), (-1, 5), (True, 5)):
        with pytest.raises(ValueError, match="1 or more"):
            engine.reserve(*wrong)


def test_autocast_is_planned_for(model: Any) -> None:
    """The plan counts bfloat16 K and V for float32 weights."""
    engine = engine_for(model.float(), gpu_memory=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        placement = engine.reserve(1, 60)
        engine.loss(random_ids(1, 60)).backward()
    assert placement.host_bytes == engine.stats.host_peak_bytes
