"""The loss by position. A model that uses its context predicts late tokens better than early ones: the curve falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomb.eval.samples import eval_mode
from oomb.ops.logprob import IGNORE_INDEX

if TYPE_CHECKING:
    from oomb.engine.engine import Engine

FIRST_BUCKET = 1024
RUN_SIZE = 256
"""Neighbouring tokens are easy or hard together, so a standard error is taken over runs of so many, not over tokens."""


@dataclass(frozen=True)
class Bucket:
    """The tokens at positions `start` to `end - 1` of all examples."""

    start: int
    end: int
    count: int
    loss: float
    """Mean, in nats."""
    standard_error: float | None
    """Of the loss; None where there is a single run of tokens."""


@dataclass(frozen=True, kw_only=True)
class PositionLosses:
    """What `perplexity_by_position` returns."""

    buckets: tuple[Bucket, ...]
    num_examples: int
    count: int
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        buckets = [{**asdict(bucket), "perplexity": perplexity(bucket.loss)} for bucket in self.buckets]
        whole = {"num_windows": self.num_examples, "count": self.count, "loss": self.loss}
        return {**whole, "perplexity": perplexity(self.loss), "buckets": buckets}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def perplexity_by_position(
    engine: Engine, examples: Sequence[Any], *, first_bucket: int = FIRST_BUCKET
) -> PositionLosses:
    """Mean loss in buckets of position: 0 to `first_bucket`, then up to twice that, and so on.

    An example is a tensor of token ids, or a dict with `input_ids` and perhaps `labels`, of which -100 do not count.
    Examples may differ in length. The first token of each is predicted from nothing and does not count.
    """
    if not len(examples):
        raise ValueError("there is no example to evaluate on; give at least one")
    run_size = max(1, min(RUN_SIZE, first_bucket // 4))
    runs: dict[int, list[tuple[float, int]]] = {}
    longest = 0
    for index in range(len(examples)):
        ids_T, labels_T = _example(examples[index])
        longest = max(longest, len(ids_T))
        with eval_mode(engine):
            loss_T = -engine.logprobs(ids_T[None])[0].double().cpu()
        counted_T = labels_T != IGNORE_INDEX
        counted_T[0] = False
        for start in range(0, len(ids_T), run_size):
            counted = counted_T[start : start + run_size]
            if counted.any():
                total = float(loss_T[start : start + run_size][counted].sum())
                runs.setdefault(start // first_bucket, []).append((total, int(counted.sum())))
    buckets: list[Bucket] = []
    start, end = 0, first_bucket
    while start < longest:
        inside = [run for at in range(start // first_bucket, end // first_bucket) for run in runs.get(at, [])]
        if inside:
            buckets.append(_bucket(start, min(end, longest), inside))
        start, end = end, 2 * end
    count = sum(bucket.count for bucket in buckets)
    if count == 0:
        raise ValueError("no token of the examples counts: every label is -100, or an example is a single token")
    loss = sum(bucket.loss * bucket.count for bucket in buckets) / count
    return PositionLosses(buckets=tuple(buckets), num_examples=len(examples), count=count, loss=loss)


def _example(example: Any) -> tuple[Tensor, Tensor]:
    ids, labels = (example["input_ids"], example.get("labels")) if isinstance(example, dict) else (example, None)
    ids_T = torch.as_tensor(ids).cpu()
    return ids_T, torch.as_tensor(ids_T if labels is None else labels).cpu()


def _bucket(start: int, end: int, runs: list[tuple[float, int]]) -> Bucket:
    count = sum(number for _, number in runs)
    loss = sum(total for total, _ in runs) / count
    error = None
    if len(runs) > 1:
        # Of a ratio of sums, since runs at the ends are shorter.
        spread = sum((total - number * loss) ** 2 for total, number in runs)
        error = math.sqrt(spread * len(runs) / (len(runs) - 1)) / count
    return Bucket(start=start, end=end, count=count, loss=loss, standard_error=error)
