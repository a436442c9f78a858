"""The engine's interface: labels, padding, log-probabilities and gradient accumulation, compared with whole-sequence
autograd on a tiny float64 model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import CHUNK, TOLERANCE, backward_gradients, check_loss, engine_for, function_gradients
from families import (
    LENGTH,
    VOCAB,
    assert_same_gradients,
    build,
    grads,
    random_ids,
    relative_error,
    whole_gradients,
    whole_logprobs,
    whole_loss,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oomb.ops.logprob

pytestmark = pytest.mark.usefixtures("in_float64")


# Labels


LABEL_MASKS = {
    "prompt": lambda b, t: t < 13,
    "whole_row": lambda b, t: b == 0,
    "trailing": lambda b, t: t >= 30,
    "all_but_the_last_token": lambda b, t: t < LENGTH - 1,
    "all_but_the_second_token": lambda b, t: t != 1,
    "a_whole_chunk": lambda b, t: (t >= 15) & (t < 22),
    "every_third": lambda b, t: (t + b) % 3 > 0,
}


@pytest.mark.parametrize("hidden", LABEL_MASKS.values(), ids=LABEL_MASKS)
def test_ignored_labels(model: Any, hidden: Callable[[Tensor, Tensor], Tensor]) -> None:
    ids = random_ids(2, LENGTH)
    labels = ids.masked_fill(hidden(torch.arange(2)[:, None], torch.arange(LENGTH)[None]), -100)
    assert (labels == -100).any()
    check_loss(model, ids, labels)


def test_labels_other_than_ids(model: Any) -> None:
    check_loss(model, random_ids(2, LENGTH), random_ids(2, LENGTH, seed=1))


def test_the_first_label_has_no_predecessor(model: Any) -> None:
    ids = random_ids(1, LENGTH)
    labels = ids.clone()
    labels[:, 0] = -100
    engine = engine_for(model)
    with torch.no_grad():
        assert torch.equal(engine.loss(ids, labels), engine.loss(ids))


@pytest.mark.parametrize("num_items", [1, 100, torch.tensor(100)], ids=["1", "100", "tensor"])
def test_num_items_divides_the_sum(model: Any, num_items: int | Tensor) -> None:
    check_loss(model, random_ids(2, LENGTH), num_items=num_items)


@pytest.mark.parametrize("labels", ["all_ignored", "only_the_first"])
def test_no_counted_token_raises(model: Any, labels: str) -> None:
    ids = random_ids(2, LENGTH)
    masked = torch.full_like(ids, -100)
    if labels == "only_the_first":
        masked[:, 0] = ids[:, 0]
    with pytest.raises(ValueError, match="-100"):
        engine_for(model).loss(ids, masked)


def test_length_one(model: Any) -> None:
    ids = random_ids(2, 1)
    with pytest.raises(ValueError, match=r"(?i)token|label"):
        engine_for(model).loss(ids)
    with torch.no_grad():
        assert torch.equal(engine_for(model).logprobs(ids), torch.zeros(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("length", [2, 3])
def test_shortest_sequences(model: Any, length: int) -> None:
    check_loss(model, random_ids(2, length))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_id_dtypes(model: Any, dtype: torch.dtype) -> None:
    ids = random_ids(2, LENGTH)
    labels = ids.masked_fill(torch.arange(LENGTH) < 9, -100)
    expected_loss, expected = whole_gradients(model, ids, labels)
    loss = engine_for(model).loss(ids.to(dtype), labels.to(dtype))
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_inputs_are_not_written_to(model: Any) -> None:
    ids, labels, mask = random_ids(2, LENGTH), random_ids(2, LENGTH, seed=1), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 30:] = 0
    before = [x.clone() for x in (ids, labels, mask)]
    engine_for(model).loss(ids, labels, attention_mask=mask).backward()
    assert all(torch.equal(a, b) for a, b in zip((ids, labels, mask), before, strict=True))


# Batches of different lengths


LENGTHS = [LENGTH, 23, 7, 2]


def padded_batch(junk_seed: int = 5) -> tuple[Tensor, Tensor]:
    """Rows of LENGTHS, padded on the right with meaningless tokens; ids and attention mask."""
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.where(mask.bool(), random_ids(len(LENGTHS), LENGTH), random_ids(len(LENGTHS), LENGTH, seed=junk_seed))
    return ids, mask


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 1000])
def test_padded_rows_match_rows_on_their_own(model: Any, chunk_size: int) -> None:
    ids, mask = padded_batch()

    def alone(m: Any) -> Tensor:
        sums = [whole_loss(m, ids[b : b + 1, :n]) * (n - 1) for b, n in enumerate(LENGTHS)]
        return torch.stack(sums).sum() / sum(n - 1 for n in LENGTHS)

    expected_loss, expected = function_gradients(model, alone)
    loss = engine_for(model, chunk_size).loss(ids, attention_mask=mask)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_padding_changes_nothing(model: Any) -> None:
    """Neither tokens nor labels under the padding matter."""
    engine = engine_for(model)
    (ids, mask), (other_ids, _) = padded_batch(5), padded_batch(6)
    assert not torch.equal(ids, other_ids)
    with torch.no_grad():
        loss = engine.loss(ids, attention_mask=mask)
        assert relative_error(engine.loss(other_ids, attention_mask=mask), loss) <= TOLERANCE
        assert relative_error(engine.loss(ids, other_ids.where(mask == 0, ids), attention_mask=mask), loss) <= TOLERANCE
        assert relative_error(engine.loss(ids, attention_mask=mask.bool()), loss) <= TOLERANCE
        logp = engine.logprobs(ids, attention_mask=mask)
    for b, n in enumerate(LENGTHS):
        expected = whole_logprobs(copy.deepcopy(model), ids[b : b + 1, :n])[0]
        assert relative_error(logp[b, :n], expected) <= TOLERANCE
        assert (logp[b, n:] == 0).all()


def test_a_mask_of_ones_equals_no_mask(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    check_loss(model, ids, attention_mask=torch.ones_like(ids))


# Log-probabilities and losses built on them


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 1000])
def test_logprobs_and_a_weighted_loss(model: Any, chunk_size: int) -> None:
    ids = random_ids(2, LENGTH)
    weights = torch.randn(2, LENGTH, dtype=torch.float64)
    expected_logp = whole_logprobs(copy.deepcopy(model), ids)
    _, expected = function_gradients(model, lambda m: (weights * whole_logprobs(m, ids).exp()).sum())
    logp = engine_for(model, chunk_size).logprobs(ids)
    assert logp.shape == ids.shape and (logp[:, 0] == 0).all()
    assert relative_error(logp.detach(), expected_logp) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, (weights * logp.exp()).sum()), expected, TOLERANCE)


def test_dpo_loss(model: Any) -> None:
    """Two sequences of different lengths with an uncounted prompt, a frozen reference model, one backward."""
    prompt = random_ids(1, 11, seed=2)
    chosen = torch.cat([prompt, random_ids(1, 19, seed=3)], 1)
    rejected = torch.cat([prompt, random_ids(1, 26, seed=4)], 1)
    frozen = build("llama", seed=1).requires_grad_(False)

    def dpo(logprobs: Callable[[Tensor], Tensor], frozen_logprobs: Callable[[Tensor], Tensor]) -> Tensor:
        margins = [logprobs(ids)[:, 11:].sum() - frozen_logprobs(ids)[:, 11:].sum() for ids in (chosen, rejected)]
        return -nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))

    expected_loss, expected = function_gradients(
        model, lambda m: dpo(lambda ids: whole_logprobs(m, ids), lambda ids: whole_logprobs(frozen, ids))
    )
    loss = dpo(engine_for(model).logprobs, engine_for(frozen).logprobs)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)
    assert all(p.grad is None for p in frozen.parameters())


def test_several_calls_alive_before_one_backward(model: Any) -> None:
    """Calls of different lengths whose gradients depend on each other's values."""
    engine = engine_for(model)
    batches = [random_ids(2, 17, seed=1), random_ids(1, LENGTH, seed=2), random_ids(3, 5, seed=3)]

    def product(logprobs: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([logprobs(ids).mean() for ids in batches]).prod()

    _, expected = function_gradients(model, lambda m: product(lambda ids: whole_logprobs(m, ids)))
    assert_same_gradients(backward_gradients(model, product(engine.logprobs)), expected, TOLERANCE)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("keep_last_chunk", [False, True])
def test_backward_in_any_order(model: Any, order: tuple[int, ...], keep_last_chunk: bool) -> None:
    engine = engine_for(model, keep_last_chunk=keep_last_chunk)
    batches = [random_ids(1, 17, seed=1), random_ids(1, LENGTH, seed=2), random_ids(1, 5, seed=3)]
    losses = [engine.loss(ids) for ids in batches]
    for index in order:
        _, expected = whole_gradients(model, batches[index])
        assert_same_gradients(backward_gradients(model, losses[index]), expected, TOLERANCE)


def test_gradient_accumulation(model: Any) -> None:
    engine = engine_for(model)
    batches = [random_ids(2, 17, seed=1), random_ids(1, LENGTH, seed=2), random_ids(2, 8, seed=3)]
    num_items = sum(ids[:, 1:].numel() for ids in batches)
    _, expected = function_gradients(model, lambda m: sum(whole_loss(m, ids, num_items=num_items) for ids in batches))
    for ids in batches:
        engine.loss(ids, num_items=num_items).backward()
    assert_same_gradients(grads(model), expected, TOLERANCE)


def test_existing_gradients_are_added_to(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    _, expected = whole_gradients(model, ids)
    before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = before[name].clone()
    kept = {name: p.grad for name, p in model.named_parameters()}
    engine_for(model).loss(ids).backward()
    assert_same_gradients(grads(model), {name: before[name] + g for name, g in expected.items()}, TOLERANCE)
    # In place, because an optimizer or a reducer may keep references to gradient tensors.
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


def test_loss_among_other_terms(model: Any) -> None:
    """The loss is scaled and added to a penalty on a parameter and to an ordinary forward of the same model."""
    ids, other = random_ids(2, LENGTH), random_ids(1, 9, seed=1)

    def total(m: Any, loss: Callable[..., Tensor]) -> Tensor:
        return 2.5 * loss(ids) / 3 + 0.1 * m.model.norm.weight.square().sum() + 0.2 * whole_loss(m, other)

    expected_loss, expected = function_gradients(model, lambda m: total(m, lambda i: whole_loss(m, i)))
    loss = total(model, engine_for(model).loss)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_second_backward_raises(model: Any, retain_graph: bool) -> None:
    loss = engine_for(model).loss(random_ids(2, LENGTH))
    loss.backward(retain_graph=retain_graph)
    before = grads(model)
    with pytest.raises(RuntimeError):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(model).values(), before.values(), strict=True))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_fill_pass_runs(model: Any, context: Callable[[], Any]) -> None:
    ids = random_ids(2, LENGTH)
    engine = engine_for(model)
    loss, logp = engine.loss(ids), engine.logprobs(ids)
    layer_calls = []
    model.model.layers[0].register_forward_hook(lambda *_: layer_calls.append(torch.is_grad_enabled()))
    with context():
        plain_loss, plain_logp = engine.loss(ids), engine.logprobs(ids)
    assert not plain_loss.requires_grad and plain_loss.grad_fn is None and not plain_logp.requires_grad
    assert torch.equal(plain_loss, loss.detach()) and torch.equal(plain_logp, logp.detach())
    assert layer_calls == [False] * (2 * -(-LENGTH // CHUNK))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_length_chunk_size_batch_and_labels(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3), label="batch")
    length = data.draw(st.integers(2, 24), label="length")
    chunk_size = data.draw(st.integers(1, 26), label="chunk_size")
    counted = st.lists(st.booleans(), min_size=length, max_size=length)
    hidden = ~torch.tensor([data.draw(counted, label=f"counted in row {b}") for b in range(batch)])
    model = build("llama", num_hidden_layers=2)
    ids = random_ids(batch, length, seed=batch + 10 * length)
    labels = ids.masked_fill(hidden, -100)
    if (labels[:, 1:] == -100).all():
        with pytest.raises(ValueError, match="-100"):
            engine_for(model, chunk_size).loss(ids, labels)
    else:
        check_loss(model, ids, labels, chunk_size=chunk_size)


def test_size_of_vocabulary_tiles_does_not_matter(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a tile has three rows of logits."""
    monkeypatch.setattr(oomb.ops.logprob, "PLAIN_TILE", 3 * VOCAB)
    check_loss(model, random_ids(2, LENGTH))
