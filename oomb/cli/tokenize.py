"""`oomb tokenize`."""

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
from oomb.utils.units import parse_bytes


@with_options("loading", train_options("trust_remote_code"))
def tokenize(
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "--dataset_name",
            help="A text file, a folder of files, JSON lines (.jsonl, .jsonl.gz), Parquet, a folder that datasets "
            "saved, or stdlib: Python's own library source.",
            rich_help_panel=DATA,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", help="The folder to write, for --dataset of oomb train.", rich_help_panel=OUTPUT)
    ],
    tokenizer_name: Annotated[
        str | None,
        typer.Option(
            "--tokenizer_name",
            help="Folder or hub id of a tokenizer, or of a model that has one. Default: bytes, which presets read.",
            rich_help_panel=DATA,
        ),
    ] = None,
    join: Annotated[
        str, typer.Option("--join", help=FIELDS["dataset_join"].metadata["help"], rich_help_panel=DATA)
    ] = "documents",
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="Seed of the order of records. Files have an order of their own.", rich_help_panel=DATA
        ),
    ] = 42,
    num_proc: Annotated[
        int | None,
        typer.Option("--num_proc", help="Processes. Default: one for each core.", rich_help_panel=MACHINE),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard_size",
            help="Bytes of the source in a shard. When the command is killed, the shards begun are lost.",
            rich_help_panel=OUTPUT,
        ),
    ] = "16MiB",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start anew where the folder holds other tokens.", rich_help_panel=OUTPUT),
    ] = False,
    *,
    loading: dict[str, Any],
) -> None:
    """Tokenize a dataset once, in parallel, into a folder that [bold]oomb train --dataset FOLDER[/] reads from disk.

    [bold]oomb tokenize --tokenizer_name Qwen/Qwen2.5-0.5B --dataset texts/ --output tokens/[/]

    Killed or interrupted, the same command goes on from the last whole shard, and ends with the same bytes. A source,
    a tokenizer or an option that has changed since is named and refused. --dataset and --tokenizer_name are as for
    oomb train.
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
            console.print("finished shards are kept: the same command goes on from there")
            raise
        for note in result.notes:
            console.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
        shards = "shard" if result.num_shards == 1 else "shards"
        kept = f", {result.num_kept:,} of them there already" if result.num_kept else ""
        console.print(
            f"[bold]{escape(str(result.folder))}[/]: {result.num_tokens:,} tokens, {result.num_documents:,} documents, "
            f"{result.num_shards:,} {shards}{kept}; {time.monotonic() - started:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        how = "" if tokenizer_name is None else f" --model_name_or_path {shlex.quote(tokenizer_name)}"
        command = f"train{how} --dataset {shlex.quote(str(result.folder))}"
        console.print(f"Next:\n  oomb {escape(command)}", highlight=False, soft_wrap=True)


tokenize.command_class = SettingsCommand  # type: ignore[attr-defined]


def _num_cores() -> int:
    # Not every system says which of its cores this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shown(console: Console) -> AbstractContextManager[Callable[[int, int], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    from oomb.cli.progress import bytes_bar

    return bytes_bar(console, "tokenizing", "tokenized")
