"""What the engine's face promises, on tiny float64 models: labels, padding, accumulation, frozen parameters, LoRA,
dropout, and a model left as it was found. Whole-sequence autograd is the judge throughout."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from families import (
    LENGTH,
    VOCAB,
    float64_throughout,
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

import oomb

CHUNK = 7
TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """RMSNorm and the rotary tables in float64 too: then agreement is to rounding and a tolerance of 1e-10 is meant."""
    with float64_throughout():
        yield


@pytest.fixture
def model() -> Any:
    return build("llama")


def engine_for(model: Any, chunk_size: int = CHUNK, **config: Any) -> oomb.Engine:
    return oomb.Engine(model, oomb.Config(chunk_size=chunk_size, **config))


def backward_gradients(model: Any, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    return grads(model)


def gradients_of(model: Any, value: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Value and gradients of an ordinary function of a copy of the model."""
    model = copy.deepcopy(model)
    loss = value(model)
    return loss.detach(), backward_gradients(model, loss)


def check_loss(model: Any, *args: Any, chunk_size: int = CHUNK, **kwargs: Any) -> None:
    expected_loss, expected = whole_gradients(model, *args, **kwargs)
    loss = engine_for(model, chunk_size).loss(*args, **kwargs)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


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
def test_no_counted_token_is_an_error(model: Any, labels: str) -> None:
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
def test_right_padding_is_each_row_alone(model: Any, chunk_size: int) -> None:
    ids, mask = padded_batch()

    def alone(m: Any) -> Tensor:
        sums = [whole_loss(m, ids[b : b + 1, :n]) * (n - 1) for b, n in enumerate(LENGTHS)]
        return torch.stack(sums).sum() / sum(n - 1 for n in LENGTHS)

    expected_loss, expected = gradients_of(model, alone)
    loss = engine_for(model, chunk_size).loss(ids, attention_mask=mask)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def test_padding_holds_nothing_that_matters(model: Any) -> None:
    """Neither the tokens under the padding nor labels on it change anything."""
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


def test_a_mask_of_ones_is_no_mask(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    check_loss(model, ids, attention_mask=torch.ones_like(ids))


# Log-probabilities and losses built on them


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 1000])
def test_logprobs_and_a_weighted_loss(model: Any, chunk_size: int) -> None:
    ids = random_ids(2, LENGTH)
    weights = torch.randn(2, LENGTH, dtype=torch.float64)
    expected_logp = whole_logprobs(copy.deepcopy(model), ids)
    _, expected = gradients_of(model, lambda m: (weights * whole_logprobs(m, ids).exp()).sum())
    logp = engine_for(model, chunk_size).logprobs(ids)
    assert logp.shape == ids.shape and (logp[:, 0] == 0).all()
    assert relative_error(logp.detach(), expected_logp) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, (weights * logp.exp()).sum()), expected, TOLERANCE)


def test_dpo_loss(model: Any) -> None:
    """Two sequences of different lengths, prompt not counted, a frozen reference model, one backward."""
    prompt = random_ids(1, 11, seed=2)
    chosen = torch.cat([prompt, random_ids(1, 19, seed=3)], 1)
    rejected = torch.cat([prompt, random_ids(1, 26, seed=4)], 1)
    frozen = build("llama", seed=1).requires_grad_(False)

    def dpo(logprobs: Callable[[Tensor], Tensor], frozen_logprobs: Callable[[Tensor], Tensor]) -> Tensor:
        margins = [logprobs(ids)[:, 11:].sum() - frozen_logprobs(ids)[:, 11:].sum() for ids in (chosen, rejected)]
        return -nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))

    expected_loss, expected = gradients_of(
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
    _, expected = gradients_of(model, lambda m: torch.stack([whole_logprobs(m, i).mean() for i in batches]).prod())
    loss = torch.stack([engine.logprobs(i).mean() for i in batches]).prod()
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


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
    _, expected = gradients_of(model, lambda m: sum(whole_loss(m, ids, num_items=num_items) for ids in batches))
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
    # In place: an optimizer or a reducer may hold on to the gradient tensors.
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


def test_loss_among_other_terms(model: Any) -> None:
    """Scaled, added to a penalty on a parameter, together with an ordinary forward of the same model."""
    ids, other = random_ids(2, LENGTH), random_ids(1, 9, seed=1)

    def total(m: Any, loss: Callable[..., Tensor]) -> Tensor:
        return 2.5 * loss(ids) / 3 + 0.1 * m.model.norm.weight.square().sum() + 0.2 * whole_loss(m, other)

    expected_loss, expected = gradients_of(model, lambda m: total(m, lambda i: whole_loss(m, i)))
    loss = total(model, engine_for(model).loss)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_an_error(model: Any, retain_graph: bool) -> None:
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


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# Which parameters train


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


def test_frozen_after_the_engine_was_made(model: Any) -> None:
    """What trains is decided by each call, not by the first."""
    ids = random_ids(1, LENGTH)
    engine = engine_for(model)
    engine.loss(ids).backward()
    model.model.embed_tokens.requires_grad_(False)
    _, expected = whole_gradients(model, ids)
    expected["model.embed_tokens.weight"] = None
    assert_same_gradients(backward_gradients(model, engine.loss(ids)), expected, TOLERANCE)


def test_wholly_frozen_model_has_no_graph(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    loss = engine_for(model.requires_grad_(False)).loss(ids)
    assert not loss.requires_grad
    assert relative_error(loss, whole_loss(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_tied_embeddings(name: str) -> None:
    """One parameter, gradients from both ends of the model."""
    model = build(name, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_loss(model, random_ids(2, LENGTH))


def test_eval_mode_trains_as_well(model: Any) -> None:
    check_loss(model.eval(), random_ids(2, LENGTH))


def lora(base: Any, *, dropout: float, **settings: Any) -> Any:
    """LoRA with both factors non-zero, so that both have gradients."""
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, init_lora_weights=False, **settings)
    )
    for name, p in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return wrapped.double().train()


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


# Dropout


def with_dropout(kind: str) -> Any:
    """Dropout as a module, as a bare function call, and drawn by the router of a mixture of experts."""
    if kind == "lora":
        return lora(build("llama"), dropout=0.1)
    settings: dict[str, dict[str, float]] = {
        "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
        "mixtral": {"router_jitter_noise": 0.1},
    }
    return build(kind, **settings[kind])


DROPOUT_KINDS = ["lora", "gpt2", "starcoder2"]


def seeded_loss(engine: oomb.Engine, ids: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return engine.loss(ids)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("keep_last_chunk", [False, True])
@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_dropout_gradient_is_the_derivative_of_the_loss(
    kind: str, keep_last_chunk: bool, checkpoint_layers: bool
) -> None:
    """Finite differences of what the fill pass computes: the gradient pass must have dropped what the fill pass did.

    One random direction per parameter, so that no parameter's error hides behind another's gradient.
    """
    model = with_dropout(kind)
    engine = engine_for(model, keep_last_chunk=keep_last_chunk, checkpoint_layers=checkpoint_layers)
    ids = random_ids(2, LENGTH)
    loss = seeded_loss(engine, ids)
    torch.manual_seed(123)  # the gradient pass must not depend on the global state at its time
    loss.backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    step = 1e-5
    for name, p in trained[:: max(1, len(trained) // 6)]:
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(7), dtype=p.dtype)
        direction /= direction.norm()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(direction, alpha=sign * step)
                values.append(seeded_loss(engine, ids).item())
                p.add_(direction, alpha=-sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        assert (p.grad * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("kind", [*DROPOUT_KINDS, "mixtral"])
def test_gradient_pass_recomputes_what_the_fill_pass_computed(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model, keep_last_chunk=False, checkpoint_layers=False)
    seen: list[Tensor] = []
    last_norm = [m for m in model.modules() if type(m).__name__.endswith("Norm")][-1]
    last_norm.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    loss = engine.loss(random_ids(2, LENGTH))
    filled = list(seen)
    seen.clear()
    loss.backward()
    assert len(filled) == len(seen) == -(-LENGTH // CHUNK)
    assert all(torch.equal(a, b) for a, b in zip(seen, reversed(filled), strict=True))
    # The draw matters: another one gives another result.
    with torch.no_grad():
        assert not torch.equal(seeded_loss(engine, random_ids(2, LENGTH), seed=5), loss)


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_dropout_repeats_with_the_seed(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model)
    ids = random_ids(2, LENGTH)
    first = seeded_loss(engine, ids)
    first_grads = backward_gradients(model, first)
    again = seeded_loss(engine, ids)
    assert torch.equal(first, again)
    again_grads = backward_gradients(model, again)
    assert all(torch.equal(g, again_grads[name]) for name, g in first_grads.items() if g is not None)
    with torch.no_grad():
        assert torch.equal(seeded_loss(engine, ids), first)
    assert not torch.equal(seeded_loss(engine, ids, seed=1), first)
    # Without a new seed the stream goes on: two steps must not drop alike.
    torch.manual_seed(0)
    assert not torch.equal(engine.loss(ids), engine.loss(ids))


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_dropout_of_calls_alive_together(kind: str) -> None:
    """Two calls on one text, then two backwards in either order: each replays its own dropout."""
    model = with_dropout(kind)
    engine = engine_for(model)
    ids = random_ids(1, LENGTH)
    alone = [backward_gradients(model, seeded_loss(engine, ids, seed)) for seed in (1, 2)]
    for order in ((0, 1), (1, 0)):
        losses = [seeded_loss(engine, ids, seed) for seed in (1, 2)]
        for index in order:
            assert_same_gradients(backward_gradients(model, losses[index]), alone[index], TOLERANCE)


@pytest.mark.parametrize("kind", ["lora", "gpt2"])
def test_dropout_falls_differently_in_every_chunk_and_alike_in_both_passes(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model, chunk_size=8, keep_last_chunk=False, checkpoint_layers=False)
    dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0)
    dropped: list[Tensor] = []
    dropout.register_forward_hook(lambda module, args, out: dropped.append((out == 0) & (args[0] != 0)))
    loss = engine.loss(random_ids(1, 32))
    filled = list(dropped)
    assert len(filled) == 4 and all(d.any() and not d.all() for d in filled)
    assert not any(torch.equal(filled[i], filled[j]) for i in range(4) for j in range(i))
    dropped.clear()
    loss.backward()
    assert len(dropped) == 4
    assert all(torch.equal(a, b) for a, b in zip(dropped, reversed(filled), strict=True))


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_backward_leaves_the_random_stream_alone(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model)
    loss = seeded_loss(engine, random_ids(2, LENGTH))
    between = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), between)


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_random_stream_does_not_depend_on_the_chunk_size(kind: str) -> None:
    """What the user draws after a step is the same however the step was cut."""
    model = with_dropout(kind)
    after = []
    for chunk_size in (7, 1000):
        seeded_loss(engine_for(model, chunk_size), random_ids(2, LENGTH))
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_no_dropout_in_eval_mode(kind: str) -> None:
    check_loss(with_dropout(kind).eval(), random_ids(2, LENGTH))


# The model is left as it was found


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All there is to see of a model but its gradients."""
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
        model.gradient_checkpointing_enable()
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


def test_gradient_checkpointing_of_the_model_is_no_obstacle(model: Any) -> None:
    ids = random_ids(2, LENGTH)
    expected_loss, expected = whole_gradients(model, ids)
    model.gradient_checkpointing_enable()
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
def test_a_failure_in_the_middle_leaves_the_model_as_found(model: Any, fail_in: str, checkpoint_layers: bool) -> None:
    """Then the model and the engine work on as if nothing had happened."""
    ids = random_ids(2, LENGTH)
    expected_loss, expected = whole_gradients(model, ids)
    engine = engine_for(model, checkpoint_layers=checkpoint_layers)
    before = snapshot(model)
    rng = torch.get_rng_state()
    calls = 0

    def fail_at_the_third_call(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Failure

    if fail_in == "gradient":
        loss = engine.loss(ids)
    handle = model.model.layers[1].mlp.register_forward_hook(fail_at_the_third_call)
    with pytest.raises(Failure):
        loss.backward() if fail_in == "gradient" else engine.loss(ids)
    handle.remove()
    assert_same_snapshot(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), rng)
    if fail_in == "fill":
        assert all(p.grad is None for p in model.parameters())
    loss = engine.loss(ids)
    assert relative_error(loss.detach(), expected_loss) <= TOLERANCE
    assert_same_gradients(backward_gradients(model, loss), expected, TOLERANCE)


def live_tensors(model: Any) -> int:
    """Tensors that Python holds, the model's gradients aside."""
    model.zero_grad()
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("ending", ["backward", "dropped", "no_grad"])
def test_nothing_is_held_after_a_call(model: Any, ending: str) -> None:
    """Pages and activations go with the loss, whether or not it was back-propagated."""
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


def test_pages_are_freed_by_the_backward_itself(model: Any) -> None:
    """A loss kept for logging must not keep the sequence's pages."""
    engine = engine_for(model)
    engine.loss(random_ids(2, LENGTH)).backward()
    before = live_tensors(model)
    loss = engine.loss(random_ids(2, LENGTH))
    while_alive = live_tensors(model)
    loss.backward()
    # The loss, the ids and the few small tensors of its graph may remain; K and V of three layers may not.
    assert live_tensors(model) - before < 6 <= while_alive - before


def test_vocabulary_tiles_do_not_matter(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in tiles of three rows."""
    import oomb.loss

    monkeypatch.setattr(oomb.loss, "PLAIN_TILE", 3 * VOCAB)
    check_loss(model, random_ids(2, LENGTH))
