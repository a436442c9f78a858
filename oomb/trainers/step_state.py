"""Record what a training step leaves behind besides weights and optimizer states: random numbers, loss and counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Sampler


@dataclass(frozen=True, eq=False)
class StepSnapshot:
    """The state after a training step, besides weights and optimizer, that the next step changes before it finishes."""

    random: dict[str, Any]
    loss: Tensor
    """Summed over the steps since the last log."""
    flos: tuple[float, float]
    num_tokens: Any

    @staticmethod
    def of(trainer: Any) -> StepSnapshot:
        flos = trainer.current_flos, trainer.state.total_flos
        return StepSnapshot(random_state(), trainer._tr_loss.clone(), flos, trainer.state.num_input_tokens_seen)

    @contextmanager
    def restored(self, trainer: Any) -> Iterator[None]:
        """Put the trainer back into this state for the duration of a `with`."""
        now, now_loss = StepSnapshot.of(trainer), trainer._tr_loss
        # If an evaluation was interrupted, its step is already logged.
        is_logged = trainer._globalstep_last_logged == trainer.state.global_step
        self._set(trainer, torch.zeros_like(self.loss) if is_logged else self.loss)
        try:
            yield
        finally:
            now._set(trainer, now_loss)

    def _set(self, trainer: Any, loss: Tensor) -> None:
        set_random_state(self.random)
        trainer._tr_loss = loss
        trainer.current_flos, trainer.state.total_flos = self.flos
        trainer.state.num_input_tokens_seen = self.num_tokens


class SeededByEpoch(Sampler[int]):
    """A random sampler whose order depends only on the seed and the epoch, so a run that resumes within an epoch finds
    the same order."""

    def __init__(self, sampler: Any, seed: int | None) -> None:
        self.sampler, self.seed, self.epoch = sampler, seed or 0, 0
        sampler.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator.manual_seed(self.seed + self.epoch)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def random_state() -> dict[str, Any]:
    """Return the states of all generators that training may draw from."""
    state = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    state["numpy"] = numpy.random.get_state()  # noqa: NPY002 (datasets may use it)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
