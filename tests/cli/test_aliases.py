"""Test names from Hugging Face and TRL: some are aliases, others are answered with what to use instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from command import invoke

from oomb.cli.train.aliases import ALIASES, NAME_OF, REMEDIES, reject_two_values, setting_of
from oomb.cli.train.schema import KNOWN
from oomb.cli.train.settings import PACKING_IN_TRL, TrainSettings
from oomb.config import SettingError

TWO_VALUES = "are the same setting with different values: give one of them"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(*arguments: str) -> dict[str, object]:
    result = invoke("train", *arguments, "--print_config")
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.output)


def refused(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and "No such option" not in result.output
    [line] = result.output.splitlines()
    return line


def in_file(text: str) -> str:
    Path("run.yaml").write_text(text)
    return refused("train", "run.yaml")


OTHER_NAMES = [
    ("dataset_name", "dataset", "texts/"),
    ("torch_dtype", "dtype", "bfloat16"),
    ("model", "model_name_or_path", "qwen2.5-0.5b"),
]


@pytest.mark.parametrize(("alias", "name", "value"), OTHER_NAMES)
def test_aliases_of_a_setting(here: Path, alias: str, name: str, value: str) -> None:
    for flags in ([f"--{alias}", value], [f"--{alias}={value}"], [f"--{alias}", value, f"--{name}", value]):
        assert printed(*flags)[name] == value
    Path("run.yaml").write_text(f"{alias}: {value}\n")
    assert printed("run.yaml")[name] == value
    # A flag overrides the file, by whichever name.
    assert printed("run.yaml", f"--{name}", "demo")[name] == "demo"
    Path("run.yaml").write_text(f"{name}: {value}\n")
    assert printed("run.yaml", f"--{alias}", "demo")[name] == "demo"
    Path("run.yaml").write_text(f"{name}: {value}\n{alias}: {value}\n")
    assert printed("run.yaml")[name] == value
    assert alias in NAME_OF and name in KNOWN
    assert f"--{name},--{alias}" in invoke("train", "--help").output


@pytest.mark.parametrize(("alias", "name", "value"), OTHER_NAMES)
def test_two_aliases_with_two_values_are_refused(here: Path, alias: str, name: str, value: str) -> None:
    message = refused("train", f"--{name}", "demo", f"--{alias}", value)
    assert message == f"error: --{alias} {value} and --{name} demo {TWO_VALUES}"
    assert TWO_VALUES in refused("train", f"--{alias}={value}", f"--{name}=demo")
    message = in_file(f"{alias}: {value}\n\n{name}: demo\n")
    assert message == f"error: run.yaml, line 3: {name} and {alias} in line 1 {TWO_VALUES}"
    assert "line 2: " + f"{alias} is given twice, first in line 1" in in_file(f"{alias}: a\n{alias}: a\n")


@pytest.mark.parametrize("command", [["eval", "demo"], ["tokenize", "--output", "tokens"]])
def test_other_commands_take_the_alias_of_the_dataset(here: Path, command: list[str]) -> None:
    assert "the dataset 'nowhere.txt' does not exist" in refused(*command, "--dataset_name", "nowhere.txt")
    assert TWO_VALUES in refused(*command, "--dataset_name", "nowhere.txt", "--dataset", "stdlib")


@pytest.mark.parametrize("name", REMEDIES)
def test_unsupported_settings_are_answered_with_a_remedy(here: Path, name: str) -> None:
    remedy = REMEDIES[name]
    for flags in ([f"--{name}"], [f"--{name}", "true"], [f"--{name}=1"]):
        assert refused("train", *flags, "--max_steps", "2") == f"error: --{name} {remedy}"
    assert refused("train", f"--{name.replace('_', '-')}") == f"error: --{name.replace('_', '-')} {remedy}"
    assert in_file(f"max_steps: 2\n{name}: true\n") == f"error: run.yaml, line 2: {name} {remedy}"


def test_remedies_name_existing_settings() -> None:
    assert not REMEDIES.keys() & (KNOWN.keys() | NAME_OF.keys())
    for remedy in REMEDIES.values():
        assert set(re.findall(r"--(\w+)", remedy)) <= KNOWN.keys()
    assert ALIASES.keys() <= KNOWN.keys()
    with pytest.raises(SettingError, match="use --bf16"):
        setting_of("no_fp16")
    assert setting_of("learning_rate") == "learning_rate"
    reject_two_values([])
    reject_two_values(["--dataset"])


def test_packing_takes_a_word_not_a_switch(here: Path) -> None:
    for given, word in (("true", "windows"), ("false", "documents")):
        said = f"packing is {given}; use {word}, which is what TRL does for {given}, or auto"
        assert refused("train", "--packing", given) == f"error: --{said}"
        assert refused("train", f"--packing={given.title()}") == f"error: --{said}"
        assert refused("eval", "demo", "--packing", given) == f"error: --{said}"
        assert in_file(f"seed: 1\npacking: {given}\n") == f"error: run.yaml, line 2: {said}"
        with pytest.raises(SettingError, match=said):
            TrainSettings(packing=given == "true")  # type: ignore[arg-type]
    for flags in (["--packing"], ["--packing", "--max_steps", "2"], ["--packing", "run.yaml"]):
        Path("run.yaml").write_text("seed: 1\n")
        assert "packing is true; use windows" in refused("train", *flags)
    assert printed("--packing", "documents")["packing"] == "documents"
    assert set(PACKING_IN_TRL.values()) == {"windows", "documents"}


def test_the_table_of_names_in_the_docs_is_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    table = text.split("| Hugging Face, TRL | oomb |\n|---|---|\n")[1].split("\n\n")[0]
    for line in table.splitlines():
        there, here = line.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", there):
            assert name in REMEDIES
        for name in re.findall(r"`(\w+)[`:]", here):
            assert name in KNOWN
