"""`bench.run`: results of both modes, wrong gradients, MFU, and input errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.engine.engine import Engine
from oomb.eval import bench
from oomb.models.load import load_model
from oomb.models.presets import PRESETS
from oomb.models.probe import model_shape
from oomb.planner.flops import step_flops


@pytest.mark.timing
def test_both_modes_agree_and_are_reported(tmp_path: Path) -> None:
    seen: list[bench.BenchResult] = []
    shape = PRESETS["demo"]
    report = bench.run("demo", [96, 64], chunk_size=16, device="cpu", repeats=2, on_row=seen.append)
    assert [(row.mode, row.context) for row in report.rows] == [
        ("standard", 64), ("oomb", 64), ("standard", 96), ("oomb", 96),
    ]  # fmt: skip
    assert report.rows == seen and report.is_right
    for row in report.rows:
        assert row.problem is None and row.seconds and row.tokens_per_second == pytest.approx(row.context / row.seconds)
        assert len(row.all_seconds) == 2
        if row.mode == "oomb":
            # K, V, their gradients and attention outputs with float32 LSE of all chunks but the last, in whole pages of
            # 128 tokens and rows of multiples of 16 bytes.
            kv, out = shape["num_key_value_heads"] * shape["head_dim"], shape["num_attention_heads"] * shape["head_dim"]
            assert row.gpu_page_bytes == shape["num_hidden_layers"] * 128 * ((4 * kv + out) * 4 + 16)
            assert row.host_page_bytes == row.loaded_bytes == 0
            assert row.grad_difference is not None and row.grad_difference < 1e-4
    written = json.loads(report.save(tmp_path / "deep" / "report.json").read_text())
    assert written["rows"][1]["context"] == 64 and written["settings"]["chunk_size"] == 16
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert report.table().row_count == 4


def test_no_pages_are_allocated_while_standard_training_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    standard = bench.StandardStep.__call__

    def make_engine(*args: Any) -> Engine:
        engines.append(Engine(*args))
        return engines[-1]

    def check_no_pages(self: bench.StandardStep, ids: torch.Tensor) -> torch.Tensor:
        assert not engines[-1].allocator.tiers.arenas
        return standard(self, ids)

    monkeypatch.setattr(bench, "Engine", make_engine)
    monkeypatch.setattr(bench.StandardStep, "__call__", check_no_pages)
    report = bench.run("demo", [64, 96], chunk_size=16, device="cpu")
    assert [row.gpu_page_bytes > 0 for row in report.rows] == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["all", "one", "nan"])
def test_wrong_gradients_are_reported(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = bench.EngineStep.__call__

    def spoiled(self: bench.EngineStep, ids: torch.Tensor) -> torch.Tensor:
        loss = correct(self, ids)
        for name, parameter in self.engine.model.lm.named_parameters():
            assert parameter.grad is not None
            if wrong == "all" or (wrong == "one" and "down_proj" in name):
                parameter.grad *= 1.5
        return loss * float("nan") if wrong == "nan" else loss

    monkeypatch.setattr(bench.EngineStep, "__call__", spoiled)
    report = bench.run("demo", [64], chunk_size=16, device="cpu")
    assert not report.is_right
    assert report.rows[1].is_wrong and "WRONG" in (report.rows[1].problem or "")


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", None), (None, None)])
def test_mfu_is_a_share_of_the_peak_of_a_known_gpu(
    name: str | None, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = model_shape(load_model("demo", device="cpu"))
    row = bench.BenchResult(mode="oomb", context=1000, seconds=2.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cpu" if name is None else "cuda")
    expected = None if peak is None else pytest.approx(step_flops(shape, 1000, 500) / 2 / peak)
    assert bench._mfu(row, shape, device, 500) == expected


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="fast"):
        bench.run("demo", [64], modes=["fast"])
    with pytest.raises(ValueError, match="at least one context"):
        bench.run("demo", [])
    with pytest.raises(ValueError, match="chunks"):
        bench.run("demo", [64], settings={"chunks": 3})
