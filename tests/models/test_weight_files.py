"""Damaged weights and weights of another config are refused, naming the file and the parameter."""

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

from oomb.cli.train import model as model_module
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
    (ONE, cut, "is cut short: it has 1,650,336 bytes and its header says 1,651,336"),
    (ONE, lambda path: path.write_bytes(path.read_bytes()[:100]), "is cut short: it has 100 bytes and its header says"),
    (ONE, lambda path: path.write_bytes(b""), "is cut short, at 0 bytes"),
    (ONE, lambda path: path.write_bytes(path.read_bytes() + b"more"), "is damaged: it has 1,651,340 bytes and its"),
    (ONE, lambda path: path.write_text("<html>Not found</html>"), "is damaged: it does not start like a safetensors"),
    (ONE, lambda path: path.write_bytes(b"\x09" + bytes(7) + b"{not JSON"), "is damaged: its header cannot be read"),
    (ONE, lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "is a Git LFS pointer"),
    (f"several/{SHARD}", cut, "is cut short: it has"),
    (f"several/{SHARD}", Path.unlink, "is missing, one of 8 files"),
    ("several/model.safetensors.index.json", cut, "is damaged: it does not list the weight files"),
    (TORCH, cut, "is cut short, at "),
    (TORCH, lambda path: path.write_bytes(b""), "is cut short, at 0 bytes"),
]


@pytest.mark.parametrize(("name", "breaks", "problem"), BROKEN)
def test_damaged_file_is_named(
    here: Path, name: str, breaks: Callable[[Path], object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = name.split("/")[0]
    assert load.load_model(folder, device="cpu") is not None
    assert weight_files.find_broken_file(Path(folder)) is None
    breaks(Path(name))
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} {re.escape(problem)}.*download or copy it again"):
        load.load_model(folder, device="cpu")
    # Loading in 4 bits, as far as it goes without a GPU.
    monkeypatch.setattr(adapters, "bnb_config", lambda load_in_4bit: None)
    settings = TrainSettings(model_name_or_path=folder, use_peft=True, load_in_4bit=True)
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} {re.escape(problem)}.*download or copy it again"):
        model_module.load_model(settings, load.load_config(folder), "bfloat16", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train", "--model"], ["eval"], ["verify"]])
def test_commands_print_one_message(here: Path, command: list[str]) -> None:
    cut(Path(f"several/{SHARD}"))
    length = ["--context", "1024"] if command == ["verify"] else ["--max_length", "256"]
    refused = invoke(*command, "several", *length, "--device", "cpu")
    assert refused.exit_code == 2, refused.output
    assert f"error: several/{SHARD} is cut short" in refused.output
    assert "Traceback" not in refused.output


def test_damaged_link_names_its_target(here: Path) -> None:
    Path(ONE).rename("blob")
    Path(ONE).symlink_to(here / "blob")
    assert weight_files.find_broken_file(Path("one")) is None
    cut(Path("blob"))
    problem = weight_files.find_broken_file(Path("one"))
    assert problem is not None and f"remove {(here / 'blob').resolve()}, then" in problem


def test_shapes_of_another_config_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load.load_model("several", device="cpu")
    set_config(Path("several"), intermediate_size=400)
    index = json.loads(Path("several/model.safetensors.index.json").read_text())["weight_map"]
    key = "model.layers.0.mlp.down_proj.weight"
    numbers = rf"^several/{index[key]} has {key} of shape \[128, 384\].* \[128, 400\] \(5 more"
    with pytest.raises(ValueError, match=numbers):
        load.load_model("several", device="cpu")
    # transformers does not compare shapes of weights that it quantizes.
    loaded = (model, {"mismatched_keys": set(), "missing_keys": set()})
    monkeypatch.setattr(load, "_from_hugging_face", lambda *args, **options: loaded)
    config = presets.PRESETS["demo"]
    for size, is_refused in ((400, True), (config["intermediate_size"], False)):
        described = presets.preset_config("demo", intermediate_size=size)
        if is_refused:
            with pytest.raises(ValueError, match=numbers):
                load.load_weights("several", config=described, quantization_config=object())
        else:
            assert load.load_weights("several", config=described, quantization_config=object()) is model


def test_missing_parameters_are_refused(here: Path) -> None:
    set_config(Path("one"), num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lack 9 of the 30 .*: model\.layers\.2\.input_layernorm\.weight, .* 6 more"):
        load.load_model("one", device="cpu")
    # `oomb verify --layers` asks for fewer layers than the files hold.
    assert load.load_model("several", device="cpu", num_layers=1).config.num_hidden_layers == 1


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_are_saved_once(here: Path, is_tied: bool) -> None:
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
        with pytest.raises(ValueError, match=r"lack 1 of the 21 parameters .*: lm_head\.weight;"):
            load.load_model("tied", device="cpu")


def test_other_errors_pass_unchanged(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(RuntimeError, match=r"^out of paper$"):
        load.load_model("one", device="cpu")
