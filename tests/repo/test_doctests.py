"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest
from documents import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "oomb").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


def test_public_classes_have_examples() -> None:
    homes = {"oomb.engine.engine", "oomb.engine.optim", "oomb.trainers.finite", "oomb.trainers.trainer"}
    assert homes <= set(MODULES)
