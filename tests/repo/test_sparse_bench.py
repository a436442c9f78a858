"""benchmarks/sparse.py, kernel_times.py and train_sparse.py on tiny models."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import common
import kernel_times
import pytest
import smollm2
import sparse
import sparse_tables
import torch
import train_sparse
from kernel_times import Kernel
from scripts import run_benchmark

from oomb.engine.engine import Engine
from oomb.eval import bench
from oomb.models import presets

SETTINGS = {"page_size": 16, "page_budget": 4}
SMALL = ["--model", "demo", "--device", "cpu", "--page-size", "16", "--budget", "4", "--chunk-sizes", "128"]


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "WARM_UP_CHUNKS", 2)


def step(context: int, seconds: float | None = None, **fields: Any) -> sparse.Row:
    return sparse.Row(
        **{"context": context, "chunk_size": 4096, "num_layers": 28, "seconds": seconds, "source": "abc", **fields}
    )


@pytest.mark.timing
def test_rows_are_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This clock only advances when it is read, so the passes are most of a step on any machine.
    ticks = itertools.count()
    monkeypatch.setattr(sparse.time, "perf_counter", lambda: float(next(ticks)))
    common: dict[str, Any] = {"chunk_sizes": [128], "layers": [1], "out": tmp_path, "device": "cpu"}
    sparse.run("growth", "demo", contexts=[256], settings={**SETTINGS, **sparse.LEAN}, **common)
    report = sparse.run("growth", "demo", contexts=[512], settings={**SETTINGS, **sparse.LEAN}, **common)
    written = json.loads((tmp_path / "sparse_demo_growth.json").read_text())
    assert [row["context"] for row in written["rows"]] == [256, 512]
    assert written["settings"]["page_budget"] == 4 and written["machine"]["versions"]["torch"] == torch.__version__
    [apart] = written["gates"].values()
    assert set(apart) == {
        "all pages, on the GPU", "all pages, on the host", "selected pages, on the host",
    } and max(apart.values()) < 1e-3  # fmt: skip
    for row in report.rows:
        assert row.problem is None and row.seconds and row.fill_seconds and row.gradient_seconds
        assert row.seconds / 2 < row.fill_seconds + row.gradient_seconds <= row.seconds
        assert row.tokens_per_second == pytest.approx(row.context / row.seconds)
        # Every chunk stores its K and V on the host and reads selected pages again.
        assert row.gpu_page_bytes == 0 < row.host_page_bytes and row.loaded_bytes > row.stored_bytes > 0
    assert sparse.table(report).row_count == 2
    other = sparse.run(
        "growth", "demo", contexts=[256], settings={**SETTINGS, **sparse.LEAN, "page_budget": 2}, **common
    )
    assert [row.context for row in other.rows] == [256], "rows of other settings were kept"


@pytest.mark.parametrize("wrong", ["covering", "host"])
def test_nothing_is_measured_if_the_check_fails(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = bench.EngineStep.__call__

    def spoiled(self: bench.EngineStep, ids: torch.Tensor) -> torch.Tensor:
        loss, config = correct(self, ids), self.engine.config
        covers = (config.page_budget or 0) * config.page_size >= ids.shape[1]
        if covers if wrong == "covering" else (config.gpu_memory == 0 and not covers):
            for parameter in self.engine.model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1.01
        return loss

    monkeypatch.setattr(bench.EngineStep, "__call__", spoiled)
    result = run_benchmark(sparse.main, "times", *SMALL, "--contexts", "512", "--layers", "1", "--out", str(tmp_path))
    assert result.exit_code == 1 and not list(tmp_path.iterdir())
    assert "check failed" in result.output and ("all pages" if wrong == "covering" else "selected") in result.output


@pytest.mark.timing
@pytest.mark.parametrize(("limit", "exit_code"), [(1e4, 0), (1e-6, 1)])
def test_a_missed_target_is_an_exit_code(
    limit: float, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MODEL": "demo", "CHUNK_SIZE": 128, "PAGE_SIZE": 16, "BUDGET": 4, "WHOLE_LAYERS": 1}.items():
        monkeypatch.setattr(sparse, name, value)
    monkeypatch.setattr(sparse, "GOAL_SECONDS", {512: limit})
    result = run_benchmark(sparse.main, "times", *SMALL, "--contexts", "512", "--layers", "1", "--out", str(tmp_path))
    assert result.exit_code == exit_code, result.output
    assert ("NOT MET" in result.output) == (exit_code == 1)
    [goal] = json.loads((tmp_path / "sparse_demo_times.json").read_text())["goals"]
    assert goal["limit"] == limit and goal["value"] > 0


def test_bad_requests_are_refused() -> None:
    assert run_benchmark(sparse.main, "fast").exit_code == 2
    if not torch.cuda.is_available():
        assert run_benchmark(sparse.main, "times", "--profile", "128K", "--model", "demo").exit_code == 2
    assert run_benchmark(train_sparse.main, "--mode", "fast").exit_code == 2


def test_out_of_memory_is_a_row_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = sparse.Stand("demo", 1, "cpu", SETTINGS)

    def full(*args: Any) -> None:
        raise MemoryError("1 TiB is needed\nand more")

    monkeypatch.setattr(Engine, "reserve", full)
    row = stand.measure(stand.engine(chunk_size=128), 512)
    assert row.problem == "out of memory: 1 TiB is needed" and row.seconds is None


def test_goals_of_time() -> None:
    goals = sparse.time_goals([step(2**17, 19.0), step(2**20, 164.0)], sparse.GOAL_SECONDS, sparse.GOAL_PER_TOKEN)
    assert [goal.is_met for goal in goals] == [True, True, True]
    assert goals[2].value == pytest.approx(164 / 19 / 8)
    assert str(goals[0]) == "128K tokens: 19 s, target 20 s: met"
    goals = sparse.time_goals([step(2**17, 10.0), step(2**20, 100.0)], sparse.GOAL_SECONDS, sparse.GOAL_PER_TOKEN)
    assert [goal.is_met for goal in goals] == [True, True, False], "1.25 times as long per token"
    for value in (165.1, math.nan, None):
        goals = sparse.time_goals([step(2**17, 20.0), step(2**20, value)], sparse.GOAL_SECONDS, sparse.GOAL_PER_TOKEN)
        assert [goal.is_met for goal in goals][:2] == [True, False] and "NOT MET" in str(goals[1])
    only_large = [step(2**17, 1.0, chunk_size=8192)]
    assert sparse.time_goals(only_large, sparse.GOAL_SECONDS, sparse.GOAL_PER_TOKEN) == []


def test_growth_is_extrapolated_to_all_layers() -> None:
    def rows(num_layers: int, per_layer: float, fixed: float) -> list[sparse.Row]:
        slope = (per_layer * num_layers + fixed) * 1e6 / 10_000
        return [
            step(n, num_layers=num_layers, peak_bytes=2**30 + round(slope * n)) for n in (2**18, 2**19, 2**20)
        ]  # fmt: skip

    found = sparse.growth(rows(28, 0.1, 0.5))
    assert found == (pytest.approx(3.3, abs=1e-4), "measured with 28 layers")
    found = sparse.growth([*rows(7, 0.1, 0.5), *rows(14, 0.1, 0.5)])
    assert found == (pytest.approx(3.3, abs=1e-4), "measured with 7 and 14 layers, extrapolated to 28")
    found = sparse.growth(rows(7, 0.1, 0.5))
    assert found == (pytest.approx(4.8, abs=1e-4), "measured with 7 layers, times 4")
    assert sparse.growth(rows(7, 0.1, 0.5)[:1]) is None and sparse.growth_goals([], 5.0) == []
    broken = rows(28, 9.9, 0.0)
    for row in broken:
        row.problem = "out of memory"
    assert sparse.growth(broken) is None
    assert [goal.is_met for goal in sparse.growth_goals(rows(28, 0.1, 0.5), 5.0)] == [True]
    assert [goal.is_met for goal in sparse.growth_goals(rows(28, 0.2, 0.5), 5.0)] == [False]


FILL_NAMES = [
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "linear layers"),
    ("triton_poi_fused_add_cat_mul_3", "fused elementwise"),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::MeanOps",
        "page selection",
    ),
    ("void at::native::vectorized_elementwise_kernel<4, clamp>", "page selection"),
    ("means_lse_kernel", "page selection"),
    ("merge_lse_kernel", "page selection"),
    ("page_scores_kernel", "page selection"),
    ("void at::native::sbtopk::gatherTopK<long, unsigned int, 3, false>", "page selection"),
    ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16, int, long>", "page selection"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128", "own chunk (dense)"),
    ("void at::native::index_elementwise_kernel<128, 4>", "selected pages: index lists"),
    ("forward_kernel", "selected pages: forward"),
    ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "other"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "linear layers"),
    ("void at::native::elementwise_kernel", "other"),
]
GRADIENT_NAMES = [
    ("void cublasLt::splitKreduce_kernel<32, 16>", "linear layers"),
    ("add_share_kernel", "gradient accumulation"),
    ("Memcpy DtoD (Device -> Device)", "other"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_1", "own chunk (dense)"),
    ("void at::native::index_elementwise_kernel<128, 4>", "selected pages: index lists"),
    ("dq_kernel", "selected pages: dQ"),
    ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "selected pages: index lists"),
    ("void at::native::searchsorted_cuda_kernel<long, int>", "selected pages: index lists"),
    ("dkv_kernel", "selected pages: dK, dV"),
    ("void at::native::_scatter_gather_elementwise_kernel", "selected pages: index lists"),
    ("triton_red_fused_sum_7", "fused elementwise"),
    ("void pytorch_flash::flash_bwd_dot_do_o_kernel<cutlass::bfloat16_t>", "own chunk (dense)"),
]


@pytest.mark.parametrize("names", [FILL_NAMES, GRADIENT_NAMES, FILL_NAMES + GRADIENT_NAMES], ids=len)
def test_kernels_are_classified(names: list[tuple[str, str]]) -> None:
    assert kernel_times.kinds_of([name for name, _ in names]) == [kind for _, kind in names]


def test_early_chunks_compute_page_means_without_a_selection() -> None:
    names = ["triton_poi", "reduce_kernel<MeanOps>", "cudnn_sdpa_fprop", "copy", "nvjet"]
    assert kernel_times.kinds_of(names)[1] == "page selection" and kernel_times.kinds_of(names)[3] == "other"
    assert kernel_times.kinds_of([]) == [] and kernel_times.kinds_of(["copy"]) == ["other"]


MICRO = 1000
RECORD = [
    Kernel("nvjet_before", 0, 8 * MICRO, 7),
    Kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 9 * MICRO, 10 * MICRO, 7),
    Kernel("nvjet_a", 11 * MICRO, 40 * MICRO, 7),
    Kernel("dq_kernel", 35 * MICRO, 50 * MICRO, 7),  # starts before the previous kernel ends
    Kernel("copy_pages", 20 * MICRO, 90 * MICRO, 21),
    Kernel("dkv_kernel", 110 * MICRO, 150 * MICRO, 7),
    Kernel("copy_pages", 120 * MICRO, 300 * MICRO, 21),
    Kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 152 * MICRO, 153 * MICRO, 7),
    Kernel("nvjet_after", 154 * MICRO, 200 * MICRO, 7),
]


def test_every_moment_of_a_window_counts_once() -> None:
    found = {kind: round(1e6 * total) for kind, total in kernel_times.account(RECORD[::-1]).items()}
    assert found == {
        "linear layers": 29,
        "selected pages: dQ": 10,
        "selected pages: dK, dV": 40,
        "idle": 40 + 1 + 20 + 2,
        "selected pages: index lists": 1,  # the marker itself
    }
    assert sum(found.values()) == 153 - 10
    with pytest.raises(RuntimeError, match="1 marker kernels instead of 2"):
        kernel_times.account(RECORD[:4])


@pytest.mark.parametrize("num_chunks", [3, 4, 5, 8, 16, 31, 32, 64, 256])
def test_windows_represent_all_chunks(num_chunks: int) -> None:
    found = kernel_times.windows(num_chunks, 4, 4)
    assert found[0].begin == 0 and found[-1].end == num_chunks
    for window, after in zip(found, [*found[1:], None], strict=True):
        assert window.begin + 2 <= window.first < window.last <= window.end and window.last - window.first <= 4
        if after is not None:
            assert window.end == after.begin and window.last < after.first - 1
    assert len(found) == (4 if num_chunks > 40 else 3 if num_chunks > 30 else 1)
    with pytest.raises(ValueError, match="3 chunks or more"):
        kernel_times.windows(2, 4, 4)


def test_windows_are_scaled_to_the_pass_and_checked_by_the_clock() -> None:
    window = kernel_times.Window(0, 10, 4, 6, RECORD)
    half = 143e-6 / 2
    chunks = [9.0, half / 2, half / 2, 1.0, half, half, 1.0, half / 2, half / 2, half / 2]
    found = kernel_times.whole_pass([window], chunks)
    assert found["seconds"]["linear layers"] == pytest.approx(29e-6 * 5)
    assert found["kernels_seconds"] == pytest.approx(143e-6) == pytest.approx(found["events_seconds"])
    assert found["slowdown"] == pytest.approx(2.0) and found["num_profiled"] == 2
    assert kernel_times.clocks_problem({"fill": found}) is None
    found["events_seconds"] *= 1.05
    assert "of the fill pass" in str(kernel_times.clocks_problem({"fill": found}))
    row = step(2**17, 20.0, kernels={"fill": found, "gradient": found})
    assert sparse.kernel_sums(row)["linear layers"] == pytest.approx(29e-6 * 10)
    assert sparse.kernel_table([row]).row_count == 5


@pytest.mark.timing
def test_both_passes_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("marker"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: calls.append("wait"))
    monkeypatch.setattr(kernel_times.Profile, "_start", lambda self: calls.append("start"))
    monkeypatch.setattr(kernel_times.Profile, "_stop", lambda self: calls.append("stop") or RECORD)
    monkeypatch.setattr(kernel_times, "ACTIVITIES", (torch.profiler.ProfilerActivity.CPU,))
    stand = sparse.Stand("demo", 1, "cpu", SETTINGS)
    row = stand.measure(stand.engine(chunk_size=16), 32 * 16, profile=True)
    assert calls == ["start", "marker", "marker", "wait", "stop"] * 6
    assert row.kernels is not None and set(row.kernels) == {"fill", "gradient"}
    assert row.kernels_problem is not None and row.kernels_problem.startswith("WRONG"), "not the record of these chunks"
    assert row.problem is None and row.seconds is not None


def test_profiling_takes_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def measure(self: sparse.Stand, engine: Engine, context: int, profile: bool = False) -> sparse.Row:
        asked.append((context, profile))
        kernels = {"fill": {"seconds": {"idle": 1.0}, "slowdown": 1.0}} if profile else None
        return step(context, 2.0 if profile else 1.0, chunk_size=128, num_layers=1, kernels=kernels)

    monkeypatch.setattr(sparse.Stand, "measure", measure)
    run = {"contexts": [512, 1024, 2048], "profiled": [1024, 2048], "chunk_sizes": [128], "layers": [1]}
    report = sparse.run("times", "demo", **run, out=tmp_path, device="cpu", settings=SETTINGS)
    assert asked[1:] == [(512, False), (1024, False), (1024, True), (2048, False), (2048, True)], "the first is a check"
    assert [(row.seconds, row.kernels is not None) for row in report.rows] == [(1.0, False), (1.0, True), (1.0, True)]


def test_stalls_are_part_of_the_idle_time() -> None:
    passes = {"fill": {"seconds": {"idle": 1.0}}, "gradient": {"seconds": {"idle": 2.0, "linear layers": 5.0}}}
    kernel_times.take_waits(passes, 2.5)
    assert passes["gradient"]["seconds"] == {"idle": 0.0, "linear layers": 5.0, "stall on copies": 2.0}
    assert passes["fill"]["seconds"] == {"idle": 0.5, "stall on copies": 0.5}


def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any) -> tuple[Any, None]:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
        return AutoModelForCausalLM.from_config(presets.preset_config("demo", **shape)).train(), None

    monkeypatch.setattr(smollm2, "load", load)


def training(out: Path, mode: str, budget: int = 64, steps: int = 12) -> Any:
    return run_benchmark(
        train_sparse.main, "--mode", mode, "--steps", str(steps), "--length", "256", "--chunk-size", "64",
        "--page-size", "16", "--budget", str(budget), "--learning-rate", "1e-2", "--device", "cpu", "--out", str(out),
    )  # fmt: skip


def test_two_runs_that_differ_only_in_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch)
    out = tmp_path / "runs" / "train.json"
    result = training(out, "dense")
    assert result.exit_code == 0, result.output
    assert list(json.loads(out.read_text())["runs"]) == ["dense"]
    result = training(out, "sparse")
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    dense, covering = (record["runs"][mode] for mode in ("dense", "sparse"))
    # The budget covers every page, so the losses must be the same from the first step to the last.
    assert dense["losses"] == pytest.approx(covering["losses"], abs=1e-3) and len(dense["losses"]) == 12
    assert dense["losses"][-1] < dense["losses"][0] - 0.1
    assert record["final_losses"]["dense"] == pytest.approx(sum(dense["losses"][-10:]) / 10)
    assert abs(record["difference"]) < 1e-3 and record["settings"]["rope"]["factor"] == 2.0
    assert dense["held_out"]["dense"] == pytest.approx(covering["held_out"]["as trained"], abs=1e-2)
    assert out.with_suffix(".png").stat().st_size > 10_000
    out.with_suffix(".png").unlink()
    assert training(out, "none").exit_code == 0 and out.with_suffix(".png").exists()
    # Runs with another budget are not kept.
    assert training(out, "sparse", budget=1, steps=2).exit_code == 0
    assert list(json.loads(out.read_text())["runs"]) == ["sparse"]


def test_final_losses_too_far_apart_are_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch)
    monkeypatch.setattr(train_sparse, "ASKED", 1e-9)
    result = training(tmp_path / "train.json", "both", budget=1)
    assert result.exit_code == 1 and "NOT within" in result.output


def test_what_counts_as_close() -> None:
    def runs(dense: float, sparse: float, steps: int = 10) -> dict[str, train_sparse.Run]:
        return {
            "dense": train_sparse.Run("dense", [9.0, *[dense] * 10]),
            "sparse": train_sparse.Run("sparse", [5.0, *[sparse] * steps]),
        }

    assert train_sparse.is_met(runs(1.0, 1.019), 11, 0.02) and train_sparse.is_met(runs(1.0, 0.981), 11, 0.02)
    assert not train_sparse.is_met(runs(1.0, 1.021), 11, 0.02)
    assert not train_sparse.is_met(runs(1.0, math.nan), 11, 0.02)
    assert not train_sparse.is_met(runs(1.0, 1.0, steps=9), 11, 0.02), "a run is incomplete"
    assert not train_sparse.is_met({"dense": runs(1.0, 1.0)["dense"]}, 11, 0.02)


def test_examples_are_shuffled_in_epochs() -> None:
    found = train_sparse.order(5, 12, seed=3)
    assert found == train_sparse.order(5, 12, seed=3) != train_sparse.order(5, 12, seed=4)
    assert sorted(found[:5]) == sorted(found[5:10]) == list(range(5)) and len(found) == 12
    shares = [train_sparse.rate_share(step, 100) for step in range(100)]
    assert shares[0] == 0.1 and max(shares) == 1.0 == shares[9] and 0.1 < shares[-1] < 0.11


def test_tables_use_whatever_files_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert sparse_tables.sparse_summary() == sparse_tables.sparse_details() == ""
    machine = {"gpu": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "source": "abc"}
    measured = {
        "reserve_seconds": 4.0,
        "fill_seconds": 6.0,
        "gradient_seconds": 12.0,
        "tokens_per_second": 7281.0,
        "peak_bytes": 80 * 2**30,
    }
    kernels = {"fill": {"seconds": {"linear layers": 3.0, "idle": 1.0}}, "gradient": {"seconds": {"idle": 0.0}}}

    def write(case: str, *rows: sparse.Row) -> None:
        settings = {"page_size": 128, "page_budget": 64, "gpu_memory": "65GiB"}
        report = sparse.Report(case=case, model="qwen2.5-7b", settings=settings, machine=machine)
        for row in rows:
            report.add(row, tmp_path / f"sparse_qwen2.5-7b_{case}.json")

    write("times", step(2**17, 18.0, **measured), step(2**17, 9.0, chunk_size=8192), step(2**20, problem="too large"))
    assert "| 131,072 | 18.0 s | 7,281 | 80 GiB |  |" in sparse_tables.sparse_summary()
    details = sparse_tables.sparse_details()
    assert "| 131,072 | 18.0 s | 6.0 s | 12.0 s | 137 | 80.0 GiB | 0.0 GiB | 0, 0 GiB | 0.0 s |" in details
    assert "9.0 s" not in details and "too large" in details and "grows" not in details
    assert 'gpu_memory="65GiB"' in details and "another 4 s once per run, at 131,072 tokens" in details
    write("growth", step(2**18, peak_bytes=2**30), step(2**20, peak_bytes=2**30 + 3 * 78_643_200))
    assert "linear layers" not in details
    write("times", step(2**17, 18.0, kernels=kernels, **measured))
    (tmp_path / "train_sparse.json").write_text(
        json.dumps({
            "settings": {
                "model": "M", "steps": 100, "text": "text", "num_windows": 50, "length": 65536, "budget": 64,
                "page_size": 128,
            },
            "difference": 0.01, "final_losses": {"dense": 1.0, "sparse": 1.01},
        })
    )  # fmt: skip
    details = sparse_tables.sparse_details()
    assert "grows by 3.0 MB per 10,000 tokens from 262,144 to 1,048,576 tokens (measured with 28 layers)." in details
    assert "train_sparse.png" not in details
    (tmp_path / "train_sparse.png").touch()
    assert "(../benchmarks/results/train_sparse.png)" in sparse_tables.sparse_details()
    assert "50 examples of 65,536 tokens, 2.0 epochs" in details
    assert "| linear layers | 75.0% |" in details and "is 1.000 with dense attention and 1.010 with 64 pages" in details
