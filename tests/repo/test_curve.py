"""benchmarks/curve.py on rows of known growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
import curve
import pytest
from scripts import run_benchmark

KIB = 1024


def row(context: int, gpu_bytes: int, place: str = "host-brim", **fields: Any) -> dict[str, Any]:
    return {
        "case": "lora-8bit", "optimizer": "adamw", "place": place, "context": context, "problem": None,
        "measured_gpu_bytes": gpu_bytes, "measured_host_bytes": 100 * context, "measured_seconds": context / 8192,
        "optimizer_seconds": 1.0, **fields,
    }  # fmt: skip


def call(folder: Path, *reports: list[dict[str, Any]], out: str = "curve.png") -> Any:
    paths = []
    for index, rows in enumerate(reports):
        paths.append(folder / f"{index}.json")
        paths[-1].write_text(json.dumps({"model": "any", "machine": {"number": index}, "rows": rows}))
    return run_benchmark(curve.main, *paths, "--out", folder / out)


@pytest.mark.parametrize(("more", "exit_code"), [(4_000_000, 0), (6_000_000, 1)])
def test_growth_beyond_the_target_is_an_exit_code(tmp_path: Path, more: int, exit_code: int) -> None:
    host = [row(64 * KIB + i * 100_000, 2**30 + i * 10 * more) for i in (1, 0)]
    brim = [row(2**22, 2**36, "brim"), row(2**23, 0, "brim", problem="predicted not to fit")]
    result = call(tmp_path, host, brim)
    assert result.exit_code == exit_code, result.output
    assert f"{more / 1e6:.2f} MB" in result.output and ("NOT MET" in result.output) == bool(exit_code)
    assert "4,194,304" in result.output and "8,388,608" not in result.output
    assert "513.0 s" in result.output, "512 s and 1 s of optimizer"
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    numbers = json.loads((tmp_path / "curve.json").read_text())
    contexts = [64 * KIB, 64 * KIB + 100_000]
    assert numbers["growth"] == {
        "mb_per_10_000_tokens": pytest.approx(more / 1e6), "asked": 5.0, "is_met": not exit_code, "contexts": contexts,
        "before": {"mb_per_10_000_tokens": None, "contexts": contexts[:1]},
    }  # fmt: skip
    points = [(point["context"], point["place"], point["file"]) for point in numbers["points"]]
    assert points == [*((context, "host-brim", "0.json") for context in contexts), (2**22, "brim", "1.json")]
    longest = numbers["points"][-1]
    assert longest["seconds"] == 513 and longest["ms_per_1_000_tokens"] == pytest.approx(513e6 / 2**22)
    assert longest["gpu_bytes"] == 2**36 and longest["host_bytes"] == 100 * 2**22
    assert numbers["machines"] == {"0.json": {"number": 0}, "1.json": {"number": 1}} and numbers["model"] == "any"


def staged(context: int, gpu_bytes: int, num_bytes: int) -> dict[str, Any]:
    terms = [{"name": "staging buffers", "num_bytes": num_bytes}, {"name": "activations of a chunk", "num_bytes": 7}]
    return row(context, gpu_bytes, terms=terms)


def test_growth_counts_from_full_staging_buffers(tmp_path: Path) -> None:
    host = [staged(100_000, 0, 940), staged(200_000, 500_000_000, 960), staged(300_000, 520_000_000, 1000)]
    result = call(tmp_path, host)
    assert result.exit_code == 0, result.output
    assert "from 200,000 to 300,000 tokens: 2.00 MB" in result.output
    assert "from 100,000 on, while staging buffers grow: 50.00 MB" in result.output
    numbers = json.loads((tmp_path / "curve.json").read_text())
    assert numbers["growth"]["contexts"] == [200_000, 300_000] and numbers["growth"]["is_met"]
    assert numbers["growth"]["before"] == {"mb_per_10_000_tokens": 50.0, "contexts": [100_000, 200_000]}
    assert numbers["points"][0]["activation_bytes"] == 7


@pytest.mark.parametrize("num_bytes", [1000, 400], ids=["constant", "still growing"])
def test_growth_counts_from_the_start_if_buffers_never_settle(tmp_path: Path, num_bytes: int) -> None:
    host = [staged(100_000, 0, num_bytes), staged(200_000, 500_000_000, num_bytes), staged(300_000, 520_000_000, 1000)]
    result = call(tmp_path, host)
    assert result.exit_code == 1 and "from 100,000 to 300,000 tokens: 26.00 MB" in result.output
    assert "while staging buffers grow" not in result.output


def test_the_committed_numbers_match_the_files() -> None:
    files = [common.RESULTS / path.name for path in curve.FILES]
    numbers = json.loads((common.RESULTS / "curve.json").read_text())
    assert numbers == json.loads(json.dumps(curve.record(curve.read(files), files)))


def test_every_place_has_its_own_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot

    def note(self: Axes, x: list[int], y: list[float], **kwargs: Any) -> Any:
        drawn.append((x, kwargs["marker"], kwargs["color"]))
        return plot(self, x, y, **kwargs)

    monkeypatch.setattr(Axes, "plot", note)
    assert call(tmp_path, [row(2**16, 1), row(2**17, 1)], [row(2**18, 2, "brim"), row(2**18, 2, "moon")]).exit_code == 0
    assert len(drawn) == 3 * 3, "three panels, three places"
    assert {tuple(x) for x, _, _ in drawn} == {(2**16, 2**17), (2**18,)}
    assert len({marker for _, marker, _ in drawn}) == len({color for _, _, color in drawn}) == 3


def test_one_row_has_no_growth_and_different_steps_no_curve(tmp_path: Path) -> None:
    assert curve.growth([row(2**20, 1)]) is None and curve.settled([row(2**20, 1, "brim")]) == []
    assert call(tmp_path, [row(2**20, 1)]).exit_code == 0
    assert call(tmp_path, [row(2**20, 1)], [row(2**21, 1, case="full-8bit")]).exit_code == 2


def test_both_offloaded_places_count() -> None:
    rows = [row(200_000, 10_000_000, "host"), row(150_000, 2**40, "brim"), row(100_000, 0, "host")]
    assert curve.growth(curve.settled(rows)) == curve.growth(curve.offloaded(rows)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        (([row(2**20, 1)], [row(2**20, 2)]), "host-brim at 1,048,576 tokens is in 0.json and in 1.json"),
        (([row(2**20, 1)], [row(2**21, 1, layers=2)]), "differ in model"),
        (([row(2**20, 1, problem="stopped while taking the step")],), "no measured step"),
        (([row(2**20, 1), row(2**20, 1, "host")],), "2 ways (host, host-brim)"),
    ],
    ids=["duplicate", "rehearsal", "nothing", "two ways"],
)
def test_rows_that_make_no_curve_are_refused(
    tmp_path: Path, reports: tuple[list[dict[str, Any]], ...], message: str
) -> None:
    result = call(tmp_path, *reports)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "curve.json").exists()


def test_a_rehearsal_is_labeled(tmp_path: Path) -> None:
    result = call(tmp_path, [row(2**20, 1, layers=2)])
    assert result.exit_code == 0 and "a rehearsal with 2 layers" in result.output
    assert json.loads((tmp_path / "curve.json").read_text())["layers"] == 2


def test_a_plot_does_not_overwrite_its_input(tmp_path: Path) -> None:
    result = call(tmp_path, [row(2**20, 1)], out="0.png")
    assert result.exit_code == 2 and "pass another --out" in result.output
    assert "rows" in json.loads((tmp_path / "0.json").read_text())
