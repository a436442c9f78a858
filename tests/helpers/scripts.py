"""Runs the scripts of `examples/`, and reads what their trainers have logged."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
# As for `python examples/NAME.py`: examples import `toy` from their own folder.
sys.path.insert(0, str(EXAMPLES))

toy = import_module("toy")


def run_example(name: str, *swaps: tuple[str, str]) -> dict[str, Any]:
    """The names that the script leaves behind, with pieces of its text swapped, each of which is there once."""
    source = (EXAMPLES / f"{name}.py").read_text()
    for old, new in swaps:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


def logged(trainer: Any) -> list[dict[str, float]]:
    """All that was logged, but for times."""
    return [
        {key: value for key, value in record.items() if not re.search("runtime|per_second|flos", key)}
        for record in trainer.state.log_history
    ]


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)
