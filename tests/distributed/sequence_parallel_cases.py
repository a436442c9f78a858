"""Cases of sequence parallelism (Ulysses), run on every rank by `ranks.py`. Each compares with one process."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from checks import lora
from families import (
    FAMILIES,
    REPRESENTATIVES,
    VOCAB,
    assert_same_gradients,
    build,
    float64_throughout,
    grads,
    random_ids,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import oomb
from oomb.distributed.topology import TopologyError

CHUNK = 8
TOLERANCE = 1e-12
ALL_FAMILIES = os.environ.get("OOMB_TESTS_ALL_FAMILIES") == "1"


def sp_mesh(mesh: DeviceMesh, dp: int = 1) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, mesh.size() // dp), mesh_dim_names=("dp", "sp"))


def wide(name: str, size: int) -> Any:
    """Return a model whose heads can be divided over 2 and 4 ranks; with 4, two ranks share a key and value head."""
    heads = {} if size < 3 else {"num_attention_heads": 8, "num_key_value_heads": 2}
    return build(name, **heads)


def compare(model: Any, mesh: DeviceMesh, *given: Any, tolerance: float = TOLERANCE, **config: Any) -> oomb.Engine:
    """Compare loss, log-probabilities and gradients with an engine of one process."""
    settings = oomb.Config(**{"chunk_size": CHUNK, "page_size": 4, **config})
    alone, together = oomb.Engine(copy.deepcopy(model), settings), oomb.Engine(model, settings, mesh=mesh)
    expected, loss = alone.loss(*given), together.loss(*given)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    expected.backward()
    loss.backward()
    assert_same_gradients(grads(together.model.lm), grads(alone.model.lm), tolerance)
    with torch.no_grad():
        found, wanted = together.logprobs(given[0]), alone.logprobs(given[0])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    return together


def case_models(mesh: DeviceMesh) -> None:
    names = [*FAMILIES] if ALL_FAMILIES else ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral"]
    passed = []
    for name in names:
        with float64_throughout():
            model = build(name) if ALL_FAMILIES or mesh.size() == 2 else wide(name, mesh.size())
            try:
                # Not a multiple of the chunk size, nor is a chunk one of the number of ranks.
                compare(model, sp_mesh(mesh), random_ids(2, 41), chunk_size=7)
            except TopologyError as error:
                assert "cannot be divided over" in str(error), error
                continue
        passed.append(name)
    assert len(passed) >= 5 and (not ALL_FAMILIES or set(passed) >= REPRESENTATIVES - {"phi3_longrope_long"}), passed


def case_adapters_documents_and_labels(mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (45, 9, 3, 30, 1, 17)]
    labels = [x.masked_fill(torch.rand(x.shape, generator=generator) < 0.3, -100) for x in documents]
    compare(lora(wide("llama", mesh.size()), dropout=0.0), sp_mesh(mesh), documents, labels)


def case_pages_on_the_host_in_8_bits_and_selected(mesh: DeviceMesh) -> None:
    ids = random_ids(1, 75)
    for config in (
        {"gpu_memory": 0},
        {"kv_dtype": "int8"},
        {"page_budget": 2},
        {"page_budget": 3, "gpu_memory": 0, "page_rule": "paper"},
    ):
        compare(wide("llama", mesh.size()), sp_mesh(mesh), ids, **config)


def case_what_is_kept_between_the_passes(mesh: DeviceMesh) -> None:
    ids = random_ids(2, 41)
    for checkpoint_layers in (True, False):
        for kept in (True, False):
            settings = {"checkpoint_layers": checkpoint_layers, "keep_attention": kept}
            compare(wide("llama", mesh.size()), sp_mesh(mesh), ids, keep_last_chunk=kept, **settings)


def case_replicas_of_sharded_sequences(mesh: DeviceMesh) -> None:
    if mesh.size() < 4:
        return
    both = sp_mesh(mesh, dp=2)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (45, 9, 30, 17, 24)]
    model = wide("llama", 2)
    settings = oomb.Config(chunk_size=CHUNK, page_size=4)
    alone, together = oomb.Engine(copy.deepcopy(model), settings), oomb.Engine(model, settings, mesh=both)
    alone.loss(documents).backward()
    own = documents[both.get_local_rank("dp") :: 2]
    for index in range(3):
        # One at a time; the second replica has nothing left for the last one.
        step = together.loss(own[index : index + 1], num_items=sum(map(len, documents)) - len(documents))
        if index < 2:
            with together.no_sync():
                step.backward()
        else:
            step.backward()
    assert_same_gradients(grads(together.model.lm), grads(alone.model.lm), TOLERANCE)


def case_dropout_is_replayed(mesh: DeviceMesh) -> None:
    """The engine raises if the gradient pass draws other numbers than the fill pass."""
    model = lora(wide("llama", mesh.size()), dropout=0.5)
    engine = oomb.Engine(model, oomb.Config(chunk_size=CHUNK, keep_last_chunk=False), mesh=sp_mesh(mesh))
    ids = random_ids(1, 64)
    torch.manual_seed(5)
    loss = engine.loss(ids)
    loss.backward()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(5)
    engine.loss(ids).backward()
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def case_pages_are_divided(mesh: DeviceMesh) -> None:
    size, settings = mesh.size(), oomb.Config(chunk_size=CHUNK, keep_attention=False)
    placements = [
        oomb.Engine(wide("llama", size), settings, mesh=shared).reserve(1, 4096) for shared in (None, sp_mesh(mesh))
    ]
    alone, together = (placement.gpu_bytes + placement.host_bytes for placement in placements)
    # Of four ranks, two hold the same one of two key and value heads.
    assert together == alone // 2


def case_traffic_is_that_of_the_tokens(mesh: DeviceMesh) -> None:
    size, length = mesh.size(), 64
    settings = oomb.Config(chunk_size=CHUNK, keep_last_chunk=False)
    engine = oomb.Engine(wide("llama", size), settings, mesh=sp_mesh(mesh))
    config, group = engine.model.config, engine.shards.group
    engine.loss(random_ids(1, length)).backward()
    before = group.sent_bytes
    loss = engine.loss(random_ids(1, length))
    # A rank sends q, k, v and the output of its tokens, without its own heads. Keys and values have one head per rank.
    heads = 2 * config.num_attention_heads + 2 * max(size, config.num_key_value_heads)
    fill = length // size * heads * config.head_dim * 8 * config.num_hidden_layers * (size - 1) // size
    # Log-probabilities and checksums are sent too.
    assert fill <= group.sent_bytes - before <= fill + 4000, (fill, group.sent_bytes - before)
    before = group.sent_bytes
    loss.backward()
    # The gradient pass computes each chunk again, and sends as much in its backward.
    assert group.sent_bytes - before == 2 * fill


def case_what_cannot_be_shared_is_refused(mesh: DeviceMesh) -> None:
    from oomb.engine.head import VocabRowsHead

    engine = oomb.Engine(wide("llama", mesh.size()), oomb.Config(chunk_size=CHUNK), mesh=sp_mesh(mesh))
    with pytest.raises(TopologyError, match=r"checksum of sequence 0 is .* on rank"):
        engine.loss(random_ids(1, 40, seed=mesh.get_rank()))
    with pytest.raises(ValueError, match="VocabRowsHead needs all tokens"):
        engine.forward(engine.pack(random_ids(1, 40)), VocabRowsHead(engine.model, [3]))
    odd = oomb.Engine(build("llama", num_attention_heads=3, num_key_value_heads=3), mesh=sp_mesh(mesh))
    with pytest.raises(TopologyError, match=r"3 query heads .* choose sp from 1, 3"):
        odd.loss(random_ids(1, 40))


def case_own_losses(mesh: DeviceMesh) -> None:
    def squares(engine: oomb.Engine, ids: Tensor) -> Tensor:
        return (engine.logprobs(ids) ** 2).mean()

    model, ids = wide("llama", mesh.size()), random_ids(2, 41)
    settings = oomb.Config(chunk_size=CHUNK)
    alone, together = oomb.Engine(copy.deepcopy(model), settings), oomb.Engine(model, settings, mesh=sp_mesh(mesh))
    squares(alone, ids).backward()
    squares(together, ids).backward()
    assert_same_gradients(grads(together.model.lm), grads(alone.model.lm), TOLERANCE)
