"""Run functions of a module on several ranks: `torchrun ranks.py MODULE` calls each `case_*` with the mesh.

The processes are started once for all cases, since importing transformers takes most of the time.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import HANG_S

HELPERS = Path(__file__).parent
ROOT = HELPERS.parent.parent


def torchrun(
    world_size: int, *arguments: str | Path, cwd: Path, restarts: int = 0, **env: str
) -> subprocess.Popen[str]:
    """Start a script, or `-m` and a module, on several ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["--max-restarts", str(restarts), *map(str, arguments)]
    paths = os.pathsep.join(map(str, (ROOT, HELPERS, ROOT / "tests" / "distributed", ROOT / "examples")))
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **settings, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str], limit_s: float = HANG_S) -> str:
    """Wait for a process, and return what it printed."""
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {limit_s:.0f} s:\n{process.communicate()[0][-5000:]}") from None


def run_cases(module: str, world_size: int, cwd: Path, **env: str) -> None:
    """Run all cases of a module, and fail with the output of the first that fails."""
    process = torchrun(world_size, Path(__file__), module, cwd=cwd, **env)
    printed = finish(process)
    cases = [name for name in vars(importlib.import_module(module)) if name.startswith("case_")]
    assert process.returncode == 0, printed[-8000:]
    assert cases and all(f"passed {name}\n" in printed for name in cases), printed[-8000:]


def main(module: str) -> None:
    import torch

    import oomb

    torch.set_num_threads(1)
    mesh = oomb.init_mesh("cpu")
    cases: dict[str, Callable[[Any], None]] = {
        name: case for name, case in vars(importlib.import_module(module)).items() if name.startswith("case_")
    }
    for name, case in cases.items():
        torch.manual_seed(mesh.get_rank())
        case(mesh)
        # The next case starts when all ranks have passed this one.
        torch.distributed.barrier()
        if mesh.get_rank() == 0:
            print(f"passed {name}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
