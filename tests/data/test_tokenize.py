"""`oomb tokenize` gives the source's examples and the same bytes after any kill, and reads nothing stale or broken."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from command import invoke
from datasets_made import HELLO, examples, opened, write_lines
from rich.console import Console
from tokenizer import CHAT, small_tokenizer
from waiting import wait_until

from oomb.cli import progress
from oomb.cli import tokenize as command
from oomb.data import shards
from oomb.data.tokenize import Job, tokenize

ROOT = Path(__file__).parents[2]


def folder_of_texts(folder: Path, num_files: int = 12) -> Path:
    for index in range(num_files):
        (folder / f"{index % 3}").mkdir(parents=True, exist_ok=True)
        (folder / f"{index % 3}" / f"{index}.txt").write_text(f"text number {index}, " * (5 + 7 * index))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder_of_texts(tmp_path / "texts")


def job_of(source: Path, output: Path, **options: Any) -> Job:
    return Job(**{"dataset": str(source), "output": output, "shard_bytes": 1500, **options})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["text", "repository", "lines", "completion", "messages"])
@pytest.mark.parametrize("packing", ["auto", "windows", "documents"])
def test_the_examples_are_those_of_the_source(tmp_path: Path, source: Path, kind: str, packing: str) -> None:
    rows: dict[str, Callable[[int], dict[str, Any]]] = {
        "lines": lambda i: {"text": f"{i} words " * (i % 7)},
        "completion": lambda i: {"prompt": f"{i}?" * i, "completion": "yes " * (i % 5)},
        "messages": lambda i: {"messages": [{"role": "user", "content": f"{i}" * i}, *HELLO[2 : 2 + i % 4]]},
    }
    if kind in rows:
        source = write_lines(tmp_path / "a.jsonl", *[rows[kind](i) for i in range(40)])
    join = "repository" if kind == "repository" else "documents"
    tokenizer = small_tokenizer(first="<|turn|>")
    folder = tmp_path / "tokens"
    result = tokenize(job_of(source, folder, join=join, load_tokenizer=lambda: tokenizer, shard_bytes=400))
    assert result.num_shards > 3
    options = {"tokenizer": tokenizer, "packing": packing, "max_length": 50, "num_held_out": 2}
    expected = opened(source, join=join, **options)
    found = opened(folder, **options)
    assert examples(found.train) == examples(expected.train) != []
    assert examples(found.held_out) == examples(expected.held_out) != []
    assert (found.num_tokens, found.num_documents) == (expected.num_tokens, expected.num_documents)
    assert (found.packing, found.notes) == (expected.packing, expected.notes)
    assert result.num_tokens == found.num_tokens
    few = opened(folder, **options, num_train=1)
    assert examples(few.train) == examples(expected.train)[:1]


def test_tokens_stay_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * (1 << 17))
    tokenize(job_of(tmp_path / "a.txt", tmp_path / "tokens"))
    split = opened(tmp_path / "tokens", max_length=1 << 19)
    assert split.num_tokens == (1 << 20) + 1
    assert len(pickle.dumps(split.train)) < 5000
    assert split.train[1]["input_ids"].tolist() == list(b"abcdefgh") * (1 << 16)
    assert np.load(tmp_path / "tokens" / "tokens-00000.npy", mmap_mode="r").dtype == np.uint16


def killed(action: Callable[[], object]) -> bool:
    """Return whether a forked copy of this process was killed while it ran the call."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.timing
@pytest.mark.parametrize("moment", ["in a file", "before a rename", "after a rename", "at a removal"])
def test_killed_at_any_write_and_started_again_the_bytes_are_the_same(
    tmp_path: Path, source: Path, moment: str
) -> None:
    whole = tmp_path / "whole"
    result = tokenize(job_of(source, whole))
    assert result.num_shards >= 4
    num_kills = most_kept = 0
    for at in range(100):
        output = tmp_path / f"killed-{at}"

        def tokenize_until_killed(at: int = at, output: Path = output) -> None:
            owner, name = {
                "in a file": (shards._HashingFile, "write"),
                "before a rename": (os, "fsync"),
                "after a rename": (Path, "replace"),
                "at a removal": (Path, "unlink"),
            }[moment]
            original, calls = getattr(owner, name), []

            def count(*arguments: Any, **options: Any) -> Any:
                if moment == "in a file":
                    file, written = arguments
                    arguments = (file, written[: len(written) // 2] if len(calls) == at else written)
                done = original(*arguments, **options)
                if moment == "in a file":
                    file._file.flush()
                calls.append(1)
                if len(calls) > at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

            setattr(owner, name, count)
            tokenize(job_of(source, output))

        if not killed(tokenize_until_killed):
            break
        num_kills += 1
        if json.loads((output / shards.MANIFEST).read_text())["complete"] if (output / shards.MANIFEST).exists() else 0:
            assert opened(output, max_length=9).num_tokens == result.num_tokens
        elif (output / shards.MANIFEST).exists():
            with pytest.raises(ValueError, match="is not finished: run the same oomb tokenize command"):
                opened(output)
        kept = {path: path.stat().st_ino for path in output.glob("tokens-*.npy")}
        finished = {path.name[6:11] for path in output.glob("shard-*.json")}
        again = tokenize(job_of(source, output))
        assert files(output) == files(whole)
        for path, inode in kept.items():
            if path.name[7:12] in finished:
                assert path.stat().st_ino == inode, "a finished shard is not written again"
        most_kept = max(most_kept, again.num_kept)
    # Writes of the manifest (twice), of the tokens and record of each shard and of the index, or the removal of each
    # record. An array is written in several calls.
    expected = result.num_shards if moment == "at a removal" else 2 * result.num_shards + 3
    assert num_kills == expected or (moment == "in a file" and num_kills > expected)
    assert most_kept == result.num_shards


def has_ended(process: psutil.Process) -> bool:
    try:
        # In a container, zombies may never be reaped.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


STUCK = """
import sys, threading
from pathlib import Path
from oomb.cli import main
from oomb.data import shards

write_shard = shards.write_shard

def stuck(number, documents):
    yield next(documents)
    Path(__file__).with_name(f"stuck-in-{number}").touch()
    threading.Event().wait()

def write(folder, number, digest, dtype, documents, tally):
    write_shard(folder, number, digest, dtype, documents if number < 3 else stuck(number, documents), tally)

shards.write_shard = write
if __name__ == "__main__":
    main.app(sys.argv[1:])
"""
"""Script that writes three shards and then stalls at the start of each later one. Workers run all but its last line."""


@pytest.mark.timing
@pytest.mark.slow
def test_two_processes_killed_and_started_again(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl.gz"
    write_lines(source, *[{"messages": [{"role": "user", "content": f"{i} " * 40}, *HELLO[2:]]} for i in range(600)])
    small_tokenizer(CHAT).save_pretrained(tmp_path / "tokenizer")
    words = ["tokenize", "--dataset", source, "--tokenizer_name", tmp_path / "tokenizer", "--shard_size", "4KiB"]
    done = invoke(*words, "--output", tmp_path / "whole", "--num_proc", "1")
    assert done.exit_code == 0, done.output
    (tmp_path / "stuck.py").write_text(STUCK)
    program = [sys.executable, tmp_path / "stuck.py", *words, "--num_proc", "2", "--output", tmp_path / "tokens"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([str(word) for word in program], stdout=subprocess.DEVNULL, env=environment)

    def are_begun() -> bool:
        """Return whether three shards are finished and each worker is in the middle of another."""
        assert process.poll() is None
        return [len(list(tmp_path.glob(pattern))) for pattern in ("tokens/shard-*.json", "stuck-in-*")] == [3, 2]

    wait_until(are_begun, lambda: f"there are {sorted(map(str, tmp_path.rglob('*')))}")
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(workers) >= 2
    wait_until(lambda: all(map(has_ended, workers)), lambda: "a worker outlives its parent")
    num_finished = len(list((tmp_path / "tokens").glob("shard-*.json")))
    num_shards = json.loads((tmp_path / "tokens" / shards.MANIFEST).read_text())["num_shards"]
    assert num_finished == 3 < num_shards
    done = invoke(*words, "--output", tmp_path / "tokens", "--num_proc", "1")
    assert done.exit_code == 0, done.output
    assert f"{num_shards} shards, {num_finished} of them kept" in done.output
    assert files(tmp_path / "tokens") == files(tmp_path / "whole")


@pytest.mark.timing
def test_what_has_changed_is_named(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "tokens"
    job = functools.partial(job_of, source, output)
    tokenize(job())
    before = files(output)
    assert tokenize(job()).num_kept == tokenize(job()).num_shards
    changed = source / "1" / "1.txt"
    facts = changed.stat()
    for change, message in (
        (
            lambda: changed.write_text("other"),
            r"1/1\.txt has changed in .*texts.* --overwrite",
        ),
        (lambda: (source / "new.txt").write_text("new"), r"new\.txt is new in"),
        (lambda: changed.unlink(), r"1/1\.txt is gone in"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            tokenize(job())
        (source / "new.txt").unlink(missing_ok=True)
        changed.write_text("text number 1, " * 12)
        os.utime(changed, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(ValueError, match=r"1/1\.txt has changed in"):
        # While it is being read.
        tokenize(job_of(source, tmp_path / "other"), lambda done, total: changed.write_text("other"))
    with pytest.raises(ValueError, match=r"1/1\.txt has changed in"):
        tokenize(job_of(source, tmp_path / "other"))
    changed.write_text("text number 1, " * 12)
    os.utime(changed, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    tokenizer = small_tokenizer()
    for options, message in (
        ({"seed": 1}, r"--seed changed from 42 to 1: .*--overwrite.*--output"),
        ({"join": "repository"}, "--join changed from documents to repository"),
        (
            {"load_tokenizer": lambda: tokenizer, "tokenizer_name": "small"},
            "the tokenizer changed from bytes to small since",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            tokenize(job(**options))
    assert files(output) == before
    assert tokenize(job(load_tokenizer=lambda: tokenizer, tokenizer_name="small", overwrite=True)).num_kept == 0
    # A different name for the same tokenizer is not a change.
    assert tokenize(job(load_tokenizer=small_tokenizer, tokenizer_name="the same")).num_kept > 0
    tokenizer.add_tokens(["<more>"])
    with pytest.raises(ValueError, match=r"small has changed since .*texts"):
        tokenize(job(load_tokenizer=lambda: tokenizer, tokenizer_name="small"))
    assert tokenize(job(overwrite=True)).num_kept == 0
    assert files(output) == before


def test_a_changed_chat_template_matters_to_conversations_alone(tmp_path: Path, source: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"messages": HELLO})
    other = CHAT.replace("<|stop|>", "<|end|>")
    for dataset, is_refused in ((source, False), (lines, True)):
        output = tmp_path / f"tokens of {dataset.stem}"
        tokenize(job_of(dataset, output, load_tokenizer=small_tokenizer, tokenizer_name="small"))
        if not is_refused:
            assert opened(output, tokenizer=small_tokenizer(other)).num_documents == 12
            continue
        with pytest.raises(ValueError, match="was tokenized with small, but this run uses a different tokenizer"):
            opened(output, tokenizer=small_tokenizer(other))


def test_a_folder_that_will_not_do_is_refused(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "tokens"
    tokenize(job_of(source, output, load_tokenizer=small_tokenizer, tokenizer_name="small"))
    with pytest.raises(ValueError, match=r"was tokenized with small, .*--tokenizer_name"):
        opened(output)
    most = json.loads((output / shards.MANIFEST).read_text())["tally"]["max_id"]
    with pytest.raises(ValueError, match=rf"has the token id {most}, but the model has a vocabulary of {most}"):
        opened(output, tokenizer=small_tokenizer(), vocab_size=most)
    assert opened(output, tokenizer=small_tokenizer(), vocab_size=most + 1).num_documents == 12
    with pytest.raises(ValueError, match=r"is tokenized already: .*join='repository'"):
        opened(output, tokenizer=small_tokenizer(), join="repository")
    with pytest.raises(ValueError, match="is tokenized already: pass its source"):
        tokenize(job_of(output, tmp_path / "again"))
    shard = output / "tokens-00001.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=r"tokens-00001\.npy is damaged: it has .* bytes.*Run the same oomb tokenize command again"
    ):
        opened(output, tokenizer=small_tokenizer())
    # The same size, other bytes: the command writes the shard again.
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert tokenize(job_of(source, output, load_tokenizer=small_tokenizer, tokenizer_name="small")).num_kept == 0
    assert shard.read_bytes() == whole
    manifest = json.loads((output / shards.MANIFEST).read_text())
    (output / shards.MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ValueError, match="another version of oomb"):
        opened(output, tokenizer=small_tokenizer())


def test_a_broken_shard_is_written_again(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "tokens"
    total = tokenize(job_of(source, tmp_path / "whole")).num_shards

    def stop(done: int, total: int) -> None:
        if len(list(output.glob("shard-*.json"))) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(job_of(source, output), stop)
    assert not list(output.glob(".*partial-*"))
    shard = output / "tokens-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-3])
    (output / "shard-00002.json").write_text("{")
    assert tokenize(job_of(source, output)).num_kept == 1
    assert total > 3 and files(output) == files(tmp_path / "whole")


def test_a_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, sync, calls = tmp_path / "tokens", os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(1)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"cannot be written: No space left on device. Finished shards are kept"):
            tokenize(job_of(source, output))
    assert not list(output.glob(".*partial-*"))
    assert tokenize(job_of(source, output)).num_kept == 2
    tokenize(job_of(source, tmp_path / "whole"))
    assert files(output) == files(tmp_path / "whole")


@pytest.mark.timing
def test_a_bad_line_is_named_by_any_number_of_processes(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", *[{"text": "word " * 50}] * 30, {"text": 5}, *[{"text": "word " * 50}] * 30
    )
    for num_proc in ("1", "2"):
        output = tmp_path / num_proc
        words = ("tokenize", "--dataset", path, "--output", output, "--num_proc", num_proc, "--shard_size", "2KiB")
        result = invoke(*words)
        assert result.exit_code == 2
        assert 'a.jsonl:31: "text" must be a string, found a int' in result.output
    empty = write_lines(tmp_path / "b.jsonl", {"text": ""})
    result = invoke("tokenize", "--dataset", empty, "--output", tmp_path / "empty")
    assert (result.exit_code, "has nothing to train on" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "nowhere"], "the dataset 'nowhere' does not exist"),
        (["--num_proc", "0"], "--num_proc is 0; it must be 1 or more"),
        (["--shard_size", "0"], "--shard_size is 0; it must be 1 or more"),
        (["--shard_size", "much"], "--shard_size is 'much'"),
        (["--join", "all"], "join is 'all'; it must be one of documents, repository"),
        (["--tokenizer_name", "nothing"], "'nothing' is not a preset, a folder here or a hub id"),
        (["--tokenizer_name", "demo"], "the preset 'demo' has no tokenizer: it reads bytes"),
        (["--output", "file"], "--output file is a file; name a folder"),
        (["--output", "used"], "--output used has other files (mine.txt, …)"),
        (["--output", "texts/tokens"], "--output texts/tokens is inside the dataset"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, source: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("used").mkdir()
    Path("used/mine.txt").touch()
    before = set(tmp_path.rglob("*"))
    result = invoke("tokenize", "--dataset", "texts", "--output", "out", *options)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.timing
def test_the_command_shows_what_it_does(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("tokenize", "--dataset", source, "--output", tmp_path / "tokens", "--num_proc", "1")
    assert result.exit_code == 0, result.output
    assert "tokens, 12 documents, 1 shard;" in result.output
    assert f"oomb train --dataset {tmp_path / 'tokens'}" in result.output
    screen = io.StringIO()
    with command._shown(Console(file=screen, force_terminal=True, width=80)) as report:
        report(1 << 20, 4 << 20)
    assert "1.0/4.0 MiB" in screen.getvalue()
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    screen = io.StringIO()
    with command._shown(Console(file=screen)) as report:
        report(1 << 20, 4 << 20)
    assert screen.getvalue() == "tokenized 25% of 4.0 MiB\n"
