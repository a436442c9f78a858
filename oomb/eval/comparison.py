"""Compare one training step of standard training and of oomb: time, peak memory and gradients at several contexts.

Each measurement runs in a process of its own, so neither mode inherits memory from the other. Both load the same
weights and read the same random tokens. "standard" is the baseline of `oomb bench`: checkpointed layers, the fastest
attention in PyTorch, a tiled loss.

Peak memory is what the step adds: on a GPU, the allocator's peak minus what was allocated before the step; on a CPU,
the peak resident size of the process minus its peak before the step, when Python, PyTorch and the model were loaded.
"""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from oomb.config import Config
from oomb.engine.engine import Engine
from oomb.eval.bench import MODES, TOLERANCE, EngineStep, Report, StandardStep
from oomb.eval.verify import total_error
from oomb.memory.host import free_gpu_bytes, free_host_bytes
from oomb.models.load import load_model
from oomb.utils import dtypes, metrics
from oomb.utils.units import gib

OOMB, STANDARD = MODES

WARM_UP_TOKENS = 256
"""Length of the warm-up step on a CPU: enough to load every kernel, too short to leave memory behind that the measured
step would reuse."""

MAX_STEPS, MIN_SECONDS = 3, 2.0
"""A step is repeated up to three times until this much time is measured: a step of 0.1 s varies too much."""

SAFETY_FACTOR = 1.25
"""A measurement is skipped if its predicted memory times this factor is not free."""

OnProgress = Callable[[str, int, int, int], None]
"""Called with mode, context, units of work done, total units; 0, 0 when the process starts."""


@dataclass(frozen=True)
class Measurement:
    """One mode at one context: its numbers, or the reason there are none."""

    seconds: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    problem: str | None = None


@dataclass
class ContextResult:
    """Both modes at one context."""

    context: int
    standard: Measurement = field(default_factory=Measurement)
    oomb: Measurement = field(default_factory=Measurement)
    grad_difference: float | None = None
    """Norm of the difference of all gradients, relative to the norm of standard training's."""


class StepComparison(Report[ContextResult]):
    """Results of both modes at all contexts."""

    @property
    def is_right(self) -> bool:
        # `not <=`, so that NaN counts as wrong.
        return not any(row.grad_difference is not None and not row.grad_difference <= TOLERANCE for row in self.rows)


def compare_steps(
    model: str,
    contexts: Sequence[int],
    *,
    chunk_size: int = 1024,
    device: str = "auto",
    on_progress: OnProgress | None = None,
    on_result: Callable[[str, int, Measurement], None] | None = None,
) -> StepComparison:
    """Measure standard training and oomb at each context, shortest first, in float32.

    Args:
        model: A preset or the folder of a model.
        contexts: Numbers of tokens.
        chunk_size: Tokens per chunk of oomb.
        device: "auto", "cpu" or "cuda".
        on_progress: Called as a measurement proceeds, with mode, context, units of work done and total units.
        on_result: Called with mode, context and the measurement when it is done or skipped.

    A context whose memory, extrapolated from the shorter ones, is not free is skipped and says so in `problem`.
    """
    if not contexts or min(contexts) < 2:
        raise ValueError("name at least one context of 2 tokens or more")
    Config(chunk_size=chunk_size)
    place = dtypes.resolve_device(device)
    rows: list[ContextResult] = []
    with tempfile.TemporaryDirectory(prefix="oomb-compare-") as folder:
        for context in sorted(contexts):
            row = ContextResult(context)
            for mode in (STANDARD, OOMB):
                request = {"mode": mode, "model": model, "context": context, "chunk_size": chunk_size}
                request |= {"device": str(place), "gradients": f"{folder}/{mode}.pt"}
                problem = _reason_to_skip(mode, context, rows, place)
                found = Measurement(problem=problem) if problem else _in_own_process(request, on_progress)
                setattr(row, mode, found)
                if on_result is not None:
                    on_result(mode, context, found)
            if row.standard.problem is None and row.oomb.problem is None:
                row.grad_difference = total_error(*(torch.load(f"{folder}/{mode}.pt") for mode in (STANDARD, OOMB)))
            rows.append(row)
    settings = {"chunk_size": chunk_size, "dtype": "float32", "device": str(place), "tolerance": TOLERANCE}
    return StepComparison(model=model, settings=settings, machine=metrics.machine(), rows=rows)


def predict_bytes(context: int, measured: Sequence[tuple[int, int]]) -> float | None:
    """Return the memory of a step at `context`, from (context, bytes) of shorter ones; None if there are none.

    Memory grows at least in proportion to the context, and faster if it did so between the last two.

    >>> predict_bytes(8192, [(4096, 100)])
    200.0
    >>> predict_bytes(8192, [(2048, 100), (4096, 400)])
    1600.0
    """
    if not measured:
        return None
    (last, num_bytes), power = measured[-1], 1.0
    if len(measured) > 1 and 0 < measured[-2][1] < num_bytes:
        shorter, fewer_bytes = measured[-2]
        power = max(1.0, math.log(num_bytes / fewer_bytes) / math.log(last / shorter))
    return num_bytes * (context / last) ** power


def _reason_to_skip(mode: str, context: int, rows: Sequence[ContextResult], place: torch.device) -> str | None:
    earlier: list[tuple[int, Measurement]] = [(row.context, getattr(row, mode)) for row in rows]
    if earlier and earlier[-1][1].problem is not None:
        return f"skipped: no result at {earlier[-1][0]:,} tokens"
    measured = [(other, found.peak_bytes) for other, found in earlier if found.peak_bytes is not None]
    predicted = predict_bytes(context, measured)
    free = free_gpu_bytes(place)
    free = free_host_bytes() if free is None else free
    if predicted is None or SAFETY_FACTOR * predicted <= free:
        return None
    return f"skipped: needs about {gib(predicted)}, {gib(free)} free"


def _in_own_process(request: dict[str, Any], on_progress: OnProgress | None) -> Measurement:
    """Run `_measure` in a new process and return what it measured, or why it could not."""
    found: dict[str, Any] | None = None
    if on_progress is not None:
        on_progress(request["mode"], request["context"], 0, 0)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "oomb.eval.comparison", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            for event in _events(process.stdout):
                if "result" in event:
                    found = event["result"]
                elif on_progress is not None:
                    on_progress(request["mode"], request["context"], *event["progress"])
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if found is not None:
            return Measurement(**found)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if code == -signal.SIGKILL:
        return Measurement(problem="out of memory: the system ended the process")
    return Measurement(problem=lines[-1] if lines else f"the process ended with exit code {code}")


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a measuring process; libraries may print lines of their own in between."""
    for line in stream:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.keys() & {"result", "progress"}:
            yield event


def _measure(request: dict[str, Any], send: Callable[..., None]) -> Measurement:
    """Measure one mode at one context in this process and write its gradients to a file."""
    place = torch.device(request["device"])
    torch.manual_seed(0)  # the weights of a preset
    network = load_model(request["model"], dtype="float32", device=str(place)).train()
    engine = Engine(network, Config(chunk_size=request["chunk_size"]))
    ids = torch.randint(
        1, engine.model.vocab_size, (1, request["context"]), generator=torch.Generator().manual_seed(request["context"])
    )
    step = EngineStep(engine) if request["mode"] == OOMB else StandardStep(network)
    on_gpu = place.type == "cuda"
    try:
        # On a GPU the peak can be reset, so warm up at full length, as kernels are chosen by shape.
        step(ids if on_gpu else ids[:, :WARM_UP_TOKENS])
        engine.release()
        network.zero_grad(set_to_none=True)
        before = _reset_memory(place)
        _report_progress(step, engine, send)
        times: list[float] = []
        peak = 0
        while not times or (len(times) < MAX_STEPS and sum(times) < MIN_SECONDS):
            network.zero_grad(set_to_none=True)
            _synchronize(place)
            begin = time.perf_counter()
            loss = float(step(ids))
            _synchronize(place)
            times.append(time.perf_counter() - begin)
            # Later steps find memory that the first one left behind.
            peak = peak or _peak_bytes(place) - before
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Measurement(problem=f"out of memory: {str(error).splitlines()[0]}")
    gradients = {name: p.grad.to("cpu") for name, p in network.named_parameters() if p.grad is not None}
    torch.save(gradients, request["gradients"])
    return Measurement(seconds=statistics.median(times), peak_bytes=max(peak, 0), loss=loss)


def _report_progress(step: EngineStep | StandardStep, engine: Engine, send: Callable[..., None]) -> None:
    """Send progress: by chunk for oomb, by layer for standard training. Both compute the forward twice."""
    if isinstance(step, EngineStep):
        engine.progress = lambda phase, done, total: send(progress=(done + total * (phase == "gradient"), 2 * total))
        return
    num_started, layers = 0, engine.model.layers

    def layer_started(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal num_started
        num_started += 1
        send(progress=(num_started - 1, 2 * len(layers)))

    for layer in layers:
        layer.register_forward_pre_hook(layer_started)


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _reset_memory(place: torch.device) -> int:
    """Return the bytes in use now; on a GPU, start a new peak."""
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.memory_allocated(place)
    return _peak_bytes(place)


def _peak_bytes(place: torch.device) -> int:
    if place.type == "cuda":
        return torch.cuda.max_memory_allocated(place)
    try:
        # ru_maxrss of a new process starts at its parent's on Linux; this counter starts at zero.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _main(argument: str) -> None:
    def send(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    send(result=asdict(_measure(json.loads(argument), send)))


if __name__ == "__main__":
    _main(sys.argv[1])
