"""Search for settings that make a context fit when it does not fit as requested, and for faster settings.

Changes are tried from cheapest to most expensive (`fit.ChangeCost`), and those that prove unnecessary are dropped. LoRA
comes last, because it trains something else. If attention to the whole past takes hours, a page budget is part of the
suggestion, and the time without it is kept next to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from oomb.config import OFFLOADED_STATES, Config
from oomb.models.shape import ModelShape
from oomb.planner.fit import (
    MAX,
    SPARE_HOST_BYTES,
    Change,
    ChangeCost,
    Settings,
    all_savings,
    enough_host_bytes,
    longest_context,
    longest_reach,
    minimal_changes,
    saving_options,
    with_maximum,
)
from oomb.planner.forecast import StepForecast, forecast_step, request_for, state_bytes
from oomb.planner.hardware import MEASURED_GPU, Machine
from oomb.planner.placement import place
from oomb.planner.request import SAFETY_SHARE, PlacementRequest
from oomb.planner.step_time import predict_seconds
from oomb.utils.units import GIB

SLOW_SECONDS, SPEED_UP = 3600, 3
"""A page budget is suggested if a step takes longer than this and would be this many times as fast. For a batch that
does not fit at once, a step is one sequence."""
SPARSE_PAGES: Settings = {"page_budget": 64, "page_size": 128}
"""The page budget that was measured."""
WORTHWHILE = 0.95
"""Reaching this fraction of the longest possible context counts as reaching it; changes that would only add the rest
are not suggested."""
MAX_GPU_BYTES = 1 << 50
"""Largest GPU that the search for a larger machine considers."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A forecast that fits, and how its settings differ from those asked for."""

    asked: StepForecast
    forecast: StepForecast
    lora: bool
    """Whether adapters are trained."""
    was_lora: bool
    """Whether adapters were asked for."""

    @property
    def changes(self) -> Settings:
        """What differs: fields of `Config`, "batch_size", "optimizer" and "lora", with their new values."""
        before, now = _settings(self.asked, self.was_lora), _settings(self.forecast, self.lora)
        return {name: value for name, value in now.items() if value != before[name]}

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step that make up the batch size asked for."""
        return self.asked.batch_size // self.forecast.batch_size


def _settings(forecast: StepForecast, lora: bool) -> Settings:
    others = {"batch_size": forecast.batch_size, "optimizer": forecast.optimizer, "lora": lora}
    return {**asdict(forecast.config), **others}


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """What to change about a plan. All fields are empty if it fits and is fast."""

    suggestion: Suggestion | None = None
    """If it does not fit as asked: the smallest change with which it does."""
    without_sparse: Suggestion | None = None
    """The same without a page budget, if the suggestion has one for speed."""
    longest: tuple[Suggestion, ...] = ()
    """If no settings fit this context: full training, LoRA or both at the longest context they reach."""
    with_sparse: Suggestion | None = None
    """If it fits as asked but takes long: with a page budget."""
    larger_machine: Suggestion | None = None
    """If no settings fit: on this GPU with more host memory or, if no amount of host memory is enough, on the smallest
    GPU on which it fits, with the host memory needed alongside it."""
    wants_peft: bool = False
    """Whether LoRA could have helped but PEFT is not installed."""


def suggest_settings(
    asked: StepForecast, *, lora: bool = False, shape_with_lora: Callable[[], ModelShape | None] = lambda: None
) -> Suggestions:
    """Return what to change about a forecast.

    Args:
        asked: The forecast with the settings asked for.
        lora: Whether it is for LoRA training.
        shape_with_lora: Returns the shape of the model with LoRA, or None if PEFT is not installed.
    """
    shape = asked.request.shape
    search = SettingsSearch(asked=asked, shape=shape, machine=asked.machine, lora=lora, was_lora=lora)
    if shape.num_positions is not None and asked.length > shape.num_positions:
        return Suggestions()
    config = search.start()
    if asked.fits:
        return Suggestions(with_sparse=search.suggestion(config) if config != asked.config else None)
    found, wants_peft = search.suggestion(config), False
    longest: list[Suggestion] = []
    if found is None:
        longest = [reached for reached in (search.longest(config),) if reached is not None]
        adapted = None if lora else shape_with_lora()
        wants_peft = adapted is None and not lora
        if adapted is not None:
            with_lora = replace(search, lora=True, shape=adapted)
            found = with_lora.suggestion(config)
            reached = with_lora.longest(config) if found is None else None
            # In a small model, adapters add more activations than they save elsewhere.
            is_further = reached is not None and all(
                other.forecast.length < reached.forecast.length for other in longest
            )
            longest += [reached] if reached is not None and is_further else []
            search = with_lora if found is not None or is_further or not longest else search
    return Suggestions(
        suggestion=found,
        without_sparse=search.suggestion(asked.config) if found is not None and config != asked.config else None,
        longest=tuple(longest),
        larger_machine=search.larger_machine(config) if found is None else None,
        wants_peft=wants_peft,
    )


@dataclass(frozen=True, kw_only=True)
class SettingsSearch:
    """The search for one kind of training on one machine."""

    asked: StepForecast
    shape: ModelShape
    machine: Machine
    lora: bool
    was_lora: bool

    def start(self) -> Config:
        """Return the settings to start from: as asked, or with a page budget if that makes all the difference."""
        asked = self.asked
        seconds = self._seconds(asked.config)
        # Sequences that do not fit together run one by one.
        is_slow = seconds > (1 if asked.fits else asked.batch_size) * SLOW_SECONDS
        if not is_slow or (config := with_sparse_pages(asked.config)) is None:
            return asked.config
        return config if SPEED_UP * self._seconds(config) < seconds else asked.config

    def _seconds(self, config: Config) -> float:
        """Return the time of the step asked for, whether or not it fits: most of the time is arithmetic.

        A GPU of unknown speed is taken to be as fast as the measured one; few are faster.
        """
        machine = self.machine if self.machine.scale is not None else replace(self.machine, gpu_name=MEASURED_GPU)
        request = self.request(config, {}, self.asked.length)
        return predict_seconds(request, place(request)[0], machine) or 0.0

    def suggestion(self, config: Config) -> Suggestion | None:
        """Return the cheapest change of `config` that fits, or None if nothing fits."""
        settings = minimal_changes(self.options(config), lambda some: self._fits(config, some, self.asked.length))
        if settings is None:
            return None
        return self._suggest(self.request(config, settings, self.asked.length), settings, self.asked.length)

    def longest(self, config: Config) -> Suggestion | None:
        """Return the cheapest suggestion that comes within 5% of the longest context any settings reach."""
        asked, options = self.asked.length, self.options(config)
        most = longest_reach(
            options, lambda some: longest_context(_all_auto_savings(self.request(config, some, asked)))
        )
        worth = max(2, int(WORTHWHILE * most))
        settings = minimal_changes(options, lambda some: self._fits(config, some, worth)) if most else None
        if settings is None:
            return None
        request = self.request(config, settings, worth)
        return self._suggest(request, settings, longest_context(request) or worth)

    def larger_machine(self, config: Config) -> Suggestion | None:
        """Return the suggestion on the smallest machine that has one.

        That is this GPU with more host memory or, if no amount of host memory is enough, the smallest GPU on which it
        fits and the host memory needed alongside it.
        """
        here, search = self.asked.machine, self
        if self._enough_host(config) is None:
            search = replace(self, machine=replace(here, gpu_bytes=self._smallest_gpu(config)))
        host_bytes = max(here.host_bytes, search._enough_host(config) or 0)
        return replace(search, machine=replace(search.machine, host_bytes=host_bytes)).suggestion(config)

    def options(self, config: Config) -> list[Change]:
        """Return all changes to try."""
        optimizer, shape = self.asked.optimizer, self.shape
        options = list(saving_options(self.request(config, {}, self.asked.length)))
        if self.asked.batch_size > 1:
            # After lifting limits, which costs nothing and keeps the batch as it is.
            options.append(Change("batch_size", 1, ChangeCost.NONE))
        if "adamw" not in optimizer:
            return options
        before, on_host = sum(state_bytes(optimizer, shape)), state_bytes(optimizer, shape)[1]
        for name in OFFLOADED_STATES:
            size = state_bytes(name, shape)[1]
            # The scales of 8-bit states make them a little larger than those on the GPU.
            is_no_larger = 0.97 * size <= before
            if is_no_larger and (not on_host or size < on_host):
                cost = ChangeCost.TIME if size >= before else ChangeCost.ROUNDING
                options.append(Change("optimizer", name, cost, may_backfire=True))
        return options

    def request(self, config: Config, settings: Settings, length: int) -> PlacementRequest:
        """Return the placement request with changed settings."""
        others = ("optimizer", "batch_size")
        plain = {name: value for name, value in settings.items() if name not in others and value != MAX}
        request = request_for(self.shape, replace(config, **plain), self.machine, **self._sizes(settings, length))
        return with_maximum(request, [name for name, value in settings.items() if value == MAX])

    def _sizes(self, settings: Settings, length: int) -> dict[str, Any]:
        return {
            "batch_size": settings.get("batch_size", self.asked.batch_size),
            "length": length,
            "optimizer": settings.get("optimizer", self.asked.optimizer),
        }

    def _fits(self, config: Config, settings: Settings, length: int) -> bool:
        return place(self.request(config, settings, length))[1] is None

    def _suggest(self, request: PlacementRequest, settings: Settings, length: int) -> Suggestion:
        forecast = forecast_step(self.shape, request.config, self.machine, **self._sizes(settings, length))
        return Suggestion(asked=self.asked, forecast=forecast, lora=self.lora, was_lora=self.was_lora)

    def _smallest_gpu(self, config: Config) -> int:
        """Return the smallest GPU memory that is enough with any amount of host memory."""

        def is_enough(gpu_bytes: int) -> bool:
            return replace(self, machine=replace(self.machine, gpu_bytes=gpu_bytes))._enough_host(config) is not None

        small, large = self.machine.gpu_bytes, max(GIB, 2 * self.machine.gpu_bytes)
        while large < MAX_GPU_BYTES and not is_enough(large):
            small, large = large, 2 * large
        while large - small > GIB // 100:
            middle = (small + large) // 2
            small, large = (small, middle) if is_enough(middle) else (middle, large)
        return large

    def _enough_host(self, config: Config) -> int | None:
        """Return the host memory that is enough with all savings, and a little more; None if no amount is."""
        sizes = []
        for settings in all_savings(self.options(config)):
            states = state_bytes(settings.get("optimizer", self.asked.optimizer), self.shape)[1]
            # On a host with a byte less than the states, any requirement counts as missing, even none.
            bare = replace(self, machine=replace(self.machine, host_bytes=states - 1))
            enough = enough_host_bytes(bare.request(config, settings, self.asked.length))
            if enough is not None:
                # Either filled completely or with the margin of "auto".
                sizes.append(states + int(min(enough, SAFETY_SHARE * enough + SPARE_HOST_BYTES) / WORTHWHILE))
        return min(sizes, default=None)


def with_sparse_pages(config: Config) -> Config | None:
    """Return the config with a page budget, or None if it has one or its chunks are not whole pages."""
    if config.page_budget is not None or config.chunk_size % SPARSE_PAGES["page_size"]:
        return None
    return replace(config, **SPARSE_PAGES)


def _all_auto_savings(request: PlacementRequest) -> PlacementRequest:
    """Return the request with everything that "auto" can save, which is faster to place."""
    config = request.config
    checkpoint, keeps = config.checkpoint_layers is not False, config.keep_attention is True
    return replace(request, config=replace(config, checkpoint_layers=checkpoint, keep_attention=keeps))
