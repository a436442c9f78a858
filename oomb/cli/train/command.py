"""`oomb train`. Its flags are the fields of `TrainSettings` and `oomb.Config`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from oomb.cli.errors import one_clear_message, quiet, warnings_as_lines
from oomb.cli.options import SettingsCommand, engine_options, parameters_of, set_parameters, train_options
from oomb.cli.train import yaml_file
from oomb.cli.train.aliases import reject_foreign
from oomb.cli.train.schema import TYPES, engine_settings, from_flag
from oomb.cli.train.settings import LATEST, TrainSettings
from oomb.cli.train.yaml_file import FileSettings
from oomb.config import Config, SettingError
from oomb.models import load

SETTINGS = "Settings"
RunFile = Annotated[
    Path | None, typer.Argument(metavar="RUN.YAML", help="Same as --config RUN.YAML.", show_default=False)
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings. Flags override it.", rich_help_panel=SETTINGS)
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print_config",
        help="Print the resulting settings as YAML, which --config accepts, and exit.",
        rich_help_panel=SETTINGS,
    ),
]


class TrainCommand(SettingsCommand):
    """Command that accepts flags the way Hugging Face's scripts do: `--use_peft`, `--use_peft true`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with one_clear_message():
            reject_foreign(args)
        return super().parse_args(ctx, normalized(args))


def normalized(args: list[str]) -> list[str]:
    """Return arguments as the parser takes them: `--flag true` as `--flag`, `--flag false` as `--no_flag`, and
    `--resume_from_checkpoint` and `--packing` with a value."""
    switches = {f"--{name}" for name, (kind, _) in TYPES.items() if kind is bool}
    # TRL's --packing is a switch. Given a value here, it is refused with the right word.
    without_value = {"--resume_from_checkpoint": LATEST, "--packing": "true"}
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
            # The parser refuses any other value.
            known = {"": name, "true": name, "false": f"--no_{name[2:]}"}
            plain.append(known.get(value.lower(), arg))
        elif arg in without_value and (
            following is None or following.startswith("--") or following.endswith((".yaml", ".yml"))
        ):
            # A YAML file that follows is the run's settings: checkpoints are folders.
            plain += [arg, without_value[arg]]
        else:
            plain.append(arg)
    return plain


def train(ctx: typer.Context, **given: Any) -> None:
    """Fine-tune a causal language model on long contexts.

    Without arguments it runs a built-in example: a small byte-level model, trained from scratch on the source of
    Python's standard library at a 16K-token context. That takes a few minutes on two CPU cores.

    With your own model and data: [bold]oomb train --model_name_or_path FOLDER --dataset FOLDER --max_length 128K[/].
    Add [bold]--use_peft[/] to train LoRA adapters in much less memory. [bold]oomb plan[/] tells you in advance what
    fits.

    All settings can be given in a YAML file: [bold]oomb train run.yaml --learning_rate 1e-5[/]. Flags override the
    file. The settings of the run are written to OUTPUT_DIR/config.yaml.

    The model (or the adapters) is saved to OUTPUT_DIR/model, with one JSON line per step in
    OUTPUT_DIR/metrics.jsonl. Ctrl-C stops at the next chunk, saves the model and a checkpoint of the last complete
    step, and prints the command to resume: [bold]oomb train OUTPUT_DIR/config.yaml --resume_from_checkpoint[/]
    """
    with one_clear_message():
        flags = _given_flags(ctx, given)
        file = _settings_file(given, flags)
        with _pointing_at(file, flags):
            settings = _gather(given, file, flags)
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


def _given_flags(ctx: typer.Context, given: dict[str, Any]) -> set[str]:
    # Compared by name, because typer has moved the enum of parameter sources.
    return {name for name in given if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"}


def _settings_file(given: dict[str, Any], flags: set[str]) -> FileSettings:
    """Read the run's YAML file, if it has one."""
    if given["run"] is not None and given["config"] is not None:
        raise ValueError(f"got two settings files, {given['run']} and --config {given['config']}: pass only one")
    path = given["run"] or given["config"]
    if path is None:
        return FileSettings(Path(), {}, {})
    file = yaml_file.read(path)
    if file.moved_to is not None and "output_dir" not in flags:
        # Resume from the checkpoints next to the file, and leave the folder it was copied from alone.
        text = f"{file.path} names output_dir {file.values['output_dir']}, but the run was moved or copied to "
        text += f"{file.moved_to}: using that"
        Console(stderr=True).print(f"[yellow]{escape(text)}[/]")
        file.values["output_dir"] = str(file.moved_to)
    return file


def _gather(given: dict[str, Any], file: FileSettings, flags: set[str]) -> TrainSettings:
    """Merge settings: flags first, then the file, then defaults."""
    values = {
        name: file.values[name] if name in file.values and name not in flags else value
        for name, value in given.items()
        if name not in ("run", "config", "print_config")
    }
    engine = engine_settings({name: values.pop(name) for name in Config.flag_names()})
    return TrainSettings(**{name: from_flag(name, value) for name, value in values.items()}, engine=engine)


@contextmanager
def _pointing_at(file: FileSettings, flags: set[str]) -> Iterator[None]:
    """Name the file and line of a wrong value that came from the file."""
    try:
        yield
    except SettingError as error:
        if error.key in file.values and error.key not in flags:
            raise ValueError(f"{file.where(error.key)}: {error}") from error
        raise


def _parameters() -> list[Parameter]:
    return [
        Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context),
        Parameter("run", Parameter.KEYWORD_ONLY, annotation=RunFile, default=None),
        Parameter("config", Parameter.KEYWORD_ONLY, annotation=ConfigFile, default=None),
        Parameter("print_config", Parameter.KEYWORD_ONLY, annotation=PrintConfig, default=False),
        *parameters_of({**train_options(*TYPES), **engine_options()}),
    ]


set_parameters(train, _parameters())
train.command_class = TrainCommand  # type: ignore[attr-defined]
