"""Compare the engine on tiny models with whole-sequence autograd, and build models that draw random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
from families import assert_same_gradients, build, grads, relative_error, whole_gradients
from torch import Tensor, nn

import oomb

CHUNK = 7
TOLERANCE = 1e-10


def engine_for(model: Any, chunk_size: int = CHUNK, **config: Any) -> oomb.Engine:
    return oomb.Engine(model, oomb.Config(chunk_size=chunk_size, **config))


def backward_gradients(model: Any, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    return grads(model)


def function_gradients(model: Any, value: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return value and gradients of a function, computed on a copy of the model."""
    model = copy.deepcopy(model)
    loss = value(model)
    return loss.detach(), backward_gradients(model, loss)


def check_loss(model: Any, *args: Any, chunk_size: int = CHUNK, **kwargs: Any) -> None:
    expected_loss, expected = whole_gradients(model, *args, **kwargs)
    loss = engine_for(model, chunk_size).loss(*args, **kwargs)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def lora(base: Any, *, dropout: float, **settings: Any) -> Any:
    """Return a model with LoRA whose factors are both non-zero, so that both have gradients."""
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, init_lora_weights=False, **settings)
    )
    for name, p in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return wrapped.double().train()


def with_dropout(kind: str) -> Any:
    """Return a model with dropout as a module or a function call, or with random router noise."""
    if kind == "lora":
        return lora(build("llama"), dropout=0.1)
    settings: dict[str, dict[str, float]] = {
        "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
        "mixtral": {"router_jitter_noise": 0.1},
    }
    return build(kind, **settings[kind])


def check_family(model: Any, ids: torch.Tensor, chunk_size: int, tolerance: float, **config: Any) -> None:
    engine = oomb.Engine(model, oomb.Config(chunk_size=chunk_size, **config))
    expected_loss, expected = whole_gradients(model, ids)
    loss = engine.loss(ids)
    assert loss.shape == () and loss.requires_grad
    assert relative_error(loss.detach(), expected_loss) <= tolerance
    loss.backward()
    assert_same_gradients(grads(model), expected, tolerance)
