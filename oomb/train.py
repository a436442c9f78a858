"""The run behind `oomb train`: check everything, load, train on `oomb.Trainer`, save, sum up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType

from oomb import data, presets
from oomb.config import Config
from oomb.metrics import JsonLines, MemoryMeter, gib, machine, seconds
from oomb.progress import StopRequested, TrainingDisplay
from oomb.trainer import Trainer

DEMO = "demo"
# Chosen by short trials: much above it the loss stops falling, much below it 20 steps bring little.
DEMO_LEARNING_RATE = 4e-3
DEMO_STEPS = {"cpu": 20, "cuda": 200}
LEARNING_RATE = 5e-5

EXIT_INTERRUPTED = 130


@dataclass(kw_only=True)
class Settings:
    """The choices of one run, named as in Hugging Face. None: a default that depends on the model."""

    model_name_or_path: str = DEMO
    tokenizer_name: str | None = None
    dataset: str = data.STDLIB
    max_length: int = 16384
    max_steps: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    lr_scheduler_type: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    max_eval_samples: int = 1
    output_dir: str | None = None
    overwrite_output_dir: bool = False
    save_steps: int | None = None
    resume_from_checkpoint: str | None = None
    seed: int = 42
    dtype: str = "auto"
    device: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `oomb.Config`."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_length", 2),
            ("max_steps", 1),
            ("per_device_train_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("max_eval_samples", 0),
            ("save_steps", 1),
            ("warmup_steps", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} is {value}; it must be {least} or more")
        if self.learning_rate is not None and not 0 < self.learning_rate < 10:
            raise ValueError(f"--learning_rate is {self.learning_rate}; it must be above 0, 5e-5 for example")
        if self.lr_scheduler_type not in [kind.value for kind in SchedulerType]:
            kinds = ", ".join(kind.value for kind in SchedulerType)
            raise ValueError(f"--lr_scheduler_type {self.lr_scheduler_type!r} is unknown; use one of {kinds}")

    @property
    def is_demo(self) -> bool:
        return self.model_name_or_path == DEMO


def run(settings: Settings, console: Console) -> int:
    """Train. Returns the exit code. Everything that can be wrong with the settings is raised before the first step."""
    started = time.monotonic()
    config = Config.from_dict(settings.engine)
    presets.check_model_name(settings.model_name_or_path)
    device = presets.resolve_device(settings.device)
    if device.index:
        # transformers places the model of a single process on the first GPU it sees.
        raise ValueError(f"--device {device} cannot be trained on; set CUDA_VISIBLE_DEVICES={device.index} instead")
    presets.resolve_dtype(settings.dtype, device)
    data.find_documents(settings.dataset)
    resume = settings.resume_from_checkpoint
    if resume is not None and not (Path(resume) / "trainer_state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {resume} is no checkpoint: it holds no trainer_state.json")
    output_dir = _output_dir(settings)

    # Text is cheaper to find fault with than weights are to load.
    tokenizer = _tokenizer(settings)
    split = _windows(settings, tokenizer, _vocab_size(settings))
    torch.manual_seed(settings.seed)
    model = presets.load_model(settings.model_name_or_path, dtype=settings.dtype, device=str(device))
    arguments = _arguments(settings, output_dir, device, len(split.train))
    trainer = Trainer(model, arguments, train_dataset=split.train, engine_config=config)
    trainer.remove_callback(PrinterCallback)

    output_dir.mkdir(parents=True, exist_ok=True)
    meter = MemoryMeter(device)
    tokens_per_step = settings.max_length * settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    with JsonLines(output_dir / "metrics.jsonl") as log:
        display = TrainingDisplay(console, log, meter, tokens_per_step)
        trainer.add_callback(display)
        trainer.engine.progress = display.chunk_done
        log.write(event="start", settings=asdict(settings), engine=asdict(config), machine=machine())
        console.print(_describe(settings, model, split, trainer, device, config), highlight=False, soft_wrap=True)

        before = _held_out_loss(trainer, split.held_out)
        if before is not None:
            log.write(event="held_out", step=0, loss=before)
            console.print(f"held-out loss before training: {before:.4f}", highlight=False)
        stopped = _train(trainer, display, resume)
        after = None if stopped else _held_out_loss(trainer, split.held_out)
        if after is not None:
            log.write(event="held_out", step=trainer.state.global_step, loss=after)

        saved_to = None
        if display.step_times:
            saved_to = save(model, tokenizer, output_dir / "model")
        log.write(
            event="end",
            stopped=stopped,
            steps=trainer.state.global_step,
            tokens=tokens_per_step * len(display.step_times),
            tokens_per_s=round(display.tokens_per_second, 1) if display.step_times else None,
            peak_memory_bytes=meter.peak_bytes,
            wall_s=round(time.monotonic() - started, 2),
        )
    if stopped:
        where = f"the model as of then is in {saved_to}" if saved_to else "nothing was saved"
        console.print(
            f"[yellow]stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; {where}[/]",
            highlight=False,
            soft_wrap=True,
        )
        return EXIT_INTERRUPTED
    assert saved_to is not None
    console.print(_summary(display, trainer, before, after, meter, time.monotonic() - started, saved_to))
    console.print(_what_next(settings, saved_to), highlight=False, soft_wrap=True)
    return 0


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write beside the place and rename: the folder is either the old model or the whole new one."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    return folder


def _output_dir(settings: Settings) -> Path:
    if settings.output_dir is not None:
        chosen = Path(settings.output_dir).expanduser()
        if chosen.exists() and not chosen.is_dir():
            raise ValueError(f"--output_dir {chosen} is a file; name a folder")
        resumes = settings.overwrite_output_dir or settings.resume_from_checkpoint is not None
        if (chosen / "model").exists() and not resumes:
            raise ValueError(
                f"{chosen} already holds a trained model; name another --output_dir, or pass --overwrite_output_dir"
            )
        parent = next(p for p in (chosen, *chosen.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise ValueError(f"--output_dir {chosen} cannot be written: {parent} is read-only for you")
        return chosen
    source = Path(settings.model_name_or_path)
    # A model that we saved ourselves is called "model"; its run has the telling name.
    name = source.parent.name if source.name == "model" else source.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "model"
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


def _tokenizer(settings: Settings) -> PreTrainedTokenizerBase | None:
    if settings.tokenizer_name is not None:
        return presets.load_tokenizer(settings.tokenizer_name)
    if presets.is_preset(settings.model_name_or_path):
        return None
    try:
        return presets.load_tokenizer(settings.model_name_or_path)
    except ValueError:
        # What `oomb train` saves of a byte-level model has no tokenizer, and reads bytes again.
        if presets.load_config(settings.model_name_or_path).vocab_size == presets.PRESETS[DEMO]["vocab_size"]:
            return None
        raise


def _vocab_size(settings: Settings) -> int:
    return presets.load_config(settings.model_name_or_path).get_text_config().vocab_size


def _windows(settings: Settings, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> data.Split:
    needed = data.NUM_BYTE_IDS if tokenizer is None else len(tokenizer)
    if vocab_size < needed:
        what = "bytes need" if tokenizer is None else "the tokenizer has"
        raise ValueError(
            f"{settings.model_name_or_path} has a vocabulary of {vocab_size} and {what} {needed} ids; "
            "name the tokenizer that belongs to the model with --tokenizer_name"
        )
    steps = settings.max_steps or (max(DEMO_STEPS.values()) if settings.is_demo else None)
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    split = data.load(
        settings.dataset,
        max_length=settings.max_length,
        tokenizer=tokenizer,
        num_train=None if steps is None else steps * batch,
        num_held_out=settings.max_eval_samples,
    )
    if len(split.train) < settings.per_device_train_batch_size:
        raise ValueError(
            f"{settings.dataset} has {len(split.train)} windows of {settings.max_length} tokens to train on "
            f"and a batch takes {settings.per_device_train_batch_size}: lower --max_length or the batch size"
        )
    return split


def _arguments(settings: Settings, output_dir: Path, device: torch.device, num_windows: int) -> TrainingArguments:
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    one_epoch = -(-num_windows // batch)
    default_steps = DEMO_STEPS["cuda" if device.type == "cuda" else "cpu"] if settings.is_demo else one_epoch
    steps = settings.max_steps or default_steps
    warmup = settings.warmup_steps if settings.warmup_steps is not None else min(max(steps // 10, 2), 100, steps // 2)
    default_rate = DEMO_LEARNING_RATE if settings.is_demo else LEARNING_RATE
    return TrainingArguments(
        output_dir=str(output_dir),
        max_steps=steps,
        learning_rate=settings.learning_rate or default_rate,
        warmup_steps=warmup,
        lr_scheduler_type=settings.lr_scheduler_type,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        per_device_eval_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        save_strategy="no" if settings.save_steps is None else "steps",
        save_steps=settings.save_steps or 500,
        seed=settings.seed,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def _train(trainer: Trainer, display: TrainingDisplay, resume_from_checkpoint: str | None) -> bool:
    """Train; True where Ctrl-C ended it early."""
    with _stop_on_interrupt(display):
        try:
            trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        except StopRequested:
            return True
        finally:
            display.close()
    return display.stop_requested


@contextmanager
def _stop_on_interrupt(display: TrainingDisplay) -> Iterator[None]:
    """The first Ctrl-C stops at the next chunk, never inside an optimizer step; the second one ends the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def on_interrupt(signum: int, frame: Any) -> None:
        display.stop_requested = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _held_out_loss(trainer: Trainer, held_out: data.Windows | None) -> float | None:
    return None if held_out is None else float(trainer.evaluate(held_out)["eval_loss"])


def _describe(
    settings: Settings, model: nn.Module, split: data.Split, trainer: Trainer, device: torch.device, config: Config
) -> str:
    num_parameters = sum(p.numel() for p in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    lines = [
        f"[bold]{settings.model_name_or_path}[/]: {num_parameters / 1e6:,.2f}M parameters, {dtype}, on {device}",
        f"[bold]{settings.dataset}[/]: {len(split.train)} windows of {settings.max_length:,} tokens to train on, "
        f"{len(split.held_out) if split.held_out else 0} held out",
        f"{trainer.args.max_steps} steps, learning rate {trainer.args.learning_rate:g}, "
        f"chunks of {config.chunk_size:,} tokens",
    ]
    if split.skipped:
        lines.append(f"[yellow]{len(split.skipped)} files hold no text and were left out: {split.skipped[0]}, …[/]")
    return "\n".join(lines)


def _summary(
    display: TrainingDisplay,
    trainer: Trainer,
    before: float | None,
    after: float | None,
    meter: MemoryMeter,
    wall_s: float,
    saved_to: Path,
) -> Table:
    table = Table(title="Done", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    last = display.losses[-5:]
    table.add_row(
        "training loss", f"{display.losses[0]:.4f} → {sum(last) / len(last):.4f} (mean of the last {len(last)})"
    )
    if before is not None and after is not None:
        table.add_row("held-out loss", f"{before:.4f} → {after:.4f}")
    num_steps = len(display.step_times)
    table.add_row("steps", f"{num_steps}")
    table.add_row("tokens", f"{num_steps * display.tokens_per_step:,} ({display.tokens_per_step:,} a step)")
    table.add_row("speed", f"{display.tokens_per_second:,.0f} tokens/s")
    table.add_row("time", seconds(wall_s))
    table.add_row(meter.label, gib(meter.peak_bytes))
    table.add_row("model", str(saved_to))
    table.add_row("metrics", str(Path(trainer.args.output_dir) / "metrics.jsonl"))
    return table


def _what_next(settings: Settings, saved_to: Path) -> str:
    go_on = f"oomb train --model_name_or_path {saved_to} --max_length {settings.max_length * 2} --max_steps 10"
    commands = {
        f"oomb verify {saved_to}": "check its gradients on this machine",
        go_on: "go on at twice the context",
        "oomb train --dataset FOLDER": "the same on your own text",
    }
    width = max(map(len, commands))
    return "\n".join(["Next:", *(f"  {command:{width}}  {what}" for command, what in commands.items())])
