"""`oomb tokenize`: a source to a folder of shards, in several processes; killed and started again, it goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oomb.data import shards
from oomb.data.discover import STDLIB, find_documents
from oomb.data.encode import Encoded, Encoder, EncodeStats, record_kind
from oomb.data.manifest import find, read_manifest
from oomb.data.sources import SEED, Source, open_source

POLL_S = 0.2

Report = Callable[[int, int], None]
"""Called with the bytes of the source that are done, and with all of them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to tokenise."""

    dataset: str
    output: Path
    tokenizer_name: str | None = None
    load_tokenizer: Callable[[], Any] | None = None
    """Called once in every process. None: bytes."""
    join: str = "documents"
    seed: int = SEED
    shard_bytes: int = 16 << 20
    """Of the source. Smaller ones lose less when killed, and make more files."""
    num_proc: int = 1
    overwrite: bool = False


@dataclass(frozen=True)
class Result:
    folder: Path
    num_tokens: int
    num_documents: int
    num_shards: int
    num_kept: int
    """Shards that were there already."""
    notes: tuple[str, ...]


@dataclass
class Work:
    """All that a process needs to write any shard."""

    source: Source
    order: np.ndarray
    sizes: np.ndarray
    """Bytes of the records, in that order."""
    borders: np.ndarray
    folder: Path
    kind: str
    digest: str
    dtype: str

    def write(self, number: int, encoder: Encoder, advance: Callable[[int], None]) -> None:
        tally = EncodeStats()

        def indices() -> Iterator[int]:
            for place in range(self.borders[number], self.borders[number + 1]):
                yield int(self.order[place])
                advance(int(self.sizes[place]))

        documents: Iterator[Encoded] = encoder.documents(self.source, indices(), tally)
        shards.write_shard(self.folder, number, self.digest, self.dtype, documents, tally)


def tokenize(job: Job, report: Report = lambda done, total: None) -> Result:
    """Raises where the folder holds something else, or what it was made of has changed."""
    for name, value in (("num_proc", job.num_proc), ("shard_size", job.shard_bytes)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be 1 or more")
    if job.dataset != STDLIB and find(Path(job.dataset).expanduser()):
        raise ValueError(f"{job.dataset} is tokenised already; name its source")
    _check_output(job)
    source = open_source(job.dataset, job.join)
    order = source.order(job.seed)
    kind = record_kind(source.read(0))
    encoder = Encoder(job.load_tokenizer() if job.load_tokenizer else None, kind)
    encoder.check_first(source, order)
    plan = _plan(job, source, encoder)
    # A tokenizer may go by another name and be the same.
    matters = {name: value for name, value in plan.items() if name != "tokenizer_name"}
    digest = hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()

    sizes = source.sizes()[order]
    number_of = (np.cumsum(sizes) - sizes) // job.shard_bytes
    borders = np.append(np.flatnonzero(np.diff(number_of, prepend=-1)), len(order))
    num_shards = len(borders) - 1
    work = Work(source, order, sizes, borders, job.output, kind, digest, encoder.dtype)

    job.output.mkdir(parents=True, exist_ok=True)
    shards.remove(job.output, ".*partial-*")
    manifest = None if job.overwrite else read_manifest(job.output)
    finished: set[int] = set()
    if manifest is not None:
        _check_unchanged(job, manifest["plan"], plan)
        if manifest["complete"] and shards.is_whole(job.output, manifest, work.dtype):
            shards.remove(job.output, "shard-*.json")
            return _result(job, manifest, num_shards, source.notes)
        finished = {number for number in range(num_shards) if shards.is_finished(job.output, number, digest)}
    else:
        shards.remove(job.output, *shards.OURS)
    shards.begin(job.output, plan, num_shards)
    missing = [number for number in range(num_shards) if number not in finished]
    of_shard = np.add.reduceat(sizes, borders[:-1])
    total, kept = int(sizes.sum()), int(sum(of_shard[number] for number in finished))
    report(kept, total)
    write = _in_this_process if job.num_proc == 1 or len(missing) < 2 else _in_processes
    write(job, work, encoder, missing, lambda done: report(kept + done, total))
    # Also while it was read.
    _check_unchanged(job, plan, {**plan, "files": _source_facts(job, source)})
    manifest = shards.finish(job.output, plan, num_shards, source.name)
    shards.remove(job.output, "shard-*.json", ".*partial-*")
    return _result(job, manifest, len(finished), source.notes)


def _result(job: Job, manifest: dict[str, Any], num_kept: int, notes: tuple[str, ...] = ()) -> Result:
    tally = EncodeStats(**manifest["tally"])
    return Result(
        folder=job.output,
        num_tokens=manifest["num_tokens"],
        num_documents=tally.num_documents,
        num_shards=manifest["num_shards"],
        num_kept=num_kept,
        notes=(*tally.notes(), *notes),
    )


def _check_output(job: Job) -> None:
    if job.output.exists() and not job.output.is_dir():
        raise ValueError(f"--output {job.output} is a file; name a folder")
    parent = next(path for path in (job.output, *job.output.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--output {job.output} cannot be written: {parent} is read-only for you")
    if job.output.is_dir() and find(job.output) is None:
        others = sorted(path.name for path in job.output.iterdir() if not path.match(".*partial-*"))
        if others:
            raise ValueError(f"--output {job.output} holds other files ({others[0]}, …); name another folder")
    if job.dataset != STDLIB and job.output.resolve().is_relative_to(Path(job.dataset).expanduser().resolve()):
        raise ValueError(f"--output {job.output} lies inside of the dataset; name a folder elsewhere")


def _plan(job: Job, source: Source, encoder: Encoder) -> dict[str, Any]:
    """All that the shards depend on. Two runs with the same plan write the same bytes."""
    return {
        "tokenizer_name": job.tokenizer_name,
        "tokenizer": encoder.fingerprint(),
        "kind": encoder.kind,
        "join": job.join,
        "seed": job.seed,
        "shard_size": job.shard_bytes,
        "files": _source_facts(job, source),
    }


def _source_facts(job: Job, source: Source) -> dict[str, list[int]]:
    """Size and time of change of each file that is there."""
    root = find_documents(job.dataset)[1]
    base = root if root.is_dir() else root.parent
    facts = {path: path.stat() for path in sorted(source.files()) if path.exists()}
    return {path.relative_to(base).as_posix(): [fact.st_size, fact.st_mtime_ns] for path, fact in facts.items()}


def _check_unchanged(job: Job, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Names what has changed since the folder was begun."""
    remedy = f"start anew with --overwrite, or name another --output than {job.output}"
    before, now = old["files"], new["files"]
    for names, what in (
        ([name for name in before if name not in now], "is gone"),
        ([name for name in now if name not in before], "is new"),
        ([name for name in now if name in before and before[name] != now[name]], "has changed"),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{names[0]} {what} in {job.dataset} since it was tokenised{others}: {remedy}")
    if old["tokenizer"] != new["tokenizer"]:
        was, is_now = old["tokenizer_name"] or "bytes", new["tokenizer_name"] or "bytes"
        what = f"{is_now} has changed" if was == is_now else f"the tokenizer was {was} and is {is_now}"
        raise ValueError(f"{what} since {job.dataset} was tokenised: {remedy}")
    for name in ("join", "seed", "shard_size", "kind"):
        if old[name] != new[name]:
            raise ValueError(f"--{name} was {old[name]} and is {new[name]}: {remedy}")


def _in_this_process(job: Job, work: Work, encoder: Encoder, numbers: list[int], report: Callable[[int], None]) -> None:
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(done)

    for number in numbers:
        work.write(number, encoder, advance)


def _in_processes(job: Job, work: Work, encoder: Encoder, numbers: list[int], report: Callable[[int], None]) -> None:
    # Forking a process in which torch has started threads can hang.
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        min(job.num_proc, len(numbers)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(work, job.load_tokenizer, done, stop),
    )
    try:
        waiting: set[Future] = {pool.submit(_write_in_worker, number) for number in numbers}
        while waiting:
            finished, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            report(done.value)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died, which happens when memory runs out; finished shards are kept: run the same command "
            f"again with --num_proc below {job.num_proc}"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Stopped(Exception):
    pass


_worker: dict[str, Any] = {}


def _start_worker(work: Work, load_tokenizer: Callable[[], Any] | None, done: Any, stop: Any) -> None:
    # Ctrl-C reaches the whole process group; the parent tells the workers to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(num_bytes: int) -> None:
        if stop.is_set():
            raise _Stopped
        with done.get_lock():
            done.value += num_bytes

    encoder = Encoder(load_tokenizer() if load_tokenizer else None, work.kind)
    _worker.update(work=work, encoder=encoder, advance=advance)


def _end_with_parent() -> None:
    """A killed parent tells its workers nothing, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_worker(number: int) -> None:
    _worker["work"].write(number, _worker["encoder"], _worker["advance"])
