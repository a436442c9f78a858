"""What the commands share: errors as one clear message, quiet libraries, settings of the engine."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from oomb.cli.train.aliases import ALIASES, reject_two_values
from oomb.cli.train.settings import TYPES, own_fields
from oomb.config import Config
from oomb.models import presets
from oomb.utils import dtypes
from oomb.utils.units import parse_tokens

EXIT_NOT_TRUSTED = 1
EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
PRESET_NAMES = ", ".join(presets.PRESETS)


@contextmanager
def one_clear_message() -> Iterator[None]:
    """Errors a person can act on are one message and exit code 2; OOMB_DEBUG=1 shows the traceback as well. So are all
    others, with the traceback: exit code 1 is for gradients that were compared and found wrong."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]ended by Ctrl-C[/]")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or type(error).__name__, error)
    except Exception as error:
        # torch.OutOfMemoryError; importing torch here to name it would slow every command.
        if type(error).__name__ == "OutOfMemoryError":
            reason = str(error).splitlines()[0]
            _fail(f"the GPU ran out of memory ({reason}); lower --chunk_size, the batch or the context", error)
        _fail(f"{type(error).__name__}: {error}", error, unexpected=True)


def _fail(message: str, error: Exception, *, unexpected: bool = False) -> NoReturn:
    if unexpected or os.environ.get("OOMB_DEBUG"):
        traceback.print_exception(error)
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_BAD_INPUT) from error


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Warnings, such as that of a checkpoint that could not be written, as the other messages are: one yellow line,
    above a panel and not across it, without the place in the source that Python puts before it."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def line(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
            if category is UserWarning:
                text = escape(" ".join(str(message).split()))
                console.print(f"[yellow]{text}[/]", highlight=False, soft_wrap=True)
            else:
                show(message, category, *place, **options)

        warnings.showwarning = line
        yield


def quiet() -> None:
    """transformers logs advice on standard error that does not apply to a run of ours, and would tear the bar. The
    hub's client logs every attempt to reach it. What libraries call by names that others of them have given up is
    nothing that a person at a terminal could mend."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


class CommandOfSettings(TyperCommand):
    """Takes other names of settings, but not two values of one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with one_clear_message():
            reject_two_values(args)
        return super().parse_args(ctx, args)


def train_options(*names: str) -> dict[str, tuple[Any, Any]]:
    """Settings of `oomb train` as options of a command: by name, the annotation that typer reads and the default."""
    options: dict[str, tuple[Any, Any]] = {}
    for described in own_fields():
        name, (kind, optional) = described.name, TYPES[described.name]
        if name not in names:
            continue
        meaning = described.metadata["help"]
        if name == "model_name_or_path":
            meaning += f" The presets: {PRESET_NAMES}."
        is_text = described.metadata["kind"] == "tokens"
        option = typer.Option(
            f"--{name}/--no_{name}" if kind is bool else f"--{name}",
            *(f"--{alias}" for alias in ALIASES.get(name, ())),
            help=meaning,
            rich_help_panel=described.metadata["panel"],
            show_default=kind is not bool,
        )
        plain: Any = str if is_text else kind
        annotation: Any = Annotated[plain | None if optional else plain, option]
        options[name] = annotation, str(described.default) if is_text else described.default
    return options


def engine_settings(options: dict[str, Any]) -> dict[str, Any]:
    """A command's options as settings of `oomb.Config`, checked."""
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen["chunk_size"] = parse_tokens(chosen["chunk_size"], "--chunk_size")
    words: dict[str, Any] = {"true": True, "false": False, **dtypes.SHORT_DTYPES}
    chosen = {
        name: words.get(value.lower(), value) if isinstance(value, str) else value for name, value in chosen.items()
    }
    Config(**chosen)
    return chosen
