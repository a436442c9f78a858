"""Write suggestions as text: flags, commands to copy, arguments for Python, and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from oomb.config import OFFLOADED_STATES, Config
from oomb.models.presets import is_preset
from oomb.planner.fit import SPARE_HOST_BYTES, Settings, literal
from oomb.planner.forecast import StepForecast
from oomb.planner.hardware import GPUS
from oomb.planner.plan import PlanReport
from oomb.planner.suggest import SPEED_UP, Suggestion
from oomb.utils.units import GIB, duration, exact_size, gib, tokens_text

EXPLANATIONS = {
    "lora": "train adapters and freeze the weights",
    "batch_size": "one sequence at a time with gradient accumulation: the same result",
    "host_memory": f"all free host memory except {SPARE_HOST_BYTES >> 30} GiB",
    "gpu_memory": "all GPU memory not needed for anything else",
    "keep_attention": "recompute attention in the gradient pass: slower",
    "checkpoint_layers": "recompute layers in the gradient pass: slower",
    "chunk_size": "shorter chunks: slower",
    "param_grad_dtype": "sum gradients over chunks in the dtype of the parameters, which rounds at every chunk",
    "optimizer": "keep AdamW's states in host memory",
    "grad_dtype": "store gradients of K and V in {bits}",
    "kv_dtype": "store K and V in {bits}",
    "page_budget": "pages of the past that each query tile reads: an approximation, and faster",
    "page_size": "tokens per page",
}
"""What every change does, in the order in which changes are shown."""
BITS = {"int8": "8 bits: an approximation", "8bit": "8 bits"}


class SuggestionText:
    """One suggestion as text. `report` is the plan that it changes."""

    def __init__(self, suggestion: Suggestion, report: PlanReport) -> None:
        self.suggestion, self.report = suggestion, report
        self.forecast = suggestion.forecast

    @property
    def changes(self) -> Settings:
        """The changed settings, in the order in which they are shown."""
        changes = self.suggestion.changes
        return {name: changes[name] for name in EXPLANATIONS if name in changes}

    @property
    def flags(self) -> list[str]:
        """The changes as flags of `oomb plan`."""
        return [_flag(name, value) for name, value in self.changes.items()]

    @property
    def plan_command(self) -> str:
        """The `oomb plan` command that shows this forecast in full."""
        forecast, machine = self.forecast, self.forecast.machine
        words = ["oomb", "plan", "--model", self.report.model, "--context", tokens_text(forecast.length)]
        if self.suggestion.asked.batch_size > 1:
            words += ["--batch_size", str(forecast.batch_size)]
        if machine.gpu_name in GPUS and machine.gpu_bytes == GPUS[machine.gpu_name].memory_bytes:
            words += ["--gpu", machine.gpu_name]
        elif machine.gpu_name is None:
            words += ["--gpu", exact_size(machine.gpu_bytes)]
        words += ["--host", exact_size(machine.host_bytes)]
        if self.report.dtype != "bfloat16":
            words += ["--dtype", self.report.dtype]
        words += ["--lora"] if self.suggestion.lora else []
        words += ["--optimizer", forecast.optimizer] if forecast.optimizer != "adamw" else []
        return shlex.join([*words, *self._engine_words()])

    @property
    def train_command(self) -> str | None:
        """The `oomb train` command with these settings, with MODEL in place of a preset.

        None for an optimizer that `oomb train` does not have.
        """
        model = "MODEL" if is_preset(self.report.model) else self.report.model
        forecast, accumulation = self.forecast, self.suggestion.accumulation
        words = ["oomb", "train", "--model_name_or_path", model]
        words += ["--max_length", tokens_text(forecast.length), "--dtype", self.report.dtype]
        if self.suggestion.asked.batch_size > 1:
            words += ["--per_device_train_batch_size", str(forecast.batch_size)]
        if accumulation > 1:
            words += ["--gradient_accumulation_steps", str(accumulation)]
        words += ["--use_peft"] if self.suggestion.lora else []
        if forecast.optimizer in OFFLOADED_STATES:
            options = f"state_dtype={OFFLOADED_STATES[forecast.optimizer]},master_weights=false"
            words += ["--optim", "offloaded_adamw", "--optim_args", options]
        elif forecast.optimizer != "adamw":
            return None
        return shlex.join([*words, *self._engine_words()])

    @property
    def python(self) -> str:
        """The settings as arguments of the Python classes."""
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in non_default(self.forecast.config).items())
        text = f"oomb.Config({arguments})"
        if self.forecast.optimizer in OFFLOADED_STATES:
            text += f", oomb.Trainer(..., optimizer={literal(self.forecast.optimizer)})"
        if self.suggestion.accumulation > 1:
            sizes = f"per_device_train_batch_size=1, gradient_accumulation_steps={self.suggestion.accumulation}"
            text += f", TrainingArguments(..., {sizes})"
        return f"{text}, on a PEFT model" if self.suggestion.lora else text

    @property
    def cost(self) -> str:
        """Memory and time of a step, after the word "takes"."""
        forecast, accumulation = self.forecast, self.suggestion.accumulation
        text = (
            f"{gib(forecast.peak_gpu_bytes)} of {gib(forecast.gpu_limit)} usable GPU memory, "
            f"{gib(forecast.host_bytes)} of {gib(forecast.machine.host_bytes)} free host memory"
        )
        step = f"each of the {accumulation} sequences of a step" if accumulation > 1 else "a step"
        return text if forecast.seconds is None else f"{text}; {step} takes {step_time(forecast)}"

    def lines(self) -> list[str]:
        """Return the settings one by one, what a step then takes, and the commands."""
        shown = dict(zip(self.flags, self.changes.items(), strict=True))
        width = max(map(len, shown), default=0)
        return [
            *(f"  {flag.ljust(width)}  {_meaning(name, value)}" for flag, (name, value) in shown.items()),
            f"It then takes {self.cost}.",
            f"the plan in full: {self.plan_command}",
            *self._training_lines(),
            f"in Python: {self.python}",
        ]

    def _training_lines(self) -> Iterator[str]:
        if self.train_command is not None:
            yield f"to train: {self.train_command}"
            if is_preset(self.report.model):
                yield "  MODEL: folder or hub id of the trained model. The preset itself has random weights."

    def _engine_words(self) -> Iterator[str]:
        for name, value in non_default(self.forecast.config).items():
            if name in Config.flag_names():
                yield from _flag(name, value).split()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        forecast = self.forecast
        return {
            "context": forecast.length,
            "batch_size": forecast.batch_size,
            "gradient_accumulation_steps": self.suggestion.accumulation,
            "machine": asdict(forecast.machine),
            "changes": self.changes,
            "settings": asdict(forecast.config),
            "lora": self.suggestion.lora,
            "optimizer": forecast.optimizer,
            "peak_gpu_bytes": forecast.peak_gpu_bytes,
            "host_bytes": forecast.host_bytes,
            "seconds": forecast.seconds,
            "command": self.plan_command,
            "train_command": self.train_command,
            "python": self.python,
        }


def suggestion_lines(report: PlanReport) -> list[str]:
    """Return everything that there is to suggest about a plan."""
    found, lines = report.suggestions, []

    def text(suggestion: Suggestion) -> SuggestionText:
        return SuggestionText(suggestion, report)

    if found.suggestion is not None:
        lines += ["It fits with:", *text(found.suggestion).lines()]
        if found.without_sparse is not None:
            dense = text(found.without_sparse)
            lines.append(f"With attention to the whole past, it takes {dense.cost}: {' '.join(dense.flags)}")
    for reached in map(text, found.longest):
        flags, kind = " ".join(reached.flags), "LoRA" if reached.suggestion.lora else "Full training"
        settings = f" with {flags}" if flags else ""
        lines.append(f"{kind} reaches {reached.forecast.length:,} tokens{settings}: {reached.cost}.")
    if found.larger_machine is not None:
        lines += _machine_lines(text(found.larger_machine))
    if found.wants_peft:
        lines.append("LoRA takes less memory, but could not be tried: pip install peft.")
    if found.with_sparse is not None:
        sparse = text(found.with_sparse)
        # For a GPU of unknown speed, the ratio is that of the measured GPU.
        speed = f"is more than {SPEED_UP} times as fast"
        if sparse.forecast.seconds is not None:
            speed = f"takes {step_time(sparse.forecast)}"
        lines.append(f"With {' '.join(sparse.flags)} it {speed}: attention to selected pages, an approximation.")
    return lines


def _machine_lines(text: SuggestionText) -> Iterator[str]:
    """Yield what a machine needs to fit the context."""
    machine, asked = text.forecast.machine, text.suggestion.asked
    memory = []
    if machine.gpu_bytes > asked.machine.gpu_bytes:
        memory.append(f"a GPU with {gib(machine.gpu_bytes + GIB / 200)}")
    if machine.host_bytes > asked.machine.host_bytes:
        memory.append(f"{gib(machine.host_bytes + GIB / 200)} of free host memory")
    flags = f", with {' '.join(text.flags)}" if text.flags else ""
    yield f"No setting makes it fit here. It needs {' and '.join(memory)}{flags}."
    if text.suggestion.lora and text.forecast.request.shape.weight_bytes > asked.gpu_limit:
        yield (
            "The weights alone do not fit this GPU: oomb train --load_in_4bit stores them in about a quarter of the "
            "memory, which the plan does not count."
        )


def suggestions_as_dict(report: PlanReport) -> dict[str, Any]:
    """Return all suggestions as plain values for JSON."""
    found = report.suggestions
    named = {
        "recipe": found.suggestion,
        "exact": found.without_sparse,
        "faster": found.with_sparse,
        "elsewhere": found.larger_machine,
    }
    return {
        **{name: some and SuggestionText(some, report).as_dict() for name, some in named.items()},
        "longest": [SuggestionText(some, report).as_dict() for some in found.longest],
    }


def step_time(forecast: StepForecast) -> str:
    """Return the predicted time of a step as text: "about 35.1 s, 3,734 tokens/s"."""
    assert forecast.seconds is not None
    tokens_per_second = forecast.length * forecast.batch_size / forecast.seconds
    about = "more than" if forecast.is_lower_bound else "about"
    text = f"{about} {duration(forecast.seconds)}, {tokens_per_second:,.0f} tokens/s"
    return text if forecast.machine.is_measured else f"{text}; scaled from an H200 by datasheet rates, not measured"


def non_default(config: Config) -> Settings:
    """Return the fields that differ from their defaults."""
    defaults = asdict(Config())
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}


def _flag(name: str, value: Any) -> str:
    if name == "lora":
        return "--lora"
    return f"--{name} {str(value).lower() if isinstance(value, bool) else value}"


def _meaning(name: str, value: Any) -> str:
    if value == "auto":
        return "as much as is free, with a margin"
    text = EXPLANATIONS[name].format(bits=BITS.get(value, value))
    return f"{text}, in {BITS.get(dtype, dtype)}" if (dtype := OFFLOADED_STATES.get(value)) else text
