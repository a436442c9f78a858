"""Detecting changes of a model between the passes: what is read, how often, and what does not count as a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import TOLERANCE, backward_gradients, engine_for
from families import assert_same_gradients, build, random_ids
from torch import Tensor, nn
from torch.profiler import profile

from oomb.models import state

LENGTH = 30


def test_transposed_weight_raises(model: Any) -> None:
    """Its values and its address stay the same."""
    weight = model.model.layers[1].self_attn.q_proj.weight  # a square one
    loss = engine_for(model, keep_last_chunk=False).loss(random_ids(1, LENGTH))
    weight.data = weight.data.t()
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()


@pytest.mark.parametrize("is_one_loss", [True, False])
def test_each_backward_reads_the_weights_once(model: Any, is_one_loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [random_ids(1, LENGTH, seed=seed)[0] for seed in range(4)]
    num_reads, checksums = 0, state.checksums

    def counted(parameters: list[nn.Parameter]) -> Any:
        nonlocal num_reads
        num_reads += 1
        return checksums(parameters)

    monkeypatch.setattr(state, "checksums", counted)
    engine = engine_for(model, keep_last_chunk=False)
    losses = [engine.loss(documents)] if is_one_loss else [logp.sum() for logp in engine.logprobs(documents)]
    assert num_reads == 1
    for loss in losses:
        loss.backward()
    assert num_reads == 1 + len(losses)


def test_hook_that_changes_weights_between_sequences_raises(model: Any) -> None:
    """Optimizers that step in the backward may change weights without changing their versions."""
    documents = [random_ids(1, LENGTH, seed=seed)[0] for seed in (0, 1)]

    def change(p: Tensor) -> None:
        p.data.mul_(1.1)

    model.model.norm.weight.register_post_accumulate_grad_hook(change)
    loss = engine_for(model, keep_last_chunk=False).loss(documents)
    with pytest.raises(RuntimeError, match="parameters changed"):
        loss.backward()


def test_checksums_launch_one_kernel_per_weight() -> None:
    weights = [torch.randn(4, 8), torch.randn(4, 8).t(), torch.randn(2, 4, 8).permute(2, 0, 1).to(torch.bfloat16)]
    with profile() as ran:
        state.checksums([nn.Parameter(weight) for weight in weights])
    views = {"aten::view", "aten::permute", "aten::detach", "detach", "aten::as_strided", "aten::unsqueeze"}
    kernels = {event.key: event.count for event in ran.key_averages() if event.key not in views}
    # The profiler also lists what `sum` and `stack` call.
    kernels = {name: count for name, count in kernels.items() if name not in ("aten::fill_", "aten::cat")}
    assert kernels == {"aten::sum": len(weights), "aten::stack": 1}


class ConvertsItsBias(nn.Linear):
    """A layer that changes its bias in its first forward, as bitsandbytes' layers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias.data = self.bias.data.to(x.dtype)
        return super().forward(x)


@pytest.mark.parametrize("num_documents", [1, 3])
@pytest.mark.parametrize("trains", [True, False])
def test_frozen_bias_converted_in_the_first_forward_is_accepted(trains: bool, num_documents: int) -> None:
    model = build("llama").to(torch.bfloat16)
    module = model.model.layers[1].mlp.up_proj
    own = ConvertsItsBias(module.in_features, module.out_features).requires_grad_(False)
    own.weight = module.weight
    model.model.layers[1].mlp.up_proj = own
    documents = [random_ids(1, LENGTH, seed=seed)[0] for seed in range(num_documents)]
    assert own.bias.dtype == torch.float32
    with torch.set_grad_enabled(trains):
        loss = engine_for(model, keep_last_chunk=False).loss(documents)
    assert own.bias.dtype == torch.bfloat16
    if trains:
        first = backward_gradients(model, loss)
        again = backward_gradients(model, engine_for(model, keep_last_chunk=False).loss(documents))
        assert_same_gradients(first, again, TOLERANCE)
