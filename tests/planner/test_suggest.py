"""Suggested settings make a context fit, with the memory and time they promise, and change no more than needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import MIB, TINY, plan_qwen_7b, qwen_7b, shape_of, suggest_for

from oomb.config import Config
from oomb.planner import suggest
from oomb.planner.forecast import OPTIMIZERS, StepForecast, forecast_step
from oomb.planner.hardware import Machine, machine_named
from oomb.planner.placement import place
from oomb.planner.request import Limit
from oomb.planner.suggest import Suggestion, Suggestions
from oomb.utils.units import GIB, parse_bytes

H200 = machine_named("H200", 119 * GIB)
ADAPTED = replace(
    TINY, has_adapters=True, layer_io_width=2000, head_grad_bytes=0, grad_bytes=MIB // 4, float32_sum_bytes=0,
    wide_grad_bytes=MIB // 4, trained_params=MIB // 16, trainable_params=MIB // 16,
)  # fmt: skip


def only(suggestions: Suggestions) -> Suggestion:
    """Return the suggestion that makes a context fit."""
    assert suggestions.suggestion is not None
    return suggestions.suggestion


@pytest.mark.slow
@pytest.mark.parametrize("host", [116, 119, 120])
def test_four_million_tokens_on_one_h200(host: float) -> None:
    """With LoRA, at every amount of free host memory that such a machine has shown."""
    forecast, suggestions = plan_qwen_7b(1 << 22, host, lora=True)
    assert not forecast.fits and suggestions.longest == () and suggestions.larger_machine is None
    found, changes = only(suggestions).forecast, only(suggestions).changes
    assert found.fits and found.length == 1 << 22
    assert (changes["kv_dtype"], changes["grad_dtype"], changes["page_budget"]) == ("int8", "int8", 64)
    assert "lora" not in changes and "optimizer" not in changes
    assert parse_bytes(changes["host_memory"]) <= (host - 3) * GIB
    assert found.seconds is not None and 11 * 60 < found.seconds < 15 * 60
    # Attention to the whole past takes most of a day, and less memory.
    dense = suggestions.without_sparse
    assert dense is not None and dense.forecast.fits and "page_budget" not in dense.changes
    assert dense.forecast.seconds is not None and dense.forecast.seconds > 7 * 3600


def test_the_reach_of_full_training_is_reported_next_to_lora() -> None:
    forecast, suggestions = plan_qwen_7b(1 << 22)
    assert only(suggestions).changes["lora"] is True and "optimizer" not in only(suggestions).changes
    [longest] = suggestions.longest
    assert not longest.lora and longest.forecast.fits and 3_600_000 < longest.forecast.length < 1 << 22
    assert longest.changes["optimizer"] == "offloaded_adamw_8bit"
    # With exactly these settings it is the longest.
    further = longest.forecast.length + forecast.config.chunk_size
    options: dict[str, Any] = {"optimizer": longest.forecast.optimizer}
    assert not forecast_step(qwen_7b(), longest.forecast.config, forecast.machine, length=further, **options).fits


def test_longer_contexts_cost_more() -> None:
    """First time, then margins, then bits, then what is trained."""
    cheap = {"host_memory", "gpu_memory", "optimizer", "page_budget"}

    def changes(length: int, **config: Any) -> dict[str, Any]:
        return only(plan_qwen_7b(length, **config)[1]).changes

    assert set(changes(1504 << 10)) == {"host_memory", "page_budget"}
    assert set(changes(1700 << 10, keep_attention=False)) <= cheap | {"param_grad_dtype"}
    assert set(changes(2 << 20)) <= cheap | {"grad_dtype"}
    assert {"grad_dtype", "kv_dtype"} <= set(changes(3 << 20))
    # Limits that the user has set go first.
    limited = {"gpu_memory": "1GiB", "host_memory": "1GiB", "keep_attention": True, "checkpoint_layers": False}
    assert changes(1 << 17, **limited) == {"host_memory": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_smaller_batch_comes_before_approximations(lora: bool) -> None:
    """One sequence at a time gives the same gradient with a quarter of the pages."""
    machine, shape = machine_named("A100-80GB", 100 * GIB), shape_of("smollm2-135m", lora)
    forecast = forecast_step(shape, Config(), machine, batch_size=4, length=1 << 20)
    # Four sequences take more than an hour, one does not: no page budget.
    assert not forecast.fits and forecast.seconds is not None and forecast.seconds > 3600
    suggestions = suggest_for(forecast, lora)
    found = only(suggestions)
    assert found.changes == {"batch_size": 1} and suggestions.without_sparse is None
    assert found.forecast.fits and found.forecast.batch_size == 1 and found.accumulation == 4
    # A limit that the user has set goes first, and the batch stays.
    limited = forecast_step(shape, Config(host_memory=0, gpu_memory=0), machine, batch_size=2, length=1 << 17)
    unchanged = only(suggest_for(limited, lora))
    assert unchanged.changes == {"host_memory": "auto"} and unchanged.accumulation == 1
    # If one sequence alone is too long, more has to change.
    longer = only(suggest_for(forecast_step(shape, Config(), machine, batch_size=4, length=1 << 22), lora))
    assert longer.changes["batch_size"] == 1 and longer.changes["grad_dtype"] == "int8"


def test_optimizer_states_go_to_the_host_if_the_gpu_is_short() -> None:
    """Weights and gradients of a 7B model fit in 48 GiB, AdamW's states do not."""
    machine, shape = Machine(gpu_bytes=48 * GIB, host_bytes=200 * GIB), qwen_7b()
    found = only(suggest_for(forecast_step(shape, Config(), machine, length=1 << 16)))
    assert found.changes == {"optimizer": "offloaded_adamw_bf16"}
    states = [term for term in found.forecast.terms if term.name == "optimizer states"]
    assert [(term.tier, term.num_bytes) for term in states] == [("host", 4 * shape.trainable_params)]
    # A host that is too small for these states, but not for smaller ones.
    small = replace(machine, host_bytes=24 * GIB)
    crowded = forecast_step(shape, Config(), small, length=1 << 16, optimizer="offloaded_adamw_bf16")
    assert crowded.shortfall is not None and crowded.longest_context == 0
    assert crowded.shortfall.limit is Limit.OPTIMIZER_STATES and crowded.shortfall.available == 24 * GIB
    assert crowded.shortfall.needed == 4 * shape.trainable_params
    assert "28.37 GiB of host memory" in (crowded.problem or "") and "24.00 GiB" in (crowded.problem or "")
    smaller = only(suggest_for(forecast_step(shape, Config(), small, length=1 << 16)))
    assert smaller.changes["optimizer"] == "offloaded_adamw_8bit"
    # If the host is too small for any states, they stay on the GPU and something else gives way.
    tight = only(suggest_for(forecast_step(shape, Config(), replace(H200, host_bytes=8 * GIB), length=800_000)))
    assert tight.forecast.fits and "optimizer" not in tight.changes
    for optimizer in ("none", "sgd", "momentum"):
        gpu = replace(machine, gpu_bytes=30 * GIB)
        forecast = forecast_step(shape, Config(), gpu, length=1 << 16, optimizer=optimizer)
        assert "optimizer" not in only(suggest_for(forecast, adapted=qwen_7b(True))).changes


def test_a_page_budget_is_suggested_for_steps_of_hours() -> None:
    forecast, suggestions = plan_qwen_7b(1536 << 10, host=200)
    assert forecast.fits and forecast.seconds is not None and forecast.seconds > 3600
    assert suggestions.suggestion is None and suggestions.with_sparse is not None
    assert suggestions.with_sparse.changes == {"page_budget": 64}
    # Not if a step takes minutes, if there is a page budget, or if chunks are not whole pages.
    assert plan_qwen_7b(1 << 18)[1] == Suggestions()
    assert plan_qwen_7b(1536 << 10, host=200, page_budget=32)[1] == Suggestions()
    assert plan_qwen_7b(1536 << 10, host=200, chunk_size=4000)[1] == Suggestions()
    # A sliding window saves as much time.
    windowed = replace(qwen_7b(), layers=tuple(replace(layer, window=1 << 17) for layer in qwen_7b().layers))
    slow = forecast_step(windowed, Config(keep_attention=False), replace(H200, host_bytes=2**42), length=1 << 24)
    assert slow.fits and slow.seconds is not None and slow.seconds > 3600
    assert suggest_for(slow) == Suggestions()


def test_learned_positions_cannot_be_bought() -> None:
    learned = replace(TINY, num_positions=1000)
    forecast = forecast_step(learned, Config(), H200, length=1001)
    assert forecast.shortfall is not None and forecast.shortfall.limit is Limit.POSITIONS
    assert suggest_for(forecast) == Suggestions()


forecasts = st.builds(
    lambda config, length, gpu, host, batch_size, optimizer, lora: (
        forecast_step(
            ADAPTED if lora else TINY,
            config,
            Machine(gpu_bytes=GIB // 2 + gpu, host_bytes=host, gpu_name="H200"),
            batch_size=batch_size,
            length=length,
            optimizer=optimizer,
        ),
        lora,
    ),
    st.builds(
        Config,
        chunk_size=st.sampled_from([256, 1024, 1000]),
        page_size=st.just(8),
        page_budget=st.sampled_from([None, None, 5]),
        checkpoint_layers=st.sampled_from(["auto", False]),
        keep_attention=st.sampled_from(["auto", True]),
        gpu_memory=st.sampled_from(["auto", 0, "1GiB"]),
        host_memory=st.sampled_from(["auto", 0, "2MiB"]),
    ),
    st.integers(2, 10**6),
    st.integers(90 * MIB, 200 * MIB),
    st.integers(0, 200 * MIB),
    st.integers(1, 2),
    st.sampled_from(OPTIMIZERS),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(forecasts)
def test_suggestions_keep_their_promise(case: tuple[StepForecast, bool]) -> None:
    asked, lora = case
    suggestions = suggest_for(asked, lora, ADAPTED)
    if asked.fits:
        assert suggestions == Suggestions(), "a step of minutes needs no suggestion"
        return
    found = suggestions.suggestion
    assert (found is None) == (suggestions.larger_machine is not None)
    for some in (found, *suggestions.longest, suggestions.larger_machine):
        if some is not None:
            assert some.forecast.fits
            check_same_forecast(asked, some, lora)
    for some in suggestions.longest:
        assert some.forecast.length < asked.length and some.forecast.machine == asked.machine
    if found is not None:
        assert found.forecast.machine == asked.machine and found.forecast.length == asked.length
        check_no_needless_change(asked, found)
    else:
        assert suggestions.larger_machine is not None
        check_no_smaller_machine(asked, suggestions.larger_machine)


def check_same_forecast(asked: StepForecast, found: Suggestion, lora: bool) -> None:
    """The changes, applied as a Config, give the forecast."""
    changes = dict(found.changes)
    sizes: dict[str, Any] = {name: changes.pop(name, getattr(asked, name)) for name in ("batch_size", "optimizer")}
    shape = ADAPTED if changes.pop("lora", lora) else TINY
    config = replace(asked.config, **changes)
    again = forecast_step(shape, config, found.forecast.machine, length=found.forecast.length, **sizes)
    assert again == found.forecast


def check_no_needless_change(asked: StepForecast, found: Suggestion) -> None:
    forecast = found.forecast
    # Without one change it no longer fits. Limits at their maximum depend on the other settings.
    for name in set(found.changes) - {"page_budget", "page_size", "lora"}:
        config, sizes = forecast.config, {"batch_size": forecast.batch_size, "optimizer": forecast.optimizer}
        if name in sizes:
            sizes[name] = getattr(asked, name)
        else:
            config = replace(config, **{name: getattr(asked.config, name)})
        without = forecast_step(ADAPTED if found.lora else TINY, config, asked.machine, length=asked.length, **sizes)
        assert not without.fits or "gpu_memory" in found.changes, name


def check_no_smaller_machine(asked: StepForecast, found: Suggestion) -> None:
    there, here = found.forecast.machine, asked.machine
    larger = [name for name in ("gpu_bytes", "host_bytes") if getattr(there, name) > getattr(here, name)]
    assert larger
    for name in larger:
        smaller = replace(there, **{name: int(0.9 * getattr(there, name))})
        sizes: dict[str, Any] = {"batch_size": asked.batch_size, "length": asked.length, "optimizer": asked.optimizer}
        less = forecast_step(ADAPTED if found.lora else TINY, asked.config, smaller, **sizes)
        assert not less.fits and suggest_for(less, found.lora).suggestion is None, name


@pytest.mark.slow
def test_the_search_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing a batch takes milliseconds, with a page budget about ten."""
    calls = []
    monkeypatch.setattr(suggest, "place", lambda request: calls.append(1) or place(request))
    for length in (1 << 21, 1 << 22, 1 << 24):
        calls.clear()
        plan_qwen_7b(length)
        assert len(calls) < 120
