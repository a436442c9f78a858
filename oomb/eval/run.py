"""The run behind `oomb eval`: check everything, load, evaluate, print tables, write JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from oomb.cli.progress import PLAIN_INTERVAL_S, bytes_bar
from oomb.config import Config
from oomb.data.dataset import open_dataset, unchecked
from oomb.data.discover import STDLIB
from oomb.data.encode import NUM_BYTE_IDS
from oomb.data.sources import SEED
from oomb.data.tokenizers import another_tokenizer
from oomb.data.tokens import Split
from oomb.engine.engine import Engine
from oomb.eval.needles import Haystack, NeedleSettings, build_haystacks, needle_scores
from oomb.eval.perplexity import perplexity_by_position
from oomb.eval.samples import sample_text
from oomb.models import load, presets
from oomb.models.adapters import base_of, with_adapters
from oomb.utils import dtypes
from oomb.utils.metrics import machine

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PROMPT_SIZE = 64
"""Tokens of text that a sample goes on from."""


@dataclass(kw_only=True)
class Settings:
    """The choices of one evaluation, named as in `oomb train`."""

    model_name_or_path: str
    tokenizer_name: str | None = None
    trust_remote_code: bool = False
    dataset: str = STDLIB
    packing: str = "auto"
    dataset_join: str = "documents"
    skip_dataset_check: bool = False
    max_length: int = 16384
    max_eval_samples: int = 1
    needle: NeedleSettings | None = None
    sample_tokens: int = 0
    seed: int = SEED
    output: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `oomb.Config`."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("max_eval_samples", 1), ("sample_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be {least} or more")
        if self.output is not None:
            path = Path(self.output)
            if path.is_dir():
                raise ValueError(f"--output {path} is a folder; name a file, {path / 'eval.json'} for example")
            parent = next(p for p in path.absolute().parents if p.exists())
            if not os.access(parent, os.W_OK):
                raise ValueError(f"--output {path} cannot be written: {parent} is read-only for you")


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Evaluates, prints tables, and returns what it writes to `settings.output`."""
    started = time.monotonic()
    config = Config.from_dict(settings.engine)
    device = dtypes.resolve_device(settings.device)
    dtypes.resolve_dtype(settings.dtype, device)
    base = base_of(settings.model_name_or_path)
    whole = settings.model_name_or_path if base is None else base
    trust: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    model_config = load.load_config(whole, **trust)
    tokenizer = tokenizer_for(whole, model_config, _tokenizer_name(settings, base), **trust)
    if settings.tokenizer_name is not None and tokenizer is not None:
        own_name = _tokenizer_name(replace(settings, tokenizer_name=None), base) or whole
        own = load.own_tokenizer(own_name, **trust)
        fault = another_tokenizer(settings.tokenizer_name, tokenizer, own_name, own)
        if fault is not None:
            raise ValueError(f"--tokenizer_name {fault}. Leave out --tokenizer_name")
    # Text is cheaper to find fault with than weights are to load.
    with bytes_bar(console, "checking the dataset", "checked", transient=True) as report_check:
        split, windows, text = _read(settings, tokenizer, model_config.get_text_config().vocab_size, report_check)
    haystacks = [] if settings.needle is None else build_haystacks(text, tokenizer, settings.needle)
    _check_positions(settings, model_config, console)
    _describe(settings, base, split, windows, console)

    torch.manual_seed(settings.seed)
    model = load.load_model(whole, dtype=settings.dtype, device=str(device), config=model_config, **trust)
    engine = Engine(model if base is None else with_adapters(model, settings.model_name_or_path), config)
    lengths = [len(window["input_ids"]) for window in windows] + [h.length for h in haystacks for _ in range(2)]
    with _showing(engine, lengths, console):
        found = evaluate(engine, windows, haystacks, settings.needle)
    if settings.sample_tokens:
        prompt = windows[0]["input_ids"][:PROMPT_SIZE]
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


def evaluate(
    engine: Engine, windows: Sequence[Any], haystacks: Sequence[Haystack] = (), needle: NeedleSettings | None = None
) -> dict[str, Any]:
    """{"perplexity", and "needle" where there are haystacks}: plain values, as the `eval` event of a run holds them.

    There are `len(windows) + 2 * len(haystacks)` passes; `engine.progress` hears of their chunks.
    """
    found = {"perplexity": perplexity_by_position(engine, windows).as_dict()}
    if needle is not None and haystacks:
        found["needle"] = needle_scores(engine, haystacks, needle).as_dict()
    return found


def tokenizer_for(
    name_or_path: str,
    config: PretrainedConfig,
    tokenizer_name: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is named, or the model's own; None for presets and what was trained from them on bytes."""
    vocab_size = config.get_text_config().vocab_size
    if tokenizer_name is not None:
        tokenizer = load.load_tokenizer(tokenizer_name, trust_remote_code=trust_remote_code)
    elif presets.is_preset(name_or_path):
        tokenizer = None
    else:
        try:
            tokenizer = load.load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
        except ValueError:
            if vocab_size != presets.PRESETS["demo"]["vocab_size"]:
                raise
            tokenizer = None
    # Tokens added to it, padding for one, are no harm until a text has them.
    needed = NUM_BYTE_IDS if tokenizer is None else tokenizer.vocab_size
    if vocab_size < needed:
        what = "bytes need" if tokenizer is None else "the tokenizer has"
        raise ValueError(
            f"{name_or_path} has a vocabulary of {vocab_size} and {what} {needed} ids; name the tokenizer that belongs "
            "to the model with --tokenizer_name"
        )
    return tokenizer


def _tokenizer_name(settings: Settings, base: str | None) -> str | None:
    """Adapters are saved with the tokenizer that they were trained with; that one comes before the base model's."""
    if settings.tokenizer_name is not None or base is None:
        return settings.tokenizer_name
    folder = Path(settings.model_name_or_path).expanduser()
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in load.TOKENIZER_FILES)
    return str(folder) if has_tokenizer else None


def _read(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    report: Callable[[int, int], None],
) -> tuple[Split, list[dict[str, Tensor]], Tensor]:
    """The windows to evaluate on, and text for haystacks. The first windows of a text are what `oomb train` holds
    out."""
    most = max(settings.needle.lengths, default=0) if settings.needle is not None else 0
    num_windows = max(settings.max_eval_samples, -(-most // settings.max_length))
    skip_check = settings.skip_dataset_check
    while True:
        split = open_dataset(
            settings.dataset,
            tokenizer=tokenizer,
            max_length=settings.max_length,
            packing=settings.packing,
            join=settings.dataset_join,
            vocab_size=vocab_size,
            num_train=num_windows,
            num_held_out=settings.max_eval_samples,
            seed=settings.seed,
            skip_check=skip_check,
            report=report,
        )
        parts = [split.train] if split.held_out is None else [split.held_out, split.train]
        windows = [part[i] for part in parts for i in range(len(part))]
        text = torch.cat([window["input_ids"] for window in windows])
        # Documents may be short. How many of them a haystack takes is known once they are read.
        if len(text) >= most or len(split.train) < num_windows:
            return split, windows[: settings.max_eval_samples], text
        num_windows *= 4
        skip_check = True  # It has been checked.


def _describe(
    settings: Settings, base: str | None, split: Split, windows: list[dict[str, Tensor]], console: Console
) -> None:
    """What is read, in a few lines."""
    num, asked = len(windows), settings.max_eval_samples
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


def _check_positions(settings: Settings, config: PretrainedConfig, console: Console) -> None:
    longest = max(settings.max_length, *(settings.needle.lengths if settings.needle is not None else (0,)))
    positions = load.positions_of(config)
    if positions is not None and longest > positions:
        console.print(
            f"[yellow]{longest:,} tokens are more than the {positions:,} positions this model was made for[/]",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _showing(engine: Engine, lengths: list[int], console: Console) -> Iterator[None]:
    """A bar over the tokens of all passes, or a line now and then where there is no terminal."""
    num_passes, total, done_passes, last_line = len(lengths), sum(lengths), 0, time.monotonic()
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
        nonlocal done_passes, last_line
        completed = sum(lengths[:done_passes]) + lengths[done_passes] * done / chunks
        at = f"{done_passes + 1}/{num_passes}"
        bar.update(task, completed=completed, at=at, chunk=f"chunk {done}/{chunks}")
        if not console.is_terminal and time.monotonic() - last_line > PLAIN_INTERVAL_S:
            last_line = time.monotonic()
            console.print(f"pass {at}  chunk {done}/{chunks}, {completed / total:.0%}", highlight=False)
        done_passes += done == chunks

    before, engine.progress = engine.progress, chunk_done
    try:
        with bar:
            yield
    finally:
        engine.progress = before


def _print(found: dict[str, Any], settings: Settings, console: Console) -> None:
    console.print(position_table(found["perplexity"], f"{settings.model_name_or_path} on {settings.dataset}"))
    if "needle" in found:
        console.print(needle_table(found["needle"]))
    if "sample" in found:
        console.print("[bold]a sample[/], from the beginning of the text:", highlight=False)
        console.print(f"[dim]{escape(found['sample']['prompt'])}[/]{escape(found['sample']['text'])}", highlight=False)


def position_table(found: dict[str, Any], title: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for column in ("positions", "tokens", "loss, nats", "standard error", "perplexity"):
        table.add_column(column, justify="right")
    for bucket in found["buckets"]:
        error = bucket["standard_error"]
        table.add_row(
            f"{bucket['start']:,} to {bucket['end']:,}",
            f"{bucket['count']:,}",
            f"{bucket['loss']:.4f}",
            "" if error is None else f"{error:.4f}",
            f"{bucket['perplexity']:,.2f}",
        )
    table.add_section()
    table.add_row("all", f"{found['count']:,}", f"{found['loss']:.4f}", "", f"{found['perplexity']:,.2f}")
    return table


def needle_table(found: dict[str, Any]) -> Table:
    """Accuracy by length and depth, "at 10%" being near the beginning of the text. It fits a terminal of 80 columns."""
    low, high = found["interval"]
    table = Table(
        title=f"needles found: {found['accuracy']:.0%} (95% interval {low:.0%} to {high:.0%})\n"
        f"chance {found['chance']:.0%}, without needles in the text {found['control_accuracy']:.0%}",
        title_justify="left",
    )
    depths = sorted({cell["depth"] for cell in found["cells"]})
    for column in ("tokens", *(f"at\n{depth:.0%}" for depth in depths), "all", "share", "exact", "gain,\nnats"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["lengths"]:
        cells = {cell["depth"]: cell for cell in found["cells"] if cell["length"] == row["length"]}
        table.add_row(
            f"{row['length']:,}",
            *(f"{cells[depth]['accuracy']:.0%}" for depth in depths),
            f"[bold]{row['accuracy']:.0%}[/]",
            f"{row['share']:.0%}",
            f"{row['exact']:.0%}",
            f"{row['gain']:+.2f}",
        )
    return table
