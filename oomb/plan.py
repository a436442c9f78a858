"""What a sequence will take, and where it goes, before anything is allocated: pure arithmetic on a model's shape.

`decide` places what grows with the context (pages of K, V and their gradients, kept attention outputs) in the two tiers
and settles what is left to "auto": for the engine by what is really free, for `oomb.forecast` on any machine.

Constants name their measurements: peaks of torch.cuda.max_memory_allocated on one H200, PyTorch 2.11, bfloat16, batch
1, three chunks. tests/test_plan.py holds the sums to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from oomb.config import Config, parse_bytes
from oomb.memory import GPU, HOST, OutOfPages, row_bytes, staging_bytes
from oomb.metrics import GIB, gib

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

PLAIN_TILE, FUSED_TILE = 2**26, 5 * 2**26
"""Logits per tile of the head, as `oomb.loss` has them; a test holds the two to be equal."""

FUSED_GRAPH, PLAIN_GRAPH, ADAPTER_GRAPH = 0.887, 1.3, 0.626
"""What a layer keeps for its backward, in bytes over itemsize x `layer_width`. Fused: Qwen2.5-7B 34.10 GiB at chunks of
8192 and 17.05 at 4096 (0.887), Qwen2.5-0.5B 3.731 at 4096 (0.889). With LoRA's float32 adapters, whose matrices count
into the width: Qwen2.5-7B 24.15 GiB at 4096."""
BACKWARD, ADAPTER_BACKWARD = 0.35, 0.7235
"""What the backward of one layer takes beside that. With LoRA 255 KiB a token (checkpointed Qwen2.5-7B, 6.78 GiB at
8192, 3.39 at 4096). Without, it is hidden below the head's peak; 0.35 is the most that the measured peaks allow."""
FILL, ADAPTER_FILL = 0.58, 0.90
"""What the forward of one layer takes without a graph: Qwen2.5-7B 0.80 GiB at 8192, with LoRA 2.48 (1.24 at 4096)."""
HIDDEN_COPIES, HIDDEN_COPIES_OF_GRAPH = 4.5, 1
"""Tensors like the hidden states that live while the head runs: of checkpointed layers 4.35 and 4.47 (Qwen2.5-7B, 4.92
GiB at 8192, 3.26 at 4096), 4.70 (Llama-3.1-8B, 3.63 at 4096); otherwise the graph above has all but the gradient."""

MARGIN = 0.9
"""Share of what is left that "auto" gives to pages, and at which a chunk's activations count as fitting."""
OPTIONAL_SHARE = 0.75
"""Share of the free host memory up to which attention outputs are kept there without being asked for."""
CPU_OPTIONAL_SHARE = 0.25
"""The same for a model on a CPU, where weights, activations and pages compete for one memory."""
SMALLEST_CHUNK = 512
"""The shortest chunk that is advised."""
LONGEST = 1 << 36
"""Contexts are not searched beyond this."""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Attention of one layer, as its tensors are."""

    num_kv_heads: int
    head_size: int
    value_size: int
    num_query_heads: int
    window: int | None = None
    itemsize: int | None = None
    """Bytes per number in which attention computes, as autocast has it; None: the model's."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """All that memory and time depend on."""

    layers: tuple[LayerFacts, ...]
    hidden_size: int
    vocab_size: int
    itemsize: int
    """Bytes per number that the model computes in."""
    weight_bytes: int
    """Parameters and buffers."""
    grad_bytes: int
    """`.grad` of all trainable parameters, in their own dtype."""
    float32_sum_bytes: int
    """float32 sums of those that have less than 4 bytes."""
    wide_grad_bytes: int
    """`.grad` of the others, which need no sum."""
    head_grad_bytes: int
    """Gradient of the head's weight, made in one piece for each tile; 0 where it is frozen."""
    layer_width: int
    """Inputs and outputs of the matrices of a layer; of experts, those that a token uses."""
    has_adapters: bool
    """The base is frozen, small matrices beside it are trained."""
    active_matrix_elements: int
    """Elements of the matrices that a token is multiplied with."""
    trained_matrix_elements: int
    trainable_elements: int
    num_positions: int | None = None
    """How many positions the model has learned; None if it computes them."""

    def missing_grad_bytes(self, float32_sums: bool) -> int:
        """What a gradient pass takes for parameter gradients when none exists yet."""
        return self.float32_sum_bytes + self.wide_grad_bytes if float32_sums else self.grad_bytes


@dataclass(frozen=True, kw_only=True)
class Term:
    """One use of memory."""

    name: str
    tier: str
    num_bytes: int
    grows: bool = False
    """With the context."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is kept, and where. The oldest tokens lie on the GPU: every later chunk reads them."""

    checkpoint_layers: bool
    keep_last_chunk: bool
    keep_attention: bool
    capacity: int
    """Tokens that later chunks read: all but those of the last chunk."""
    gpu_tokens: int
    """Tokens whose K, V and gradients lie on the GPU; the rest of `capacity` lies on the host."""
    gpu_out_tokens: int
    """The same for kept attention outputs: none of them or all."""
    terms: tuple[Term, ...]

    @property
    def host_tokens(self) -> int:
        return self.capacity - self.gpu_tokens

    @property
    def host_out_tokens(self) -> int:
        return self.capacity - self.gpu_out_tokens if self.keep_attention else 0

    @property
    def gpu_bytes(self) -> int:
        """What grows with the context, on the GPU."""
        return _total(self.terms, GPU, grows=True)

    @property
    def host_bytes(self) -> int:
        return _total(self.terms, HOST, grows=True)

    @property
    def needed_bytes(self) -> int:
        """What a step takes on the GPU beside that: gradients, activations, staging buffers."""
        return _total(self.terms, GPU, grows=False)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence and the memory there is for it: the arguments of `decide`."""

    facts: ModelFacts
    config: Config
    batch_size: int
    length: int
    trains: bool
    float32_sums: bool
    fused: bool
    gpu_room: int | None
    host_room: int
    missing_grad_bytes: int
    optimizer_bytes: int
    state_bytes: int = 0
    """Optimizer states that exist and are not yet taken off `gpu_room`."""

    @property
    def room(self) -> float:
        """Bytes that this step may take on the model's device; of a CPU only what grows with the context is bounded."""
        return float("inf") if self.gpu_room is None else float(self.gpu_room - self.state_bytes)

    @property
    def capacity(self) -> int:
        return (self.length - 1) // self.config.chunk_size * self.config.chunk_size

    @property
    def chunk_tokens(self) -> int:
        """Tokens computed at once, over the whole batch."""
        return self.batch_size * min(self.config.chunk_size, self.length)

    @property
    def is_fused(self) -> bool:
        """Compiled code serves full chunks."""
        return self.fused and self.length >= self.config.chunk_size

    def rows(self) -> list[tuple[int, int, int]]:
        """Bytes per token of K/V, their gradients and kept outputs, for each layer."""
        found = []
        for layer in self.facts.layers:
            size = layer.itemsize or self.facts.itemsize
            kv, grad = (ITEMSIZES.get(name, size) for name in (self.config.kv_dtype, self.config.grad_dtype))
            heads, queries = self.batch_size * layer.num_kv_heads, self.batch_size * layer.num_query_heads
            found.append(
                (
                    row_bytes(heads * layer.head_size * kv, heads * layer.value_size * kv),
                    row_bytes(heads * layer.head_size * grad, heads * layer.value_size * grad) if self.trains else 0,
                    row_bytes(queries * layer.value_size * size, queries * max(4, size)),
                )
            )
        return found


def host_budget(config: Config, room: int) -> int:
    """What may be taken of `room` bytes of host memory."""
    return int(MARGIN * room) if config.host_memory == "auto" else min(room, parse_bytes(config.host_memory))


def decide(
    facts: ModelFacts,
    config: Config,
    *,
    batch_size: int,
    length: int,
    trains: bool,
    float32_sums: bool,
    fused: bool,
    gpu_room: int | None,
    host_room: int,
    missing_grad_bytes: int,
    optimizer_bytes: int,
) -> Placement:
    """Where everything goes, or `OutOfPages` with what is missing and what would help.

    `gpu_room` is what this process may still take of the model's device; None where nobody counts, on a CPU.
    `missing_grad_bytes` are parameter gradients or sums that the gradient pass has to allocate, `optimizer_bytes` the
    states that come after it.
    """
    request = Request(**locals())
    placement, problem = place(request)
    if problem is not None:
        raise OutOfPages(f"{problem} {advice(request)}")
    return placement


def place(request: Request) -> tuple[Placement, str | None]:
    """The best placement, and why it does not fit, if it does not."""
    config = request.config
    is_checkpointed = config.checkpoint_layers is True
    if config.checkpoint_layers == "auto" and request.trains:
        whole = sum(term.num_bytes for term in _needs(request, is_checkpointed=False, keeps=False))
        # What is decided for the first step holds for those after it, when optimizer states are there.
        is_checkpointed = whole > MARGIN * (request.room - request.optimizer_bytes)
        if not is_checkpointed:
            (fast, problem), (lean, lean_problem) = (_place_outputs(request, lean) for lean in (False, True))
            # Activations do not take what someone has set aside for pages.
            is_fuller = lean_problem is None and lean.gpu_bytes > fast.gpu_bytes
            is_checkpointed = problem is not None or (config.gpu_memory != "auto" and is_fuller)
    return _place_outputs(request, is_checkpointed)


def _place_outputs(request: Request, is_checkpointed: bool) -> tuple[Placement, str | None]:
    """Attention outputs are kept if that is asked for, or if they fit."""
    if request.config.keep_attention is not False and request.trains and request.capacity > 0:
        placement, problem = _place(request, is_checkpointed, keeps=True)
        if problem is None or request.config.keep_attention is True:
            return placement, problem
    return _place(request, is_checkpointed, keeps=False)


def _place(request: Request, is_checkpointed: bool, *, keeps: bool) -> tuple[Placement, str | None]:
    config, capacity, page = request.config, request.capacity, request.config.page_size
    rows = request.rows()
    kv_row, grad_row, out_row = (sum(row[field] for row in rows) for field in range(3))
    num_pages = -(-capacity // page)
    page_bytes, out_bytes = page * (kv_row + grad_row), num_pages * page * out_row if keeps else 0
    needs = _needs(request, is_checkpointed, keeps)
    needed = sum(term.num_bytes for term in needs)
    widest = dict(zip(("kv_row", "grad_row", "out_row"), map(max, zip(*rows))))
    staging = staging_bytes(**widest, chunk_size=config.chunk_size, keeps=keeps, trains=request.trains)
    fits_gpu = num_pages * page_bytes + out_bytes <= _gpu_budget(request, needed, 0)
    if fits_gpu:
        gpu_pages, gpu_out_tokens, staging = num_pages, capacity if keeps else 0, 0
    else:
        gpu_pages, gpu_out_tokens = min(num_pages, int(_gpu_budget(request, needed, staging) // page_bytes)), 0
    host_pages = num_pages - gpu_pages
    terms = [
        *needs,
        Term(name="staging buffers", tier=GPU, num_bytes=staging),
        Term(name="pages of K and V", tier=GPU, num_bytes=gpu_pages * page * kv_row, grows=True),
        Term(name="pages of their gradients", tier=GPU, num_bytes=gpu_pages * page * grad_row, grows=True),
        Term(name="kept attention outputs", tier=GPU, num_bytes=out_bytes if fits_gpu else 0, grows=True),
        Term(name="pages of K and V", tier=HOST, num_bytes=host_pages * page * kv_row, grows=True),
        Term(name="pages of their gradients", tier=HOST, num_bytes=host_pages * page * grad_row, grows=True),
        Term(name="kept attention outputs", tier=HOST, num_bytes=0 if fits_gpu else out_bytes, grows=True),
    ]
    keep_last = not is_checkpointed if config.keep_last_chunk == "auto" else config.keep_last_chunk
    placement = Placement(
        checkpoint_layers=is_checkpointed,
        keep_last_chunk=bool(keep_last) and request.trains,
        keep_attention=keeps,
        capacity=capacity,
        gpu_tokens=min(capacity, gpu_pages * page),
        gpu_out_tokens=gpu_out_tokens,
        terms=tuple(term for term in terms if term.num_bytes),
    )
    return placement, _problem(request, placement, needed + staging, out_bytes, is_optional=keeps)


def _problem(request: Request, placement: Placement, needed: int, out_bytes: int, *, is_optional: bool) -> str | None:
    """Why a placement does not fit, if it does not."""
    facts, on_cpu = request.facts, request.gpu_room is None
    start = f"{request.length:,} tokens do not fit{' on the CPU' if on_cpu else ''}:"
    if facts.num_positions is not None and request.length > facts.num_positions:
        return f"{start} the model has learned {facts.num_positions:,} positions and cannot be trained on more."
    if needed > request.room:
        terms = ", ".join(f"{term.name} {gib(term.num_bytes)}" for term in placement.terms if not term.grows)
        beside = "weights and optimizer states" if request.state_bytes else "weights"
        taken = facts.weight_bytes + request.state_bytes
        if request.room < 0:
            return f"{start} the {beside} alone take {gib(taken)}, and {gib(max(0, request.room + taken))} are usable."
        return (
            f"{start} beside the {beside} ({gib(taken)}), {gib(needed)} of GPU memory are needed ({terms}), and "
            f"{gib(request.room)} are there."
        )
    limit = host_budget(request.config, request.host_room)
    if is_optional and request.config.keep_attention == "auto":
        if on_cpu and out_bytes > CPU_OPTIONAL_SHARE * request.host_room:
            return f"{start} keeping attention outputs would take {gib(out_bytes)}."
        if request.config.host_memory == "auto":
            limit = int(OPTIONAL_SHARE * request.host_room)
    total = placement.gpu_bytes + placement.host_bytes
    takes = f"{start} pages of K, V, their gradients and kept attention outputs take {gib(total)}"
    if on_cpu and total > MARGIN * request.host_room:
        return f"{takes} of memory, and {gib(MARGIN * request.host_room)} are there, 90% of what is free."
    if placement.host_bytes > limit:
        where = "outside of host_memory" if on_cpu else "on the GPU"
        return (
            f"{takes}; {gib(placement.gpu_bytes)} of it is {where}, the rest needs {gib(placement.host_bytes)} of host "
            f"memory, and {gib(limit)} are there."
        )
    return None


def _gpu_budget(request: Request, needed: int, staging: int) -> float:
    """GPU memory for what grows with the context, beside `needed` and `staging`."""
    room = request.room
    if request.config.gpu_memory != "auto":
        # The most that someone allows: it is not filled where activations would not fit beside it.
        return max(0.0, min(parse_bytes(request.config.gpu_memory), room - needed - staging))
    return max(0.0, MARGIN * (room - needed - request.optimizer_bytes) - staging)


def _needs(request: Request, is_checkpointed: bool, keeps: bool) -> list[Term]:
    """GPU memory of a step beside weights and what grows, at its peak in the gradient pass: while the head or the last
    layer is walked back, and all that a chunk has saved is still there."""
    facts, tokens = request.facts, request.chunk_tokens
    hidden = tokens * facts.hidden_size * facts.itemsize
    one_layer = tokens * facts.layer_width * facts.itemsize
    if not request.trains:
        layer = one_layer * (ADAPTER_FILL if facts.has_adapters else FILL)
        return [Term(name="one chunk's forward", tier=GPU, num_bytes=int(2 * hidden + max(layer, _head(request))))]
    graph, backward = (PLAIN_GRAPH, FUSED_GRAPH)[request.is_fused], BACKWARD
    if facts.has_adapters:
        graph, backward = ADAPTER_GRAPH * graph / FUSED_GRAPH, ADAPTER_BACKWARD
    copies: float
    if is_checkpointed:
        saved = len(facts.layers) * hidden
        if not keeps:
            # Attention is not computed again, so its outputs wait for the backward; kept ones come from their pages.
            outs = [x.num_query_heads * (x.value_size * (x.itemsize or facts.itemsize) + 4) for x in facts.layers]
            saved += tokens * sum(outs)
        copies, backward = HIDDEN_COPIES, backward + graph
    else:
        saved, copies = int(len(facts.layers) * one_layer * graph), HIDDEN_COPIES_OF_GRAPH
    # LoRA's peak lies in a layer's backward, when most copies of the hidden states are gone (6.78 GiB leaves no room).
    peak = max(_head(request) + copies * hidden, one_layer * backward)
    return [
        Term(name="parameter gradients", tier=GPU, num_bytes=request.missing_grad_bytes),
        Term(name="activations of a chunk", tier=GPU, num_bytes=saved),
        Term(name="head or one layer's backward", tier=GPU, num_bytes=int(peak)),
    ]


def _head(request: Request) -> int:
    """What a tile of logits takes at its peak."""
    facts = request.facts
    most_rows = max(1, (FUSED_TILE if request.is_fused else PLAIN_TILE) // facts.vocab_size)
    num_tiles = -(-request.chunk_tokens // most_rows)
    logits = -(-request.chunk_tokens // num_tiles) * facts.vocab_size
    size, wide = facts.itemsize, max(4, facts.itemsize)
    widened = wide if size < wide else 0
    if not request.trains:
        # Plain PyTorch widens the logits and holds their exponentials beside them.
        return logits * (size if request.is_fused else size + widened + wide)
    # Logits and their gradient; then the gradient and what it gives the head's weight. Unfused, three wide tensors and
    # a mask live beside the logits. Qwen2.5-7B 1.60 GiB, with LoRA 1.16, unfused 1.13; Qwen2.5-0.5B 1.16.
    arithmetic = 2 * size if request.is_fused else size + widened + 3 * wide + 1
    return max(logits * arithmetic, logits * size + facts.head_grad_bytes)


def longest_context(request: Request) -> int | None:
    """The longest context that fits, in whole chunks if it is one or more; 0 if none does, None without a limit."""
    chunk = request.config.chunk_size

    def fits(length: int) -> bool:
        return place(replace(request, length=length))[1] is None

    step, good, bad = (chunk, 1, 2) if fits(chunk) else (1, 0, chunk)
    while good and fits(bad * step):
        good, bad = bad, 2 * bad
        if bad * step > LONGEST:
            return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    # What a table of positions or a tile of the head allows need not be a whole number of chunks.
    others = (request.length, request.facts.num_positions or 0)
    return max(good * step, *(length for length in others if length > good * step and fits(length)), 0)


Change = Callable[[Request], Request]


def advice(request: Request) -> str:
    """What would make a request fit that does not: a setting, several, more memory, or a shorter context."""

    def fits(settings: dict[str, tuple[str, Change]]) -> bool:
        return place(reduce(lambda changed, item: item[1](changed), settings.values(), request))[1] is None

    longest = longest_context(request)
    text = f"With these settings the longest context that fits is {longest:,} tokens. " if longest else ""
    options, memory = [(item[0], item[1:]) for item in _remedies(request)], _enough_memory(request)
    also = f", or with {memory}" if memory else ""
    for setting, pair in options:
        if fits({setting: pair}):
            return f"{text}It fits with {pair[0]}{'' if setting == 'host_memory' else also}."
    # All together, of the chunk sizes the smallest; then without those that are not needed, the dearest first.
    chosen = dict(options)
    if fits(chosen):
        for left_out in reversed(list(chosen)):
            fewer = {setting: chosen[setting] for setting in chosen if setting != left_out}
            chosen = fewer if fits(fewer) else chosen
        larger = ({**chosen, setting: pair} for setting, pair in options if setting == "chunk_size" in chosen)
        chosen = next((settings for settings in larger if fits(settings)), chosen)
        *names, last = (name for name, _ in chosen.values())
        return f"{text}It fits with {', '.join(names)} and {last} together{also}."
    text += f"No setting makes {request.length:,} tokens fit here." + (f" It fits with {memory}." if memory else "")
    reached = [(longest_context(change(request)) or 0, name) for _, (name, change) in options]
    most, name = max(reached, key=lambda pair: pair[0], default=(0, ""))
    if most > (longest or 0):
        return f"{text} With {name} the longest is {most:,}."
    return text if longest or memory else f"{text} Take a smaller model, a lower precision or a larger GPU."


def _enough_memory(request: Request) -> str | None:
    """The host memory with which the request would fit, if there is such."""
    asked = request.config
    keeps, is_lean = asked.keep_attention is True, asked.checkpoint_layers is not False
    config = replace(asked, host_memory="auto", keep_attention=keeps, checkpoint_layers=is_lean)
    placement, problem = place(replace(request, config=config, host_room=1 << 62))
    on_cpu = request.gpu_room is None
    enough = (placement.host_bytes + on_cpu * placement.gpu_bytes) / MARGIN
    if problem is not None or enough <= request.host_room:
        return None
    setting = "" if asked.host_memory == "auto" else 'host_memory="auto" and '
    return f"{setting}{gib(enough + GIB / 200)} of free {'' if on_cpu else 'host '}memory"


def _remedies(request: Request) -> Iterator[tuple[str, str, Change]]:
    """(setting, how to write it, what it does) of all that save memory and are not in force, what costs least first."""
    config, facts = request.config, request.facts

    def setting(**changes: Any) -> Change:
        return lambda request: replace(request, config=replace(request.config, **changes))

    if config.host_memory != "auto" and parse_bytes(config.host_memory) < MARGIN * request.host_room:
        yield "host_memory", f'host_memory="auto" ({gib(request.host_room)} are free)', setting(host_memory="auto")
    if config.gpu_memory != "auto" and request.gpu_room is not None:
        yield "gpu_memory", 'gpu_memory="auto"', setting(gpu_memory="auto")
    if config.keep_attention is True:
        yield "keep_attention", "keep_attention=False", setting(keep_attention=False)
    if request.trains and config.checkpoint_layers is False:
        yield "checkpoint_layers", "checkpoint_layers=True", setting(checkpoint_layers=True)
    size = config.chunk_size // 2
    while size >= SMALLEST_CHUNK:
        yield "chunk_size", f"chunk_size={size}", setting(chunk_size=size)
        size //= 2
    if request.trains and request.float32_sums and facts.float32_sum_bytes:
        yield "param_grad_dtype", 'param_grad_dtype="param"', _without_sums
    if request.trains and not facts.has_adapters and facts.grad_bytes:
        yield "lora", "LoRA (a PEFT model; --lora for plan and bench)", _with_lora
    widest = max((layer.itemsize or facts.itemsize for layer in facts.layers), default=0)
    for name in ("grad_dtype", "kv_dtype"):
        if ITEMSIZES.get(getattr(config, name), widest) > 2:
            yield name, f'{name}="bfloat16"', setting(**{name: "bfloat16"})


def _without_sums(request: Request) -> Request:
    saved = request.facts.missing_grad_bytes(True) - request.facts.missing_grad_bytes(False)
    config, missing = replace(request.config, param_grad_dtype="param"), max(0, request.missing_grad_bytes - saved)
    return replace(request, config=config, float32_sums=False, missing_grad_bytes=missing)


def _with_lora(request: Request) -> Request:
    """Adapters on all matrices: about twice the width, and next to no gradients."""
    facts = replace(request.facts, has_adapters=True, layer_width=2 * request.facts.layer_width, head_grad_bytes=0)
    return replace(request, facts=facts, missing_grad_bytes=0, optimizer_bytes=0, state_bytes=0)


def _total(terms: tuple[Term, ...], tier: str, *, grows: bool) -> int:
    return sum(term.num_bytes for term in terms if term.tier == tier and term.grows is grows)
