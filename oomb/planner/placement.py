"""Decide what a batch keeps in GPU and host memory, before anything is allocated. Pure arithmetic on a model's shape.

`place` puts what grows with the context (pages of K, V and their gradients, attention outputs) in the two tiers and
resolves the settings that are "auto". The engine calls it with the memory that is free now, `oomb plan` with that of
any machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from oomb.config import TILE_SIZE, Config, means_per_page
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import staging_bytes
from oomb.memory.selected_io import NUM_BUFFERS, buffer_bytes
from oomb.memory.selections import SelectionSpec, max_selected, table_bytes
from oomb.models.shape import LayerShape
from oomb.planner.activations import chunk_memory
from oomb.planner.flops import matrix_flops
from oomb.planner.request import (
    SAFETY_SHARE,
    Limit,
    MemoryTerm,
    Placement,
    PlacementRequest,
    Shortfall,
    host_budget,
)
from oomb.utils.units import parse_bytes

FLOPS_PER_BYTE = 12_800
"""FLOPs of matrix products in the time the link takes for a byte: 575 TFLOP/s and 45 GB/s (`step_time`, `hardware`)."""
OPTIONAL_SHARE = 0.75
"""Share of the free host memory that attention outputs may fill if `keep_attention` is "auto"."""
CPU_OPTIONAL_SHARE = 0.25
"""The same for a model on the CPU, where weights, activations and pages share one memory."""
MIN_SAVED_SHARE = 1 / 16
"""Smallest share of the tokens for which keeping attention outputs pays."""
FLOAT32_SUMS_SHARE = 0.25
"""Share of the GPU's memory that float32 sums of parameter gradients may take if `param_grad_dtype` is "auto"."""


def place(request: PlacementRequest) -> tuple[Placement, Shortfall | None]:
    """Return the best placement and, if it does not fit, the limit that it exceeds."""
    config = request.config
    is_checkpointed = config.checkpoint_layers is True
    if config.checkpoint_layers == "auto" and request.needs_grad:
        whole = sum(chunk_memory(request, is_checkpointed=False, keeps_all_outputs=False).values())
        # Later steps reuse what is decided for the first one, and hold optimizer states too.
        is_checkpointed = whole > SAFETY_SHARE * (request.available - request.optimizer_bytes)
        if not is_checkpointed:
            (fast, shortfall), (lean, lean_shortfall) = (_place_outputs(request, lean) for lean in (False, True))
            if request.sparse_layers:
                # The fill pass waits for K and V on the host. Their gradients there cost no time.
                is_fuller = lean.gpu_tokens - fast.gpu_tokens > _recompute_break_even(request) * request.capacity
            else:
                # Activations must not take what the user has reserved for pages.
                is_fuller = config.gpu_memory != "auto" and lean.gpu_bytes > fast.gpu_bytes
            is_checkpointed = shortfall is not None or (lean_shortfall is None and is_fuller)
    return _place_outputs(request, is_checkpointed)


def float32_sums_fit(sum_bytes: int, gpu_bytes: int | None) -> bool:
    """Return whether `param_grad_dtype="auto"` means float32.

    The rule ignores the length of the sequence, so a longer one takes more pages and nothing else.

    Args:
        sum_bytes: float32 sums of parameter gradients, `ModelShape.missing_grad_bytes(True)`.
        gpu_bytes: Total memory of the GPU; None on a CPU.
    """
    return gpu_bytes is None or sum_bytes <= FLOAT32_SUMS_SHARE * gpu_bytes


def selection_spec(config: Config, layers: Iterable[LayerShape], has_float8: bool) -> SelectionSpec | None:
    """Return how pages are selected, or None if no layer selects pages.

    Args:
        config: Settings of the engine.
        layers: All layers of the model; those with a sliding window select no pages.
        has_float8: Whether the device supports float8. Page means of a 16-bit model are then stored in it: SmolLM2
            with 8 pages of 64 has a gradient cosine of 0.952 with float8 means and with float32 means.
    """
    dtypes = [layer.dtype for layer in layers if layer.window is None]
    if config.page_budget is None or not dtypes:
        return None
    return SelectionSpec(
        budget=config.page_budget,
        tile_size=TILE_SIZE,
        num_means=means_per_page(config.page_rule, config.page_size),
        means_dtype=torch.float8_e4m3fn if has_float8 and dtypes[0].itemsize == 2 else dtypes[0],
    )


def _recompute_break_even(request: PlacementRequest) -> float:
    """Return the share of K and V on the host at which waiting for them takes as long as one more forward.

    One more forward is what checkpointed layers cost. About a quarter for Qwen2.5-7B with chunks of 4096 and 64 pages
    of 128 per query tile.
    """
    config, shape = request.config, request.shape
    assert config.page_budget is not None
    num_selected = request.batch_size * -(-config.chunk_size // TILE_SIZE) * config.page_budget
    kv_row = sum(request.rows[index][0] for index in request.sparse_layers)
    num_bytes = min(num_selected * config.page_size, request.capacity) * kv_row
    return matrix_flops(shape.active_params - shape.head_params, request.chunk_tokens) / FLOPS_PER_BYTE / num_bytes


def _place_outputs(request: PlacementRequest, is_checkpointed: bool) -> tuple[Placement, Shortfall | None]:
    """Place a batch with all attention outputs if the config says so, otherwise with as many as fit."""
    keep, capacity = request.config.keep_attention, request.capacity
    if keep is False or not request.needs_grad or capacity <= 0:
        return _place(request, is_checkpointed, out_tokens=0)
    placement, shortfall = _place(request, is_checkpointed, out_tokens=capacity)
    if shortfall is None or keep is True:
        return placement, shortfall
    placement, shortfall = _place(request, is_checkpointed, out_tokens=0)
    # If other batches will need memory too, outputs must not take it from them.
    if shortfall is None and not request.on_cpu and request.is_exclusive:
        for out_tokens in sorted(_spare_tokens(request, placement), reverse=True):
            if out_tokens > MIN_SAVED_SHARE * capacity:
                some, some_shortfall = _place(request, is_checkpointed, out_tokens=out_tokens)
                if some_shortfall is None:
                    return some, None
    return placement, shortfall


def _spare_tokens(request: PlacementRequest, placement: Placement) -> tuple[int, int]:
    """Return for how many tokens, in whole chunks, attention outputs fit on the GPU and on the host.

    Outputs go to the GPU only if everything else is there too.
    """
    out_row, chunk = sum(out for _, _, out in request.rows), request.config.chunk_size
    # More buffers on the GPU can push pages to the host, and a page can begin before the first chunk with outputs.
    buffers = _staging(request, keeps=True)
    if placement.host_bytes:
        buffers -= _staging(request, keeps=False)
    elif request.sparse_layers:
        buffers += _selected_buffers(request, "kv") + _selected_buffers(request, "grad")
    spare = (
        0 if placement.host_bytes else int(_gpu_budget(request, placement.fixed_bytes, 0)) - placement.gpu_bytes,
        _optional_limit(request) - placement.host_bytes - buffers,
    )
    page = request.config.page_size * out_row
    on_gpu, on_host = (min(request.capacity - chunk, max(0, size - page) // out_row // chunk * chunk) for size in spare)
    return on_gpu, on_host


def _optional_limit(request: PlacementRequest) -> int:
    """Return how much host memory attention outputs may fill if `keep_attention` is "auto"."""
    if request.config.host_memory == "auto":
        return int(OPTIONAL_SHARE * request.free_host_bytes)
    return host_budget(request.config, request.free_host_bytes)


def _place(request: PlacementRequest, is_checkpointed: bool, *, out_tokens: int) -> tuple[Placement, Shortfall | None]:
    """Place a batch that keeps the attention outputs of its last `out_tokens` tokens."""
    config, capacity, page, num_pages = request.config, request.capacity, request.config.page_size, request.num_pages
    rows, keeps = request.rows, out_tokens > 0
    kv_row, grad_row, out_row = (sum(row[field] for row in rows) for field in range(3))
    kv_bytes, grad_bytes = page * kv_row, page * grad_row
    out_bytes = (num_pages - (capacity - out_tokens) // page) * page * out_row if keeps else 0
    tables = _table_bytes(request)
    step = chunk_memory(request, is_checkpointed=is_checkpointed, keeps_all_outputs=keeps and out_tokens == capacity)
    step_bytes = sum(step.values())
    whole = num_pages * (kv_bytes + grad_bytes) + out_bytes + tables
    # 8-bit pages pass through buffers in either tier.
    always = sum(_selected_buffers(request, kind) for kind in ("kv", "grad") if request.is_quantized(kind))
    gpu_out_tokens, staging = 0, always
    if whole <= _gpu_budget(request, step_bytes, always):
        gpu_pages = gpu_grad_pages = num_pages
        gpu_out_tokens = out_tokens
    elif not request.sparse_layers:
        staging = _staging(request, keeps)
        budget = _gpu_budget(request, step_bytes, staging)
        gpu_pages = gpu_grad_pages = min(num_pages, int(budget // (kv_bytes + grad_bytes)))
    else:
        # K and V first. If all of them are on the GPU, they need no buffers, unless they are 8-bit.
        kv_buffers, is_quantized = _selected_buffers(request, "kv"), request.is_quantized("kv")
        staging = _staging(request, keeps) + _selected_buffers(request, "grad") + is_quantized * kv_buffers
        gpu_pages = num_pages
        budget = _gpu_budget(request, step_bytes, staging) - tables
        if num_pages * kv_bytes > budget:
            staging += (not is_quantized) * kv_buffers
            budget = _gpu_budget(request, step_bytes, staging) - tables
            gpu_pages = min(num_pages, max(0, int(budget // kv_bytes)))
        left = max(0.0, budget - gpu_pages * kv_bytes)
        gpu_grad_pages = min(num_pages, int(left // grad_bytes)) if grad_bytes else num_pages
    host_pages, host_grad_pages = num_pages - gpu_pages, num_pages - gpu_grad_pages
    grows = {
        ("pages of K and V", GPU): gpu_pages * kv_bytes,
        ("pages of their gradients", GPU): gpu_grad_pages * grad_bytes,
        ("kept attention outputs", GPU): out_bytes if gpu_out_tokens else 0,
        ("page summaries and choices", GPU): tables,
        ("pages of K and V", HOST): host_pages * kv_bytes,
        ("pages of their gradients", HOST): host_grad_pages * grad_bytes,
        ("kept attention outputs", HOST): 0 if gpu_out_tokens else out_bytes,
    }
    terms = [
        *(
            MemoryTerm(name=name, tier=GPU, num_bytes=size)
            for name, size in {**step, "staging buffers": staging}.items()
        ),
        *(MemoryTerm(name=name, tier=tier, num_bytes=size, grows=True) for (name, tier), size in grows.items()),
    ]
    keep_last = not is_checkpointed if config.keep_last_chunk == "auto" else config.keep_last_chunk
    placement = Placement(
        checkpoint_layers=is_checkpointed,
        keep_last_chunk=bool(keep_last) and request.needs_grad,
        capacity=capacity,
        gpu_tokens=min(capacity, gpu_pages * page),
        gpu_grad_tokens=min(capacity, gpu_grad_pages * page),
        out_tokens=out_tokens,
        gpu_out_tokens=gpu_out_tokens,
        terms=tuple(term for term in terms if term.num_bytes),
    )
    # Tables must be on the GPU in any case.
    return placement, _shortfall(request, placement, step_bytes + staging + tables, out_bytes)


def _shortfall(request: PlacementRequest, placement: Placement, step_bytes: int, out_bytes: int) -> Shortfall | None:
    """Return the first limit that a placement exceeds.

    Args:
        request: The batch.
        placement: Where it would go.
        step_bytes: GPU memory that it needs whatever goes to the host.
        out_bytes: Attention outputs in either tier.
    """
    shape, free_host_bytes = request.shape, request.free_host_bytes
    if shape.num_positions is not None and request.length > shape.num_positions:
        return Shortfall(Limit.POSITIONS, request.length, shape.num_positions)
    if step_bytes > request.available:
        resident = shape.weight_bytes + request.state_bytes
        if request.available < 0:
            return Shortfall(Limit.WEIGHTS, resident, max(0, int(request.available) + resident))
        return Shortfall(Limit.GPU, step_bytes, int(request.available))
    limit = host_budget(request.config, free_host_bytes)
    if out_bytes and request.config.keep_attention == "auto":
        if request.on_cpu and out_bytes > CPU_OPTIONAL_SHARE * free_host_bytes:
            return Shortfall(Limit.CPU, out_bytes, int(CPU_OPTIONAL_SHARE * free_host_bytes))
        limit = _optional_limit(request)
    total = placement.gpu_bytes + placement.host_bytes
    if request.on_cpu and total > SAFETY_SHARE * free_host_bytes:
        return Shortfall(Limit.CPU, total, int(SAFETY_SHARE * free_host_bytes))
    if placement.host_bytes > limit:
        return Shortfall(Limit.HOST, placement.host_bytes, limit)
    return None


def _table_bytes(request: PlacementRequest) -> int:
    """Return the GPU memory of sparse layers besides their pages: page means, selections, addresses."""
    if not request.sparse_layers:
        return 0
    spec, layers = _spec(request), [request.shape.layers[index] for index in request.sparse_layers]
    return sum(
        table_bytes(
            spec,
            batch_size=request.batch_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            num_pages=request.num_pages,
            capacity=request.capacity,
            chunk_size=request.config.chunk_size,
            needs_grad=request.needs_grad,
        )
        for layer in layers
    )


def _spec(request: PlacementRequest) -> SelectionSpec:
    spec = selection_spec(request.config, request.shape.layers, request.has_float8)
    assert spec is not None
    return spec


def _selected_buffers(request: PlacementRequest, kind: str) -> int:
    """Return the bytes of all buffers for selected pages of K and V ("kv") or of their gradients ("grad")."""
    if not request.sparse_layers or (kind == "grad" and not request.needs_grad):
        return 0
    # 8-bit pages are dequantized on their way in.
    row_bytes = max(request.layers[index].working(kind).num_bytes for index in request.sparse_layers)
    num_selected = max_selected(_spec(request), request.batch_size, request.config.chunk_size, request.num_pages)
    return NUM_BUFFERS[kind] * buffer_bytes(num_selected, row_bytes * request.config.page_size, request.num_pages)


def _staging(request: PlacementRequest, keeps: bool) -> int:
    """Return the bytes of all staging buffers for consecutive tokens."""
    return staging_bytes(
        request.rows,
        request.sparse_layers,
        chunk_size=request.config.chunk_size,
        keeps=keeps,
        needs_grad=request.needs_grad,
    )


def _gpu_budget(request: PlacementRequest, step_bytes: int, staging: int) -> float:
    """Return the GPU memory for what grows with the context, besides `step_bytes` and `staging`."""
    left = request.available - step_bytes
    if request.config.gpu_memory == "auto":
        return max(0.0, SAFETY_SHARE * (left - request.optimizer_bytes) - staging)
    # An explicit limit still leaves room for activations and for the optimizer states of adapters, which are small.
    # Those of all weights may be elsewhere: whoever sets a limit accounts for them.
    if request.shape.has_adapters:
        left -= request.optimizer_bytes
    return max(0.0, min(parse_bytes(request.config.gpu_memory), left - staging))
