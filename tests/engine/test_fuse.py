"""Layers compiled by torch.compile match plain layers and are compiled once."""

from __future__ import annotations

import shutil

import pytest
import torch
from checks import backward_gradients, engine_for, lora
from families import assert_same_gradients, build, random_ids

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)


# Norms and rotary tables are float32 in a float64 model, and compiled code rounds them in another order.
TOLERANCE = 1e-5


@pytest.mark.timing
def test_fused_layers_are_exact_and_compiled_once() -> None:
    """Compiled code must drop the same activations as plain code, in both passes."""
    model = lora(build("llama"), dropout=0.1).to("cuda" if torch.cuda.is_available() else "cpu")
    ids = random_ids(1, 28)

    def gradients(**config: object) -> dict[str, torch.Tensor | None]:
        torch.manual_seed(7)
        return backward_gradients(model, engine_for(model, **config).loss(ids))

    expected = gradients(fuse="off")
    assert_same_gradients(gradients(fuse="compile"), expected, TOLERANCE)
    compiled = dict(torch._dynamo.utils.counters["stats"])
    assert compiled["unique_graphs"] > 0
    assert_same_gradients(gradients(fuse="compile", checkpoint_layers=True), expected, TOLERANCE)
    assert_same_gradients(gradients(fuse="compile", keep_attention=True), expected, TOLERANCE)
    assert dict(torch._dynamo.utils.counters["stats"]) == compiled, "another engine or sequence compiled again"
