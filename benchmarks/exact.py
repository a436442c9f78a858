"""Measure time and memory of exact training steps, with oomb and with standard training.

    python benchmarks/exact.py                 # all cases: about eight minutes on an H200
    python benchmarks/exact.py standard lora   # some of them

Writes exact_qwen2.5-7b_CASE.json for each case; the README's first table comes from "standard".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from common import OUT, Log

from oomb.eval import bench

MODEL = "qwen2.5-7b"
BOTH, OOMB = ("standard", "oomb"), ("oomb",)
CASES: dict[str, tuple[list[int], tuple[str, ...], dict[str, Any]]] = {
    "standard": ([2**15, 2**16, 2**17], BOTH, {"chunk_size": 8192}),
    "long": ([2**18], OOMB, {"chunk_size": 8192}),
    "lora": ([2**15], BOTH, {"chunk_size": 8192}),
    "unfused": ([2**15], OOMB, {"chunk_size": 8192, "fuse": "off"}),
}


def main(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = OUT,
) -> None:
    log = Log(width=130)
    for case in cases or CASES:
        contexts, modes, settings = CASES[case]
        settings = dict(settings)
        report = bench.run(
            MODEL,
            contexts,
            modes=modes,
            chunk_size=settings.pop("chunk_size"),
            lora=case == "lora",
            settings=settings,
            on_row=lambda row: log(str(row)),
        )
        report.save(out / f"exact_{MODEL}_{case}.json")
        log.console.print(report.table())


if __name__ == "__main__":
    typer.run(main)
