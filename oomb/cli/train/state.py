"""Keep what has happened in a run so far, where display, metrics, signals and the run itself can read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run that are known before its first step."""

    title: str
    tokens_per_step: int
    num_eval_batches: int = 1
    flops_per_step: float | None = None
    peak_flops: float | None = None
    """Of the GPU, if it is a known one."""
    device_bytes: int | None = None
    """Memory of the GPU, or of the machine if there is none."""
    gpu_page_bytes: int | None = None
    """Device memory set aside for pages."""
    host_page_bytes: int | None = None
    """Host memory that pages may take."""

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the share of the GPU's peak FLOP/s that the model's own arithmetic uses; None if unknown."""
        if not self.flops_per_step or not self.peak_flops:
            return None
        return tokens_per_s / self.tokens_per_step * self.flops_per_step / self.peak_flops


@dataclass
class RunState:
    """State of a run. `StepRecorder` and signals update it; everything else only reads it."""

    first_step: int = 0
    """Steps done before this run, if it resumed from a checkpoint."""
    max_steps: int = 0
    step_times: list[float] = field(default_factory=list)
    """Seconds of each step of this run."""
    step_tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    """Held-out losses by step."""
    is_training: bool = False
    """Whether the trainer's loop is running. It may be between two steps."""
    is_complete: bool = False
    """Whether training has reached its last step."""
    error: str | None = None
    """What ended training early."""
    are_weights_lost: bool = False
    """Whether the weights are NaN or infinite."""
    stop_requested: bool = False
    """Whether a signal asks to stop what is being computed, at the next chunk."""
    terminated: bool = False
    """Whether SIGTERM or SIGHUP asks to end the run."""
    slowest_rank: int | None = None
    """Rank that the others waited for in the last step; None if there is only one."""
    longest_wait_s: float = 0.0
    """Seconds that one of them waited."""
    started: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.first_step + len(self.step_times)

    @property
    def num_tokens(self) -> int:
        return sum(self.step_tokens)

    @property
    def has_trained(self) -> bool:
        """Whether the model is worth saving."""
        is_at_end = self.is_complete and self.first_step == self.max_steps
        return (bool(self.step_times) or is_at_end) and not self.are_weights_lost

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def last_speed(self) -> float:
        """Tokens per second of the last step."""
        return self.step_tokens[-1] / max(self.step_times[-1], 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Mean over all steps but the first, which may compile; over the first if there is no other."""
        times, tokens = self.step_times[1:] or self.step_times, self.step_tokens[1:] or self.step_tokens
        return sum(tokens) / max(sum(times), 1e-9)
