"""The whole picture of a step on a machine that need not be here: every term of memory, the time, the longest context.

Times are for a machine with one GPU. The rates are those of whole steps on one H200 (Qwen2.5-7B, chunks of 8192, cuDNN
attention), so they contain the norms, the activations and the launches in between; for other GPUs they are scaled by
the vendors' figures for bfloat16, which is a guess and is called one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp

import torch

from oomb.config import OFFLOADED_STATES, TILE_SIZE, Config, means_per_page
from oomb.memory.host import GAPS
from oomb.memory.pool import GPU, HOST
from oomb.ops.moments import field_sizes
from oomb.planner.fit import longest_context
from oomb.planner.placement import ModelFacts, Placement, Request, Term, host_budget, place
from oomb.utils.units import GIB, duration, gib

PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 5090": 209,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bfloat16 rates by the vendors' datasheets. The words of a name are looked up in the device's name."""
CARDS = {
    "B200": 178.0,
    "H200": 139.8,
    "H100": 79.1,
    "A100-80GB": 79.2,
    "A100-40GB": 39.4,
    "L40S": 44.4,
    "RTX 5090": 31.3,
    "RTX 4090": 23.5,
    "RTX 3090": 23.6,
}
"""GiB of well-known cards as PyTorch sees them, which is less than the name says."""
OTHER_WORDS = {"nvidia", "geforce", "tesla", "gpu", "sxm", "sxm4", "sxm5", "pcie", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Those that a driver puts around a card's name. Any other (Laptop, NVL) makes it another card."""

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
MEASURED_ON = "H200"
SHORTEST_CHUNK = 4096
"""Rates were measured with chunks of so many tokens or more. Shorter ones leave matrix units idle."""
LINK_BYTES_PER_SECOND = 45e9
"""Host memory to GPU and back at the same time, each way, over PCIe 5 (H200: 47 alone, less beside computation)."""
PCIE_4 = ("A100", "L40S", "RTX 4090", "RTX 3090")
"""Cards whose link has half that rate."""

CONTEXT_BYTES = GIB // 2
"""The CUDA context with its kernels, which PyTorch does not see."""
STATES = "optimizer states"
WORKSPACE_BYTES = 80 << 20
"""cuBLAS and the like: 0.06 GiB beside the weights of Llama-3.1-8B and Qwen2.5-0.5B, 0.04 to 0.10 of Qwen2.5-7B."""
MOST_CHUNKS = 1 << 13
"""Chunks that are looked at one by one."""
SUMS_SHARE = 0.25
"""float32 sums are chosen where they take at most this share of the GPU, as `oomb.grads` has it."""

STATE_BYTES: dict[str, Callable[[ModelFacts], int]] = {
    "none": lambda facts: 0,
    "sgd": lambda facts: 0,
    "momentum": lambda facts: facts.grad_bytes,
    "adamw": lambda facts: 2 * facts.grad_bytes,
    "adamw_8bit": lambda facts: 2 * facts.trainable_elements,
}
"""What an optimizer keeps on the GPU from step to step."""
# What those with states on the host take of the GPU in their step is less than the activations that are gone by then.
OPTIMIZERS = (*STATE_BYTES, *OFFLOADED_STATES)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to train on."""

    gpu_bytes: int
    host_bytes: int
    gpu_name: str | None = None
    """None, or a name that `PEAK_TFLOPS` does not have: no time is predicted."""

    @property
    def scale(self) -> float | None:
        """Rates relative to the measured ones."""
        rate = _look_up(self.gpu_name, PEAK_TFLOPS)
        return None if rate is None else PEAK_TFLOPS[rate] / PEAK_TFLOPS[MEASURED_ON]

    @property
    def is_measured(self) -> bool:
        return _look_up(self.gpu_name, PEAK_TFLOPS) == MEASURED_ON

    @property
    def link_bytes_per_second(self) -> float:
        return LINK_BYTES_PER_SECOND / (2 if _look_up(self.gpu_name, PCIE_4) else 1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a step will take."""

    machine: Machine
    config: Config
    batch_size: int
    length: int
    optimizer: str
    float32_sums: bool
    placement: Placement
    terms: tuple[Term, ...]
    seconds: float | None
    """None where it is not predicted: on a GPU that is not known, and of a model in float32."""
    longest_context: int | None
    """0: not even one chunk fits. None: no limit was found."""
    problem: str | None
    """Why it does not fit. The terms are then those it would need."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def peak_gpu_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated will be."""
        return sum(term.num_bytes for term in self.terms if term.tier == GPU)

    @property
    def host_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms if term.tier == HOST)

    @property
    def gpu_limit(self) -> int:
        """What PyTorch can hand out on this machine."""
        return usable_bytes(self.machine)

    @property
    def host_limit(self) -> int:
        """What may be taken of the host's memory, optimizer states included."""
        states = sum(term.num_bytes for term in self.terms if (term.name, term.tier) == (STATES, HOST))
        return states + host_budget(self.config, max(0, self.machine.host_bytes - states))

    @property
    def pace(self) -> str:
        """Time of a step for a person, where one is predicted."""
        assert self.seconds is not None
        # The rates are those of longer chunks.
        is_short = self.config.chunk_size < SHORTEST_CHUNK and self.length > self.config.chunk_size
        words = "more than" if is_short else "about"
        text = f"{words} {duration(self.seconds)}, {self.length * self.batch_size / self.seconds:,.0f} tokens/s"
        return text if self.machine.is_measured else f"{text}; scaled from an H200 by datasheet rates, not measured"

    @property
    def page_limit(self) -> int:
        """GPU memory that is left for what grows with the context."""
        return max(0, self.gpu_limit - self.peak_gpu_bytes + self.placement.gpu_bytes)


def forecast(
    facts: ModelFacts,
    config: Config,
    machine: Machine,
    *,
    batch_size: int = 1,
    length: int,
    optimizer: str = "adamw",
    trains: bool = True,
) -> Plan:
    """A step in the middle of training: the optimizer's states are there, the gradients of the last step are not."""
    request = request_for(
        facts, config, machine, batch_size=batch_size, length=length, optimizer=optimizer, trains=trains
    )
    placement, problem = place(request)
    if problem is not None and request.host_room < 0:
        states, free = gib(machine.host_bytes - request.host_room), gib(machine.host_bytes)
        problem = f"{length:,} tokens do not fit: the {STATES} take {states} of host memory, and {free} are free."
    return Plan(
        machine=machine,
        config=config,
        batch_size=batch_size,
        length=length,
        optimizer=optimizer,
        float32_sums=request.float32_sums,
        placement=placement,
        terms=step_terms(request, placement, optimizer),
        seconds=predict_seconds(request, placement, machine) if facts.itemsize <= 2 else None,
        longest_context=longest_context(request),
        problem=problem,
    )


def request_for(
    facts: ModelFacts, config: Config, machine: Machine, *, batch_size: int, length: int, optimizer: str, trains: bool
) -> Request:
    """What the planner is asked for such a step."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; its states are known for {', '.join(OPTIMIZERS)}")
    if length < 2 or batch_size < 1:
        raise ValueError(f"a step has 2 tokens or more in 1 sequence or more, not {length} in {batch_size}")
    float32_sums = config.param_grad_dtype == "float32"
    if config.param_grad_dtype == "auto":
        float32_sums = facts.missing_grad_bytes(True) <= SUMS_SHARE * machine.gpu_bytes
    on_gpu, on_host = state_bytes(optimizer, facts) if trains else (0, 0)
    return Request(
        facts=facts,
        config=config,
        batch_size=batch_size,
        length=length,
        trains=trains,
        float32_sums=float32_sums,
        fused=config.fuse != "off",
        gpu_room=usable_bytes(machine) - facts.weight_bytes - WORKSPACE_BYTES,
        # Less than nothing, where the states alone do not fit: then nothing does.
        host_room=machine.host_bytes - on_host,
        missing_grad_bytes=facts.missing_grad_bytes(float32_sums),
        # What a training run must fit is its second step.
        state_bytes=on_gpu,
        optimizer_bytes=0,
    )


def state_bytes(optimizer: str, facts: ModelFacts) -> tuple[int, int]:
    """What an optimizer keeps from step to step, on the GPU and on the host."""
    if optimizer in OFFLOADED_STATES:
        all_parameters = torch.empty(facts.trainable_elements, device="meta")
        fields = field_sizes(all_parameters, OFFLOADED_STATES[optimizer])
        return 0, sum(dtype.itemsize * count for dtype, count in fields.values())
    return STATE_BYTES[optimizer](facts), 0


def step_terms(request: Request, placement: Placement, optimizer: str = "none") -> tuple[Term, ...]:
    """Every use of memory of a step."""
    on_host = state_bytes(optimizer, request.facts)[1] if request.trains else 0
    fixed = [
        Term(name="weights", tier=GPU, num_bytes=request.facts.weight_bytes),
        Term(name="kernel workspaces", tier=GPU, num_bytes=WORKSPACE_BYTES),
        Term(name=STATES, tier=GPU, num_bytes=request.state_bytes),
        Term(name=STATES, tier=HOST, num_bytes=on_host),
    ]
    return tuple(term for term in (*fixed, *placement.terms) if term.num_bytes)


def usable_bytes(machine: Machine) -> int:
    return max(0, int((machine.gpu_bytes - CONTEXT_BYTES) * (1 - GAPS)))


def predict_seconds(request: Request, placement: Placement, machine: Machine) -> float | None:
    """Time of a step's forward and backward. In each pass, copies run beside the computation; except that in the fill
    pass it waits for pages that have just been chosen."""
    if machine.scale is None:
        return None
    work, link = _work(request, placement), machine.link_bytes_per_second
    loads, stores, chosen = _traffic(request, placement)
    return chosen / link + sum(
        max(compute / machine.scale, load / link, store / link) for compute, load, store in zip(work, loads, stores)
    )


def _work(request: Request, placement: Placement) -> tuple[float, float]:
    """Seconds of arithmetic of the fill pass and of the gradient pass, at the measured rates."""
    facts, length = request.facts, request.length
    tokens = request.batch_size * length
    # What the gradient pass computes forward again: all but a last chunk whose graph was kept.
    again = placement.capacity if placement.keep_last_chunk else length
    share_again = again / length
    head = facts.vocab_size * facts.hidden_size
    layers: float = facts.active_matrix_elements - head
    if facts.has_adapters:
        layers *= WIDE_ADAPTER_PRODUCTS if facts.has_wide_adapters else ADAPTER_PRODUCTS
    fill = 2 * tokens * (layers + head) / MATRIX_TFLOPS + _forward(request, length) + _ranking(request)
    widening = _widening(request, placement)
    if not request.trains:
        return fill / 1e12 + widening[0], 0.0
    # The head is always computed again. A frozen matrix costs no gradient of its own.
    products = layers * (1 + share_again + placement.checkpoint_layers) + 2 * head + facts.trained_matrix_elements
    # The last tokens' is kept, and the very last chunk's if its graph is.
    kept_from = placement.capacity - placement.out_tokens
    attention_again = _forward(request, again) - _forward(request, placement.capacity) + _forward(request, kept_from)
    backward = 2 * tokens * products / MATRIX_TFLOPS + attention_again + _backward(request, length)
    return fill / 1e12 + widening[0], backward / 1e12 + widening[1]


def _widening(request: Request, placement: Placement) -> tuple[float, float]:
    """Seconds, in the fill pass and in the gradient pass, of chosen pages in 8 bits on their way to attention and back:
    wherever they rest, they become wide in a buffer. In the fill pass those on the host do so while they come."""
    if not request.sparse_layers:
        return 0.0, 0.0
    kv, grad = (
        sum(request.rows[index][field] for index in request.sparse_layers) * request.is_quantised(field)
        for field in (0, 1)
    )
    seen = _tokens_chosen(request, 0)
    near = seen - _tokens_chosen(request, placement.gpu_tokens)
    again = seen * (placement.capacity - placement.out_tokens) / max(1, placement.capacity)
    moved = kv * near, kv * (seen + again) + 2 * grad * seen
    return moved[0] / WIDENED_BYTES_PER_SECOND, moved[1] / WIDENED_BYTES_PER_SECOND


def _forward(request: Request, length: int) -> float:
    """Seconds x 1e12 of attention's forward over the first `length` tokens."""
    return _attention(request, length, FORWARD_TFLOPS, CHOSEN_FORWARD_TFLOPS)


def _backward(request: Request, length: int) -> float:
    return 2.5 * _attention(request, length, BACKWARD_TFLOPS, CHOSEN_BACKWARD_TFLOPS)


def _attention(request: Request, length: int, dense_rate: float, chosen_rate: float) -> float:
    config, total = request.config, 0.0
    for index, layer in enumerate(request.facts.layers):
        work = 2 * request.batch_size * layer.num_query_heads * (layer.head_size + layer.value_size)
        if index in request.sparse_layers:
            assert config.page_budget is not None
            own = length * min(length, config.chunk_size) / 2
            # As a window of so many tokens, over the chunks before.
            chosen = _pairs(max(0, length - config.chunk_size), config.page_budget * config.page_size)
            total += work * (own / dense_rate + chosen / chosen_rate)
        else:
            total += work * _pairs(length, layer.window) / dense_rate
    return total


def _ranking(request: Request) -> float:
    """Seconds x 1e12 of ranking pages: two passes over the means of earlier pages, for the queries that are asked."""
    config, total = request.config, 0.0
    asked = request.batch_size * request.length * RANKED_QUERIES / TILE_SIZE
    means = request.length / 2 / config.page_size * means_per_page(config.page_rule, config.page_size)
    for index in request.sparse_layers:
        layer = request.facts.layers[index]
        total += 4 * asked * means * layer.num_query_heads * layer.head_size
    return total / RANKING_TFLOPS


def _pairs(length: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def _traffic(request: Request, placement: Placement) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Bytes loaded to the GPU, and bytes stored to the host, in the fill pass and in the gradient pass; and bytes of
    chosen pages that are loaded in the fill pass beside these."""
    chunk, first = request.config.chunk_size, placement.gpu_tokens
    kept_from = placement.capacity - placement.out_tokens
    fill_loads = grad_loads = grad_stores = 0.0
    fill_stores = 0.0
    chosen, chosen_loads = (0.0, 0.0), 0.0
    if request.sparse_layers:
        # The same for all of them.
        chosen = _tokens_chosen(request, first), _tokens_chosen(request, placement.gpu_grad_tokens)
    for index, ((kv, grad, out), layer) in enumerate(zip(request.rows, request.facts.layers)):
        if index in request.sparse_layers:
            seen, seen_grad = chosen
            chosen_loads += kv * seen
            again = seen * kept_from / max(1, placement.capacity)
        else:
            seen = seen_grad = _tokens_read(chunk, placement.capacity, first, layer.window)
            fill_loads += kv * seen
            again = _tokens_read(chunk, kept_from, min(first, kept_from), layer.window)
        fill_stores += kv * placement.host_tokens + out * placement.host_out_tokens
        if request.trains:
            grad_loads += kv * (seen + again) + grad * seen_grad
            grad_loads += out * placement.host_out_tokens
            grad_stores += grad * seen_grad
    return (fill_loads, grad_loads), (fill_stores, grad_stores), chosen_loads


def _tokens_chosen(request: Request, first: int) -> float:
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


def machine_named(gpu: str, host_bytes: int) -> Machine:
    """A well-known card by its name, as in "H200", "a100-80gb", "RTX 4090" or "NVIDIA H100 80GB HBM3"."""
    for name, size in CARDS.items():
        others = _words(gpu) - _words(name)
        # What a name says of the memory is more than PyTorch sees.
        sizes = {
            word for word in others if re.fullmatch(r"\d+gb", word) and 0.9 * int(word[:-2]) < size < int(word[:-2])
        }
        is_name = _words(name) <= _words(gpu) and others <= sizes | OTHER_WORDS
        if is_name or _plain(name) in (_plain(gpu), _plain(gpu).removeprefix("nvidia")):
            return Machine(gpu_bytes=int(size * GIB), host_bytes=host_bytes, gpu_name=name)
    raise ValueError(f"no GPU called {gpu!r} is known; name one of {', '.join(CARDS)}, or its memory, as in 24GiB")


def _look_up(gpu_name: str | None, names: Iterable[str]) -> str | None:
    return next((name for name in names if gpu_name is not None and _words(name) <= _words(gpu_name)), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
