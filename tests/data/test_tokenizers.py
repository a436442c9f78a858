"""A tokenizer that does not belong to the model is refused, though all of its ids are in the vocabulary."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from tokenizer import save_chats, small_tokenizer
from transformers import AutoModelForCausalLM

from oomb.cli.train import model as model_module
from oomb.cli.train.settings import TrainSettings
from oomb.config import SettingError
from oomb.data import tokenizers
from oomb.data.tokenizers import difference_in_ids, give_the_same_ids
from oomb.models import load, presets

TEXT = ["--dataset", "text.txt", "--max_length", "256", "--chunk_size", "64", "--device", "cpu"]
RUN = ["--max_steps", "1", "--sample_tokens", "0", "--no_report", "--output_dir", "out"]
REFUSED = "--tokenizer_name other is not the tokenizer of model, so its ids would map to different tokens: "


def other_tokenizer() -> Any:
    """A tokenizer of the same size as the small one, with merges learned from another text."""
    other = small_tokenizer(text=Path(argparse.__file__).read_text())
    assert len(other) == len(small_tokenizer()) == 400
    return other


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that has its own tokenizer, another tokenizer, and a text."""
    monkeypatch.chdir(tmp_path)
    save_chats(3)
    other_tokenizer().save_pretrained("other")
    Path("text.txt").write_text("The quick brown fox is a number. " * 99)
    return tmp_path


def test_tokenizers_are_compared_by_what_they_give() -> None:
    own, other = small_tokenizer(), other_tokenizer()
    assert give_the_same_ids(own, small_tokenizer(None, first="<|turn|>"))
    assert not give_the_same_ids(own, other) and not give_the_same_ids(other, own)
    # Tokens that the other does not have, in either direction.
    more = small_tokenizer()
    more.add_special_tokens({"pad_token": "<|pad|>"})
    more.add_tokens(["<tool>"])
    assert give_the_same_ids(own, more) and give_the_same_ids(more, own)


@pytest.mark.parametrize("text", tokenizers.PROBES)
def test_each_probe_can_tell(text: str) -> None:
    """Each text has a word that is one token in one tokenizer and several in the other."""
    changed = small_tokenizer()
    changed.add_tokens([max(text.split(), key=len)])
    difference = difference_in_ids(small_tokenizer(), changed)
    assert difference is not None and difference.startswith(repr(text))


def test_special_tokens_of_the_same_name_have_the_same_ids() -> None:
    own, changed = small_tokenizer(), small_tokenizer()
    swapped = changed.backend_tokenizer.to_str()
    for old, new in (("<|turn|>", "<swap>"), ("<|stop|>", "<|turn|>"), ("<swap>", "<|stop|>")):
        swapped = swapped.replace(old, new)
    changed = type(changed)(tokenizer_object=type(changed.backend_tokenizer).from_str(swapped), eos_token="<|end|>")
    assert difference_in_ids(own, changed) == "'<|turn|>' is [1] to the one and [2] to the other"


def test_a_token_may_be_special_to_one_of_them_alone() -> None:
    """How the other tokenizer would split that token's text does not matter."""
    own, named = small_tokenizer(), small_tokenizer()
    unused = [token for token in sorted(own.get_vocab()) if not any(token in text for text in tokenizers.PROBES)]
    # A token that the tokenizer would not produce from its own text.
    word = next(token for token in unused if own(token, add_special_tokens=False)["input_ids"] != [own.vocab[token]])
    named.add_special_tokens({"pad_token": word})
    assert named(word, add_special_tokens=False)["input_ids"] == [own.vocab[word]]
    assert give_the_same_ids(own, named) and give_the_same_ids(named, own)


def test_a_model_whose_own_tokenizer_cannot_be_read_takes_a_named_one(here: Path) -> None:
    """tokenizers raises a bare Exception for a file of a later version."""
    file = Path("model/tokenizer.json")
    described = json.loads(file.read_text())
    described["model"]["type"] = "of a later version"
    file.write_text(json.dumps(described))
    with pytest.raises(ValueError, match="model has no tokenizer that transformers can load"):
        load.load_tokenizer("model")
    other = load.load_tokenizer("other")
    assert tokenizers.another_tokenizer("other", other, "model", load.own_tokenizer("model")) is None


def test_what_differs_is_shown_briefly() -> None:
    difference = difference_in_ids(small_tokenizer(), other_tokenizer())
    assert difference is not None and len(difference) < 220
    # It starts at the first id that differs.
    one, other = difference.split(" is [")[-1].split("] to the one and [")
    assert one.split(", ")[:2] != other.split(", ")[:2]


@pytest.mark.parametrize("command", [["train", "--model", "model", *RUN], ["eval", "model"]])
def test_another_tokenizer_is_refused_before_weights_are_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(load, "load_model", lambda *args, **options: pytest.fail("weights were loaded"))
    refused = invoke(*command, *TEXT, "--tokenizer_name", "other")
    assert refused.exit_code == 2
    assert f'error: {REFUSED}"The quick brown fox' in refused.output
    assert re.search(r" is \[[\d, …]+\] to model and \[[\d, …]+\] to other\. Leave out --tok", refused.output)
    assert not Path("out").exists()


@pytest.mark.slow
def test_the_same_tokenizer_from_elsewhere_is_taken(here: Path) -> None:
    more = small_tokenizer(None)
    more.add_special_tokens({"pad_token": "<|pad|>"})
    more.save_pretrained("more")
    for command in (["train", "--model", "model", *RUN], ["eval", "model"]):
        for name in ("more", "model"):
            done = invoke(
                *command, *TEXT, "--tokenizer_name", name, *["--overwrite_output_dir"][: command[0] == "train"]
            )
            assert done.exit_code == 0, done.output


def test_a_model_without_a_tokenizer_takes_any_that_fits(here: Path) -> None:
    for path in Path("model").glob("tokenizer*"):
        path.unlink()
    done = invoke("train", "--model", "model", *RUN, *TEXT, "--tokenizer_name", "other")
    assert done.exit_code == 0, done.output
    config = load.load_config("demo")
    assert (
        model_module.load_tokenizer(TrainSettings(model_name_or_path="demo", tokenizer_name="other"), config)
        is not None
    )


def test_the_refusal_is_of_the_setting(here: Path) -> None:
    settings = TrainSettings(model_name_or_path="model", tokenizer_name="other")
    with pytest.raises(SettingError, match="Leave out --tokenizer_name") as raised:
        model_module.load_tokenizer(settings, load.load_config("model"))
    assert raised.value.key == "tokenizer_name"


def test_tokens_that_another_tokenizer_wrote_are_refused(here: Path) -> None:
    for name in ("model", "other"):
        written = invoke("tokenize", "--dataset", "text.txt", "--tokenizer_name", name, "--output", f"by {name}")
        assert written.exit_code == 0, written.output
    for command in (["train", "--model", "model", *RUN], ["eval", "model"]):
        refused = invoke(*command, *TEXT, "--dataset", "by other")
        assert refused.exit_code == 2
        assert (
            "by other was tokenized with other, but this run uses a different tokenizer: tokenize it again"
            in refused.output
        )
        done = invoke(*command, *TEXT, "--dataset", "by model")
        assert done.exit_code == 0, done.output


def test_added_tokens_beyond_the_vocabulary_are_no_harm_until_a_text_has_them(here: Path) -> None:
    tokenizer = small_tokenizer()
    AutoModelForCausalLM.from_config(presets.preset_config("demo", vocab_size=400, eos_token_id=0)).save_pretrained(
        "few"
    )
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained("few")
    assert len(tokenizer) == 401
    for command in (["train", "--model", "few", *RUN], ["eval", "few"]):
        done = invoke(*command, *TEXT)
        assert done.exit_code == 0, done.output
        Path("with.txt").write_text(Path("text.txt").read_text() + "<|pad|>")
        refused = invoke(*command, *TEXT, "--dataset", "with.txt", *["--overwrite_output_dir"][: command[0] == "train"])
        assert refused.exit_code == 2
        assert "the tokenizer gives the id 400, but the model has a vocabulary of 400" in refused.output
