"""Runs the command line inside of the test process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from oomb import cli


def invoke(*arguments: str | Path, columns: int = 200) -> Result:
    # Wide, so that no message is broken over two lines where a test looks for it.
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, [str(a) for a in arguments])
