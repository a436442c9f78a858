"""Cases of data parallelism, run on every rank by `ranks.py`. Each compares with an engine of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import lora
from families import VOCAB, assert_same_gradients, build, float64_throughout, grads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import oomb
from oomb.distributed import data_parallel
from oomb.distributed.topology import TopologyError

CHUNK = 8
LENGTHS = (45, 9, 30, 17, 24, 41)
"""Longer than a chunk, so that no two share one and each is computed alike on any rank."""
TOLERANCE = 1e-12
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: build(name) for name in ("llama", "qwen3", "gemma3", "mixtral")},
    "lora": lambda: lora(build("llama"), dropout=0.0),
}


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def own(mesh: DeviceMesh, given: list[Any]) -> list[Any]:
    return given[mesh.get_rank() :: mesh.size()]


def pair(model: Any, mesh: DeviceMesh, **config: Any) -> tuple[oomb.Engine, oomb.Engine]:
    """(an engine of this process alone on a copy of the model, an engine of all ranks)"""
    settings = oomb.Config(chunk_size=CHUNK, page_size=4, **config)
    return oomb.Engine(copy.deepcopy(model), settings), oomb.Engine(model, settings, mesh=mesh)


def expect_same(alone: oomb.Engine, together: oomb.Engine, tolerance: float = TOLERANCE) -> None:
    assert_same_gradients(grads(together.model.lm), grads(alone.model.lm), tolerance)


def everyones(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x)
    return parts


def case_gradients_of_all_models(mesh: DeviceMesh) -> None:
    for make in MODELS.values():
        with float64_throughout():
            alone, together = pair(make(), mesh)
            expected = alone.loss(documents())
            expected.backward()
            # Ranks have different numbers of sequences, and of chunks.
            loss = together.loss(own(mesh, documents()))
            assert all(torch.equal(loss, other) for other in everyones(loss.detach()))
            torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
            loss.backward()
            expect_same(alone, together)


def case_selected_host_and_int8_pages(mesh: DeviceMesh) -> None:
    for config in (
        {"page_budget": 2},
        {"gpu_memory": 0},
        {"kv_dtype": "int8", "grad_dtype": "int8"},
    ):
        alone, together = pair(build("llama"), mesh, **config)
        alone.loss(documents()).backward()
        together.loss(own(mesh, documents())).backward()
        expect_same(alone, together)


def case_a_rank_without_sequences(mesh: DeviceMesh) -> None:
    alone, together = pair(build("llama"), mesh)
    expected = alone.loss(documents())
    expected.backward()
    loss = together.loss(documents() if mesh.get_rank() == 0 else [])
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    expect_same(alone, together)
    with torch.no_grad():
        assert together.loss(documents() if mesh.get_rank() == 0 else []) == loss
    with pytest.raises(ValueError, match="no token contributes"):
        together.loss([])


def case_rows_with_labels_and_a_given_count(mesh: DeviceMesh) -> None:
    ids = torch.stack([document[:20] for document in documents((20,) * 4)])
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.5, -100)
    rows = own(mesh, list(range(4)))
    alone, together = pair(build("llama"), mesh)
    alone.loss(ids, labels, num_items=100).backward()
    together.loss(ids[rows], labels[rows], num_items=torch.tensor(100)).backward()
    expect_same(alone, together)


def case_accumulated_gradients_are_averaged_once(mesh: DeviceMesh) -> None:
    alone, together = pair(build("llama"), mesh)
    total = sum(LENGTHS) - len(LENGTHS)
    for document in documents():
        alone.loss([document], num_items=total).backward()
    mine = own(mesh, documents())
    sent = together.replicas.ranks.sent_bytes
    most = -(-len(LENGTHS) // mesh.size())
    for index in range(most - 1):
        with together.no_sync():
            together.loss(mine[index : index + 1], num_items=total).backward()
    assert together.replicas.ranks.sent_bytes == sent
    together.loss(mine[most - 1 : most], num_items=total).backward()
    assert together.replicas.ranks.sent_bytes > sent
    expect_same(alone, together)
    together.sync_grads()
    expect_same(alone, together)


def case_a_loss_of_ones_own_is_averaged(mesh: DeviceMesh) -> None:
    def squares(engine: oomb.Engine, given: list[Tensor]) -> Tensor:
        return torch.stack([(logp**2).mean() for logp in engine.logprobs(given)]).mean()

    alone, together = pair(build("llama"), mesh)
    shares = [squares(alone, documents()[rank :: mesh.size()]) for rank in range(mesh.size())]
    torch.stack(shares).mean().backward()
    squares(together, own(mesh, documents())).backward()
    expect_same(alone, together)


def case_half_precision_is_summed_in_float32(mesh: DeviceMesh) -> None:
    _, together = pair(build("llama", dtype=torch.bfloat16), mesh)
    with together.no_sync():
        together.loss(own(mesh, documents())).backward()
    parameters = [p for p in together.model.parameters() if p.grad is not None]
    expected = [
        (torch.stack(everyones(p.grad.float())).sum(0) / mesh.size()).to(torch.bfloat16)
        for p in parameters
        if p.grad is not None
    ]
    together.sync_grads()
    assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected, strict=True) if p.grad is not None)


def case_any_sizes_of_buckets(mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(mesh.get_rank())
    before = data_parallel.BUCKET_BYTES
    for data_parallel.BUCKET_BYTES in (4, 8, 64, 100, before):
        parameters = [
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape, dtype in [
                ((3, 5), torch.float32),
                ((1,), torch.bfloat16),
                ((7,), torch.float32),
                ((0, 4), torch.float32),
                ((2, 9), torch.float64),
                ((4, 4), torch.bfloat16),
                ((), torch.float32),
            ]
        ]
        sync = data_parallel.GradientSync(data_parallel.Group(mesh.get_group("dp")), lambda given=parameters: given)
        for index, parameter in enumerate(parameters):
            # The last one has a gradient on no rank, the third on the first rank only.
            if index < 6 and (index != 2 or mesh.get_rank() == 0):
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameters[0].grad = torch.randn((5, 3), generator=generator).t()
        own_grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        sync.average()
        assert parameters[6].grad is None
        for parameter, mine in zip(parameters[:6], own_grads, strict=False):
            mean = torch.stack(everyones(mine.contiguous())).double().mean(0)
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, mean.to(parameter.dtype))


def case_an_interrupted_backward_does_not_stop_later_averages(mesh: DeviceMesh) -> None:
    alone, together = pair(build("llama"), mesh)

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "gradient":
            raise KeyboardInterrupt

    together.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        together.loss(own(mesh, documents())).backward()
    together.progress = None
    together.model.lm.zero_grad()
    alone.loss(documents()).backward()
    together.loss(own(mesh, documents())).backward()
    expect_same(alone, together)


def case_trained_weights_come_from_the_first_rank(mesh: DeviceMesh) -> None:
    model = lora(build("llama"), dropout=0.0)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            nn.init.normal_(parameter)
    oomb.Engine(model, mesh=mesh)
    for parameter in model.parameters():
        assert all(torch.equal(parameter, other) for other in everyones(parameter.detach()))


def case_other_models_are_refused_on_all_ranks(mesh: DeviceMesh) -> None:
    last = mesh.get_rank() == mesh.size() - 1
    with pytest.raises(TopologyError, match=r"parameter .* on rank"):
        oomb.Engine(build("llama", num_hidden_layers=2 if last else 3), mesh=mesh)
    frozen = build("llama", seed=int(last)).requires_grad_(False)
    with pytest.raises(TopologyError, match=r"the frozen parameter .* differs between rank \d and rank 0"):
        oomb.Engine(frozen, mesh=mesh)


def case_hooks_on_gradients_are_refused(mesh: DeviceMesh) -> None:
    model = build("llama")
    engine = oomb.Engine(model, mesh=mesh)
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        engine.loss(documents())


def case_unknown_dimensions_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(TopologyError, match="'tp'"):
        oomb.Engine(build("llama"), mesh=init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("tp",)))
    with pytest.raises(TopologyError, match="mesh_dim_names"):
        oomb.Engine(build("llama"), mesh=init_device_mesh("cpu", (mesh.size(),)))
