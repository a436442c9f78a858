"""Check that placement, page size and saved outputs do not change a single bit of training."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from checks import TOLERANCE, check_family, engine_for
from families import assert_same_gradients, build, grads, random_ids
from large_models import wide_llama
from tier_steps import LENGTH, Step, assert_equal, assert_nothing_is_held, train

import oomb
from oomb.memory.pool import GPU, HOST
from oomb.memory.store import PageStore
from oomb.planner import placement as placement_module

FAMILIES = {
    "llama": {},
    "qwen2_sliding": {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Dense attention, and dense plus windowed layers; the window is longer than a chunk and no multiple of it."""
SMALL = {"max_position_embeddings": 512, "num_hidden_layers": 2}
PLACEMENTS = ("gpu", "host", "split")


@functools.lru_cache
def tiny(family: str, dtype: torch.dtype = torch.float64) -> Any:
    return build(family, dtype=dtype, **FAMILIES[family], **SMALL)


def page_bytes(model: Any, chunk_size: int, **config: Any) -> int:
    """Return the bytes of all pages of K, V and their gradients."""
    engine = engine_for(model, chunk_size, keep_attention=False, kernels="torch", fuse="off", **config)
    return engine.reserve(1, LENGTH).gpu_bytes


def gpu_memory(placement: str, all_bytes: int) -> Any:
    return {"gpu": "auto", "host": 0, "split": all_bytes // 2}[placement]


def where(engine: oomb.Engine) -> str:
    peak = engine.allocator.tiers.peak_bytes
    return {(True, False): "gpu", (False, True): "host", (True, True): "split"}[peak[GPU] > 0, peak[HOST] > 0]


@functools.lru_cache
def trajectory(family: str, dtype: torch.dtype, chunk_size: int) -> list[Step]:
    """Train with all pages on the model's device and no saved outputs: the reference."""
    model = copy.deepcopy(tiny(family, dtype))
    engine = engine_for(model, chunk_size, kernels="torch", keep_attention=False, checkpoint_layers=False)
    steps = train(model, engine)
    assert where(engine) == "gpu"
    return steps


CHUNKS_AND_PAGES = [(32, 16), (50, 64), (32, 128), (50, 7)]
"""Chunks of several pages and of a part of one, multiples of each other and not."""
KEPT = list(itertools.product((False, True), (False, True)))
"""keep_attention, checkpoint_layers."""
SETTINGS = [
    # A Latin square: each placement meets all page sizes and all ways to save outputs.
    (*CHUNKS_AND_PAGES[(row + column) % 4], placement, *kept)
    for row, placement in enumerate(PLACEMENTS)
    for column, kept in enumerate(KEPT)
]


@pytest.mark.parametrize(("chunk_size", "page_size", "placement", "keep_attention", "checkpoint_layers"), SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_trajectory(
    family: str, chunk_size: int, page_size: int, placement: str, keep_attention: bool, checkpoint_layers: bool
) -> None:
    model = copy.deepcopy(tiny(family))
    memory = gpu_memory(placement, page_bytes(model, chunk_size, page_size=page_size))
    engine = engine_for(
        model,
        chunk_size,
        page_size=page_size,
        gpu_memory=memory,
        keep_attention=keep_attention,
        checkpoint_layers=checkpoint_layers,
        kernels="torch",
    )
    steps = train(model, engine)
    assert where(engine) == placement
    assert_equal(steps, trajectory(family, torch.float64, chunk_size))


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize(("chunk_size", "page_size"), [(32, 16), (50, 7)])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_outputs_of_the_last_tokens_alone(
    chunk_size: int, page_size: int, on_gpu: bool, checkpoint_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the last outputs fit, the other attention is recomputed, with the same result."""
    kept, keep = set(), PageStore.save_output
    monkeypatch.setattr(
        placement_module,
        "_place_outputs",
        lambda request, lean: placement_module._place(request, lean, out_tokens=2 * chunk_size),
    )
    monkeypatch.setattr(
        PageStore, "save_output", lambda self, *args: (kept.add((self.pages.saved_from, args[1])), keep(self, *args))
    )
    model = copy.deepcopy(tiny("qwen2_sliding"))
    memory = "1GiB" if on_gpu else 0
    settings: dict[str, Any] = {"gpu_memory": memory, "checkpoint_layers": checkpoint_layers, "kernels": "torch"}
    engine = engine_for(model, chunk_size, page_size=page_size, **settings)
    steps = train(model, engine)
    assert_equal(steps, trajectory("qwen2_sliding", torch.float64, chunk_size))
    [saved_from] = {first for first, _ in kept}
    assert {start >= saved_from for _, start in kept} == {False, True}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunk_sizes_agree(family: str, in_float64: None) -> None:
    found = []
    for chunk_size in (32, 50, 300):
        model = copy.deepcopy(tiny(family))
        found.append(train(model, engine_for(model, chunk_size, gpu_memory=0), num_steps=1)[0])
    for loss, gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=TOLERANCE, atol=0)
        assert_same_gradients(gradients, found[0][1], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("qwen2_sliding", torch.bfloat16), ("llama", torch.float32)],
    ids=str,
)
def test_rounding_does_not_depend_on_the_placement(family: str, dtype: torch.dtype) -> None:
    """bfloat16 gradients are rounded stochastically with seeds from the tokens, not from the placement."""
    for placement, page_size in (("gpu", 16), ("host", 128), ("split", 16)):
        model = copy.deepcopy(tiny(family, dtype))
        memory = gpu_memory(placement, page_bytes(model, 32, page_size=page_size))
        config = {"page_size": page_size, "gpu_memory": memory, "keep_attention": page_size == 16}
        engine = engine_for(model, 32, kernels="torch", checkpoint_layers=False, **config)
        steps = train(model, engine, num_steps=2)
        assert where(engine) == placement
        assert_equal(steps, trajectory(family, dtype, 32)[:2], config)


def test_rounding_depends_on_the_tokens() -> None:
    """Otherwise the test above would pass for gradients that are never rounded."""
    found = []
    for grad_dtype in ("bfloat16", "float32"):
        model = copy.deepcopy(tiny("llama", torch.bfloat16))
        found.append(train(model, engine_for(model, 32, grad_dtype=grad_dtype), num_steps=1))
    with pytest.raises(AssertionError):
        assert_equal(*found)


def pairwise(model: Any, engine: oomb.Engine, order: tuple[int, ...]) -> list[Step]:
    """Compute log-probabilities of three texts, then run their backwards in the given order."""
    model.zero_grad()
    texts = [random_ids(1, length, seed=seed) for seed, length in enumerate((200, 90, 150))]
    logps = [engine.logprobs(text) for text in texts]
    losses = [torch.nn.functional.softplus(-0.1 * logp.sum()) for logp in logps]
    for index in order:
        losses[index].backward()
    assert_nothing_is_held(engine)
    return [(torch.stack([loss.detach() for loss in losses]), grads(model))]


@pytest.mark.parametrize("placement", ["host", "split"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_alive_at_once(family: str, placement: str) -> None:
    model = copy.deepcopy(tiny(family))
    memory = gpu_memory(placement, page_bytes(model, 32, page_size=16))
    config = {"page_size": 16, "kernels": "torch", "keep_last_chunk": False}
    expected_engine, engine = engine_for(model, 32, **config), engine_for(model, 32, gpu_memory=memory, **config)
    for order in ((0, 1, 2), (2, 0, 1)):
        expected = pairwise(model, expected_engine, order)
        assert_equal(pairwise(model, engine, order), expected, order)
    assert where(engine) == placement


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("phase", ["fill", "gradient"])
def test_an_exception_in_the_middle_frees_everything(phase: str, placement: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    memory = gpu_memory(placement, page_bytes(model, 32, page_size=16))
    engine = engine_for(
        model, 32, page_size=16, gpu_memory=memory, kernels="torch", keep_attention=False, checkpoint_layers=False
    )

    def stop(now: str, done: int, num_chunks: int) -> None:
        if now == phase and done == 4:
            raise KeyboardInterrupt

    for _ in range(2):
        engine.progress = stop
        with pytest.raises(KeyboardInterrupt) as error:
            engine.loss(random_ids(1, LENGTH, seed=5)).backward()
        assert error.traceback, "which has hold of the sequence"
        assert_nothing_is_held(engine)
        engine.progress = None
        model.zero_grad()
    assert_equal(train(model, engine, num_steps=1), trajectory("llama", torch.float64, 32)[:1])


def test_an_exception_inside_attention_loses_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the errors are kept, and with them everything their tracebacks reference."""
    from oomb.attention import chunk

    model = copy.deepcopy(tiny("llama"))
    engine = engine_for(model, 32, gpu_memory=0, kernels="torch", keep_attention=False, checkpoint_layers=False)
    attend_backward, calls = chunk.attend_backward, itertools.count()

    def stumble(*args: Any) -> Any:
        for _ in args[7].segments(0):
            if next(calls) % 5 == 4:
                raise RuntimeError("out of luck")
        return attend_backward(*args)

    errors = []
    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(chunk, "attend_backward", stumble)
            try:
                engine.loss(random_ids(1, LENGTH, seed=5)).backward()
            except RuntimeError as error:
                errors.append(error)
        model.zero_grad()
    assert len(errors) == 5
    assert_equal(train(model, engine, num_steps=1), trajectory("llama", torch.float64, 32)[:1])


GPU_LENGTH = 1000
GPU_PLACEMENTS = ({}, {"gpu_memory": 0}, {"gpu_memory": 1_000_000})
"""A token has 3 layers x 2 heads x 64 x (K, V and their gradients) x 2 bytes = 3 KiB."""


def gpu_train(model: Any, chunk_size: int = 128, **config: Any) -> list[Step]:
    model = copy.deepcopy(model)
    engine = oomb.Engine(model, oomb.Config(chunk_size=chunk_size, fuse="off", **config))
    steps = train(model, engine, length=GPU_LENGTH)
    assert where(engine) == {None: "gpu", 0: "host"}.get(config.get("gpu_memory"), "split")
    return steps


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [{}, {"keep_attention": False}, {"checkpoint_layers": True, "page_size": 16}, {"chunk_size": 100}],
    ids=str,
)
def test_one_trajectory_on_a_gpu(config: dict[str, Any]) -> None:
    model = wide_llama().bfloat16()
    config = {"kernels": "torch", "checkpoint_layers": False, "keep_attention": True, **config}
    expected = gpu_train(model, **config)
    assert_equal(gpu_train(model, **config), expected, "it does not even repeat itself")
    for placement in GPU_PLACEMENTS[1:]:
        assert_equal(gpu_train(model, **config, **placement), expected, placement)


def distance(actual: list[Step], expected: list[Step]) -> float:
    """Compare the first step's gradients; later steps have diverged already."""
    off = whole = 0.0
    for name, g in expected[0][1].items():
        if g is not None:
            off += (actual[0][1][name].double() - g.double()).square().sum().item()  # type: ignore[union-attr]
            whole += g.double().square().sum().item()
    return (off / whole) ** 0.5


ALIKE, FAR = 1e-5, 4e-3
"""On an H200 most runs differ by 7e-8 to 1.4e-7, because sums have another order. About one in ten differs by 1.8e-3
with any placement, because something was rounded the other way early on. Another backend differs by 6e-3, and a lost
part of a gradient by 1e-2 or more."""


@pytest.mark.gpu
def test_placements_differ_no_more_than_runs() -> None:
    """cuDNN's dQ is not deterministic: placements may differ as much as two runs do, no more."""
    model = wide_llama().bfloat16()
    expected = [gpu_train(model, keep_attention=False) for _ in range(4)]
    own = [distance(a, b) for a, b in itertools.combinations(expected, 2)]
    assert min(own) <= ALIKE and max(own) < FAR, f"unexpected noise between runs on this GPU: {own}"
    for placement in GPU_PLACEMENTS[1:]:
        runs = [gpu_train(model, keep_attention=False, **placement) for _ in range(6)]
        off = [min(distance(run, one) for one in expected) for run in runs]
        assert max(off) < FAR and sum(d <= ALIKE for d in off) >= 3, (placement, off)


@pytest.mark.parametrize("settings", [{"checkpoint_layers": True}, {"keep_last_chunk": False}], ids=str)
def test_chunks_of_one_token_with_outputs_saved_on_the_host(settings: dict[str, Any]) -> None:
    """A row of one token is contiguous already, but a saved output must be a copy."""
    check_family(build("llama"), random_ids(1, 12), 1, 1e-6, gpu_memory=0, keep_attention=True, **settings)
