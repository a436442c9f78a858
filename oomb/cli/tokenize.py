"""Run `oomb tokenize`: tokenize a dataset once, show progress, and say what to run next."""

from __future__ import annotations

import functools
import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from oomb.cli.errors import one_clear_message, quiet
from oomb.cli.options import DATA, MACHINE, OUTPUT, SettingsCommand, train_options, with_options
from oomb.cli.train.schema import FIELDS
from oomb.models import load
from oomb.utils.units import count, parse_bytes, seconds


@with_options("loading", train_options("trust_remote_code"))
def tokenize(
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "--dataset_name",
            help="A text file, a folder of files, JSON lines (.jsonl, .jsonl.gz), Parquet, a folder saved by "
            "datasets, or stdlib: the source of Python's standard library.",
            rich_help_panel=DATA,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", help="Folder to write; pass it to oomb train as --dataset.", rich_help_panel=OUTPUT),
    ],
    tokenizer_name: Annotated[
        str | None,
        typer.Option(
            "--tokenizer_name",
            help="Folder or hub id of a tokenizer, or of a model with one. Default: bytes, for presets.",
            rich_help_panel=DATA,
        ),
    ] = None,
    join: Annotated[
        str, typer.Option("--join", help=FIELDS["dataset_join"].metadata["help"], rich_help_panel=DATA)
    ] = "documents",
    seed: Annotated[
        int,
        typer.Option("--seed", help="Seed for the order of records; files keep a fixed order.", rich_help_panel=DATA),
    ] = 42,
    num_proc: Annotated[
        int | None,
        typer.Option("--num_proc", help="Number of processes. Default: one per core.", rich_help_panel=MACHINE),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard_size",
            help="Source bytes per shard. If the command is killed, unfinished shards are lost.",
            rich_help_panel=OUTPUT,
        ),
    ] = "16MiB",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start over if the folder holds different tokens.", rich_help_panel=OUTPUT),
    ] = False,
    *,
    loading: dict[str, Any],
) -> None:
    """Tokenize a dataset once, in parallel, into a folder that [bold]oomb train --dataset FOLDER[/] reads from disk.

    [bold]oomb tokenize --tokenizer_name Qwen/Qwen2.5-0.5B --dataset texts/ --output tokens/[/]

    If it is killed or interrupted, run the same command again: it continues after the last finished shard and produces
    the same bytes. It refuses to continue if the source, the tokenizer or an option has changed. --dataset and
    --tokenizer_name are the same as for oomb train.
    """
    with one_clear_message():
        if tokenizer_name is not None and not Path(tokenizer_name).expanduser().is_dir():
            load.check_model_name(tokenizer_name)
        console = Console()
        quiet()
        from oomb.data import tokenize as tokenizing

        job = tokenizing.Job(
            dataset=dataset,
            output=output.expanduser(),
            tokenizer_name=tokenizer_name,
            load_tokenizer=None
            if tokenizer_name is None
            else functools.partial(load.load_tokenizer, tokenizer_name, **loading),
            join=join,
            seed=seed,
            shard_bytes=parse_bytes(shard_size, "--shard_size"),
            num_proc=num_proc if num_proc is not None else _num_cores(),
            overwrite=overwrite,
        )
        started = time.monotonic()
        try:
            with _shown(console) as report:
                result = tokenizing.tokenize(job, report)
        except KeyboardInterrupt:
            console.print("finished shards are kept: run the same command again to continue")
            raise
        for note in result.notes:
            console.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
        kept = f", {result.num_kept:,} of them kept" if result.num_kept else ""
        console.print(
            f"[bold]{escape(str(result.folder))}[/]: {count(result.num_tokens, 'token')}, "
            f"{count(result.num_documents, 'document')}, {count(result.num_shards, 'shard')}{kept}; "
            f"{seconds(time.monotonic() - started)}",
            highlight=False,
            soft_wrap=True,
        )
        how = "" if tokenizer_name is None else f" --model_name_or_path {shlex.quote(tokenizer_name)}"
        command = f"train{how} --dataset {shlex.quote(str(result.folder))}"
        console.print(f"Next:\n  oomb {escape(command)}", highlight=False, soft_wrap=True)


tokenize.command_class = SettingsCommand  # type: ignore[attr-defined]


def _num_cores() -> int:
    # macOS and Windows do not say which cores this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shown(console: Console) -> AbstractContextManager[Callable[[int, int], None]]:
    """Show a bar on a terminal, and an occasional line elsewhere."""
    from oomb.cli.progress import bytes_bar

    return bytes_bar(console, "tokenizing", "tokenized")
