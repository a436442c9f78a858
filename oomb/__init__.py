"""Exact training of Hugging Face causal language models on very long contexts, on one GPU or several."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomb.config import Config
    from oomb.distributed.mesh import init_mesh
    from oomb.distributed.watch import RankFailed
    from oomb.engine.engine import Engine
    from oomb.engine.optim import OffloadedAdamW
    from oomb.memory.pool import OutOfPages
    from oomb.models.checks import UnsupportedModelError
    from oomb.trainers.dpo import DPOTrainer as DPOTrainer
    from oomb.trainers.finite import NonFiniteError
    from oomb.trainers.sft import SFTTrainer as SFTTrainer
    from oomb.trainers.trainer import Trainer

__version__ = "0.1.0"

# Loaded at first use: `oomb --help` and `import oomb` stay free of torch and transformers.
_HOME = {
    "Config": "oomb.config",
    "DPOTrainer": "oomb.trainers.dpo",
    "Engine": "oomb.engine.engine",
    "NonFiniteError": "oomb.trainers.finite",
    "OffloadedAdamW": "oomb.engine.optim",
    "OutOfPages": "oomb.memory.pool",
    "RankFailed": "oomb.distributed.watch",
    "SFTTrainer": "oomb.trainers.sft",
    "Trainer": "oomb.trainers.trainer",
    "UnsupportedModelError": "oomb.models.checks",
    "init_mesh": "oomb.distributed.mesh",
}

# Without `DPOTrainer` and `SFTTrainer`: `from oomb import *` must not ask for TRL.
__all__ = [
    "Config", "Engine", "NonFiniteError", "OffloadedAdamW", "OutOfPages", "RankFailed", "Trainer",
    "UnsupportedModelError", "__version__", "init_mesh",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oomb' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
