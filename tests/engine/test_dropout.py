"""Dropout is replayed in the gradient pass, and the user's random number stream is left alone."""

from __future__ import annotations

import pytest
import torch
from checks import CHUNK, TOLERANCE, backward_gradients, check_loss, engine_for, with_dropout
from families import LENGTH, assert_same_gradients, random_ids
from torch import Tensor, nn

import oomb

pytestmark = pytest.mark.usefixtures("in_float64")

DROPOUT_KINDS = ["lora", "gpt2", "starcoder2"]


def seeded_loss(engine: oomb.Engine, ids: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return engine.loss(ids)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("keep_last_chunk", [False, True])
@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_dropout_gradient_is_the_derivative_of_the_loss(
    kind: str, keep_last_chunk: bool, checkpoint_layers: bool
) -> None:
    """Compares with finite differences of the fill pass, one random direction per parameter."""
    model = with_dropout(kind)
    engine = engine_for(model, keep_last_chunk=keep_last_chunk, checkpoint_layers=checkpoint_layers)
    ids = random_ids(2, LENGTH)
    loss = seeded_loss(engine, ids)
    torch.manual_seed(123)  # the gradient pass must not depend on the global state
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
    engine.reserve(1, 2)  # the first call sends one token to record layer shapes
    seen: list[Tensor] = []
    last_norm = [m for m in model.modules() if type(m).__name__.endswith("Norm")][-1]
    last_norm.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    loss = engine.loss(random_ids(2, LENGTH))
    filled = list(seen)
    seen.clear()
    loss.backward()
    assert len(filled) == len(seen) == -(-LENGTH // CHUNK)
    assert all(torch.equal(a, b) for a, b in zip(seen, reversed(filled), strict=True))
    # Another seed gives another result.
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
    # Without a new seed two steps drop differently.
    torch.manual_seed(0)
    assert not torch.equal(engine.loss(ids), engine.loss(ids))


@pytest.mark.slow
@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_calls_alive_together_replay_their_own_dropout(kind: str) -> None:
    """Two calls on one text, then two backwards in either order."""
    model = with_dropout(kind)
    engine = engine_for(model)
    ids = random_ids(1, LENGTH)
    alone = [backward_gradients(model, seeded_loss(engine, ids, seed)) for seed in (1, 2)]
    for order in ((0, 1), (1, 0)):
        losses = [seeded_loss(engine, ids, seed) for seed in (1, 2)]
        for index in order:
            assert_same_gradients(backward_gradients(model, losses[index]), alone[index], TOLERANCE)


@pytest.mark.parametrize("kind", ["lora", "gpt2"])
def test_dropout_differs_between_chunks_and_not_between_passes(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model, chunk_size=8, keep_last_chunk=False, checkpoint_layers=False)
    dropout = next(m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0)
    engine.reserve(1, 2)  # the first call sends one token to record layer shapes
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
def test_backward_leaves_the_random_state_alone(kind: str) -> None:
    model = with_dropout(kind)
    engine = engine_for(model)
    loss = seeded_loss(engine, random_ids(2, LENGTH))
    between = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), between)


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_random_state_does_not_depend_on_the_chunk_size(kind: str) -> None:
    """Users draw the same numbers after a step, whatever its chunks were."""
    model = with_dropout(kind)
    after = []
    for chunk_size in (7, 1000):
        seeded_loss(engine_for(model, chunk_size), random_ids(2, LENGTH))
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.parametrize("kind", DROPOUT_KINDS)
def test_no_dropout_in_eval_mode(kind: str) -> None:
    check_loss(with_dropout(kind).eval(), random_ids(2, LENGTH))
