"""Seconds of a training step: compute of both passes and the copies beside them."""

from __future__ import annotations

from math import exp

from oomb.config import TILE_SIZE, means_per_page
from oomb.planner.flops import attention_flops, causal_pairs, matrix_flops
from oomb.planner.hardware import Machine
from oomb.planner.request import Placement, PlacementRequest

MATRIX_TFLOPS, FORWARD_TFLOPS, BACKWARD_TFLOPS = 575, 550, 525
"""Rates of matrix products and of attention's two directions. Fitted to eight steps of Qwen2.5-7B from 24,576 to
262,144 tokens, with and without kept attention and checkpointed layers; all of them within 5%."""


ADAPTER_PRODUCTS, WIDE_ADAPTER_PRODUCTS = 1.13, 1.43
"""Time of the layers' matrix products with adapters over that without. Fitted to three steps of Qwen2.5-7B with LoRA
(rank 16 on all linear layers, 32,768 tokens, chunks of 4096 and 8192, layers checkpointed and not); within 2.5%. Wide:
PEFT's are float32, TF32 is off by default, and inputs are cast for them; five steps up to 65,536 tokens, within 2%."""


CHOSEN_FORWARD_TFLOPS, CHOSEN_BACKWARD_TFLOPS = 384, 321
"""Rates of attention to chosen pages, as dense attention's are counted. A step of Qwen2.5-7B on 49,152 tokens, chunks
of 4096, 64 pages of 128."""


RANKING_TFLOPS, RANKED_QUERIES = 185, 16
"""Rate at which pages are ranked: 0.65 ms for 8192 pages, a chunk of 4096 and 28 heads of 128; and queries of a tile
that are asked."""


WIDENED_BYTES_PER_SECOND = 370e9
"""Rate at which chosen pages in 8 bits become wide for attention, and gradients narrow again, in bytes at rest. Fitted
to what two steps of Qwen2.5-7B, on 3,768,320 and 4,194,304 tokens, took beyond the other terms, and both are then
within 1%. No profile shows it by itself: some of it may come with the length, since 16-bit pages have 4% of that at
1,048,576. For other GPUs it is scaled as all rates are, though memory limits it more than arithmetic."""


MOST_CHUNKS = 1 << 13
"""Chunks that are looked at one by one."""


def predict_seconds(request: PlacementRequest, placement: Placement, machine: Machine) -> float | None:
    """Time of a step's forward and backward. In each pass, copies run beside the computation; except that in the fill
    pass it waits for pages that have just been chosen."""
    if machine.scale is None:
        return None
    work, link = _work(request, placement), machine.link_bytes_per_second
    loads, stores, chosen = _traffic(request, placement)
    return chosen / link + sum(
        max(compute / machine.scale, load / link, store / link) for compute, load, store in zip(work, loads, stores)
    )


def _work(request: PlacementRequest, placement: Placement) -> tuple[float, float]:
    """Seconds of arithmetic of the fill pass and of the gradient pass, at the measured rates."""
    facts, length = request.shape, request.length
    tokens = request.batch_size * length
    # What the gradient pass computes forward again: all but a last chunk whose graph was kept.
    again = placement.capacity if placement.keep_last_chunk else length
    share_again = again / length
    head = facts.head_params
    layers: float = facts.active_params - head
    if facts.has_adapters:
        layers *= WIDE_ADAPTER_PRODUCTS if facts.has_float32_adapters else ADAPTER_PRODUCTS
    fill = matrix_flops(layers + head, tokens) / MATRIX_TFLOPS + _forward(request, length) + _scoring_seconds(request)
    widening = _dequantize_seconds(request, placement)
    if not request.needs_grad:
        return fill / 1e12 + widening[0], 0.0
    # The head is always computed again. A frozen matrix costs no gradient of its own.
    products = layers * (1 + share_again + placement.checkpoint_layers) + 2 * head + facts.trained_params
    # The last tokens' is kept, and the very last chunk's if its graph is.
    saved_from = placement.capacity - placement.out_tokens
    attention_again = _forward(request, again) - _forward(request, placement.capacity) + _forward(request, saved_from)
    backward = matrix_flops(products, tokens) / MATRIX_TFLOPS + attention_again + _backward(request, length)
    return fill / 1e12 + widening[0], backward / 1e12 + widening[1]


def _dequantize_seconds(request: PlacementRequest, placement: Placement) -> tuple[float, float]:
    """Seconds, in the fill pass and in the gradient pass, of chosen pages in 8 bits on their way to attention and back:
    wherever they rest, they become wide in a buffer. In the fill pass those on the host do so while they come."""
    if not request.sparse_layers:
        return 0.0, 0.0
    kv, grad = (
        sum(request.rows[index][field] for index in request.sparse_layers) * request.is_quantized(field)
        for field in (0, 1)
    )
    seen = _tokens_selected(request, 0)
    near = seen - _tokens_selected(request, placement.gpu_tokens)
    again = seen * (placement.capacity - placement.out_tokens) / max(1, placement.capacity)
    moved = kv * near, kv * (seen + again) + 2 * grad * seen
    return moved[0] / WIDENED_BYTES_PER_SECOND, moved[1] / WIDENED_BYTES_PER_SECOND


def _forward(request: PlacementRequest, length: int) -> float:
    """Seconds x 1e12 of attention's forward over the first `length` tokens."""
    return _attention(request, length, FORWARD_TFLOPS, CHOSEN_FORWARD_TFLOPS)


def _backward(request: PlacementRequest, length: int) -> float:
    return 2.5 * _attention(request, length, BACKWARD_TFLOPS, CHOSEN_BACKWARD_TFLOPS)


def _attention(request: PlacementRequest, length: int, dense_rate: float, chosen_rate: float) -> float:
    config, total = request.config, 0.0
    for index, layer in enumerate(request.shape.layers):
        if index in request.sparse_layers:
            assert config.page_budget is not None
            own = length * min(length, config.chunk_size) / 2
            # As a window of so many tokens, over the chunks before.
            chosen = causal_pairs(max(0, length - config.chunk_size), config.page_budget * config.page_size)
            total += attention_flops(layer, own) / dense_rate + attention_flops(layer, chosen) / chosen_rate
        else:
            total += attention_flops(layer, causal_pairs(length, layer.window)) / dense_rate
    return request.batch_size * total


def _scoring_seconds(request: PlacementRequest) -> float:
    """Seconds x 1e12 of ranking pages: two passes over the means of earlier pages, for the queries that are asked."""
    config, total = request.config, 0.0
    asked = request.batch_size * request.length * RANKED_QUERIES / TILE_SIZE
    means = request.length / 2 / config.page_size * means_per_page(config.page_rule, config.page_size)
    for index in request.sparse_layers:
        layer = request.shape.layers[index]
        total += 4 * asked * means * layer.num_query_heads * layer.head_size
    return total / RANKING_TFLOPS


def _traffic(request: PlacementRequest, placement: Placement) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Bytes loaded to the GPU, and bytes stored to the host, in the fill pass and in the gradient pass; and bytes of
    chosen pages that are loaded in the fill pass beside these."""
    chunk, first = request.config.chunk_size, placement.gpu_tokens
    saved_from = placement.capacity - placement.out_tokens
    fill_loads = grad_loads = grad_stores = 0.0
    fill_stores = 0.0
    chosen, chosen_loads = (0.0, 0.0), 0.0
    if request.sparse_layers:
        # The same for all of them.
        chosen = _tokens_selected(request, first), _tokens_selected(request, placement.gpu_grad_tokens)
    for index, ((kv, grad, out), layer) in enumerate(zip(request.rows, request.shape.layers)):
        if index in request.sparse_layers:
            seen, seen_grad = chosen
            chosen_loads += kv * seen
            again = seen * saved_from / max(1, placement.capacity)
        else:
            seen = seen_grad = _tokens_read(chunk, placement.capacity, first, layer.window)
            fill_loads += kv * seen
            again = _tokens_read(chunk, saved_from, min(first, saved_from), layer.window)
        fill_stores += kv * placement.host_tokens + out * placement.host_out_tokens
        if request.needs_grad:
            grad_loads += kv * (seen + again) + grad * seen_grad
            grad_loads += out * placement.host_out_tokens
            grad_stores += grad * seen_grad
    return (fill_loads, grad_loads), (fill_stores, grad_stores), chosen_loads


def _tokens_selected(request: PlacementRequest, first: int) -> float:
    """Tokens from `first` on in pages that chunks choose, over all chunks, if every tile chooses at random: the most
    that it can be, since tiles with like interests share pages."""
    config = request.config
    assert config.page_budget is not None
    drawn = request.batch_size * -(-config.chunk_size // TILE_SIZE) * config.page_budget
    count, total = request.capacity // config.chunk_size, 0.0
    stride = -(-count // MOST_CHUNKS) or 1
    for index in range(1, count + 1, stride):
        # Of very many chunks one stands for its neighbours.
        alike = min(stride, count + 1 - index)
        start = (index + (alike - 1) / 2) * config.chunk_size
        pages, away = start / config.page_size, max(0, start - first) / config.page_size
        total += alike * (away * (1 - exp(-drawn / pages)) if pages > config.page_budget else away)
    return total * config.page_size


def _tokens_read(chunk: int, capacity: int, first: int, window: int | None) -> int:
    """Tokens from `first` on that chunks read, over all chunks: of those before a chunk at most `window`, if any."""
    before, last = first // chunk, capacity // chunk
    full = last if window is None else max(before, min(last, (first + window) // chunk))
    # Chunk k, for k in (before, full], reads k * chunk - first tokens; those after it read the window.
    rising = chunk * (full * (full + 1) - before * (before + 1)) // 2 - first * (full - before)
    return max(0, rising) + (window or 0) * max(0, last - full)
