"""Run `oomb eval`: check the input, load the model, evaluate it, print tables and write JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from oomb.cli.eval.tables import needle_table, position_table
from oomb.cli.progress import PlainTimer, bytes_bar
from oomb.config import Config
from oomb.data.dataset import unchecked
from oomb.data.tokenizers import another_tokenizer
from oomb.data.tokens import Split
from oomb.engine.engine import Engine
from oomb.eval.needles import build_haystacks
from oomb.eval.run import EvalSettings, evaluate, read_examples, resolve_tokenizer_name, tokenizer_for
from oomb.eval.samples import PROMPT_SIZE, sample_text
from oomb.models import load
from oomb.models.adapters import base_model_name, with_adapters
from oomb.utils import dtypes, files
from oomb.utils.metrics import machine
from oomb.utils.units import count

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def run(settings: EvalSettings, console: Console) -> dict[str, Any]:
    """Evaluate, print tables, and return the report that is written to `settings.output`."""
    started = time.monotonic()
    config = Config.from_dict(settings.engine)
    device = dtypes.resolve_device(settings.device)
    dtypes.resolve_dtype(settings.dtype, device)
    base = base_model_name(settings.model_name_or_path)
    model_name = settings.model_name_or_path if base is None else base
    trust: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    model_config = load.load_config(model_name, **trust)
    tokenizer = tokenizer_for(model_name, model_config, resolve_tokenizer_name(settings, base), **trust)
    if settings.tokenizer_name is not None and tokenizer is not None:
        own_name = resolve_tokenizer_name(replace(settings, tokenizer_name=None), base) or model_name
        own = load.own_tokenizer(own_name, **trust)
        difference = another_tokenizer(settings.tokenizer_name, tokenizer, own_name, own)
        if difference is not None:
            raise ValueError(f"--tokenizer_name {difference}. Leave out --tokenizer_name")
    # Check the data before loading the weights, which takes longer.
    with bytes_bar(console, "checking the dataset", "checked", transient=True) as report_check:
        split, examples, text = read_examples(
            settings, tokenizer, model_config.get_text_config().vocab_size, report_check
        )
    haystacks = [] if settings.needle is None else build_haystacks(text, tokenizer, settings.needle)
    _check_positions(settings, model_config, console)
    _describe(settings, base, split, examples, console)

    torch.manual_seed(settings.seed)
    model = load.load_model(model_name, dtype=settings.dtype, device=str(device), config=model_config, **trust)
    engine = Engine(model if base is None else with_adapters(model, settings.model_name_or_path), config)
    lengths = [len(example["input_ids"]) for example in examples] + [h.length for h in haystacks for _ in range(2)]
    with _progress(engine, lengths, console):
        results = evaluate(engine, examples, haystacks, settings.needle)
    if settings.sample_tokens:
        prompt = examples[0]["input_ids"][:PROMPT_SIZE]
        with console.status("generating a sample"):
            results["sample"] = sample_text(
                engine, prompt, tokenizer, num_tokens=settings.sample_tokens, seed=settings.seed
            )
    _print(results, settings, console)
    report = {"model": settings.model_name_or_path, "base": base, "dataset": settings.dataset, **results}
    report |= {"settings": asdict(settings), "engine": asdict(config), "machine": machine()}
    report["wall_s"] = round(time.monotonic() - started, 2)
    if settings.output is not None:
        path = Path(settings.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, json.dumps(report, indent=1, default=str) + "\n")
        console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)
    return report


def _describe(
    settings: EvalSettings, base: str | None, split: Split, examples: list[dict[str, Tensor]], console: Console
) -> None:
    """Print which model and data are evaluated."""
    num, requested = len(examples), settings.max_eval_samples
    is_packed = split.packing == "windows"
    size = f"{'' if is_packed else 'up to '}{settings.max_length:,} tokens"
    lines = [f"[bold]{escape(settings.dataset)}[/]: {count(num, 'example' if is_packed else 'document')} of {size}"]
    if base is not None:
        lines.insert(0, f"[bold]{escape(settings.model_name_or_path)}[/]: LoRA adapters on top of {escape(base)}")
    if num < requested:
        lines.append(f"[yellow]--max_eval_samples is {requested:,}, but the dataset has only {num:,}[/]")
    held_out = 0 if split.held_out is None else len(split.held_out)
    if held_out < num:
        lines.append(
            f"[yellow]oomb train holds out only {held_out:,} of them: a model trained on this dataset has seen the "
            "others[/]"
        )
    notes = list(split.notes)
    if settings.skip_dataset_check and (note := unchecked(settings.dataset)) is not None:
        notes.append(note)
    lines += [f"[yellow]{escape(note)}[/]" for note in notes]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _check_positions(settings: EvalSettings, config: PretrainedConfig, console: Console) -> None:
    longest = max(settings.max_length, *(settings.needle.lengths if settings.needle is not None else (0,)))
    positions = load.max_positions(config)
    if positions is not None and longest > positions:
        console.print(
            f"[yellow]{longest:,} tokens exceed the {positions:,} positions this model was trained for[/]",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _progress(engine: Engine, lengths: list[int], console: Console) -> Iterator[None]:
    """Show the progress of all passes: a bar on a terminal, otherwise a line now and then."""
    num_passes, total, done_passes, timer = len(lengths), sum(lengths), 0, PlainTimer()
    bar = Progress(
        TextColumn("pass {task.fields[at]}"),
        BarColumn(bar_width=20),
        TextColumn("[dim]{task.fields[chunk]}"),
        TimeRemainingColumn(),
        TextColumn("[dim]left"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=3600.0,
    )
    task = bar.add_task("evaluate", total=total, at=f"1/{num_passes}", chunk="")

    def chunk_done(phase: str, done: int, chunks: int) -> None:
        nonlocal done_passes
        completed = sum(lengths[:done_passes]) + lengths[done_passes] * done / chunks
        at = f"{done_passes + 1}/{num_passes}"
        bar.update(task, completed=completed, at=at, chunk=f"chunk {done}/{chunks}")
        if not console.is_terminal and timer.is_due:
            timer.restart()
            console.print(f"pass {at}  chunk {done}/{chunks}, {completed / total:.0%}", highlight=False)
        done_passes += done == chunks

    previous, engine.progress = engine.progress, chunk_done
    try:
        with bar:
            yield
    finally:
        engine.progress = previous


def _print(results: dict[str, Any], settings: EvalSettings, console: Console) -> None:
    console.print(position_table(results["perplexity"], f"{settings.model_name_or_path} on {settings.dataset}"))
    if "needle" in results:
        console.print(needle_table(results["needle"]))
    if "sample" in results:
        console.print("[bold]sample[/], after the beginning of the text:", highlight=False)
        console.print(
            f"[dim]{escape(results['sample']['prompt'])}[/]{escape(results['sample']['text'])}", highlight=False
        )
