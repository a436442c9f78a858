"""Estimate how much of a step is done and how long the rest will take."""

from __future__ import annotations

import time
from statistics import mean

# Share of a step's time. The gradient pass recomputes every chunk, and a backward takes twice as long as a forward.
FILL_SHARE = 0.25


class Clock:
    """Clock of the current step or evaluation.

    Chunks take different times: later ones attend to more tokens, and the gradient pass is slower than the fill pass.
    The first step is estimated by a rule of thumb, later ones by how the step before spent its time.
    """

    def __init__(self) -> None:
        self.batch, self.num_batches = 0, 1
        self.done = 0.0
        """Share of the step or evaluation that is done."""
        self._forward_only = False
        self._begun: float | None = None
        self._marked = 0.0
        self._left: float | None = None
        self._marks: dict[tuple[int, str, int, int], float] = {}
        self._shares: dict[tuple[int, str, int, int], float] = {}
        self._times: list[float] = []

    def begin(self, num_batches: int, *, forward_only: bool = False) -> None:
        """Start a step, or an evaluation if `forward_only`."""
        self.batch, self.num_batches, self.done = 0, max(1, num_batches), 0.0
        self._forward_only = forward_only
        self._begun = self._marked = time.monotonic()
        self._left = None if forward_only else self.mean_step_s()
        self._marks = {}

    def chunk_done(self, phase: str, done: int, total: int) -> None:
        """Update the estimate after chunk `done` of `total` in a pass."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        key = self.batch, phase, done, total
        elapsed = now - self._begun
        self._marks[key] = elapsed
        share = done / total
        if not self._forward_only:
            share = FILL_SHARE * share if phase == "fill" else FILL_SHARE + (1 - FILL_SHARE) * share
        guess = min((self.batch + share) / self.num_batches, 1.0)
        self.done = guess if self._forward_only else self._shares.get(key, guess)
        self._marked, self._left = now, elapsed / max(self.done, 1e-9) * (1 - self.done)

    def step_done(self, step_s: float) -> None:
        """Learn from a finished step.

        Args:
            step_s: Seconds it took.
        """
        self._times.append(step_s)
        self._shares = {key: at / max(step_s, 1e-9) for key, at in self._marks.items()}
        self._begun = self._left = None

    def mean_step_s(self) -> float | None:
        """Return the seconds of a step, without the first, which may compile. During the first, return the estimate."""
        if self._times:
            return mean(self._times[1:] or self._times)
        if self._begun is None or not self.done or self._forward_only:
            return None
        return (self._marked - self._begun) / self.done

    def left_s(self) -> float | None:
        """Return the seconds left of the step or evaluation."""
        return None if self._left is None else max(0.0, self._left - (time.monotonic() - self._marked))
