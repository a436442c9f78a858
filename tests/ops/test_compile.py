"""Compile all kernels for a GPU without one. Triton's interpreter accepts code that its compiler refuses, such as a
comparison of 8-bit floats."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

pytest.importorskip("triton")

PAGES = {"pages": "*i32", "count": "*i32", "addresses": "*i64"}
SIZES = {"GROUP": 7, "PAGE": 128, "QUERY_TILE": 128, "TILE_D": 128, "TILE_V": 128, "ALIGNED": 8, "PRECISION": "ieee"}
LISTS = {"places": "*i64", "selected": "*i16", "scale": "fp32", "scale_log2": "fp32"}
QUERIES = dict.fromkeys(("q", "dout", "out", "own", "dq", "base", "grads"), "*bf16")
ROWS = dict.fromkeys(("lse", "own_lse", "delta"), "*fp32")
INVERTED = dict.fromkeys(("readers", "reader_ends", "order"), "*i32") | {"offsets": "*i64", "grad_offsets": "*i64"}
FORWARD = {**SIZES, "TILE_Q": 128, "TILE_K": 128, "STAGES": 2}

CASES: list[tuple[str, dict[str, str], dict[str, Any], int]] = [
    ("page_attention.forward_kernel", {**LISTS, **QUERIES, **ROWS}, {**FORWARD, "PADDED": False, "GAPS": False}, 8),
    ("page_attention.forward_kernel", {**LISTS, **QUERIES, **ROWS}, {**FORWARD, "PADDED": True, "GAPS": True}, 8),
    ("page_attention.dq_kernel", {**LISTS, **QUERIES, **ROWS}, {**FORWARD, "PADDED": False, "GAPS": False}, 8),
    (
        "page_attention.dkv_kernel",
        {**LISTS, **QUERIES, **ROWS, **INVERTED, "touched": "*u8"},
        {**FORWARD, "NUM_HEADS": 28, "TILE_Q": 64, "PADDED": False, "DROPPED": 16, "GRAD_ALIGNED": 8},
        8,
    ),
    ("page_copy.mark_pages", {"places": "*i64", "selected": "*i16"}, {"TILE": 1024}, 4),
    *(
        ("page_copy.assign_slots", {**PAGES, "places": "*i64", "moved": "*i64", "flags": flags, "buffer": "i64"},
         {"TILE": 1024}, 4)
        for flags in ("*u8", "*i16")
    ),
    *(
        ("page_copy.copy_pages", {**PAGES, "buffer": "*i32", "touched": flags}, {"OUT": is_out, "TILE": 4096}, 16)
        for is_out, flags in ((False, "*u8"), (False, "*i16"), (True, "*i32"))
    ),
    *(
        ("page_copy.dequantize_pages", {**PAGES, "buffer": "*bf16", "flags": flags},
         {"OUT": is_out, "DROPPED": dropped, "TILE_S": 16, "TILE_H": 8, "TILE_D": 128}, 16)
        for is_out, dropped, flags in ((False, 16, "*u8"), (False, 0, "*i16"), (True, 0, "*i32"))
    ),
]  # fmt: skip
"""Kernel, arguments that are not int32, constants and warps, as the launchers pass them for a bfloat16 model whose page
means are 8-bit floats."""

MOVERS = ("copy_pages", "dequantize_pages")
ALIGNED_SIZES = (
    "page_words", "page_size", "k_size", "v_size", "row_bytes", "value_at", "scale_at", "wide_row", "wide_value_at"
)  # fmt: skip
"""Arguments of the kernels that move pages which are multiples of 16 in most models: then 16 bytes move at a time."""

ROOT = Path(__file__).parents[2]


def compile_all() -> None:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for path, types, constants, num_warps in CASES:
        module, name = path.split(".")
        kernel = getattr(importlib.import_module(f"oomb.ops.triton_kernels.{module}"), name)
        names = list(inspect.signature(kernel.fn).parameters)
        kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        values = {(names.index(n),): value for n, value in constants.items() if n in names}
        exact = [n for n in names if kinds[n].startswith("*") or (name in MOVERS and n in ALIGNED_SIZES)]
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in exact}
        source = ASTSource(kernel, kinds, values, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        if name in MOVERS:
            for way in ("ld", "st"):
                assert f"{way}.global.v4.b32" in built.asm["ptx"], f"{path} does not move 16 bytes at a time"
        print(path, flush=True)


@pytest.mark.timing
def test_every_kernel_compiles_for_an_h200() -> None:
    """Compile in a separate process, since this one uses the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(here), str(ROOT / "tests" / "helpers")])
    program = "import test_compile; test_compile.compile_all()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, cwd=here, env=environment
    )
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}:\n{done.stderr[-3000:]}"
    assert len(done.stdout.split()) == len(CASES)
