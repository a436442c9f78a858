"""Python code that comes with a model runs with --trust_remote_code only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils
from command import TOY_RUN, invoke
from tokenizer import small_tokenizer

from oomb.models import load

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
NEEDS_CODE = "needs Python code that comes with it (auto_map in its config.json)"
SMALL = ["--device", "cpu", "--chunk_size", "32"]
COMMANDS = {
    "train": ["train", *TOY_RUN, "--model_name_or_path", "own", "--max_steps", "1"],
    "eval": ["eval", "own", "--dataset", "text.txt", "--max_length", "64", *SMALL],
    "plan": ["plan", "--model", "own", "--context", "1K", "--gpu", "24GiB", "--host", "8GiB", "--chunk_size", "256"],
    "verify": ["verify", "own", "--context", "64", *SMALL],
    "bench": ["bench", "--model", "own", "--contexts", "64", "--repeats", "1", *SMALL],
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once the code of the model in the folder `own` has run. Prompts are answered with yes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    # transformers copies such code to this folder and imports it from there.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "code_was_run"
    load.load_model("demo", device="cpu", dtype="float32").save_pretrained("own")
    Path("own/own.py").write_text(CODE.format(marker=str(marker)))
    change("own/config.json", model_type="own", auto_map=AUTO_MAP)
    Path("text.txt").write_text("some text " * 200)
    return marker


def change(path: str, **values: Any) -> None:
    Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), **values}))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_model_code_runs_only_if_trusted(marker: Path, command: list[str]) -> None:
    done = invoke(*command)
    assert not marker.exists(), "untrusted code ran"
    assert done.exit_code == 2
    assert f"own {NEEDS_CODE}" in done.output and "pass --trust_remote_code if you trust" in done.output
    done = invoke(*command, "--trust_remote_code")
    assert done.exit_code == 0, done.output
    assert marker.exists()


def test_tokenizer_code_runs_only_if_trusted(marker: Path) -> None:
    small_tokenizer().save_pretrained("own")
    change("own/tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]}, tokenizer_class="Own")
    Path("own/config.json").unlink()
    tokenize = ["tokenize", "--dataset", "text.txt", "--output", "tokens", "--tokenizer_name", "own"]
    done = invoke(*tokenize)
    assert not marker.exists(), "untrusted code ran"
    assert done.exit_code == 2
    assert "own needs Python code that comes with it (auto_map in its tokenizer_config.json)" in done.output
    done = invoke(*tokenize, "--trust_remote_code")
    assert done.exit_code == 0, done.output
    assert marker.exists()


def test_code_next_to_a_known_architecture_is_ignored(marker: Path) -> None:
    with pytest.raises(ValueError, match="--trust_remote_code"):
        load.load_config("own")
    change("own/config.json", model_type="llama")
    model = load.load_model("own", device="cpu")
    assert type(model).__module__.startswith("transformers.models.llama")
    assert not marker.exists()
    change("own/config.json", model_type="own", auto_map={})
    with pytest.raises(ValueError, match="could not be loaded"):
        load.load_config("own")
