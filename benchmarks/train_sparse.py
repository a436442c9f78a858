"""Compare training with sparse and with dense attention: SmolLM2-135M on real text at 64K tokens.

    python benchmarks/train_sparse.py                        # both runs: about eight minutes on an H200
    python benchmarks/train_sparse.py --mode dense           # one run; the other one stays in the file
    python benchmarks/train_sparse.py --mode none            # only the table and the plot, from the file

Both runs have the same weights, the same examples of the standard library's source in the same order and the same
optimizer. The model was trained at 8192 tokens, so YaRN extends its RoPE. Weights and AdamW are in float32, matrix
products and attention in bfloat16 (autocast). smollm2.py says where the weights come from.

Writes train_sparse.json after every step, and train_sparse.png. The final loss is the mean training loss of the last
ten steps. Exit code 1 if the final losses differ by more than the target.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import OUT, Device, Gguf, Log, new_figure, save, save_figure
from rich.table import Table
from torch import Tensor

from oomb.config import Config
from oomb.data.dataset import load
from oomb.data.discover import STDLIB
from oomb.engine.engine import Engine
from oomb.utils import metrics, units
from oomb.utils.units import parse_tokens

MODES = ("dense", "sparse")
ASKED = 0.02
"""Target: largest difference between the final losses, in nats."""
NUM_FINAL = 10
"""Steps averaged for the final loss."""
WARM_UP, LAST_RATE, CLIP, BETAS, WEIGHT_DECAY = 10, 0.1, 1.0, (0.9, 0.95), 0.1
"""Warm-up steps, final fraction of the learning rate after a cosine, gradient clipping, and AdamW's settings."""
COLORS = {"dense": "tab:blue", "sparse": "tab:orange"}

log = Log(width=140)


@dataclass
class Run:
    """One training run so far."""

    mode: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    held_out: dict[str, float] = field(default_factory=dict)
    """Loss of the trained model on a held-out example, with its own and with dense attention."""
    source: str | None = None

    @property
    def final_loss(self) -> float | None:
        return statistics.fmean(self.losses[-NUM_FINAL:]) if len(self.losses) >= NUM_FINAL else None


def order(num_examples: int, num_steps: int, seed: int) -> list[int]:
    """Return the example of each step: all examples in random order, then in another one."""
    found: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(found) < num_steps:
        found += torch.randperm(num_examples, generator=generator).tolist()
    return found[:num_steps]


def rate_share(step: int, num_steps: int) -> float:
    """Return the fraction of the learning rate: linear warm-up, then cosine decay to `LAST_RATE`."""
    warm_up = min(WARM_UP, num_steps // 2)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def train(
    model: Any,
    start: dict[str, Tensor],
    run: Run,
    examples: Sequence[Tensor],
    held_out: Tensor | None,
    settings: dict[str, Any],
    *,
    budget: int | None,
    on_step: Callable[[Run], None],
) -> None:
    """Train `model` from the weights `start` with one example per step."""
    model.load_state_dict(start)
    torch.manual_seed(settings["seed"])
    device, pages = model.device, {"chunk_size": settings["chunk_size"], "page_size": settings["page_size"]}
    engine = Engine(model, Config(**pages, page_budget=budget))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    meter = metrics.MemoryMeter(device)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step, ids in enumerate(examples):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * rate_share(step, len(examples))
        with precision:
            loss = engine.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss synchronizes with the GPU.
        run.losses.append(float(loss.detach()))
        run.seconds.append(time.perf_counter() - begin)
        run.peak_bytes = meter.peak_bytes
        if not math.isfinite(run.losses[-1]):
            raise RuntimeError(f"the loss is {run.losses[-1]} at step {step + 1}: lower --learning-rate")
        on_step(run)
    if held_out is not None:
        engine.release()
        dense = engine if budget is None else Engine(model, Config(**pages))
        with precision, torch.no_grad():
            for name, reader in (("as trained", engine), ("dense", dense)):
                run.held_out[name] = float(reader.loss(held_out))
                reader.release()
    engine.release()
    on_step(run)


def difference(runs: dict[str, Run]) -> float | None:
    """Return the final loss of sparse minus that of dense training."""
    dense, sparse = (runs[mode].final_loss if mode in runs else None for mode in MODES)
    return None if dense is None or sparse is None else sparse - dense


def is_met(runs: dict[str, Run], num_steps: int, asked: float) -> bool:
    """Return whether both runs are complete and their final losses are close enough."""
    gap = difference(runs)
    # NaN compares as false, so it counts as missed.
    return gap is not None and all(len(runs[mode].losses) == num_steps for mode in MODES) and abs(gap) <= asked


def write(path: Path, settings: dict[str, Any], machine: dict[str, Any], runs: dict[str, Run]) -> None:
    record = {
        "settings": settings,
        "machine": machine,
        "final_losses": {mode: run.final_loss for mode, run in runs.items()},
        "difference": difference(runs),
        "runs": {mode: asdict(run) for mode, run in runs.items()},
    }
    save(record, path)


def read(path: Path, settings: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Run]]:
    """Return settings, machine and runs of a file, without runs of other settings."""
    if not path.exists():
        return settings or {}, metrics.machine(), {}
    record = json.loads(path.read_text())
    if settings is not None and record["settings"] != settings:
        log.console.print(f"{path} has other settings: its runs will be replaced", style="yellow")
        return settings, metrics.machine(), {}
    return record["settings"], record["machine"], {mode: Run(**run) for mode, run in record["runs"].items()}


def table(settings: dict[str, Any], runs: dict[str, Run]) -> Table:
    shown = Table(title=f"{settings['model']}, examples of {settings['length']:,} tokens")
    for column in ("", "steps", "first loss", "final loss", "held out", "held out, dense", "time per step", "peak"):
        shown.add_column(column, justify="right" if column else "left")
    for mode, run in runs.items():
        shown.add_row(
            mode,
            str(len(run.losses)),
            f"{run.losses[0]:.4f}" if run.losses else "",
            "" if run.final_loss is None else f"{run.final_loss:.4f}",
            *(f"{run.held_out[name]:.4f}" if name in run.held_out else "" for name in ("as trained", "dense")),
            units.seconds(statistics.median(run.seconds)) if run.seconds else "",
            units.gib(run.peak_bytes),
        )
    return shown


def plot(settings: dict[str, Any], runs: dict[str, Run], path: Path) -> None:
    """Plot both loss curves and their difference."""
    figure = new_figure(7, 5.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    names = {"dense": "dense attention", "sparse": f"{settings['budget']} pages of {settings['page_size']}"}
    for mode, run in runs.items():
        steps = range(1, len(run.losses) + 1)
        above.plot(steps, run.losses, color=COLORS[mode], label=names[mode], linewidth=1.2)
    above.set_title(f"{settings['model']}, {settings['length']:,} tokens per step, {settings['text']}")
    above.set_ylabel("training loss")
    above.grid(alpha=0.3)
    above.legend(frameon=False)
    if all(mode in runs for mode in MODES):
        pairs = list(zip(runs["dense"].losses, runs["sparse"].losses, strict=False))
        below.plot(range(1, len(pairs) + 1), [b - a for a, b in pairs], color="black", linewidth=1)
    below.axhspan(-ASKED, ASKED, color="tab:green", alpha=0.15)
    below.set_xlabel("step")
    below.set_ylabel("difference")
    below.grid(alpha=0.3)
    save_figure(figure, path)


def main(
    mode: Annotated[str, typer.Option(help="dense, sparse, both, or none to plot the file.")] = "both",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 100,
    length: Annotated[str, typer.Option(help="Tokens of an example; one per step.")] = "64K",
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 128,
    budget: Annotated[int, typer.Option(help="Pages that a query tile reads.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-4,
    seed: Annotated[int, typer.Option(help="Seed for the order of examples.")] = 0,
    gguf: Gguf = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Output file.")] = OUT / "train_sparse.json",
) -> None:
    modes = {"both": MODES, "none": (), **{name: (name,) for name in MODES}}.get(mode)
    if modes is None:
        raise typer.BadParameter(f"unknown mode {mode!r}; use both, none, {' or '.join(MODES)}")
    if not modes:
        settings, _, runs = read(out, None)
        if not runs:
            raise typer.BadParameter(f"{out} has no runs to plot: train first")
    else:
        settings, runs = train_modes(modes, steps, parse_tokens(length), chunk_size, page_size, budget, learning_rate,
                                     seed, gguf, device, out)  # fmt: skip
    log.console.print(table(settings, runs))
    picture = out.with_suffix(".png")
    plot(settings, runs, picture)
    log.console.print(f"written to {out} and {picture}")
    if len(runs) < len(MODES):
        return
    met, gap = is_met(runs, settings["steps"], ASKED), difference(runs)
    verdict = (
        f"final losses are within {ASKED}" if met else f"final losses are NOT within {ASKED}, or a run is incomplete"
    )
    log.verdict(verdict + ("" if gap is None else f": sparse minus dense is {gap:+.4f}"), met)
    raise typer.Exit(0 if met else 1)


def train_modes(
    modes: Sequence[str], num_steps: int, length: int, chunk_size: int, page_size: int, budget: int, rate: float,
    seed: int, gguf: Path | None, device: str, out: Path,
) -> tuple[dict[str, Any], dict[str, Run]]:  # fmt: skip
    """Load model and text, and train the modes."""
    import smollm2

    model, tokenizer = smollm2.load(gguf, device, torch.float32)
    rope = smollm2.stretch_rope(model, length)
    text = load(STDLIB, max_length=length, tokenizer=tokenizer, num_train=num_steps)
    settings: dict[str, Any] = {
        "model": "SmolLM2-135M", "weights": smollm2.WEIGHTS, "text": "the standard library's source",
        "num_tokens": text.num_tokens, "num_windows": len(text.train), "steps": num_steps, "length": length,
        "chunk_size": chunk_size, "page_size": page_size, "budget": budget, "learning_rate": rate,
        "precision": "float32 weights, bfloat16 autocast on a GPU", "rope": rope, "seed": seed,
    }  # fmt: skip
    log(f"{len(text.train)} examples of {length:,} tokens, RoPE {rope}")
    _, _, runs = read(out, settings)
    machine = metrics.machine()
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    examples = [text.train[i]["input_ids"][None] for i in order(len(text.train), num_steps, seed)]
    held_out = text.held_out[0]["input_ids"][None] if text.held_out is not None else None

    def on_step(run: Run) -> None:
        runs[run.mode] = run
        write(out, settings, machine, {mode: runs[mode] for mode in MODES if mode in runs})
        if run.held_out:
            log(f"{run.mode}, held out: {run.held_out}")
            return
        at = len(run.losses)
        log(f"{run.mode} {at}/{num_steps}: loss {run.losses[-1]:.4f}, {run.seconds[-1]:.2f} s")

    for mode in modes:
        run = Run(mode, source=machine["source"])
        train(
            model,
            start,
            run,
            examples,
            held_out,
            settings,
            budget=budget if mode == "sparse" else None,
            on_step=on_step,
        )
    return settings, {mode: runs[mode] for mode in MODES if mode in runs}


if __name__ == "__main__":
    typer.run(main)
