"""Define the program `oomb` and its commands."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from oomb import __version__
from oomb.cli.bench import bench
from oomb.cli.demo import demo
from oomb.cli.eval.command import eval_
from oomb.cli.plan.command import plan
from oomb.cli.report.command import report
from oomb.cli.tokenize import tokenize
from oomb.cli.train.command import train
from oomb.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train Hugging Face causal language models on very long contexts with exact gradients, on one GPU or several."
    "\n\n"
    "[bold]oomb demo[/] trains a small built-in example and compares it with standard training. "
    "[bold]oomb train[/] trains on your data. [bold]oomb tokenize[/] prepares large datasets. "
    "[bold]oomb plan[/] predicts memory and time and "
    "suggests settings that fit. [bold]oomb verify MODEL[/] checks the gradients of your own model. "
    "[bold]oomb bench[/] compares time and memory with standard training. [bold]oomb eval MODEL[/] measures how a "
    "model uses a long context. [bold]oomb report RUN[/] writes a page about a training run.",
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"oomb {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, train, tokenize, plan, verify, bench, eval_, report):
    # The help is the docstring, with each paragraph on one line for the terminal to wrap.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    name, kind = command.__name__.rstrip("_"), getattr(command, "command_class", None)
    app.command(name, help=text, cls=kind)(command)


if __name__ == "__main__":
    app()
