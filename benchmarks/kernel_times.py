"""What the GPU does in a step, by kind of work, from its own record of some chunks.

A pass is cut into parts of equal length. In the middle of each a few chunks are profiled, and taken for the part. The
record of a window runs from one marker kernel to another, so nothing is waited for in between; the chunk before a
window is profiled too and thrown away, since starting the profiler holds up the CPU.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType

LINEAR, OWN, FUSED, SUMS = "linear layers", "own chunk", "fused elementwise", "sums of parameter gradients"
FORWARD, DQ, DKV = "chosen pages: forward", "chosen pages: dq", "chosen pages: dk and dv"
LISTS, SELECTION, MOVES, OTHER = "chosen pages: lists", "selection", "moving pages", "other"
WAITED, IDLE = "waited for transfers", "idle"

NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (FORWARD, ("forward_kernel",)),
    (DQ, ("dq_kernel",)),
    (DKV, ("dkv_kernel",)),
    (SELECTION, ("means_lse_kernel", "merge_lse_kernel", "page_scores_kernel")),
    (SUMS, ("add_share_kernel",)),
    (MOVES, ("mark_pages", "assign_slots", "copy_pages", "dequantize_pages")),
    (OWN, ("merge_kernel",)),
    (FUSED, ("triton_",)),
)
"""How names of kernels begin: Triton's are those of its functions, those of torch.compile begin with triton_."""
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (OWN, ("cudnn", "sdpa", "flash", "fmha")),
    (LINEAR, ("nvjet", "gemm", "gemv", "splitk", "cublas", "cutlass")),
)
"""What they have in them; in this order, for flash kernels are made of cutlass."""
ACTIVITIES = (torch.profiler.ProfilerActivity.CUDA,)
BACKWARD = ("bprop", "bwd", "backward", "dot_do_o")
"""What those of them have that begin a backward of attention."""
MARKER = "spin_kernel"
"""The kernel of torch.cuda._sleep; nothing else here starts it."""
CLOCK_TOLERANCE = 0.02
"""How far the kernels' time plus idle time may be from the time between events on the same chunks."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy, in the GPU's record; times in nanoseconds."""

    name: str
    start: int
    end: int
    stream: int


@dataclass(frozen=True)
class Window:
    """Chunks `first` to `last` - 1 are profiled, for all of `begin` to `end` - 1; counted in the order of the pass."""

    begin: int
    end: int
    first: int
    last: int
    kernels: list[Kernel] = field(default_factory=list, compare=False)


def windows(num_chunks: int, num_windows: int, width: int) -> list[Window]:
    """Where to profile a pass: fewer and smaller windows where there is no room. None lies at the very beginning: one
    chunk has to be done, and one to be profiled in vain, before the first."""
    if num_chunks < 3:
        raise ValueError(f"{num_chunks} chunks are too few to profile some; take a context of 3 chunks or more")
    num_windows = max(1, min(num_windows, num_chunks // (width + 6)))
    found = []
    for i in range(num_windows):
        begin, end = (j * num_chunks // num_windows for j in (i, i + 1))
        size = max(1, min(width, end - begin - 2))
        first = max(begin + 2, begin + (end - begin - size) // 2)
        found.append(Window(begin, end, first, first + size))
    return found


class ChunkClock:
    """When the GPU has come to the end of each chunk; nothing waits for that."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: dict[str, list[Any]] = {}
        self._start: Any = None

    def start(self) -> None:
        self.marks, self._start = {}, self._now()

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.marks.setdefault(phase, []).append(self._now())

    def seconds(self) -> dict[str, list[float]]:
        """By pass, of every chunk in the order in which it was done."""
        found: dict[str, list[float]] = {}
        before = self._start
        for phase, marks in self.marks.items():
            found[phase] = []
            for mark in marks:
                found[phase].append(self._between(before, mark))
                before = mark
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1000 if self.on_gpu else b - a


class Profile:
    """Progress of an engine: keeps the clock, and profiles windows of each pass."""

    def __init__(self, clock: ChunkClock, num_windows: int, width: int) -> None:
        self.clock, self.num_windows, self.width = clock, num_windows, width
        self.windows: dict[str, list[Window]] = {}
        # It wants to be used first in the thread that has imported torch, and takes seconds to wake up.
        with torch.profiler.profile(activities=ACTIVITIES):
            pass
        self._profiler: Any = None
        # The profiler keeps its state in the thread that starts it, and the passes run in different ones.
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.clock(phase, done, total)
        if phase not in self.windows:
            self.windows[phase] = windows(total, self.num_windows, self.width)
        for window in self.windows[phase]:
            if done in (window.first, window.last):
                torch.cuda._sleep(1)
            if done == window.last:
                torch.cuda.synchronize()
                window.kernels.extend(self._thread.submit(self._stop).result())
        if any(done == window.first - 1 for window in self.windows[phase]):
            self._thread.submit(self._start).result()

    def _start(self) -> None:
        self._profiler = torch.profiler.profile(activities=ACTIVITIES)
        self._profiler.start()

    def _stop(self) -> list[Kernel]:
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()
        self._profiler = None
        return [
            Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.device_resource_id())
            for e in events
            if e.device_type() == DeviceType.CUDA
        ]


def kind_of(name: str) -> str | None:
    """What a kernel does, by its name. None: sorts, copies and the like, which serve several ends."""
    for kind, beginnings in NAMES:
        if name.startswith(beginnings):
            return kind
    low = name.lower()
    return next((kind for kind, parts in PARTS if any(part in low for part in parts)), None)


def kinds_of(names: Sequence[str]) -> list[str]:
    """What each of the kernels of a stream does. Those whose names do not tell belong to what they stand between."""
    known = [kind_of(name) for name in names]
    following: list[int | None] = [None] * len(names)
    for i in range(len(names) - 2, -1, -1):
        following[i] = i + 1 if known[i + 1] is not None else following[i + 1]
    found, before = [], None
    for i, kind in enumerate(known):
        if kind is not None:
            before = kind
            found.append(kind)
        else:
            after = following[i]
            found.append(
                _between(before, None if after is None else known[after], "" if after is None else names[after])
            )
    return found


def _between(before: str | None, after: str | None, name_after: str) -> str:
    if after == SELECTION or before == SELECTION:
        return SELECTION  # means of keys before it; the choice, with its topk and sort, after
    if before == DKV or after in (FORWARD, DQ, DKV):
        return LISTS  # addresses and lists of readers; after dk and dv, what is done with gradient pages
    if after == OWN and before != OWN and not any(part in name_after for part in BACKWARD):
        return SELECTION  # a budget that covers all asks for no interest, but means are made
    return OTHER


def account(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Seconds between the first and the last marker, by kind. Each moment counts once: for the kernel that computes, or
    as idle where none does. What copies beside a computation costs nothing here."""
    markers = sorted((k for k in kernels if MARKER in k.name), key=lambda k: k.start)
    if len(markers) != 2:
        raise RuntimeError(
            f"a profile has {len(markers)} marker kernels instead of 2; is torch.cuda._sleep still a {MARKER}?"
        )
    begin, end = markers[0].end, markers[1].end
    computing = sorted((k for k in kernels if k.stream == markers[0].stream), key=lambda k: k.start)
    nanoseconds: Counter[str] = Counter()
    at = begin
    for kernel, kind in zip(computing, kinds_of([k.name for k in computing]), strict=True):
        first, last = min(max(kernel.start, at), end), min(kernel.end, end)
        if last <= at:
            continue
        nanoseconds[IDLE] += first - at
        nanoseconds[kind] += last - first
        at = last
    return {kind: total / 1e9 for kind, total in nanoseconds.items()}


def whole_pass(parts: Sequence[Window], chunk_seconds: Sequence[float]) -> dict[str, Any]:
    """A pass by kind of work, from its windows; beside it what the clock says of the same chunks and of the others."""
    seconds: defaultdict[str, float] = defaultdict(float)
    by_kernels = by_events = profiled = others = 0.0
    for part in parts:
        found, width, num_chunks = account(part.kernels), part.last - part.first, part.end - part.begin
        for kind, total in found.items():
            seconds[kind] += total / width * num_chunks
        measured = sum(chunk_seconds[part.first : part.last])
        by_kernels += sum(found.values())
        by_events += measured
        # The profiler holds up the chunk before a window and the one after it; a pass's first chunk is like no other.
        held_up = {0, *range(part.first - 1, part.last + 1)}
        rest = [chunk_seconds[i] for i in range(part.begin, part.end) if i not in held_up]
        if rest:
            profiled += measured / width * num_chunks
            others += sum(rest) / len(rest) * num_chunks
    return {
        "seconds": dict(seconds),
        "kernels_seconds": by_kernels,
        "events_seconds": by_events,
        "slowdown": profiled / others if others else None,
        "num_profiled": sum(part.last - part.first for part in parts),
        "num_chunks": len(chunk_seconds),
    }


def take_waits(passes: dict[str, dict[str, Any]], seconds: float) -> None:
    """Calls so much of the idle time waited for, beginning with the last pass: the record cannot tell a wait for pages
    from one for the next launch, and the engine has timed the former."""
    for found in reversed(passes.values()):
        waited = min(seconds, found["seconds"].get(IDLE, 0.0))
        found["seconds"][WAITED] = waited
        found["seconds"][IDLE] = found["seconds"].get(IDLE, 0.0) - waited
        seconds -= waited


def clocks_problem(kernels: dict[str, dict[str, Any]]) -> str | None:
    """Kernels and idle time must add up to the time between events."""
    for name, found in kernels.items():
        by_events, by_kernels = found["events_seconds"], found["kernels_seconds"]
        if not abs(by_kernels - by_events) <= CLOCK_TOLERANCE * by_events:
            return f"WRONG: {name} pass, kernels and idle time make {by_kernels:.3f} s of {by_events:.3f} s"
    return None
