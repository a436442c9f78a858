"""The command `oomb plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oomb.cli.errors import EXIT_DOES_NOT_FIT, one_clear_message, quiet
from oomb.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    PRESET_NAMES,
    Dtype,
    Gpu,
    Host,
    OptimizerStates,
    Plot,
    train_options,
    with_engine_options,
    with_options,
)
from oomb.cli.plotting import check_picture
from oomb.cli.train.schema import engine_settings
from oomb.models import load
from oomb.utils.files import write_text
from oomb.utils.units import parse_tokens


@with_engine_options("kernels")
@with_options("loading", train_options("trust_remote_code"))
def plan(
    model_name_or_path: Annotated[
        str,
        typer.Option(
            "--model_name_or_path",
            "--model",
            help=f"A folder with a config.json, a hub id, or a preset: {PRESET_NAMES}. No weights are read.",
            rich_help_panel=MODEL,
        ),
    ] = "qwen2.5-7b",
    context: Annotated[
        str, typer.Option("--context", help="Tokens per sequence, as in 128K or 1M.", rich_help_panel=DATA)
    ] = "128K",
    batch_size: Annotated[
        int, typer.Option("--batch_size", help="Sequences computed at once.", rich_help_panel=DATA)
    ] = 1,
    gpu: Gpu = None,
    host: Host = None,
    lora: Annotated[
        bool,
        typer.Option("--lora", help="Train rank-16 LoRA on all linear layers. Needs peft.", rich_help_panel=MODEL),
    ] = False,
    optimizer: OptimizerStates = "adamw",
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the plan to this JSON file.", rich_help_panel=OUTPUT)
    ] = None,
    plot: Plot = None,
    dtype: Dtype = "bfloat16",
    *,
    loading: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Predict memory and time of a training step, for this machine or another. Needs no GPU and no weights.

    [bold]oomb plan --model qwen2.5-7b --context 1M --gpu H200 --host 512GiB[/]

    --gpu and --host describe the machine; --gpu_memory and --host_memory are settings of training on it. If the context
    does not fit, the smallest change that makes it fit is printed, or the longest context within reach.

    Exit code: 0 if it fits as asked, 1 if it does not, 2 for bad input.
    """
    with one_clear_message():
        settings = engine_settings(engine)
        length = parse_tokens(context, "--context")
        load.check_model_name(model_name_or_path)
        quiet()
        from oomb.cli.plan.table import as_dict, memory_table, notes
        from oomb.planner.hardware import find_machine
        from oomb.planner.plan import plan_step

        if plot is not None:
            check_picture(plot, "--plot")
        report = plan_step(
            model_name_or_path,
            length,
            find_machine(gpu, host),
            batch_size=batch_size,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            settings=settings,
            **loading,
        )
        console = Console()
        console.print(memory_table(report))
        for line in notes(report):
            console.print(line, highlight=False, soft_wrap=True)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_text(output, json.dumps(as_dict(report), indent=1) + "\n")
        if plot is not None:
            from oomb.cli.plan.plot import plot as write_plot

            write_plot(report, plot)
        for path in filter(None, (output, plot)):
            console.print(f"written to {path}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.forecast.fits else EXIT_DOES_NOT_FIT)
