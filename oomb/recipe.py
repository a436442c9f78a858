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

from oomb.advice import (
    BRIM,
    SPARE_HOST_BYTES,
    Harm,
    Option,
    Settings,
    enough_host_bytes,
    fewest,
    furthest,
    leanest,
    literal,
    longest_context,
    saving_options,
    to_the_brim,
)
from oomb.config import Config
from oomb.forecast import CARDS, OFFLOADED_STATES, Plan, forecast, request_for, state_bytes
from oomb.metrics import GIB, duration, gib
from oomb.options import ENGINE_OPTIONS
from oomb.plan import MARGIN, ModelFacts, Request, place

SLOW_SECONDS, SPEED_UP = 3600, 3
"""Chosen pages are brought up where a step takes longer, and would be so many times as fast with them."""
CHOSEN_PAGES: Settings = {"page_budget": 64, "page_size": 128}
"""The setting that was measured."""
LARGEST_GPU_BYTES = 1 << 50
"""The memory that is missing of a GPU is not searched beyond this."""

MEANINGS = {
    "lora": "adapters are trained and the weights are frozen",
    "host_memory": f"all of the free host memory but {SPARE_HOST_BYTES >> 30} GiB",
    "gpu_memory": "all of the GPU that is left beside the rest",
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
class Recipe:
    """A plan that fits, by what differs in it from the one that was asked for."""

    model: str
    dtype: str
    lora: bool
    """Whether adapters are trained."""
    was_lora: bool
    asked: Plan
    plan: Plan

    @property
    def changes(self) -> Settings:
        """Fields of `Config`, "optimizer" and "lora", as they are now."""
        now, before = (
            {**asdict(plan.config), "optimizer": plan.optimizer, "lora": lora}
            for plan, lora in ((self.plan, self.lora), (self.asked, self.was_lora))
        )
        return {name: now[name] for name in MEANINGS if now[name] != before[name]}

    @property
    def flags(self) -> list[str]:
        """The changes for the command line."""
        return [_flag(name, value) for name, value in self.changes.items()]

    @property
    def command(self) -> str:
        """What shows this plan in full."""
        plan, machine = self.plan, self.plan.machine
        words = ["oomb", "plan", "--model", self.model, "--context", tokens_text(plan.length)]
        if plan.batch_size > 1:
            words += ["--batch_size", str(plan.batch_size)]
        if machine.gpu_name in CARDS and machine.gpu_bytes == int(CARDS[machine.gpu_name] * GIB):
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
        """What trains like this; None where `oomb train` has no such optimizer."""
        plan, words = self.plan, ["oomb", "train", "--model_name_or_path", self.model]
        words += ["--max_length", tokens_text(plan.length), "--dtype", self.dtype]
        if plan.batch_size > 1:
            words += ["--per_device_train_batch_size", str(plan.batch_size)]
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
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in _unusual(self.plan.config).items())
        text = f"oomb.Config({arguments})"
        if self.plan.optimizer in OFFLOADED_STATES:
            text += f", oomb.Trainer(..., optimizer={literal(self.plan.optimizer)})"
        return f"{text}, on a PEFT model" if self.lora else text

    def _engine_words(self) -> Iterator[str]:
        for name, value in _unusual(self.plan.config).items():
            if name in ENGINE_OPTIONS:
                yield from _flag(name, value).split()

    @property
    def takes(self) -> str:
        """Memory and time of a step."""
        plan = self.plan
        text = f"{gib(plan.peak_gpu_bytes)} of GPU memory, {gib(plan.host_bytes)} of host memory"
        if plan.seconds is not None:
            rate = plan.length * plan.batch_size / plan.seconds
            text += f" and about {duration(plan.seconds)} a step ({rate:,.0f} tokens/s)"
        return text

    def lines(self) -> list[str]:
        """The settings one by one, what they come to, and how to use them."""
        shown = dict(zip(self.flags, self.changes.items(), strict=True))
        width = max(map(len, shown), default=0)
        return [
            *(f"  {flag.ljust(width)}  {_meaning(name, value)}" for flag, (name, value) in shown.items()),
            f"It then takes {self.takes}.",
            f"the plan in full: {self.command}",
            *([f"to train: {self.train_command}"] if self.train_command is not None else []),
            f"in Python: {self.python}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "context": self.plan.length,
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
class Answer:
    """What there is to say about a plan beside itself."""

    recipe: Recipe | None = None
    """Does not fit as asked: how it does."""
    exact: Recipe | None = None
    """The same without chosen pages, if they are in it for speed."""
    longest: tuple[Recipe, ...] = ()
    """Training that does not reach this context by any settings, at the longest one that it reaches."""
    faster: Recipe | None = None
    """Fits as asked, but takes long: with chosen pages."""
    host_bytes: int | None = None
    """Nothing makes it fit: the free host memory with which settings would."""
    gpu_bytes: int | None = None
    """The same where it is the GPU that is too small, beside such a host."""

    def lines(self) -> list[str]:
        lines = []
        if self.recipe is not None:
            lines += ["It fits with", *self.recipe.lines()]
            if self.exact is not None:
                flags = " ".join(self.exact.flags)
                lines.append(f"With attention to all of the past, it takes {self.exact.takes}: {flags}")
        for recipe in self.longest:
            flags, kind = " ".join(recipe.flags), "LoRA" if recipe.lora else "Full training"
            lines.append(
                f"{kind} reaches {recipe.plan.length:,} tokens{f' with {flags}' if flags else ''}: {recipe.takes}."
            )
        if self.gpu_bytes is not None:
            lines.append(f"No setting makes it fit. It takes a GPU of {gib(self.gpu_bytes + GIB / 200)} or more.")
        elif self.host_bytes is not None:
            lines.append(f"No setting makes it fit. It takes {gib(self.host_bytes + GIB / 200)} of free host memory.")
        if self.faster is not None:
            saved = f"about {duration(self.faster.plan.seconds or 0)} with {' '.join(self.faster.flags)}"
            lines.append(f"A step takes {saved}: each tile of queries then reads chosen pages, an approximation.")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {name: getattr(self, name) for name in ("recipe", "exact", "faster")}
        return {
            **{name: recipe and recipe.as_dict() for name, recipe in found.items()},
            "longest": [recipe.as_dict() for recipe in self.longest],
            "needed_host_bytes": self.host_bytes,
            "needed_gpu_bytes": self.gpu_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Search:
    """For one kind of training, on one machine."""

    model: str
    dtype: str
    lora: bool
    was_lora: bool
    facts: ModelFacts
    asked: Plan

    def recipe(self, config: Config, length: int | None = None) -> Recipe | None:
        """The least that must change for a context, beside what `config` changes already. None if nothing does."""
        length = self.asked.length if length is None else length
        settings = fewest(
            self.options(config), lambda settings: place(self.request(config, settings, length))[1] is None
        )
        return None if settings is None else self._planned(config, settings, length)

    def longest(self, config: Config) -> Recipe | None:
        """The same for the longest context there is settings for."""
        length, _ = furthest(
            self.options(config),
            lambda settings: longest_context(self.request(config, settings, self.asked.length)),
        )
        return self.recipe(config, length) if length > 1 else None

    def quick(self, find: Callable[[Config], Recipe | None]) -> tuple[Recipe | None, Recipe | None]:
        """What `find` finds; and where a step takes long, the same with chosen pages first."""
        exact, config = find(self.asked.config), chosen_pages(self.asked.config)
        if exact is None or config is None or not is_slow(exact.plan):
            return exact, None
        quick = find(config)
        return (quick, exact) if quick is not None and is_faster(quick.plan, exact.plan) else (exact, None)

    def options(self, config: Config) -> list[Option]:
        asked, facts = self.asked.optimizer, self.facts
        options = list(saving_options(self.request(config, {}, self.asked.length)))
        if "adamw" not in asked:
            return options
        before, taken = sum(state_bytes(asked, facts)), state_bytes(asked, facts)[1]
        for name in OFFLOADED_STATES:
            size = state_bytes(name, facts)[1]
            # Scales of 8-bit states make them a little larger than those of the GPU.
            is_alike = 0.97 * size <= before
            if is_alike and (not taken or size < taken):
                harm = Harm.TIME if size >= before else Harm.ROUNDING
                options.append(Option("optimizer", name, harm, may_hurt=True))
        return options

    def request(self, config: Config, settings: Settings, length: int) -> Request:
        """What the planner is asked with these settings."""
        plain = {name: value for name, value in settings.items() if name != "optimizer" and value != BRIM}
        request = request_for(
            self.facts,
            replace(config, **plain),
            self.asked.machine,
            batch_size=self.asked.batch_size,
            length=length,
            optimizer=settings.get("optimizer", self.asked.optimizer),
            trains=True,
        )
        return to_the_brim(request, [name for name, value in settings.items() if value == BRIM])

    def _planned(self, config: Config, settings: Settings, length: int) -> Recipe:
        plan = forecast(
            self.facts,
            self.request(config, settings, length).config,
            self.asked.machine,
            batch_size=self.asked.batch_size,
            length=length,
            optimizer=settings.get("optimizer", self.asked.optimizer),
        )
        return Recipe(
            model=self.model, dtype=self.dtype, lora=self.lora, was_lora=self.was_lora, asked=self.asked, plan=plan
        )

    def missing(self) -> dict[str, int]:
        """The host memory that would do beside the leanest settings; or the GPU's, if no host is enough."""
        config = chosen_pages(self.asked.config) if is_slow(self.asked) else None
        config = self.asked.config if config is None else config
        settings = next(leanest(self.options(config)))
        enough = enough_host_bytes(self.request(config, settings, self.asked.length))
        if enough is not None:
            # To the brim of that host, in a size of four digits, or with the margin of "auto".
            states = state_bytes(settings.get("optimizer", self.asked.optimizer), self.facts)[1]
            return {"host_bytes": states + min(enough, int(1.001 * MARGIN * enough) + SPARE_HOST_BYTES)}
        small, large = self.asked.machine.gpu_bytes, LARGEST_GPU_BYTES
        while large - small > GIB // 100:
            middle = (small + large) // 2
            small, large = (small, middle) if self._fits_on(middle, config) else (middle, large)
        return {"gpu_bytes": large}

    def _fits_on(self, gpu_bytes: int, config: Config) -> bool:
        machine = replace(self.asked.machine, gpu_bytes=gpu_bytes)
        search = replace(self, asked=replace(self.asked, machine=machine))
        return any(
            place(search.request(config, settings, self.asked.length))[1] is None
            for settings in leanest(search.options(config))
        )


def answer(
    model: str, dtype: str, lora: bool, facts: ModelFacts, asked: Plan, adapted: Callable[[], ModelFacts | None]
) -> Answer:
    """What to tell about a plan. `adapted` gives the facts of the model with LoRA, if that can be had."""
    search = Search(model=model, dtype=dtype, lora=lora, was_lora=lora, facts=facts, asked=asked)
    if facts.num_positions is not None and asked.length > facts.num_positions:
        return Answer()
    if asked.fits:
        quick, exact = search.quick(search.recipe) if is_slow(asked) else (None, None)
        return Answer(faster=None if exact is None else quick)
    recipe, exact = search.quick(search.recipe)
    if recipe is not None:
        return Answer(recipe=recipe, exact=exact)
    longest = [search.quick(search.longest)[0]]
    with_lora = None if lora else adapted()
    if with_lora is not None:
        search = replace(search, lora=True, facts=with_lora)
        recipe, exact = search.quick(search.recipe)
        longest += [search.quick(search.longest)[0]] if recipe is None else []
    return Answer(
        recipe=recipe,
        exact=exact,
        longest=tuple(found for found in longest if found is not None),
        **({} if recipe is not None else search.missing()),
    )


def is_slow(plan: Plan) -> bool:
    return plan.config.page_budget is None and plan.seconds is not None and plan.seconds > SLOW_SECONDS


def is_faster(plan: Plan, other: Plan) -> bool:
    """By as much as makes a difference, for a token."""
    pace, before = ((x.seconds or 0) / x.length for x in (plan, other))
    return SPEED_UP * pace < before


def chosen_pages(config: Config) -> Config | None:
    """The same with chosen pages, where they are not chosen yet and chunks are whole pages."""
    if config.page_budget is not None or config.chunk_size % CHOSEN_PAGES["page_size"]:
        return None
    return replace(config, **CHOSEN_PAGES)


def _unusual(config: Config) -> Settings:
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
    text = MEANINGS[name].format(bits=BITS.get(value, value))
    return f"{text}, in {BITS.get(dtype, dtype)}" if (dtype := OFFLOADED_STATES.get(value)) else text


def tokens_text(tokens: int) -> str:
    """As a person writes it, if it can be so exactly: 4M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def exact_size(num_bytes: int) -> str:
    """The same for bytes: 119GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"
