"""Run training steps with pages in given tiers, and compare them."""

from __future__ import annotations

from typing import Any

import torch
from families import grads, random_ids
from torch import Tensor

import oomb
from oomb.memory.pool import GPU, HOST

LENGTH = 300


Step = tuple[Tensor, dict[str, Tensor | None]]


def train(model: Any, engine: oomb.Engine, num_steps: int = 3, length: int = LENGTH) -> list[Step]:
    """Return losses and gradients of SGD steps on different texts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    steps = []
    for seed in range(num_steps):
        loss = engine.loss(random_ids(1, length, seed=seed))
        loss.backward()
        steps.append((loss.detach(), grads(model)))
        optimizer.step()
        optimizer.zero_grad()
    assert_nothing_is_held(engine)
    return steps


def assert_nothing_is_held(engine: oomb.Engine) -> None:
    tiers = engine.allocator.tiers
    assert not tiers.orphaned and not +tiers.promised and tiers.used_bytes(GPU) == tiers.used_bytes(HOST) == 0
    assert all(len(ring.free) == len(ring.slots) for ring in tiers.rings.values())


def assert_equal(actual: list[Step], expected: list[Step], what: object = "") -> None:
    """Check that two trajectories are equal bit for bit."""
    for index, ((loss, gradients), (expected_loss, expected_gradients)) in enumerate(
        zip(actual, expected, strict=True)
    ):
        assert torch.equal(loss, expected_loss), (what, index)
        differing = [
            name
            for name, g in expected_gradients.items()
            if not (gradients[name] is None if g is None else torch.equal(gradients[name], g))  # type: ignore[arg-type]
        ]
        assert not differing, (what, index, differing)
