"""A rank that fails, dies or never arrives ends all others with a message, without waiting for a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from failing_run import PHASES
from ranks import finish, torchrun
from waiting import wait_until

from oomb.distributed import watch
from oomb.distributed.mesh import meet
from oomb.distributed.topology import TopologyError
from oomb.distributed.watch import RankFailed, Watch

NO_LIMIT_S = 3600.0


@pytest.fixture
def pair() -> Iterator[list[Watch]]:
    """The watches of two ranks, in one process."""
    store = dist.HashStore()
    watches = [Watch(store, rank, 2) for rank in range(2)]
    yield watches
    for each in watches:
        each.close()


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Call functions at the same time. Return what each returns or raises."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_first_failure_reaches_the_other_rank(pair: list[Watch]) -> None:
    pair[1].report(ValueError("the data is gone"))
    pair[1].report(ValueError("a consequence"))
    with pytest.raises(RankFailed, match=r"^rank 1: the data is gone$"):
        pair[0].check(at_once=True)
    # Its own failure is not another rank's.
    pair[1].check()
    # A rank that stops because another has failed is not a failure of its own.
    pair[0].report(RankFailed(1, "the data is gone"))
    assert pair[0].failure == (1, "the data is gone")


def test_unexpected_errors_come_with_their_type(pair: list[Watch]) -> None:
    pair[0].report(KeyError("labels"))
    with pytest.raises(RankFailed, match="KeyError"):
        pair[1].check(at_once=True)


def test_a_silent_rank_counts_as_dead() -> None:
    store = dist.HashStore()
    silent = Watch(store, 1, 2)
    wait_until(lambda: store.check(["oomb/beats/1"]), lambda: "no beat")
    silent.close()
    other = Watch(store, 0, 2, silent_s=0.1)
    wait_until(lambda: other.failure is not None, lambda: "nothing was noticed")
    other.close()
    assert other.failure is not None and other.failure[0] == 1 and "no sign of life" in other.failure[1]


def test_a_rank_that_has_finished_may_be_silent() -> None:
    store = dist.HashStore()
    finished = Watch(store, 1, 2)
    wait_until(lambda: store.check(["oomb/beats/1"]), lambda: "no beat")
    finished.finish()
    finished.close()
    other = Watch(store, 0, 2, silent_s=0.1)
    time.sleep(4 * watch.LOOK_S)
    other.close()
    assert other.failure is None


def test_the_first_rank_acts_for_all(pair: list[Watch]) -> None:
    calls = []

    def act() -> str:
        calls.append(1)
        return "done"

    assert in_threads(lambda: pair[0].first_rank_does(act), lambda: pair[1].first_rank_does(act)) == ["done", "done"]
    assert len(calls) == 1

    def fail() -> None:
        raise OSError("no space")

    errors = in_threads(lambda: pair[0].first_rank_does(fail), lambda: pair[1].first_rank_does(fail))
    assert [type(error) for error in errors] == [OSError, OSError]
    # Rank 0 prints it for both.
    assert [getattr(error, "is_elsewhere", False) for error in errors] == [False, True]


def test_waiting_for_the_first_rank_ends_if_it_fails(pair: list[Watch]) -> None:
    pair[0].report(ValueError("no room"))
    with pytest.raises(RankFailed, match="no room"):
        pair[1].first_rank_does(lambda: None)


def test_a_rank_settles_when_the_first_one_has_saved(pair: list[Watch]) -> None:
    pair[0].note()
    settled = threading.Thread(target=pair[1].settle)
    settled.start()
    settled.join(timeout=2 * watch.LOOK_S)
    assert settled.is_alive(), "rank 0 is still saving"
    pair[0].finish()
    settled.join()


def test_a_request_to_stop_reaches_the_other_rank(pair: list[Watch]) -> None:
    stopped = threading.Event()
    pair[0].on_stop = stopped.set
    pair[1].request_stop()
    wait_until(stopped.is_set, lambda: "no request arrived")


def test_ranks_meet_in_a_store_that_earlier_processes_used() -> None:
    """torchrun keeps its store over restarts. A rank that trusted its contents would wait for processes from before."""
    store = dist.HashStore()
    for _ in range(3):
        parts = in_threads(*(lambda rank=rank: meet(store, rank, 3, NO_LIMIT_S) for rank in range(3)))
        assert all(isinstance(part, dist.PrefixStore) for part in parts), parts
        assert not parts[0].check(["key"])
        parts[0].set("key", "value")
        assert parts[1].get("key") == parts[2].get("key") == b"value"


def test_a_rank_that_never_arrives_is_named() -> None:
    store = dist.HashStore()
    errors = in_threads(lambda: meet(store, 0, 3, 0.5), lambda: meet(store, 2, 3, 0.5))
    for error in errors:
        assert isinstance(error, TopologyError) and "rank 1 of 3 did not arrive" in str(error), error


QUICK = {("fill", 1), ("reduction", 0), ("evaluation", 1)}


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(
    "phase, rank",
    [
        pytest.param(phase, rank, marks=[] if (phase, rank) in QUICK else pytest.mark.full)
        for phase in PHASES
        for rank in (0, 1)
        # Only rank 0 saves.
        if (phase, rank) != ("save", 1)
    ],
)
def test_a_fault_on_one_rank_ends_all(phase: str, rank: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "failing_run.py"
    process = torchrun(2, script, tmp_path, phase, str(rank), cwd=tmp_path)
    # Far below the time-out of a collective.
    printed = finish(process, limit_s=120)
    assert process.returncode != 0 and "trained to the end" not in printed
    if phase == "killed":
        assert "SIGKILL" in printed
    else:
        assert f"[rank{rank}]: ArithmeticError: the fault of this test" in printed, printed[-5000:]
        other = f"[rank{1 - rank}]: oomb.distributed.watch.RankFailed: rank {rank}: the fault of this test"
        # All ranks raise what rank 0 raised while it saved.
        assert (other in printed) or phase == "save", printed[-5000:]
