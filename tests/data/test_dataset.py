"""Examples of text: nothing is lost, padded or seen twice, and too little text is a clear error."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb.data.dataset import load
from oomb.data.discover import STDLIB, find_documents
from oomb.data.encode import SEPARATOR_ID
from oomb.data.tokens import Examples, Tokens


class Words:
    """Minimal tokenizer: a word becomes its length."""

    eos_token_id: int | None = 99
    bos_token_id: int | None = None
    sep_token_id: int | None = None
    prefix: list[int] = []  # noqa: RUF012

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        prefix = self.prefix if options["add_special_tokens"] else []
        return {"input_ids": prefix + [len(word) for word in text.split()]}


def tokens_of(dataset: Examples | None) -> list[int]:
    return [] if dataset is None else [int(i) for ids in examples_of(dataset) for i in ids]


def examples_of(dataset: Examples) -> list[torch.Tensor]:
    return [dataset[i]["input_ids"] for i in range(len(dataset))]


def test_a_file_becomes_bytes_and_a_separator(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"hello, w\xc3\xb6rld")
    split = load(str(file), max_length=7, num_held_out=0)
    assert tokens_of(split.train) == [*b"hello, w\xc3\xb6rld", SEPARATOR_ID]
    assert split.held_out is None
    assert split.num_tokens == 14
    sample = split.train[0]
    assert sample["input_ids"].dtype == torch.int64
    assert torch.equal(sample["input_ids"], sample["labels"])
    sample["labels"][0] = -100
    assert int(split.train[0]["input_ids"][0]) == ord("h"), "a caller's change of labels must not reach the text"


@pytest.mark.parametrize("num_train", [None, 1, 3, 8, 100])
def test_the_held_out_examples_are_the_first_however_many_are_trained_on(tmp_path: Path, num_train: int | None) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 101)))
    split = load(str(file), max_length=10, num_held_out=3, num_train=num_train)
    # At most a fifth of the ten examples.
    assert tokens_of(split.held_out) == list(range(1, 21))
    assert tokens_of(split.train) == list(range(21, 101))[: (num_train or 8) * 10]


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    max_length=st.integers(2, 50),
    num_held_out=st.integers(0, 3),
    num_train=st.none() | st.integers(1, 5),
)
def test_every_token_of_the_text_is_in_one_example_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    max_length: int,
    num_held_out: int,
    num_train: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for index, size in enumerate(sizes):
        (folder / f"{index}.txt").write_bytes(bytes([97 + index]) * size)
    order, _ = find_documents(str(folder))
    stream = [token for path in order for token in (*path.read_bytes(), SEPARATOR_ID)]
    if len(stream) < max_length:
        with pytest.raises(ValueError, match=f"has {len(stream)} tokens"):
            load(str(folder), max_length=max_length, num_train=num_train, num_held_out=num_held_out)
        return
    split = load(str(folder), max_length=max_length, num_train=num_train, num_held_out=num_held_out)
    seen = tokens_of(split.held_out) + tokens_of(split.train)
    assert seen == stream[: len(seen)]
    assert len(split.train) >= 1
    if num_train is None:
        assert len(seen) == len(stream) // max_length * max_length
    else:
        assert len(split.train) == min(num_train, len(stream) // max_length - len(split.held_out or ()))
    if num_held_out and len(seen) >= 2 * max_length:
        assert split.held_out is not None


def test_a_folder_is_read_in_a_fixed_order_without_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("bbbb")
    (tmp_path / "a.txt").write_text("aaaa")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("hhhh")
    (tmp_path / "image.bin").write_bytes(b"\x00\x01\x02")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfd")
    split = load(str(tmp_path), max_length=2, num_held_out=0)
    assert {path.name for path in split.skipped} == {"image.bin", "latin.txt"}
    assert split.num_documents == 2
    assert split.notes == (
        f"1 empty document skipped, the first {tmp_path / 'empty.txt'}",
        "2 files skipped, not text: image.bin (binary), latin.txt (not UTF-8, byte 0)",
    )
    text = tokens_of(split.train)
    assert sorted(text) == sorted([*b"aaaabbbb", SEPARATOR_ID, SEPARATOR_ID])
    assert text == tokens_of(load(str(tmp_path), max_length=2, num_held_out=0).train)


def test_a_tokenizer_and_its_separator(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one three five sixteen")
    assert tokens_of(load(str(file), max_length=5, tokenizer=Words()).train) == [3, 5, 4, 7, 99]  # type: ignore[arg-type]
    words = Words()
    words.eos_token_id, words.bos_token_id = None, 7
    assert tokens_of(load(str(file), max_length=5, tokenizer=words).train)[-1] == 7  # type: ignore[arg-type]
    # The tokenizer's prefix comes before every document.
    words.prefix = [7]
    assert tokens_of(load(str(file), max_length=6, tokenizer=words).train) == [7, 3, 5, 4, 7, 7]  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_standard_library_is_the_same_text_every_time() -> None:
    documents, root = find_documents(STDLIB)
    assert root == Path(sysconfig.get_paths()["stdlib"])
    parts = {part for path in documents for part in path.relative_to(root).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests"}
    assert documents == find_documents(STDLIB)[0]
    split = load(STDLIB, max_length=512, num_train=4, num_held_out=2)
    assert split.held_out is not None
    assert len(split.held_out) == 2
    assert len(split.train) >= 4
    assert max(tokens_of(split.train)) <= SEPARATOR_ID
    train = {tuple(ids.tolist()) for ids in examples_of(split.train)}
    assert not train & {tuple(ids.tolist()) for ids in examples_of(split.held_out)}


def test_only_as_much_as_requested_is_read(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text("x" * 99)
    assert load(str(tmp_path), max_length=100, num_train=7, num_held_out=1).num_documents == 8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"abc", r"short\.txt has 4 tokens \(bytes\), but one example needs 1024: give more text"),
        ("shorter.txt", b"abc" * 200, r"one example needs 1024: set --max_length to 601 or less"),
        ("empty.txt", b"", r"empty\.txt has nothing to train on: 1 empty document skipped"),
        ("binary.dat", b"a\x00b" * 30, r"binary\.dat is binary; give a UTF-8 text file"),
        ("latin.txt", b"caf\xe9 " * 30, r"latin\.txt is not UTF-8, byte 3; give"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(str(file), max_length=1024)


def test_other_bad_datasets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist\. Name a text file"):
        load(str(tmp_path / "nothing"), max_length=16)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"does not exist; did you mean '.*/empty'"):
        load(str(tmp_path / "emtpy"), max_length=16)
    with pytest.raises(ValueError, match="has no files"):
        load(str(tmp_path / "empty"), max_length=16)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="at least 2 tokens"):
        load(str(tmp_path / "a.txt"), max_length=1)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret.txt").write_text("text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"secret\.txt cannot be read: Permission denied"):
        load(str(tmp_path / "secret.txt"), max_length=2)


def test_examples_refuse_an_index_beyond_the_end() -> None:
    tokens = Tokens([np.arange(20, dtype=np.int32)], np.array([20]))
    split = Examples(tokens, tokens.blocks(10))
    assert len(split) == 2
    assert split[-1]["input_ids"].tolist() == list(range(10, 20))
    with pytest.raises(IndexError):
        split[2]
