"""Fine-tune SmolLM2-135M, trained for 8192 tokens, on a code base at 131,072 tokens with `oomb train`.

    python benchmarks/finetune.py --out RUN
    python benchmarks/finetune.py --out RUN --page-budget 0  # dense attention: exact gradients, more time
    python benchmarks/finetune.py --picture-from RUN/finetune_smollm2.html --out docs/finetune_smollm2.png

It saves the model with its RoPE extended by YaRN, and copies the source of Python's standard library as one document in
the order of the paths, so that related files share an example. Then it runs the command line and collects loss on
held-out text, loss by position and needles found, before and after training, with time and memory.

Writes finetune_smollm2.json to RUN, with the page of `oomb report`, the log and the metrics. Exit code 1 if the loss on
held-out text has not fallen. smollm2.py says where the weights come from.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import ROOT, Device, Gguf, Log, save
from rich.table import Table

from oomb.cli.report.events import Run, read_run
from oomb.data.discover import STDLIB, find_documents
from oomb.data.sources import SEED
from oomb.utils import metrics, units
from oomb.utils.units import parse_list, parse_tokens

NAME = "finetune_smollm2"
TEXT = "python-stdlib"
NOT_SOURCE = {"encodings", "pydoc_data"}
"""Left out of the standard library: character tables and the text of help(), a quarter of its tokens and no code."""
WHEN = ("before", "after")
LEFT_OUT = ("text-before-and-after", "settings-and-machine", "steps")
"""Sections of the page that the screenshot leaves out."""


def write_model(source: Path | None, gguf: Path | None, length: int, work: Path) -> tuple[str, dict[str, Any]]:
    """Save the model in a folder in `work` and return the folder's name and facts about the model."""
    import smollm2

    if source is None:
        name, weights = smollm2.NAME, smollm2.WEIGHTS
        model, tokenizer = smollm2.load(gguf, "cpu", torch.float32)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name, weights = source.name, "as saved"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    learned = model.config.max_position_embeddings
    rope = smollm2.stretch_rope(model, length)
    # Not the bare name: if a preset has the same, oomb would use random weights.
    folder = f"{name}-{'unstretched' if rope is None else f'{length >> 10}K'}"
    smollm2.save(model, tokenizer, work / folder)
    facts = {"model": name, "weights": weights, "num_parameters": model.num_parameters()}
    return folder, facts | {"learned_positions": learned, "rope": rope}


def write_text(work: Path) -> dict[str, Any]:
    """Copy the standard library's source to `work`, to be read as one repository."""
    files, root = find_documents(STDLIB)
    files = [path for path in files if not NOT_SOURCE & set(path.relative_to(root).parts)]
    for path in files:
        copy = work / TEXT / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Copy only the bytes: an installation may be read-only.
        copy.write_bytes(path.read_bytes())
    version = ".".join(map(str, sys.version_info[:3]))
    return described(f"the source of Python {version}'s library", files)


def described(text: str, files: Sequence[Path]) -> dict[str, Any]:
    return {"text": text, "num_files": len(files), "num_bytes": sum(path.stat().st_size for path in files)}


def arguments(
    model: str, dataset: str, *, length: int, steps: int, learning_rate: float, page_budget: int, chunk_size: int,
    held_out: int, needle_lengths: str, needle_haystacks: int, seed: int, device: str,
) -> list[str]:  # fmt: skip
    """Return the command line of `oomb`; docs/finetune.md shows the same one."""
    words = ["train", "--model_name_or_path", model, "--dataset", dataset, "--dataset_join", "repository"]
    words += ["--max_length", str(length), "--max_steps", str(steps), "--learning_rate", f"{learning_rate:g}"]
    words += ["--page_budget", str(page_budget)] if page_budget else []
    words += ["--chunk_size", str(chunk_size), "--max_eval_samples", str(held_out)]
    words += ["--needle_lengths", needle_lengths, "--needle_haystacks", str(needle_haystacks)]
    words += [] if seed == SEED else ["--seed", str(seed)]
    words += [] if device == "auto" else ["--device", device]
    return [*words, "--output_dir", "run"]


def call(words: list[str], work: Path, out: Path) -> int:
    """Run `oomb` in `work`, copy its output to the terminal and the log, and return its exit code."""
    # Relative paths would not resolve in `work`.
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = os.pathsep.join([str(ROOT), *(str(Path(path).resolve()) for path in inherited)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("COLUMNS", "120")
    with (out / f"{NAME}.log").open("a") as log:
        log.write(f"$ oomb {shlex.join(words)}\n")
        child = subprocess.Popen(
            [sys.executable, "-m", "oomb", *words],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
                # Keep the metrics so far in case the machine goes away.
                copy_metrics(work, out)
            return child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            copy_metrics(work, out)


def copy_metrics(work: Path, out: Path) -> None:
    found = work / "run" / "metrics.jsonl"
    if found.exists():
        shutil.copyfile(found, out / f"{NAME}_metrics.jsonl")


def collect(run: Run) -> dict[str, Any]:
    """Return the run's metrics as plain values."""
    times = [value for _, value in run.series("step_s")]
    held_out = [loss for _, loss in run.held_out]
    evals = {when: run.evals.get(when, {}) for when in WHEN}
    peaks = {"gpu" if run.on_gpu else "process": "peak_memory_bytes", "gpu_pages": "gpu_page_bytes"}
    peaks["host_pages"] = "host_page_bytes"
    return {
        "status": run.status,
        "held_out": dict(zip(WHEN, held_out)) if len(held_out) > 1 else {},
        "positions": {when: found["perplexity"]["buckets"] for when, found in evals.items() if "perplexity" in found},
        "needle": {when: found["needle"] for when, found in evals.items() if "needle" in found},
        "samples": {when: {"prompt": s["prompt"], "text": s["text"]} for when, s in run.samples.items()},
        "losses": [value for _, value in run.series("loss")],
        "step_seconds": times,
        "seconds": {
            "command": run.ends[-1]["wall_s"] if run.ends else None,
            "steps": sum(times),
            "median_step": statistics.median(times) if times else None,
        },
        "tokens": run.num_tokens,
        "tokens_per_second": run.tokens_per_second,
        "peak_bytes": {tier: max((v for _, v in run.series(name)), default=None) for tier, name in peaks.items()},
        "budget_bytes": {tier: found[0] for tier in ("gpu", "host") if (found := run.budget(tier)) is not None},
    }


def has_improved(record: dict[str, Any]) -> bool:
    """Return whether the run finished with a lower loss on held-out text."""
    before, after = (record["held_out"].get(when, math.nan) for when in WHEN)
    # NaN compares as false, so it counts as no.
    return record["status"] == "finished" and bool(after < before)


def table(record: dict[str, Any]) -> Table:
    settings = record["settings"]
    shown = Table(title=f"{settings['model']}, {settings['steps']} steps of {settings['length']:,} tokens")
    for column in ("", *WHEN):
        shown.add_column(column, justify="right" if column else "left")
    if record["held_out"]:
        shown.add_row("loss on held-out text", *(f"{record['held_out'][when]:.4f}" for when in WHEN))
    pairs = {(bucket["start"], bucket["end"]): [bucket["loss"]] for bucket in record["positions"].get("before", [])}
    for bucket in record["positions"].get("after", []):
        pairs.setdefault((bucket["start"], bucket["end"]), []).append(bucket["loss"])
    for (start, end), losses in pairs.items():
        shown.add_row(f"  at positions {start:,} to {end:,}", *(f"{loss:.4f}" for loss in losses))
    needles = [record["needle"][when] for when in WHEN if when in record["needle"]]
    for index, row in enumerate(needles[0]["lengths"] if needles else []):
        both = [found["lengths"][index] for found in needles]
        shown.add_row(f"needles found in {row['length']:,} tokens", *(f"{one['accuracy']:.0%}" for one in both))
        shown.add_row(
            "  share, exact, gain",
            *(f"{one['share']:.0%}, {one['exact']:.0%}, {one['gain']:+.2f}" for one in both),
        )
    shown.add_section()
    took = record["seconds"]
    shown.add_row("total, command, steps", "", ", ".join(f"{took[k]:.0f} s" for k in ("all", "command", "steps")))
    shown.add_row("tokens/s", "", f"{record['tokens_per_second']:,.0f}")
    for tier, num_bytes in record["peak_bytes"].items():
        shown.add_row(f"peak memory, {tier.replace('_', ' ')}", "", units.gib(num_bytes or 0))
    return shown


def main(
    out: Annotated[Path, typer.Option(help="Output folder; with --picture-from, the PNG file.")],
    model: Annotated[Path | None, typer.Option(help="Folder of another model and its tokenizer.")] = None,
    gguf: Gguf = None,
    dataset: Annotated[Path | None, typer.Option(help="Folder to train on. Default: Python's library.")] = None,
    length: Annotated[str, typer.Option(help="Tokens of an example; one per step.")] = "128K",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-4,
    page_budget: Annotated[int, typer.Option(help="Pages that a query tile reads; 0: all, exact.")] = 64,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 16384,
    held_out: Annotated[int, typer.Option(help="Held-out examples.")] = 2,
    needle_lengths: Annotated[str, typer.Option(help="Haystack lengths.")] = "4K,16K,64K,128K",
    needle_haystacks: Annotated[int, typer.Option(help="Haystacks of each length.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed for examples, needles and samples.")] = SEED,
    device: Device = "auto",
    picture_from: Annotated[Path | None, typer.Option(help="Only take a screenshot of this page.")] = None,
) -> None:
    log = Log(width=140)
    if picture_from is not None:
        from browser import picture

        size = picture(picture_from, out, without=LEFT_OUT)
        log.console.print(f"written to {out}, {size[0]} x {size[1]}", soft_wrap=True)
        return
    tokens = parse_tokens(length)
    parse_list(needle_lengths, lambda text: parse_tokens(text, "--needle-lengths"))
    if dataset is not None and not dataset.is_dir():
        raise typer.BadParameter(f"--dataset {dataset} is not a folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}.log").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        name, facts = write_model(model, gguf, tokens, work)
        facts |= write_text(work) if dataset is None else described(dataset.name, find_documents(str(dataset))[0])
        words = arguments(
            name, TEXT if dataset is None else str(dataset.resolve()), length=tokens, steps=steps,
            learning_rate=learning_rate, page_budget=page_budget, chunk_size=chunk_size, held_out=held_out,
            needle_lengths=needle_lengths, needle_haystacks=needle_haystacks, seed=seed, device=device,
        )  # fmt: skip
        log(f"oomb {shlex.join(words)}")
        code = call(words, work, out)
        if not (work / "run" / "metrics.jsonl").exists():
            raise typer.Exit(code or 1)
        page = out / f"{NAME}.html"
        # Report an interrupted run as well.
        reported = call(["report", "run", "--output", str(page.absolute())], work, out)
        code = code or reported
        run = read_run(work / "run")
    record = {
        "settings": {
            **facts, "command": f"oomb {shlex.join(words)}", "length": tokens, "steps": steps, "chunk_size": chunk_size,
            "page_budget": page_budget or None, "page_size": run.engine.get("page_size"), "seed": seed,
            "learning_rate": learning_rate, "held_out_windows": held_out,
        },
        "machine": metrics.machine(),
        **collect(run),
    }  # fmt: skip
    record["seconds"]["all"] = log.seconds
    save(record, out / f"{NAME}.json")
    if code == 0:
        log.console.print(table(record))
    log.console.print(f"written to {out}", soft_wrap=True)
    improved = has_improved(record)
    verdict = "has fallen" if improved else "has NOT fallen, or the run is incomplete"
    log.verdict(f"the loss on held-out text {verdict}", improved)
    raise typer.Exit(code or int(not improved))


if __name__ == "__main__":
    typer.run(main)
