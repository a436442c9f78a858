"""A worked example: SmolLM2-135M, made for 8192 tokens, goes on with a code base at 131,072 with `oomb train`.

    python benchmarks/finetune.py --out RUN
    python benchmarks/finetune.py --out RUN --page-budget 0  # with dense attention: exact gradients, more time
    python benchmarks/finetune.py --picture-from RUN/finetune_smollm2.html --out docs/finetune_smollm2.png

It writes the model as an ordinary folder, its RoPE stretched to the context with YaRN, and the source of Python's
standard library as another: one document, files in the order of their paths, each after its name, so that what belongs
together lies within one window. Then it calls the command line, as anyone would, and gathers what came of it: loss on
held-out text, loss by position and needles found, before training and after, with time and memory.

RUN gets four files: a JSON, the page of `oomb report`, the output of the command and its metrics, the last two while it
runs. Exit code 1 if the loss on held-out text has not fallen. benchmarks/smollm2.py says where the weights come from.
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
"""Of the standard library: tables of characters and the text of help(), a quarter of its tokens and no program."""
WHEN = ("before", "after")
LEFT_OUT = ("text-before-and-after", "settings-and-machine", "steps")
"""Sections of the page that the picture does without."""


def write_model(source: Path | None, gguf: Path | None, length: int, work: Path) -> tuple[str, dict[str, Any]]:
    """The model's folder, by its name in `work`, and what is to be said of it."""
    import smollm2

    if source is None:
        name, weights = smollm2.NAME, smollm2.WEIGHTS
        model, tokenizer = smollm2.load(gguf, "cpu", torch.float32)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name, weights = source.name, "as they are saved"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    learned = model.config.max_position_embeddings
    rope = smollm2.stretch_rope(model, length)
    # Never the bare name: that of a preset would mean its shape with random weights.
    folder = f"{name}-{'unstretched' if rope is None else f'{length >> 10}K'}"
    smollm2.save(model, tokenizer, work / folder)
    said = {"model": name, "weights": weights, "num_parameters": model.num_parameters()}
    return folder, said | {"learned_positions": learned, "rope": rope}


def write_text(work: Path) -> dict[str, Any]:
    """Copies the standard library's source to `work`, as a repository to read from beginning to end."""
    files, root = find_documents(STDLIB)
    files = [path for path in files if not NOT_SOURCE & set(path.relative_to(root).parts)]
    for path in files:
        copy = work / TEXT / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Read and written, not copied: an installation may be read-only, and its times and rights are nobody's matter.
        copy.write_bytes(path.read_bytes())
    version = ".".join(map(str, sys.version_info[:3]))
    return described(f"the source of Python {version}'s library", files)


def described(text: str, files: Sequence[Path]) -> dict[str, Any]:
    return {"text": text, "num_files": len(files), "num_bytes": sum(path.stat().st_size for path in files)}


def words_of(
    model: str, dataset: str, *, length: int, steps: int, learning_rate: float, page_budget: int, chunk_size: int,
    held_out: int, needle_lengths: str, needle_haystacks: int, seed: int, device: str,
) -> list[str]:  # fmt: skip
    """What `oomb` is told; docs/finetune.md shows the same."""
    words = ["train", "--model_name_or_path", model, "--dataset", dataset, "--dataset_join", "repository"]
    words += ["--max_length", str(length), "--max_steps", str(steps), "--learning_rate", f"{learning_rate:g}"]
    words += ["--page_budget", str(page_budget)] if page_budget else []
    words += ["--chunk_size", str(chunk_size), "--max_eval_samples", str(held_out)]
    words += ["--needle_lengths", needle_lengths, "--needle_haystacks", str(needle_haystacks)]
    words += [] if seed == SEED else ["--seed", str(seed)]
    words += [] if device == "auto" else ["--device", device]
    return [*words, "--output_dir", "run"]


def call(words: list[str], work: Path, out: Path) -> int:
    """`oomb` with `words`, in `work`; what it says goes on to the terminal and to the log. Returns its exit code."""
    # Relative paths would mean something else in `work`.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = os.pathsep.join([str(ROOT), *(str(Path(path).resolve()) for path in given)])
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
                # A machine that is taken away in the middle leaves what there is.
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


def gathered(run: Run) -> dict[str, Any]:
    """What the run's metrics say, as plain values."""
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


def has_learnt(record: dict[str, Any]) -> bool:
    """Whether the run came to its end with a lower loss on held-out text."""
    before, after = (record["held_out"].get(when, math.nan) for when in WHEN)
    # Written so that NaN counts as no.
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
            "  share, written exactly, gain",
            *(f"{one['share']:.0%}, {one['exact']:.0%}, {one['gain']:+.2f}" for one in both),
        )
    shown.add_section()
    took = record["seconds"]
    shown.add_row(
        "all of it, the command, its steps", "", ", ".join(f"{took[k]:.0f} s" for k in ("all", "command", "steps"))
    )
    shown.add_row("tokens/s", "", f"{record['tokens_per_second']:,.0f}")
    for tier, num_bytes in record["peak_bytes"].items():
        shown.add_row(f"peak memory, {tier.replace('_', ' ')}", "", units.gib(num_bytes or 0))
    return shown


def main(
    out: Annotated[Path, typer.Option(help="Folder for what is found; with --picture-from the picture's name.")],
    model: Annotated[Path | None, typer.Option(help="Folder of another model, with its tokenizer.")] = None,
    gguf: Gguf = None,
    dataset: Annotated[Path | None, typer.Option(help="Folder to train on; default: Python's library.")] = None,
    length: Annotated[str, typer.Option(help="Tokens of a window, one to a step.")] = "128K",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    learning_rate: Annotated[float, typer.Option(help="The highest one.")] = 2e-4,
    page_budget: Annotated[int, typer.Option(help="Pages that a tile of queries reads; 0: all, and exact.")] = 64,
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 16384,
    held_out: Annotated[int, typer.Option(help="Windows that are never trained on.")] = 2,
    needle_lengths: Annotated[str, typer.Option(help="Tokens of haystacks.")] = "4K,16K,64K,128K",
    needle_haystacks: Annotated[int, typer.Option(help="Texts of each length, with five questions each.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the order of windows, of needles and samples.")] = SEED,
    device: Device = "auto",
    picture_from: Annotated[Path | None, typer.Option(help="Only draw this page into the picture --out.")] = None,
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
        raise typer.BadParameter(f"--dataset {dataset} is no folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{NAME}.log").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        name, said = write_model(model, gguf, tokens, work)
        said |= write_text(work) if dataset is None else described(dataset.name, find_documents(str(dataset))[0])
        words = words_of(
            name, TEXT if dataset is None else str(dataset.resolve()), length=tokens, steps=steps,
            learning_rate=learning_rate, page_budget=page_budget, chunk_size=chunk_size, held_out=held_out,
            needle_lengths=needle_lengths, needle_haystacks=needle_haystacks, seed=seed, device=device,
        )  # fmt: skip
        log(f"oomb {shlex.join(words)}")
        code = call(words, work, out)
        if not (work / "run" / "metrics.jsonl").exists():
            raise typer.Exit(code or 1)
        page = out / f"{NAME}.html"
        # Of a run that was broken off too.
        reported = call(["report", "run", "--output", str(page.absolute())], work, out)
        code = code or reported
        run = read_run(work / "run")
    record = {
        "settings": {
            **said, "command": f"oomb {shlex.join(words)}", "length": tokens, "steps": steps, "chunk_size": chunk_size,
            "page_budget": page_budget or None, "page_size": run.engine.get("page_size"), "seed": seed,
            "learning_rate": learning_rate, "held_out_windows": held_out,
        },
        "machine": metrics.machine(),
        **gathered(run),
    }  # fmt: skip
    record["seconds"]["all"] = log.seconds
    save(record, out / f"{NAME}.json")
    if code == 0:
        log.console.print(table(record))
    log.console.print(f"written to {out}", soft_wrap=True)
    learnt = has_learnt(record)
    verdict = "has fallen" if learnt else "has NOT fallen, or the run is short"
    log.verdict(f"the loss on held-out text {verdict}", learnt)
    raise typer.Exit(code or int(not learnt))


if __name__ == "__main__":
    typer.run(main)
