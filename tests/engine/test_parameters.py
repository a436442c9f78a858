"""Frozen parameters get no gradient; tied ones and LoRA get what whole-sequence autograd gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from checks import TOLERANCE, backward_gradients, check_loss, engine_for, lora
from families import LENGTH, assert_same_gradients, build, random_ids, relative_error, whole_gradients, whole_loss

pytestmark = pytest.mark.usefixtures("in_float64")

FREEZES: dict[str, Callable[[str], bool]] = {
    "one_layer": lambda name: "layers.1." in name,
    "first_layer": lambda name: "layers.0." in name,
    "last_layer": lambda name: "layers.2." in name,
    "embeddings": lambda name: "embed_tokens" in name,
    "head": lambda name: "lm_head" in name,
    "final_norm": lambda name: name == "model.norm.weight",
    "norms": lambda name: "norm" in name,
    "all_but_embeddings": lambda name: "embed_tokens" not in name,
    "all_but_head": lambda name: "lm_head" not in name,
    "keys": lambda name: "k_proj" in name,
    "queries": lambda name: "q_proj" in name,
    "values_of_the_first_layer": lambda name: "layers.0.self_attn.v_proj" in name,
}


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("keep_last_chunk", [False, True])
@pytest.mark.parametrize("trains", FREEZES.values(), ids=FREEZES)
def test_frozen_parameters(
    model: Any, trains: Callable[[str], bool], keep_last_chunk: bool, checkpoint_layers: bool
) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(trains(name))
    ids = random_ids(2, LENGTH)
    expected_loss, expected = whole_gradients(model, ids)
    assert any(g is not None for g in expected.values()) and any(g is None for g in expected.values())
    loss = engine_for(model, keep_last_chunk=keep_last_chunk, checkpoint_layers=checkpoint_layers).loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_parameters_frozen_later(model: Any) -> None:
    """Each call looks up which parameters train."""
    ids = random_ids(1, LENGTH)
    engine = engine_for(model)
    engine.loss(ids).backward()
    model.model.embed_tokens.requires_grad_(False)
    _, expected = whole_gradients(model, ids)
    expected["model.embed_tokens.weight"] = None
    assert_same_gradients(backward_gradients(model, engine.loss(ids)), expected, TOLERANCE)


def test_fully_frozen_model_has_no_graph(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    loss = engine_for(model.requires_grad_(False)).loss(ids)
    assert not loss.requires_grad
    assert relative_error(loss, whole_loss(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_tied_embeddings(name: str) -> None:
    """One parameter gets gradients from both ends of the model."""
    model = build(name, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_loss(model, random_ids(2, LENGTH))


def test_eval_mode_trains_as_well(model: Any) -> None:
    check_loss(model.eval(), random_ids(2, LENGTH))


LORA_SETTINGS: dict[str, dict[str, Any]] = {
    "some_linears": {},
    "all_linears": {"target_modules": "all-linear"},
    "head_and_embeddings": {"target_modules": ["k_proj", "lm_head", "embed_tokens"]},
    "saved_modules": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("settings", LORA_SETTINGS.values(), ids=LORA_SETTINGS)
def test_lora(model: Any, settings: dict[str, Any]) -> None:
    wrapped = lora(model, dropout=0.0, **settings)
    assert 0 < sum(p.requires_grad for p in wrapped.parameters()) < len(list(wrapped.parameters()))
    check_loss(wrapped, random_ids(2, LENGTH))
