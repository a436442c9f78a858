"""Build the options of commands from the settings of `oomb.Config` and `oomb train`, so each is described once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from oomb.cli.errors import one_clear_message
from oomb.cli.train.aliases import ALIASES, reject_two_values
from oomb.cli.train.schema import ENGINE_TYPES, FIELDS, TYPES, as_text, from_flag, help_text
from oomb.cli.train.settings import check_value
from oomb.config import Config
from oomb.models import presets

MODEL, DATA, MACHINE, OPTIMIZER, OUTPUT = "Model", "Data", "Machine", "Optimizer", "Output"
"""Panels of `--help`."""
PRESET_NAMES = ", ".join(presets.PRESETS)
MODEL_HELP = f"A folder written by save_pretrained, a hub id (owner/name), or a preset: {PRESET_NAMES}."

Options = dict[str, tuple[Any, Any]]
"""Options of a command by name: the annotation that typer reads, and the default."""

Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Precision of the weights: float64, float32, bfloat16 or float16. auto: bfloat16 on a GPU, else float32.",
        rich_help_panel=MODEL,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="GPU to plan for: its name (H200, H100, A100-80GB, RTX 4090, …) or its memory, such as 24GiB. Default: "
        "this machine's.",
        rich_help_panel=MACHINE,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host", help="Free host memory to plan for, such as 64GiB. auto: this machine's.", rich_help_panel=MACHINE
    ),
]
OptimizerStates = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="Optimizer whose states to count: adamw, adamw_8bit, momentum, sgd or none on the GPU; offloaded_adamw, "
        "offloaded_adamw_bf16 or offloaded_adamw_8bit in host memory.",
        rich_help_panel=OPTIMIZER,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Plot memory against context into this file (.png, .svg or .pdf). Needs matplotlib.",
        rich_help_panel=OUTPUT,
    ),
]


class SettingsCommand(TyperCommand):
    """Command that accepts other names of settings, but not two values for one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with one_clear_message():
            reject_two_values(args)
        return super().parse_args(ctx, args)


def train_options(*names: str, **defaults: Any) -> Options:
    """Return settings of `oomb train` as options of a command.

    Args:
        *names: Settings to take.
        **defaults: Defaults that differ from those of `oomb train`.
    """
    return {name: _option(FIELDS[name], TYPES[name], defaults) for name in TYPES if name in names}


def engine_options(*without: str, **defaults: Any) -> Options:
    """Return the settings of `oomb.Config` as options of a command.

    Args:
        *without: Settings to leave out.
        **defaults: Defaults that differ from those of `oomb.Config`.
    """
    names = [name for name in Config.flag_names() if name not in without]
    return {name: _option(FIELDS[name], ENGINE_TYPES[name], defaults) for name in names}


def _option(described: Field[Any], value_type: tuple[type, bool], defaults: dict[str, Any]) -> tuple[Any, Any]:
    name, (kind, optional) = described.name, value_type
    meaning = help_text(described)
    if name == "model_name_or_path":
        meaning += f" Presets: {PRESET_NAMES}."
    is_text = described.metadata["unit"] is not None
    option = typer.Option(
        f"--{name}/--no_{name}" if kind is bool else f"--{name}",
        *(f"--{alias}" for alias in ALIASES.get(name, ())),
        help=meaning,
        rich_help_panel=described.metadata["panel"],
        show_default=kind is not bool,
    )
    plain: Any = str if is_text else kind
    default = defaults.get(name, described.default)
    return Annotated[plain | None if optional else plain, option], as_text(default) if is_text else default


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `train_options` that a command got, converted.

    Raises:
        SettingError: A value is wrong.
    """
    values = {name: from_flag(name, value) for name, value in options.items()}
    for name, value in values.items():
        check_value(name, value)
    return values


def with_engine_options(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the engine's options. It receives their values as the parameter `engine`."""
    return with_options("engine", engine_options(*without, **defaults))


def with_options(parameter: str, options: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace one parameter of a command by options. The command receives their values in that parameter, by name.

    Args:
        parameter: Name of the parameter to replace.
        options: The options; typer reads them off the command's signature.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            grouped = {name: values.pop(name) for name in options}
            function(**values, **{parameter: grouped})

        hints = get_type_hints(function, include_extras=True)
        parameters: list[Parameter] = []
        for name, own in signature(function).parameters.items():
            if name != parameter:
                parameters.append(own.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            else:
                parameters += parameters_of(options)
        set_parameters(command, parameters)
        return command

    return decorate


def parameters_of(options: Options) -> list[Parameter]:
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]


def set_parameters(command: Callable[..., None], parameters: list[Parameter]) -> None:
    """Make typer see these parameters."""
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
