"""Prepare a run: check its settings, read its data, load its model and build its trainer, cheap checks first."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainingArguments

from oomb.cli.progress import bytes_bar
from oomb.cli.train import describe, model, ranks, save
from oomb.cli.train.before_after import BeforeAfterEval
from oomb.cli.train.model import Precision
from oomb.cli.train.output_dir import MODEL, data_changes
from oomb.cli.train.save_timer import SaveTimer
from oomb.cli.train.settings import TRACKERS, TrainSettings
from oomb.cli.train.state import RunInfo
from oomb.config import OFFLOADED_STATES, Config, SettingError
from oomb.data.dataset import open_configured, pad_batch
from oomb.data.discover import STDLIB, find_documents
from oomb.data.tokens import Split
from oomb.distributed import watch
from oomb.distributed.collectives import Group, require_same
from oomb.distributed.mesh import ranks_per_host, world_size
from oomb.memory.host import free_host_bytes
from oomb.models import adapters, load
from oomb.models.probe import model_shape
from oomb.planner.flops import step_flops
from oomb.planner.hardware import peak_flops
from oomb.planner.request import Placement, host_budget
from oomb.trainers import checkpoints
from oomb.trainers.trainer import Trainer
from oomb.utils import dtypes
from oomb.utils.units import count

# From short trials: well above this rate the loss stops falling, well below it 20 steps achieve little.
DEMO_LEARNING_RATE = 4e-3
DEMO_STEPS = {"cpu": 20, "cuda": 200}
LEARNING_RATE, LORA_LEARNING_RATE = 5e-5, 2e-4


class AlreadyComplete(Exception):
    """torchrun restarted a run that is already complete."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything a run needs for its first step."""

    settings: TrainSettings
    """As given, with the path of the checkpoint to resume from."""
    resolved: TrainSettings
    """With all defaults filled in, as config.yaml has them."""
    config: Config
    device: torch.device
    output_dir: Path
    first_step: int
    precision: Precision
    tokenizer: PreTrainedTokenizerBase | None
    split: Split
    before_after: BeforeAfterEval
    model: PreTrainedModel
    trainer: Trainer
    placement: Placement
    host_limit: int

    @property
    def max_steps(self) -> int:
        return self.trainer.args.max_steps

    def info(self) -> RunInfo:
        """Return the facts that the display shows and metrics are computed from."""
        settings, engine = self.resolved, self.trainer.engine
        length = settings.max_length
        # Layers in 4 bits are dequantized to be multiplied, so their stored size does not tell the FLOPs.
        shape = None if settings.load_in_4bit else model_shape(engine.model.lm)
        flops = None if shape is None else step_flops(shape, length, engine.config.keys_read(length))
        num_held_out = len(self.split.held_out) if self.split.held_out is not None else 0
        gpu_bytes = gpu_memory(self.device)
        return RunInfo(
            title=f"{settings.model_name_or_path} on {settings.dataset}, {settings.tokens_per_step:,} tokens a step",
            tokens_per_step=settings.tokens_per_step,
            num_eval_batches=-(
                -num_held_out // (self.trainer.args.per_device_eval_batch_size * num_replicas(settings))
            ),
            # Of one GPU, as is its peak.
            flops_per_step=None if flops is None else flops * settings.examples_per_step / world_size(),
            peak_flops=None if gpu_bytes is None else peak_flops(torch.cuda.get_device_name(0)),
            device_bytes=psutil.virtual_memory().total if gpu_bytes is None else gpu_bytes,
            gpu_page_bytes=self.placement.gpu_bytes,
            host_page_bytes=self.host_limit,
        )


def check_settings(settings: TrainSettings) -> torch.device:
    """Check what needs neither data nor weights, and return the device to train on."""
    check_packages(settings)
    load.check_model_name(settings.model_name_or_path)
    device = choose_device(settings)
    dtypes.resolve_dtype(settings.dtype, device)
    if settings.dataset != STDLIB:
        find_documents(settings.dataset)
    return device


def prepare(
    settings: TrainSettings, config: Config, device: torch.device, output_dir: Path, first_step: int, console: Console
) -> PreparedRun:
    """Read the data, load the model, build the trainer and reserve memory for its largest step.

    Args:
        settings: Settings of the run.
        config: Its settings of the engine.
        device: Device to train on.
        output_dir: Folder of the run.
        first_step: Steps done before, if it resumes from a checkpoint.
        console: Console for notes and progress.

    Raises:
        ValueError: Something in the data, the model or the settings is wrong.
        OutOfPages: A step does not fit in memory.
    """
    describe.print_notes(console, describe.notes_on_settings(settings))
    # Data is faster to check than weights are to load.
    model_config = load.load_config(settings.model_name_or_path, trust_remote_code=settings.trust_remote_code)
    if settings.use_peft:
        model.check_targets(settings, model_config)
    model.check_heads(settings, model_config)
    precision = model.choose_precision(settings, gpu_memory(device), model_config)
    tokenizer = model.load_tokenizer(settings, model_config)
    vocab_size = model_config.get_text_config().vocab_size
    with bytes_bar(console, "checking the dataset", "checked", transient=True) as report_check:
        split = _load_in_turn(settings, tokenizer, vocab_size, device, report_check)
    before_after = BeforeAfterEval(settings, split, tokenizer)
    done = resolved(replace(settings, packing=split.packing), output_dir, device, split.num_examples)
    resume = settings.resume_from_checkpoint
    describe.print_notes(console, data_changes(replace(done, resume_from_checkpoint=resume)))
    arguments = training_arguments(done, device, precision.mixed)
    # A run that was killed while it saved its model is at its last step, too: it saves the model now.
    is_saved = (output_dir / MODEL).exists()
    if first_step == arguments.max_steps and is_saved and ranks.is_restarted():
        raise AlreadyComplete(f"{output_dir / MODEL} is saved: the run was complete when a rank failed")
    if first_step > arguments.max_steps or (first_step == arguments.max_steps and is_saved):
        raise SettingError(
            "max_steps", f"is {arguments.max_steps}, and {resume} is at step {first_step} already: raise --max_steps"
        )
    trained = model.load_model(settings, model_config, precision.dtype, device)
    trainer = build_trainer(done, trained, arguments, config, split)
    host_limit = host_budget(config, free_host_bytes() // ranks_per_host())
    with console.status("reserving memory for K, V and their gradients"), trainer.accelerator.autocast():
        # Raises OutOfPages, with the numbers, if a step will not fit.
        placement = trainer.engine.reserve(settings.per_device_train_batch_size, describe.longest(settings, split))
    save.check_room(trained, output_dir)
    return PreparedRun(
        settings=settings,
        resolved=done,
        config=config,
        device=device,
        output_dir=output_dir,
        first_step=first_step,
        precision=precision,
        tokenizer=tokenizer,
        split=split,
        before_after=before_after,
        model=trained,
        trainer=trainer,
        placement=placement,
        host_limit=host_limit,
    )


def _load_in_turn(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    device: torch.device,
    report: Callable[[int, int], None],
) -> Split:
    """Load the examples on rank 0, which checks all of them, and then on the other ranks.

    Raises:
        TopologyError: A rank finds other examples than rank 0.
    """
    if ranks.is_first():
        split = load_examples(settings, tokenizer, vocab_size, device, report)
        watch.on_first_rank(lambda: None)
    else:
        watch.on_first_rank(lambda: None)
        split = load_examples(replace(settings, skip_dataset_check=True), tokenizer, vocab_size, device)
    if dist.is_initialized():
        first, last = split.train[0]["input_ids"].tolist(), split.train[len(split.train) - 1]["input_ids"].tolist()
        found = {"number of examples": len(split.train), "first example": crc32(repr(first).encode())}
        require_same(Group(dist.group.WORLD), "dataset:", {**found, "last example": crc32(repr(last).encode())})
    return split


def check_packages(settings: TrainSettings) -> None:
    """Refuse settings whose optional packages are not installed."""
    if settings.use_peft and not _is_installed("peft"):
        raise SettingError("use_peft", "needs peft: pip install peft")
    adapters.bnb_config(load_in_4bit=settings.load_in_4bit)
    for tracker in settings.trackers:
        if not any(map(_is_installed, TRACKERS[tracker])):
            raise SettingError("report_to", f"{tracker} needs the package {tracker}: pip install {tracker}")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose_device(settings: TrainSettings) -> torch.device:
    """Return the device to train on."""
    device = dtypes.resolve_device(settings.device)
    if device.index:
        # Transformers uses the first GPU it sees, or that of the local rank.
        raise SettingError("device", f"{device} cannot be trained on: set CUDA_VISIBLE_DEVICES={device.index} instead")
    if settings.load_in_4bit and device.type != "cuda":
        raise SettingError("load_in_4bit", f"needs a GPU, and the device is {device}")
    return device


def gpu_memory(device: torch.device) -> int | None:
    """Return the GPU's memory in bytes, or None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def load_examples(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Split:
    """Return the examples to train on and those held out; only as many as the run reads.

    Args:
        settings: Settings of the run.
        tokenizer: Tokenizer of the model; None reads bytes.
        vocab_size: Token ids the model accepts.
        device: Device to train on. The demo's length depends on it.
        report: Called with the bytes checked and the total bytes while checksums are compared.
    """
    steps = settings.max_steps or _demo_steps(settings, device)
    split = open_configured(
        settings,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        num_train=None if steps is None else steps * settings.examples_per_step,
        skip_check=settings.skip_dataset_check,
        report=report,
    )
    num_at_once = settings.per_device_train_batch_size * num_replicas(settings)
    if len(split.train) < num_at_once:
        raise ValueError(
            f"{settings.dataset} has {count(len(split.train), 'example')} of {settings.max_length} tokens to train on, "
            f"and a batch needs {num_at_once}: lower --max_length or the batch size"
        )
    if settings.eval_strategy != "no" and split.held_out is None:
        raise SettingError(
            "eval_strategy",
            f"{settings.eval_strategy} needs held-out examples, and {settings.dataset} is a single one of "
            f"{settings.max_length} tokens: lower --max_length",
        )
    # config.yaml has the number of steps, and a run that resumes from it must find the same examples.
    num_read = _num_steps(settings, device, split.num_examples) * settings.examples_per_step
    return replace(split, train=split.train.first(num_read))


def num_replicas(settings: TrainSettings) -> int:
    """Return how many processes, or groups of them, train on different examples."""
    return settings.topology.num_replicas(world_size())


def _demo_steps(settings: TrainSettings, device: torch.device) -> int | None:
    """Return the length of the built-in example, which is short unless epochs are given."""
    if not settings.is_demo or settings.num_train_epochs != 1:
        return None
    return DEMO_STEPS["cuda" if device.type == "cuda" else "cpu"]


def _num_steps(settings: TrainSettings, device: torch.device, num_examples: int) -> int:
    by_epochs = math.ceil(settings.num_train_epochs * num_examples / settings.examples_per_step)
    return settings.max_steps or _demo_steps(settings, device) or max(1, by_epochs)


def resolved(settings: TrainSettings, output_dir: Path, device: torch.device, num_examples: int) -> TrainSettings:
    """Return the settings with defaults that depend on model and data filled in, as config.yaml has them."""
    steps = _num_steps(settings, device, num_examples)
    warmup = settings.warmup_steps
    if warmup is None:
        warmup = min(max(steps // 10, 2), 100, steps // 2)
        if settings.warmup_ratio is not None:
            warmup = math.ceil(settings.warmup_ratio * steps)
    rate = DEMO_LEARNING_RATE if settings.is_demo else LORA_LEARNING_RATE if settings.use_peft else LEARNING_RATE
    return replace(
        settings,
        output_dir=str(output_dir),
        max_steps=steps,
        warmup_steps=warmup,
        warmup_ratio=None,
        learning_rate=settings.learning_rate or rate,
        # These belong to one start of the run. A run repeated from config.yaml must not do them again.
        overwrite_output_dir=False,
        resume_from_checkpoint=None,
        # A resumed run compares it: the examples of a step depend on it.
        parallel=str(replace(settings.topology, dp=num_replicas(settings))) if world_size() > 1 else settings.parallel,
    )


def training_arguments(settings: TrainSettings, device: torch.device, mixed: bool) -> TrainingArguments:
    """Return resolved settings as arguments of a trainer."""
    assert settings.max_steps is not None and settings.warmup_steps is not None and settings.output_dir is not None
    return TrainingArguments(
        output_dir=settings.output_dir,
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type=settings.lr_scheduler_type,
        optim="adamw_torch",
        optim_args=_optim_args(settings) if settings.optim in OFFLOADED_STATES else None,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.max_grad_norm,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        # Several ranks fill up a last batch with examples that they have evaluated already.
        per_device_eval_batch_size=settings.per_device_train_batch_size if num_replicas(settings) == 1 else 1,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        eval_strategy=settings.eval_strategy,
        eval_steps=settings.eval_steps,
        save_strategy="no" if settings.save_steps is None else "steps",
        save_steps=settings.save_steps or 500,
        save_total_limit=settings.save_total_limit,
        seed=settings.seed,
        bf16=mixed,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        logging_steps=settings.logging_steps,
        include_num_input_tokens_seen="non_padding",
        report_to=settings.trackers or "none",
        run_name=settings.run_name or Path(settings.output_dir).name,
        disable_tqdm=True,
    )


def _optim_args(settings: TrainSettings) -> str:
    """Return all options of the optimizer: the defaults of `oomb train` differ from those of a trainer."""
    return ",".join(f"{key}={value}".lower() for key, value in settings.optimizer_options().items())


def build_trainer(
    settings: TrainSettings, trained: PreTrainedModel, arguments: TrainingArguments, config: Config, split: Split
) -> Trainer:
    """Return the trainer. An offloaded optimizer takes its host memory here, before the engine plans with the rest."""
    is_offloaded = settings.optim in OFFLOADED_STATES
    trainer = Trainer(
        trained,
        arguments,
        train_dataset=split.train,
        eval_dataset=split.held_out,
        data_collator=pad_batch,
        engine_config=config,
        optimizer=settings.optim if is_offloaded else None,
        max_skipped_steps=settings.max_skipped_steps,
        parallel=settings.parallel,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.holds_lock = True
    trainer.keep_free_bytes = checkpoints.weight_bytes(trained) + save.EXTRA_BYTES
    if settings.save_minutes:
        timer = SaveTimer(settings.save_minutes)
        trainer.add_callback(timer)
        if settings.save_total_limit is None:
            trainer.about_to_delete = lambda: timer.about_to_delete(Path(arguments.output_dir))
    if is_offloaded:
        trainer.create_optimizer()
    return trainer
