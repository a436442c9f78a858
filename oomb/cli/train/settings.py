"""Declare every setting of `oomb train` once: flags, the YAML file, `--help` and docs/train.md are generated from here.

`oomb --help` reads this module, so it must not import torch.
"""

from __future__ import annotations

import os
from dataclasses import Field, dataclass, field, fields
from typing import Any

from oomb.config import SettingError, parse_optim_args, setting
from oomb.distributed.topology import Topology, TopologyError
from oomb.utils.units import parse_tokens

DEMO = "demo"
LATEST = "latest"
"""Value of `resume_from_checkpoint`: the newest complete checkpoint of the run."""
AUTO = "auto"
"""Value of `resume_from_checkpoint`: the newest complete checkpoint if there is one, else start from scratch."""
OPTIMIZERS = ("adamw_torch", "offloaded_adamw")
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""Values of `report_to`, and the packages that provide each."""
PACKING_IN_TRL = {"true": "windows", "false": "documents"}
SCHEDULES = (
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
"""Schedules of transformers that need no arguments."""

MODEL, LORA, DATA, STEPS, OPTIMIZER = "Model", "LoRA", "Data", "Length of the run", "Optimizer"
EVALUATION, OUTPUT, REPORTING = "Evaluation", "Output and checkpoints", "Reporting"
PANELS = (MODEL, LORA, DATA, STEPS, OPTIMIZER, EVALUATION, OUTPUT, REPORTING)
"""Groups of settings in order; the engine's come last."""


@dataclass(kw_only=True)
class TrainSettings:
    """Settings of one run, named as in Hugging Face and TRL.

    None stands for a default that depends on the model and the data. docs/train.md describes every field.

    Raises:
        SettingError: A value is wrong, or two values contradict each other.
    """

    model_name_or_path: str = setting(
        DEMO,
        "A folder written by save_pretrained, a hub id (owner/name), or a preset with random weights.",
        panel=MODEL,
    )
    tokenizer_name: str | None = setting(
        None, "Folder or hub id of a tokenizer. Default: the model's own; presets read bytes.", panel=MODEL
    )
    trust_remote_code: bool = setting(
        False,
        "Run Python code that comes with a model or tokenizer, from its folder or the hub. That code can do anything "
        "you can. Default: refuse models that need it.",
        panel=MODEL,
    )
    dtype: str = setting(
        "auto",
        "Precision of the weights: float32, bfloat16, float16 or float64. auto on a CPU: float32. auto on a GPU: "
        "bfloat16 if the weights are frozen (LoRA) or --optim offloaded_adamw keeps small updates; else float32 if "
        "weights, gradients and AdamW states take at most half of the GPU; else bfloat16, with a warning.",
        panel=MODEL,
    )
    bf16: bool | None = setting(
        None,
        "Mixed precision: compute in bfloat16 whatever the weights are. Default: true on a GPU if --dtype auto chooses "
        "float32, or with --use_peft on bfloat16 weights (adapters are float32).",
        panel=MODEL,
    )
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N.", panel=MODEL)
    parallel: str = setting(
        "auto",
        "How the processes that torchrun started share the work. sp=N: groups of N share each example, and each "
        "process handles a part of its tokens and heads. dp=N: N groups train on different examples; default: as many "
        "as there are. auto: all processes train on different examples.",
        panel=MODEL,
    )
    seed: int = setting(42, "Seed for new weights, data order, dropout, needles and samples.", panel=MODEL, minimum=0)

    use_peft: bool = setting(
        False, "Train LoRA adapters instead of all weights, which takes far less memory. Needs peft.", panel=LORA
    )
    lora_r: int = setting(16, "Rank of the adapters.", panel=LORA, minimum=1)
    lora_alpha: int = setting(
        32, "Scale of the adapters: their output is multiplied by lora_alpha / lora_r.", panel=LORA, minimum=1
    )
    lora_dropout: float = setting(0.0, "Dropout on the input of the adapters.", panel=LORA, minimum=0, below=1)
    lora_target_modules: str = setting(
        "all-linear",
        "Layers that get adapters: all-linear, or comma-separated names, such as q_proj,v_proj.",
        panel=LORA,
        kind="words",
    )
    load_in_4bit: bool = setting(
        False, "Keep the frozen weights in 4 bits (QLoRA, NF4). Needs --use_peft, a GPU and bitsandbytes.", panel=LORA
    )

    dataset: str = setting(
        "stdlib",
        "A text file, a folder of text files, JSON lines (text, prompt and completion, or chat messages), Parquet, a "
        "folder saved by datasets or oomb tokenize, or stdlib: the source of Python's standard library.",
        panel=DATA,
    )
    max_length: int = setting(
        16384,
        "Context: tokens per example, 16384 or 16K. Longer documents are split.",
        panel=DATA,
        unit="tokens",
        minimum=2,
    )
    packing: str = setting(
        "auto",
        "windows: join documents and cut the result into examples of --max_length. documents: one example per "
        "document, long ones split. auto: windows for text, documents for conversations.",
        panel=DATA,
        choices=("auto", "windows", "documents"),
    )
    dataset_join: str = setting(
        "documents",
        "How a folder of text files is read. documents: each file is one. repository: all files are one document, each "
        "after a line with its path.",
        panel=DATA,
        choices=("documents", "repository"),
    )
    skip_dataset_check: bool = setting(
        False,
        "Skip the checksums of a folder written by oomb tokenize, for datasets that take too long to read in full. "
        "Damaged token ids would then go unnoticed.",
        panel=DATA,
    )

    max_steps: int | None = setting(
        None,
        "Optimizer steps; overrides --num_train_epochs. Default: derived from --num_train_epochs; the demo runs 20 "
        "steps on a CPU, 200 on a GPU.",
        panel=STEPS,
        minimum=1,
    )
    num_train_epochs: float = setting(
        1.0, "Passes over the data, if --max_steps is not given. 0.5 reads half of it.", panel=STEPS, minimum=0
    )
    per_device_train_batch_size: int = setting(1, "Examples per batch.", panel=STEPS, minimum=1)
    gradient_accumulation_steps: int = setting(1, "Batches per optimizer step.", panel=STEPS, minimum=1)

    optim: str = setting(
        "adamw_torch",
        "offloaded_adamw keeps AdamW's states, and float32 copies of 16-bit weights, in host memory.",
        panel=OPTIMIZER,
        choices=OPTIMIZERS,
    )
    optim_args: str | None = setting(
        None,
        "Options of offloaded_adamw, such as state_dtype=bfloat16,master_weights=false. state_dtype: float32, bfloat16 "
        "or 8bit.",
        panel=OPTIMIZER,
    )
    learning_rate: float | None = setting(
        None,
        "Peak learning rate. Default: 5e-5; with LoRA 2e-4; for the demo 4e-3.",
        panel=OPTIMIZER,
        minimum=0,
        below=10,
    )
    lr_scheduler_type: str = setting(
        "cosine", "Learning rate schedule after the warmup.", panel=OPTIMIZER, choices=SCHEDULES
    )
    warmup_steps: int | None = setting(
        None,
        "Steps of linear warmup to the peak rate. Default: a tenth of all steps, at most 100.",
        panel=OPTIMIZER,
        minimum=0,
    )
    warmup_ratio: float | None = setting(
        None, "Warmup as a fraction of all steps, instead of --warmup_steps.", panel=OPTIMIZER, minimum=0, below=1
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay.", panel=OPTIMIZER, minimum=0)
    adam_beta1: float = setting(0.9, "AdamW's decay rate of the first moment.", panel=OPTIMIZER, minimum=0, below=1)
    adam_beta2: float = setting(0.999, "AdamW's decay rate of the second moment.", panel=OPTIMIZER, minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon.", panel=OPTIMIZER, minimum=0)
    max_grad_norm: float = setting(
        1.0, "Clip the gradient norm to this value. 0: no clipping.", panel=OPTIMIZER, minimum=0
    )
    max_skipped_steps: int = setting(
        0,
        "Skip up to this many steps whose loss or gradient norm is NaN or infinite, then stop. 0: stop at the first.",
        panel=OPTIMIZER,
        minimum=0,
    )

    max_eval_samples: int = setting(
        1,
        "Number of examples to hold out from the start of the data: at most a fifth of all (or one, if there are fewer "
        "than five). 0: none.",
        panel=EVALUATION,
        minimum=0,
    )
    eval_strategy: str = setting(
        "no",
        "When to compute the held-out loss during training.",
        panel=EVALUATION,
        choices=("no", "steps", "epoch"),
        kind="strategy",
    )
    eval_steps: int | None = setting(
        None, "Steps between held-out losses; implies --eval_strategy steps.", panel=EVALUATION, minimum=1
    )
    needle_lengths: str | None = setting(
        None,
        "Haystack lengths in tokens, such as 4K,16K. Default: no needles.",
        panel=EVALUATION,
        kind="words",
    )
    needle_depths: int = setting(
        5, "Parts of each haystack, with one question each.", panel=EVALUATION, minimum=1, below=101
    )
    needle_candidates: int = setting(
        4, "Needles in each part, 2 to 9, that the model chooses from.", panel=EVALUATION, minimum=2, below=10
    )
    needle_haystacks: int = setting(
        4, "Haystacks of each length, with two forward passes each.", panel=EVALUATION, minimum=1
    )
    sample_tokens: int = setting(
        64, "Let the model continue the text by this many tokens. 0: no sample.", panel=EVALUATION, minimum=0
    )

    output_dir: str | None = setting(None, "Folder of the run. Default: a new one under runs/.", panel=OUTPUT)
    overwrite_output_dir: bool = setting(
        False, "Write into an --output_dir that holds the results of an earlier run.", panel=OUTPUT
    )
    save_steps: int | None = setting(
        None, "Steps between checkpoints, in addition to those of --save_minutes.", panel=OUTPUT, minimum=1
    )
    save_minutes: float = setting(
        30.0,
        "Write a checkpoint after the first step that ends at least this many minutes after the previous checkpoint. "
        "0: never.",
        panel=OUTPUT,
        minimum=0,
    )
    save_total_limit: int | None = setting(
        None,
        "How many of the newest checkpoints to keep. Default: all from --save_steps, the newest 2 from --save_minutes.",
        panel=OUTPUT,
        minimum=1,
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "Resume from a checkpoint-N folder. latest (or no value): the newest complete checkpoint in --output_dir. "
        "auto: latest if there is one, otherwise start from scratch.",
        panel=OUTPUT,
        kind="checkpoint",
    )

    logging_steps: int = setting(1, "Steps between reports of loss and speed.", panel=REPORTING, minimum=1)
    report_to: str = setting(
        "none",
        "Trackers to report to besides metrics.jsonl: tensorboard, wandb, trackio, or several, separated by commas.",
        panel=REPORTING,
        kind="words",
    )
    run_name: str | None = setting(
        None, "Name of the run in trackers. Default: the name of its folder.", panel=REPORTING
    )
    report: bool = setting(True, "Write OUTPUT_DIR/report.html at the end.", panel=REPORTING)

    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `oomb.Config` that differ from its defaults."""

    def __post_init__(self) -> None:
        for described in train_fields():
            check_value(described.name, getattr(self, described.name))
        self._check_schedule()
        if self.topology.sp > 1 and self.needle_lengths is not None:
            raise SettingError("needle_lengths", f"does not work with --parallel {self.parallel}: leave it out")
        if self.eval_steps is not None and self.eval_strategy == "no":
            self.eval_strategy = "steps"
        self._check_evaluation()
        if self.optim_args is not None and self.optim != "offloaded_adamw":
            raise SettingError("optim_args", "needs --optim offloaded_adamw: add that, or leave it out")
        self.optimizer_options()
        for name in self.trackers:
            if name not in TRACKERS:
                raise SettingError("report_to", f"{name!r} is unknown; use none, {', '.join(TRACKERS)}")
        if self.load_in_4bit and not self.use_peft:
            raise SettingError("load_in_4bit", "needs --use_peft: weights in 4 bits cannot be trained")

    def _check_schedule(self) -> None:
        if self.learning_rate == 0:
            raise SettingError("learning_rate", "is 0; it must be above 0, such as 5e-5")
        if self.num_train_epochs == 0:
            raise SettingError("num_train_epochs", "is 0; it must be above 0")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise SettingError("warmup_ratio", "and --warmup_steps are both given: pass only one")

    def _check_evaluation(self) -> None:
        if self.eval_steps is not None and self.eval_strategy == "epoch":
            raise SettingError("eval_steps", "contradicts --eval_strategy epoch: leave one of them out")
        if self.eval_steps is None and self.eval_strategy == "steps":
            raise SettingError("eval_strategy", "steps needs --eval_steps, such as --eval_steps 100")
        if self.eval_strategy != "no" and self.max_eval_samples == 0:
            raise SettingError(
                "eval_strategy", f"{self.eval_strategy} needs held-out examples: raise --max_eval_samples"
            )
        _ = self.needle_sizes  # raises for a length that is not a number of tokens

    @property
    def is_demo(self) -> bool:
        return self.model_name_or_path == DEMO

    @property
    def topology(self) -> Topology:
        try:
            return Topology.parse(self.parallel)
        except TopologyError as error:
            raise SettingError("parallel", str(error)) from error

    @property
    def examples_per_step(self) -> int:
        """Examples of a step, on all ranks together."""
        replicas = self.topology.dp or max(1, int(os.environ.get("WORLD_SIZE", 1)) // self.topology.sp)
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * replicas

    @property
    def tokens_per_step(self) -> int:
        return self.max_length * self.examples_per_step

    @property
    def trackers(self) -> list[str]:
        return [] if self.report_to.strip() in ("none", "") else [name.strip() for name in self.report_to.split(",")]

    @property
    def target_modules(self) -> str | list[str]:
        names = [name.strip() for name in self.lora_target_modules.split(",") if name.strip()]
        if not names:
            raise SettingError("lora_target_modules", "names no layer; use all-linear, or names such as q_proj,v_proj")
        return names[0] if names == ["all-linear"] else names

    @property
    def needle_sizes(self) -> tuple[int, ...]:
        return token_list("needle_lengths", self.needle_lengths)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the options of the offloaded AdamW. By default it keeps states and master weights in float32."""
        return {"state_dtype": "float32", "master_weights": True, **parse_optim_args(self.optim_args)}


def train_fields() -> list[Field[Any]]:
    """Return the fields of `TrainSettings` except `engine`."""
    return [described for described in fields(TrainSettings) if described.name != "engine"]


def check_value(key: str, value: Any) -> None:
    """Check one setting against its limits and choices.

    Raises:
        SettingError: The value is not accepted.
    """
    if value is None:
        return
    limits = next(described for described in train_fields() if described.name == key).metadata
    minimum, below, choices = limits["minimum"], limits["below"], limits["choices"]
    if key == "packing" and str(value).lower() in PACKING_IN_TRL:
        word = str(value).lower()
        raise SettingError(key, f"is {word}; use {PACKING_IN_TRL[word]}, which is what TRL does for {word}, or auto")
    if choices is not None and value not in choices:
        raise SettingError(key, f"{value!r} is unknown; use one of {', '.join(choices)}")
    # Negated comparisons, so that NaN is refused.
    if minimum is not None and not value >= minimum:
        raise SettingError(key, f"is {value}; it must be {minimum} or more")
    if below is not None and not value < below:
        raise SettingError(key, f"is {value}; it must be below {below}")


def tokens_of(key: str, value: int | str) -> int:
    """Return a number of tokens, which may be written 32K.

    Raises:
        SettingError: It is not one.
    """
    try:
        return parse_tokens(str(value))
    except ValueError as error:
        raise SettingError(key, str(error)) from None


def token_list(key: str, text: str | None) -> tuple[int, ...]:
    """Return comma-separated numbers of tokens, such as 4K,16K; none for None.

    Raises:
        SettingError: One of them is not a number of tokens, or there is none.
    """
    if not text:
        return ()
    lengths = [part for part in text.split(",") if part.strip()]
    if not lengths:
        raise SettingError(key, f"{text!r} names no length; write 4K,16K")
    return tuple(tokens_of(key, length) for length in lengths)
