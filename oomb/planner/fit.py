"""Find what fits: the longest context, the smallest change of settings, and the text of `OutOfPages`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from oomb.memory.pool import OutOfPages
from oomb.planner.placement import place
from oomb.planner.request import SAFETY_SHARE, Limit, Placement, PlacementRequest, Shortfall, host_budget
from oomb.utils.dtypes import ITEMSIZES
from oomb.utils.units import GIB, gib, round_down_size

SMALLEST_CHUNK = 512
"""The smallest `chunk_size` to suggest."""
MAX_CONTEXT = 1 << 36
"""Longest context that the search considers."""
SPARE_HOST_BYTES = 4 << 30
"""Host memory left to the rest of the system when `host_memory` is `MAX`."""
MAX = "max"
"""Placeholder for a memory limit: use everything available, resolved after the other settings."""

Settings = dict[str, Any]


class ChangeCost(IntEnum):
    """How much a settings change costs the user, cheapest first."""

    NONE = 0
    """Lifts a limit that the user has set."""
    TIME = 1
    """Same results, more computation or copies."""
    MARGIN = 2
    """Leaves no memory to spare."""
    CHUNKS = 3
    """Shorter chunks: same results, but the tensor cores are underused."""
    ROUNDING = 4
    """Sums or optimizer states with fewer bits."""
    EIGHT_BITS = 5
    """Approximate K, V or gradients of them."""
    TRAINING = 6
    """Trains something else."""


@dataclass(frozen=True)
class Change:
    """A change of one setting that saves memory where it is short. A later change of the same setting saves more."""

    setting: str
    value: Any
    cost: ChangeCost
    may_backfire: bool = False
    """Whether it takes memory elsewhere, so that it can make things worse."""


def place_or_raise(request: PlacementRequest) -> Placement:
    """Return the placement of a batch, or raise `OutOfPages` with what is missing and what would help."""
    placement, shortfall = place(request)
    if shortfall is not None:
        raise OutOfPages(f"{explain(shortfall, request, placement)} {remedies(request)}")
    return placement


def longest_context(request: PlacementRequest) -> int | None:
    """Return the longest context that fits, in whole chunks if it has at least one.

    Returns:
        0 if nothing fits, None if there is no limit.
    """
    chunk = request.config.chunk_size

    def fits(length: int) -> bool:
        return place(replace(request, length=length))[1] is None

    step, good, bad = (chunk, 1, 2) if fits(chunk) else (1, 0, chunk)
    while good and fits(bad * step):
        good, bad = bad, 2 * bad
        if bad * step > MAX_CONTEXT:
            return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    # A limit by learned positions or by a tile of the head need not be a whole number of chunks.
    others = (request.length, request.shape.num_positions or 0)
    return max(good * step, *(length for length in others if length > good * step and fits(length)), 0)


def minimal_changes(options: Sequence[Change], fits: Callable[[Settings], bool]) -> Settings | None:
    """Return the cheapest combination of changes that fits, or None if none does.

    No change in the result can be left out or replaced by a cheaper one of the same setting, and its most expensive
    change is as cheap as possible.
    """
    for chosen in all_savings(options):
        if fits(chosen):
            break
    else:
        return None
    ordered = sorted(options, key=lambda option: option.cost)
    # Try to drop the most expensive change first, as long as cheaper ones suffice.
    for setting in dict.fromkeys(option.setting for option in reversed(ordered) if option.setting in chosen):
        without = {name: value for name, value in chosen.items() if name != setting}
        cheaper = [{**chosen, setting: option.value} for option in ordered if option.setting == setting]
        chosen = next((some for some in (without, *cheaper) if some != chosen and fits(some)), chosen)
    return chosen


def longest_reach(options: Sequence[Change], reach: Callable[[Settings], int | None]) -> int:
    """Return the longest context that any combination of changes reaches. `reach` returns None for no limit."""
    return max(MAX_CONTEXT if (length := reach(settings)) is None else length for settings in all_savings(options))


def all_savings(options: Sequence[Change]) -> Iterator[Settings]:
    """Yield all changes together, and then all but one of the changes that may backfire, for each of these."""
    everything = {option.setting: option.value for option in sorted(options, key=lambda option: option.cost)}
    yield everything
    for setting in dict.fromkeys(option.setting for option in options if option.may_backfire):
        yield {name: value for name, value in everything.items() if name != setting}


def explain(shortfall: Shortfall, request: PlacementRequest, placement: Placement) -> str:
    """Return the sentence that says why a placement does not fit, with the numbers."""
    needed, available = gib(shortfall.needed), gib(shortfall.available)
    start = f"{request.length:,} tokens do not fit{' on the CPU' if request.on_cpu else ''}:"
    resident = "weights and optimizer states" if request.state_bytes else "weights"
    match shortfall.limit:
        case Limit.POSITIONS:
            return f"{start} the model has learned {shortfall.available:,} positions and cannot be trained on more."
        case Limit.OPTIMIZER_STATES:
            return f"{start} the optimizer states take {needed} of host memory, but only {available} are free."
        case Limit.WEIGHTS:
            return f"{start} the {resident} alone take {needed} of GPU memory, but only {available} are usable."
        case Limit.GPU:
            terms = ", ".join(f"{term.name} {gib(term.num_bytes)}" for term in placement.terms if not term.grows)
            resident_bytes = gib(request.shape.weight_bytes + request.state_bytes)
            return (
                f"{start} the step needs {needed} of GPU memory on top of {resident} ({resident_bytes}), but only "
                f"{available} are available ({terms})."
            )
        case Limit.CPU:
            share = f"{SAFETY_SHARE:.0%} of what is free"
            return (
                f"{start} K, V, their gradients and saved attention outputs take {needed} of memory, but only "
                f"{available} are available, {share}."
            )
        case Limit.HOST:
            total = gib(placement.gpu_bytes + placement.host_bytes)
            where = "fit outside of host_memory" if request.on_cpu else "fit on the GPU"
            return (
                f"{start} K, V, their gradients and saved attention outputs take {total}; "
                f"{gib(placement.gpu_bytes)} {where}, the rest needs {needed} of host memory, but only {available} are "
                "available."
            )


def remedies(request: PlacementRequest) -> str:
    """Return what would make a request fit if it does not: other settings, more memory or a shorter context."""
    longest = longest_context(request)
    text = f"With these settings the longest context that fits is {longest:,} tokens. " if longest else ""
    options, memory = engine_options(request), enough_host_bytes(request)
    kind = "" if request.on_cpu else "host "
    first = "" if request.config.host_memory == "auto" else 'host_memory="auto" and '
    enough = f"{first}{gib(memory + GIB / 200)} of free {kind}memory" if memory else ""
    chosen = minimal_changes(options, lambda settings: place(apply_changes(request, settings))[1] is None)
    if chosen:
        also = f", or with {enough}" if enough and "host_memory" not in chosen else ""
        return f"{text}It fits with {_named(request, chosen)}{also}."
    text += f"No setting makes {request.length:,} tokens fit here." + (f" It fits with {enough}." if enough else "")
    most = longest_reach(options, lambda settings: longest_context(apply_changes(request, settings)))
    if most > (longest or 0):
        shorter = replace(request, length=most)
        chosen = minimal_changes(options, lambda settings: place(apply_changes(shorter, settings))[1] is None) or {}
        return f"{text} With {_named(shorter, chosen)} the longest context that fits is {most:,} tokens."
    return text if longest or memory else f"{text} Use a smaller model, a lower precision or a larger GPU."


def _named(request: PlacementRequest, settings: Settings) -> str:
    """Return settings as arguments of `oomb.Config`."""
    config, names = apply_changes(request, settings).config, []
    for setting in settings:
        name = f"{setting}={literal(getattr(config, setting, None))}"
        if setting == "host_memory":
            name += f" ({gib(request.free_host_bytes)} are free)"
        names.append("LoRA (a PEFT model; --lora for plan and bench)" if setting == "lora" else name)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} together"


def literal(value: Any) -> str:
    """Return a value as Python source, strings in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def enough_host_bytes(request: PlacementRequest) -> int | None:
    """Return how much host memory would make the request fit, or None if it fits already or no amount is enough."""
    config = request.config
    keeps, is_lean = config.keep_attention is True, config.checkpoint_layers is not False
    config = replace(config, host_memory="auto", keep_attention=keeps, checkpoint_layers=is_lean)
    placement, shortfall = place(replace(request, config=config, free_host_bytes=1 << 62))
    enough = (placement.host_bytes + request.on_cpu * placement.gpu_bytes) / SAFETY_SHARE
    return None if shortfall is not None or enough <= request.free_host_bytes else int(enough)


def saving_options(request: PlacementRequest) -> Iterator[Change]:
    """Yield the changes of `Config` fields that would save memory."""
    config, shape, free_host_bytes = request.config, request.shape, request.free_host_bytes
    host_limit = host_budget(config, free_host_bytes)
    if config.host_memory != "auto" and host_limit < int(SAFETY_SHARE * free_host_bytes):
        yield Change("host_memory", "auto", ChangeCost.NONE)
    if config.gpu_memory != "auto" and not request.on_cpu:
        yield Change("gpu_memory", "auto", ChangeCost.NONE)
    if config.keep_attention is True:
        yield Change("keep_attention", False, ChangeCost.TIME)
    if request.needs_grad and config.checkpoint_layers is False:
        yield Change("checkpoint_layers", True, ChangeCost.TIME)
    # A CPU has one memory, and 90% of it is the limit.
    if not request.on_cpu and free_host_bytes - SPARE_HOST_BYTES > host_limit:
        yield Change("host_memory", MAX, ChangeCost.MARGIN)
    if not request.on_cpu:
        yield Change("gpu_memory", MAX, ChangeCost.MARGIN)
    size = config.chunk_size // 2
    while size >= SMALLEST_CHUNK and (config.page_budget is None or size % config.page_size == 0):
        yield Change("chunk_size", size, ChangeCost.CHUNKS)
        size //= 2
    if request.needs_grad and request.float32_sums and shape.float32_sum_bytes:
        yield Change("param_grad_dtype", "param", ChangeCost.ROUNDING)
    widest = max((layer.dtype.itemsize for layer in shape.layers), default=0)
    for dtype, cost in (("bfloat16", ChangeCost.ROUNDING), ("int8", ChangeCost.EIGHT_BITS)):
        for name in ("grad_dtype", "kv_dtype"):
            is_narrower = ITEMSIZES[dtype] < ITEMSIZES.get(getattr(config, name), widest)
            if is_narrower and (request.needs_grad or name == "kv_dtype"):
                yield Change(name, dtype, cost)


def engine_options(request: PlacementRequest) -> list[Change]:
    """Return the changes that a training script can make: of `Config` fields, and LoRA."""
    shape, options = request.shape, list(saving_options(request))
    if request.needs_grad and not shape.has_adapters and shape.grad_bytes:
        options.append(Change("lora", True, ChangeCost.TRAINING))
    return options


def apply_changes(request: PlacementRequest, settings: Settings) -> PlacementRequest:
    """Return the request with changed settings."""
    plain = {name: value for name, value in settings.items() if name != "lora" and value != MAX}
    request = replace(request, config=replace(request.config, **plain))
    if "param_grad_dtype" in settings:
        request = _without_float32_sums(request)
    if "lora" in settings:
        request = _with_lora(request)
    return with_maximum(request, [name for name, value in settings.items() if value == MAX])


def with_maximum(request: PlacementRequest, limits: Collection[str]) -> PlacementRequest:
    """Return the request with these memory limits at everything available, rounded to sizes that are easy to type."""
    if "host_memory" in limits:
        size = round_down_size(request.free_host_bytes - SPARE_HOST_BYTES)
        request = replace(request, config=replace(request.config, host_memory=size))
    if "gpu_memory" in limits:
        unlimited, _ = place(replace(request, config=replace(request.config, gpu_memory=1 << 62)))
        # `place` does not always reserve room for later optimizer states next to an explicit limit, so reserve it here.
        size = round_down_size(int(request.available) - unlimited.fixed_bytes - request.optimizer_bytes)
        request = replace(request, config=replace(request.config, gpu_memory=size))
    return request


def _without_float32_sums(request: PlacementRequest) -> PlacementRequest:
    saved = request.shape.missing_grad_bytes(True) - request.shape.missing_grad_bytes(False)
    config, missing = replace(request.config, param_grad_dtype="param"), max(0, request.missing_grad_bytes - saved)
    return replace(request, config=config, float32_sums=False, missing_grad_bytes=missing)


def _with_lora(request: PlacementRequest) -> PlacementRequest:
    """Return the request with adapters on all matrices: about twice the width, and hardly any gradients."""
    width = 2 * request.shape.layer_io_width
    shape = replace(request.shape, has_adapters=True, layer_io_width=width, head_grad_bytes=0)
    return replace(request, shape=shape, missing_grad_bytes=0, optimizer_bytes=0, state_bytes=0)
