"""Predict the seconds of a training step: compute of both passes, and copies between GPU and host memory.

The rates are those of whole steps on one H200 (Qwen2.5-7B, chunks of 8192 unless noted, cuDNN attention), so they
include norms, activations and launch gaps. For other GPUs they are scaled by datasheet TFLOP/s, which is a guess.
"""

from __future__ import annotations

from math import exp

from oomb.config import TILE_SIZE, means_per_page
from oomb.planner.flops import attention_flops, causal_pairs, matrix_flops
from oomb.planner.hardware import Machine
from oomb.planner.request import Placement, PlacementRequest

MATRIX_TFLOPS, FORWARD_TFLOPS, BACKWARD_TFLOPS = 575, 550, 525
"""Rates of matrix products, attention forward and attention backward. Fitted to eight steps of Qwen2.5-7B from 24,576
to 262,144 tokens, with and without saved attention outputs and checkpointed layers; all within 5%."""
SHORTEST_CHUNK = 4096
"""Smallest chunk the rates hold for. Smaller chunks leave the tensor cores underused."""
LORA_FACTOR, FLOAT32_LORA_FACTOR = 1.13, 1.43
"""Time of the layers' matrix products with adapters, relative to without. Fitted to three steps of Qwen2.5-7B with LoRA
(rank 16 on all linear layers, 32,768 tokens, chunks of 4096 and 8192, layers checkpointed or not), within 2.5%. The
second factor is for adapters in float32, as PEFT's are outside of autocast: TF32 is off by default and inputs are cast.
It is fitted to five steps of up to 65,536 tokens, within 2%."""
SPARSE_FORWARD_TFLOPS, SPARSE_BACKWARD_TFLOPS = 384, 321
"""Rates of attention to selected pages, counted as for dense attention. One step of Qwen2.5-7B on 49,152 tokens, chunks
of 4096, 64 pages of 128."""
BACKWARD_FACTOR = 2.5
"""Work of attention's backward relative to its forward, as these rates count it: it recomputes the scores."""
SCORING_TFLOPS, SAMPLED_QUERIES = 185, 16
"""Rate of page scoring (0.65 ms for 8192 pages, a chunk of 4096 and 28 heads of 128), and the queries per tile that are
sampled for it."""
DEQUANTIZED_BYTES_PER_SECOND = 370e9
"""Rate at which selected 8-bit pages are dequantized and their gradients quantized, in 8-bit bytes. Fitted to what two
steps of Qwen2.5-7B (3,768,320 and 4,194,304 tokens) took beyond the other terms; both are then within 1%. No profile
shows it in isolation: some of it may be due to the context length, since 16-bit pages show 4% of it at 1,048,576
tokens. It is scaled by TFLOP/s like the other rates, although memory bandwidth limits it more than arithmetic does."""
MAX_CHUNKS = 1 << 13
"""Up to this many chunks are evaluated one by one; beyond that, evenly spaced chunks each represent their neighbors."""


def predict_seconds(request: PlacementRequest, placement: Placement, machine: Machine) -> float | None:
    """Return the time of a step's forward and backward, or None for an unknown GPU.

    Copies overlap with the computation of their pass, except that the fill pass waits for newly selected pages.
    """
    if machine.scale is None:
        return None
    compute, link = _compute_seconds(request, placement), machine.link_bytes_per_second
    loads, stores, selected = _traffic(request, placement)
    return selected / link + sum(
        max(seconds / machine.scale, load / link, store / link)
        for seconds, load, store in zip(compute, loads, stores, strict=True)
    )


def _compute_seconds(request: PlacementRequest, placement: Placement) -> tuple[float, float]:
    """Return the seconds of arithmetic in the fill pass and in the gradient pass, at the measured rates."""
    shape, length = request.shape, request.length
    tokens = request.batch_size * length
    # The gradient pass recomputes everything except a last chunk whose graph was kept.
    recomputed = placement.capacity if placement.keep_last_chunk else length
    head = shape.head_params
    layers: float = shape.active_params - head
    if shape.has_adapters:
        layers *= FLOAT32_LORA_FACTOR if shape.has_float32_adapters else LORA_FACTOR
    fill = matrix_flops(layers + head, tokens) / MATRIX_TFLOPS + _forward(request, length) + _scoring(request)
    # The head always runs again. A frozen matrix needs no weight gradient.
    passes = 1 + recomputed / length + placement.checkpoint_layers
    products = layers * passes + 2 * head + shape.trained_params
    # Attention outputs are kept for the last tokens, and for the last chunk if its graph is.
    saved_from = placement.capacity - placement.out_tokens
    attention = _forward(request, recomputed) - _forward(request, placement.capacity) + _forward(request, saved_from)
    gradient = matrix_flops(products, tokens) / MATRIX_TFLOPS + attention + _backward(request, length)
    fill_dequantize, gradient_dequantize = _dequantize_seconds(request, placement)
    return fill / 1e12 + fill_dequantize, gradient / 1e12 + gradient_dequantize


def _dequantize_seconds(request: PlacementRequest, placement: Placement) -> tuple[float, float]:
    """Return the seconds, in each pass, of converting selected 8-bit pages for attention and back.

    Pages of both tiers are dequantized into a buffer. In the fill pass the transfer of host pages hides that.
    """
    if not request.sparse_layers:
        return 0.0, 0.0
    kv, grad = (
        sum(request.rows[index][field] for index in request.sparse_layers) * request.is_quantized(kind)
        for field, kind in enumerate(("kv", "grad"))
    )
    tokens = _tokens_selected(request, 0)
    gpu_tokens = tokens - _tokens_selected(request, placement.gpu_tokens)
    again = tokens * (placement.capacity - placement.out_tokens) / max(1, placement.capacity)
    fill, gradient = kv * gpu_tokens, kv * (tokens + again) + 2 * grad * tokens
    return fill / DEQUANTIZED_BYTES_PER_SECOND, gradient / DEQUANTIZED_BYTES_PER_SECOND


def _forward(request: PlacementRequest, length: int) -> float:
    """Return the seconds x 1e12 of attention's forward over the first `length` tokens."""
    return _attention(request, length, FORWARD_TFLOPS, SPARSE_FORWARD_TFLOPS)


def _backward(request: PlacementRequest, length: int) -> float:
    return BACKWARD_FACTOR * _attention(request, length, BACKWARD_TFLOPS, SPARSE_BACKWARD_TFLOPS)


def _attention(request: PlacementRequest, length: int, dense_rate: float, sparse_rate: float) -> float:
    config, total = request.config, 0.0
    for index, layer in enumerate(request.shape.layers):
        if index in request.sparse_layers:
            assert config.page_budget is not None
            own = length * min(length, config.chunk_size) / 2
            # Selected pages cost what a sliding window of that size over the earlier chunks costs.
            selected = causal_pairs(max(0, length - config.chunk_size), config.page_budget * config.page_size)
            total += attention_flops(layer, own) / dense_rate + attention_flops(layer, selected) / sparse_rate
        else:
            total += attention_flops(layer, causal_pairs(length, layer.window)) / dense_rate
    return request.batch_size * total


def _scoring(request: PlacementRequest) -> float:
    """Return the seconds x 1e12 of scoring pages: two passes of the sampled queries over earlier page means."""
    config, total = request.config, 0.0
    queries = request.batch_size * request.length * SAMPLED_QUERIES / TILE_SIZE
    means = request.length / 2 / config.page_size * means_per_page(config.page_rule, config.page_size)
    for index in request.sparse_layers:
        layer = request.shape.layers[index]
        total += 4 * queries * means * layer.num_query_heads * layer.head_size
    return total / SCORING_TFLOPS


def _traffic(request: PlacementRequest, placement: Placement) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return the bytes that are copied between the tiers.

    Returns:
        Bytes loaded to the GPU in the fill pass and in the gradient pass; bytes stored to the host in each; bytes of
        selected pages that the fill pass loads and waits for.
    """
    chunk, first = request.config.chunk_size, placement.gpu_tokens
    saved_from = placement.capacity - placement.out_tokens
    fill_loads = grad_loads = fill_stores = grad_stores = waited_loads = 0.0
    selected = (0.0, 0.0)
    if request.sparse_layers:
        # The same in all sparse layers.
        selected = _tokens_selected(request, first), _tokens_selected(request, placement.gpu_grad_tokens)
    for index, ((kv, grad, out), layer) in enumerate(zip(request.rows, request.shape.layers, strict=True)):
        if index in request.sparse_layers:
            read, read_grad = selected
            waited_loads += kv * read
            again = read * saved_from / max(1, placement.capacity)
        else:
            read = read_grad = _tokens_read(chunk, placement.capacity, first, layer.window)
            fill_loads += kv * read
            again = _tokens_read(chunk, saved_from, min(first, saved_from), layer.window)
        fill_stores += kv * placement.host_tokens + out * placement.host_out_tokens
        grad_loads += kv * (read + again) + grad * read_grad + out * placement.host_out_tokens
        grad_stores += grad * read_grad
    return (fill_loads, grad_loads), (fill_stores, grad_stores), waited_loads


def _tokens_selected(request: PlacementRequest, first: int) -> float:
    """Return how many tokens from `first` on are in selected pages, summed over all chunks.

    Assumes that every tile selects at random, which is the worst case: similar tiles share pages.
    """
    config = request.config
    assert config.page_budget is not None
    num_selected = request.batch_size * -(-config.chunk_size // TILE_SIZE) * config.page_budget
    count, total = request.capacity // config.chunk_size, 0.0
    stride = -(-count // MAX_CHUNKS) or 1
    for index in range(1, count + 1, stride):
        num_chunks = min(stride, count + 1 - index)
        start = (index + (num_chunks - 1) / 2) * config.chunk_size
        pages, host_pages = start / config.page_size, max(0, start - first) / config.page_size
        share = 1 - exp(-num_selected / pages) if pages > config.page_budget else 1
        total += num_chunks * host_pages * share
    return total * config.page_size


def _tokens_read(chunk: int, capacity: int, first: int, window: int | None) -> int:
    """Return how many tokens from `first` on are read by dense attention, summed over all chunks.

    Of the tokens before a chunk, at most `window` are read if there is a window.
    """
    before, last = first // chunk, capacity // chunk
    full = last if window is None else max(before, min(last, (first + window) // chunk))
    # Chunk k, for k in (before, full], reads k * chunk - first tokens; later chunks read the window.
    rising = chunk * (full * (full + 1) - before * (before + 1)) // 2 - first * (full - before)
    return max(0, rising) + (window or 0) * max(0, last - full)
