"""Public names have docstrings with an example, and the examples in all docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
from documents import ROOT

import oomb
from oomb.trainers.dpo import DPOMixin
from oomb.trainers.sft import SFTMixin

# TRL's subclasses are created on import, with the docstrings of these. Their examples load a model from the hub.
TRL = {"DPOTrainer": DPOMixin, "SFTTrainer": SFTMixin}
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "oomb").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", oomb._HOME)
def test_public_names_have_docstrings_with_an_example(name: str) -> None:
    public = TRL.get(name) or getattr(importlib.import_module(oomb._HOME[name]), name)
    text = inspect.getdoc(public) or ""
    assert len(text) > 100, name
    if not (inspect.isclass(public) and issubclass(public, Exception)):
        assert "Args:" in text or name == "Config", name
        assert ("```python" if name in TRL else ">>> ") in text, name


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0 and results.failed == 0
