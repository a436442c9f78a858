"""The engine restores the model after every call, even a failed one, and keeps no tensors alive."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from checks import TOLERANCE, backward_gradients, engine_for, with_dropout
from families import LENGTH, assert_same_gradients, build, random_ids, relative_error, whole_gradients
from torch import Tensor, nn
from transformers import CLIPVisionConfig, Gemma2Config, LlavaConfig, LlavaForConditionalGeneration

from oomb.models.hooks import set_checkpointing

pytestmark = pytest.mark.usefixtures("in_float64")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything observable about a model except gradients."""
    state: dict[str, Any] = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        state[f"{name} class"] = type(module)
        state[f"{name} training"] = module.training
        state[f"{name} attributes"] = set(vars(module))
        state[f"{name} hooks"] = {
            key: len(table or ()) for key, table in vars(module).items() if key.endswith("_hooks")
        }
        state[f"{name} forward"] = module.forward.__func__
        state[f"{name} compiled"] = module._compiled_call_impl
        state[f"{name} checkpointing"] = getattr(module, "gradient_checkpointing", None)
        state[f"{name} children"] = list(module._modules)
    for name, p in model.named_parameters():
        state[f"{name} parameter"] = (id(p), p.requires_grad, p.detach().clone(), len(p._backward_hooks or ()))
        state[f"{name} accumulate hooks"] = len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
    for name, buffer in model.named_buffers():
        state[f"{name} buffer"] = buffer.clone()
    return state


def assert_same_snapshot(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(actual[key], value), key
        elif isinstance(value, tuple):
            same = [
                torch.equal(a, b) if isinstance(b, Tensor) else a == b for a, b in zip(actual[key], value, strict=True)
            ]
            assert all(same), key
        else:
            assert actual[key] == value, key


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "lora", "checkpointing"])
def test_model_is_left_as_found(kind: str, checkpoint_layers: bool) -> None:
    model = with_dropout("lora") if kind == "lora" else build("llama" if kind == "checkpointing" else kind)
    if kind == "checkpointing":
        set_checkpointing(model, on=True)
    base = model.get_base_model() if kind == "lora" else model
    ids = random_ids(2, LENGTH)
    before = snapshot(base)
    engine = engine_for(model, checkpoint_layers=checkpoint_layers)
    assert_same_snapshot(snapshot(base), before)
    loss = engine.loss(ids)
    assert_same_snapshot(snapshot(base), before)
    loss.backward()
    assert_same_snapshot(snapshot(base), before)
    with torch.no_grad():
        engine.logprobs(ids)
    assert_same_snapshot(snapshot(base), before)


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "phi3_longrope_long"])
def test_rope_forgets_the_sequences_of_the_engine(name: str) -> None:
    """Otherwise a shorter sequence would use the frequencies of a longer one."""
    model = build(name)
    rotary = model.model.rotary_emb

    def remembered() -> tuple[Any, Tensor]:
        return getattr(rotary, "max_seq_len_cached", None), rotary.inv_freq.clone()

    cached, frequencies = remembered()
    for ids in (random_ids(1, LENGTH), random_ids(1, 5)):
        loss = engine_for(model).loss(ids)
        assert remembered()[0] == cached and torch.equal(remembered()[1], frequencies)
        loss.backward()
        assert remembered()[0] == cached and torch.equal(remembered()[1], frequencies)


def test_each_part_of_a_model_keeps_its_own_attention() -> None:
    """The text model has a soft cap, which rules out SDPA; the other parts use SDPA."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlavaConfig(
        text_config=Gemma2Config(
            **sizes, vocab_size=61, num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
        ),
        vision_config=CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=28, patch_size=14),
        image_token_index=60,
    )  # fmt: skip
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float64).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})

    def attention() -> list[str]:
        return [
            part._attn_implementation for part in (model.config, model.config.text_config, model.config.vision_config)
        ]

    before, ids = attention(), torch.randint(50, (1, LENGTH))
    assert before == ["sdpa", "eager", "sdpa"]
    expected = model(ids, labels=ids).loss
    loss = engine_for(model).loss(ids)
    assert attention() == before
    loss.backward()
    assert attention() == before
    assert relative_error(loss.detach(), expected.detach()) <= 1e-6
    assert torch.equal(model(ids, labels=ids).loss, expected)


def test_gradient_checkpointing_of_the_model_is_ignored(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    expected_loss, expected = whole_gradients(model, ids)
    set_checkpointing(model, on=True)
    loss = engine_for(model).loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_ordinary_forward_between_the_passes(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    _, expected = whole_gradients(model, ids)
    with torch.no_grad():
        before = model(ids).logits
    loss = engine_for(model).loss(ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


class Failure(Exception):
    pass


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("fail_in", ["fill", "gradient"])
def test_failure_leaves_the_model_as_found(model: Any, fail_in: str, checkpoint_layers: bool) -> None:
    """Model and engine work again afterwards."""
    ids = random_ids(2, LENGTH)
    expected_loss, expected = whole_gradients(model, ids)
    engine = engine_for(model, checkpoint_layers=checkpoint_layers)
    before = snapshot(model)
    calls = 0

    def fail_at_the_third_call(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Failure

    if fail_in == "gradient":
        loss = engine.loss(ids)
    rng = torch.get_rng_state()
    handle = model.model.layers[1].mlp.register_forward_hook(fail_at_the_third_call)
    with pytest.raises(Failure):
        loss.backward() if fail_in == "gradient" else engine.loss(ids)
    handle.remove()
    assert_same_snapshot(snapshot(model), before)
    if fail_in == "gradient":
        assert torch.equal(torch.get_rng_state(), rng)
    if fail_in == "fill":
        assert all(p.grad is None for p in model.parameters())
    loss = engine.loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def live_tensors(model: Any) -> int:
    """Count tensors that Python holds, without the model's gradients."""
    model.zero_grad()
    # Leftovers of earlier tests may take several collections, because finalizers free more.
    while gc.collect():
        pass
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["backward", "dropped", "no_grad"])
def test_no_tensor_is_kept_after_a_call(model: Any, ending: str) -> None:
    """Pages and activations are freed with the loss, with or without a backward."""
    engine = engine_for(model, keep_last_chunk=True)
    ids = random_ids(2, LENGTH)

    def step() -> None:
        if ending == "no_grad":
            with torch.no_grad():
                engine.loss(ids)
        else:
            loss = engine.loss(ids)
            if ending == "backward":
                loss.backward()

    step()
    before = live_tensors(model)
    step()
    assert live_tensors(model) == before


@pytest.mark.slow
def test_backward_frees_the_pages(model: Any) -> None:
    """A loss kept for logging must not keep the pages alive."""
    engine = engine_for(model)
    engine.loss(random_ids(2, LENGTH)).backward()
    before = live_tensors(model)
    loss = engine.loss(random_ids(2, LENGTH))
    while_alive = live_tensors(model)
    loss.backward()
    # The loss, the ids and small tensors of the graph may remain, but not K and V of three layers.
    assert live_tensors(model) - before < 6 <= while_alive - before
