"""End all ranks when one fails, with its message, instead of waiting for a collective to time out.

A rank that fails writes its message to the store that the ranks met at. Every rank has a thread that reads it. Waits in
our collectives then raise `RankFailed`; a wait elsewhere ends when the process that failed exits and its connections
close, or is aborted. Each rank also keeps counting in the store, so that its neighbor notices if it dies.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")

LOOK_S = 0.5
"""Polling interval of the store."""
SILENT_S = 60.0
"""A rank whose count stays the same for this long is considered dead."""
ABORT_S, EXIT_S = 15.0, 120.0
"""How long after a failure elsewhere a rank that has not noticed aborts its NCCL collectives, and exits."""

LEAVE_S = 5.0
"""How long a rank that failed stays, so that the others end with its message."""

EXPECTED = (ValueError, OSError, MemoryError, ArithmeticError)
"""Errors whose message says it all."""
FAILURE, NOTICED, FINISHED, STOP = "oomb/failure", "oomb/noticed", "oomb/finished", "oomb/stop"


class RankFailed(RuntimeError):
    """Another rank failed, so this one stopped.

    Args:
        rank: the rank that failed.
        message: its error.

    Examples:
        >>> import oomb
        >>> error = oomb.RankFailed(3, "the disk is full")
        >>> error.rank, str(error)
        (3, 'rank 3: the disk is full')
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.message = rank, message
        self.is_elsewhere = True


class Watch:
    """What one rank knows about the failures of the others.

    Args:
        store: Store that all ranks reach. It gets a connection of its own.
        rank: This rank.
        world_size: Number of ranks.
        silent_s: A rank that is silent for this long is considered dead.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, silent_s: float = SILENT_S) -> None:
        self._store, self.rank, self.world_size, self.silent_s = store.clone(), rank, world_size, silent_s  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._failure: tuple[int, str] | None = None
        self._has_noticed = threading.Event()
        self._is_over = threading.Event()
        self._beats = self._num_calls = 0
        self._seen: tuple[int, float] = (-1, time.monotonic())
        """The neighbor's last count, and when it last changed."""
        self.on_stop: Callable[[], None] | None = None
        """Called once, in the watch's thread, when another rank was asked to stop."""
        self.while_waiting: Callable[[], None] = lambda: None
        """Called during waits for other ranks. It may raise."""
        self._thread = threading.Thread(target=self._run, name="oomb-watch", daemon=True)
        self._thread.start()

    def report(self, error: BaseException | str) -> None:
        """Tell the other ranks that this one failed. Only the first failure of all ranks counts."""
        if isinstance(error, RankFailed):
            return
        text = error if isinstance(error, str) else str(error) or type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted by Ctrl-C"
        elif isinstance(error, BaseException) and not isinstance(error, EXPECTED):
            text = f"{type(error).__name__}: {text}"
        self._report(self.rank, text)

    def leave(self, limit_s: float = LEAVE_S) -> None:
        """Wait a moment until the other ranks have noticed that this one failed, before the process ends.

        A launcher ends all processes when one has ended, which would cut short their messages. Ranks that wait in a
        collective outside of ours notice only when this process ends.
        """
        others = [f"{NOTICED}/{rank}" for rank in range(self.world_size) if rank != self.rank]
        give_up_at = time.monotonic() + limit_s
        while time.monotonic() < give_up_at:
            try:
                if all(map(self._is_there, others)):
                    return
            except RuntimeError:
                return
            time.sleep(LOOK_S / 10)

    def check(self, *, at_once: bool = False, cause: BaseException | None = None) -> None:
        """Raise `RankFailed` if another rank has failed.

        Args:
            at_once: Read the store now, and give a failure that is under way a moment to arrive.
            cause: Error that made the caller ask.
        """
        give_up_at = time.monotonic() + 4 * LOOK_S
        while at_once and self._failure is None and time.monotonic() < give_up_at:
            self._look()
            time.sleep(LOOK_S / 10)
        if self._failure is not None and self._failure[0] != self.rank:
            self.note()
            raise RankFailed(*self._failure) from cause
        self.while_waiting()

    @property
    def failure(self) -> tuple[int, str] | None:
        """The rank that failed first and its message, or None."""
        return self._failure

    def first_rank_does(self, call: Callable[[], T]) -> T:
        """Return on all ranks what `call()` returns on rank 0, or raise its error on all. It may take any time.

        All ranks must call this in the same order. The result must be small, and picklable.
        """
        self._num_calls += 1
        key = f"oomb/calls/{self._num_calls}"
        if self.rank == 0:
            outcome: tuple[Any, Exception | None]
            try:
                outcome = call(), None
            except Exception as error:
                outcome = None, error
            with self._lock:
                self._store.set(key, base64.b64encode(pickle.dumps(outcome)).decode())
        else:
            while not self._is_there(key):
                self.check()
                time.sleep(LOOK_S / 20)
            with self._lock:
                outcome = pickle.loads(base64.b64decode(self._store.get(key)))
        value, raised = outcome
        if raised is not None:
            if self.rank > 0:
                raised.is_elsewhere = True  # type: ignore[attr-defined]
            raise raised
        return cast(T, value)

    def _is_there(self, key: str) -> bool:
        with self._lock:
            return self._store.check([key])

    def request_stop(self) -> None:
        """Ask all ranks to stop."""
        with self._lock, suppress(RuntimeError):
            self._store.set(STOP, str(self.rank))

    def note(self) -> None:
        """Tell the other ranks that this one has stopped computing, and waits for none of them."""
        self._has_noticed.set()
        with self._lock, suppress(RuntimeError):
            self._store.set(f"{NOTICED}/{self.rank}", "1")

    def finish(self) -> None:
        """Tell the other ranks that this one needs nothing from them any more."""
        self.note()
        with self._lock, suppress(RuntimeError):
            self._store.set(f"{FINISHED}/{self.rank}", "1")

    def settle(self) -> None:
        """Wait until rank 0 has saved what it saves, before this process ends and a launcher ends all others.

        Return at once if rank 0 is silent, and after a moment if it may be waiting for this rank.
        """
        give_up_at, beats = time.monotonic() + LEAVE_S, ("", time.monotonic())
        while True:
            try:
                is_saving = self._is_there(f"{NOTICED}/0") or (self._failure is not None and self._failure[0] == 0)
                if self._is_there(f"{FINISHED}/0") or (not is_saving and time.monotonic() > give_up_at):
                    return
                with self._lock:
                    beat = self._store.get("oomb/beats/0").decode() if self._store.check(["oomb/beats/0"]) else ""
            except RuntimeError:
                return
            if beat != beats[0]:
                beats = beat, time.monotonic()
            if time.monotonic() - beats[1] > self.silent_s:
                return
            time.sleep(LOOK_S / 5)

    def close(self) -> None:
        """End the watch."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _report(self, rank: int, message: str) -> None:
        with self._lock, suppress(RuntimeError):
            if self._store.add(f"{FAILURE}/count", 1) == 1:
                has_machines = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
                where = f" (on {socket.gethostname()})" if has_machines and rank == self.rank else ""
                self._store.set(FAILURE, json.dumps([rank, f"{message}{where}"]))
        self._look()

    def _look(self) -> None:
        """Read failures and requests of other ranks from the store."""
        try:
            with self._lock:
                if self._failure is None and self._store.check([FAILURE]):
                    rank, message = json.loads(self._store.get(FAILURE))
                    self._failure = rank, message
                is_stopping = self.on_stop is not None and self._store.check([STOP])
        except RuntimeError:
            if not self._is_over.is_set() and self._failure is None:
                self._failure = 0, "the store that the ranks met at is gone: the launcher or rank 0 has ended"
            return
        on_stop = self.on_stop
        if is_stopping and on_stop is not None:
            self.on_stop = None
            on_stop()

    def _beat(self) -> None:
        """Count up, and look at the neighbor's count."""
        neighbor, self._beats = (self.rank + 1) % self.world_size, self._beats + 1
        with self._lock, suppress(RuntimeError):
            self._store.set(f"oomb/beats/{self.rank}", str(self._beats))
            if not self._store.check([f"oomb/beats/{neighbor}"]) or self._store.check([f"{FINISHED}/{neighbor}"]):
                self._seen = -1, time.monotonic()
                return
            number = int(self._store.get(f"oomb/beats/{neighbor}"))
            if number != self._seen[0]:
                self._seen = number, time.monotonic()
        if time.monotonic() - self._seen[1] > self.silent_s:
            self._report(neighbor, f"no sign of life for {self.silent_s:.0f} s; it died or its machine is unreachable")

    def _run(self) -> None:
        failed_at = None
        while not self._is_over.wait(LOOK_S):
            self._look()
            self._beat()
            if self._failure is None or self._failure[0] == self.rank or self._has_noticed.is_set():
                continue
            if failed_at is None:
                failed_at = time.monotonic()
                print(f"rank {self.rank} stops: {RankFailed(*self._failure)}", file=sys.stderr, flush=True)
            if time.monotonic() - failed_at > ABORT_S and torch.cuda.is_available():
                with suppress(Exception):
                    dist.distributed_c10d._abort_process_group()
            if time.monotonic() - failed_at > EXIT_S:
                os._exit(1)


_current: Watch | None = None


def start() -> Watch | None:
    """Start the watch of this process, if there are other ranks, and return it. Later calls return the same one."""
    global _current
    if _current is None and dist.is_initialized() and dist.get_world_size() > 1:
        # torchrun keeps its store over restarts. A new name hides what earlier processes wrote to it.
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name)
        store = dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())
        _current = Watch(store, dist.get_rank(), dist.get_world_size())
        hook = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            # A script without a trainer ends here.
            hook(kind, error, trace)
            if _current is not None and not isinstance(error, RankFailed):
                _current.report(error)
                _current.leave()

        sys.excepthook = report
        # Before Python ends: a thread that it stops within a call of the store would abort the process.
        atexit.register(_current.close)
    return _current


def current() -> Watch | None:
    """Return the watch of this process, or None if it is the only rank."""
    return _current


def check(*, at_once: bool = False, cause: BaseException | None = None) -> None:
    """Raise `RankFailed` if another rank has failed."""
    if _current is not None:
        _current.check(at_once=at_once, cause=cause)


def on_first_rank(call: Callable[[], T]) -> T:
    """Return on all ranks what `call()` returns on rank 0, or raise its error on all. See `Watch.first_rank_does`."""
    return call() if _current is None else _current.first_rank_does(call)


@contextmanager
def together() -> Iterator[None]:
    """Report an error in the body of a `with` to the other ranks, and raise theirs in place of a broken connection."""
    try:
        yield
    except RankFailed:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if _current is not None:
            if isinstance(error, RuntimeError):
                _current.check(at_once=True, cause=error)
            _current.report(error)
        raise


@contextmanager
def ending_together() -> Iterator[None]:
    """The same for a whole program: stay a moment after an error, so that the other ranks end with its message."""
    try:
        with together():
            yield
    except BaseException:
        if _current is not None:
            _current.leave()
        raise
