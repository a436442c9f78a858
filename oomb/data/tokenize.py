"""Tokenize a dataset into a folder of shards, in several processes; an interrupted run continues where it stopped."""

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
from oomb.data.checking import Report, no_report
from oomb.data.discover import STDLIB, find_documents
from oomb.data.encode import Encoded, Encoder, EncodeStats, record_kind
from oomb.data.manifest import find, read_manifest
from oomb.data.sources import SEED, Source, open_source

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `tokenize` does."""

    dataset: str
    """As for `open_dataset`."""
    output: Path
    """Folder to write."""
    tokenizer_name: str | None = None
    load_tokenizer: Callable[[], Any] | None = None
    """Called once in every process. None: a token is a byte."""
    join: str = "documents"
    seed: int = SEED
    shard_bytes: int = 16 << 20
    """Bytes of the source per shard. With smaller shards a kill loses less, but there are more files."""
    num_proc: int = 1
    overwrite: bool = False
    """Start over if the folder holds different tokens."""


@dataclass(frozen=True)
class Result:
    """What `tokenize` wrote."""

    folder: Path
    num_tokens: int
    num_documents: int
    num_shards: int
    num_kept: int
    """Shards that an earlier run had finished."""
    notes: tuple[str, ...]
    """Remarks for the user."""


@dataclass
class Work:
    """Everything a process needs to write any shard."""

    source: Source
    order: np.ndarray
    sizes: np.ndarray
    """Bytes of the records, in that order."""
    bounds: np.ndarray
    """Positions in the order where shards begin, and the end."""
    folder: Path
    kind: str
    digest: str
    """Hash of everything the shards depend on."""
    dtype: str

    def write(self, number: int, encoder: Encoder, advance: Callable[[int], None]) -> None:
        """Write one shard. `advance` is called with the bytes of every record."""
        stats = EncodeStats()

        def indices() -> Iterator[int]:
            for place in range(self.bounds[number], self.bounds[number + 1]):
                yield int(self.order[place])
                advance(int(self.sizes[place]))

        documents: Iterator[Encoded] = encoder.documents(self.source, indices(), stats)
        shards.write_shard(self.folder, number, self.digest, self.dtype, documents, stats)


def tokenize(job: Job, report: Report = no_report) -> Result:
    """Write the tokens of a dataset to a folder, continuing what an interrupted run began.

    Args:
        job: What to do.
        report: Called with the bytes of the source done and in total.

    Raises:
        ValueError: The dataset is bad, the folder has other files, or the dataset, tokenizer or an option has changed
            since the folder was begun.
    """
    for name, value in (("num_proc", job.num_proc), ("shard_size", job.shard_bytes)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be 1 or more")
    if job.dataset != STDLIB and find(Path(job.dataset).expanduser()):
        raise ValueError(f"{job.dataset} is tokenized already: pass its source")
    _check_output(job)
    source = open_source(job.dataset, job.join)
    order = source.order(job.seed)
    kind = record_kind(source.read(0))
    encoder = Encoder(job.load_tokenizer() if job.load_tokenizer else None, kind)
    encoder.check_first(source, order)
    plan = _plan(job, source, encoder)
    # The same tokenizer may go by several names.
    relevant = {name: value for name, value in plan.items() if name != "tokenizer_name"}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()

    sizes = source.sizes()[order]
    shard_of = (np.cumsum(sizes) - sizes) // job.shard_bytes
    bounds = np.append(np.flatnonzero(np.diff(shard_of, prepend=-1)), len(order))
    num_shards = len(bounds) - 1
    work = Work(source, order, sizes, bounds, job.output, kind, digest, encoder.dtype)

    job.output.mkdir(parents=True, exist_ok=True)
    shards.remove(job.output, ".*partial-*")
    manifest = None if job.overwrite else read_manifest(job.output)
    finished: set[int] = set()
    if manifest is not None:
        _check_unchanged(job, manifest["plan"], plan)
        if manifest["complete"] and shards.is_undamaged(job.output, manifest, work.dtype):
            shards.remove(job.output, "shard-*.json")
            return _result(job, manifest, num_shards, source.notes)
        finished = {number for number in range(num_shards) if shards.is_finished(job.output, number, digest)}
    else:
        shards.remove(job.output, *shards.PATTERNS)
    shards.begin(job.output, plan, num_shards)
    missing = [number for number in range(num_shards) if number not in finished]
    shard_sizes = np.add.reduceat(sizes, bounds[:-1])
    total, kept = int(sizes.sum()), int(sum(shard_sizes[number] for number in finished))
    report(kept, total)
    write = _in_this_process if job.num_proc == 1 or len(missing) < 2 else _in_processes
    write(job, work, encoder, missing, lambda done: report(kept + done, total))
    # The source may have changed while it was read.
    _check_unchanged(job, plan, {**plan, "files": _file_stats(job, source)})
    manifest = shards.finish(job.output, plan, num_shards, source.name)
    shards.remove(job.output, "shard-*.json", ".*partial-*")
    return _result(job, manifest, len(finished), source.notes)


def _result(job: Job, manifest: dict[str, Any], num_kept: int, notes: tuple[str, ...] = ()) -> Result:
    stats = EncodeStats(**manifest["tally"])
    return Result(
        folder=job.output,
        num_tokens=manifest["num_tokens"],
        num_documents=stats.num_documents,
        num_shards=manifest["num_shards"],
        num_kept=num_kept,
        notes=(*stats.notes(), *notes),
    )


def _check_output(job: Job) -> None:
    if job.output.exists() and not job.output.is_dir():
        raise ValueError(f"--output {job.output} is a file; name a folder")
    parent = next(path for path in (job.output, *job.output.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--output {job.output} cannot be written: no permission to write to {parent}")
    if job.output.is_dir() and find(job.output) is None:
        others = sorted(path.name for path in job.output.iterdir() if not path.match(".*partial-*"))
        if others:
            raise ValueError(f"--output {job.output} has other files ({others[0]}, …); name another folder")
    if job.dataset != STDLIB and job.output.resolve().is_relative_to(Path(job.dataset).expanduser().resolve()):
        raise ValueError(f"--output {job.output} is inside the dataset; name a folder elsewhere")


def _plan(job: Job, source: Source, encoder: Encoder) -> dict[str, Any]:
    """Return everything the shards depend on. Two runs with the same plan write the same bytes."""
    return {
        "tokenizer_name": job.tokenizer_name,
        "tokenizer": encoder.fingerprint(),
        "kind": encoder.kind,
        "join": job.join,
        "seed": job.seed,
        "shard_size": job.shard_bytes,
        "files": _file_stats(job, source),
    }


def _file_stats(job: Job, source: Source) -> dict[str, list[int]]:
    """Return size and modification time of each file of the source."""
    root = find_documents(job.dataset)[1]
    base = root if root.is_dir() else root.parent
    stats = {path: path.stat() for path in sorted(source.files()) if path.exists()}
    return {path.relative_to(base).as_posix(): [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def _check_unchanged(job: Job, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise ValueError naming what has changed since the folder was begun."""
    remedy = f"start over with --overwrite, or name another --output than {job.output}"
    before, now = old["files"], new["files"]
    for names, what in (
        ([name for name in before if name not in now], "is gone"),
        ([name for name in now if name not in before], "is new"),
        ([name for name in now if name in before and before[name] != now[name]], "has changed"),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{names[0]} {what} in {job.dataset} since it was tokenized{others}: {remedy}")
    if old["tokenizer"] != new["tokenizer"]:
        was, is_now = old["tokenizer_name"] or "bytes", new["tokenizer_name"] or "bytes"
        what = f"{is_now} has changed" if was == is_now else f"the tokenizer changed from {was} to {is_now}"
        raise ValueError(f"{what} since {job.dataset} was tokenized: {remedy}")
    for name in ("join", "seed", "shard_size", "kind"):
        if old[name] != new[name]:
            raise ValueError(f"--{name} changed from {old[name]} to {new[name]}: {remedy}")


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
            "a worker process died, probably because memory ran out. Finished shards are kept: run the same command "
            f"again with --num_proc below {job.num_proc}"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Stopped(Exception):
    """Raised in a worker when the parent stops."""


_worker: dict[str, Any] = {}


def _start_worker(work: Work, load_tokenizer: Callable[[], Any] | None, done: Any, stop: Any) -> None:
    # Ctrl-C reaches the whole process group, but only the parent decides when workers stop.
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
    """Exit with the parent: if it is killed, workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _write_in_worker(number: int) -> None:
    _worker["work"].write(number, _worker["encoder"], _worker["advance"])
