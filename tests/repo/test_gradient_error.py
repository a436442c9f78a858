"""benchmarks/gradient_error.py on the smallest preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradient_error
import pytest
from scripts import run_benchmark


def call(out: Path, variants: str) -> Any:
    step = ["--model", "demo", "--context", "256", "--chunk-size", "64", "--variants", variants, "--out", str(out)]
    return run_benchmark(gradient_error.main, *step)


def test_int8_pages_are_a_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, engine = [], gradient_error.Engine

    def note(network: Any, config: Any) -> Any:
        configs.append((config.kv_dtype, config.grad_dtype))
        return engine(network, config)

    monkeypatch.setattr(gradient_error, "Engine", note)
    done = call(tmp_path / "report.json", "default,int8-kv,int8-pages")
    assert done.exit_code == 0, done.output
    assert configs == [("auto", "auto"), ("int8", "auto"), ("int8", "int8")]
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert list(summary) == ["standard", "oomb default", "oomb int8-kv", "oomb int8-pages"]
    plain, keys, pages = (summary[f"oomb {name}"]["median"] for name in ("default", "int8-kv", "int8-pages"))
    assert len({plain, keys, pages}) == 3 and max(keys, pages) < 0.1


def test_an_unknown_variant_is_refused_before_loading_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_error, "load_model", lambda *_, **__: pytest.fail("this takes long"))
    done = call(tmp_path / "report.json", "default,int4")
    assert done.exit_code == 2 and "int4" in done.output and "default" in done.output
