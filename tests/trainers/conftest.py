"""Fixtures of the tests of trainers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A toy model and its tokenizer."""
    import scripts  # noqa: F401  (puts examples/ on the path)
    import toy

    return toy.model_folder(str(tmp_path_factory.mktemp("toy") / "model"))
