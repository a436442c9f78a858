"""`oomb eval`: it reads data as `oomb train` does, and evaluates adapters without a merge."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from command import invoke
from tokenizer import save_chats, small_tokenizer

from oomb.cli import main
from oomb.eval.run import EvalSettings, resolve_tokenizer_name
from oomb.models import adapters, presets

SMALL = ["--max_length", "256", "--chunk_size", "64", "--device", "cpu"]
RUN = ["--max_steps", "2", "--sample_tokens", "0", "--no_report", "--output_dir", "out"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def held_out(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "held_out"]


def measured(*arguments: str | Path) -> float:
    result = invoke("eval", *arguments, *SMALL, "--output", "eval.json")
    assert result.exit_code == 0, result.output
    return json.loads(Path("eval.json").read_text())["perplexity"]["loss"]


def write_texts(folder: Path) -> None:
    for index in range(6):
        (folder / f"{index}").mkdir(parents=True)
        (folder / f"{index}" / "text.txt").write_text(f"chapter {index} of the book of numbers\n" * (3 + index))


@pytest.mark.parametrize("reading", [["--packing", "documents"], ["--dataset_join", "repository"]])
def test_eval_reads_the_data_as_train_does(here: Path, saved_model: Path, reading: list[str]) -> None:
    write_texts(here / "texts")
    given = ["--dataset", "texts", *reading]
    trained = invoke("train", "--model", saved_model, *given, *SMALL, *RUN)
    assert trained.exit_code == 0, trained.output
    before, after = held_out(here / "out")
    assert measured(saved_model, *given) == pytest.approx(before, rel=1e-5)
    assert measured("out/model", *given) == pytest.approx(after, rel=1e-5)
    # Flags decide, not the settings of the run next to the model.
    assert measured("out/model", "--dataset", "texts") != pytest.approx(after, rel=1e-5)


def test_conversations_are_separate_by_default_in_both(here: Path) -> None:
    save_chats(20)
    trained = invoke("train", "--model", "model", "--dataset", "chats.jsonl", *SMALL, *RUN)
    assert trained.exit_code == 0, trained.output
    assert measured("model", "--dataset", "chats.jsonl") == pytest.approx(held_out(here / "out")[0], rel=1e-5)
    joined = measured("model", "--dataset", "chats.jsonl", "--packing", "windows")
    assert joined != pytest.approx(held_out(here / "out")[0], rel=1e-5)


def test_needles_are_hidden_in_many_short_documents(here: Path) -> None:
    lines = [json.dumps({"text": f"{index} is a number. " * 4}) for index in range(200)]
    Path("lines.jsonl").write_text("\n".join(lines))
    probe = ["--needle_lengths", "2K", "--needle_depths", "2", "--needle_candidates", "2", "--needle_haystacks", "1"]
    given = ["--dataset", "lines.jsonl", "--packing", "documents", *SMALL]
    result = invoke("eval", "demo", *given, *probe, "--output", "eval.json")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("eval.json").read_text())
    assert found["needle"]["lengths"][0]["length"] == 2048
    assert found["settings"]["packing"] == "documents"
    assert "lines.jsonl: 1 document of up to 256 tokens" in result.output
    refused = invoke("eval", "demo", *given, *probe, "--needle_lengths", "64K")
    assert refused.exit_code == 2
    assert "too few for a haystack of 65,536" in refused.output


def test_examples_that_training_has_seen_are_reported(here: Path) -> None:
    Path("text.txt").write_text("x" * 1279)
    few = invoke("eval", "demo", "--dataset", "text.txt", *SMALL, "--max_eval_samples", "3")
    assert few.exit_code == 0, few.output
    assert "text.txt: 3 examples of 256 tokens" in few.output
    assert "oomb train holds out only 1 of them" in few.output
    more = invoke("eval", "demo", "--dataset", "text.txt", *SMALL, "--max_eval_samples", "9")
    assert "--max_eval_samples is 9, but the dataset has only 5" in more.output
    one = invoke("eval", "demo", "--dataset", "text.txt", *SMALL)
    assert "holds out" not in one.output and "has only" not in one.output


def options_of(command: str) -> dict[str, tuple[Any, ...]]:
    group: Any = typer.main.get_command(main.app)
    return {option.name: (option.opts, option.help, option.default) for option in group.commands[command].params}


def test_shared_options_are_declared_once() -> None:
    train, evaluated = options_of("train"), options_of("eval")
    for name in ("tokenizer_name", "dataset", "packing", "dataset_join", "needle_depths", "device", "kv_dtype"):
        assert evaluated[name] == train[name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--packing", "tight"], "--packing 'tight' is unknown; use one of auto, windows, documents"),
        (["--dataset_join", "all"], "--dataset_join 'all' is unknown; use one of documents, repository"),
    ],
)
def test_both_commands_refuse_wrong_values(flags: list[str], message: str) -> None:
    for command in (["train"], ["eval", "demo"]):
        result = invoke(*command, *flags)
        assert result.exit_code == 2
        assert message in result.output


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, saved_model: Path) -> Path:
    """The folder of a run that trained adapters."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapted")
    write_texts(folder / "texts")
    result = invoke(
        "train", "--model", saved_model, "--dataset", folder / "texts", "--use_peft", "--learning_rate", "1e-2",
        *SMALL, *RUN[:-1], folder / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder


def test_adapters_are_evaluated_on_top_of_their_base(adapted: Path, here: Path, saved_model: Path) -> None:
    before, after = held_out(adapted / "out")
    given = ["--dataset", adapted / "texts"]
    assert abs(after - before) > 1e-3
    assert measured(adapted / "out" / "model", *given) == pytest.approx(after, rel=1e-5)
    assert json.loads(Path("eval.json").read_text())["base"] == str(saved_model)
    assert measured(saved_model, *given) == pytest.approx(before, rel=1e-5)
    shown = invoke("eval", adapted / "out" / "model", *given, *SMALL)
    assert f"LoRA adapters on top of {saved_model}" in shown.output


def test_adapters_bring_their_own_tokenizer(adapted: Path, here: Path) -> None:
    folder = shutil.copytree(adapted / "out" / "model", here / "model")
    settings = EvalSettings(model_name_or_path=str(folder))
    assert resolve_tokenizer_name(settings, "base") is None
    small_tokenizer().save_pretrained(folder)
    assert resolve_tokenizer_name(settings, "base") == str(folder)
    assert resolve_tokenizer_name(settings, None) is None
    assert resolve_tokenizer_name(EvalSettings(model_name_or_path=str(folder), tokenizer_name="mine"), "base") == "mine"


def test_adapters_that_do_not_load_are_refused(adapted: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(adapted / "out" / "model", here / "model")
    config = json.loads((folder / "adapter_config.json").read_text())

    def refused(**changes: Any) -> str:
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        result = invoke("eval", folder, *SMALL)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        return result.output

    assert "holds LoRA adapters of 'gone/for/good', which is not here" in refused(
        base_model_name_or_path="gone/for/good"
    )
    assert "names no base model" in refused(base_model_name_or_path=None)
    other = presets.preset_config("demo", hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(other).save_pretrained("other")
    assert "do not fit their base model" in refused(base_model_name_or_path="other")
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json cannot be read" in invoke("eval", folder, *SMALL).output
    with monkeypatch.context() as patched:
        patched.setattr(adapters, "find_spec", lambda name: None)
        assert "needs peft: pip install peft" in invoke("eval", folder, *SMALL).output
    assert importlib.util.find_spec("peft")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refused()
