"""Chunked training matches whole-sequence training: loss and every parameter's gradient, family by family.

Tolerances are relative errors of each parameter's gradient. Every family is compared twice: as it is at 1e-6, because
most modeling code computes norms or rotary tables in float32, and with that code lifted to float64 at 1e-10.
"""

from __future__ import annotations

import copy

import pytest
import torch
from checks import CHUNK, check_family
from families import (
    FAMILIES,
    LENGTH,
    VOCAB,
    assert_same_gradients,
    build,
    float64_throughout,
    grads,
    mark_full,
    random_ids,
    relative_error,
    whole_gradients,
    whole_loss,
)

import oomb

CHUNKS = [1, 7, 16, LENGTH, 1000]
MOE = [name for name, family in FAMILIES.items() if family.is_moe]


@pytest.mark.parametrize("name", mark_full(FAMILIES))
def test_family(name: str) -> None:
    tolerance = 1e-10 if FAMILIES[name].native_float64 else 1e-6
    check_family(build(name), random_ids(2, LENGTH), CHUNK, tolerance)


@pytest.mark.parametrize("name", mark_full(name for name, family in FAMILIES.items() if not family.native_float64))
def test_family_in_float64_throughout(name: str) -> None:
    with float64_throughout():
        check_family(build(name), random_ids(2, LENGTH), CHUNK, 1e-10)


@pytest.mark.parametrize("name", mark_full(MOE))
def test_moe_in_float32(name: str) -> None:
    """Uses the default experts implementation, a grouped matmul, with routing in float32 on both sides."""
    model = build(name, dtype=torch.float32)
    check_family(model, random_ids(2, LENGTH), CHUNK, 2e-5)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3_longrope_long", "gpt_oss", "gpt2"])
def test_chunk_size(name: str, chunk_size: int) -> None:
    with float64_throughout():
        check_family(build(name), random_ids(2, LENGTH), chunk_size, 1e-10)


@pytest.mark.parametrize("length", [2, 6, 7, 8, 14, 15])
@pytest.mark.parametrize("name", ["mistral_sliding", "llama_dynamic_rope"])
def test_length_around_the_chunk_boundary(name: str, length: int) -> None:
    with float64_throughout():
        check_family(build(name), random_ids(1, length), CHUNK, 1e-10)


@pytest.mark.parametrize("window", [1, 2, 6, 7, 8, 14, 40, 41, 64])
def test_window_around_the_chunk_boundary(window: int) -> None:
    with float64_throughout():
        check_family(build("mistral_sliding", sliding_window=window), random_ids(1, LENGTH), CHUNK, 1e-10)


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("keep_last_chunk", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_what_is_recomputed_does_not_matter(name: str, checkpoint_layers: bool, keep_last_chunk: bool) -> None:
    settings = {"checkpoint_layers": checkpoint_layers, "keep_last_chunk": keep_last_chunk}
    with float64_throughout():
        check_family(build(name), random_ids(2, LENGTH), CHUNK, 1e-10, **settings)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gpt_oss"])
def test_nothing_is_read_before_it_is_written(name: str) -> None:
    check_family(build(name), random_ids(2, LENGTH), CHUNK, 1e-6)


@pytest.mark.parametrize("name", ["llama_dynamic_rope", "phi3_longrope_long"])
def test_length_dependent_rope_forgets_the_previous_sequence(name: str) -> None:
    """A short sequence after a long one on the same model has its own frequencies."""
    model = build(name)
    engine = oomb.Engine(model, oomb.Config(chunk_size=CHUNK))
    long_ids, short_ids = random_ids(1, LENGTH), random_ids(1, 13)
    expected = {ids: whole_loss(copy.deepcopy(model), ids).item() for ids in (long_ids, short_ids)}
    rotary = model.model.rotary_emb
    original = rotary.original_inv_freq.clone()
    for ids, mode in ((long_ids, torch.no_grad), (short_ids, torch.inference_mode), (long_ids, torch.no_grad)):
        with mode():
            assert engine.loss(ids).item() == pytest.approx(expected[ids], rel=1e-6)
        # The model itself is unchanged, too.
        assert torch.equal(rotary.original_inv_freq, original)
        assert whole_loss(model, ids).item() == pytest.approx(expected[ids], rel=1e-6)


@pytest.mark.parametrize("name", mark_full(FAMILIES))
def test_reference_matches_the_published_model(name: str) -> None:
    """Compares the float64 attention and loss of families.py with the model's own."""
    model = build(name)
    ids = random_ids(2, LENGTH)
    loss, expected = whole_gradients(model, ids)
    published = copy.deepcopy(model)
    published.set_attn_implementation("eager")
    published_loss = published(input_ids=ids, labels=ids, use_cache=False).loss
    published_loss.backward()
    assert relative_error(published_loss.detach(), loss) <= 1e-6
    assert_same_gradients(grads(published), expected, 1e-5, may_vanish=1e-6)


@pytest.mark.parametrize("name", mark_full(FAMILIES))
def test_tiny_model_looks_back(name: str) -> None:
    """Guards the other tests: the first chunks must affect the last losses, or forgetting them would pass."""
    model = build(name)
    half = VOCAB // 2
    ids = torch.cat([random_ids(2, 20, high=half), random_ids(2, 21, low=half)], 1)
    labels = ids.masked_fill(torch.arange(LENGTH) < 21, -100)
    hidden = model.get_input_embeddings()
    seen = {}
    handle = hidden.register_forward_hook(lambda module, args, out: (out.retain_grad(), seen.update(out=out))[-1])
    whole_loss(model, ids, labels).backward()
    handle.remove()
    gradient_T = torch.linalg.vector_norm(seen["out"].grad, dim=(0, 2))
    # Position 20 predicts the first label; positions before it act through attention alone.
    assert gradient_T[:20].norm() > 0.05 * gradient_T[20:].norm()
