"""Damage to a tokenized folder is named before training, and the same `oomb tokenize` command repairs it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import TOY_RUN, invoke
from datasets_made import examples, opened, write_lines

from oomb.data import shards
from oomb.data.tokenize import Job, tokenize

SHARD = "tokens-00001.npy"
ARRAYS = (SHARD, shards.DOCUMENTS, shards.LEARNT)


def job_of(folder: Path, **options: Any) -> Job:
    return Job(dataset=str(folder.with_name("source.jsonl")), output=folder, shard_bytes=500, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Several shards of completions in bytes; no loss is computed on prompts."""
    rows = [{"prompt": f"What is {i}? ", "completion": f"{i} is a number. " * (1 + i % 5)} for i in range(40)]
    write_lines(tmp_path / "source.jsonl", *rows)
    assert tokenize(job_of(tmp_path / "tokens")).num_shards > 3
    return tmp_path / "tokens"


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def replace_array(path: Path, values: np.ndarray) -> None:
    """Replace an array by one whose file has the same size."""
    size = path.stat().st_size
    np.save(path, values)
    assert path.stat().st_size == size


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest as an earlier release wrote it, without the newer checksums, and with another change."""
    path = folder / shards.MANIFEST
    manifest = json.loads(path.read_text())
    for key in ("checksum", "sha256"):
        manifest.pop(key, None)
    change(manifest)
    path.write_text(json.dumps(manifest))


def allow(folder: Path, name: str) -> None:
    """Write the current checksum of a shard to the manifest, so that the check reaches its content."""
    sums = {name: shards.write_array(folder / name, np.load(folder / name))}

    def change(manifest: dict[str, Any]) -> None:
        for shard in manifest["shards"]:
            shard["sha256"] = sums.get(shard["name"], shard["sha256"])

    rewrite_manifest(folder, change)


def refused(folder: Path, name: str, reason: str, **options: Any) -> None:
    remedy = r"\. Run the same oomb tokenize command again"
    with pytest.raises(ValueError, match=f"{re.escape(str(folder / name))} is damaged: {reason}.*{remedy}"):
        opened(folder, **options)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_is_found_and_the_command_repairs_it(folder: Path, name: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    flip(folder / name, -8)
    refused(folder, name, "its sha256 is [0-9a-f]{12}…, but manifest.json says [0-9a-f]{12}…")
    tokenize(job_of(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(opened(folder).train) > 0


def test_a_zeroed_page_is_found(folder: Path) -> None:
    path = folder / SHARD
    content = path.read_bytes()
    path.write_bytes(content[:256] + bytes(len(content) - 256))
    refused(folder, SHARD, "its sha256 is")


def test_another_dtype_of_the_same_size_is_found(folder: Path) -> None:
    replace_array(folder / SHARD, np.load(folder / SHARD).view("<f2"))
    refused(folder, SHARD, "its dtype is float16, but must be uint16")


def test_negative_ids_are_found(folder: Path) -> None:
    replace_array(folder / SHARD, -np.load(folder / SHARD).astype("<i2"))
    refused(folder, SHARD, "its dtype is int16, but must be uint16")
    # Also if the checksum matches the file.
    allow(folder, SHARD)
    refused(folder, SHARD, "its dtype is int16, but must be uint16")


def test_ids_beyond_the_largest_are_found(folder: Path) -> None:
    ids = np.load(folder / SHARD)
    ids[5] = 300
    replace_array(folder / SHARD, ids)
    allow(folder, SHARD)
    refused(folder, SHARD, "it has the token id 300, but manifest.json says that 256 is the largest")


def test_a_short_shard_is_found(folder: Path) -> None:
    """The file has its old size, but its header has fewer tokens than the manifest."""
    path = folder / SHARD
    num_tokens = len(np.load(path))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(%d,)" % num_tokens, b"(%d,)" % (num_tokens - 9)))
    assert len(np.load(path)) == num_tokens - 9
    refused(folder, SHARD, rf"its shape is \[{num_tokens - 9}\], but must be \[{num_tokens}\]")


@pytest.mark.parametrize(
    ("name", "reason"),
    [(shards.DOCUMENTS, "[0-9,]+ follows [0-9,]+"), (shards.LEARNT, "[0-9,]+ follows [0-9,]+")],
)
def test_places_out_of_order_are_found(folder: Path, name: str, reason: str) -> None:
    """Damage without a checksum to reveal it, as in folders of earlier releases."""
    places = np.load(folder / name)
    places[[3, 4]] = places[[4, 3]]
    replace_array(folder / name, places)
    rewrite_manifest(folder, lambda manifest: None)
    refused(folder, name, reason, packing="windows")


@pytest.mark.parametrize("name", [shards.DOCUMENTS, shards.LEARNT])
def test_places_beyond_the_tokens_are_found(folder: Path, name: str) -> None:
    places = np.load(folder / name)
    places.ravel()[-1] += 1000
    replace_array(folder / name, places)
    rewrite_manifest(folder, lambda manifest: None)
    num_tokens = int(places.ravel()[-1])
    refused(folder, name, f"the last (document|span) ends at {num_tokens:,}, but there are", packing="windows")


@pytest.mark.parametrize("name", ["../{}", "/tmp/{}", "{}/../../{}"])
def test_a_manifest_cannot_name_files_elsewhere(folder: Path, name: str) -> None:
    """The shard is moved to the path in the manifest, so that it could be read."""
    name = name.replace("/tmp", str(folder.parent)).replace("{}/..", "sub/..").replace("{}", SHARD)
    (folder / "sub").mkdir()
    (folder / SHARD).rename(folder / name)

    def rename(manifest: dict[str, Any]) -> None:
        manifest["shards"][1]["name"] = name
        manifest["bytes"][name] = manifest["bytes"].pop(SHARD)

    rewrite_manifest(folder, rename)
    refused(
        folder, shards.MANIFEST, f"it names the file '{re.escape(name)}', but may only name files in its own folder"
    )


WITHOUT: dict[str, Callable[[dict[str, Any]], object]] = {
    "no bytes": lambda manifest: manifest.pop("bytes"),
    "no tally": lambda manifest: manifest.pop("tally"),
    "no tokenizer": lambda manifest: manifest["plan"].pop("tokenizer"),
    "no num_tokens of a shard": lambda manifest: manifest["shards"][0].pop("num_tokens"),
    "another tally": lambda manifest: manifest["tally"].update(more=1),
    "shards that are no list": lambda manifest: manifest.update(shards={}),
    "a shard less": lambda manifest: manifest["shards"].pop(),
    "fewer tokens": lambda manifest: manifest.update(num_tokens=5),
}


@pytest.mark.parametrize("change", WITHOUT.values(), ids=WITHOUT)
def test_a_manifest_that_lacks_something_is_named(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite_manifest(folder, change)
    refused(folder, shards.MANIFEST, "")


def test_a_manifest_that_cannot_be_parsed_is_named_and_overwritten_when_asked(folder: Path) -> None:
    """Without a check, it would be read as a text of an ordinary folder."""
    expected = examples(opened(folder).train)
    flip(folder / shards.MANIFEST, 0)
    refused(folder, shards.MANIFEST, "it cannot be read as JSON")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged.*--overwrite"):
        tokenize(job_of(folder))
    tokenize(job_of(folder, overwrite=True))
    assert examples(opened(folder).train) == expected


def is_refused(folder: Path) -> bool:
    """Return whether the folder is refused with a message rather than crashing."""
    try:
        opened(folder)
    except Exception as error:
        return isinstance(error, ValueError)
    return False


def test_every_one_of_200_random_bit_flips_is_found(folder: Path) -> None:
    draw = random.Random(0)
    paths = sorted(folder.iterdir())
    assert {path.name for path in paths} >= {*ARRAYS, shards.MANIFEST}
    missed = []
    for _ in range(200):
        path = draw.choice(paths)
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, place, bit)
        if not is_refused(folder):
            missed.append((path.name, place, bit))
        flip(path, place, bit)
    assert missed == []
    assert len(opened(folder).train) > 0


def test_a_damaged_record_of_an_unfinished_folder_is_not_used(folder: Path) -> None:
    """The record has the document ends, so its shard is tokenized again."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    unfinished = folder.with_name("unfinished")

    def stop(done: int, total: int) -> None:
        if len(list(unfinished.glob("shard-*.json"))) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(job_of(folder.with_name("unfinished")), stop)
    record = unfinished / "shard-00001.json"
    ends = json.loads(record.read_text())["ends"]
    flipped = [ends[0] ^ 1, *ends[1:]]
    text = record.read_text()
    record.write_text(text.replace(f'"ends": [{ends[0]},', f'"ends": [{flipped[0]},'))
    assert json.loads(record.read_text())["ends"] == flipped
    tokenize(job_of(unfinished))
    assert {path.name: path.read_bytes() for path in unfinished.iterdir()} == before


def test_folders_of_earlier_releases_are_read_and_checked(folder: Path) -> None:
    expected = examples(opened(folder).train)
    rewrite_manifest(folder, lambda manifest: manifest["tally"].pop("left_out"))
    assert examples(opened(folder).train) == expected
    assert tokenize(job_of(folder)).num_kept > 3
    flip(folder / SHARD, -8)
    refused(folder, SHARD, "its sha256 is")


def test_shards_without_a_token_are_checked_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "source.jsonl", {"text": "a" * 600}, *[{"text": " " * 300}] * 9, {"text": "b" * 600})
    folder = tmp_path / "tokens"
    tokenize(Job(dataset=str(tmp_path / "source.jsonl"), output=folder, shard_bytes=100))
    assert opened(folder).num_tokens == 1202
    empty = next(path for path in sorted(folder.glob("tokens-*.npy")) if len(np.load(path)) == 0)
    flip(empty, -8)
    refused(folder, empty.name, "")


def test_the_check_can_be_skipped_and_reports_progress(folder: Path) -> None:
    flip(folder / SHARD, -8)
    refused(folder, SHARD, "its sha256 is")
    calls: list[tuple[int, int]] = []
    options: dict[str, Any] = {"skip_check": True, "report": lambda done, total: calls.append((done, total))}
    assert len(opened(folder, **options).train) > 0
    size = sum(path.stat().st_size for path in folder.glob("tokens-*.npy"))
    assert calls == sorted(calls) and calls[-1] == (size, size)
    # Cheap checks still run.
    flip(folder / shards.DOCUMENTS, -8)
    refused(folder, shards.DOCUMENTS, "its sha256 is", skip_check=True)


def test_train_and_eval_refuse_a_flipped_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    flip(folder / SHARD, -8)
    train = ["train", *TOY_RUN, "--dataset", "tokens", "--max_length", "64", "--chunk_size", "32", "--max_steps", "1"]
    evaluate = ["eval", "demo", "--dataset", "tokens", "--max_length", "64", "--chunk_size", "32", "--device", "cpu"]
    for command in (train, evaluate):
        done = invoke(*command)
        assert done.exit_code == 2, done.output
        assert "tokens-00001.npy is damaged: its sha256 is" in done.output
        done = invoke(*command, "--skip_dataset_check")
        assert done.exit_code == 0, done.output
        assert "the token ids of tokens are not checked: damaged files would be trained on" in done.output
