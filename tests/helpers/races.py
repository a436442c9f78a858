"""Delay copies and computation at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import grads, random_ids
from torch import Tensor

import oomb
from oomb.memory import store as store_module
from oomb.memory.store import PageStore
from oomb.memory.tiers import Tiers
from oomb.memory.transfer import Buffer, Copies, Event, Load

LENGTH, CHUNK_SIZE = 140, 16


def results(model: Any, engine: oomb.Engine, length: int = LENGTH) -> list[Tensor]:
    """Return losses and gradients of two texts whose passes are interleaved."""
    model.zero_grad()
    losses = [engine.loss(random_ids(1, n, seed=n)) for n in (length, length // 2)]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(g for g in grads(model).values() if g is not None)]


def are_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


SHORT = 1_000_000


def delay_copies(tiers: Tiers, patch: pytest.MonkeyPatch, *, loads: int, stores: int, seed: int | None = None) -> None:
    copier, run, draw = tiers.streams, tiers.streams._run, random.Random(seed)

    def late(stream: Any, copies: Copies, after: Any) -> Event:
        cycles = loads if stream is copier.loads else stores
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles if seed is None else draw.randrange(1, 2 * cycles))
        return run(stream, copies, after)

    patch.setattr(copier, "_run", late)


def delay_computation(tiers: Tiers, patch: pytest.MonkeyPatch, cycles: int, seed: int | None = None) -> None:
    """Delay the computation before it uses a loaded buffer, stores K and V, or adds to gradients."""
    draw = random.Random(seed)

    def sleep() -> None:
        torch.cuda._sleep(cycles if seed is None else draw.randrange(1, 2 * cycles))

    take, append, accumulate_ = tiers.prefetcher.take, PageStore.append, store_module.add_stochastic_

    def late_take(load: Load) -> Buffer:
        slot = take(load)
        sleep()
        return slot

    def late_append(*args: Any) -> None:
        sleep()
        append(*args)

    def late_accumulate(*args: Any) -> None:
        sleep()
        accumulate_(*args)

    patch.setattr(tiers.prefetcher, "take", late_take)
    patch.setattr(PageStore, "append", late_append)
    patch.setattr(store_module, "add_stochastic_", late_accumulate)
