"""Weights that are not whole, or not those of the config, are refused by the names of file and parameter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import invoke
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from oomb.cli.train import prepare
from oomb.cli.train.settings import TrainSettings
from oomb.models import adapters, load, presets, weight_files

SHARD = "model-00002-of-00008.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as one file, as several, and as a file of torch."""
    folder = tmp_path_factory.mktemp("saved")
    model = load.load_model("demo", device="cpu", dtype="float32")
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "several", max_shard_size="300KB")
    assert (folder / "several" / SHARD).is_file()
    (folder / "torch").mkdir()
    shutil.copy(folder / "one" / "config.json", folder / "torch")
    torch.save(model.state_dict(), folder / "torch" / "pytorch_model.bin")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def cut(path: Path, num_bytes: int = 1000) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


ONE, TORCH = "one/model.safetensors", "torch/pytorch_model.bin"
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    (ONE, cut, "is cut short: it has 1,650,336 bytes and its header says 1,651,336; download or copy it again"),
    (ONE, lambda path: path.write_bytes(path.read_bytes()[:100]), "is cut short: it has 100 bytes and its header says"),
    (ONE, lambda path: path.write_bytes(b""), "is cut short, at 0 bytes; download or copy it again"),
    (ONE, lambda path: path.write_bytes(path.read_bytes() + b"more"), "is damaged: it has 1,651,340 bytes and its"),
    (
        ONE,
        lambda path: path.write_text("<html>Not found</html>"),
        "is damaged: it does not begin as a safetensors file",
    ),
    (ONE, lambda path: path.write_bytes(b"\x09" + bytes(7) + b"{not JSON"), "is damaged: its header cannot be read"),
    (ONE, lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "is a pointer of Git LFS"),
    (f"several/{SHARD}", cut, "is cut short: it has"),
    (f"several/{SHARD}", Path.unlink, "is missing, of 8 files of weights that the index names; download or copy it"),
    ("several/model.safetensors.index.json", cut, "is damaged: it does not say where weights are; download or copy it"),
    (TORCH, cut, "is cut short, at "),
    (TORCH, lambda path: path.write_bytes(b""), "is cut short, at 0 bytes"),
]


@pytest.mark.parametrize(("name", "breaks", "said"), BROKEN)
def test_the_file_that_is_not_whole_is_named(
    here: Path, name: str, breaks: Callable[[Path], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = name.split("/")[0]
    assert load.load_model(folder, device="cpu") is not None
    assert weight_files.find_broken_file(Path(folder)) is None
    breaks(Path(name))
    with pytest.raises(ValueError, match=f"^{re.escape(name)} {re.escape(said)}"):
        load.load_model(folder, device="cpu")
    # The way of weights in 4 bits too, as far as it goes without a GPU.
    monkeypatch.setattr(adapters, "bnb_config", lambda load_in_4bit: None)
    settings = TrainSettings(model_name_or_path=folder, use_peft=True, load_in_4bit=True)
    with pytest.raises(ValueError, match=f"^{re.escape(name)} {re.escape(said)}"):
        prepare.load_model(settings, load.load_config(folder), "bfloat16", torch.device("cpu"))


@pytest.mark.parametrize("command", [["train", "--model"], ["eval"], ["verify"]])
def test_commands_say_so_in_one_message(here: Path, command: list[str]) -> None:
    cut(Path(f"several/{SHARD}"))
    length = ["--context", "1024"] if command == ["verify"] else ["--max_length", "256"]
    refused = invoke(*command, "several", *length, "--device", "cpu")
    assert refused.exit_code == 2, refused.output
    assert f"error: several/{SHARD} is cut short" in refused.output
    assert "Traceback" not in refused.output


def test_a_link_of_the_hubs_cache_is_told_with_what_it_leads_to(here: Path) -> None:
    Path(ONE).rename("blob")
    Path(ONE).symlink_to(here / "blob")
    assert weight_files.find_broken_file(Path("one")) is None
    cut(Path("blob"))
    said = weight_files.find_broken_file(Path("one"))
    assert said is not None and said.endswith(f"; remove {(here / 'blob').resolve()}, then download or copy it again")


def test_shapes_of_another_config_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load.load_model("several", device="cpu")
    set_config(Path("several"), intermediate_size=400)
    index = json.loads(Path("several/model.safetensors.index.json").read_text())["weight_map"]
    key = "model.layers.0.mlp.down_proj.weight"
    said = (
        rf"^several/{index[key]} has {key} of the shape \[128, 384\], and config\.json asks for \[128, 400\] "
        r"\(5 more are of other shapes too\): they are of different models; download or copy both again$"
    )
    with pytest.raises(ValueError, match=said):
        load.load_model("several", device="cpu")
    # transformers takes any shape where it quantises.
    loaded = (model, {"mismatched_keys": set(), "missing_keys": set()})
    monkeypatch.setattr(load, "_from_hugging_face", lambda *args, **options: loaded)
    config = presets.PRESETS["demo"]
    for size, is_refused in ((400, True), (config["intermediate_size"], False)):
        asked = presets.preset_config("demo", intermediate_size=size)
        if is_refused:
            with pytest.raises(ValueError, match=said):
                load.load_weights("several", config=asked, quantization_config=object())
        else:
            assert load.load_weights("several", config=asked, quantization_config=object()) is model


def test_parameters_that_would_start_at_random_are_refused(here: Path) -> None:
    set_config(Path("one"), num_hidden_layers=3)
    said = (
        r"^the weights of one lack 9 of the 30 parameters that its config\.json describes, and these would start at "
        r"random: model\.layers\.2\.input_layernorm\.weight, .* and 6 more; download or copy both again$"
    )
    with pytest.raises(ValueError, match=said):
        load.load_model("one", device="cpu")
    # Fewer layers than there are is what --layers of oomb verify asks for.
    assert load.load_model("several", device="cpu", num_layers=1).config.num_hidden_layers == 1


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_are_there_once(here: Path, is_tied: bool) -> None:
    config = presets.preset_config("demo", tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(config).save_pretrained("tied")
    held = load_file("tied/model.safetensors")
    assert ("lm_head.weight" in held) != is_tied
    held.pop("lm_head.weight", None)
    save_file(held, "tied/model.safetensors", metadata={"format": "pt"})
    if is_tied:
        model = load.load_model("tied", device="cpu")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        with pytest.raises(
            ValueError, match=r"lack 1 of the 21 parameters .* start at random: lm_head\.weight; download"
        ):
            load.load_model("tied", device="cpu")


def test_errors_that_are_not_of_the_files_stay_as_they_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(RuntimeError, match=r"^out of paper$"):
        load.load_model("one", device="cpu")
