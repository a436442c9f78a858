"""Run the scripts of `examples/` and `benchmarks/` in the test process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import toy as toy
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *swaps: tuple[str, str]) -> dict[str, Any]:
    """Run a script and return its globals. Each swap replaces a piece of its text, which must occur exactly once."""
    source = (EXAMPLES / f"{name}.py").read_text()
    for old, new in swaps:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


def run_benchmark(main: Callable[..., None], *arguments: str | int | float | Path) -> Result:
    """Call the `main` of a benchmark script as its command line would."""
    app = typer.Typer()
    app.command()(main)
    # Wide, so that no message is broken over two lines where a test looks for it.
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, [str(argument) for argument in arguments])


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return everything the trainer logged, except timings."""
    return [
        {key: value for key, value in record.items() if not re.search("runtime|per_second|flos", key)}
        for record in trainer.state.log_history
    ]


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)
