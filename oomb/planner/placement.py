"""What a sequence will take, and where it goes, before anything is allocated: pure arithmetic on a model's shape.

`place` puts what grows with the context (pages of K, V and their gradients, kept attention outputs) in the two tiers
and settles what is left to "auto": for the engine by what is really free, for `oomb.forecast` on any machine.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from oomb.config import TILE_SIZE, Config, means_per_page
from oomb.memory.pool import GPU, HOST
from oomb.memory.rows import staging_bytes
from oomb.memory.selected_io import NUM_BUFFERS, buffer_bytes
from oomb.memory.selections import SelectionSpec, max_selected, table_bytes
from oomb.planner.activations import chunk_memory
from oomb.planner.flops import matrix_flops
from oomb.planner.request import SAFETY_SHARE, MemoryTerm, Placement, PlacementRequest, host_budget
from oomb.utils.units import gib, parse_bytes

OPERATIONS_PER_BYTE = 12_800
"""Of matrix products, in the time that the link takes for a byte: 575 TFLOP/s and 45 GB/s (`oomb.forecast`)."""
OPTIONAL_SHARE = 0.75
"""Share of the free host memory up to which attention outputs are kept there without being asked for."""
CPU_OPTIONAL_SHARE = 0.25
"""The same for a model on a CPU, where weights, activations and pages compete for one memory."""
MIN_SAVED_SHARE = 1 / 16
"""Share of the tokens whose attention outputs are worth the trouble of keeping them."""


def place(request: PlacementRequest) -> tuple[Placement, str | None]:
    """The best placement, and why it does not fit, if it does not."""
    config = request.config
    is_checkpointed = config.checkpoint_layers is True
    if config.checkpoint_layers == "auto" and request.needs_grad:
        whole = sum(chunk_memory(request, is_checkpointed=False, keeps=False).values())
        # What is decided for the first step holds for those after it, when optimizer states are there.
        is_checkpointed = whole > SAFETY_SHARE * (request.available - request.optimizer_bytes)
        if not is_checkpointed:
            (fast, problem), (lean, lean_problem) = (_place_outputs(request, lean) for lean in (False, True))
            if request.sparse_layers:
                # K and V on the host hold up the fill pass; their gradients there cost no time.
                is_fuller = lean.gpu_tokens - fast.gpu_tokens > _recompute_break_even(request) * request.capacity
            else:
                # Activations do not take what someone has set aside for pages.
                is_fuller = config.gpu_memory != "auto" and lean.gpu_bytes > fast.gpu_bytes
            is_checkpointed = problem is not None or (lean_problem is None and is_fuller)
    return _place_outputs(request, is_checkpointed)


def _recompute_break_even(request: PlacementRequest) -> float:
    """The share of K and V on the host for which the fill pass waits as long as another forward takes, which is what
    checkpointed layers cost. With 64 pages of 128 for each tile, chunks of 4096 and Qwen2.5-7B about a quarter."""
    config, facts = request.config, request.shape
    assert config.page_budget is not None
    drawn = request.batch_size * -(-config.chunk_size // TILE_SIZE) * config.page_budget
    kv_row = sum(request.rows[index][0] for index in request.sparse_layers)
    waited = min(drawn * config.page_size, request.capacity) * kv_row
    products = matrix_flops(facts.active_params - facts.head_params, request.chunk_tokens)
    return products / OPERATIONS_PER_BYTE / waited


def _place_outputs(request: PlacementRequest, is_checkpointed: bool) -> tuple[Placement, str | None]:
    """Attention outputs are kept if that is asked for; or else as many as fit."""
    asked, capacity = request.config.keep_attention, request.capacity
    if asked is False or not request.needs_grad or capacity <= 0:
        return _place(request, is_checkpointed, out_tokens=0)
    placement, problem = _place(request, is_checkpointed, out_tokens=capacity)
    if problem is None or asked is True:
        return placement, problem
    placement, problem = _place(request, is_checkpointed, out_tokens=0)
    # What others are to have is not known, and outputs are not to take it.
    if problem is None and request.free_gpu_bytes is not None and request.is_exclusive:
        for out_tokens in sorted(_spare_tokens(request, placement), reverse=True):
            if out_tokens > MIN_SAVED_SHARE * capacity:
                some, some_problem = _place(request, is_checkpointed, out_tokens=out_tokens)
                if some_problem is None:
                    return some, None
    return placement, problem


def _spare_tokens(request: PlacementRequest, placement: Placement) -> tuple[int, int]:
    """Tokens of whole chunks for whose attention outputs there is room beside what is placed: on the GPU, where all
    else must lie there too, and on the host."""
    out_row, chunk = sum(out for _, _, out in request.rows), request.config.chunk_size
    # More buffers on the GPU may send pages to the host, and a page may begin before the first chunk.
    buffers = _staging(request, keeps=True)
    if placement.host_bytes:
        buffers -= _staging(request, keeps=False)
    elif request.sparse_layers:
        buffers += _buffers(request, 0) + _buffers(request, 1)
    rooms = (
        0 if placement.host_bytes else int(_gpu_budget(request, placement.fixed_bytes, 0)) - placement.gpu_bytes,
        _optional_limit(request) - placement.host_bytes - buffers,
    )
    page = request.config.page_size * out_row
    on_gpu, on_host = (min(request.capacity - chunk, max(0, room - page) // out_row // chunk * chunk) for room in rooms)
    return on_gpu, on_host


def _optional_limit(request: PlacementRequest) -> int:
    """Host memory up to which attention outputs are kept without being asked for."""
    if request.config.host_memory == "auto":
        return int(OPTIONAL_SHARE * request.free_host_bytes)
    return host_budget(request.config, request.free_host_bytes)


def _place(request: PlacementRequest, is_checkpointed: bool, *, out_tokens: int) -> tuple[Placement, str | None]:
    config, capacity, page = request.config, request.capacity, request.config.page_size
    rows, keeps = request.rows, out_tokens > 0
    kv_row, grad_row, out_row = (sum(row[field] for row in rows) for field in range(3))
    num_pages = -(-capacity // page)
    kv_bytes, grad_bytes = page * kv_row, page * grad_row
    out_bytes = (num_pages - (capacity - out_tokens) // page) * page * out_row if keeps else 0
    tables = sum(_table_bytes(request, index) for index in request.sparse_layers)
    needs = chunk_memory(request, is_checkpointed, keeps=keeps and out_tokens == capacity)
    needed = sum(needs.values())
    whole = num_pages * (kv_bytes + grad_bytes) + out_bytes + tables
    # Pages in 8 bits go through buffers wherever they lie.
    always = sum(_buffers(request, field) for field in (0, 1) if request.sparse_layers and request.is_quantized(field))
    gpu_out_tokens, staging = 0, always
    if whole <= _gpu_budget(request, needed, always):
        gpu_pages = gpu_grad_pages = num_pages
        gpu_out_tokens = out_tokens
    elif not request.sparse_layers:
        staging = _staging(request, keeps)
        gpu_pages = gpu_grad_pages = min(
            num_pages, int(_gpu_budget(request, needed, staging) // (kv_bytes + grad_bytes))
        )
    else:
        # K and V first. All of them, and there is no need of buffers for theirs.
        staging = _staging(request, keeps) + _buffers(request, 1) + request.is_quantized(0) * _buffers(request, 0)
        gpu_pages = num_pages
        room = _gpu_budget(request, needed, staging) - tables
        if num_pages * kv_bytes > room:
            staging += (not request.is_quantized(0)) * _buffers(request, 0)
            room = _gpu_budget(request, needed, staging) - tables
            gpu_pages = min(num_pages, max(0, int(room // kv_bytes)))
        left = max(0.0, room - gpu_pages * kv_bytes)
        gpu_grad_pages = min(num_pages, int(left // grad_bytes)) if grad_bytes else num_pages
    host_pages, host_grad_pages = num_pages - gpu_pages, num_pages - gpu_grad_pages
    terms = [
        *(MemoryTerm(name=name, tier=GPU, num_bytes=num_bytes) for name, num_bytes in needs.items()),
        MemoryTerm(name="staging buffers", tier=GPU, num_bytes=staging),
        MemoryTerm(name="pages of K and V", tier=GPU, num_bytes=gpu_pages * kv_bytes, grows=True),
        MemoryTerm(name="pages of their gradients", tier=GPU, num_bytes=gpu_grad_pages * grad_bytes, grows=True),
        MemoryTerm(name="kept attention outputs", tier=GPU, num_bytes=out_bytes if gpu_out_tokens else 0, grows=True),
        MemoryTerm(name="page summaries and choices", tier=GPU, num_bytes=tables, grows=True),
        MemoryTerm(name="pages of K and V", tier=HOST, num_bytes=host_pages * kv_bytes, grows=True),
        MemoryTerm(name="pages of their gradients", tier=HOST, num_bytes=host_grad_pages * grad_bytes, grows=True),
        MemoryTerm(name="kept attention outputs", tier=HOST, num_bytes=0 if gpu_out_tokens else out_bytes, grows=True),
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
    # Tables are wanted on the GPU in any case.
    fixed = needed + staging + tables
    return placement, _problem(request, placement, fixed, out_bytes, is_optional=keeps)


def selection_spec(config: Config, dtype: torch.dtype, has_float8: bool) -> SelectionSpec:
    """What memory must know of the choice of pages. `has_float8`: the device computes with 8-bit numbers."""
    assert config.page_budget is not None
    return SelectionSpec(
        budget=config.page_budget,
        tile_size=TILE_SIZE,
        num_means=means_per_page(config.page_rule, config.page_size),
        # Means in 8 bits chose as well: SmolLM2, 8 pages of 64, gradient cosine 0.952 with these and with float32.
        means_dtype=torch.float8_e4m3fn if has_float8 and dtype.itemsize == 2 else dtype,
    )


def _selection_spec(request: PlacementRequest) -> SelectionSpec:
    sizes = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    return selection_spec(request.config, sizes[request.shape.itemsize], request.free_gpu_bytes is not None)


def _table_bytes(request: PlacementRequest, index: int) -> int:
    """What a layer that chooses pages has on the GPU beside them."""
    layer, config = request.shape.layers[index], request.config
    return table_bytes(
        _selection_spec(request),
        batch_size=request.batch_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        num_pages=-(-request.capacity // config.page_size),
        capacity=request.capacity,
        chunk_size=config.chunk_size,
        needs_grad=request.needs_grad,
    )


def _buffers(request: PlacementRequest, field: int) -> int:
    """Buffers for chosen pages of K and V (0) or of their gradients (1)."""
    config, num_pages = request.config, -(-request.capacity // request.config.page_size)
    if field == 1 and not request.needs_grad:
        return 0
    as_computed = replace(request, config=replace(config, kv_dtype="auto", grad_dtype="auto"))
    rows, working = request.rows, as_computed.rows
    # Pages in 8 bits are widened on their way in.
    widest = max((working if request.is_quantized(field) else rows)[index][field] for index in request.sparse_layers)
    num_chosen = max_selected(_selection_spec(request), request.batch_size, config.chunk_size, num_pages)
    return NUM_BUFFERS[("kv", "grad")[field]] * buffer_bytes(num_chosen, widest * config.page_size, num_pages)


def _staging(request: PlacementRequest, keeps: bool) -> int:
    """Buffers for runs of tokens."""
    return staging_bytes(
        request.rows,
        request.sparse_layers,
        chunk_size=request.config.chunk_size,
        keeps=keeps,
        needs_grad=request.needs_grad,
    )


def _problem(
    request: PlacementRequest, placement: Placement, needed: int, out_bytes: int, *, is_optional: bool
) -> str | None:
    """Why a placement does not fit, if it does not."""
    facts, on_cpu = request.shape, request.free_gpu_bytes is None
    start = f"{request.length:,} tokens do not fit{' on the CPU' if on_cpu else ''}:"
    if facts.num_positions is not None and request.length > facts.num_positions:
        return f"{start} the model has learned {facts.num_positions:,} positions and cannot be trained on more."
    if needed > request.available:
        terms = ", ".join(f"{term.name} {gib(term.num_bytes)}" for term in placement.terms if not term.grows)
        beside = "weights and optimizer states" if request.state_bytes else "weights"
        taken = facts.weight_bytes + request.state_bytes
        if request.available < 0:
            usable = gib(max(0, request.available + taken))
            return f"{start} the {beside} alone take {gib(taken)}, and {usable} are usable."
        return (
            f"{start} beside the {beside} ({gib(taken)}), {gib(needed)} of GPU memory are needed ({terms}), and "
            f"{gib(request.available)} are there."
        )
    limit = host_budget(request.config, request.free_host_bytes)
    if is_optional and request.config.keep_attention == "auto":
        if on_cpu and out_bytes > CPU_OPTIONAL_SHARE * request.free_host_bytes:
            return f"{start} keeping attention outputs would take {gib(out_bytes)}."
        limit = _optional_limit(request)
    total = placement.gpu_bytes + placement.host_bytes
    takes = f"{start} pages of K, V, their gradients and kept attention outputs take {gib(total)}"
    if on_cpu and total > SAFETY_SHARE * request.free_host_bytes:
        return f"{takes} of memory, and {gib(SAFETY_SHARE * request.free_host_bytes)} are there, 90% of what is free."
    if placement.host_bytes > limit:
        where = "outside of host_memory" if on_cpu else "on the GPU"
        return (
            f"{takes}; {gib(placement.gpu_bytes)} of it is {where}, the rest needs {gib(placement.host_bytes)} of host "
            f"memory, and {gib(limit)} are there."
        )
    return None


def _gpu_budget(request: PlacementRequest, needed: int, staging: int) -> float:
    """GPU memory for what grows with the context, beside `needed` and `staging`."""
    left = request.available - needed
    if request.config.gpu_memory == "auto":
        return max(0.0, SAFETY_SHARE * (left - request.optimizer_bytes) - staging)
    # The most that someone allows: it is not filled where activations would not fit beside it, nor the states of
    # adapters, which are small. Those of all weights are for whoever sets a limit to think of: they may be elsewhere.
    if request.shape.has_adapters:
        left -= request.optimizer_bytes
    return max(0.0, min(parse_bytes(request.config.gpu_memory), left - staging))
