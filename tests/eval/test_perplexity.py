"""Loss by position, compared with the model's own forward."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from readers import Reader
from torch import Tensor

from oomb.engine.engine import Engine
from oomb.eval.perplexity import perplexity_by_position


def test_losses_by_position_match_the_models_own_forward(engine: Engine) -> None:
    examples = [torch.randint(256, (length,)) for length in (700, 450)]
    found = perplexity_by_position(engine, examples, first_bucket=128)
    by_position: dict[int, list[float]] = {}
    for ids in examples:
        with torch.no_grad():
            logits = engine.model.lm(ids[None]).logits[0].double()
        losses = -logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        for position, loss in enumerate(losses.tolist(), start=1):
            by_position.setdefault(position, []).append(loss)
    assert [(bucket.start, bucket.end) for bucket in found.buckets] == [(0, 128), (128, 256), (256, 512), (512, 700)]
    for bucket in found.buckets:
        expected = [loss for at in range(bucket.start, bucket.end) for loss in by_position.get(at, [])]
        assert bucket.count == len(expected)
        assert bucket.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found.count == 699 + 449
    everything = [loss for losses in by_position.values() for loss in losses]
    assert found.loss == pytest.approx(sum(everything) / len(everything), rel=1e-5)
    plain = found.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["buckets"][2]["perplexity"] == pytest.approx(math.exp(found.buckets[2].loss))


def test_ignored_labels_do_not_count(engine: Engine) -> None:
    ids = torch.randint(256, (300,))
    labels = ids.clone()
    labels[: 2 * 64] = -100
    found = perplexity_by_position(engine, [{"input_ids": ids, "labels": labels}], first_bucket=64)
    assert [(bucket.start, bucket.count) for bucket in found.buckets] == [(128, 128), (256, 44)]
    whole = perplexity_by_position(engine, [ids], first_bucket=64)
    assert found.buckets == whole.buckets[2:]
    with pytest.raises(ValueError, match="no token contributes"):
        perplexity_by_position(engine, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
    with pytest.raises(ValueError, match="no examples"):
        perplexity_by_position(engine, [])


def test_the_standard_error_matches_repeated_texts() -> None:
    """Runs of tokens are easy or hard together, so an error over tokens would be several times too small."""
    generator = torch.Generator().manual_seed(0)

    def rule(ids: list[int]) -> Tensor:
        # Each run of 256 tokens has its own level.
        level = torch.randn(math.ceil(len(ids) / 256) + 1, generator=generator).repeat_interleave(256)[1 : len(ids) + 1]
        logits = torch.zeros(len(ids), 264)
        logits[:, 0] = level
        return logits

    reader: Any = Reader(rule)
    zeros = torch.zeros(2049, dtype=torch.int64)
    found = [perplexity_by_position(reader, [zeros]).buckets[1] for _ in range(200)]
    losses = torch.tensor([bucket.loss for bucket in found])
    claimed = torch.tensor([bucket.standard_error for bucket in found]).square().mean().sqrt()
    assert float(claimed) == pytest.approx(float(losses.std()), rel=0.2)


def test_evaluation_has_no_dropout_and_leaves_the_model_unchanged(engine: Engine) -> None:
    module = engine.model.lm
    module.model.embed_tokens.register_forward_hook(lambda m, i, out: torch.nn.functional.dropout(out, 0.5, m.training))
    module.train()
    ids = torch.randint(256, (64,))
    first, second = (perplexity_by_position(engine, [ids]).loss for _ in range(2))
    assert first == second
    assert module.training
    assert all(p.grad is None for p in module.parameters())
