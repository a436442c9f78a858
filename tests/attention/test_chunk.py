"""Attention units against a naive float64 softmax differentiated by autograd.

B batch, H query heads, K key/value heads, T queries, S keys, D head size (values may have their own).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import relative_error
from torch import Tensor

from oomb.attention import backends, chunk, reference
from oomb.attention.call import AttentionSpec
from oomb.ops import merge

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# B, H, K, T, S, D, Dv: groups of 1, 3, 7 and 8; one query; fewer queries than keys; head sizes that differ.
SHAPES = [
    (1, 2, 2, 5, 5, 8, 8),
    (2, 3, 1, 7, 19, 5, 5),
    (1, 7, 1, 13, 29, 16, 16),
    (2, 16, 2, 3, 3, 4, 4),
    (1, 8, 1, 1, 33, 8, 8),
    (2, 6, 2, 11, 17, 12, 7),
    (1, 1, 1, 1, 1, 3, 9),
]
MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 4},
    "window_of_one": {"causal": True, "window": 1},
    "window_past_the_keys": {"causal": True, "window": 1000},
    "softcap": {"causal": True, "softcap": 1.5},
    "softcap_full": {"causal": False, "softcap": 1.5},
    "window_softcap": {"causal": True, "window": 5, "softcap": 0.7},
}


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """Make q, k, v and dout with scores of a few units, so that the softmax is far from uniform."""
    B, H, K, T, S, D, Dv = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (B, H, T, D), (B, K, S, D), (B, K, S, Dv), (B, H, T, Dv)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one softmax over all keys, differentiable by autograd."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    T, S = scores.shape[-2:]
    for t in range(T):
        for s in range(S):
            distance = (S - T + t) - s
            if (causal and distance < 0) or (window is not None and distance >= window):
                scores[:, :, t, s] = -torch.inf
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v), scores.logsumexp(-1)


def naive_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, _ = naive(*leaves, **mask)
    return torch.autograd.grad(out, leaves, dout)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert actual.shape == expected.shape
    if torch.linalg.vector_norm(expected) < 1e-12:  # one visible key: the softmax is 1 whatever q and k are
        assert torch.linalg.vector_norm(actual) < 1e-12
    else:
        assert relative_error(actual, expected) <= tolerance


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile_elements", [None, 1, 100], ids=["one_tile", "tiles_of_a_row", "small_tiles"])
def test_reference_matches_the_naive_softmax(
    shape: tuple[int, ...], mask: dict[str, Any], tile_elements: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile_elements is not None:
        monkeypatch.setattr(reference, "TILE_ELEMENTS", tile_elements)
    q, k, v, dout = tensors(shape)
    mask = {"scale": 0.9, **mask}
    out, lse = reference.forward(q, k, v, **mask)
    expected_out, expected_lse = naive(q, k, v, **mask)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    for actual, expected in zip(
        reference.backward(dout, q, k, v, out, lse, **mask), naive_backward(dout, q, k, v, **mask), strict=True
    ):
        assert_close(actual, expected)


def test_reference_does_not_overflow() -> None:
    """Scores of a thousand overflow exp() in any dtype unless the maximum is subtracted."""
    q, k, v, dout = tensors((1, 2, 1, 6, 9, 8, 8))
    mask = {"scale": 1000.0, "causal": True}
    out, lse = reference.forward(q, k, v, **mask)
    assert_close(out, naive(q, k, v, **mask)[0])
    assert lse.isfinite().all()
    assert all(g.isfinite().all() for g in reference.backward(dout, q, k, v, out, lse, **mask))


@pytest.mark.parametrize("cuts", [[5], [1, 2, 3], [8, 16], [16]], ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_segments_merge_to_the_whole(cuts: list[int], softcap: float | None) -> None:
    """Forward: merge parts by LSE. Backward: each part, given the merged output and LSE, yields its part."""
    q, k, v, dout = tensors((2, 6, 2, 7, 17 + 7, 8, 5))
    mask = {"scale": 0.5, "softcap": softcap}
    # The whole past is visible; the last 7 keys are the queries' own chunk.
    bounds = [0, *cuts, 17, 24]
    parts = [(a, b, {**mask, "causal": b == 24}) for a, b in itertools.pairwise(bounds)]
    out, lse = None, None
    for a, b, part in parts:
        o, part_lse = reference.forward(q, k[:, :, a:b], v[:, :, a:b], **part)
        out, lse = (o, part_lse) if out is None else merge.merge(out, lse, o, part_lse)
    expected_out, expected_lse = naive(q, k, v, causal=True, **mask)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)

    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b, part in parts:
        shares = reference.backward(dout, q, k[:, :, a:b], v[:, :, a:b], out, lse, **part)
        dq += shares[0]
        dk[:, :, a:b], dv[:, :, a:b] = shares[1:]
    for actual, expected in zip((dq, dk, dv), naive_backward(dout, q, k, v, causal=True, **mask), strict=True):
        assert_close(actual, expected)


def test_merge_is_symmetric_and_keeps_a_dominant_part() -> None:
    """A part with all of the mass is unchanged, even if the weight of the other underflows."""
    shape = (1, 2, 3, 4)
    one, two = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    low, high = torch.full(shape[:3], -800.0).double(), torch.full(shape[:3], 800.0).double()
    for first, second in (((one, low), (two, high)), ((two, high), (one, low))):
        out, lse = merge.merge(first[0].clone(), first[1], second[0].clone(), second[1])
        assert torch.equal(out, two) and torch.equal(lse, high)


class ListPast:
    """A past in two segments of different sizes, with its gradients."""

    def __init__(self, k: Tensor, v: Tensor, later: tuple[Tensor, Tensor] | None, cut: int) -> None:
        self.k, self.v, self.later, self.cut = k, v, later, cut
        self.length = k.shape[2]
        self.dk, self.dv = torch.zeros_like(k), torch.zeros_like(v)

    def segments(self, first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for start, stop in ((0, self.cut), (self.cut, self.length)):
            start = max(start, first)
            if start < stop:
                yield start, self.k[:, :, start:stop], self.v[:, :, start:stop]

    def add_grad(self, start: int, dk: Tensor, dv: Tensor) -> None:
        self.dk[:, :, start : start + dk.shape[2]] += dk
        self.dv[:, :, start : start + dv.shape[2]] += dv

    def add_future_grads(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return (dk, dv) if self.later is None else (dk + self.later[0], dv + self.later[1])


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("with_later", [False, True], ids=["", "later"])
@pytest.mark.parametrize("window", [None, 1, 6, 9, 30], ids=str)
@pytest.mark.parametrize("past_length", [0, 4, 17])
def test_attend_splits_gradients_between_chunk_and_past(
    past_length: int, window: int | None, with_later: bool, with_sinks: bool
) -> None:
    """A chunk of 7 after a past: the past gets its gradients, the chunk its own plus those of later chunks."""
    T = 7
    q, k, v, dout = tensors((2, 6, 2, T, past_length + T, 8, 8))
    sinks = torch.randn(6, dtype=torch.float64) if with_sinks else None
    later = (torch.randn_like(k[:, :, past_length:]), torch.randn_like(v[:, :, past_length:])) if with_later else None
    past = ListPast(k[:, :, :past_length], v[:, :, :past_length], later, cut=past_length // 3)
    spec = AttentionSpec(scale=0.4, window=window)
    own_k, own_v = k[:, :, past_length:], v[:, :, past_length:]

    leaves = [x.clone().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    expected, expected_lse = naive(*leaves[:3], scale=0.4, causal=True, window=window)
    if sinks is not None:
        # A sink is a key with its own score and a value of zero.
        whole = torch.logaddexp(expected_lse, leaves[3].view(1, -1, 1))
        expected, expected_lse = expected * (expected_lse - whole).exp().unsqueeze(-1), whole
    expected_grads = torch.autograd.grad(expected, leaves, dout)

    out, lse = chunk.attend(q, own_k, own_v, sinks, past, spec)
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    dq, dk, dv, dsinks = chunk.attend_backward(dout, q, own_k, own_v, sinks, out, lse, past, spec)
    assert_close(dq, expected_grads[0], 1e-11)
    for own, in_past, expected_grad, left in zip(
        (dk, dv), (past.dk, past.dv), expected_grads[1:3], later or (0, 0), strict=True
    ):
        assert_close(own, expected_grad[:, :, past_length:] + left, 1e-11)
        assert_close(in_past, expected_grad[:, :, :past_length], 1e-11)
    if sinks is None:
        assert dsinks is None
    else:
        assert_close(dsinks, expected_grads[3], 1e-11)


def request(dtype: torch.dtype, head_size: int, *, device: str, window: bool = False) -> backends.KernelRequest:
    return backends.KernelRequest(
        device=device, dtype=dtype, head_size=head_size, value_size=head_size, window=window, softcap=False
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("groups", [1, 3, 7, 8])
def test_cpu_backend_matches_the_reference(groups: int, mask: str, dtype: torch.dtype) -> None:
    check_kernel(backends.CPU_FLASH, groups, MASKS[mask], dtype, "cpu", head_size=16)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("groups", [1, 3, 7, 8])
@pytest.mark.parametrize("kernel", [backends.CUDNN, backends.FLASH], ids=lambda kernel: kernel.name)
def test_gpu_backends_match_the_reference(kernel: backends.Kernel, groups: int, mask: str, head_size: int) -> None:
    missing = kernel.why_unsupported(request(torch.bfloat16, head_size, device="cuda", window="window" in MASKS[mask]))
    if missing is not None:
        pytest.skip(missing)
    check_kernel(kernel, groups, MASKS[mask], torch.bfloat16, "cuda", head_size=head_size)


def check_kernel(
    kernel: backends.Kernel, groups: int, mask: dict[str, Any], dtype: torch.dtype, device: str, head_size: int
) -> None:
    """Check a backend on one block of keys, given output and LSE of a softmax over that block and another one."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    # Only windowed calls have a bottom-right causal mask over more keys than queries.
    T = 67
    S = T if mask["causal"] and "window" not in mask else 131
    q, k, v, dout = tensors((2, 2 * groups, 2, T, S, head_size, head_size), dtype, device)
    _, other_k, other_v, _ = tensors((2, 2 * groups, 2, T, 64, head_size, head_size), dtype, device)
    mask = {"scale": head_size**-0.5, **mask}
    exact = [x.double() for x in (q, k, v, dout, other_k, other_v)]
    out, lse = kernel.forward(q, k, v, **mask)
    expected_out, expected_lse = reference.forward(*exact[:3], **mask)
    assert_close(out, expected_out, tolerance)
    assert_close(lse, expected_lse, tolerance)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    other = reference.forward(exact[0], *exact[4:], **{**mask, "causal": False, "window": None})
    merged_out, merged_lse = merge.merge(expected_out.clone(), expected_lse, *other)
    shares = kernel.backward(dout, q, k, v, merged_out.to(dtype), merged_lse.to(lse.dtype), **mask)
    expected = reference.backward(exact[3], *exact[:3], merged_out, merged_lse, **mask)
    for actual, reference_share in zip(shares, expected, strict=True):
        assert_close(actual, reference_share, 3 * tolerance)


def test_a_named_backend_is_used_or_refused() -> None:
    here = request(torch.float32, 16, device="cpu")
    assert backends.choose("torch", here) is backends.TORCH
    with pytest.raises(ValueError, match=r"(?s)cudnn.*auto"):
        backends.choose("cudnn", here)
    with pytest.raises(ValueError, match=r"(?s)flash.*auto"):
        backends.choose("flash", here)
