"""The plan's arithmetic: it adds up, it is monotone, it agrees with what was measured, and it says what to do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import build
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import H200, MIB, TINY, ask, shape_of, with_dtype

from oomb.config import Config
from oomb.memory.pool import GPU, HOST, OutOfPages
from oomb.memory.rows import row_bytes, staging_bytes
from oomb.models.shape import ModelShape
from oomb.planner import fit, hardware, step_time
from oomb.planner import forecast as forecast_module
from oomb.planner.fit import longest_context
from oomb.planner.forecast import StepForecast, forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.placement import FLOPS_PER_BYTE, place
from oomb.planner.request import Placement, PlacementRequest
from oomb.utils import units
from oomb.utils.units import GIB, parse_bytes


def bytes_of(placement: Placement | StepForecast, tier: str) -> int:
    return sum(term.num_bytes for term in placement.terms if term.tier == tier)


def test_flops_per_byte_are_those_of_the_step_time() -> None:
    rates = step_time.MATRIX_TFLOPS * 1e12 / hardware.PCIE_5_BYTES_PER_SECOND
    assert pytest.approx(rates, rel=0.01) == FLOPS_PER_BYTE


requests = st.builds(
    PlacementRequest,
    shape=st.builds(
        lambda adapters, dtype: with_dtype(replace(TINY, has_adapters=adapters), dtype),
        st.booleans(),
        st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    ),
    config=st.builds(
        Config,
        chunk_size=st.sampled_from([64, 256, 1000]),
        page_size=st.sampled_from([1, 16, 100]),
        checkpoint_layers=st.sampled_from(["auto", True, False]),
        keep_attention=st.sampled_from(["auto", True, False]),
        gpu_memory=st.sampled_from(["auto", 0, 2 * MIB]),
        host_memory=st.sampled_from(["auto", 0, 8 * MIB]),
        kv_dtype=st.sampled_from(["auto", "float32"]),
    ),
    batch_size=st.integers(1, 3),
    length=st.integers(1, 20_000),
    needs_grad=st.booleans(),
    float32_sums=st.just(True),
    fused=st.booleans(),
    free_gpu_bytes=st.one_of(st.none(), st.integers(0, 64 * MIB)),
    free_host_bytes=st.integers(0, 64 * MIB),
    missing_grad_bytes=st.just(8 * MIB),
    optimizer_bytes=st.sampled_from([0, 4 * MIB]),
)


@given(requests)
def test_every_token_has_its_place_and_every_byte_its_term(request: PlacementRequest) -> None:
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
    # Staging buffers exist just where something lies on the host.
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


@settings(max_examples=40)
@given(requests, st.integers(0, 64 * MIB), st.integers(0, 64 * MIB))
def test_the_longest_context_is_the_longest_and_memory_never_shortens_it(
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


def test_auto_takes_what_is_left() -> None:
    roomy = ask()
    assert roomy.host_bytes == 0 and roomy.keep_attention and roomy.keep_last_chunk and not roomy.checkpoint_layers
    assert roomy.gpu_out_tokens == roomy.gpu_tokens == roomy.capacity == 4096 - 256
    # Too little for a chunk's activations beside the gradients: layers are checkpointed, and then the last is not kept.
    whole = ask(length=512).fixed_bytes
    tight = ask(length=512, free_gpu_bytes=int(whole / 0.9) - 1000)
    assert tight.checkpoint_layers and not tight.keep_last_chunk and tight.fixed_bytes < whole
    # The states that come after the first step count as well.
    assert not ask(length=512, free_gpu_bytes=int(whole / 0.9) + MIB).checkpoint_layers
    assert ask(length=256, free_gpu_bytes=int(whole / 0.9) + MIB, optimizer_bytes=2 * MIB).checkpoint_layers
    # Outputs are kept on a GPU that has room for all, or on the host up to three quarters of it: all, some, or none.
    one_gib = Config(chunk_size=256, page_size=64, gpu_memory=0)
    outs = bytes_of(ask(config=one_gib), HOST)
    assert ask(config=one_gib, free_host_bytes=int(outs / 0.74)).out_tokens == roomy.capacity
    some = ask(config=one_gib, free_host_bytes=int(outs / 0.76))
    assert 0 < some.out_tokens < roomy.capacity and some.gpu_out_tokens == 0
    assert 0.7 * outs < some.host_bytes <= 0.75 * outs / 0.76
    # Beside others it is all or none: they are to find room as well.
    assert ask(config=one_gib, free_host_bytes=int(outs / 0.74), is_exclusive=False).out_tokens == roomy.capacity
    assert not ask(config=one_gib, free_host_bytes=int(outs / 0.76), is_exclusive=False).keep_attention
    # Where the host has no room the GPU may have some, for all pages and for the last outputs.
    whole, none = (ask(config=Config(chunk_size=256, page_size=64, keep_attention=k)) for k in (True, False))
    halfway = (whole.gpu_bytes + none.gpu_bytes) / 2
    near = ask(free_gpu_bytes=none.fixed_bytes + int(halfway / 0.9), free_host_bytes=0)
    assert 0.4 < near.out_tokens / near.capacity < 0.5 and near.gpu_out_tokens == near.out_tokens
    pages = bytes_of(ask(config=replace(one_gib, keep_attention=False)), HOST)
    assert not ask(config=one_gib, free_host_bytes=int(pages / 0.7)).keep_attention, "too few to be worth it"
    assert not ask(needs_grad=False).keep_attention and not ask(length=256).keep_attention
    with pytest.raises(OutOfPages):
        ask(config=replace(one_gib, keep_attention=True), free_host_bytes=int(outs / 0.91))
    # On a CPU one memory serves all.
    on_cpu = ask(free_gpu_bytes=None)
    assert on_cpu.gpu_tokens == on_cpu.capacity and not on_cpu.checkpoint_layers
    kept = next(term.num_bytes for term in on_cpu.terms if term.name == "kept attention outputs")
    assert ask(free_gpu_bytes=None, free_host_bytes=4 * kept).keep_attention
    assert not ask(free_gpu_bytes=None, free_host_bytes=4 * kept - 4).keep_attention


def refusal(**changes: Any) -> str:
    with pytest.raises(OutOfPages) as caught:
        ask(**changes)
    return str(caught.value)


def test_a_refusal_has_the_numbers_and_the_remedy() -> None:
    long = {"length": 1_000_000, "free_gpu_bytes": 100 * MIB}
    text = refusal(**long, free_host_bytes=450 * MIB, config=Config(chunk_size=256, host_memory="10MiB"))
    assert "1,000,000 tokens do not fit" in text and "only 10.0 MiB are available" in text
    assert text.endswith('It fits with host_memory="auto" (0.44 GiB are free).')
    longest = int(re.findall(r"longest context that fits is ([\d,]+) tokens", text)[0].replace(",", ""))
    config = Config(chunk_size=256, host_memory="10MiB")
    assert ask(**{**long, "length": longest}, free_host_bytes=450 * MIB, config=config).capacity == longest - 256
    refusal(**{**long, "length": longest + 1}, free_host_bytes=450 * MIB, config=config)

    def remedy(**changes: Any) -> str:
        return re.findall(
            r"It fits with (.*?)(?:, or with [\d.]+ [GM]iB of free (?:host )?memory)?\.$", refusal(**changes)
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
    # No page fits on the GPU either way.
    tight |= {"config": Config(chunk_size=512, checkpoint_layers=True), "free_gpu_bytes": needed + MIB}
    assert remedy(**tight, free_host_bytes=int(sizes / 0.9 * 0.8)) == 'grad_dtype="bfloat16"'
    assert remedy(**tight, free_host_bytes=int(sizes * 0.4)).endswith('kv_dtype="bfloat16" together')
    nothing = refusal(
        shape=with_dtype(adapted, torch.bfloat16), free_gpu_bytes=100 * MIB, free_host_bytes=0, length=10**8
    )
    assert "No setting makes 100,000,000 tokens fit here." in nothing
    assert "a larger GPU" in refusal(shape=adapted, free_gpu_bytes=MIB, length=512)
    assert "parameter gradients 8.0 MiB, activations of a chunk" in refusal(free_gpu_bytes=MIB, length=512)


@given(requests)
def test_auto_never_refuses_what_checkpointed_layers_would_fit(request: PlacementRequest) -> None:
    auto, lean = (replace(request, config=replace(request.config, checkpoint_layers=x)) for x in ("auto", True))
    assert place(lean)[1] is not None or place(auto)[1] is None


@settings(max_examples=60)
@given(requests)
def test_advice_is_no_more_than_is_needed(request: PlacementRequest) -> None:
    """Nothing of it can be left out, and no setting can be milder."""

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
        milder = variants[: variants.index(chosen[setting])]
        assert not any(fits({**chosen, setting: value}) for value in milder)
        assert not fits({name: value for name, value in chosen.items() if name != setting})


def test_the_mildest_settings_do() -> None:
    """A toy: what each setting saves, and how much must be saved."""
    harms = fit.ChangeCost
    saved = {("a", 1): 1, ("b", 1): 2, ("c", 1): 2, ("c", 2): 4, ("d", 1): 8}
    kinds = [harms.NONE, harms.TIME, harms.CHUNKS, harms.ROUNDING, harms.EIGHT_BITS]
    options = [fit.Change(*key, harm) for key, harm in zip(saved, kinds, strict=True)]

    def chosen(needed: int, options: list[fit.Change] = options) -> dict[str, Any] | None:
        return fit.minimal_changes(options, lambda some: sum(saved[item] for item in some.items()) >= needed)

    found = {needed: chosen(needed) for needed in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16)}
    assert found == {
        0: {}, 1: {"a": 1}, 2: {"b": 1}, 3: {"a": 1, "b": 1}, 4: {"b": 1, "c": 1}, 5: {"a": 1, "b": 1, "c": 1},
        7: {"a": 1, "b": 1, "c": 2}, 8: {"d": 1}, 15: {"a": 1, "b": 1, "c": 2, "d": 1}, 16: None,
    }  # fmt: skip
    # One that takes more than it gives is left out, if it is known for that.
    saved |= {("e", 1): -5, ("e", 2): -20}
    hurting = fit.Change("e", 1, harms.TIME, may_backfire=True)
    assert chosen(15, [*options, hurting]) == found[15]
    assert chosen(15, [*options, replace(hurting, may_backfire=False)]) is None
    worse = [fit.Change("e", value, harms.EIGHT_BITS, may_backfire=True) for value in (1, 2)]
    assert chosen(8, [*options, *worse]) == found[8], "nor is it put in where there is room for it"


@given(st.integers(0, 1 << 45))
def test_a_size_in_four_digits_is_near(num_bytes: int) -> None:
    assert 0.999 * num_bytes - 1 <= parse_bytes(units.round_down_size(num_bytes)) <= num_bytes


def test_a_refusal_says_how_much_host_memory_is_enough() -> None:
    given = {"length": 10**6, "free_gpu_bytes": 100 * MIB, "shape": replace(TINY, has_adapters=True)}
    text = refusal(**given, free_host_bytes=100 * MIB)
    assert "No setting makes 1,000,000 tokens fit here. It fits with" in text
    size, unit = re.findall(r"It fits with ([\d.]+) ([GM])iB of free host memory", text)[0]
    assert ask(**given, free_host_bytes=int(float(size) * (GIB if unit == "G" else MIB)))
    # On a CPU there is one memory, and no setting of a GPU.
    text = refusal(free_gpu_bytes=None, length=10**6, free_host_bytes=100 * MIB, config=Config(gpu_memory=MIB))
    assert "1,000,000 tokens do not fit on the CPU" in text and "90.0 MiB are available, 90% of what is free" in text
    assert "of free memory" in text and "GPU" not in text and "gpu_memory" not in text and "LoRA" not in text


def test_short_contexts_learned_positions_and_autocast() -> None:
    small = Config(chunk_size=4096, checkpoint_layers=True)
    request = PlacementRequest(
        shape=TINY, config=small, batch_size=1, length=100, needs_grad=True, float32_sums=True, fused=True,
        free_gpu_bytes=11 * MIB, free_host_bytes=GIB, missing_grad_bytes=8 * MIB, optimizer_bytes=0,
    )  # fmt: skip
    assert place(request)[1] is None and place(replace(request, length=4096))[1] is not None
    assert 100 < (longest_context(request) or 0) < 4096
    learned = replace(TINY, num_positions=1000)
    text = refusal(shape=learned, length=1001)
    assert "has learned 1,000 positions" in text and "the longest context that fits is 1,000 tokens" in text
    assert replace(request, shape=replace(TINY, itemsize=4)).rows == request.rows
    assert replace(request, shape=with_dtype(TINY, torch.float32)).rows != request.rows


def test_frozen_matrices_windows_and_traffic_change_the_time() -> None:
    def seconds(facts: ModelShape, **changes: Any) -> float:
        options = {"gpu_memory": "100GiB", "chunk_size": 4096, "keep_attention": False, **changes}
        plan = forecast_step(facts, Config(**options), replace(H200, host_bytes=2**50), length=2**17, optimizer="none")
        assert plan.fits and plan.seconds is not None
        return plan.seconds

    full = shape_of("qwen2.5-7b")
    assert seconds(replace(full, trained_params=0)) < seconds(full)
    windowed = replace(full, layers=tuple(replace(layer, window=4096) for layer in full.layers))
    assert seconds(windowed) < 0.5 * seconds(full)
    # With long chunks the arithmetic hides the copies; with short ones the copies are what takes the time.
    assert seconds(full, gpu_memory=0) == pytest.approx(seconds(full), rel=0.01)
    assert seconds(full, gpu_memory=0, chunk_size=256) > 2 * seconds(full, chunk_size=256)
    slow = forecast_step(full, Config(), machine_named("rtx-4090", 2**40), length=2**17)
    assert slow.seconds is not None and not slow.machine.is_measured
    assert forecast_step(full, Config(), Machine(gpu_bytes=2**37, host_bytes=2**37), length=2**17).seconds is None


def test_forecast_counts_what_a_training_run_holds() -> None:
    full = shape_of("qwen2.5-7b")
    plans = {
        name: forecast_step(full, Config(), H200, length=2**15, optimizer=name) for name in forecast_module.OPTIMIZERS
    }
    sizes = {name: plan.peak_gpu_bytes - plan.placement.gpu_bytes for name, plan in plans.items()}
    assert sizes["adamw"] - sizes["none"] == 2 * full.grad_bytes
    assert sizes["adamw_8bit"] - sizes["none"] == full.grad_bytes == sizes["momentum"] - sizes["sgd"]
    for name, bytes_each in (
        ("offloaded_adamw", 8),
        ("offloaded_adamw_bf16", 4),
        ("offloaded_adamw_8bit", 2 + 8 / 256),
    ):
        assert sizes[name] == sizes["none"]
        assert plans[name].host_bytes == pytest.approx(bytes_each * full.trainable_params, rel=1e-6)
        assert plans[name].host_limit == pytest.approx(0.9 * H200.host_bytes + 0.1 * plans[name].host_bytes)
    # A quarter of an 80 GiB card is less than float32 sums take.
    assert not forecast_step(full, Config(), machine_named("H100", 2**37), length=2**15).request.float32_sums
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        forecast_step(full, Config(), H200, length=2**15, optimizer="lion")
    with pytest.raises(ValueError, match="at least 1 sequence of 2 tokens"):
        forecast_step(full, Config(), H200, length=1)


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
