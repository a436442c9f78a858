"""The engine on a GPU in bfloat16: its error against float32 is that of standard training, however it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import build, grads, random_ids, relative_error
from large_models import wide_llama
from torch import Tensor

import oomb

pytestmark = pytest.mark.gpu
LENGTH = 1000


def whole(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids.cuda(), labels=ids.cuda()).loss.backward()
    return {name: g.float() for name, g in grads(model).items() if g is not None}


def chunked(model: Any, ids: Tensor, **config: Any) -> dict[str, Tensor]:
    model.zero_grad()
    oomb.Engine(model, oomb.Config(**{"chunk_size": 128, **config})).loss(ids).backward()
    return {name: g.float() for name, g in grads(model).items() if g is not None}


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    off = sum((actual[name] - g).square().sum() for name, g in expected.items())
    return float((off / sum(g.square().sum() for g in expected.values())).sqrt())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fuse": "off"},
        {"checkpoint_layers": True},
        {"fuse": "off", "checkpoint_layers": True},
        {"fuse": "off", "kernels": "flash"},
        {"fuse": "off", "kernels": "torch"},
        {"fuse": "off", "keep_attention": True, "keep_last_chunk": False},
        {"fuse": "off", "param_grad_dtype": "param"},
        {"fuse": "off", "grad_dtype": "float32"},
        {"fuse": "off", "chunk_size": 333},
        {"fuse": "off", "chunk_size": 4096},
    ],
    ids=str,
)
def test_bfloat16_error_is_that_of_standard_training(config: dict[str, Any]) -> None:
    model = wide_llama()
    ids = random_ids(2, LENGTH)
    half = copy.deepcopy(model).bfloat16()
    model.load_state_dict({name: x.float() for name, x in half.state_dict().items()})
    expected = whole(model, ids)
    standard, ours = error(whole(half, ids), expected), error(chunked(half, ids, **config), expected)
    assert 1e-4 < standard < 0.1
    assert ours <= 1.15 * standard


def test_float32_is_exact() -> None:
    model = wide_llama()
    ids = random_ids(1, LENGTH)
    assert error(chunked(model, ids, fuse="off"), whole(model, ids)) < 1e-5


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma2", "gpt_oss", "qwen3"])
def test_masks_sinks_and_caps(family: str) -> None:
    """float32 on the GPU against float64 on the CPU: the paths that no half-precision kernel serves alone."""
    model = build(family)
    ids = random_ids(2, 41)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    expected = {name: g.clone() for name, g in grads(model).items() if g is not None}
    model.zero_grad()
    model.cuda().float()
    oomb.Engine(model, oomb.Config(chunk_size=7)).loss(ids).backward()
    for name, g in grads(model).items():
        if g is not None and expected[name].norm() > 0:
            assert relative_error(g.double().cpu(), expected[name]) < 2e-4, name


def test_sliding_window_in_bfloat16_uses_flash() -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=97, sliding_window=200,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").cuda()
    ids = random_ids(2, LENGTH)
    half = copy.deepcopy(model).bfloat16()
    model.load_state_dict({name: x.float() for name, x in half.state_dict().items()})
    expected = whole(model, ids)
    assert error(chunked(half, ids), expected) <= 1.15 * error(whole(half, ids), expected)


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_grows_by_pages_alone(keeps: bool) -> None:
    model = wide_llama().bfloat16()
    engine = oomb.Engine(model, oomb.Config(chunk_size=256, keep_attention=keeps))
    peaks, pages = [], []
    for length in (4096, 4096, 8192):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        engine.reset_stats()
        engine.loss(random_ids(1, length)).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        pages.append(engine.stats.gpu_peak_bytes)
    # 3 layers x 2 heads x 64 x (K, V and their gradients) x bfloat16, and 4 heads x (64 x bfloat16 + float32) kept
    assert pages[2] - pages[1] == 4096 * 3 * (2 * 64 * 4 * 2 + keeps * 4 * (64 * 2 + 4))
    # A longer past is attended to in longer segments, which have temporaries: one segment's dK and dV at the most.
    assert peaks[2] - peaks[1] <= 1.02 * (pages[2] - pages[1]) + 4 * 4096 * 2 * 64 * 2


def test_ids_may_be_on_either_device() -> None:
    model = wide_llama()
    ids = random_ids(1, 300)
    engine = oomb.Engine(model, oomb.Config(chunk_size=128, fuse="off", kernels="torch"))
    assert torch.equal(engine.loss(ids).detach(), engine.loss(ids.cuda(), ids.cuda()).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_replayed_in_the_backward(dtype: torch.dtype) -> None:
    model = wide_llama()
    ids = random_ids(1, LENGTH)
    expected = whole(model, ids)
    with torch.autocast("cuda", dtype=dtype):
        loss = oomb.Engine(model, oomb.Config(chunk_size=128, fuse="off")).loss(ids)
    model.zero_grad()
    loss.backward()
    ours = error({n: g for n, g in grads(model).items() if g is not None}, expected)
    model.zero_grad()
    with torch.autocast("cuda", dtype=dtype):
        loss = model(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    assert ours <= 1.15 * error({n: g for n, g in grads(model).items() if g is not None}, expected)
