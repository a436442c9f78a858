"""LoRA adapters without their base model, as `oomb train --use_peft` saves them: evaluated on top of it, not merged."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomb.models import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def base_of(name_or_path: str) -> str | None:
    """The model that the adapters of a folder were trained on; None where the folder or hub id is a whole model. What
    is missing is told here, before anything is loaded."""
    if not load.holds_adapters(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise ValueError(f"{folder} holds {CONFIG} and no weights of adapters: {' or '.join(WEIGHTS)} is missing")
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{folder} holds LoRA adapters, and to read them needs peft: pip install peft")
    try:
        base = json.loads((folder / CONFIG).read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read ({type(error).__name__}: {error})") from error
    if not base:
        raise ValueError(
            f"{folder} holds LoRA adapters and {CONFIG} names no base model: they were trained on random weights, a "
            "preset's, which are not saved"
        )
    try:
        load.check_model_name(str(base))
    except ValueError as error:
        raise ValueError(
            f"{folder} holds LoRA adapters of {str(base)!r}, which is not here: call oomb eval where it is, or write "
            f"its place into {folder / CONFIG} as base_model_name_or_path ({error})"
        ) from error
    return str(base)


def with_adapters(model: PreTrainedModel, folder: str) -> Any:
    """The model with the adapters of a folder on top."""
    from peft import PeftModel

    path = Path(folder).expanduser()
    try:
        return PeftModel.from_pretrained(model, str(path), torch_device=str(model.device))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the adapters in {folder} do not load on top of their base model: {reason}") from error
