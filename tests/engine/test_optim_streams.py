"""The streams of OffloadedAdamW: late copies and interrupts do not change the result; a missing wait does."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import FORMS, are_equal, groups, net, short_blocks, train, values
from streams import Clocks, LateCopies, Watch
from torch import Tensor, nn

from oomb.engine import optim, optim_state
from oomb.engine.optim import OffloadedAdamW
from oomb.memory import transfer
from oomb.memory.transfer import Buffer, Copies, Event, Load, Prefetcher
from oomb.ops import moments

__all__ = ["short_blocks"]


class Interrupt:
    """A tracer that raises KeyboardInterrupt before the given line that runs. Copies cannot be interrupted once they
    are launched, as on a GPU."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(
            ("oomb/engine/optim.py", "oomb/engine/optim_state.py", "oomb/ops/moments.py", "oomb/memory/transfer.py")
        ):
            return None
        self.lines_left -= event == "line"
        if event == "line" and not self.lines_left:
            raise KeyboardInterrupt
        return self


class Impatient(OffloadedAdamW):
    """Interrupted again while it handles the first interrupt."""

    is_interrupted = False

    def _finish_pending(self) -> None:
        if self.is_interrupted and self._buffer is not None:
            raise KeyboardInterrupt
        super()._finish_pending()


def blocks(optimizer: OffloadedAdamW) -> list[list[Tensor]]:
    found = []
    for p, host in optimizer._host_states.items():
        rows = {"values": optim_state.flat(p.detach(), p), **host.rows}
        for start in range(0, p.numel(), optim_state.BLOCK_SIZE):
            found.append([x.clone() for x in moments.part(rows, start, start + optim_state.BLOCK_SIZE).values()])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=["plain", "8bit"])
@pytest.mark.parametrize("kind", [OffloadedAdamW, Impatient])
def test_an_interrupted_step_leaves_complete_blocks_and_can_be_finished(
    kind: type[OffloadedAdamW], form: dict[str, Any]
) -> None:
    """Interrupts before every line of a step, with copies as late as possible."""

    def second_step() -> OffloadedAdamW:
        shapes = ((3, 180), (5,))
        parameters = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
        optimizer = kind(parameters, lr=1e-2, **form)
        for seed in range(2):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            if seed == 0:
                optimizer.step()
        optimizer._copier = LateCopies()
        return optimizer

    optimizer = second_step()
    old = blocks(optimizer)
    optimizer.step()
    new = blocks(optimizer)
    assert len(new) == 3 and not any(map(are_equal, old, new))
    seen, line = set(), 0
    while True:
        line += 1
        optimizer, interrupt = second_step(), Interrupt(line)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Impatient, "is_interrupted", True)
            try:
                sys.settrace(interrupt)
                optimizer.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        if interrupt.lines_left > 0:
            break
        try:
            optimizer.state_dict()
            is_between_steps = True
        except RuntimeError as error:
            assert "call step() again" in str(error)
            is_between_steps = False
        found = blocks(optimizer)
        are_new = [are_equal(x, after) for x, after in zip(found, new)]
        are_old = [are_equal(x, before) for x, before in zip(found, old)]
        assert all(a != b for a, b in zip(are_new, are_old)), f"a block is half updated after line {line}"
        assert not is_between_steps or all(are_new) or all(are_old)
        seen.add(sum(are_new))
        if not (is_between_steps and all(are_new)):
            optimizer.step()
        assert all(map(are_equal, blocks(optimizer), new)), f"line {line}"
        assert all(state["step"] == 2 for state in optimizer.state.values())
        assert not optimizer._done and optimizer._buffer is None
    assert line > 200 and seen == {0, 1, 2, 3}


def test_loading_a_state_discards_an_interrupted_step() -> None:
    model, expected = net(), net()
    optimizer, reference = (OffloadedAdamW(groups(m), lr=1e-2) for m in (model, expected))
    for m, o in ((model, optimizer), (expected, reference)):
        train(m, o, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def fail(block: Any, *_: Any) -> Tensor:
        if block.parameter is model.second:
            raise torch.OutOfMemoryError("none left")
        return updated(block, *_)

    updated = optim.compute_update
    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(optim, "compute_update", fail)
        train(model, optimizer, range(3, 4))
    with pytest.raises(RuntimeError, match=r"updated 1 parameters.*call step\(\) again"):
        copy.deepcopy(optimizer)
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    for m, o in ((model, optimizer), (expected, reference)):
        train(m, o, range(3, 9))
    assert are_equal(values(model), values(expected))


def run(
    form: dict[str, Any], copier: Any = None, mutate: Callable[[pytest.MonkeyPatch], None] | None = None
) -> list[Tensor]:
    model = net(torch.bfloat16)
    optimizer = OffloadedAdamW(groups(model), lr=1e-2, **form)
    optimizer._copier = copier
    with pytest.MonkeyPatch.context() as patch:
        if mutate is not None:
            mutate(patch)
        train(model, optimizer, range(5))
    return [*values(model), *(x for state in optimizer.state.values() for x in state.values())]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_late_copies_change_nothing(form: dict[str, Any]) -> None:
    copier = LateCopies()
    assert are_equal(run(form, copier), run(form))
    assert copier.num_late > 20


def ignoring_loads(patch: pytest.MonkeyPatch) -> None:
    take = Prefetcher.take

    def mutated(self: Prefetcher, load: Load) -> Buffer:
        self._issued[0] = (*self._issued[0][:2], None)
        return take(self, load)

    patch.setattr(Prefetcher, "take", mutated)


def ignoring_stores_of_buffers(patch: pytest.MonkeyPatch) -> None:
    give = Prefetcher.give
    patch.setattr(Prefetcher, "give", lambda self, ring, slot, free_after: give(self, ring, slot, None))


def ignoring_the_computation(patch: pytest.MonkeyPatch) -> None:
    for kind in (Clocks, LateCopies, transfer.CopyStreams):
        store = kind.store
        patch.setattr(kind, "store", lambda self, copies, after=(), store=store: store(self, copies))


def ignoring_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """Skip the wait for stores at the end of a step. With many blocks the next step would wait by chance."""
    patch.setattr(optim_state, "BLOCK_SIZE", 2**22)

    def mutated(self: OffloadedAdamW) -> None:
        self._buffer = None

    patch.setattr(OffloadedAdamW, "_finish_pending", mutated)


MUTATIONS = [
    (ignoring_loads, "the computation reads what a load may still touch"),
    (ignoring_stores_of_buffers, "a load writes what a store may still touch"),
    (ignoring_the_computation, "a store reads what the computation may still touch"),
    (ignoring_the_last_step, "a load reads what a store may still touch"),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_access_is_ordered(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # The clocks have a resolution of 16 bytes, which is 4 scales.
    monkeypatch.setattr(optim_state, "BLOCK_SIZE", 4 * moments.BLOCK)
    clocks = Clocks()
    with Watch(clocks):
        run(form, clocks)
    assert clocks.races == [] and (clocks.clocks.diagonal() > 20).all() and len(clocks.seen) > 5


@pytest.mark.parametrize(("mutate", "race"), MUTATIONS)
def test_without_a_wait_there_is_a_race(mutate: Callable[[pytest.MonkeyPatch], None], race: str) -> None:
    clocks = Clocks()
    with Watch(clocks):
        run({}, clocks, mutate)
    assert race in clocks.races


LONG = 20_000_000
"""Cycles: about 10 ms of an H200."""
SHORT = 1_000_000


def gpu_run(
    form: dict[str, Any], disturb: Callable[[pytest.MonkeyPatch], None] | None = None, num_steps: int = 3
) -> list[Tensor]:
    """Run only the optimizer, on random gradients."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((300, 1000), (17,), (999, 77))
    parameters = [nn.Parameter(torch.randn(s, device="cuda", generator=draw).bfloat16()) for s in shapes]
    optimizer = OffloadedAdamW(parameters, lr=1e-2, **form)
    optimizer.reserve()
    with pytest.MonkeyPatch.context() as patch:
        if disturb is not None:
            disturb(patch)
        for _ in range(num_steps):
            for p in parameters:
                p.grad = torch.randn(p.shape, device="cuda", generator=draw).bfloat16()
            optimizer.step()
        torch.cuda.synchronize()
    assert optimizer._copier is not None and optimizer._copier.loaded_bytes == num_steps * optimizer.host_bytes
    assert optimizer._copier.stored_bytes == num_steps * optimizer.host_bytes
    return [p.detach() for p in parameters] + [x.clone() for state in optimizer.state.values() for x in state.values()]


def late(loads: int = 0, stores: int = 0, computation: int = 0, seed: int | None = None) -> Any:
    draw = random.Random(seed)

    def sleep(cycles: int) -> None:
        if cycles:
            torch.cuda._sleep(cycles if seed is None else draw.randrange(1, 2 * cycles))

    def disturb(patch: pytest.MonkeyPatch) -> None:
        run_copies, updated = transfer.CopyStreams._run, optim.compute_update

        def late_copies(self: Any, stream: Any, copies: Copies, after: Any) -> Event:
            with torch.cuda.stream(stream):
                sleep(loads if stream is self.loads else stores)
            return run_copies(self, stream, copies, after)

        def late_update(*args: Any) -> Tensor:
            sleep(computation)
            return updated(*args)

        patch.setattr(transfer.CopyStreams, "_run", late_copies)
        patch.setattr(optim, "compute_update", late_update)

    return disturb


@pytest.fixture
def gpu_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_state, "BLOCK_SIZE", 2**15)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_late_streams_change_nothing(form: dict[str, Any], gpu_blocks: None) -> None:
    expected = gpu_run(form)
    assert are_equal(gpu_run(form), expected), "two undisturbed runs differ"
    for disturb in (
        late(loads=SHORT, seed=1),
        late(stores=SHORT, seed=2),
        late(computation=SHORT, seed=3),
        late(loads=SHORT, stores=2 * SHORT, computation=SHORT, seed=4),
    ):
        assert are_equal(gpu_run(form, disturb), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mutate", "delay"),
    [
        (ignoring_loads, late(loads=LONG)),
        (ignoring_stores_of_buffers, late(stores=LONG)),
        (ignoring_the_computation, late(computation=LONG)),
        (ignoring_the_last_step, late(stores=LONG)),
    ],
)
def test_without_a_wait_a_late_stream_changes_the_result(mutate: Any, delay: Any, gpu_blocks: None) -> None:
    def disturb(patch: pytest.MonkeyPatch) -> None:
        delay(patch)
        mutate(patch)

    expected = gpu_run({})
    assert are_equal(gpu_run({}, delay), expected)
    assert not are_equal(gpu_run({}, disturb), expected)


@pytest.mark.gpu
def test_on_a_gpu_it_is_adamw(gpu_blocks: None) -> None:
    ours, theirs = net(device="cuda"), net(device="cuda")
    optimizer = OffloadedAdamW(groups(ours), lr=1e-2)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-2, foreach=False)
    train(ours, optimizer, range(10))
    # States follow a model from one device to another.
    ours.cpu()
    train(ours, optimizer, range(10, 12))
    ours.cuda()
    train(ours, optimizer, range(12, 20))
    train(theirs, reference, range(20))
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-4, atol=1e-5)
    assert all(x.device.type == "cpu" for state in optimizer.state.values() for x in state.values())
    assert all(optimizer.state[ours.first][name].is_pinned() for name in moments.MOMENTS)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_memory_is_bounded(form: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_state, "BLOCK_SIZE", 2**22)
    parameter = nn.Parameter(torch.zeros(50_000_001, device="cuda", dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = OffloadedAdamW([parameter], **form)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 256 * 2**20
    assert torch.cuda.memory_allocated() == before
