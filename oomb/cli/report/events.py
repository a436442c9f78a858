"""Read the events of a run and put them in order. No value is trusted to exist or to have the right type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomb.utils.files import near_paths
from oomb.utils.units import GIB, parse_bytes

METRICS = "metrics.jsonl"
COMPARISON = "comparison.json"
"""Written by `oomb demo`."""
OPENING = '{"event": '
"""The first characters of every line."""


@dataclass
class Run:
    """One training run, resumed or not."""

    name: str
    starts: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    """In order; each step occurs once."""
    resumed_at: list[int] = field(default_factory=list)
    """The steps from which the run was resumed."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    comparison: dict[str, Any] = field(default_factory=dict)
    """Steps of standard training and oomb, as `oomb demo` measured them."""
    unread: list[int] = field(default_factory=list)
    """Numbers of the lines that could not be parsed."""
    is_ended: bool = False
    """Whether the last start wrote an "end" event."""
    error: str | None = None
    """The error that ended the last start."""

    @property
    def settings(self) -> dict[str, Any]:
        return dictionary(self._last("settings"))

    @property
    def engine(self) -> dict[str, Any]:
        return dictionary(self._last("engine"))

    @property
    def machine(self) -> dict[str, Any]:
        return dictionary(self._last("machine"))

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.get("gpu")) and not str(self.settings.get("device", "auto")).startswith("cpu")

    @property
    def status(self) -> str:
        if self.error is not None:
            return "ended by an error"
        if not self.is_ended:
            return "not finished: still running, or ended without saving"
        return "stopped early and saved" if self.ends[-1].get("stopped") else "finished"

    @property
    def num_tokens(self) -> int | None:
        """Tokens trained on. Repeated steps count once."""
        settings = self.settings
        names = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps")
        sizes = [number(settings.get(name)) for name in names]
        per_step = math.prod(size for size in sizes if size is not None) if None not in sizes else None
        tokens = [_first(number(step.get("tokens")), per_step, _rate_times_time(step)) for step in self.steps]
        known = [value for value in tokens if value is not None]
        return round(sum(known)) if known and len(known) == len(tokens) else None

    @property
    def seconds(self) -> float | None:
        """Time spent in the steps. Repeated steps count once."""
        times = [value for _, value in self.series("step_s")]
        return math.fsum(times) if times else None

    @property
    def tokens_per_second(self) -> float | None:
        """The average without the first step, which may include compilation, unless it is the only one."""
        rated = [(step, time) for step in self.steps if (time := number(step.get("step_s"))) and time > 0]
        rated = rated[1:] or rated
        tokens = [_first(number(step.get("tokens")), _rate_times_time(step)) for step, _ in rated]
        if not rated or None in tokens:
            return None
        return math.fsum(value for value in tokens if value is not None) / math.fsum(time for _, time in rated)

    def budget(self, tier: str) -> tuple[float, str] | None:
        """Return the bytes that pages may take in tier "gpu" or "host" and where that number comes from, or None."""
        given = number(dictionary(self._last("budget")).get(f"{tier}_bytes"))
        if given is not None and given > 0:
            return given, "memory for pages"
        setting = self.engine.get(f"{tier}_memory")
        if isinstance(setting, (int, str)) and setting != "auto":
            try:
                return float(parse_bytes(setting)), f"{tier}_memory"
            except (ValueError, OverflowError):
                pass
        return self.memory("gpu" if tier == "gpu" and self.on_gpu else "host")

    def memory(self, tier: str) -> tuple[float, str] | None:
        """Return the memory of the machine in bytes, with a label, or None."""
        gpu = dictionary(self.machine.get("gpu"))
        total = number(gpu.get("memory_gib") if tier == "gpu" else self.machine.get("ram_gib"))
        if total is None or total <= 0:
            return None
        return total * GIB, "the GPU's memory" if tier == "gpu" else "the machine's memory"

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for each step whose field is a number, infinity and NaN included."""
        return [
            (step["step"], value) for step in self.steps if (value := number(step.get(name), finite=False)) is not None
        ]

    def _last(self, name: str) -> Any:
        return next((start[name] for start in reversed(self.starts) if isinstance(start.get(name), dict)), None)


def read_run(folder: str | Path) -> Run:
    """Return the run in a folder, the `output_dir` of `oomb train`.

    Raises:
        ValueError: The folder holds no run.
    """
    folder = Path(folder).expanduser()
    path = folder / METRICS
    if not path.is_file():
        if not folder.exists():
            near = near_paths(folder)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no run in {folder}: the folder does not exist{hint}")
        problem = "is a file" if folder.is_file() else f"has no {METRICS}"
        raise ValueError(f"{folder} {problem}: pass the output_dir of oomb train")
    run = run_from_lines(metrics_lines(folder), folder.resolve().name)
    run.comparison = _read_comparison(folder / COMPARISON)
    return run


def metrics_lines(folder: Path) -> list[str]:
    """Return the lines of a run's metrics, none if the file does not exist. Raise OSError if it cannot be read."""
    path = folder / METRICS
    # A killed run may end in the middle of a character.
    return path.read_bytes().decode("utf-8", errors="replace").split("\n") if path.is_file() else []


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in a line, or None if the line is not a JSON object."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _read_comparison(path: Path) -> dict[str, Any]:
    """Return an empty dictionary if there is no file, or none that can be read."""
    try:
        return parse_event(path.read_text()) or {}
    except (OSError, UnicodeDecodeError):
        return {}


def read_eval(path: str | Path) -> dict[str, Any]:
    """Return the content of a JSON file written by `oomb eval`, which has the fields of an `eval` event."""
    try:
        found = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON (line {error.lineno}: {error.msg}): pass a file written by oomb eval --output"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("perplexity"), dict):
        raise ValueError(f"{path} has no perplexity: pass a file written by oomb eval --output")
    return found


def run_from_lines(lines: Iterable[str], name: str) -> Run:
    """Build the run from the lines of its metrics."""
    run = Run(name)
    is_new = False
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = parse_event(line)
        if event is None:
            run.unread.append(at)
            # The last line of a killed run has no newline, so the event of the next start follows on the same line.
            event = parse_event(line[max(0, line.rfind(OPENING)) :])
        if event is None:
            continue
        kind, step = event.get("event"), _step(event)
        if kind == "start":
            is_new = bool(run.starts)
            run.starts.append(event)
            run.is_ended, run.error = False, None
        elif kind == "error":
            run.error = str(event.get("error", "unknown"))
        elif kind == "step" and step is not None:
            _drop_from(run, step)
            if is_new:
                run.resumed_at.append(step - 1)
                is_new = False
            run.steps.append({**event, "step": step})
        elif kind == "held_out" and step is not None and (loss := number(event.get("loss"), finite=False)) is not None:
            run.held_out = [(other, value) for other, value in run.held_out if other < step] + [(step, loss)]
        elif kind in ("eval", "sample"):
            _keep(run.evals if kind == "eval" else run.samples, event)
        elif kind == "end":
            run.ends.append(event)
            run.is_ended = True
    return run


def _drop_from(run: Run, step: int) -> None:
    """Drop what an earlier start recorded from this step on: the run was resumed before it."""
    while run.steps and run.steps[-1]["step"] >= step:
        run.steps.pop()
    run.resumed_at = [other for other in run.resumed_at if other < step]
    run.held_out = [(other, loss) for other, loss in run.held_out if other <= step]


def _keep(kept: dict[str, dict[str, Any]], event: dict[str, Any]) -> None:
    """Keep the first event from before training and the last from after it."""
    when = event.get("when")
    if when == "after" or (when == "before" and when not in kept):
        kept[when] = event


def _step(event: dict[str, Any]) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def number(value: Any, *, finite: bool = True) -> float | None:
    """Return the value as a float, or None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) or not finite else None


def dictionary(value: Any) -> dict[str, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _rate_times_time(step: dict[str, Any]) -> float | None:
    rate, time = number(step.get("tokens_per_s")), number(step.get("step_s"))
    return None if rate is None or time is None else rate * time
