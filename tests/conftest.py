"""What all tests share: one thread per worker, a fixed seed, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models are tiny: a second thread costs more than it brings, and the test runner has its own workers.
torch.set_num_threads(1)

# A clone's tests give one answer. To look for new examples instead: HYPOTHESIS_PROFILE=search make test
# How long an example takes to draw says how busy the machine is, and nothing about the test.
no_clock: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, **no_clock)
settings.register_profile("search", print_blob=True, **no_clock)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Fills every `torch.empty` with NaN, so that a read before a write cannot pass by luck."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """RMSNorm and rotary tables in float64 too: chunked and whole agree to rounding, so 1e-10 is a fair demand."""
    from families import float64_throughout

    with float64_throughout():
        yield


@pytest.fixture
def model() -> Any:
    """A tiny llama."""
    from families import build

    return build("llama")


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `save_pretrained` wrote."""
    from oomb.models.load import load_model

    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    load_model("demo", device="cpu", dtype="float32").save_pretrained(folder)
    return folder


@pytest.fixture
def tiers() -> Any:
    """Page memory on the CPU."""
    from oomb.memory.tiers import Tiers

    return Tiers(torch.device("cpu"))


@pytest.fixture(params=[7, 4 * 7], ids=["small segments", "large segments"])
def segment_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One chunk of `stores`, or four."""
    from oomb.memory import rows as rows_module

    monkeypatch.setattr(rows_module, "SEGMENT_SIZE", request.param)
    return request.param


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a home and a folder for temporary files that are the test's own."""
    for name in ("work", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    Path("text.txt").write_text(Path(argparse.__file__).read_text())
    return tmp_path
