"""A small engine and a text, for the tests of evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.models import presets

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}


@pytest.fixture
def engine() -> Engine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(presets.preset_config("demo", **SMALL), dtype=torch.float32)
    return Engine(model, Config(chunk_size=100, page_size=20))


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Lines of text as bytes."""
    return torch.tensor(list(b"the quick brown fox jumps over the lazy dog\n" * 200))
