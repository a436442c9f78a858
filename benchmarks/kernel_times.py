"""Profile some chunks of a step and attribute GPU time to kinds of kernels.

Each pass is divided into equal parts, and a window of a few chunks in the middle of each part represents it. A window
runs from one marker kernel to the next, so no synchronization is needed in between. The chunk before a window is
profiled and discarded, since starting the profiler delays the CPU.
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

LINEAR, OWN, FUSED, SUMS = "linear layers", "own chunk (dense)", "fused elementwise", "gradient accumulation"
FORWARD, DQ, DKV = "selected pages: forward", "selected pages: dQ", "selected pages: dK, dV"
LISTS, SELECTION, MOVES, OTHER = "selected pages: index lists", "page selection", "moving pages", "other"
WAITED, IDLE = "stall on copies", "idle"

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
"""Prefixes of kernel names. Triton kernels are named after their function; torch.compile's start with triton_."""
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (OWN, ("cudnn", "sdpa", "flash", "fmha")),
    (LINEAR, ("nvjet", "gemm", "gemv", "splitk", "cublas", "cutlass")),
)
"""Parts of other kernel names. The order matters: names of flash kernels contain "cutlass"."""
ACTIVITIES = (torch.profiler.ProfilerActivity.CUDA,)
BACKWARD = ("bprop", "bwd", "backward", "dot_do_o")
"""Parts of the names of kernels that start an attention backward."""
MARKER = "spin_kernel"
"""The kernel of torch.cuda._sleep, which nothing else here launches."""
CLOCK_TOLERANCE = 0.02
"""Largest relative difference between kernel plus idle time and the time between events on the same chunks."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or a copy in the trace; times in nanoseconds."""

    name: str
    start: int
    end: int
    stream: int


@dataclass(frozen=True)
class Window:
    """Chunks `first` to `last` - 1, which represent `begin` to `end` - 1, counted in the order of the pass."""

    begin: int
    end: int
    first: int
    last: int
    kernels: list[Kernel] = field(default_factory=list, compare=False)


def windows(num_chunks: int, num_windows: int, width: int) -> list[Window]:
    """Return where to profile a pass, with fewer and smaller windows if it has few chunks.

    The first two chunks are in no window: one must be done, and one profiled and discarded, before a window starts.
    """
    if num_chunks < 3:
        raise ValueError(f"{num_chunks} chunks are too few to profile: use a context of 3 chunks or more")
    num_windows = max(1, min(num_windows, num_chunks // (width + 6)))
    found = []
    for i in range(num_windows):
        begin, end = (j * num_chunks // num_windows for j in (i, i + 1))
        size = max(1, min(width, end - begin - 2))
        first = max(begin + 2, begin + (end - begin - size) // 2)
        found.append(Window(begin, end, first, first + size))
    return found


class ChunkClock:
    """Progress callback that records when the GPU finishes each chunk, without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: dict[str, list[Any]] = {}
        self._start: Any = None

    def start(self) -> None:
        self.marks, self._start = {}, self._now()

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.marks.setdefault(phase, []).append(self._now())

    def seconds(self) -> dict[str, list[float]]:
        """Return the duration of every chunk, by pass and in the order of execution."""
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
    """Progress callback that keeps the clock and profiles the windows of each pass."""

    def __init__(self, clock: ChunkClock, num_windows: int, width: int) -> None:
        self.clock, self.num_windows, self.width = clock, num_windows, width
        self.windows: dict[str, list[Window]] = {}
        # The profiler must first run in the thread that imported torch, and its first start takes seconds.
        with torch.profiler.profile(activities=ACTIVITIES):
            pass
        self._profiler: Any = None
        # The profiler's state belongs to the thread that starts it, and the passes run in different threads.
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
    """Return what a kernel does by its name, or None for kernels with several uses, such as sorts and copies."""
    for kind, beginnings in NAMES:
        if name.startswith(beginnings):
            return kind
    low = name.lower()
    return next((kind for kind, parts in PARTS if any(part in low for part in parts)), None)


def kinds_of(names: Sequence[str]) -> list[str]:
    """Return what each kernel of a stream does. Ambiguous ones are attributed by the kernels around them."""
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
        return SELECTION  # page means before it; topk and sort after it
    if before == DKV or after in (FORWARD, DQ, DKV):
        return LISTS  # addresses and lists of readers; after dK and dV, work on gradient pages
    if after == OWN and before != OWN and not any(part in name_after for part in BACKWARD):
        return SELECTION  # a budget that covers every page needs no scores, but means are computed
    return OTHER


def account(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the seconds between the two markers by kind.

    Each moment counts once: for the kernel that computes, or as idle if none does. Copies that overlap with computation
    count as nothing.
    """
    markers = sorted((k for k in kernels if MARKER in k.name), key=lambda k: k.start)
    if len(markers) != 2:
        raise RuntimeError(
            f"the profile has {len(markers)} marker kernels instead of 2: does torch.cuda._sleep still launch {MARKER}?"
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
    """Return the time of a pass by kind, extrapolated from its windows, and the clock's time of the same chunks."""
    seconds: defaultdict[str, float] = defaultdict(float)
    by_kernels = by_events = profiled = others = 0.0
    for part in parts:
        found, width, num_chunks = account(part.kernels), part.last - part.first, part.end - part.begin
        for kind, total in found.items():
            seconds[kind] += total / width * num_chunks
        measured = sum(chunk_seconds[part.first : part.last])
        by_kernels += sum(found.values())
        by_events += measured
        # The profiler delays the chunks before and after a window, and the first chunk of a pass is special.
        delayed = {0, *range(part.first - 1, part.last + 1)}
        rest = [chunk_seconds[i] for i in range(part.begin, part.end) if i not in delayed]
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
    """Reclassify idle time as stalls on copies, starting with the last pass.

    The trace cannot distinguish waiting for pages from waiting for the next launch, but the engine timed the former.
    """
    for found in reversed(passes.values()):
        waited = min(seconds, found["seconds"].get(IDLE, 0.0))
        found["seconds"][WAITED] = waited
        found["seconds"][IDLE] = found["seconds"].get(IDLE, 0.0) - waited
        seconds -= waited


def clocks_problem(kernels: dict[str, dict[str, Any]]) -> str | None:
    """Return what is wrong if kernel and idle times do not add up to the time between events."""
    for name, found in kernels.items():
        by_events, by_kernels = found["events_seconds"], found["kernels_seconds"]
        if not abs(by_kernels - by_events) <= CLOCK_TOLERANCE * by_events:
            return (
                f"WRONG: kernel and idle times of the {name} pass are {by_kernels:.3f} s instead of {by_events:.3f} s"
            )
    return None
