"""Describe a run before it starts: the model, the data, the length, and anything the user should know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from oomb.cli.train.save_timer import KEPT
from oomb.cli.train.settings import DEMO, TrainSettings
from oomb.data.dataset import unchecked
from oomb.data.tokens import Split
from oomb.models import load, presets
from oomb.utils.units import count, gib

if TYPE_CHECKING:
    from oomb.cli.train.prepare import PreparedRun


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print notes in yellow, one line each."""
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)


def notes_on_settings(settings: TrainSettings) -> list[str]:
    """Return what the user may not have meant."""
    notes = [preset_note(settings), unused_note(settings)]
    notes.append(unchecked(settings.dataset) if settings.skip_dataset_check else None)
    return [note for note in notes if note is not None]


def preset_note(settings: TrainSettings) -> str | None:
    """Return a note for users who name a preset and may mean the trained model of that name."""
    name = settings.model_name_or_path
    if not presets.is_preset(name) or name.lower() == DEMO or settings.resume_from_checkpoint is not None:
        return None
    text = ", and text is read as bytes" if settings.tokenizer_name is None else ""
    return f"{name} is a preset: its weights are random{text}. For the trained model, pass its hub id or a folder."


def unused_note(settings: TrainSettings) -> str | None:
    """Return a note if there are settings of adapters but no adapters."""
    own = [described for described in fields(settings) if described.name.startswith("lora_")]
    given = [f"--{described.name}" for described in own if getattr(settings, described.name) != described.default]
    if settings.use_peft or not given:
        return None
    return f"{' and '.join(given)} {'has' if len(given) == 1 else 'have'} no effect without --use_peft."


def describe(run: PreparedRun) -> str:
    """Return the lines that a run starts with, as markup of rich."""
    settings, arguments = run.resolved, run.trainer.args
    steps = count(arguments.max_steps, "step")
    optimizer = ", AdamW states in host memory" if settings.optim == "offloaded_adamw" else ""
    lines = [
        _model_line(run),
        f"[bold]{escape(settings.dataset)}[/]: {what_is_read(settings, run.split, arguments.max_steps)}; "
        f"{what_is_held_out(settings, run.split)}",
        f"{steps} of {count(settings.examples_per_step, 'example')}, learning rate {arguments.learning_rate:g}, chunks "
        f"of {run.config.chunk_size:,} tokens{optimizer}",
        when_saved(settings),
        *_memory_lines(run),
    ]
    notes = [run.precision.warning, _length_note(run), *run.split.notes]
    return "\n".join([*lines, *(f"[yellow]{escape(note)}[/]" for note in notes if note is not None)])


def _model_line(run: PreparedRun) -> str:
    settings, precision = run.resolved, run.precision
    parameters = list(run.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    adapters = f" (trained: {trained / 1e6:,.2f}M in adapters)" if settings.use_peft else ""
    numbers = "4 bits" if settings.load_in_4bit else precision.dtype
    numbers += " computed in bfloat16" if precision.mixed and precision.dtype != "bfloat16" else ""
    millions = sum(p.numel() for p in parameters) / 1e6
    name = escape(settings.model_name_or_path)
    return f"[bold]{name}[/]: {millions:,.2f}M parameters{adapters}, {numbers}, on {run.device}"


def _memory_lines(run: PreparedRun) -> list[str]:
    placement = run.placement
    if not placement.capacity:
        return []
    saved = "" if placement.out_tokens == placement.capacity else f" of {placement.out_tokens:,} tokens"
    what = "K, V and their gradients" + (f", attention outputs{saved}" if placement.keep_attention else "")
    host = f", {gib(placement.host_bytes)} in host memory" if placement.host_bytes else ""
    return [f"{what}: {gib(placement.gpu_bytes)} on {run.device}{host}"]


def _length_note(run: PreparedRun) -> str | None:
    positions, length = load.max_positions(run.model.config), run.resolved.max_length
    if positions is None or length <= positions:
        return None
    return (
        f"--max_length {length:,} is more than the {positions:,} positions this model was made for "
        "(max_position_embeddings): lower it, or scale RoPE with rope_parameters in the model's config.json, for "
        "example with YaRN (docs/quickstart.md)"
    )


def longest(settings: TrainSettings, split: Split) -> int:
    """Return the length of the longest example that the run reads. Memory is reserved for it."""
    if split.packing == "windows":
        return settings.max_length
    held_out = split.held_out.lengths if split.held_out is not None else []
    return max([*split.train.lengths, *held_out])


def when_saved(settings: TrainSettings) -> str:
    """Return how often the run writes checkpoints and how many it keeps."""
    every = [] if settings.save_steps is None else [count(settings.save_steps, "step")]
    every += [f"{settings.save_minutes:g} minutes"] if settings.save_minutes else []
    if not every:
        return "no checkpoints (--save_minutes 0)"
    num_kept, which = settings.save_total_limit, ""
    if num_kept is None and settings.save_minutes:
        num_kept, which = KEPT, " of the latter" if len(every) == 2 else ""
    kept = "" if num_kept is None else f"; the newest {num_kept:,}{which} are kept"
    return f"a checkpoint every {' and every '.join(every)}{kept}"


def what_is_read(settings: TrainSettings, split: Split, num_steps: int) -> str:
    """Return how many examples there are, how many of them the run reads, and how often."""
    num_read = len(split.train)
    passes = num_steps * settings.examples_per_step / num_read
    times = f"{passes:.1f} times" if passes > 1.05 else "once"
    # The rest of the files is not looked at if the run does not read it.
    at_least = "" if split.is_all_read else "at least "
    size = f" of {settings.max_length:,} tokens"
    if split.packing != "windows":
        size = f" from {count(split.num_documents, 'document')}, up to {longest(settings, split):,} tokens long"
    found = f"{at_least}{count(split.num_examples, 'example')}{size}"
    if num_read == split.num_examples and split.is_all_read:
        return f"{found}, each read {times}"
    return f"{found}, the first {num_read:,} read {times}"


def what_is_held_out(settings: TrainSettings, split: Split) -> str:
    """Return how many examples are held out, and why if there are fewer than asked for."""
    if split.held_out is not None:
        wanted, num_held_out = settings.max_eval_samples, len(split.held_out)
        why = f" (--max_eval_samples {wanted:,}, but at most a fifth of the data)" if num_held_out < wanted else ""
        return f"{num_held_out:,} held out{why}"
    if settings.max_eval_samples == 0:
        return "none held out (--max_eval_samples 0)"
    return "none held out: the data is a single example, and a smaller --max_length would give more"
