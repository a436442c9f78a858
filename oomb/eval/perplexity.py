"""Measure the loss by position: a model that uses its context predicts late tokens better than early ones."""

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
"""Tokens that count as one observation in a standard error, since neighboring tokens are easy or hard together."""


@dataclass(frozen=True)
class Bucket:
    """Loss of the tokens at positions `start` to `end - 1` of all examples."""

    start: int
    end: int
    count: int
    loss: float
    """Mean loss in nats."""
    standard_error: float | None
    """Standard error of the loss; None if there is only one run of tokens."""


@dataclass(frozen=True, kw_only=True)
class PositionLosses:
    """Loss by position, and over all positions."""

    buckets: tuple[Bucket, ...]
    num_examples: int
    count: int
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        buckets = [{**asdict(bucket), "perplexity": perplexity(bucket.loss)} for bucket in self.buckets]
        whole = {"num_windows": self.num_examples, "count": self.count, "loss": self.loss}
        return {**whole, "perplexity": perplexity(self.loss), "buckets": buckets}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def perplexity_by_position(
    engine: Engine, examples: Sequence[Any], *, first_bucket: int = FIRST_BUCKET
) -> PositionLosses:
    """Return the mean loss by position, in buckets that double in size.

    Args:
        engine: The engine to evaluate.
        examples: Tensors of token ids, or dicts with `input_ids` and optionally `labels`, where -100 is
            ignored. Lengths may differ. The first token of an example has no prediction and does not count.
        first_bucket: Size of the first bucket. The second one ends at twice that, and so on.

    Examples:
        >>> import oomb, torch
        >>> from oomb.models.load import load_model
        >>> engine = oomb.Engine(load_model("demo", device="cpu"), oomb.Config(chunk_size=64))
        >>> losses = perplexity_by_position(engine, [torch.arange(200)], first_bucket=64)
        >>> [(bucket.start, bucket.end, bucket.count) for bucket in losses.buckets]
        [(0, 64, 63), (64, 128, 64), (128, 200, 72)]
    """
    if not len(examples):
        raise ValueError("there are no examples to evaluate: pass at least one")
    run_size = max(1, min(RUN_SIZE, first_bucket // 4))
    runs: dict[int, list[tuple[float, int]]] = {}
    longest = 0
    for index in range(len(examples)):
        ids_T, labels_T = _ids_and_labels(examples[index])
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
        raise ValueError("no token contributes to the loss: every label is -100, or every example is a single token")
    loss = sum(bucket.loss * bucket.count for bucket in buckets) / count
    return PositionLosses(buckets=tuple(buckets), num_examples=len(examples), count=count, loss=loss)


def _ids_and_labels(example: Any) -> tuple[Tensor, Tensor]:
    ids, labels = (example["input_ids"], example.get("labels")) if isinstance(example, dict) else (example, None)
    ids_T = torch.as_tensor(ids).cpu()
    return ids_T, torch.as_tensor(ids_T if labels is None else labels).cpu()


def _bucket(start: int, end: int, runs: list[tuple[float, int]]) -> Bucket:
    count = sum(number for _, number in runs)
    loss = sum(total for total, _ in runs) / count
    error = None
    if len(runs) > 1:
        # The last run of an example may be shorter, so this is the standard error of a ratio of sums.
        spread = sum((total - number * loss) ** 2 for total, number in runs)
        error = math.sqrt(spread * len(runs) / (len(runs) - 1)) / count
    return Bucket(start=start, end=end, count=count, loss=loss, standard_error=error)
