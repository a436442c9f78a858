"""Fixtures of the tests on several ranks."""

from __future__ import annotations

import pytest
from rank_runs import RUN, step_losses
from ranks import finish, torchrun


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run in one process."""
    cwd = tmp_path_factory.mktemp("one")
    process = torchrun(1, *RUN, "--gradient_accumulation_steps", "4", "--output_dir", "out", cwd=cwd)
    printed = finish(process)
    assert process.returncode == 0, printed[-5000:]
    return step_losses(cwd / "out")
