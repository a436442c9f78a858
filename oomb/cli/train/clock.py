"""How far a step is, and how long the rest takes."""

from __future__ import annotations

import time
from statistics import mean

# Of a step's time, about: the gradient pass computes every chunk again and then its backward, twice the work of that.
FILL_SHARE = 0.25


class Clock:
    """Where in a step we are, in time: how much is done, and how much is left.

    Chunks take unlike times: later ones attend to more, and the gradient pass is dearer than the fill pass. A whole
    step's chunks tell how the next one's time will be spent; until there is one, a rule of thumb does.
    """

    def __init__(self) -> None:
        self.batch, self.num_batches = 0, 1
        self.done = 0.0
        self._forward_only = False
        self._begun: float | None = None
        self._marked = 0.0
        self._left: float | None = None
        self._marks: dict[tuple[int, str, int, int], float] = {}
        self._shares: dict[tuple[int, str, int, int], float] = {}
        self._times: list[float] = []

    def begin(self, num_batches: int, *, forward_only: bool = False) -> None:
        self.batch, self.num_batches, self.done = 0, max(1, num_batches), 0.0
        self._forward_only = forward_only
        self._begun = self._marked = time.monotonic()
        self._left = None if forward_only else self.pace_s()
        self._marks = {}

    def chunk_done(self, phase: str, done: int, total: int) -> None:
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

    def step_done(self) -> float:
        """Seconds that the step took."""
        took = 0.0 if self._begun is None else time.monotonic() - self._begun
        self._times.append(took)
        self._shares = {key: at / max(took, 1e-9) for key, at in self._marks.items()}
        self._begun = self._left = None
        return took

    def pace_s(self) -> float | None:
        """Seconds of a step: of all but the first, which may compile; in the first, what it will come to."""
        if self._times:
            return mean(self._times[1:] or self._times)
        if self._begun is None or not self.done or self._forward_only:
            return None
        return (self._marked - self._begun) / self.done

    def left_s(self) -> float | None:
        """Seconds left of the step, or of the evaluation."""
        return None if self._left is None else max(0.0, self._left - (time.monotonic() - self._marked))
