"""Show errors and warnings of commands as one clear message, and keep libraries quiet."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from oomb.config import SettingError

EXIT_NOT_TRUSTED = EXIT_DOES_NOT_FIT = EXIT_INCOMPLETE = 1
"""Gradients differ; a plan does not fit; training ended early on an error, or the model was saved elsewhere."""
EXIT_BAD_INPUT = 2
EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED = 129, 130, 143


@contextmanager
def one_clear_message() -> Iterator[None]:
    """Turn errors into one message and exit code 2.

    Unexpected errors come with a traceback, and so do all others if OOMB_DEBUG=1 is set. Exit code 1 has other
    meanings, such as wrong gradients.
    """
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]interrupted by Ctrl-C[/]")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except SettingError as error:
        _fail(f"--{error}", error)
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or type(error).__name__, error)
    except Exception as error:
        if type(error).__name__ == "RankFailed":
            _fail(str(error), error)
        # torch.OutOfMemoryError, by its name: importing torch here would slow down every command.
        if type(error).__name__ == "OutOfMemoryError":
            reason = str(error).splitlines()[0]
            _fail(f"the GPU ran out of memory ({reason}); lower --chunk_size, the batch or the context", error)
        _fail(f"{type(error).__name__}: {error}", error, unexpected=True)


def _fail(message: str, error: Exception, *, unexpected: bool = False) -> NoReturn:
    rank = int(os.environ.get("RANK", 0))
    if rank and getattr(error, "is_elsewhere", False):
        raise typer.Exit(EXIT_BAD_INPUT) from error  # rank 0 prints it
    if unexpected or os.environ.get("OOMB_DEBUG"):
        traceback.print_exception(error)
    where = f" (rank {rank})" if rank else ""
    Console(stderr=True).print(f"[bold red]error{where}:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_BAD_INPUT) from error


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Print warnings, such as that of a checkpoint that could not be written, as one yellow line above the panel."""
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
    """Silence logs and deprecation warnings of libraries: they would tear the panel, and users cannot act on them."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
