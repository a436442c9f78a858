"""What a sequence may have, and what to change if it does not fit: `decide` for the engine, `advice` for people, and
the longest context that fits. Pure arithmetic on top of `oomb.plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

from oomb.config import Config, parse_bytes
from oomb.memory import OutOfPages
from oomb.metrics import GIB, gib
from oomb.plan import ITEMSIZES, MARGIN, ModelFacts, Placement, Request, place

SMALLEST_CHUNK = 512
"""The shortest chunk that is advised."""
EIGHT_BITS = '"int8"'
LONGEST = 1 << 36
"""Contexts are not searched beyond this."""


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


def _enough_settings(request: Request, options: list[tuple[str, tuple[str, Change]]]) -> list[str]:
    """One of the settings that suffices, or as few as it takes; none if all together do not."""

    def fits(settings: dict[str, tuple[str, Change]]) -> bool:
        return place(reduce(lambda changed, item: item[1](changed), settings.values(), request))[1] is None

    for setting, pair in options:
        if fits({setting: pair}):
            return [pair[0]]
    # All together, of the chunk sizes the smallest; then without those that are not needed, the dearest first.
    chosen = dict(options)
    if not fits(chosen):
        return []
    for left_out in reversed(list(chosen)):
        fewer = {setting: chosen[setting] for setting in chosen if setting != left_out}
        chosen = fewer if fits(fewer) else chosen
    larger = ({**chosen, setting: pair} for setting, pair in options if setting == "chunk_size" in chosen)
    chosen = next((settings for settings in larger if fits(settings)), chosen)
    return [name for name, _ in chosen.values()]


def advice(request: Request) -> str:
    """What would make a request fit that does not: a setting, several, more memory, or a shorter context."""
    longest = longest_context(request)
    text = f"With these settings the longest context that fits is {longest:,} tokens. " if longest else ""
    options, memory = [(item[0], item[1:]) for item in _remedies(request)], _enough_memory(request)
    also = f", or with {memory}" if memory else ""
    # Approximations only where nothing else helps.
    exact = [option for option in options if EIGHT_BITS not in option[1][0]]
    for some in (exact, options):
        names = _enough_settings(request, some)
        if names:
            joined = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} together"
            return f"{text}It fits with {joined}{'' if names[0].startswith('host_memory') else also}."
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
    # The last resort: an approximation.
    for name in ("grad_dtype", "kv_dtype"):
        if getattr(config, name) != "int8" and (request.trains or name == "kv_dtype"):
            yield name, f"{name}={EIGHT_BITS}", setting(**{name: "int8"})


def _without_sums(request: Request) -> Request:
    saved = request.facts.missing_grad_bytes(True) - request.facts.missing_grad_bytes(False)
    config, missing = replace(request.config, param_grad_dtype="param"), max(0, request.missing_grad_bytes - saved)
    return replace(request, config=config, float32_sums=False, missing_grad_bytes=missing)


def _with_lora(request: Request) -> Request:
    """Adapters on all matrices: about twice the width, and next to no gradients."""
    facts = replace(request.facts, has_adapters=True, layer_width=2 * request.facts.layer_width, head_grad_bytes=0)
    return replace(request, facts=facts, missing_grad_bytes=0, optimizer_bytes=0, state_bytes=0)
