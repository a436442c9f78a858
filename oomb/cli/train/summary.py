"""What a run tells the user at its end."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oomb.cli.train.settings import DEMO, TrainSettings
from oomb.cli.train.yaml_file import CONFIG
from oomb.config import Config
from oomb.models import load, presets


def resume_hint(output_dir: Path) -> str:
    """After a stop: the command that does the rest."""
    config = shlex.quote(str(output_dir / CONFIG))
    return f"To go on:\n  {program()} train {config} --resume_from_checkpoint"


def what_next(settings: TrainSettings, num_tokens: int, model: Any, saved_to: Path) -> str:
    """After a whole run: commands worth a try."""
    if settings.use_peft:
        return _with_adapters(settings, saved_to)
    longer = settings.max_length * 2
    positions = load.max_positions(model.config)
    is_possible = num_tokens >= longer and (positions is None or longer <= positions)
    context = longer if is_possible else settings.max_length
    where = {"device": settings.device, "dtype": settings.dtype}
    engine = {key: value for key, value in settings.engine.items() if key in ("kernels", "fuse", "keep_attention")}
    go_on = {"model_name_or_path": str(saved_to), "dataset": settings.dataset, "learning_rate": settings.learning_rate}
    go_on |= {"packing": settings.packing, "dataset_join": settings.dataset_join}
    go_on |= {"max_length": context, "max_steps": 10, **where, **settings.engine}
    trust = " --trust_remote_code" if settings.trust_remote_code else ""
    verify = f"verify {shlex.quote(str(saved_to))}{_options({**where, **engine})}{trust}"
    commands = {
        verify: "check its gradients on this machine",
        f"train{_options(go_on)}{trust}": "go on at twice the context" if is_possible else "go on",
    }
    if settings.model_name_or_path == DEMO:
        commands["train --dataset FOLDER"] = "the same on your own text"
    return "\n".join(["Next:", *(f"  {program()} {command}\n      {what}" for command, what in commands.items())])


def _with_adapters(settings: TrainSettings, saved_to: Path) -> str:
    if presets.is_preset(settings.model_name_or_path):
        return (
            f"The adapters belong to random weights that are not saved: {settings.model_name_or_path} is a preset. "
            "They show speed and memory; name a folder or a hub id to train something to keep."
        )
    folder = repr(str(saved_to))
    merged = repr(str(saved_to.with_name("merged")))
    lines = [
        "To load the adapters on top of the model, or to merge them into it:",
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
    """As they are typed; those that are the default anyway are left out."""
    defaults = {**asdict(TrainSettings()), **asdict(Config())}
    text = ""
    for name, value in chosen.items():
        if value is not None and value != defaults[name]:
            text += f" --{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"
    return text


def program() -> str:
    """How this program is called from the user's shell: by its name where that is found, else by its path."""
    if shutil.which("oomb"):
        return "oomb"
    script = Path(sys.executable).parent / "oomb"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m oomb"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
