"""From settings to a trainer: tokenizer, windows, precision, model, adapters, arguments. Cheap refusals come first."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from oomb.cli.train.settings import DEMO, TRACKERS, TrainSettings
from oomb.config import OFFLOADED_STATES, Config, SettingError
from oomb.data.dataset import open_configured, pad_batch, unchecked
from oomb.data.tokenizers import another_tokenizer
from oomb.data.tokens import Split
from oomb.models import adapters, load, presets
from oomb.trainers.trainer import Trainer
from oomb.utils import dtypes
from oomb.utils.units import count

# Chosen by short trials: much above it the loss stops falling, much below it 20 steps bring little.
DEMO_LEARNING_RATE = 4e-3
DEMO_STEPS = {"cpu": 20, "cuda": 200}
LEARNING_RATE, LORA_LEARNING_RATE = 5e-5, 2e-4

MASTER_BYTES = 16
"""A trained number in float32 with its gradient and AdamW's two."""
MASTER_SHARE = 0.5
"""Of the GPU's memory that these may take by default. The rest is for activations and pages."""


@dataclass(frozen=True)
class Precision:
    """What `--dtype` and `--bf16` come to."""

    dtype: str
    mixed: bool
    """Whether bfloat16 is computed in whatever the weights are."""
    warning: str | None = None


def check_packages(settings: TrainSettings) -> None:
    """Optional packages that the settings ask for are there, or named."""
    if settings.use_peft and not _is_there("peft"):
        raise SettingError("use_peft", "needs peft: pip install peft")
    adapters.bnb_config(load_in_4bit=settings.load_in_4bit)
    for tracker in settings.trackers:
        if not any(map(_is_there, TRACKERS[tracker])):
            raise SettingError("report_to", f"{tracker} needs the package {tracker}: pip install {tracker}")


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def device_of(settings: TrainSettings) -> torch.device:
    device = dtypes.resolve_device(settings.device)
    if device.index:
        # transformers places the model of a single process on the first GPU it sees.
        raise ValueError(f"--device {device} cannot be trained on; set CUDA_VISIBLE_DEVICES={device.index} instead")
    if settings.load_in_4bit and device.type != "cuda":
        raise SettingError("load_in_4bit", f"needs a GPU, and the device is {device}")
    return device


def precision_of(settings: TrainSettings, gpu_bytes: int | None, model_config: PretrainedConfig) -> Precision:
    """Weights in 16 bits lose updates that are smaller than half the distance to the next number, which at the rates of
    fine-tuning are most. So float32 is the choice where it fits, with the arithmetic in bfloat16."""
    trains_weights = not settings.use_peft
    keeps_updates = settings.optim == "offloaded_adamw"
    dtype = dtypes.SHORT_DTYPES.get(settings.dtype, settings.dtype)
    if dtype == "auto":
        if gpu_bytes is None or (settings.bf16 and trains_weights):
            dtype = "float32"
        else:
            is_wide = trains_weights and not keeps_updates
            model = load.meta_model(model_config, trust_remote_code=settings.trust_remote_code)
            fits = MASTER_BYTES * model.num_parameters() <= MASTER_SHARE * gpu_bytes
            dtype = "float32" if is_wide and fits else "bfloat16"
    mixed = settings.bf16
    if mixed is None:
        # Adapters are float32, and slow unless they compute as the weights do.
        has_float32_adapters = settings.use_peft and adapters.computes_in_autocast(dtype)
        mixed = gpu_bytes is not None and (has_float32_adapters or (dtype == "float32" and settings.dtype == "auto"))
    warning = None
    if trains_weights and not keeps_updates and dtype in ("bfloat16", "float16"):
        warning = (
            f"AdamW on {dtype} weights loses updates that are small beside them: --optim offloaded_adamw keeps them in "
            "host memory, --dtype float32 --bf16 on the GPU, where that fits, and --use_peft trains adapters instead"
        )
    return Precision(dtype, mixed, warning)


def check_targets(settings: TrainSettings, model_config: PretrainedConfig) -> None:
    """Names of layers that are not in the model are refused before its weights are loaded."""
    targets = settings.target_modules
    if isinstance(targets, str):
        return
    modules = load.meta_model(model_config, trust_remote_code=settings.trust_remote_code).named_modules()
    names = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
            raise SettingError("lora_target_modules", f"names {target!r}, and the model's linear layers are {known}")


def load_tokenizer(settings: TrainSettings, model_config: PretrainedConfig) -> PreTrainedTokenizerBase | None:
    trust = {"trust_remote_code": settings.trust_remote_code}
    if settings.tokenizer_name is not None:
        named = load.load_tokenizer(settings.tokenizer_name, **trust)
        model = settings.model_name_or_path
        fault = another_tokenizer(settings.tokenizer_name, named, model, load.own_tokenizer(model, **trust))
        if fault is not None:
            remedy = "or train a preset, or a model that was made for this tokenizer"
            raise SettingError("tokenizer_name", f"{fault}. Leave out --tokenizer_name; {remedy}")
        return named
    if presets.is_preset(settings.model_name_or_path):
        return None
    try:
        return load.load_tokenizer(settings.model_name_or_path, **trust)
    except ValueError:
        # What `oomb train` saves of a byte-level model has no tokenizer, and reads bytes again.
        if model_config.get_text_config().vocab_size == presets.PRESETS[DEMO]["vocab_size"]:
            return None
        raise


def what_a_preset_is(settings: TrainSettings) -> str | None:
    """For who names a preset and means the model of that name. None where there is nothing to say."""
    name = settings.model_name_or_path
    if not presets.is_preset(name) or name.lower() == DEMO or settings.resume_from_checkpoint is not None:
        return None
    text = ", and text is read as bytes" if settings.tokenizer_name is None else ""
    return f"{name} is a preset: random weights{text}. For the trained model name its hub id or a folder."


def unused_settings(settings: TrainSettings) -> str | None:
    """Of adapters, where none are trained. None where there is nothing to say."""
    own = [one for one in fields(settings) if one.name.startswith("lora_")]
    given = [f"--{one.name}" for one in own if getattr(settings, one.name) != one.default]
    if settings.use_peft or not given:
        return None
    return f"{' and '.join(given)} mean nothing without --use_peft: all weights are trained."


def skipped_check(settings: TrainSettings) -> str | None:
    """Return a warning if the dataset is one that could be checked for damage and is not."""
    return unchecked(settings.dataset) if settings.skip_dataset_check else None


def load_examples(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Split:
    """As many windows as the run reads, where it reads some of them only. `report` hears of the check of token shards,
    in bytes."""
    steps = settings.max_steps or _demo_steps(settings, device)
    split = open_configured(
        settings,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        num_train=None if steps is None else steps * settings.examples_per_step,
        skip_check=settings.skip_dataset_check,
        report=report,
    )
    if len(split.train) < settings.per_device_train_batch_size:
        raise ValueError(
            f"{settings.dataset} has {count(len(split.train), 'window')} of {settings.max_length} tokens to train on "
            f"and a batch takes {settings.per_device_train_batch_size}: lower --max_length or the batch size"
        )
    if settings.eval_strategy != "no" and split.held_out is None:
        raise ValueError(
            f"--eval_strategy {settings.eval_strategy} needs text held out, and {settings.dataset} is a single window "
            f"of {settings.max_length} tokens: lower --max_length"
        )
    # config.yaml names the steps that epochs come to, and a run that goes on from it must find the same windows.
    num_read = _steps(settings, device, split.num_examples) * settings.examples_per_step
    return replace(split, train=split.train.first(num_read))


def longest(settings: TrainSettings, split: Split) -> int:
    """Tokens of the longest example that the run reads: what memory is taken for."""
    if split.packing == "windows":
        return settings.max_length
    held_out = split.held_out.lengths if split.held_out is not None else []
    return max([*split.train.lengths, *held_out])


def _demo_steps(settings: TrainSettings, device: torch.device) -> int | None:
    """The built-in example is short, unless it is told how often to read its text."""
    if not settings.is_demo or settings.num_train_epochs != 1:
        return None
    return DEMO_STEPS["cuda" if device.type == "cuda" else "cpu"]


def _steps(settings: TrainSettings, device: torch.device, num_examples: int) -> int:
    by_epochs = math.ceil(settings.num_train_epochs * num_examples / settings.examples_per_step)
    return settings.max_steps or _demo_steps(settings, device) or max(1, by_epochs)


def resolved(settings: TrainSettings, output_dir: Path, device: torch.device, num_examples: int) -> TrainSettings:
    """With the defaults that depend on model and data, which has so many windows: what config.yaml says of the run."""
    steps = _steps(settings, device, num_examples)
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
        # Of this run, not of its settings: a file that said so would do it again.
        overwrite_output_dir=False,
        resume_from_checkpoint=None,
    )


def arguments_of(settings: TrainSettings, device: torch.device, mixed: bool) -> TrainingArguments:
    """Of settings that are resolved."""
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
        per_device_eval_batch_size=settings.per_device_train_batch_size,
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
    """With the defaults of `oomb train`, which are not those of a trainer."""
    return ",".join(f"{key}={value}".lower() for key, value in settings.optimizer_options().items())


def load_model(settings: TrainSettings, model_config: PretrainedConfig, dtype: str, device: torch.device) -> Any:
    """The model to train, with new adapters or those of the checkpoint to resume from."""
    torch.manual_seed(settings.seed)
    resume = settings.resume_from_checkpoint
    options: dict[str, Any] = {"dtype": dtype, "device": str(device), "trust_remote_code": settings.trust_remote_code}
    if settings.load_in_4bit:
        if presets.is_preset(settings.model_name_or_path):
            raise SettingError("load_in_4bit", "needs saved weights, and presets have none: name a folder or a hub id")
        model = adapters.load_in_4bit(
            settings.model_name_or_path,
            config=model_config,
            device=device,
            trust_remote_code=settings.trust_remote_code,
        )
    elif resume is not None and not settings.use_peft:
        # The trainer loads the checkpoint only when it trains; the held-out loss before that is to be the checkpoint's.
        model = load.load_model(resume, **options)
    else:
        model = load.load_model(settings.model_name_or_path, config=model_config, **options)
    return _with_adapters(settings, model) if settings.use_peft else model


def _with_adapters(settings: TrainSettings, model: Any) -> Any:
    if settings.resume_from_checkpoint is not None:
        return adapters.with_adapters(model, settings.resume_from_checkpoint, trainable=True)
    return adapters.with_lora(
        model,
        r=settings.lora_r,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
    )


def trainer_of(
    settings: TrainSettings, model: Any, arguments: TrainingArguments, config: Config, split: Split
) -> Trainer:
    """The trainer with its optimizer's memory taken, where that lies on the host: before the engine plans its share."""
    is_offloaded = settings.optim in OFFLOADED_STATES
    trainer = Trainer(
        model,
        arguments,
        train_dataset=split.train,
        eval_dataset=split.held_out,
        data_collator=pad_batch,
        engine_config=config,
        optimizer=settings.optim if is_offloaded else None,
        max_skipped_steps=settings.max_skipped_steps,
    )
    trainer.holds_lock = True
    if is_offloaded:
        trainer.create_optimizer()
    return trainer
