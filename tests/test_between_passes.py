"""Between the loss and its backward, and around them: what the user may do, and what is refused."""

from __future__ import annotations

import gc
import threading
from typing import Any

import peft
import pytest
import torch
from checks import TOLERANCE, backward_gradients, check_loss, engine_for, gradients_of, lora
from families import assert_same_gradients, build, grads, random_ids, relative_error, whole_gradients
from torch import Tensor, nn

import oomb
from oomb.memory import PageStore

LENGTH = 30


@pytest.mark.parametrize("trains_at_first", [True, False])
def test_modes_switched_in_between_are_those_of_the_fill_pass(trains_at_first: bool) -> None:
    model = lora(build("llama"), dropout=0.3).train(trains_at_first)
    ids = random_ids(1, LENGTH)

    def loss() -> Tensor:
        torch.manual_seed(3)
        return engine_for(model, keep_last_chunk=False).loss(ids)

    expected = backward_gradients(model, loss())
    value = loss()
    model.train(not trains_at_first)
    actual = backward_gradients(model, value)
    assert_same_gradients(actual, expected, TOLERANCE)
    assert all(module.training is not trains_at_first for module in model.modules())


def test_weights_changed_in_between_are_an_error(model: Any) -> None:
    loss = engine_for(model, keep_last_chunk=False).loss(random_ids(1, LENGTH))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="parameters changed between the loss and its backward"):
        loss.backward()
    assert all(g is None for g in grads(model).values())


def test_adapters_switched_in_between_are_an_error() -> None:
    model = lora(build("llama"), dropout=0.0)
    loss = engine_for(model).loss(random_ids(1, LENGTH))
    with model.disable_adapter(), pytest.raises(RuntimeError, match="adapters changed"):
        loss.backward()


def test_a_reused_buffer_does_not_matter(model: Any) -> None:
    ids = random_ids(1, LENGTH)
    _, expected = whole_gradients(model, ids.clone())
    loss = engine_for(model, keep_last_chunk=False).loss(ids)
    ids.fill_(5)
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.parametrize("param_grad_dtype", ["param", "float32"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_hooks_on_finished_gradients_run_once(dtype: torch.dtype, param_grad_dtype: str) -> None:
    model = build("llama").to(dtype)
    ids = random_ids(1, LENGTH)
    engine = engine_for(model, param_grad_dtype=param_grad_dtype)
    expected = backward_gradients(model, engine.loss(ids))
    model.zero_grad()
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        return lambda p: seen.setdefault(name, []).append(p.grad.clone())

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in model.named_parameters()]
    engine.loss(ids).backward()
    assert {name: len(gradients) for name, gradients in seen.items()} == dict.fromkeys(expected, 1)
    assert_same_gradients({name: gradients[0] for name, gradients in seen.items()}, expected, TOLERANCE)
    for handle in handles:
        handle.remove()
    engine.loss(ids).backward()
    assert all(len(gradients) == 1 for gradients in seen.values())


def test_hooks_on_gradients_of_one_chunk_are_refused(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda g: g.clamp(-1, 1))
    with pytest.raises(ValueError, match=r"norm\.weight has a hook .* register_post_accumulate_grad_hook"):
        engine_for(model).loss(random_ids(1, LENGTH))
    with torch.no_grad():
        engine_for(model).loss(random_ids(1, LENGTH))


def test_a_head_wrapped_after_the_engine_was_made() -> None:
    base = build("llama")
    engine = engine_for(base)
    ids = random_ids(1, LENGTH)
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config).double()
    expected_loss, expected = gradients_of(wrapped, lambda m: m(ids, labels=ids).loss)
    loss = engine.loss(ids)
    # Hugging Face computes this loss in float32.
    assert relative_error(loss.detach(), expected_loss) <= 1e-6
    assert_same_gradients(backward_gradients(wrapped, loss), expected, 1e-6)


def test_a_vocabulary_resized_after_the_engine_was_made(model: Any) -> None:
    engine = engine_for(model)
    model.resize_token_embeddings(120)
    ids = random_ids(1, LENGTH, high=120)
    expected_loss, expected = whole_gradients(model, ids)
    loss = engine.loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.timing
def test_two_threads_take_turns() -> None:
    models = [build("llama", seed=seed) for seed in (0, 1)]
    failures: list[BaseException] = []

    def work(model: Any) -> None:
        try:
            for _ in range(3):
                check_loss(model, random_ids(1, LENGTH))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_model_of_several_processes_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DistributedDataParallel(model)
    oomb.Engine(wrapped)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(oomb.UnsupportedModelError, match="DistributedDataParallel"):
        oomb.Engine(wrapped)


@pytest.mark.parametrize("what", ["evaluated", "dropped", "walked back"])
def test_pages_die_without_the_garbage_collector(model: Any, what: str) -> None:
    """On a GPU they would otherwise hold memory until Python happens to look for cycles."""
    ids = random_ids(1, LENGTH)

    def stores() -> list[PageStore]:
        return [x for x in gc.get_objects() if type(x) is PageStore]

    gc.collect()
    # Whatever tests before this one still hold is theirs.
    others = {id(store): store for store in stores()}
    gc.disable()
    try:
        if what == "evaluated":
            with torch.no_grad():
                engine_for(model).loss(ids)
        else:
            loss = engine_for(model).loss(ids)
            if what == "walked back":
                loss.backward()
            del loss
        assert not [store for store in stores() if id(store) not in others]
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_sliding"])
def test_autocast_costs_no_more_than_in_standard_training(family: str) -> None:
    """Also where attention is computed in plain PyTorch, whose products autocast would round."""
    model = build(family).float()
    ids = random_ids(2, 41)

    def total_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
        pairs = [(actual[name], g) for name, g in expected.items() if g is not None]
        return float(sum((a - g).square().sum() for a, g in pairs) / sum(g.square().sum() for _, g in pairs)) ** 0.5  # type: ignore[operator]

    _, expected = whole_gradients(model, ids)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        standard_loss = model(ids, labels=ids).loss
    standard = total_error(backward_gradients(model, standard_loss), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = engine_for(model).loss(ids)
    assert total_error(backward_gradients(model, loss), expected) <= 1.1 * standard
