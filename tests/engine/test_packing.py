"""Documents of any lengths in one batch train as if each were alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import backward_gradients, engine_for, lora
from families import assert_same_gradients, build, grads, random_ids, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oomb
from oomb.attention import backends, packed, reference
from oomb.attention.call import AttentionSpec, Span
from oomb.engine import allocator
from oomb.engine.batch import Batch
from oomb.engine.packing import best_fit
from oomb.engine.passes import ChunkedForward

CHUNK = 16
LENGTHS = (50, 3, 7, 16, 1, 20, 40, 9, 2, 32)
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "mistral_sliding", "gpt_oss", "gpt2", "phi3_longrope_long"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_budget": 2, "page_size": 4},
    {"gpu_memory": 0, "keep_attention": True, "checkpoint_layers": True},
    {"gpu_memory": 0, "page_budget": 1, "page_size": 8, "keep_last_chunk": False},
    {"keep_last_chunk": True, "keep_attention": False},
]


def make_documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [random_ids(1, length, seed=i)[0] for i, length in enumerate(lengths)]


def one_at_a_time(model: Any, documents: list[Tensor], num_items: int, **config: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the sum of losses and gradients, computed one document at a time."""
    model = copy.deepcopy(model)
    engine, total = engine_for(model, CHUNK, **config), torch.zeros(())
    for document in documents:
        if len(document) > 1:
            loss = engine.loss(document.unsqueeze(0), num_items=num_items)
            loss.backward()
            total = total + loss.detach()
    return total, grads(model)


def check_matches_one_at_a_time(model: Any, documents: list[Tensor], tolerance: float, **config: Any) -> oomb.Engine:
    expected_loss, expected = one_at_a_time(model, documents, num_predicted(documents), **config)
    engine = engine_for(model, CHUNK, **config)
    loss = engine.loss(documents)
    assert relative_error(loss.detach(), expected_loss) <= tolerance
    assert_same_gradients(backward_gradients(model, loss), expected, tolerance)
    return engine


def num_predicted(documents: list[Tensor]) -> int:
    return sum(len(document) - 1 for document in documents)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(1, 32))
def test_layout_has_every_document_once_and_wastes_little(lengths: list[int], chunk_size: int) -> None:
    layout = best_fit(lengths, chunk_size)
    assert sorted(i for members in layout for i in members) == list(range(len(lengths)))
    fill = []
    for members in layout:
        first, *others = (lengths[i] for i in members)
        room = -first % chunk_size
        assert sum(others) <= room, "the documents do not fit into the last chunk"
        fill.append(room - sum(others))
    # No two chunks of short documents could be merged.
    short = (room for room, members in zip(fill, layout, strict=True) if lengths[members[0]] <= chunk_size)
    used = sorted(chunk_size - room for room in short)
    assert len(used) < 2 or used[0] + used[1] > chunk_size
    assert best_fit(lengths, chunk_size, can_share=False) == [
        [i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ]


def test_example_of_the_docstring() -> None:
    assert best_fit([10, 3, 2, 5], 4) == [[0, 2], [3, 1]]


def test_positions_and_spans_of_a_chunk() -> None:
    ids = torch.zeros(1, 12, dtype=torch.long)
    batch = Batch(ids=ids, targets=ids, starts=(0, 7, 10))
    assert batch.spans(0, 4) == (Span(0, 4),)
    assert batch.spans(4, 8) == (Span(0, 3, ((0, 4),)), Span(3, 4))
    assert batch.spans(8, 12) == (Span(0, 2, ((7, 8),)), Span(2, 4))
    cpu = torch.device("cpu")
    assert batch.positions(4, 8, cpu).tolist() == [[4, 5, 6, 0]]
    assert batch.positions(8, 12, cpu).tolist() == [[1, 2, 0, 1]]
    assert batch.positions(7, 12, cpu).tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(family: str, in_float64: None) -> None:
    check_matches_one_at_a_time(build(family), make_documents(), 1e-10)


def test_experts() -> None:
    check_matches_one_at_a_time(build("mixtral", dtype=torch.float32), make_documents(), 2e-5)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_all_settings(config: dict[str, Any], model: Any) -> None:
    tiers = check_matches_one_at_a_time(model, make_documents(), 1e-6, **config).allocator.tiers
    assert not any((tiers.used_bytes("gpu"), tiers.used_bytes("host"), *tiers.promised.values()))


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 5, 16, 64]))
def test_any_lengths_and_chunk_sizes(lengths: list[int], chunk_size: int) -> None:
    if max(lengths) == 1:
        lengths = [*lengths, 2]
    model, documents = build("llama", num_hidden_layers=1), make_documents(tuple(lengths))
    expected = one_at_a_time(model, documents, num_predicted(documents))[1]
    loss = engine_for(model, chunk_size).loss(documents)
    assert_same_gradients(backward_gradients(model, loss), expected, 1e-6)


def test_logprobs_keep_the_order_of_documents(model: Any, in_float64: None) -> None:
    documents, engine = make_documents(), engine_for(model, CHUNK)
    found = engine.logprobs(documents)
    assert [len(row) for row in found] == list(LENGTHS)
    for row, document in zip(found, documents, strict=True):
        alone = engine.logprobs(document.unsqueeze(0))[0]
        torch.testing.assert_close(row, alone, rtol=1e-10, atol=1e-12)
    # A custom loss that weights documents.
    weights = torch.arange(1.0, 1 + len(documents), dtype=torch.float64)
    loss = -sum(w * row.sum() for w, row in zip(weights, found, strict=True))
    actual = backward_gradients(model, loss)
    alone_loss = -sum(
        w * engine.logprobs(d.unsqueeze(0)).sum() for w, d in zip(weights, documents, strict=True) if len(d) > 1
    )
    assert_same_gradients(actual, backward_gradients(model, alone_loss), 1e-10)


def test_labels_of_documents(model: Any, in_float64: None) -> None:
    documents = make_documents((20, 5, 9))
    labels = [document.clone() for document in documents]
    labels[0][:10], labels[1][:] = -100, -100
    expected = engine_for(copy.deepcopy(model), CHUNK)
    count = sum(int((row[1:] != -100).sum()) for row in labels)
    parts = [
        expected.loss(d.unsqueeze(0), row.unsqueeze(0), num_items=count)
        for d, row in zip(documents, labels, strict=True)
    ]
    loss = engine_for(model, CHUNK).loss(documents, labels)
    assert relative_error(loss.detach(), torch.stack(parts).sum().detach()) <= 1e-10
    actual = backward_gradients(model, loss)
    torch.stack(parts).sum().backward()
    assert_same_gradients(actual, grads(expected.model.lm), 1e-10)


def packed_row(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return torch.cat(documents).unsqueeze(0), positions.unsqueeze(0)


def test_rows_of_several_documents(model: Any, in_float64: None) -> None:
    """A flattening collator restarts position_ids at each document."""
    documents, engine = make_documents(), engine_for(model, CHUNK)
    ids, positions = packed_row(documents)
    loss = engine.loss(ids, position_ids=positions)
    assert relative_error(loss.detach(), engine.loss(documents).detach()) <= 1e-12
    actual = backward_gradients(model, loss)
    assert_same_gradients(actual, backward_gradients(model, engine.loss(documents)), 1e-10)
    found = engine.logprobs(ids, position_ids=positions)
    assert found.shape == ids.shape
    torch.testing.assert_close(found[0], torch.cat(engine.logprobs(documents)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_positions", [False, True])
def test_masks_that_number_documents(with_positions: bool, model: Any, in_float64: None) -> None:
    """Collators of Axolotl and LLaMA-Factory make masks such as 1, 1, 2, 2, 0."""
    documents, engine = make_documents((20, 3, 17, 1, 9)), engine_for(model, CHUNK)
    rows = documents[:3], documents[3:]
    ids = torch.zeros(2, 45, dtype=torch.long)
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, members in enumerate(rows):
        packed, places = packed_row(list(members))
        ids[row, : packed.shape[1]], positions[row, : packed.shape[1]] = packed, places
        numbers = [torch.full((len(document),), 1 + i) for i, document in enumerate(members)]
        mask[row, : packed.shape[1]] = torch.cat(numbers)
    arguments = {"attention_mask": mask} | ({"position_ids": positions} if with_positions else {})
    loss = engine.loss(ids, **arguments)
    assert relative_error(loss.detach(), engine.loss(documents).detach()) <= 1e-12
    actual = backward_gradients(model, loss)
    assert_same_gradients(actual, backward_gradients(model, engine.loss(documents)), 1e-10)
    found = engine.logprobs(ids, **arguments)
    assert found.shape == ids.shape and not found[mask == 0].any()
    expected = torch.cat(engine.logprobs(documents))
    torch.testing.assert_close(found[mask > 0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "positions", "message"),
    [
        ([[1, 1, 2, 2, 0]], [[0, 1, 2, 0, 1]], r"row 0.*\[0, 3\].*position_ids.*\[0, 2\]"),
        ([[1, 2, 1, 1, 0]], None, r"row 0.*attention_mask.*\[1, 2, 1\]"),
    ],
)
def test_contradicting_masks_are_refused(
    mask: list[list[int]], positions: list[list[int]] | None, message: str, model: Any
) -> None:
    places = None if positions is None else torch.tensor(positions)
    with pytest.raises(ValueError, match=message):
        engine_for(model).loss(random_ids(1, 5), attention_mask=torch.tensor(mask), position_ids=places)


def test_padding_is_not_computed(model: Any, in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, seen = make_documents((40, 3, 9, 12)), []
    engine = engine_for(model, CHUNK)
    hidden = engine.model.hidden

    def counted(ids: Tensor, positions: Tensor) -> Tensor:
        seen.append(ids.numel())
        return hidden(ids, positions)

    ids = torch.zeros(4, 40, dtype=torch.long)
    mask = torch.zeros(4, 40, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    with torch.no_grad():
        engine.loss(ids, attention_mask=mask)
        monkeypatch.setattr(engine.model, "hidden", counted)
        engine.loss(ids, attention_mask=mask)
    assert sum(seen) == sum(map(len, documents))
    logp = engine.logprobs(ids, attention_mask=mask)
    assert logp.shape == ids.shape and not logp[mask == 0].any()
    torch.testing.assert_close(logp[1, :3], engine.logprobs(documents)[1], rtol=1e-10, atol=1e-12)


def test_lora_adapters(in_float64: None) -> None:
    check_matches_one_at_a_time(lora(build("llama"), dropout=0.0), make_documents(), 1e-10)


def test_dropout_is_replayed() -> None:
    """Compares with a finite difference along the gradient, which another dropout mask would change a lot."""
    model, documents = lora(build("llama"), dropout=0.3), make_documents((20, 5, 9))
    engine = engine_for(model, CHUNK, keep_last_chunk=False)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return engine.loss(documents)

    found = backward_gradients(model, loss())
    parameters = {name: p for name, p in model.named_parameters() if found.get(name) is not None}
    step = 1e-5
    with torch.no_grad():
        for sign in (1, -2):
            for name, p in parameters.items():
                gradient = found[name]
                assert gradient is not None
                p.add_(gradient, alpha=sign * step)
            if sign == 1:
                above = loss()
        below = loss()
    square = sum(float(g.square().sum()) for g in found.values() if g is not None)
    assert float(above - below) / (2 * step) == pytest.approx(square, rel=1e-3)


def test_progress_counts_the_chunks_of_all_documents(model: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = engine_for(model, CHUNK)
    engine.progress = lambda *call: seen.append(call)
    engine.loss(make_documents((40, 20, 3))).backward()
    assert seen == [("fill", n, 5) for n in range(1, 6)] + [("gradient", n, 5) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "an empty list"),
        (([torch.tensor([3, 4]), torch.tensor([[3, 4]])],), "document 1: .*one-dimensional"),
        (([torch.tensor([3, 4]), torch.tensor([], dtype=torch.long)],), "document 1: .*empty"),
        (([torch.tensor([3, 400])],), "document 0: .*the id 400"),
        (([[3, 4]],), "document 0: input_ids is a list"),
        (([torch.tensor([3, 4])], torch.tensor([[3, 4]])), "labels is a tensor"),
        (([torch.tensor([3, 4])], [torch.tensor([3, 4])] * 2), "labels is a list of 2"),
        (([torch.tensor([3, 4])], [torch.tensor([3, 4, 5])]), "document 0: labels has shape"),
        ((torch.tensor([[3, 4]]), [torch.tensor([3, 4])]), "labels is a list of 1"),
    ],
)
def test_bad_documents_are_refused(arguments: tuple[Any, ...], message: str, model: Any) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(model).loss(*arguments)


@pytest.mark.parametrize(
    ("positions", "message"),
    [([[0, 1, 3, 0]], "from 1 to 3 at 2"), ([[1, 2, 3, 4]], "to 1 at 0"), ([[0, 1]], "have shape")],
)
def test_positions_must_count_up(positions: list[list[int]], message: str, model: Any) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(model).loss(random_ids(1, 4), position_ids=torch.tensor(positions))


def test_a_list_has_no_padding(model: Any) -> None:
    with pytest.raises(ValueError, match="position_ids"):
        engine_for(model).loss([random_ids(1, 4)[0]], attention_mask=torch.ones(1, 4))


@pytest.mark.slow
def test_ten_to_fifty_thousand_tokens() -> None:
    """Per-document losses and all gradients, in float32, at the usual chunk size."""
    model = build(
        "llama", dtype=torch.float32, num_hidden_layers=1, hidden_size=16, intermediate_size=16,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=65536,
    )  # fmt: skip
    documents = make_documents((10, 50_000, 700, 4096, 33, 2048, 120, 15, 5000))
    count = num_predicted(documents)
    engine = oomb.Engine(model, oomb.Config())
    found = engine.logprobs(documents)
    actual = backward_gradients(model, -torch.cat(found).sum() / count)
    model.zero_grad()
    for row, document in zip(found, documents, strict=True):
        alone = engine.logprobs(document.unsqueeze(0))
        assert relative_error(row.detach().sum(), alone.detach().sum()) <= 1e-5
        (-alone.sum() / count).backward()
    assert_same_gradients(actual, grads(model), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 128), (7, 1, 80)])
def test_one_call_of_the_flash_kernel(heads: tuple[int, int, int], window: int | None) -> None:
    num_heads, num_kv_heads, size = heads
    starts, length = (0, 1, 70, 300, 310), 511
    generator = torch.Generator("cuda").manual_seed(0)
    q, dout = (torch.randn(1, num_heads, length, size, generator=generator, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(1, num_kv_heads, length, size, generator=generator, device="cuda").bfloat16() for _ in range(2))
    spec = AttentionSpec(scale=0.1, window=window)
    assert packed._is_one_call(q, v, spec)
    out, lse = packed.forward(q, k, v, starts, spec, q.dtype)
    found = packed.backward(dout, q, k, v, out, lse, starts, spec)
    for a, b in zip(starts, (*starts[1:], length), strict=True):
        part = [x[:, :, a:b].double() for x in (q, k, v)]
        mask: dict[str, Any] = {"scale": 0.1, "causal": True, "window": window if window and window < b - a else None}
        out_part, lse_part = reference.forward(*part, **mask)
        torch.testing.assert_close(out[:, :, a:b].double(), out_part, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse[:, :, a:b].double(), lse_part, rtol=1e-3, atol=1e-3)
        expected = reference.backward(dout[:, :, a:b].double(), *part, out_part, lse_part, **mask)
        for actual, wanted in zip(found, expected, strict=True):
            # q and k of a document of one token have no gradient.
            error = (actual[:, :, a:b].double() - wanted).norm()
            assert error <= 0.02 * wanted.norm() + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [{}, {"page_budget": 4, "page_size": 16}, {"gpu_memory": 0}, {"kernels": "flash"}], ids=str
)
def test_documents_on_the_gpu(config: dict[str, Any]) -> None:
    from large_models import wide_llama

    model = wide_llama().bfloat16()
    documents = make_documents((700, 30, 256, 5, 90, 1000, 61))
    count = num_predicted(documents)
    engine = oomb.Engine(model, oomb.Config(chunk_size=256, fuse="off", **config))
    loss = engine.loss(documents)
    actual = backward_gradients(model, loss)
    model.zero_grad()
    for document in documents:
        engine.loss(document.unsqueeze(0), num_items=count).backward()
    expected = grads(model)
    for name, gradient in expected.items():
        assert gradient is not None and actual[name] is not None
        assert relative_error(actual[name], gradient) <= 0.05, name


@pytest.mark.parametrize("kernel", [backends.FLASH, backends.CUDNN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("own", [1, 5])
def test_gpu_kernels_get_a_contiguous_lse(kernel: backends.Kernel, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first document of a shared chunk it is a slice of a larger tensor, and flash ignores strides."""
    seen: list[Tensor] = []

    def backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        seen.append(args[5])
        return args[1], args[2], args[3]

    names = "_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"
    monkeypatch.setattr(backends, "aten", SimpleNamespace(**dict.fromkeys(names, backward)))
    x, lse = torch.zeros(1, 3, own, 8), torch.arange(27.0).view(1, 3, 9)[:, :, :own]
    kernel.backward(x, x, x, x, x, lse, scale=1.0, causal=True)
    assert seen[0].is_contiguous() and torch.equal(seen[0].view(1, 3, own), lse)


def fail_at(engine: oomb.Engine, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model raise after `index` calls."""
    hidden, left = engine.model.hidden, iter(range(index))

    def breaks(ids: Tensor, positions: Tensor) -> Tensor:
        if next(left, None) is None:
            raise RuntimeError("the model broke")
        return hidden(ids, positions)

    monkeypatch.setattr(engine.model, "hidden", breaks)


def test_error_in_a_later_document_frees_the_earlier_ones(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, CHUNK)
    engine.loss(make_documents((50, 40, 20))).backward()
    fail_at(engine, 8, monkeypatch)
    with pytest.raises(RuntimeError, match="the model broke") as error:
        engine.loss(make_documents((50, 40, 20)))
    tiers = engine.allocator.tiers
    assert error and not any((tiers.used_bytes("gpu"), tiers.used_bytes("host"), *tiers.promised.values()))


def test_only_the_last_sequence_keeps_its_last_chunk(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward comes first; any other kept chunk would add to the activations of the one being computed."""
    engine, order = engine_for(model, CHUNK), []
    backward = ChunkedForward.backward

    def seen(sequence: ChunkedForward, dlogp: Tensor) -> None:
        order.append((sequence.batch.ids.shape[1], sequence.last_chunk_hidden is not None))
        backward(sequence, dlogp)

    monkeypatch.setattr(ChunkedForward, "backward", seen)
    engine.loss(make_documents((48, 40, 33))).backward()
    assert order == [(33, True), (40, False), (48, False)]


def test_sequences_leave_memory_for_each_other(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sequence that holds pages alone may fill the host with attention outputs."""
    engine, found, decide = engine_for(model, CHUNK), [], allocator.place_or_raise

    def seen(request: Any) -> Any:
        found.append(request.is_exclusive)
        return decide(request)

    monkeypatch.setattr(allocator, "place_or_raise", seen)
    engine.loss(make_documents((48, 40, 33))).backward()
    assert found == [False] * 3
    [document] = make_documents((48,))
    first, second = engine.loss(document[None]), engine.loss(document[None])
    (first + second).backward()
    assert found[3:] == [True, False], "same length, different placement"


def test_learned_positions_limit_each_document() -> None:
    """Rows that hold several documents or padding may be longer than the model's positions."""
    model = build("gpt2")
    limit = model.config.max_position_embeddings
    documents = make_documents((limit, limit - 50, 40))
    expected = one_at_a_time(model, documents, num_predicted(documents))[1]
    ids, positions = packed_row(documents)
    padded = torch.zeros(3, limit + 9, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, document in enumerate(documents):
        padded[row, : len(document)], mask[row, : len(document)] = document, 1
    engine = engine_for(model, 2 * limit)
    for arguments in ({"input_ids": documents}, {"input_ids": ids, "position_ids": positions},
                      {"input_ids": padded, "attention_mask": mask}):  # fmt: skip
        loss = engine.loss(**arguments)
        assert_same_gradients(backward_gradients(model, loss), expected, 1e-6)
    too_long = random_ids(1, limit + 1)
    for wrong in ([too_long[0]], too_long):
        with pytest.raises(ValueError, match=rf"{limit + 1} tokens.*{limit}"):
            engine.loss(wrong)
    with pytest.raises(ValueError, match="learned"):
        engine.loss(torch.cat([too_long, too_long], 1), position_ids=torch.arange(limit + 1).repeat(1, 2))


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (64, 60, 56, 52)])
def test_memory_limits_hold_for_all_sequences_together(lengths: tuple[int, ...], model: Any, in_float64: None) -> None:
    """Later sequences get what is left, and a sequence that is alone again gets all of it."""
    documents, limit = make_documents(lengths), 200_000
    engine = check_matches_one_at_a_time(model, documents, 1e-10, gpu_memory=limit, page_size=4, keep_attention=False)
    assert 0 < engine.stats.gpu_peak_bytes <= limit and engine.stats.host_peak_bytes
    engine.reset_stats()
    engine.loss([documents[0]]).backward()
    assert not engine.stats.host_peak_bytes
