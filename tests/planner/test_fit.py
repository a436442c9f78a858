"""What fits, the message of `OutOfPages`, and the smallest change of settings that helps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import DEFAULTS, MIB, TINY, ask, bytes_of, requests, with_dtype

from oomb.config import Config
from oomb.memory.pool import HOST, OutOfPages
from oomb.planner import fit
from oomb.planner.fit import longest_context
from oomb.planner.placement import place
from oomb.planner.request import Limit, PlacementRequest, Shortfall
from oomb.utils import units
from oomb.utils.units import GIB, parse_bytes


def message(**changes: Any) -> str:
    with pytest.raises(OutOfPages) as caught:
        ask(**changes)
    return str(caught.value)


def test_the_message_has_the_numbers_and_the_remedy() -> None:
    long = {"length": 1_000_000, "free_gpu_bytes": 100 * MIB}
    text = message(**long, free_host_bytes=450 * MIB, config=Config(chunk_size=256, host_memory="10MiB"))
    assert "1,000,000 tokens do not fit" in text and "only 10.0 MiB are available" in text
    assert text.endswith('It fits with host_memory="auto" (0.44 GiB are free).')
    longest = int(re.findall(r"longest context that fits is ([\d,]+) tokens", text)[0].replace(",", ""))
    config = Config(chunk_size=256, host_memory="10MiB")
    assert ask(**{**long, "length": longest}, free_host_bytes=450 * MIB, config=config).capacity == longest - 256
    message(**{**long, "length": longest + 1}, free_host_bytes=450 * MIB, config=config)

    def remedy(**changes: Any) -> str:
        return re.findall(
            r"It fits with (.*?)(?:, or with [\d.]+ [GM]iB of free (?:host )?memory)?\.$", message(**changes)
        )[0]

    assert (
        remedy(**long, free_host_bytes=450 * MIB, config=Config(chunk_size=256, keep_attention=True))
        == "keep_attention=False"
    )
    whole = ask(config=Config(chunk_size=2048, keep_attention=False), length=2048).fixed_bytes
    plain = {"length": 2048, "free_gpu_bytes": whole - MIB}
    config = Config(chunk_size=2048, checkpoint_layers=False)
    assert remedy(**plain, config=config) == "checkpoint_layers=True"
    checkpointed = Config(chunk_size=2048, checkpoint_layers=True)
    needed = ask(config=checkpointed, length=2048).fixed_bytes
    assert remedy(length=2048, free_gpu_bytes=needed - MIB // 4, config=checkpointed) == "chunk_size=1024"
    small = Config(chunk_size=512, checkpoint_layers=True)
    assert remedy(length=512, free_gpu_bytes=8 * MIB, config=small) == 'param_grad_dtype="param"'
    assert remedy(length=512, free_gpu_bytes=3 * MIB, config=small) == "LoRA (a PEFT model; --lora for plan and bench)"
    adapted = with_dtype(replace(TINY, has_adapters=True), torch.float32)
    tight = {"shape": adapted, "length": 100_000, "config": Config(chunk_size=512, gpu_memory=0, keep_attention=False)}
    sizes, needed = bytes_of(ask(**tight), HOST), ask(**tight).fixed_bytes
    # No page fits on the GPU in either case.
    tight |= {"config": Config(chunk_size=512, checkpoint_layers=True), "free_gpu_bytes": needed + MIB}
    assert remedy(**tight, free_host_bytes=int(sizes / 0.9 * 0.8)) == 'grad_dtype="bfloat16"'
    assert remedy(**tight, free_host_bytes=int(sizes * 0.4)).endswith('kv_dtype="bfloat16" together')
    nothing = message(
        shape=with_dtype(adapted, torch.bfloat16), free_gpu_bytes=100 * MIB, free_host_bytes=0, length=10**8
    )
    assert "No setting makes 100,000,000 tokens fit here." in nothing
    assert "a larger GPU" in message(shape=adapted, free_gpu_bytes=MIB, length=512)
    assert "parameter gradients 8.0 MiB, activations of a chunk" in message(free_gpu_bytes=MIB, length=512)


def test_the_message_says_how_much_host_memory_is_enough() -> None:
    given = {"length": 10**6, "free_gpu_bytes": 100 * MIB, "shape": replace(TINY, has_adapters=True)}
    text = message(**given, free_host_bytes=100 * MIB)
    assert "No setting makes 1,000,000 tokens fit here. It fits with" in text
    size, unit = re.findall(r"It fits with ([\d.]+) ([GM])iB of free host memory", text)[0]
    assert ask(**given, free_host_bytes=int(float(size) * (GIB if unit == "G" else MIB)))
    # A CPU has one memory, and GPU settings do not apply.
    text = message(free_gpu_bytes=None, length=10**6, free_host_bytes=100 * MIB, config=Config(gpu_memory=MIB))
    assert "1,000,000 tokens do not fit on the CPU" in text and "90.0 MiB are available, 90% of what is free" in text
    assert "of free memory" in text and "GPU" not in text and "gpu_memory" not in text and "LoRA" not in text


@settings(max_examples=40)
@given(requests, st.integers(0, 64 * MIB), st.integers(0, 64 * MIB))
def test_the_longest_context_is_maximal_and_never_shrinks_with_memory(
    request: PlacementRequest, more_gpu: int, more_host: int
) -> None:
    longest = longest_context(request)
    chunk = request.config.chunk_size
    if longest is None:
        assert place(request)[1] is None
        return
    assert longest % chunk == 0 or longest < chunk
    assert longest >= request.length or place(request)[1] is not None
    assert longest == 0 or place(replace(request, length=longest))[1] is None
    assert place(replace(request, length=longest + chunk))[1] is not None
    before = longest
    free_gpu_bytes = None if request.free_gpu_bytes is None else request.free_gpu_bytes + more_gpu
    after = longest_context(
        replace(request, free_gpu_bytes=free_gpu_bytes, free_host_bytes=request.free_host_bytes + more_host)
    )
    assert after is None or after >= before


@settings(max_examples=60)
@given(requests)
def test_remedies_change_no_more_than_needed(request: PlacementRequest) -> None:
    """No change can be left out or replaced by a cheaper one."""

    def fits(chosen: dict[str, Any]) -> bool:
        return place(fit.apply_changes(request, chosen))[1] is None

    options = fit.engine_options(request)
    chosen = fit.minimal_changes(options, fits)
    if chosen is None:
        assert not any(fits(some) for some in fit.all_savings(options))
        return
    assert fits(chosen) and (chosen == {}) == (place(request)[1] is None)
    for setting in chosen:
        variants = [option.value for option in sorted(options, key=lambda o: o.cost) if option.setting == setting]
        cheaper = variants[: variants.index(chosen[setting])]
        assert not any(fits({**chosen, setting: value}) for value in cheaper)
        assert not fits({name: value for name, value in chosen.items() if name != setting})


def test_the_cheapest_changes_are_chosen() -> None:
    """A toy problem: what each change saves, and how much has to be saved."""
    costs = fit.ChangeCost
    saved = {("a", 1): 1, ("b", 1): 2, ("c", 1): 2, ("c", 2): 4, ("d", 1): 8}
    kinds = [costs.NONE, costs.TIME, costs.CHUNKS, costs.ROUNDING, costs.EIGHT_BITS]
    options = [fit.Change(*key, cost) for key, cost in zip(saved, kinds, strict=True)]

    def chosen(needed: int, options: list[fit.Change] = options) -> dict[str, Any] | None:
        return fit.minimal_changes(options, lambda some: sum(saved[item] for item in some.items()) >= needed)

    found = {needed: chosen(needed) for needed in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16)}
    assert found == {
        0: {}, 1: {"a": 1}, 2: {"b": 1}, 3: {"a": 1, "b": 1}, 4: {"b": 1, "c": 1}, 5: {"a": 1, "b": 1, "c": 1},
        7: {"a": 1, "b": 1, "c": 2}, 8: {"d": 1}, 15: {"a": 1, "b": 1, "c": 2, "d": 1}, 16: None,
    }  # fmt: skip
    # A change that may backfire is left out if it takes more than it saves.
    saved |= {("e", 1): -5, ("e", 2): -20}
    hurting = fit.Change("e", 1, costs.TIME, may_backfire=True)
    assert chosen(15, [*options, hurting]) == found[15]
    assert chosen(15, [*options, replace(hurting, may_backfire=False)]) is None
    worse = [fit.Change("e", value, costs.EIGHT_BITS, may_backfire=True) for value in (1, 2)]
    assert chosen(8, [*options, *worse]) == found[8], "nor is it added if it would do no harm"


@given(st.integers(0, 1 << 45))
def test_a_size_rounded_to_four_digits_is_close(num_bytes: int) -> None:
    assert 0.999 * num_bytes - 1 <= parse_bytes(units.round_down_size(num_bytes)) <= num_bytes


def test_limits_by_chunk_size_learned_positions_and_dtype() -> None:
    small = Config(chunk_size=4096, checkpoint_layers=True)
    request = PlacementRequest(
        shape=TINY, config=small, batch_size=1, length=100, needs_grad=True, float32_sums=True, fused=True,
        free_gpu_bytes=11 * MIB, free_host_bytes=GIB, missing_grad_bytes=8 * MIB, optimizer_bytes=0,
    )  # fmt: skip
    assert place(request)[1] is None and place(replace(request, length=4096))[1] is not None
    assert 100 < (longest_context(request) or 0) < 4096
    learned = replace(TINY, num_positions=1000)
    text = message(shape=learned, length=1001)
    assert "has learned 1,000 positions" in text and "the longest context that fits is 1,000 tokens" in text
    assert replace(request, shape=replace(TINY, itemsize=4)).rows == request.rows
    assert replace(request, shape=with_dtype(TINY, torch.float32)).rows != request.rows


def test_a_shortfall_names_the_limit_and_the_bytes() -> None:
    def shortfall(**changes: Any) -> Shortfall:
        request = PlacementRequest(**{**DEFAULTS, "shape": TINY, "config": Config(chunk_size=256), **changes})
        found = place(request)[1]
        assert found is not None and found.needed > found.available
        return found

    assert shortfall(free_gpu_bytes=MIB).limit is Limit.GPU and shortfall(free_gpu_bytes=MIB).available == MIB
    weights = shortfall(free_gpu_bytes=-MIB, state_bytes=2 * MIB)
    assert weights == Shortfall(Limit.WEIGHTS, TINY.weight_bytes + 2 * MIB, TINY.weight_bytes - MIB)
    positions = shortfall(shape=replace(TINY, num_positions=1000), length=1001)
    assert positions == Shortfall(Limit.POSITIONS, 1001, 1000)
    host = shortfall(length=10**6, free_gpu_bytes=100 * MIB, free_host_bytes=10 * MIB)
    assert host.limit is Limit.HOST and host.available == int(0.9 * 10 * MIB)
    cpu = shortfall(length=10**6, free_gpu_bytes=None, free_host_bytes=10 * MIB)
    assert cpu.limit is Limit.CPU and cpu.available == int(0.9 * 10 * MIB)
