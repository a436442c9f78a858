"""With which settings a context fits that does not fit as asked, and how long a step then takes.

Changes are tried from the one that costs least to the one that costs most (`oomb.advice.Harm`); what proves unnecessary
is left out again. LoRA comes last: it is another training. Where attention to all of the past takes hours, chosen pages
are part of the answer, and the time without them is told.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from oomb.config import OFFLOADED_STATES, Config
from oomb.models.presets import is_preset
from oomb.models.shape import ModelShape
from oomb.planner.fit import (
    MAX,
    SPARE_HOST_BYTES,
    Change,
    ChangeCost,
    Settings,
    all_savings,
    enough_host_bytes,
    literal,
    longest_context,
    longest_reach,
    minimal_changes,
    saving_options,
    with_maximum,
)
from oomb.planner.forecast import StepForecast, forecast_step, request_for, state_bytes
from oomb.planner.hardware import GPUS, MEASURED_GPU, Machine
from oomb.planner.placement import place
from oomb.planner.request import SAFETY_SHARE, PlacementRequest
from oomb.planner.step_time import predict_seconds
from oomb.utils.units import GIB, exact_size, gib, tokens_text

SLOW_SECONDS, SPEED_UP = 3600, 3
"""Chosen pages are brought up where a step takes longer, and would be so many times as fast with them. Of a batch that
does not fit at once, a step is one sequence."""
CHOSEN_PAGES: Settings = {"page_budget": 64, "page_size": 128}
"""The setting that was measured."""
WORTHWHILE = 0.95
"""A context counts as the longest if no further setting adds more than the rest of it."""
LARGEST_GPU_BYTES = 1 << 50
"""The memory that is missing of a GPU is not searched beyond this."""

EXPLANATIONS = {
    "lora": "adapters are trained and the weights are frozen",
    "batch_size": "one sequence at a time, and gradients accumulated: the same result",
    "host_memory": f"all host memory that is left, but {SPARE_HOST_BYTES >> 30} GiB",
    "gpu_memory": "all GPU memory that is left beside the rest",
    "keep_attention": "attention is computed again in the gradient pass: slower",
    "checkpoint_layers": "layers are computed again in the gradient pass: slower",
    "chunk_size": "shorter chunks: slower",
    "param_grad_dtype": "gradients are summed over chunks in the parameters' precision, which rounds at every chunk",
    "optimizer": "AdamW's states rest in host memory",
    "grad_dtype": "gradients of K and V rest in {bits}",
    "kv_dtype": "K and V rest in {bits}",
    "page_budget": "a tile of queries reads so many pages of the past: an approximation, and faster",
    "page_size": "tokens in each of them",
}
"""What a change does, for people, in the order in which changes are shown."""
BITS = {"int8": "8 bits: an approximation", "8bit": "8 bits"}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A plan that fits, by what differs in it from the one that was asked for."""

    model: str
    dtype: str
    lora: bool
    """Whether adapters are trained."""
    was_lora: bool
    asked: StepForecast
    plan: StepForecast

    @property
    def changes(self) -> Settings:
        """Fields of `Config`, "batch_size", "optimizer" and "lora", as they are now."""
        now, before = (
            {**asdict(plan.config), "batch_size": plan.batch_size, "optimizer": plan.optimizer, "lora": lora}
            for plan, lora in ((self.plan, self.lora), (self.asked, self.was_lora))
        )
        return {name: now[name] for name in EXPLANATIONS if now[name] != before[name]}

    @property
    def accumulation(self) -> int:
        """Batches of an optimizer step, if it has as many sequences as were asked for."""
        return self.asked.batch_size // self.plan.batch_size

    @property
    def flags(self) -> list[str]:
        """The changes for the command line."""
        return [_flag(name, value) for name, value in self.changes.items()]

    @property
    def command(self) -> str:
        """What shows this plan in full."""
        plan, machine = self.plan, self.plan.machine
        words = ["oomb", "plan", "--model", self.model, "--context", tokens_text(plan.length)]
        if self.asked.batch_size > 1:
            words += ["--batch_size", str(plan.batch_size)]
        if machine.gpu_name in GPUS and machine.gpu_bytes == GPUS[machine.gpu_name].memory_bytes:
            words += ["--gpu", machine.gpu_name]
        elif machine.gpu_name is None:
            words += ["--gpu", exact_size(machine.gpu_bytes)]
        words += ["--host", exact_size(machine.host_bytes)]
        if self.dtype != "bfloat16":
            words += ["--dtype", self.dtype]
        words += ["--lora"] if self.lora else []
        words += ["--optimizer", plan.optimizer] if plan.optimizer != "adamw" else []
        return shlex.join([*words, *self._engine_words()])

    @property
    def train_command(self) -> str | None:
        """What trains like this, with MODEL for a preset; None where `oomb train` has no such optimizer."""
        model = "MODEL" if is_preset(self.model) else self.model
        plan, words = self.plan, ["oomb", "train", "--model_name_or_path", model]
        words += ["--max_length", tokens_text(plan.length), "--dtype", self.dtype]
        if self.asked.batch_size > 1:
            words += ["--per_device_train_batch_size", str(plan.batch_size)]
        if self.accumulation > 1:
            words += ["--gradient_accumulation_steps", str(self.accumulation)]
        words += ["--use_peft"] if self.lora else []
        if plan.optimizer in OFFLOADED_STATES:
            options = f"state_dtype={OFFLOADED_STATES[plan.optimizer]},master_weights=false"
            words += ["--optim", "offloaded_adamw", "--optim_args", options]
        elif plan.optimizer != "adamw":
            return None
        return shlex.join([*words, *self._engine_words()])

    @property
    def python(self) -> str:
        """The same as arguments of the Python classes."""
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in non_default(self.plan.config).items())
        text = f"oomb.Config({arguments})"
        if self.plan.optimizer in OFFLOADED_STATES:
            text += f", oomb.Trainer(..., optimizer={literal(self.plan.optimizer)})"
        if self.accumulation > 1:
            sizes = f"per_device_train_batch_size=1, gradient_accumulation_steps={self.accumulation}"
            text += f", TrainingArguments(..., {sizes})"
        return f"{text}, on a PEFT model" if self.lora else text

    def _engine_words(self) -> Iterator[str]:
        for name, value in non_default(self.plan.config).items():
            if name in Config.flag_names():
                yield from _flag(name, value).split()

    @property
    def takes(self) -> str:
        """Memory and time of a step."""
        plan = self.plan
        text = (
            f"{gib(plan.peak_gpu_bytes)} of {gib(plan.gpu_limit)} usable GPU memory, {gib(plan.host_bytes)} of "
            f"{gib(plan.machine.host_bytes)} free host memory"
        )
        step = f"each of the {self.accumulation} sequences of a step" if self.accumulation > 1 else "a step"
        return text if plan.seconds is None else f"{text}; {step} takes {plan.step_time_text}"

    def lines(self) -> list[str]:
        """The settings one by one, what they come to, and how to use them."""
        shown = dict(zip(self.flags, self.changes.items(), strict=True))
        width = max(map(len, shown), default=0)
        return [
            *(f"  {flag.ljust(width)}  {_meaning(name, value)}" for flag, (name, value) in shown.items()),
            f"It then takes {self.takes}.",
            f"the plan in full: {self.command}",
            *self._training_lines(),
            f"in Python: {self.python}",
        ]

    def _training_lines(self) -> Iterator[str]:
        if self.train_command is not None:
            yield f"to train: {self.train_command}"
            if is_preset(self.model):
                yield "  MODEL: the folder or hub id of the trained model. The preset itself has random weights."

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "context": self.plan.length,
            "batch_size": self.plan.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "machine": asdict(self.plan.machine),
            "changes": self.changes,
            "settings": asdict(self.plan.config),
            "lora": self.lora,
            "optimizer": self.plan.optimizer,
            "peak_gpu_bytes": self.plan.peak_gpu_bytes,
            "host_bytes": self.plan.host_bytes,
            "seconds": self.plan.seconds,
            "command": self.command,
            "train_command": self.train_command,
            "python": self.python,
        }


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """What there is to say about a plan beside itself."""

    suggestion: Suggestion | None = None
    """Does not fit as asked: how it does."""
    without_sparse: Suggestion | None = None
    """The same without chosen pages, if they are in it for speed."""
    longest: tuple[Suggestion, ...] = ()
    """Training that does not reach this context by any settings, at the longest one that it reaches."""
    with_sparse: Suggestion | None = None
    """Fits as asked, but takes long: with chosen pages."""
    larger_machine: Suggestion | None = None
    """Nothing makes it fit: on a machine with the host memory that is missing, or if no host is enough, on the smallest
    GPU that is, with the host memory that it takes."""
    wants_peft: bool = False
    """LoRA might have helped and could not be tried."""

    def lines(self) -> list[str]:
        lines = []
        if self.suggestion is not None:
            lines += ["It fits with:", *self.suggestion.lines()]
            if self.without_sparse is not None:
                flags = " ".join(self.without_sparse.flags)
                lines.append(f"With attention to all of the past, it takes {self.without_sparse.takes}: {flags}")
        for recipe in self.longest:
            flags, kind = " ".join(recipe.flags), "LoRA" if recipe.lora else "Full training"
            lines.append(
                f"{kind} reaches {recipe.plan.length:,} tokens{f' with {flags}' if flags else ''}: {recipe.takes}."
            )
        if self.larger_machine is not None:
            machine, asked = self.larger_machine.plan.machine, self.larger_machine.asked.machine
            memory = []
            if machine.gpu_bytes > asked.gpu_bytes:
                memory.append(f"a GPU of {gib(machine.gpu_bytes + GIB / 200)}")
            if machine.host_bytes > asked.host_bytes:
                memory.append(f"{gib(machine.host_bytes + GIB / 200)} of free host memory")
            flags = f", with {' '.join(self.larger_machine.flags)}" if self.larger_machine.flags else ""
            lines.append(f"No setting makes it fit here. It takes {' and '.join(memory)}{flags}.")
            weights = sum(term.num_bytes for term in self.larger_machine.plan.terms if term.name == "weights")
            if self.larger_machine.lora and weights > self.larger_machine.asked.gpu_limit:
                lines.append(
                    "The weights alone do not fit this GPU: oomb train --load_in_4bit keeps them in about a quarter; "
                    "the plan does not count it."
                )
        if self.wants_peft:
            lines.append("LoRA takes less, and is tried where peft is installed: pip install peft.")
        if self.with_sparse is not None:
            plan, flags = self.with_sparse.plan, " ".join(self.with_sparse.flags)
            # Where no rate is known, chosen pages were found to be so much faster on another GPU.
            takes = (
                f"it takes {plan.step_time_text}"
                if plan.seconds is not None
                else f"it is more than {SPEED_UP} times as fast"
            )
            lines.append(f"With {flags} {takes}: attention to chosen pages, an approximation.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {
            "recipe": self.suggestion,
            "exact": self.without_sparse,
            "faster": self.with_sparse,
            "elsewhere": self.larger_machine,
        }
        return {
            **{name: recipe and recipe.as_dict() for name, recipe in found.items()},
            "longest": [recipe.as_dict() for recipe in self.longest],
        }


@dataclass(frozen=True, kw_only=True)
class SettingsSearch:
    """For one kind of training, on one machine."""

    model: str
    dtype: str
    lora: bool
    was_lora: bool
    shape: ModelShape
    machine: Machine
    asked: StepForecast

    def start(self) -> Config:
        """The settings to begin with: as asked, or with chosen pages where they make all the difference in time."""
        asked = self.asked
        seconds = self._seconds(asked.config)
        # Sequences that do not fit together are computed one by one.
        is_slow = seconds > (1 if asked.fits else asked.batch_size) * SLOW_SECONDS
        if not is_slow or (config := with_sparse_pages(asked.config)) is None:
            return asked.config
        return config if SPEED_UP * self._seconds(config) < seconds else asked.config

    def _seconds(self, config: Config) -> float:
        """Of a step as asked for; that it need not fit makes little difference, since most of the time is arithmetic.
        A GPU whose rates are not known is taken to be as fast as the one that was measured: few are faster."""
        machine = self.machine if self.machine.scale is not None else replace(self.machine, gpu_name=MEASURED_GPU)
        request = self.request(config, {}, self.asked.length)
        return predict_seconds(request, place(request)[0], machine) or 0.0

    def suggestion(self, config: Config) -> Suggestion | None:
        """The least that must change beside `config`. None if nothing makes it fit."""
        settings = minimal_changes(self.options(config), lambda some: self._fits(config, some, self.asked.length))
        if settings is None:
            return None
        return self._planned(self.request(config, settings, self.asked.length).config, settings, self.asked.length)

    def longest(self, config: Config) -> Suggestion | None:
        """The same for a context that is the longest but for a little, which no further setting is worth."""
        asked, options = self.asked.length, self.options(config)
        most = longest_reach(options, lambda some: longest_context(_leaner(self.request(config, some, asked))))
        worth = max(2, int(WORTHWHILE * most))
        settings = minimal_changes(options, lambda some: self._fits(config, some, worth)) if most else None
        if settings is None:
            return None
        request = self.request(config, settings, worth)
        return self._planned(request.config, settings, longest_context(request) or worth)

    def _fits(self, config: Config, settings: Settings, length: int) -> bool:
        return place(self.request(config, settings, length))[1] is None

    def options(self, config: Config) -> list[Change]:
        asked, facts = self.asked.optimizer, self.shape
        options = list(saving_options(self.request(config, {}, self.asked.length)))
        if self.asked.batch_size > 1:
            # After the limits that cost nothing to lift, which leave the batch as it was asked for.
            options.append(Change("batch_size", 1, ChangeCost.NONE))
        if "adamw" not in asked:
            return options
        before, taken = sum(state_bytes(asked, facts)), state_bytes(asked, facts)[1]
        for name in OFFLOADED_STATES:
            size = state_bytes(name, facts)[1]
            # Scales of 8-bit states make them a little larger than those of the GPU.
            is_alike = 0.97 * size <= before
            if is_alike and (not taken or size < taken):
                harm = ChangeCost.TIME if size >= before else ChangeCost.ROUNDING
                options.append(Change("optimizer", name, harm, may_backfire=True))
        return options

    def request(self, config: Config, settings: Settings, length: int) -> PlacementRequest:
        """What the planner is asked with these settings."""
        plain = {
            name: value for name, value in settings.items() if name not in ("optimizer", "batch_size") and value != MAX
        }
        request = request_for(
            self.shape,
            replace(config, **plain),
            self.machine,
            batch_size=settings.get("batch_size", self.asked.batch_size),
            length=length,
            optimizer=settings.get("optimizer", self.asked.optimizer),
            needs_grad=True,
        )
        return with_maximum(request, [name for name, value in settings.items() if value == MAX])

    def _planned(self, config: Config, settings: Settings, length: int) -> Suggestion:
        plan = forecast_step(
            self.shape,
            config,
            self.machine,
            batch_size=settings.get("batch_size", self.asked.batch_size),
            length=length,
            optimizer=settings.get("optimizer", self.asked.optimizer),
        )
        return Suggestion(
            model=self.model, dtype=self.dtype, lora=self.lora, was_lora=self.was_lora, asked=self.asked, plan=plan
        )

    def larger_machine(self, config: Config) -> Suggestion | None:
        """The recipe on a machine that is just large enough: this one with more host memory, or if no host is enough,
        the smallest GPU that is, with the host memory that it takes."""
        here, there = self.asked.machine, self
        if self._enough_host(config) is None:
            there = replace(self, machine=replace(here, gpu_bytes=self._smallest_gpu(config)))
        host_bytes = max(here.host_bytes, there._enough_host(config) or 0)
        return replace(there, machine=replace(there.machine, host_bytes=host_bytes)).suggestion(config)

    def _smallest_gpu(self, config: Config) -> int:
        """With as much host memory as need be."""

        def is_enough(gpu_bytes: int) -> bool:
            return replace(self, machine=replace(self.machine, gpu_bytes=gpu_bytes))._enough_host(config) is not None

        small, large = self.machine.gpu_bytes, max(GIB, 2 * self.machine.gpu_bytes)
        while large < LARGEST_GPU_BYTES and not is_enough(large):
            small, large = large, 2 * large
        while large - small > GIB // 100:
            middle = (small + large) // 2
            small, large = (small, middle) if is_enough(middle) else (middle, large)
        return large

    def _enough_host(self, config: Config) -> int | None:
        """The host memory that is enough beside this GPU with all that settings save, and a little. None if none is."""
        sizes = []
        for settings in all_savings(self.options(config)):
            states = state_bytes(settings.get("optimizer", self.asked.optimizer), self.shape)[1]
            # Of a host with less than nothing to spare it tells how much there must be, be that nothing.
            bare = replace(self, machine=replace(self.machine, host_bytes=states - 1))
            enough = enough_host_bytes(bare.request(config, settings, self.asked.length))
            if enough is not None:
                # To the brim of that host, or with the margin of "auto".
                sizes.append(states + int(min(enough, SAFETY_SHARE * enough + SPARE_HOST_BYTES) / WORTHWHILE))
        return min(sizes, default=None)


def suggest_settings(
    model: str, dtype: str, lora: bool, facts: ModelShape, asked: StepForecast, adapted: Callable[[], ModelShape | None]
) -> Suggestions:
    """What to tell about a plan. `adapted` gives the facts of the model with LoRA, if that can be had."""
    search = SettingsSearch(
        model=model, dtype=dtype, lora=lora, was_lora=lora, shape=facts, machine=asked.machine, asked=asked
    )
    if facts.num_positions is not None and asked.length > facts.num_positions:
        return Suggestions()
    config = search.start()
    if asked.fits:
        return Suggestions(with_sparse=search.suggestion(config) if config != asked.config else None)
    recipe, wants_peft = search.suggestion(config), False
    longest: list[Suggestion] = []
    if recipe is None:
        longest = [found for found in (search.longest(config),) if found is not None]
        with_lora = None if lora else adapted()
        wants_peft = with_lora is None and not lora
        if with_lora is not None:
            leaner = replace(search, lora=True, shape=with_lora)
            recipe = leaner.suggestion(config)
            reached = leaner.longest(config) if recipe is None else None
            # Adapters take more of a small model's activations than they save elsewhere.
            further = reached is not None and all(found.plan.length < reached.plan.length for found in longest)
            longest += [reached] if reached is not None and further else []
            search = leaner if recipe is not None or further or not longest else search
    return Suggestions(
        suggestion=recipe,
        without_sparse=search.suggestion(asked.config) if recipe is not None and config != asked.config else None,
        longest=tuple(longest),
        larger_machine=search.larger_machine(config) if recipe is None else None,
        wants_peft=wants_peft,
    )


def with_sparse_pages(config: Config) -> Config | None:
    """The same with chosen pages, where they are not chosen yet and chunks are whole pages."""
    if config.page_budget is not None or config.chunk_size % CHOSEN_PAGES["page_size"]:
        return None
    return replace(config, **CHOSEN_PAGES)


def _leaner(request: PlacementRequest) -> PlacementRequest:
    """With all that "auto" can save, which is quicker to plan."""
    config = request.config
    checkpoint, keeps = config.checkpoint_layers is not False, config.keep_attention is True
    return replace(request, config=replace(config, checkpoint_layers=checkpoint, keep_attention=keeps))


def non_default(config: Config) -> Settings:
    """The fields that are not as by default."""
    usual, found = asdict(Config()), asdict(config)
    return {name: value for name, value in found.items() if value != usual[name]}


def _flag(name: str, value: Any) -> str:
    if name == "lora":
        return "--lora"
    return f"--{name} {str(value).lower() if isinstance(value, bool) else value}"


def _meaning(name: str, value: Any) -> str:
    if value == "auto":
        return "as much as is free, with a margin"
    text = EXPLANATIONS[name].format(bits=BITS.get(value, value))
    return f"{text}, in {BITS.get(dtype, dtype)}" if (dtype := OFFLOADED_STATES.get(value)) else text
