"""`oomb train`. Its flags are the fields of `oomb.train.settings.Settings`."""

from __future__ import annotations

from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from oomb.cli.errors import (
    CommandOfSettings,
    engine_settings,
    one_clear_message,
    quiet,
    train_options,
    warnings_as_lines,
)
from oomb.cli.options import ENGINE_OPTIONS
from oomb.cli.train import yaml_file
from oomb.cli.train.aliases import reject_foreign
from oomb.cli.train.settings import LATEST, TYPES, SettingError, TrainSettings, from_flag
from oomb.cli.train.yaml_file import FileSettings
from oomb.models import load

Config = Annotated[
    Path | None,
    typer.Option("--config", help="A YAML file of settings; a flag overrules it.", rich_help_panel="Settings"),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print_config",
        help="Write the settings that this command line comes to, as YAML for --config, and exit.",
        rich_help_panel="Settings",
    ),
]
Run = Annotated[
    Path | None, typer.Argument(metavar="RUN.YAML", help="The same as --config RUN.YAML.", show_default=False)
]


class TrainCommand(CommandOfSettings):
    """Takes flags as Hugging Face's scripts do: `--use_peft`, `--use_peft true`, and the latest checkpoint unnamed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with one_clear_message():
            reject_foreign(args)
        return super().parse_args(ctx, normalized(args))


def normalized(args: list[str]) -> list[str]:
    """`--flag true` as `--flag`, `--flag false` as `--no_flag`, `--resume_from_checkpoint` and `--packing` with their
    values."""
    switches = {f"--{name}" for name, (kind, _) in TYPES.items() if kind is bool}
    # --packing is a switch in TRL. It will be refused, with the word for it.
    alone = {"--resume_from_checkpoint": LATEST, "--packing": "true"}
    plain: list[str] = []
    index = 0
    while index < len(args):
        arg, following = args[index], args[index + 1] if index + 1 < len(args) else None
        name, is_joined, value = arg.partition("=")
        index += 1
        if name in switches:
            if not is_joined and following is not None and following.lower() in ("true", "false"):
                value = following
                index += 1
            # What is neither true nor false is left for the parser to refuse.
            known = {"": name, "true": name, "false": f"--no_{name[2:]}"}
            plain.append(known.get(value.lower(), arg))
        elif arg in alone and (
            following is None or following.startswith("--") or following.endswith((".yaml", ".yml"))
        ):
            # A settings file after it is the run's: a checkpoint is a folder.
            plain += [arg, alone[arg]]
        else:
            plain.append(arg)
    return plain


def train(ctx: typer.Context, **given: Any) -> None:
    """Train a causal language model on long windows of text.

    Without arguments: the built-in example, a small byte-level model from scratch on the source of Python's standard
    library at a 16K-token context. It takes a few minutes on two CPU cores.

    With your own: [bold]oomb train --model_name_or_path FOLDER --dataset FOLDER --max_length 128K[/]. To train LoRA
    adapters instead, in little memory: add [bold]--use_peft[/]. [bold]oomb plan[/] says beforehand what will fit.

    All settings can stand in a YAML file: [bold]oomb train run.yaml --learning_rate 1e-5[/]. A flag overrules the
    file. What a run was told is written to OUTPUT_DIR/config.yaml.

    The model goes to OUTPUT_DIR/model, with --use_peft the adapters; a JSON line per step to
    OUTPUT_DIR/metrics.jsonl. Ctrl-C stops at the next chunk, saves the model and a checkpoint of the last whole step,
    and says how to go on: [bold]oomb train OUTPUT_DIR/config.yaml --resume_from_checkpoint[/]
    """
    with one_clear_message():
        settings = gather(ctx, given)
        load.check_model_name(settings.model_name_or_path)
        if given["print_config"]:
            typer.echo(yaml_file.write(settings), nl=False)
            return
        quiet()
        from oomb.cli.train.run import run

        console = Console()
        with warnings_as_lines(console):
            code = run(settings, console)
    raise typer.Exit(code)


def gather(ctx: typer.Context, given: dict[str, Any]) -> TrainSettings:
    """Flags, then what the file says, then the defaults."""
    if given["run"] is not None and given["config"] is not None:
        raise ValueError(f"two settings files were given, {given['run']} and --config {given['config']}: name one")
    path = given["run"] or given["config"]
    file = FileSettings(Path(), {}, {}) if path is None else yaml_file.read(path)
    # By its name: where the parser lives in typer has changed.
    flags = {name for name in given if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"}
    if file.moved_to is not None and "output_dir" not in flags:
        # Its checkpoints are the ones to resume from, and the run that it was copied from is not to be written to.
        text = f"{file.path} names output_dir {file.values['output_dir']}: this run was moved or copied to"
        Console(stderr=True).print(f"[yellow]{escape(f'{text} {file.moved_to}, which is used instead')}[/]")
        file.values["output_dir"] = str(file.moved_to)
    values = {
        name: file.values[name] if name in file.values and name not in flags else from_flag(name, value)
        for name, value in given.items()
        if name not in ("run", "config", "print_config")
    }
    try:
        engine = engine_settings({name: values.pop(name) for name in ENGINE_OPTIONS})
        return TrainSettings(**values, engine=engine)
    except SettingError as error:
        if error.key in file.values and error.key not in flags:
            raise ValueError(f"{file.where(error.key)}: {error.key} {error.problem}") from None
        raise
    except ValueError as error:
        key = str(error).removeprefix("--").split()[0]
        if key in file.values and key not in flags:
            raise ValueError(f"{file.where(key)}: {error}") from None
        raise


def _parameters() -> list[Parameter]:
    """The command line is read off a function's parameters."""
    parameters = [
        Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context),
        Parameter("run", Parameter.KEYWORD_ONLY, annotation=Run, default=None),
        Parameter("config", Parameter.KEYWORD_ONLY, annotation=Config, default=None),
        Parameter("print_config", Parameter.KEYWORD_ONLY, annotation=PrintConfig, default=False),
    ]
    options = {**train_options(*TYPES), **ENGINE_OPTIONS}
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]
    return parameters


train.__signature__ = Signature(_parameters())  # type: ignore[attr-defined]
train.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
train.command_class = TrainCommand  # type: ignore[attr-defined]
