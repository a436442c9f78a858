"""Which files of a folder are read, and as what: nothing is trained on or skipped silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import invoke
from datasets_made import HELLO, examples, opened, texts, write_lines
from tokenizer import small_tokenizer

from oomb.data.sources import open_source
from oomb.data.tokenize import Job, tokenize


def test_records_are_read_without_what_is_about_them(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    lines = write_lines(tmp_path / "train.jsonl", {"messages": HELLO}, {"messages": HELLO[:3]})
    expected = examples(opened(lines, tokenizer=tokenizer).train)
    for name in ("README.md", "readme_zh.txt", "LICENSE", "dataset_infos.json", ".gitattributes"):
        (tmp_path / name).write_text("words about it")
    split = opened(tmp_path, tokenizer=tokenizer)
    assert examples(split.train) == expected
    assert split.notes == ("skipped next to the records: LICENSE, README.md, dataset_infos.json, readme_zh.txt",)
    result = tokenize(Job(dataset=str(tmp_path), output=tmp_path.with_name("tokens"), load_tokenizer=lambda: tokenizer))
    assert result.notes == split.notes
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "test.jsonl", {"messages": HELLO})
    split = opened(tmp_path, tokenizer=tokenizer)
    assert split.num_documents == 3
    assert split.notes[0] == "sub/test.jsonl, train.jsonl are read as one dataset; name a file to read only that one"


@pytest.mark.parametrize("name", ["notes.txt", "chapter.md", "license_plates.txt", "train.json", "load.py"])
def test_text_next_to_records_is_refused(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / "train.jsonl", {"text": "one"})
    (tmp_path / "README.md").write_text("about")
    (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=rf"\(train\.jsonl\) and other files \({name}\).*--dataset_join repository"):
        opened(tmp_path)
    # Both remedies.
    assert texts(opened(tmp_path / "train.jsonl", packing="documents")) == ["one"]
    [text] = texts(opened(tmp_path, packing="documents", join="repository", max_length=999))
    assert '=== train.jsonl ===\n{"text": "one"}\n' in text and f"=== {name} ===\ntext\n" in text
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has records \(a\.parquet, train\.jsonl\) and other files"):
        opened(tmp_path)


def test_many_names_are_a_handful_and_a_count(tmp_path: Path) -> None:
    for index in range(9):
        write_lines(tmp_path / f"{index}.jsonl", {"text": "one"})
    [note] = opened(tmp_path, max_length=4).notes
    assert note.startswith("0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl and 5 more are read as one dataset")


@pytest.mark.timing
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_list_of_records_is_refused_with_a_command_that_makes_lines_of_it(tmp_path: Path, in_folder: bool) -> None:
    rows = [{"text": "ä one"}, {"text": 'a "second"\none'}]
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")
    (folder / "README.md").write_text("about")
    with pytest.raises(ValueError, match=r"a\.json is a list of records.*To convert it: python -c") as refusal:
        opened(folder if in_folder else folder / "a.json")
    command = str(refusal.value).split("To convert it: ")[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    split = opened(folder / "a.jsonl", packing="documents")
    assert sorted(texts(split)) == sorted(row["text"] for row in rows)


def test_json_that_is_no_list_of_records_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ('{"text": "one"}', '[{"name": "one"}]', "[1, 2]", '[{"text": "one"}', "[]\n", "{"):
        path.write_text(text)
        [note] = opened(path, max_length=2).notes
        assert note.endswith("a.json is read as plain text; for records, give lines of JSON in a .jsonl file")
    assert opened(tmp_path, max_length=2).notes == ()
    write_lines(path, {"messages": HELLO}, {"messages": HELLO})
    with pytest.raises(ValueError, match=r"a\.json has JSON lines: rename it to .*a\.jsonl$"):
        opened(path)
    # Among other files it is a text like any other.
    (tmp_path / "a.py").write_text("a = 1\n")
    assert opened(tmp_path, max_length=2).num_documents == 2


@pytest.mark.slow
@pytest.mark.parametrize("join", ["documents", "repository"])
def test_files_without_text_are_named_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d/sub").mkdir(parents=True)
    for index in range(4):
        Path(f"d/{index}.txt").write_text("words to learn " * 20)
    Path("d/sub/bin.png").write_bytes(b"\x89PNG\0")
    Path("d/latin.txt").write_bytes("\xe9t\xe9".encode("latin-1"))
    said = "2 files skipped, not text: latin.txt (not UTF-8, byte 0), sub/bin.png (binary)"
    train = (
        "train", "--max_length", "256", "--num_train_epochs", "1", "--device", "cpu", "--sample_tokens", "0",
        "--output_dir", "out",
    )  # fmt: skip
    whole = opened(Path("d"), join=join)
    assert whole.notes == (said,)
    # Small shards, so that the two files are in different ones.
    command = ("tokenize", "--dataset", "d", "--join", join, "--output", "t", "--shard_size", "10", "--num_proc", "1")
    assert said in invoke(*command).output
    # The second time, everything is already there.
    assert said in invoke(*command).output
    assert opened(Path("t")).notes == (said,)
    if join == "documents":
        result = invoke(*train, "--dataset", "d")
        assert result.exit_code == 0, result.output
        assert said in " ".join(result.output.split())
        for path in Path("d").glob("?.txt"):
            path.unlink()
        with pytest.raises(ValueError, match=r"d has nothing to train on: 2 files skipped, not text: latin\.txt"):
            opened(Path("d"))


def test_the_command_says_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"text": "one"})
    (tmp_path / "notes.txt").write_text("text")
    result = invoke("train", "--dataset", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--device", "cpu")
    assert result.exit_code == 2
    assert "and other files (notes.txt)" in " ".join(result.output.split())


def test_hub_ids_are_not_taken_for_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "HuggingFaceH4/ultrachat_200k"
    with pytest.raises(ValueError) as refusal:
        opened(Path(name))
    assert str(refusal.value) == (
        f"the dataset '{name}' does not exist here, and oomb does not download from the hub: in Python, "
        f"datasets.load_dataset('{name}').save_to_disk('FOLDER'), then --dataset FOLDER"
    )
    for path in ("data/train.jsonl", "data/words.txt", "./a/b", "/a/b", "../a/b", "a/b/c", "~/a/b", "name"):
        with pytest.raises(ValueError, match=r"does not exist\. Name a text file"):
            open_source(path)
    # The parent folder exists, so the name is mistyped.
    Path("HuggingFaceH4/ultrachat").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"does not exist; did you mean 'HuggingFaceH4/ultrachat'\?"):
        open_source(name)
