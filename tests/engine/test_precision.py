"""Accumulation over chunks and mixed precision in dtypes other than float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import assert_same_gradients, build, grads, random_ids, relative_error, whole_gradients
from torch import Tensor, nn

import oomb
from oomb.models import adapters


def engine_gradients(model: Any, ids: Tensor, **config: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    oomb.Engine(model, oomb.Config(**config)).loss(ids).backward()
    return grads(model)


def total_error(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the relative error of the whole gradient as one vector."""
    flat = [torch.cat([g.double().flatten() for g in side.values() if g is not None]) for side in (actual, expected)]
    return relative_error(*flat)


@pytest.mark.parametrize("param_grad_dtype", ["auto", "param", "float32"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_float32_model(name: str, param_grad_dtype: str) -> None:
    model = build(name, dtype=torch.float32)
    ids = random_ids(2, 41)
    _, expected = whole_gradients(model, ids)
    actual = engine_gradients(model, ids, chunk_size=7, param_grad_dtype=param_grad_dtype)
    assert_same_gradients(actual, expected, 2e-5, may_vanish=1e-6)
    assert all(g.dtype == torch.float32 for g in actual.values())


def bf16_pair(length: int) -> tuple[Any, Any, Tensor]:
    """Return a bfloat16 model, the same model in float32, and token ids."""
    model = build("llama", dtype=torch.bfloat16)
    return model, copy.deepcopy(model).float(), random_ids(1, length)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "float32", "param"])
def test_sums_over_many_chunks(mode: str) -> None:
    """Every chunk adds the same, and a bfloat16 sum with round-to-nearest stops growing at 256 of them."""
    model = build("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    ids = torch.full((1, 400), 5)
    _, expected = whole_gradients(copy.deepcopy(model).float(), ids)
    actual = engine_gradients(model, ids, chunk_size=1, param_grad_dtype=mode)
    assert all(g.dtype == torch.bfloat16 for g in actual.values())
    # The error of 400 stochastic roundings grows like a random walk: about 400 ** 0.5 times a third of the last bit.
    tolerance = 0.06 if mode == "param" else 0.03
    assert relative_error(actual["lm_head.weight"], expected["lm_head.weight"]) < tolerance


@pytest.mark.slow
def test_rounding_to_nearest_would_lose_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above."""
    monkeypatch.setattr("oomb.engine.grads.add_", lambda total, share, seed: total.add_(share))
    model = build("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    ids = torch.full((1, 400), 5)
    _, expected = whole_gradients(copy.deepcopy(model).float(), ids)
    actual = engine_gradients(model, ids, chunk_size=1, param_grad_dtype="param")
    assert relative_error(actual["lm_head.weight"], expected["lm_head.weight"]) > 0.15


def test_bf16_error_is_no_larger_than_in_standard_training() -> None:
    """Both are compared with float32; the chunked side has 32 chunks."""
    model, wide, ids = bf16_pair(256)
    _, exact = whole_gradients(wide, ids)
    standard = copy.deepcopy(model)
    standard.set_attn_implementation("sdpa")
    _, standard_gradients = whole_gradients(standard, ids)
    chunked = engine_gradients(model, ids, chunk_size=8, param_grad_dtype="float32")
    assert total_error(chunked, exact) <= 1.1 * total_error(standard_gradients, exact)


@pytest.mark.parametrize("param_grad_dtype", ["param", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_existing_gradients_are_added_to(param_grad_dtype: str, dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype)
    ids = random_ids(1, 41)
    engine = oomb.Engine(model, oomb.Config(chunk_size=7, param_grad_dtype=param_grad_dtype))
    engine.loss(ids).backward()
    once = grads(model)
    engine.loss(ids).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_same_gradients(grads(model), {name: 2 * g for name, g in once.items()}, tolerance, may_vanish=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_pages_in_another_dtype(kv_dtype: str) -> None:
    """bfloat16 pages cost no more precision than bfloat16 rounding explains; float32 pages cost none."""
    model = build("llama", dtype=torch.float32)
    ids = random_ids(1, 41)
    _, expected = whole_gradients(model, ids)
    actual = engine_gradients(model, ids, chunk_size=7, kv_dtype=kv_dtype, grad_dtype=kv_dtype)
    error = total_error(actual, expected)
    low, high = (0, 2e-5) if kv_dtype == "float32" else (1e-4, 5e-2)
    assert low <= error <= high


def test_autocast_holds_in_the_gradient_pass() -> None:
    """backward() runs outside of the autocast block, but chunks must be recomputed under autocast."""
    model = build("llama", dtype=torch.float32)
    ids = random_ids(2, 41)
    seen: list[torch.dtype] = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    engine = oomb.Engine(model, oomb.Config(chunk_size=7))
    with torch.autocast("cpu", torch.bfloat16):
        loss = engine.loss(ids)
    loss.backward()
    assert len(seen) > 6 and set(seen) == {torch.bfloat16}
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_autocast_gradients(lora: bool) -> None:
    """For float32 weights, and for float32 adapters on bfloat16 weights."""
    model, ids = build("llama", dtype=torch.bfloat16 if lora else torch.float32), random_ids(2, 41)
    if lora:
        model = adapters.with_lora(model)
        for name, parameter in model.named_parameters():
            # They start at zero, which would make half of the gradients zero.
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    _, exact = whole_gradients(copy.deepcopy(model).float(), ids)
    standard = copy.deepcopy(model)
    standard.set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        _, standard_gradients = whole_gradients(standard, ids)
        loss = oomb.Engine(model, oomb.Config(chunk_size=7)).loss(ids)
    loss.backward()
    assert total_error(grads(model), exact) <= 1.2 * total_error(standard_gradients, exact)
