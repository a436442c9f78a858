"""FLOPs of a step against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import TINY

from oomb.models.load import load_model
from oomb.models.presets import PRESETS
from oomb.models.probe import model_shape
from oomb.planner.flops import causal_pairs, step_flops


def test_a_step_counts_matrices_and_attention() -> None:
    shape = model_shape(load_model("demo", device="cpu"))
    sizes = PRESETS["demo"]
    layers, hidden, wide = sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"]
    q, kv = (sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value"))
    # Looking up a token costs nothing; the head does.
    matrices = layers * hidden * (2 * q + 2 * kv + 3 * wide) + sizes["vocab_size"] * hidden
    assert step_flops(shape, 1000) == 1000 * (6 * matrices + 6 * 1000 * layers * q)


def test_frozen_matrices_need_no_weight_gradients() -> None:
    frozen = replace(TINY, trained_params=0)
    assert step_flops(TINY, 100) - step_flops(frozen, 100) == 2 * TINY.trained_params * 100


def test_windows_and_page_budgets_bound_what_a_query_reads() -> None:
    full, windowed = TINY.layers
    assert full.window is None and windowed.window == 32

    def attention(keys: int | None) -> float:
        return step_flops(TINY, 1000, keys) - 1000 * 6 * TINY.active_params

    def one_layer(layer, pairs: float) -> float:
        return 6 * layer.num_query_heads * (layer.head_size + layer.value_size) * pairs

    window = one_layer(windowed, causal_pairs(1000, 32))
    assert attention(None) == pytest.approx(one_layer(full, 500_000) + window)
    assert attention(100) == pytest.approx(one_layer(full, causal_pairs(1000, 100)) + window)


@given(st.integers(1, 200), st.none() | st.integers(1, 300))
def test_pairs_are_those_of_every_query(length: int, window: int | None) -> None:
    """Up to half a pair for each query: its own key counts half."""
    exact = sum(min(query + 1, window or length) for query in range(length))
    assert exact - length / 2 - 1 <= causal_pairs(length, window) <= exact
