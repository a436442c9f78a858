"""Make the README's table of what fits on which GPU, as `oomb plan` predicts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import markdown_table

from oomb.config import Config
from oomb.planner.forecast import forecast_step
from oomb.planner.hardware import machine_named
from oomb.planner.plan import shape_for
from oomb.utils.units import GIB

MODEL = "qwen2.5-7b"
MACHINES = (("RTX 4090", 64), ("A100-80GB", 256), ("H100", 256), ("H200", 128), ("B200", 512))
"""GPU and GiB of free host memory."""


@dataclass(frozen=True)
class Way:
    """One way to train, with its heading in the table."""

    heading: str
    lora: bool
    optimizer: str
    settings: dict[str, Any]


WAYS = (
    Way("LoRA, exact", True, "adamw", {}),
    Way("LoRA, sparse, int8 pages", True, "adamw", {"page_budget": 64, "kv_dtype": "int8", "grad_dtype": "int8"}),
    Way("full fine-tune, exact", False, "offloaded_adamw", {}),
)


def cards() -> str:
    """Return the longest context of every machine and way."""
    shapes = {lora: shape_for(MODEL, lora=lora) for lora in (True, False)}

    def longest(machine: tuple[str, int], way: Way) -> str:
        gpu, host = machine
        forecast = forecast_step(
            shapes[way.lora],
            Config(**way.settings),
            machine_named(gpu, host * GIB),
            length=1 << 16,
            optimizer=way.optimizer,
        )
        return f"{round(forecast.longest_context, -3):,}" if forecast.longest_context else "does not fit"

    columns: dict[str, Any] = {"GPU": lambda machine: machine[0], "host memory": lambda machine: f"{machine[1]} GiB"}
    for way in WAYS:
        columns[way.heading] = lambda machine, way=way: longest(machine, way)
    return "\n".join(
        [
            "Longest context of one sequence for Qwen2.5-7B in bfloat16, in tokens, as predicted by `oomb plan` from "
            "GPU memory and free host memory. By default oomb leaves a tenth of the free host memory alone:",
            "",
            *markdown_table(columns, MACHINES, left=("GPU",)),
        ]
    )
