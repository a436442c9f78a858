"""Run `oomb eval`: check everything, load, evaluate, print tables, write JSON."""

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
from oomb.eval.run import EvalSettings, evaluate, read_examples, tokenizer_for, tokenizer_name_of
from oomb.eval.samples import PROMPT_SIZE, sample_text
from oomb.models import load
from oomb.models.adapters import base_model_name, with_adapters
from oomb.utils import dtypes
from oomb.utils.metrics import machine

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def run(settings: EvalSettings, console: Console) -> dict[str, Any]:
    """Evaluates, prints tables, and returns what it writes to `settings.output`."""
    started = time.monotonic()
    config = Config.from_dict(settings.engine)
    device = dtypes.resolve_device(settings.device)
    dtypes.resolve_dtype(settings.dtype, device)
    base = base_model_name(settings.model_name_or_path)
    whole = settings.model_name_or_path if base is None else base
    trust: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    model_config = load.load_config(whole, **trust)
    tokenizer = tokenizer_for(whole, model_config, tokenizer_name_of(settings, base), **trust)
    if settings.tokenizer_name is not None and tokenizer is not None:
        own_name = tokenizer_name_of(replace(settings, tokenizer_name=None), base) or whole
        own = load.own_tokenizer(own_name, **trust)
        fault = another_tokenizer(settings.tokenizer_name, tokenizer, own_name, own)
        if fault is not None:
            raise ValueError(f"--tokenizer_name {fault}. Leave out --tokenizer_name")
    # Text is cheaper to find fault with than weights are to load.
    with bytes_bar(console, "checking the dataset", "checked", transient=True) as report_check:
        split, examples, text = read_examples(
            settings, tokenizer, model_config.get_text_config().vocab_size, report_check
        )
    haystacks = [] if settings.needle is None else build_haystacks(text, tokenizer, settings.needle)
    _check_positions(settings, model_config, console)
    _describe(settings, base, split, examples, console)

    torch.manual_seed(settings.seed)
    model = load.load_model(whole, dtype=settings.dtype, device=str(device), config=model_config, **trust)
    engine = Engine(model if base is None else with_adapters(model, settings.model_name_or_path), config)
    lengths = [len(example["input_ids"]) for example in examples] + [h.length for h in haystacks for _ in range(2)]
    with _showing(engine, lengths, console):
        found = evaluate(engine, examples, haystacks, settings.needle)
    if settings.sample_tokens:
        prompt = examples[0]["input_ids"][:PROMPT_SIZE]
        with console.status("writing a sample"):
            found["sample"] = sample_text(
                engine, prompt, tokenizer, num_tokens=settings.sample_tokens, seed=settings.seed
            )
    _print(found, settings, console)
    report = {"model": settings.model_name_or_path, "base": base, "dataset": settings.dataset, **found}
    report |= {"settings": asdict(settings), "engine": asdict(config), "machine": machine()}
    report["wall_s"] = round(time.monotonic() - started, 2)
    if settings.output is not None:
        path = Path(settings.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, default=str) + "\n")
        console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)
    return report


def _describe(
    settings: EvalSettings, base: str | None, split: Split, examples: list[dict[str, Tensor]], console: Console
) -> None:
    """What is read, in a few lines."""
    num, asked = len(examples), settings.max_eval_samples
    what = f"{num:,} of its windows" if split.packing == "windows" else f"{num:,} of its documents, or pieces of them"
    at_most = "" if split.packing == "windows" else "at most "
    lines = [f"[bold]{escape(settings.dataset)}[/]: {what}, {at_most}{settings.max_length:,} tokens each"]
    if base is not None:
        lines.insert(0, f"[bold]{escape(settings.model_name_or_path)}[/]: LoRA adapters on top of {escape(base)}")
    if num < asked:
        lines.append(f"[yellow]--max_eval_samples {asked:,} is more than the {num:,} there are[/]")
    held_out = 0 if split.held_out is None else len(split.held_out)
    if held_out < num:
        lines.append(
            f"[yellow]oomb train holds out {held_out:,} of them, a fifth of the data at most: a model that was trained "
            "on this dataset has seen the others[/]"
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
            f"[yellow]{longest:,} tokens are more than the {positions:,} positions this model was made for[/]",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _showing(engine: Engine, lengths: list[int], console: Console) -> Iterator[None]:
    """A bar over the tokens of all passes, or a line now and then where there is no terminal."""
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

    before, engine.progress = engine.progress, chunk_done
    try:
        with bar:
            yield
    finally:
        engine.progress = before


def _print(found: dict[str, Any], settings: EvalSettings, console: Console) -> None:
    console.print(position_table(found["perplexity"], f"{settings.model_name_or_path} on {settings.dataset}"))
    if "needle" in found:
        console.print(needle_table(found["needle"]))
    if "sample" in found:
        console.print("[bold]a sample[/], from the beginning of the text:", highlight=False)
        console.print(f"[dim]{escape(found['sample']['prompt'])}[/]{escape(found['sample']['text'])}", highlight=False)
