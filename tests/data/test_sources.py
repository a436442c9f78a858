"""Every kind of dataset gives the right examples, and errors name the file and line."""

from __future__ import annotations

import gzip
import pickle
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets_made import HELLO, examples, opened, texts, texts_with_loss, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer import CHAT, small_tokenizer

from oomb.data import tokens as slices
from oomb.data.encode import SEPARATOR_ID
from oomb.data.sources import open_source, shuffled
from oomb.data.tokens import Examples, Tokens


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_of_text_are_documents(tmp_path: Path, name: str) -> None:
    words = [f"document {i} ä" for i in range(20)]
    # Blank lines do not count, and the last line break is optional.
    path = write_lines(tmp_path / name, *[{"text": word} for word in words[:10]], "", "\r")
    tail = write_lines(tmp_path / "tail.jsonl", *[{"text": word, "id": 1} for word in words[10:]]).read_bytes()[:-1]
    path.write_bytes(path.read_bytes() + (gzip.compress(tail) if name.endswith("gz") else tail))
    split = opened(path, packing="documents")
    assert sorted(texts(split)) == sorted(words)
    assert texts(split) != words, "lines are often sorted: the first must be a representative sample"
    assert all(ids[-1] == SEPARATOR_ID and labels == ids for ids, labels in examples(split.train))
    assert (split.num_documents, split.packing, split.notes) == (20, "documents", ())
    assert texts(split) == texts(opened(path, packing="documents"))
    assert texts(split) != texts(opened(path, packing="documents", seed=1))
    joined = opened(path, max_length=16)
    assert joined.packing == "windows"
    stream = [i for ids, _ in examples(split.train) for i in ids]
    assert [i for ids, _ in examples(joined.train) for i in ids] == stream[: len(stream) // 16 * 16]


def test_a_folder_of_lines_is_read_as_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", {"text": "one"}, {"text": "two"})
    write_lines(tmp_path / "2.jsonl.gz", {"text": "three"})
    split = opened(tmp_path, packing="documents")
    assert sorted(texts(split)) == ["one", "three", "two"]
    assert split.notes == ("1.jsonl, 2.jsonl.gz are read as one dataset; name a file to read only that one",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl:3: not JSON \(Expecting ',' delimiter, column 13\); expected"),
        ("plain words", r"a\.jsonl:3: not JSON"),
        ('["a"]', r"a\.jsonl:3: expected .*found a list"),
        ('{"body": "a", "id": 1}', r'a\.jsonl:3: expected \{"text".*found "body", "id"'),
        ('{"prompt": "a"}', r'a\.jsonl:3: expected .*found "prompt"'),
        ("{}", r"a\.jsonl:3: expected .*found no key"),
        ('{"text": 5}', r'a\.jsonl:3: "text" must be a string, found a int'),
        ('{"text": null}', r'a\.jsonl:3: "text" must be a string, found a NoneType'),
        ('{"text": "a\\ud800"}', r"a\.jsonl:3: .*half a surrogate pair at character 1"),
        ('{"messages": []}', r'a\.jsonl:3: expected "text" as in the first document, found "messages"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[{"text": "fine"}] * 2, line, *[{"text": "fine"}] * 40)
    with pytest.raises(ValueError, match=message):
        opened(path)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not UTF-8 \(byte 10 of the line\)"):
        opened(path)
    path.write_bytes(b'\xef\xbb\xbf{"text": "with a mark of byte order"}')
    assert opened(path, max_length=8).num_documents == 1
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz is not a complete gzip file"):
        opened(packed)
    (tmp_path / "c.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"c\.jsonl has no lines"):
        opened(tmp_path / "c.jsonl")


def test_lines_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "secret.jsonl", {"text": "a"})

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"secret\.jsonl cannot be read: Permission denied"):
        opened(path)


def test_the_order_of_records_is_the_same_for_ever() -> None:
    assert shuffled(8, 0).tolist() == [3, 5, 7, 4, 1, 2, 6, 0]
    assert sorted(shuffled(1000, -3).tolist()) == list(range(1000))
    # The first records are a representative sample.
    assert 400 < np.mean(shuffled(1000, 1)[:100]) < 600


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": "some"}, {"text": " \n"})
    split = opened(path, packing="documents")
    assert (texts(split), split.num_documents) == (["some"], 1)
    [note] = split.notes
    assert note.startswith("2 empty documents skipped, the first ") and note.endswith(("a.jsonl:1", "a.jsonl:3"))
    only = write_lines(tmp_path / "b.jsonl", {"text": ""})
    with pytest.raises(ValueError, match=r"b\.jsonl has nothing to train on: 1 empty document skipped.*b\.jsonl:1"):
        opened(only)


def test_an_unpacked_file_goes_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = write_lines(tmp_path / "a.jsonl.gz", {"text": "a word"})
    source = open_source(str(path))
    copy = pickle.loads(pickle.dumps(source))
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    assert copy.read(0) == source.read(0)
    del copy
    assert source.read(0).fields == {"text": "a word"}
    del source
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not a complete gzip file"):
        open_source(str(path))
    assert not list((tmp_path / "tmp").iterdir())


def test_a_repository_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.py").write_text("z = 1")
    (tmp_path / "b" / "a.py").write_text("a = 1\n")
    (tmp_path / "a.py").write_text("import b\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "logo.png").write_bytes(b"\x00\x01")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    split = opened(tmp_path, packing="documents", join="repository", max_length=1000)
    assert texts(split) == ["=== a.py ===\nimport b\n=== b/a.py ===\na = 1\n=== b/z.py ===\nz = 1\n=== empty.py ===\n"]
    assert examples(split.train)[0][0].count(SEPARATOR_ID) == 1
    assert examples(split.train)[0][0][-1] == SEPARATOR_ID
    assert (split.num_documents, [path.name for path in split.skipped]) == (1, ["logo.png"])
    # Only what is needed is read.
    some = opened(tmp_path, packing="documents", join="repository", max_length=8, num_train=2, num_held_out=1)
    assert (len(some.train), some.num_documents) == (2, 1)
    assert some.num_tokens < split.num_tokens
    tokenizer = small_tokenizer(first="<|turn|>")
    [(ids, _)] = examples(
        opened(tmp_path, tokenizer=tokenizer, join="repository", packing="documents", max_length=999).train
    )
    assert [i for i in ids if i in tokenizer.all_special_ids] == [ids[0], ids[-1]]
    assert tokenizer.decode(ids[1:-1]) == texts(split)[0]
    lines = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match=r"join is 'repository', but .* has records"):
        opened(lines, join="repository")
    with pytest.raises(ValueError, match="join is 'repo'; it must be one of documents, repository"):
        opened(lines, join="repo")
    with pytest.raises(ValueError, match="packing is 'x'; it must be one of auto, windows, documents"):
        opened(lines, packing="x")


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    max_length=st.integers(2, 12),
    flips=st.lists(st.booleans(), min_size=150, max_size=150),
)
def test_pieces_of_documents_predict_every_token_once(lengths: list[int], max_length: int, flips: list[bool]) -> None:
    ends = np.cumsum(lengths)
    stream = np.arange(ends[-1])
    has_loss = np.array(flips[: ends[-1]])
    edges = np.flatnonzero(np.diff(has_loss.astype(int), prepend=0, append=0)).reshape(-1, 2)
    # Two arrays, so that some pieces span both.
    half = len(stream) // 2
    tokens = Tokens([stream[:half], stream[half:]], ends, edges)
    windows = Examples(tokens, tokens.pieces(max_length))
    predicted = []
    for ids, labels in examples(windows):
        assert 2 <= len(ids) <= max_length
        assert ids == list(range(ids[0], ids[-1] + 1))
        assert np.searchsorted(ends, ids[0], side="right") == np.searchsorted(ends, ids[-1], side="right")
        assert labels == [i if has_loss[i] else -100 for i in ids]
        assert any(label != -100 for label in labels[1:])
        predicted += [label for label in labels[1:] if label != -100]
    firsts = {0, *ends.tolist()}
    assert predicted == [i for i in stream.tolist() if has_loss[i] and i not in firsts]
    assert windows.lengths == [len(ids) for ids, _ in examples(windows)]


def test_pieces_as_the_docstring_shows_them() -> None:
    assert slices.pieces(np.array([8]), 4).tolist() == [[0, 4], [3, 7], [6, 8]]


def test_windows_of_conversations_without_a_loss_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "p" * 100, "completion": "c" * 20})
    split = opened(path, packing="windows", max_length=10)
    # 121 tokens are 12 examples; loss is computed on tokens from 100 on.
    assert [ids[0] for ids, _ in examples(split.train)] == [ord("c")] * 2
    assert split.notes == ("10 examples without a token to predict left out",)
    # Pieces start 9 tokens apart: the one at 99 is the first with a token of the completion.
    assert len(opened(path, max_length=10).train) == 3


@pytest.mark.parametrize("num_train", [None, 3])
def test_held_out_documents_are_the_first_and_enough_are_read(tmp_path: Path, num_train: int | None) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(40)])
    everything = examples(opened(path).train)
    split = opened(path, num_train=num_train, num_held_out=2)
    assert examples(split.held_out) == everything[:2]
    assert examples(split.train) == everything[2 : None if num_train is None else 5]
    assert split.num_documents == (40 if num_train is None else 10), "five times what is held out"


def test_examples_are_the_same_in_another_process(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl.gz", *[{"text": f"number {i}"} for i in range(9)])
    split = opened(path, packing="documents", num_held_out=2)
    assert examples(pickle.loads(pickle.dumps(split.train))) == examples(split.train)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "some words"})
    with pytest.raises(ValueError, match=r"vocabulary of 300 and the tokenizer has 400 ids; .*--tokenizer_name"):
        opened(path, tokenizer=small_tokenizer(), vocab_size=300)
    with pytest.raises(ValueError, match=r"vocabulary of 256 and bytes need 258 ids"):
        opened(path, vocab_size=256)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<more>"])
    # A padding token outside the model's vocabulary does no harm until it is used.
    assert opened(path, tokenizer=tokenizer, vocab_size=400, max_length=2).num_documents == 1
    write_lines(path, {"text": "some <more> words"})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the tokenizer gives the id 400, but .* a vocabulary of 400"):
        opened(path, tokenizer=tokenizer, vocab_size=400)


def test_saved_datasets_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = small_tokenizer(
        CHAT.replace("{{ message['content'] }}", "{{ message['content'] }}{{ 'no' if 'tool_calls' in message }}")
    )
    rows = [
        {"messages": [*HELLO[1:2], {"role": "assistant", "content": f"{i}.", "tool_calls": None}]} for i in range(6)
    ]
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    expected = sorted(examples(opened(lines, tokenizer=tokenizer).train))
    assert len(expected) == 6
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    assert sorted(examples(opened(tmp_path / "saved", tokenizer=tokenizer).train)) == expected
    table.to_parquet(tmp_path / "a.parquet")
    assert sorted(examples(opened(tmp_path / "a.parquet", tokenizer=tokenizer).train)) == expected
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "splits")
    split = opened(tmp_path / "splits", tokenizer=tokenizer)
    assert sorted(examples(split.train)) == expected
    assert split.notes == ("splits not read: test",)
    datasets.DatasetDict(test=table).save_to_disk(tmp_path / "test_only")
    with pytest.raises(ValueError, match=r"has the splits test but no 'train'"):
        opened(tmp_path / "test_only", tokenizer=tokenizer)
    bad = datasets.Dataset.from_list([{"text": "a", "n": 1}, {"text": None, "n": 2}])
    bad.save_to_disk(tmp_path / "bad")
    with pytest.raises(ValueError, match=r'bad, row 1: expected .*found "n"'):
        opened(tmp_path / "bad")
    (tmp_path / "broken.parquet").write_bytes(b"not this")
    with pytest.raises(ValueError, match=r"broken\.parquet cannot be read as Parquet"):
        opened(tmp_path / "broken.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"saved needs the datasets package: pip install datasets$"):
        opened(tmp_path / "saved")


def shown(language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_lines_that_the_documentation_shows(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.jsonl", small_tokenizer()
    found = []
    for lines in shown("json"):
        path.write_text(lines)
        split = opened(path, tokenizer=tokenizer, max_length=1000, packing="documents")
        assert split.num_documents == len(lines.splitlines())
        found += [said for example in texts_with_loss(split, tokenizer) for said in example]
    assert {"4<|stop|>\n", " Paris<|end|>", "The first document.<|end|>"} <= set(found)


def test_the_program_that_the_documentation_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chats.jsonl", *[{"messages": HELLO}] * 3, {"messages": []})
    names: dict[str, Any] = {"tokenizer": small_tokenizer()}
    [program] = shown("python")
    exec(program, names)
    assert (len(names["split"].train), len(names["split"].held_out)) == (2, 1)
    assert set(names["example"]) == {"input_ids", "labels"}


def test_the_repository_that_the_documentation_shows(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from pkg.core import run\n")
    (tmp_path / "pkg" / "core.py").write_text("def run():\n    return 42\n")
    assert texts(opened(tmp_path, join="repository", packing="documents", max_length=999)) == shown("text")[:1]
