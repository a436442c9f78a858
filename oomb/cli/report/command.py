"""Define the command line of `oomb report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomb.cli.errors import one_clear_message
from oomb.cli.options import DATA, OUTPUT


def report(
    run: Annotated[Path, typer.Argument(help="The output_dir of oomb train.")],
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            help="A JSON file from oomb eval of the model before training, if the run recorded no evaluation.",
            rich_help_panel=DATA,
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option("--after", help="The same for the model after training.", rich_help_panel=DATA),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where to write the page. Default: RUN/report.html.", rich_help_panel=OUTPUT),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png",
            help="Also draw the main charts to this file (.png, .svg or .pdf). Needs matplotlib.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Turn a training run into an HTML page: loss, speed, memory, evaluation, samples, settings, machine.

    [bold]oomb report runs/demo[/]

    The page is one self-contained file, charts included, that loads nothing from the network. You can write it during
    training, after a crash, and again at any time.
    """
    with one_clear_message():
        from oomb.cli.plotting import check_picture
        from oomb.cli.report.page import write_report
        from oomb.cli.report.picture import write_picture

        if png is not None:
            check_picture(png, "--png")
        console = Console()
        page = write_report(run, before=before, after=after, output=output)
        console.print(f"written to {page}", highlight=False, markup=False, soft_wrap=True)
        if png is not None:
            picture = write_picture(run, png, before=before, after=after)
            console.print(f"written to {picture}", highlight=False, markup=False, soft_wrap=True)
