"""Run the command line in the test process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from oomb.cli import main

TOY_RUN = [
    "--dataset", "text.txt", "--max_length", "256", "--chunk_size", "64", "--device", "cpu", "--max_eval_samples", "0",
    "--sample_tokens", "0", "--no_report", "--output_dir", "out",
]  # fmt: skip
"""Flags of `oomb train` on a small text, without evaluation, sample or report."""


def invoke(*arguments: str | Path, columns: int = 200) -> Result:
    # Wide, so that no message is wrapped.
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main.app, [str(a) for a in arguments])
