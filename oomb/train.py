"""The run behind `oomb train`: check everything, load, train on `oomb.Trainer`, save, sum up."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PrinterCallback, TrainingArguments
from transformers.trainer_utils import SchedulerType

from oomb import data, presets
from oomb.config import Config
from oomb.metrics import JsonLines, MemoryMeter, gib, machine
from oomb.plan import Placement
from oomb.progress import Interrupts, StopRequested, TrainingDisplay
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
    first_step = _first_step(settings)
    output_dir = _output_dir(settings)

    # Text is cheaper to find fault with than weights are to load.
    model_config = presets.load_config(settings.model_name_or_path)
    tokenizer = _tokenizer(settings, model_config)
    split = _windows(settings, tokenizer, model_config.get_text_config().vocab_size, device)
    arguments = _arguments(settings, output_dir, device, len(split.train))
    if first_step >= arguments.max_steps:
        raise ValueError(
            f"{settings.resume_from_checkpoint} is at step {first_step} and --max_steps is {arguments.max_steps}: "
            "there is nothing left to train; raise --max_steps"
        )
    torch.manual_seed(settings.seed)
    resume = settings.resume_from_checkpoint
    if resume is None:
        options: dict[str, Any] = {"name_or_path": settings.model_name_or_path, "config": model_config}
    else:
        # The trainer loads the checkpoint only when it trains; the held-out loss before that is to be the checkpoint's.
        options = {"name_or_path": resume}
    model = presets.load_model(**options, dtype=settings.dtype, device=str(device))
    trainer = Trainer(model, arguments, train_dataset=split.train, engine_config=config)
    trainer.remove_callback(PrinterCallback)
    with console.status("taking memory for K, V and their gradients"):
        # Fails here, with the numbers, if a step will not fit.
        placement = trainer.engine.reserve(settings.per_device_train_batch_size, settings.max_length)

    output_dir.mkdir(parents=True, exist_ok=True)
    found = set(output_dir.iterdir())
    meter = MemoryMeter(device)
    tokens_per_step = settings.max_length * settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    log = JsonLines(output_dir / "metrics.jsonl", append=resume is not None)
    display = TrainingDisplay(console, log, meter, tokens_per_step, trainer.engine)
    saved_to: Path | None = None
    try:
        with log, Interrupts(display) as interrupts:
            trainer.add_callback(display)
            trainer.engine.progress = display.chunk_done
            log.write(event="start", settings=asdict(settings), engine=asdict(config), machine=machine())
            described = _describe(settings, model, split, trainer, device, config, placement)
            console.print(described, highlight=False, soft_wrap=True)

            before = _held_out_loss(trainer, split.held_out, display, interrupts)
            if before is not None:
                log.write(event="held_out", step=first_step, loss=before)
                when = "before training" if resume is None else f"of the checkpoint, step {first_step}"
                console.print(f"held-out loss {when}: {before:.4f}", highlight=False)
            stopped = _train(trainer, display, interrupts, resume)
            if display.step_times:
                interrupts.ignore("saving; the program ends after that")
                saved_to = save(model, tokenizer, output_dir / "model")
            after = None if stopped else _held_out_loss(trainer, split.held_out, display, interrupts)
            if after is not None:
                log.write(event="held_out", step=trainer.state.global_step, loss=after)
            log.write(
                event="end",
                stopped=stopped,
                steps=trainer.state.global_step,
                tokens=tokens_per_step * len(display.step_times),
                tokens_per_s=round(display.tokens_per_second, 1) if display.step_times else None,
                peak_memory_bytes=meter.peak_bytes,
                wall_s=round(time.monotonic() - started, 2),
            )
    except KeyboardInterrupt:
        _remove_unfinished(output_dir, found)
        what = f"the trained model is in {saved_to}" if saved_to else "nothing was saved"
        console.print(f"[bold red]ended by Ctrl-C[/]; {what}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    if stopped:
        where = f"the model as of then is in {saved_to}" if saved_to else "nothing was saved"
        console.print(
            f"[yellow]stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; {where}[/]",
            highlight=False,
            soft_wrap=True,
        )
    if saved_to is not None:
        title = "Stopped" if stopped else "Done"
        places = {"model": saved_to, "metrics": log.path}
        console.print(display.summary(title, (before, after), time.monotonic() - started, places))
        next_steps = _how_to_go_on(settings, output_dir) if stopped else _what_next(settings, split, model, saved_to)
        console.print(next_steps, highlight=False, soft_wrap=True)
    return EXIT_INTERRUPTED if stopped else 0


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write beside the place and rename: the folder is either the old model or the whole new one."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _remove_unfinished(output_dir: Path, found: set[Path]) -> None:
    """After a forced end: the checkpoint that was being written. Its trainer_state.json is written last."""
    for folder in set(output_dir.glob("checkpoint-*")) - found:
        if not (folder / "trainer_state.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _checkpoints(output_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    states = sorted(output_dir.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in states]


def _first_step(settings: Settings) -> int:
    """Steps that the checkpoint to resume from has behind it."""
    if settings.resume_from_checkpoint is None:
        return 0
    state = Path(settings.resume_from_checkpoint) / "trainer_state.json"
    if not state.is_file():
        raise ValueError(f"--resume_from_checkpoint {state.parent} is no checkpoint: it holds no trainer_state.json")
    presets.check_model_name(settings.resume_from_checkpoint)
    return int(json.loads(state.read_text())["global_step"])


def _output_dir(settings: Settings) -> Path:
    if settings.output_dir is not None:
        chosen = Path(settings.output_dir).expanduser()
        if chosen.exists() and not chosen.is_dir():
            raise ValueError(f"--output_dir {chosen} is a file; name a folder")
        if not settings.overwrite_output_dir and settings.resume_from_checkpoint is None:
            _refuse_used(chosen)
        parent = next(p for p in (chosen, *chosen.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise ValueError(f"--output_dir {chosen} cannot be written: {parent} is read-only for you")
        return chosen
    if settings.resume_from_checkpoint is not None:
        return Path(settings.resume_from_checkpoint).parent
    source = Path(settings.model_name_or_path)
    # A model that we saved ourselves is called "model"; its run has the telling name.
    name = source.parent.name if source.name == "model" else source.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "model"
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


def _refuse_used(output_dir: Path) -> None:
    whole = _checkpoints(output_dir)
    if whole:
        raise ValueError(
            f"{output_dir} already holds checkpoints; go on from the latest with --resume_from_checkpoint {whole[-1]}, "
            "name another --output_dir, or pass --overwrite_output_dir"
        )
    for name, what in (("model", "a trained model"), ("metrics.jsonl", "the metrics of a run")):
        if (output_dir / name).exists():
            raise ValueError(
                f"{output_dir} already holds {what}; name another --output_dir, or pass --overwrite_output_dir"
            )


def _tokenizer(settings: Settings, model_config: PretrainedConfig) -> PreTrainedTokenizerBase | None:
    if settings.tokenizer_name is not None:
        return presets.load_tokenizer(settings.tokenizer_name)
    if presets.is_preset(settings.model_name_or_path):
        return None
    try:
        return presets.load_tokenizer(settings.model_name_or_path)
    except ValueError:
        # What `oomb train` saves of a byte-level model has no tokenizer, and reads bytes again.
        if model_config.get_text_config().vocab_size == presets.PRESETS[DEMO]["vocab_size"]:
            return None
        raise


def _windows(
    settings: Settings, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, device: torch.device
) -> data.Split:
    needed = data.NUM_BYTE_IDS if tokenizer is None else len(tokenizer)
    if vocab_size < needed:
        what = "bytes need" if tokenizer is None else "the tokenizer has"
        raise ValueError(
            f"{settings.model_name_or_path} has a vocabulary of {vocab_size} and {what} {needed} ids; "
            "name the tokenizer that belongs to the model with --tokenizer_name"
        )
    steps = settings.max_steps or (_demo_steps(device) if settings.is_demo else None)
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
            f"{settings.dataset} has {_count(len(split.train), 'window')} of {settings.max_length} tokens to train on "
            f"and a batch takes {settings.per_device_train_batch_size}: lower --max_length or the batch size"
        )
    return split


def _demo_steps(device: torch.device) -> int:
    return DEMO_STEPS["cuda" if device.type == "cuda" else "cpu"]


def _arguments(settings: Settings, output_dir: Path, device: torch.device, num_windows: int) -> TrainingArguments:
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    one_epoch = -(-num_windows // batch)
    default_steps = _demo_steps(device) if settings.is_demo else one_epoch
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


def _train(
    trainer: Trainer, display: TrainingDisplay, interrupts: Interrupts, resume_from_checkpoint: str | None
) -> bool:
    """Train; True where Ctrl-C ended it early, which is between two chunks and never inside an optimizer step."""
    interrupts.stop("stopping at the next chunk and saving; Ctrl-C again ends without saving")
    try:
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    except StopRequested:
        return True
    finally:
        display.close()
    return display.stop_requested


def _held_out_loss(
    trainer: Trainer, held_out: data.Windows | None, display: TrainingDisplay, interrupts: Interrupts
) -> float | None:
    """The held-out loss, or None where there is none. Nothing that happens here is worth a trained model."""
    if held_out is None:
        return None
    interrupts.stop("skipping the held-out loss at the next chunk; Ctrl-C again ends the program")
    num_batches = -(-len(held_out) // trainer.args.per_device_eval_batch_size)
    try:
        with display.evaluating("held-out loss", num_batches):
            return float(trainer.evaluate(held_out)["eval_loss"])
    except StopRequested:
        return None
    except Exception as error:
        if not display.step_times:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        text = escape(f"the held-out loss failed and is left out ({reason})")
        display.console.print(f"[yellow]{text}[/]", highlight=False, soft_wrap=True)
        return None


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _describe(
    settings: Settings,
    model: Any,
    split: data.Split,
    trainer: Trainer,
    device: torch.device,
    config: Config,
    placement: Placement,
) -> str:
    num_parameters = sum(p.numel() for p in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    windows_per_step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    steps = trainer.args.max_steps
    passes = steps * windows_per_step / len(split.train)
    again = f", each read {passes:.1f} times" if passes > 1.05 else ""
    model_name, dataset = escape(settings.model_name_or_path), escape(settings.dataset)
    lines = [
        f"[bold]{model_name}[/]: {num_parameters / 1e6:,.2f}M parameters, {dtype}, on {device}",
        f"[bold]{dataset}[/]: {_count(len(split.train), 'window')} of {settings.max_length:,} tokens to train on"
        f"{again}; {_count(len(split.held_out) if split.held_out else 0, 'window')} held out",
        f"{_count(steps, 'step')} of {_count(windows_per_step, 'window')}, learning rate "
        f"{trainer.args.learning_rate:g}, chunks of {config.chunk_size:,} tokens",
    ]
    if placement.capacity:
        what = "K, V and their gradients" + (", attention outputs" if placement.keep_attention else "")
        host = f", {gib(placement.host_bytes)} on the host" if placement.host_bytes else ""
        lines.append(f"{what}: {gib(placement.gpu_bytes)} on {device}{host}")
    positions = presets.positions_of(model.config)
    if positions is not None and settings.max_length > positions:
        lines.append(
            f"[yellow]--max_length {settings.max_length:,} is more than the {positions:,} positions this model was "
            "made for (max_position_embeddings): lower it, or scale RoPE, with YaRN for example, by rope_parameters "
            "in the model's config.json (docs/quickstart.md)[/]"
        )
    if split.skipped:
        left_out = escape(str(split.skipped[0]))
        lines.append(f"[yellow]{_count(len(split.skipped), 'file')} without text left out: {left_out}, …[/]")
    return "\n".join(lines)


def _what_next(settings: Settings, split: data.Split, model: Any, saved_to: Path) -> str:
    longer = settings.max_length * 2
    positions = presets.positions_of(model.config)
    is_possible = split.num_tokens >= longer and (positions is None or longer <= positions)
    context = longer if is_possible else settings.max_length
    where = {"device": settings.device, "dtype": settings.dtype}
    engine = {key: value for key, value in settings.engine.items() if key in ("kernels", "fuse", "keep_attention")}
    go_on = {"model_name_or_path": str(saved_to), "dataset": settings.dataset, "learning_rate": settings.learning_rate}
    go_on |= {"max_length": context, "max_steps": 10, **where, **settings.engine}
    commands = {
        f"verify {shlex.quote(str(saved_to))}{_options({**where, **engine})}": "check its gradients on this machine",
        f"train{_options(go_on)}": "go on at twice the context" if is_possible else "go on",
    }
    if settings.is_demo:
        commands["train --dataset FOLDER"] = "the same on your own text"
    return "\n".join(["Next:", *(f"  {program()} {command}\n      {what}" for command, what in commands.items())])


def _how_to_go_on(settings: Settings, output_dir: Path) -> str:
    whole = _checkpoints(output_dir)
    if not whole:
        return (
            "This run wrote no checkpoint to resume from: --save_steps N writes one every N steps. The saved model can "
            "be trained on, with a new optimizer, by --model_name_or_path."
        )
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("engine", "overwrite_output_dir")}
    chosen |= {"output_dir": str(output_dir), "resume_from_checkpoint": str(whole[-1]), **settings.engine}
    return f"To go on from the latest checkpoint:\n  {program()} train{_options(chosen)}"


def _options(chosen: dict[str, Any]) -> str:
    """As they are typed; those that are the default anyway are left out."""
    defaults = {**asdict(Settings()), **asdict(Config())}
    text = ""
    for name, value in chosen.items():
        if value is not None and value != defaults[name]:
            text += f" --{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"
    return text


def program() -> str:
    """How this program is called from the user's shell: by its name where that is found, else by its path."""
    if shutil.which("oomb"):
        return "oomb"
    script = Path(sys.executable).parent / "oomb"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m oomb"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
