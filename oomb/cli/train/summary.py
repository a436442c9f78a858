"""Summarize a run at its end: results, where they are, and commands to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from oomb.cli.train.schema import as_text
from oomb.cli.train.settings import TrainSettings
from oomb.cli.train.state import RunInfo, RunState
from oomb.cli.train.yaml_file import CONFIG
from oomb.config import Config
from oomb.models import load, presets
from oomb.utils.metrics import MemoryMeter
from oomb.utils.units import gib, seconds


def results_table(
    state: RunState,
    info: RunInfo,
    meter: MemoryMeter,
    *,
    held_out: tuple[float | None, float | None],
    wall_s: float,
    places: dict[str, Path],
) -> Table:
    """Return the results of a run as a table.

    Args:
        state: State of the run.
        info: Facts about the run.
        meter: Meter of peak memory.
        held_out: Held-out loss before and after; None if it was not computed.
        wall_s: Seconds the run took.
        places: What was written where, by name.
    """
    table = Table(title="Done" if state.is_complete else "Stopped", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    last = state.losses[-5:]
    if last:
        table.add_row("training loss", f"{state.losses[0]:.4f} → {mean(last):.4f} (mean of the last {len(last)})")
    if held_out != (None, None):
        before, after = ("not computed" if loss is None else f"{loss:.4f}" for loss in held_out)
        table.add_row("held-out loss", f"{before} → {after}")
    num_steps, speed = len(state.step_times), state.tokens_per_second
    table.add_row("steps", f"{num_steps}, up to step {state.step}" if state.first_step else f"{num_steps}")
    table.add_row("tokens", f"{state.num_tokens:,} ({round(state.num_tokens / max(num_steps, 1)):,} a step)")
    mfu = info.mfu(speed)
    table.add_row("speed", f"{speed:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}"))
    table.add_row("time", seconds(wall_s))
    table.add_row(meter.label, gib(meter.peak_bytes))
    for name, path in places.items():
        table.add_row(name, str(path))
    return table


def resume_hint(output_dir: Path) -> str:
    """Return the command that resumes a stopped run."""
    config = shlex.quote(str(output_dir / CONFIG))
    return f"To resume:\n  {program()} train {config} --resume_from_checkpoint"


def what_next(settings: TrainSettings, num_tokens: int, model: Any, saved_to: Path) -> str:
    """Return commands to try after a complete run."""
    if settings.use_peft:
        return _with_adapters(settings, saved_to)
    longer = settings.max_length * 2
    positions = load.max_positions(model.config)
    is_possible = num_tokens >= longer and (positions is None or longer <= positions)
    context = longer if is_possible else settings.max_length
    where = {"device": settings.device, "dtype": settings.dtype}
    engine = {key: value for key, value in settings.engine.items() if key in ("kernels", "fuse", "keep_attention")}
    further: dict[str, Any] = {"model_name_or_path": str(saved_to)}
    further |= {key: getattr(settings, key) for key in ("dataset", "learning_rate", "packing", "dataset_join")}
    further |= {"max_length": context, "max_steps": 10, **where, **settings.engine}
    trust = " --trust_remote_code" if settings.trust_remote_code else ""
    verify = f"verify {shlex.quote(str(saved_to))}{_options({**where, **engine})}{trust}"
    commands = {
        verify: "check its gradients on this machine",
        f"train{_options(further)}{trust}": f"train it further{', at twice the context' if is_possible else ''}",
    }
    if settings.is_demo:
        commands["train --dataset FOLDER"] = "train on your own text"
    return "\n".join(["Next:", *(f"  {program()} {command}\n      {what}" for command, what in commands.items())])


def _with_adapters(settings: TrainSettings, saved_to: Path) -> str:
    if presets.is_preset(settings.model_name_or_path):
        return (
            f"These adapters are of no use: {settings.model_name_or_path} is a preset, and its random weights are not "
            "saved. The run shows speed and memory; to train something to keep, name a folder or a hub id."
        )
    folder = repr(str(saved_to))
    merged = repr(str(saved_to.with_name("merged")))
    lines = [
        "To load the model with its adapters, or to merge them into it:",
        "  from peft import AutoPeftModelForCausalLM",
        f"  model = AutoPeftModelForCausalLM.from_pretrained({folder})",
        f"  model.merge_and_unload().save_pretrained({merged})",
    ]
    if any(saved_to.glob("tokenizer*")):
        lines += [
            "  from transformers import AutoTokenizer",
            f"  AutoTokenizer.from_pretrained({folder}).save_pretrained({merged})",
        ]
    return "\n".join(lines)


def _options(chosen: dict[str, Any]) -> str:
    """Return flags for the values that are not the default."""
    defaults = {**asdict(TrainSettings()), **asdict(Config())}
    text = ""
    for name, value in chosen.items():
        if value is not None and value != defaults[name]:
            text += f" --{name} {shlex.quote(as_text(value))}"
    return text


def program() -> str:
    """Return how to call this program from the user's shell: by name if it is on the path, else by its location."""
    if shutil.which("oomb"):
        return "oomb"
    script = Path(sys.executable).parent / "oomb"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m oomb"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
