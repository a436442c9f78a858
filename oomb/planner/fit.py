"""What a sequence may have, and what to change if it does not fit: `decide` for the engine, `advice` for people, the
longest context that fits, and the search for the least that must change, which `oomb.recipe` shares. Pure arithmetic on
top of `oomb.plan`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from oomb.config import Config
from oomb.memory.pool import OutOfPages
from oomb.models.shape import ModelShape
from oomb.planner.placement import place
from oomb.planner.request import SAFETY_SHARE, Placement, PlacementRequest, host_budget
from oomb.utils.dtypes import ITEMSIZES
from oomb.utils.units import GIB, gib, round_down_size

SMALLEST_CHUNK = 512
"""The shortest chunk that is advised."""
LONGEST = 1 << 36
"""Contexts are not searched beyond this."""
SPARE_HOST_BYTES = 4 << 30
"""What a host that is filled to the brim has left for all else."""
MAX = "brim"
"""In place of a limit on memory: all there is. How much that is depends on the other settings."""

Settings = dict[str, Any]


class ChangeCost(IntEnum):
    """What a change costs, from least to most."""

    NONE = 0
    """A limit is lifted that somebody has set."""
    TIME = 1
    """The same results, with more to compute or to copy."""
    MARGIN = 2
    """No memory is left to spare."""
    CHUNKS = 3
    """Shorter chunks: the same results, and matrix units that idle."""
    ROUNDING = 4
    """Sums or states with fewer bits."""
    EIGHT_BITS = 5
    """K, V or their gradients are approximations."""
    TRAINING = 6
    """Something else is trained."""


@dataclass(frozen=True)
class Change:
    """A change that saves memory where it is short. Of several for one setting, a later one saves more."""

    setting: str
    value: Any
    cost: ChangeCost
    may_backfire: bool = False
    """It takes memory elsewhere, and so need not help."""


def place_or_raise(
    shape: ModelShape,
    config: Config,
    *,
    batch_size: int,
    length: int,
    needs_grad: bool,
    float32_sums: bool,
    fused: bool,
    free_gpu_bytes: int | None,
    free_host_bytes: int,
    missing_grad_bytes: int,
    optimizer_bytes: int,
    is_exclusive: bool = True,
) -> Placement:
    """Where everything goes, or `OutOfPages` with what is missing and what would help.

    `free_gpu_bytes` is what this process may still take of the model's device; None where nobody counts, on a CPU.
    `missing_grad_bytes` are parameter gradients or sums that the gradient pass has to allocate, `optimizer_bytes` the
    states that come after it. `is_only`: no other sequence is to have pages at the same time.
    """
    request = PlacementRequest(**locals())
    placement, problem = place(request)
    if problem is not None:
        raise OutOfPages(f"{problem} {explain(request)}")
    return placement


def longest_context(request: PlacementRequest) -> int | None:
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
    others = (request.length, request.shape.num_positions or 0)
    return max(good * step, *(length for length in others if length > good * step and fits(length)), 0)


def minimal_changes(options: Sequence[Change], fits: Callable[[Settings], bool]) -> Settings | None:
    """The least that makes it fit: none of these settings can be left out or be milder, and the worst of them is as
    mild as can be. None if nothing does."""
    for chosen in all_savings(options):
        if fits(chosen):
            break
    else:
        return None
    ordered = sorted(options, key=lambda option: option.cost)
    # The worst first: what is milder stays if it can do instead.
    for setting in dict.fromkeys(option.setting for option in reversed(ordered) if option.setting in chosen):
        without = {name: value for name, value in chosen.items() if name != setting}
        milder = [{**chosen, setting: option.value} for option in ordered if option.setting == setting]
        chosen = next((some for some in (without, *milder) if some != chosen and fits(some)), chosen)
    return chosen


def longest_reach(options: Sequence[Change], reach: Callable[[Settings], int | None]) -> int:
    """The longest context that any of these settings reach. `reach`: None is no limit."""
    return max(LONGEST if (length := reach(settings)) is None else length for settings in all_savings(options))


def all_savings(options: Sequence[Change]) -> Iterator[Settings]:
    """All options together; then without one that may hurt, for each of these."""
    everything = {option.setting: option.value for option in sorted(options, key=lambda option: option.cost)}
    yield everything
    for setting in dict.fromkeys(option.setting for option in options if option.may_backfire):
        yield {name: value for name, value in everything.items() if name != setting}


def explain(request: PlacementRequest) -> str:
    """What would make a request fit that does not: a setting, several, more memory, or a shorter context."""
    longest = longest_context(request)
    text = f"With these settings the longest context that fits is {longest:,} tokens. " if longest else ""
    options, memory = engine_options(request), enough_host_bytes(request)
    on_cpu, is_auto = request.free_gpu_bytes is None, request.config.host_memory == "auto"
    kind, first = "" if on_cpu else "host ", "" if is_auto else 'host_memory="auto" and '
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
        return f"{text} With {_named(shorter, chosen)} the longest is {most:,}."
    return text if longest or memory else f"{text} Take a smaller model, a lower precision or a larger GPU."


def _named(request: PlacementRequest, settings: Settings) -> str:
    """Settings as a person writes them."""
    config, names = apply_changes(request, settings).config, []
    for setting in settings:
        name = f"{setting}={literal(getattr(config, setting, None))}"
        if setting == "host_memory":
            name += f" ({gib(request.free_host_bytes)} are free)"
        names.append("LoRA (a PEFT model; --lora for plan and bench)" if setting == "lora" else name)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} together"


def literal(value: Any) -> str:
    """A value as Python has it, in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def enough_host_bytes(request: PlacementRequest) -> int | None:
    """The host memory with which the request would fit, if there is such."""
    asked = request.config
    keeps, is_lean = asked.keep_attention is True, asked.checkpoint_layers is not False
    config = replace(asked, host_memory="auto", keep_attention=keeps, checkpoint_layers=is_lean)
    placement, problem = place(replace(request, config=config, free_host_bytes=1 << 62))
    on_cpu = request.free_gpu_bytes is None
    enough = (placement.host_bytes + on_cpu * placement.gpu_bytes) / SAFETY_SHARE
    return None if problem is not None or enough <= request.free_host_bytes else int(enough)


def saving_options(request: PlacementRequest) -> Iterator[Change]:
    """Fields of `Config` that save memory and are not in force."""
    config, facts = request.config, request.shape
    has_gpu = request.free_gpu_bytes is not None
    if config.host_memory != "auto" and host_budget(config, request.free_host_bytes) < int(
        SAFETY_SHARE * request.free_host_bytes
    ):
        yield Change("host_memory", "auto", ChangeCost.NONE)
    if config.gpu_memory != "auto" and has_gpu:
        yield Change("gpu_memory", "auto", ChangeCost.NONE)
    if config.keep_attention is True:
        yield Change("keep_attention", False, ChangeCost.TIME)
    if request.needs_grad and config.checkpoint_layers is False:
        yield Change("checkpoint_layers", True, ChangeCost.TIME)
    # On a CPU there is one memory, and a limit to all of it.
    if has_gpu and request.free_host_bytes - SPARE_HOST_BYTES > host_budget(config, request.free_host_bytes):
        yield Change("host_memory", MAX, ChangeCost.MARGIN)
    if has_gpu:
        yield Change("gpu_memory", MAX, ChangeCost.MARGIN)
    size = config.chunk_size // 2
    while size >= SMALLEST_CHUNK and (config.page_budget is None or size % config.page_size == 0):
        yield Change("chunk_size", size, ChangeCost.CHUNKS)
        size //= 2
    if request.needs_grad and request.float32_sums and facts.float32_sum_bytes:
        yield Change("param_grad_dtype", "param", ChangeCost.ROUNDING)
    widest = max((layer.dtype.itemsize for layer in facts.layers), default=0)
    for dtype, harm in (("bfloat16", ChangeCost.ROUNDING), ("int8", ChangeCost.EIGHT_BITS)):
        for name in ("grad_dtype", "kv_dtype"):
            is_narrower = ITEMSIZES[dtype] < ITEMSIZES.get(getattr(config, name), widest)
            if is_narrower and (request.needs_grad or name == "kv_dtype"):
                yield Change(name, dtype, harm)


def engine_options(request: PlacementRequest) -> list[Change]:
    """Those, and what else a training script can change."""
    facts, options = request.shape, list(saving_options(request))
    if request.needs_grad and not facts.has_adapters and facts.grad_bytes:
        options.append(Change("lora", True, ChangeCost.TRAINING))
    return options


def apply_changes(request: PlacementRequest, settings: Settings) -> PlacementRequest:
    """The request with these settings instead."""
    plain = {name: value for name, value in settings.items() if name != "lora" and value != MAX}
    request = replace(request, config=replace(request.config, **plain))
    if "param_grad_dtype" in settings:
        request = _without_sums(request)
    if "lora" in settings:
        request = _with_lora(request)
    return with_maximum(request, [name for name, value in settings.items() if value == MAX])


def with_maximum(request: PlacementRequest, limits: Collection[str]) -> PlacementRequest:
    """The request with these limits at all there is, as sizes that a person can write."""
    if "host_memory" in limits:
        there = round_down_size(request.free_host_bytes - SPARE_HOST_BYTES)
        request = replace(request, config=replace(request.config, host_memory=there))
    if "gpu_memory" in limits:
        unlimited, _ = place(replace(request, config=replace(request.config, gpu_memory=1 << 62)))
        # A limit that someone has set is not always lowered for states that come after the first step, so this is.
        there = round_down_size(int(request.available) - unlimited.fixed_bytes - request.optimizer_bytes)
        request = replace(request, config=replace(request.config, gpu_memory=there))
    return request


def _without_sums(request: PlacementRequest) -> PlacementRequest:
    saved = request.shape.missing_grad_bytes(True) - request.shape.missing_grad_bytes(False)
    config, missing = replace(request.config, param_grad_dtype="param"), max(0, request.missing_grad_bytes - saved)
    return replace(request, config=config, float32_sums=False, missing_grad_bytes=missing)


def _with_lora(request: PlacementRequest) -> PlacementRequest:
    """Adapters on all matrices: about twice the width, and next to no gradients."""
    facts = replace(
        request.shape, has_adapters=True, layer_io_width=2 * request.shape.layer_io_width, head_grad_bytes=0
    )
    return replace(request, shape=facts, missing_grad_bytes=0, optimizer_bytes=0, state_bytes=0)
