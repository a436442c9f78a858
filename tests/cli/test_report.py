"""The report of a run: the events as numbers, as HTML and in a real browser."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import invoke
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from report_pages import (
    EVIL,
    GIB,
    WIDTHS,
    Tree,
    browse,
    compared,
    evaluation,
    find_browser,
    is_near,
    measured,
    points,
    side_by_side,
    start,
    step,
    whole_run,
    write_run,
)

from oomb.cli.report.comparison import conclusions, memory_meaning
from oomb.cli.report.events import read_run, run_from_lines
from oomb.cli.report.page import page, write_report

COMPARED = "Compared with standard training"
SECTIONS = [
    "Training", COMPARED, "Memory by tier", "Evaluation", "Text before and after", "Settings and machine", "Steps",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "my run", whole_run(), tail='{"event": "st')
    (folder / "comparison.json").write_text(json.dumps(compared()))
    assert write_report(folder) == folder / "report.html"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    return (folder / "report.html").read_text()


def test_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", whole_run(), tail='{"event": "st'))
    assert [event["step"] for event in run.steps] == list(range(1, 31))
    # Steps 21 and 22 were repeated: the later ones count.
    assert run.series("loss")[20:22] == [(21, 1.21), (22, 1.22)]
    assert run.series("loss")[19] == (20, step(20)["loss"])
    assert run.resumed_at == [20]
    assert run.held_out == [(0, 3.6), (20, 2.0), (30, 1.75)]
    assert run.unread == [len(whole_run()) + 1]
    assert run.status == "finished"
    # The first evaluation before training counts: the later one is of a checkpoint.
    assert run.evals["before"]["perplexity"]["buckets"][0]["loss"] == 3.0
    assert run.num_tokens == 30 * 2 * 131072
    times = [step(n)["step_s"] for n in range(1, 31)]
    assert run.seconds == pytest.approx(sum(times))
    assert run.tokens_per_second == pytest.approx(29 * 262144 / sum(times[1:]), rel=1e-4)


def test_steps_after_the_resumed_checkpoint_are_dropped() -> None:
    """The first start went further than the second has come so far."""
    events = [start(), *(step(n) for n in range(1, 10)), {"event": "held_out", "step": 9, "loss": 1.0}]
    events += [start(), {"event": "held_out", "step": 4, "loss": 2.0}, step(5)]
    run = run_from_lines(map(json.dumps, events), "run")
    assert [event["step"] for event in run.steps] == [1, 2, 3, 4, 5]
    assert (run.resumed_at, run.held_out) == ([4], [(4, 2.0)])
    assert "not finished" in run.status
    events += [{"event": "end", "stopped": True}]
    assert run_from_lines(map(json.dumps, events), "run").status == "stopped early and saved"


def test_the_start_after_a_torn_line_is_found() -> None:
    """A killed run leaves half a line, and the resumed run appends to it."""
    lines = [json.dumps(event) for event in whole_run()]
    again = next(i for i, event in enumerate(whole_run()) if event["event"] == "start" and i > 0)
    torn = [*lines[:again], json.dumps(step(23))[:40] + lines[again], *lines[again + 1 :]]
    run = run_from_lines(torn, "run")
    assert run.unread == [again + 1]
    assert (run.resumed_at, len(run.starts), len(run.steps)) == ([20], 2, 30)
    assert run.settings["resume_from_checkpoint"] == "checkpoint-20"


def test_budgets() -> None:
    events = [start(), step(1)]
    run = run_from_lines(map(json.dumps, events), "run")
    assert run.budget("gpu") == (20 * GIB, "gpu_memory")
    assert run.budget("host") == (200 * GIB, "the machine's memory")
    events[0]["budget"] = {"gpu_bytes": 5 * GIB, "host_bytes": 80 * GIB}
    run = run_from_lines(map(json.dumps, events), "run")
    assert run.budget("gpu") == (5 * GIB, "memory for pages")
    assert run.budget("host") == (80 * GIB, "memory for pages")
    events[0]["machine"]["gpu"] = None
    assert not run_from_lines(map(json.dumps, events), "run").on_gpu
    events[0]["machine"] = {}
    del events[0]["budget"]
    assert run_from_lines(map(json.dumps, events), "run").budget("host") is None


def test_the_page_says_what_the_metrics_say(report: str) -> None:
    tree = Tree(report)
    figures = {}
    for pair in tree.all("div"):
        if pair["inside"][-1] == "dl":
            name, value = (
                next(e for e in tree.elements if e["tag"] == tag and pair in e["parents"]) for tag in ("dt", "dd")
            )
            figures[name["text"]] = value["text"]
    last = sum(1.0 + n / 100 for n in range(26, 31)) / 5
    assert figures["training loss"].startswith(f"{step(1)['loss']:.3f} → {last:.3f}")
    assert figures["held-out loss"].startswith("3.600 → 1.750")
    assert figures["needles found"].startswith("25% → 88%")
    assert figures["tokens"].startswith(f"{30 * 262144:,}")
    assert figures["peak memory"].startswith("63.00 GiB")
    assert [heading["text"] for heading in tree.all("h2")] == SECTIONS

    rows = [row["text"] for row in tree.all("tr")]
    for words in ("peak GPU memory", "63.00 GiB", "of 139.80 GiB", "45.1%"):
        assert any(words in row for row in rows if row.startswith("peak GPU memory")), words
    assert any(row.startswith("pages on the GPU18.00 GiBof 20.00 GiB, gpu_memory90.0%") for row in rows)
    assert any(row.startswith("pages on the host70.00 GiBof 200.00 GiB") for row in rows)
    assert "max_length131072" in rows and "page_budgetnot set" in rows and "seed1" in rows and "torch2.13.0" in rows
    assert any("131072" in row for row in rows)
    # Needles after training, at both lengths and three depths.
    assert "4K tokens30%50%70%" in rows and "128K tokens30%50%70%" in rows
    # The table at the end has every step.
    assert sum(row.startswith(f"{n}{step(n)['loss']:.4g}") for n in range(1, 21) for row in rows) == 20
    [note] = tree.all("p", class_="note")
    assert "1 of the lines" in note["text"]


def test_the_comparison_is_a_table_with_its_conclusions(report: str) -> None:
    tree = Tree(report)
    rows = [row["text"] for row in tree.all("tr")]
    assert "2,0482.0 s0.6 s52.0 MiB36.0 MiB1.0e-07" in rows
    # A problem stands where the time would be.
    assert "16,384skipped: needs about 0.41 GiB16.2 s66.0 MiB" in rows
    text = tree.all("main")[0]["text"]
    # Of the longest context that both modes were measured at.
    assert "At 8,192 tokens a step adds 208.0 MiB" in text and "3.7x less" in text
    assert "differ by 3.0e-07 at 8,192 tokens" in text and "float32 rounding" in text and "RSS" in text
    # A wrong gradient at a shorter context is not hidden by a right one.
    wrong = compared()
    wrong["rows"][0]["grad_difference"] = 0.5
    assert "5.0e-01 at 2,048" in conclusions(wrong)[1] and "WRONG" in conclusions(wrong)[1]
    wrong["settings"]["device"] = "cuda:0"
    assert "GPU memory" in memory_meaning(wrong)


def test_every_series_is_a_path_with_all_its_points(report: str) -> None:
    tree = Tree(report)
    expected = {
        "loss": {"training": 30, "held-out": 3},
        "learning_rate": {"learning rate": 30},
        "grad_norm": {"gradient norm": 30},
        "tokens_per_s": {"throughput": 30},
        "step_s": {"step time": 30},
        "memory": {"peak GPU memory": 30, "pages on the GPU": 30, "pages on the host": 30},
        "transfers": {"into the GPU": 30, "out of the GPU": 30},
        "waited": {"stall": 30},
        "positions": {"before training": 8, "after training": 8},
        "needles": {"before training": 3, "after training": 3},
        "compared-memory": {"standard training": 3, "oomb": 4},
        "compared-time": {"standard training": 3, "oomb": 4},
    }
    found = {chart["id"].removeprefix("chart-") for chart in tree.all("figure")}
    assert found == set(expected)
    for chart, series in expected.items():
        assert {name: len(path) for name, path in tree.paths(chart).items()} == series
    # The height in the chart is a linear function of the value.
    run = run_from_lines(map(json.dumps, whole_run()), "run")
    heights = np.array([y for _, y in tree.paths("loss")["training"]])
    losses = np.array([loss for _, loss in run.series("loss")])
    slope, offset = np.polyfit(losses, heights, 1)
    assert slope < 0
    assert np.abs(slope * losses + offset - heights).max() < 0.2
    # Both series share the axis: the first held-out loss is at the height of a training loss of 3.6.
    assert tree.paths("loss")["held-out"][0][1] == pytest.approx(slope * 3.6 + offset, abs=0.2)


def test_the_page_is_accessible_and_self_contained(report: str) -> None:
    tree = Tree(report)
    assert tree.all("html")[0]["lang"] == "en"
    assert tree.all("title")[0]["text"] == "my run: owner/model on books/"
    assert len(tree.all("h1")) == len(tree.all("main")) == 1
    assert tree.all("meta", name="viewport")
    for drawing in tree.all("svg"):
        assert drawing["role"] == "img" and len(drawing["aria-label"]) > 40
    [loss] = [d["aria-label"] for d in tree.all("svg") if d["aria-label"].startswith("Loss, nats")]
    assert "held-out: 3.6 at 0, 1.75 at 30" in loss
    assert all(cell.get("scope") in ("row", "col") for cell in tree.all("th"))
    for section in tree.all("section"):
        assert tree.all("h2", id=section["aria-labelledby"])
    ids = [element["id"] for element in tree.elements if "id" in element]
    assert len(ids) == len(set(ids))
    levels = [int(e["tag"][1]) for e in tree.elements if e["tag"] in ("h1", "h2", "h3")]
    assert all(after <= before + 1 for before, after in pairwise(levels))

    assert "://" not in report and "url(" not in report and "@import" not in report
    assert not tree.all("script") and not tree.all("img") and not tree.all("iframe")
    assert [link["href"] for link in tree.all("link")] == ["data:,"]
    # Text from the model is escaped.
    assert any(EVIL in sample["text"] for sample in tree.all("pre"))
    assert "\x00" not in report and "\x07" not in report


def test_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    held_out = {"event": "held_out", "step": 0, "loss": 3.0}
    for index, events in enumerate(([], [start()], [start(), held_out], [start(), step(1)])):
        folder = write_run(tmp_path / str(index), events)
        tree = Tree(write_report(folder).read_text())
        has_steps = events[-1:] == [step(1)]
        assert ("no finished step" in tree.all("body")[0]["text"]) == (not has_steps)
    assert list(tree.paths("loss")) == ["training"]
    assert len(tree.paths("loss")["training"]) == 1
    # A single point is drawn as a dot.
    assert [c for c in tree.all("circle", class_="dot") if any(p.get("id") == "chart-loss" for p in c["parents"])]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(EVIL) | st.just("auto"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("gpu"), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted({*step(1), "mfu", "tokens", "when", "prompt", "text", "perplexity", "needle", "settings", "engine",
                 "machine", "budget", "stopped", "buckets", "cells"})  # fmt: skip
EVENT = st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=6).flatmap(
    lambda fields: st.sampled_from(["start", "step", "held_out", "eval", "sample", "end"]).map(
        lambda kind: {**fields, "event": kind}
    )
)
SOUND = st.sampled_from(whole_run())


def spoiled(event: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Replace one field of a valid event, at any depth."""
    changed = {}
    for key, old in event.items():
        new = spoiled(old, name, value) if isinstance(old, dict) else old
        if isinstance(old, list):
            new = [spoiled(one, name, value) if isinstance(one, dict) else one for one in old]
        changed[key] = value if key == name else new
    return changed


NEEDLE = evaluation("after", 0)["needle"]
PARTS = [*whole_run(), *NEEDLE["cells"], *NEEDLE["lengths"], *evaluation("after", 0)["perplexity"]["buckets"]]
NAMES = sorted({key for part in PARTS for key in part} | {"ram_gib", "memory_gib", "gpu", "gpu_memory", "max_length"})
SPOILED = st.tuples(SOUND, st.sampled_from(NAMES), ODD).map(lambda parts: spoiled(*parts))


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SOUND | SPOILED | EVENT | ODD, max_size=12))
@example([start(), {**step(1), "loss": 10**400}, {**step(2), "loss": -0.0, "step_s": 5e-324}])
@example([start(), step(1), {**step(2), "step": 2**52}, {**step(2**52 + 1), "step_s": -1.0}])
@example([spoiled(whole_run()[0], "gpu_memory", "0"), *whole_run()[1:]])
def test_no_events_break_the_page(events: list[Any]) -> None:
    text = page(run_from_lines((json.dumps(event) for event in events), EVIL))
    tree = Tree(text.encode("utf-8", "replace").decode())
    assert not tree.all("script") and not tree.all("img")
    for path in tree.all("path"):
        assert all(0 <= x <= 480 and -1 <= y <= 290 for x, y in points(path["d"]))
    assert len(tree.all("h1")) == 1


COMPARED_NAMES = sorted({*compared(), *compared()["settings"], *compared()["rows"][0], "seconds", "peak_bytes"})


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(st.sampled_from(COMPARED_NAMES), ODD).map(lambda parts: spoiled(compared(), *parts)))
@example({"rows": [{"context": 2**60}, {"context": 8, "oomb": {"peak_bytes": -1, "seconds": 1e300}}, None, []]})
@example(spoiled(compared(), "grad_difference", math.nan))
def test_no_comparison_breaks_the_page(comparison: dict[str, Any]) -> None:
    run = run_from_lines(map(json.dumps, [start(), step(1)]), "run")
    run.comparison = json.loads(json.dumps(comparison))
    tree = Tree(page(run).encode("utf-8", "replace").decode())
    assert not tree.all("script") and not tree.all("img")
    for path in tree.all("path"):
        assert all(0 <= x <= 480 and -1 <= y <= 290 for x, y in points(path["d"]))


def test_a_comparison_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [start(), step(1)])
    for content in (b"", b"[1]", b"{", b"\xff\xfe", b'{"rows": []}'):
        (folder / "comparison.json").write_bytes(content)
        assert COMPARED not in write_report(folder).read_text()


def test_oomb_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bare = [event for event in whole_run() if event["event"] not in ("eval", "sample")]
    write_run(tmp_path / "run", bare)
    for when, shift in (("before", 0.5), ("after", 0.0)):
        found = {**evaluation(when, shift), "sample": {"prompt": "So", "text": f" it was {when}"}}
        (tmp_path / f"{when}.json").write_text(json.dumps(found))
    plain = invoke("report", "run")
    assert (plain.exit_code, plain.output) == (0, "written to run/report.html\n")
    assert "Evaluation" not in [h["text"] for h in Tree(Path("run/report.html").read_text()).all("h2")]
    result = invoke("report", "run", "--before", "before.json", "--after", "after.json", "--output", "site/a.html")
    assert result.exit_code == 0, result.output
    tree = Tree(Path("site/a.html").read_text())
    assert [h["text"] for h in tree.all("h2")] == [name for name in SECTIONS if name != COMPARED]
    assert set(tree.paths("positions")) == {"before training", "after training"}
    assert [sample["text"] for sample in tree.all("pre")] == ["So it was before", "So it was after"]


def test_a_real_run_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `oomb train` writes is what the report reads."""
    monkeypatch.chdir(tmp_path)
    toy = ["--max_length", "256", "--chunk_size", "64", "--max_steps", "4", "--device", "cpu", "--output_dir", "run"]
    assert invoke("train", *toy).exit_code == 0
    events = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert invoke("report", "run").exit_code == 0
    text = Path("run/report.html").read_text()
    tree = Tree(text)
    assert tree.all("h1")[0]["text"] == "demo on stdlib"
    assert {name: len(path) for name, path in tree.paths("loss").items()} == {"training": 4, "held-out": 2}
    assert {"chart-learning_rate", "chart-grad_norm", "chart-tokens_per_s", "chart-step_s", "chart-memory"} <= {
        figure["id"] for figure in tree.all("figure")
    }
    losses = [f"{event['loss']:.3f}" for event in events if event["event"] == "held_out"]
    assert " → ".join(losses) in text
    assert "finished" in text and f"{4 * 256:,}" in text
    assert "could not be read" not in text


def test_the_documented_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "demo", whole_run())
    document = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out == "finished (30, 1.3)\n"
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("matplotlib.image")
    run = write_run(tmp_path / "run", whole_run())
    result = invoke("report", run, "--png", tmp_path / "deep" / "run.png")
    assert result.exit_code == 0, result.output
    picture = image.imread(tmp_path / "deep" / "run.png")
    rows, columns = picture.shape[0] // 2, picture.shape[1] // 2
    blue = np.abs(picture[..., :3] - np.array([11, 107, 184]) / 255).max(-1) < 0.1
    # Four charts with a blue line in each.
    for quarter in (blue[:rows, :columns], blue[:rows, columns:], blue[rows:, :columns], blue[rows:, columns:]):
        assert quarter.any(0).sum() > 0.4 * columns
    assert "nothing to draw" in invoke("report", write_run(tmp_path / "new", [start()]), "--png", "x.png").output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--png needs matplotlib: pip install matplotlib" in invoke("report", run, "--png", "x.png").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no run in nowhere"),
        (["rum"], "did you mean 'run'?"),
        (["empty"], "empty has no metrics.jsonl"),
        (["run/metrics.jsonl"], "run/metrics.jsonl is a file"),
        (["run", "--after", "no.json"], "no.json"),
        (["run", "--after", "run/metrics.jsonl"], "line 2"),
        (["run", "--after", "list.json"], "list.json has no perplexity"),
        (["run", "--output", "empty"], "empty is a folder"),
        (["run", "--png", "x.doc"], "'x.doc' is not a picture"),
    ],
)
def test_oomb_report_refuses(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", whole_run())
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[1]")
    result = invoke("report", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "report.html").exists() or "--png" in arguments


def test_a_failed_write_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", whole_run())
    write_report(run)
    before = (run / "report.html").read_text()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(run)
    assert (run / "report.html").read_text() == before
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome on PATH")
def test_the_page_in_a_browser(report: str, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "both.html").write_text(side_by_side(report))
    window = f"--window-size={sum(WIDTHS)},1000"
    dom, console = browse(tmp_path / "both.html", tmp_path / "a", "--dump-dom", "--virtual-time-budget=5000", window)
    assert console == ""
    found = measured(dom)
    tree = Tree(report)
    for width, seen in zip(WIDTHS, found):
        # Nothing is wider than the window, even on a phone.
        assert seen["width"] <= seen["visible"] == width
        assert seen["headings"] == SECTIONS
        assert [chart["id"] for chart in seen["charts"]] == [figure["id"] for figure in tree.all("figure")]
        for chart in seen["charts"]:
            own = tree.paths(chart["id"].removeprefix("chart-"))
            assert {path["name"]: len(points(path["d"])) for path in chart["paths"]} == {
                k: len(v) for k, v in own.items()
            }
            assert all(path["length"] > 100 for path in chart["paths"])
            assert chart["width"] > 300 and chart["height"] == pytest.approx(chart["width"] * 290 / 480, rel=0.01)
        assert min(seen["texts"]) > 9
    left = {chart["x"] for chart in found[0]["charts"]}
    assert len(left) == 2 and len({chart["x"] for chart in found[1]["charts"]}) == 1
    height = max(seen["height"] for seen in found)

    papers = []
    for scheme, name in ((1, "light"), (0, "dark")):
        shot = tmp_path / f"{name}.png"
        flags = (f"--screenshot={shot}", f"--window-size={sum(WIDTHS)},{height}")
        _, console = browse(
            tmp_path / "both.html", tmp_path / name, *flags, f"--blink-settings=preferredColorScheme={scheme}"
        )
        assert console == ""
        picture = (image.imread(shot)[..., :3] * 255).round().astype(int)
        assert picture.shape[:2] == (height, sum(WIDTHS))
        papers.append(int(picture[5, 5].mean()))
        for chart in (chart for seen in found for chart in seen["charts"]):
            # Where a curve should be, there is ink of its color: the picture shows the data.
            scale = chart["width"] / 480
            for path in chart["paths"]:
                color = path["color"] if scheme else DARK[path["color"]]
                hit = [
                    is_near(picture, chart["x"] + x * scale, chart["y"] + y * scale, color)
                    for x, y in points(path["d"])
                ]
                assert sum(hit) >= 0.9 * len(hit), (name, chart["id"], path["name"], hit)
            # Elsewhere there is mostly paper.
            rows = slice(round(chart["y"]), round(chart["y"] + chart["height"]))
            area = picture[rows, round(chart["x"]) : round(chart["x"] + chart["width"])]
            paper = (np.abs(area - area[2, 2]).max(-1) < 8).mean()
            assert 0.7 < paper < 0.99
    assert papers[0] > 200 and papers[1] < 60


DARK = {"#0b6bb8": "#62b2f0", "#c8500a": "#f59e5b", "#15803d": "#5fce8b", "#8b3fb0": "#cf97ee"}
"""The colors of the page on a light system and on a dark one."""


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome on PATH")
def test_the_browser_would_complain(report: str, tmp_path: Path) -> None:
    """The console check can fail, and the page's policy blocks scripts and pictures."""
    evil = report.replace("<main>", '<main><script>document.title = "run"</script><img src="x.png">')
    (tmp_path / "evil.html").write_text(evil)
    dom, console = browse(tmp_path / "evil.html", tmp_path / "profile", "--dump-dom", "--virtual-time-budget=3000")
    assert "Content Security Policy" in console
    assert "<title>my run" in dom
