"""Every setting of `oomb train`, declared once: the flags, the YAML file, `--help` and docs/train.md are read off this.

No torch here: `oomb --help` reads it too.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from oomb.cli.options import ENGINE, ENGINE_OPTIONS, TRUST_REMOTE_CODE
from oomb.config import CHOICES, Config, parse_optim_args
from oomb.utils.units import parse_tokens

DEMO = "demo"
LATEST = "latest"
"""As `--resume_from_checkpoint`: the newest whole checkpoint of the run."""
AUTO = "auto"
"""The same if there is one; else a start at the first step."""
OPTIMIZERS = ("adamw_torch", "offloaded_adamw")
TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""What metrics can be reported to, and the packages that can do it."""
PACKING_IN_TRL = {"true": "windows", "false": "documents"}
SCHEDULES = (
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
"""Those of transformers that need no arguments of their own."""

MODEL, LORA, DATA, STEPS, OPTIMIZER = "Model", "LoRA", "Data", "Length of the run", "Optimizer"
EVALUATION, OUTPUT, REPORTING = "Evaluation", "Output and checkpoints", "Reporting"
PANELS = (MODEL, LORA, DATA, STEPS, OPTIMIZER, EVALUATION, OUTPUT, REPORTING)
"""The panels of `--help`, in order; the engine's own comes last."""


class SettingError(ValueError):
    """A wrong value. Knows its key, so that a value from a file can be pointed at."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"--{key} {problem}")
        self.key, self.problem = key, problem


def setting(
    default: Any,
    panel: str,
    help: str,
    *,
    least: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    kind: str | None = None,
) -> Any:
    """A field of `Settings`. `kind`: "tokens" may be written 32K, "words" is a list, "checkpoint" may stand alone,
    "strategy" has a choice that YAML takes for false."""
    return field(
        default=default,
        metadata={"panel": panel, "help": help, "least": least, "below": below, "choices": choices, "kind": kind},
    )


@dataclass(kw_only=True)
class TrainSettings:
    """The choices of one run, named as in Hugging Face and TRL. None: a default that depends on model and data."""

    model_name_or_path: str = setting(
        DEMO, MODEL, "A folder that save_pretrained wrote, a hub id (owner/name), or a preset with random weights."
    )
    tokenizer_name: str | None = setting(
        None, MODEL, "Folder or hub id of a tokenizer, if not the model's. Presets read bytes."
    )
    trust_remote_code: bool = setting(False, MODEL, TRUST_REMOTE_CODE)
    dtype: str = setting(
        "auto",
        MODEL,
        "Precision of the weights: float32, bfloat16, float16, float64. auto, on a CPU: float32. On a GPU: bfloat16 if "
        "they are frozen (LoRA) or --optim offloaded_adamw keeps small updates; else float32 if weights, gradients and "
        "AdamW then take half of the GPU at the most; else bfloat16, with a warning.",
    )
    bf16: bool | None = setting(
        None,
        MODEL,
        "Mixed precision: compute in bfloat16 whatever the weights are. Default: on a GPU, where --dtype auto comes to "
        "float32, and with --use_peft on weights in bfloat16, since adapters are float32.",
    )
    device: str = setting("auto", MODEL, "auto (a GPU if there is one), cpu, cuda or cuda:0.")
    seed: int = setting(42, MODEL, "Seed of new weights, of the order of the data and of dropout.", least=0)

    use_peft: bool = setting(
        False, LORA, "Train LoRA adapters instead of the weights, in much less memory. Needs peft."
    )
    lora_r: int = setting(16, LORA, "Rank of the adapters.", least=1)
    lora_alpha: int = setting(32, LORA, "The adapters are scaled by lora_alpha / lora_r.", least=1)
    lora_dropout: float = setting(0.0, LORA, "Dropout before the adapters.", least=0, below=1)
    lora_target_modules: str = setting(
        "all-linear",
        LORA,
        "Layers that get adapters: all-linear, or names with commas between, as in q_proj,v_proj.",
        kind="words",
    )
    load_in_4bit: bool = setting(
        False,
        LORA,
        "Keep the frozen weights in 4 bits (QLoRA, NF4). Needs --use_peft, a GPU and bitsandbytes.",
    )

    dataset: str = setting(
        "stdlib",
        DATA,
        "A text file, a folder of them, JSON lines (text, prompt and completion, or messages of a conversation), "
        "Parquet, a folder that datasets saved or that oomb tokenize wrote, or stdlib: Python's own library source.",
    )
    max_length: int = setting(
        16384, DATA, "Context: tokens per training window. 16384 and 16K are the same.", least=2, kind="tokens"
    )

    packing: str = setting(
        "auto",
        DATA,
        "windows: documents joined and cut into full windows; documents: each by itself, long ones in pieces. auto: "
        "windows of text, documents of conversations.",
        choices=("auto", "windows", "documents"),
    )
    dataset_join: str = setting(
        "documents",
        DATA,
        "What a folder of text files is: documents, one a file; or a repository, one document with their names in it.",
        choices=("documents", "repository"),
    )
    skip_dataset_check: bool = setting(
        False,
        DATA,
        "Do not compare the checksums of a folder that oomb tokenize wrote: for sets so large that reading them once "
        "takes too long. Damaged token ids would then be trained on.",
    )

    max_steps: int | None = setting(
        None,
        STEPS,
        "Optimizer steps, whatever --num_train_epochs says. Default: by epochs; the demo: 20, on a GPU 200.",
        least=1,
    )
    num_train_epochs: float = setting(
        1.0, STEPS, "Times the data is read, if --max_steps is not given. Below 1: so much of it.", least=0
    )
    per_device_train_batch_size: int = setting(1, STEPS, "Windows, or documents, computed at once.", least=1)
    gradient_accumulation_steps: int = setting(1, STEPS, "Batches per optimizer step.", least=1)

    optim: str = setting(
        "adamw_torch",
        OPTIMIZER,
        "adamw_torch, or offloaded_adamw: its states, and float32 copies of 16-bit weights, lie in host memory.",
        choices=OPTIMIZERS,
    )
    optim_args: str | None = setting(
        None,
        OPTIMIZER,
        "For offloaded_adamw, as in state_dtype=bfloat16,master_weights=false; state_dtype: float32, bfloat16, 8bit.",
    )
    learning_rate: float | None = setting(
        None, OPTIMIZER, "Peak learning rate. Default: 5e-5; with LoRA 2e-4; the demo: 4e-3.", least=0, below=10
    )
    lr_scheduler_type: str = setting(
        "cosine", OPTIMIZER, "What the rate does after the warm-up: cosine, linear, constant, …", choices=SCHEDULES
    )
    warmup_steps: int | None = setting(
        None, OPTIMIZER, "Steps to reach the peak rate. Default: a tenth, at most 100.", least=0
    )
    warmup_ratio: float | None = setting(None, OPTIMIZER, "The same as a share of all steps.", least=0, below=1)
    weight_decay: float = setting(0.0, OPTIMIZER, "AdamW's weight decay.", least=0)
    adam_beta1: float = setting(0.9, OPTIMIZER, "How long AdamW remembers gradients.", least=0, below=1)
    adam_beta2: float = setting(0.999, OPTIMIZER, "How long AdamW remembers their squares.", least=0, below=1)
    adam_epsilon: float = setting(1e-8, OPTIMIZER, "Added where AdamW divides.", least=0)
    max_grad_norm: float = setting(1.0, OPTIMIZER, "Clip gradients to this norm; 0: never.", least=0)
    max_skipped_steps: int = setting(
        0,
        OPTIMIZER,
        "Skip up to this many steps whose loss or gradient norm is NaN or infinite, then stop. 0: stop at the first.",
        least=0,
    )

    max_eval_samples: int = setting(
        1,
        EVALUATION,
        "Windows held out, the first of the text, for a loss before and after: a fifth of it at most, or one of fewer "
        "than five. 0: none.",
        least=0,
    )
    eval_strategy: str = setting(
        "no",
        EVALUATION,
        "When to compute the held-out loss while training: no, steps or epoch.",
        choices=("no", "steps", "epoch"),
        kind="strategy",
    )
    eval_steps: int | None = setting(None, EVALUATION, "Every so many steps; makes --eval_strategy steps.", least=1)

    needle_lengths: str | None = setting(
        None,
        EVALUATION,
        "Before and after, hide needles in texts of so many tokens, as in 4K,16K, and ask for them.",
        kind="words",
    )
    needle_depths: int = setting(
        5, EVALUATION, "Parts of such a text that are asked about, each with one question.", least=1, below=101
    )
    needle_candidates: int = setting(
        4, EVALUATION, "Needles in each part, 2 to 9: what the model chooses from.", least=2, below=10
    )
    needle_haystacks: int = setting(
        4, EVALUATION, "Texts of each length. Each takes two passes before training and two after.", least=1
    )
    sample_tokens: int = setting(
        64, EVALUATION, "Before and after, let the model write so many tokens, for the report. 0: none.", least=0
    )

    output_dir: str | None = setting(None, OUTPUT, "Where to save. Default: a new folder under runs/.")
    overwrite_output_dir: bool = setting(
        False, OUTPUT, "Write into an --output_dir that holds what an earlier run has trained."
    )
    save_steps: int | None = setting(
        None,
        OUTPUT,
        "Write a checkpoint to resume from every so many steps, besides those of --save_minutes.",
        least=1,
    )
    save_minutes: float = setting(
        30.0,
        OUTPUT,
        "Write a checkpoint after a step when so many minutes have passed since the last or since the start. 0: never.",
        least=0,
    )
    save_total_limit: int | None = setting(
        None,
        OUTPUT,
        "Keep so many checkpoints, the newest. Default: all of --save_steps, the newest 2 of --save_minutes.",
        least=1,
    )
    resume_from_checkpoint: str | None = setting(
        None,
        OUTPUT,
        "Go on from this checkpoint-N folder; latest, or no value: from the newest whole one in --output_dir; auto: "
        "the same, or from the first step where there is none.",
        kind="checkpoint",
    )

    logging_steps: int = setting(1, REPORTING, "Report loss and speed every so many steps.", least=1)
    report_to: str = setting(
        "none",
        REPORTING,
        "Besides metrics.jsonl: tensorboard, wandb, trackio, or several with commas between.",
        kind="words",
    )
    run_name: str | None = setting(None, REPORTING, "The run's name in these. Default: that of its folder.")
    report: bool = setting(True, REPORTING, "Write OUTPUT_DIR/report.html at the end.")

    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `oomb.Config`."""

    def __post_init__(self) -> None:
        for described in own_fields():
            _check(described, getattr(self, described.name))
        if self.learning_rate == 0:
            raise SettingError("learning_rate", "is 0; it must be above 0, 5e-5 for example")
        if self.num_train_epochs == 0:
            raise SettingError("num_train_epochs", "is 0; it must be above 0")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise SettingError("warmup_ratio", "and --warmup_steps say the same thing: give one of them")
        if self.eval_steps is not None:
            if self.eval_strategy == "epoch":
                raise SettingError("eval_steps", "does not go with --eval_strategy epoch: leave one of them out")
            self.eval_strategy = "steps"
        elif self.eval_strategy == "steps":
            raise SettingError("eval_strategy", "steps needs --eval_steps, as in --eval_steps 100")
        if self.eval_strategy != "no" and self.max_eval_samples == 0:
            raise SettingError("eval_strategy", f"{self.eval_strategy} needs text held out: raise --max_eval_samples")
        if self.optim_args is not None and self.optim != "offloaded_adamw":
            raise SettingError("optim_args", "are those of --optim offloaded_adamw; name that, or leave them out")
        self.optimizer_options()
        _ = self.needle_sizes
        for name in self.trackers:
            if name not in TRACKERS:
                raise SettingError("report_to", f"{name!r} is unknown; use none, {', '.join(TRACKERS)}")
        if self.load_in_4bit and not self.use_peft:
            raise SettingError("load_in_4bit", "keeps weights that cannot be trained: add --use_peft")

    @property
    def is_demo(self) -> bool:
        return self.model_name_or_path == DEMO

    @property
    def windows_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.max_length * self.windows_per_step

    @property
    def trackers(self) -> list[str]:
        return [] if self.report_to.strip() in ("none", "") else [name.strip() for name in self.report_to.split(",")]

    @property
    def target_modules(self) -> str | list[str]:
        names = [name.strip() for name in self.lora_target_modules.split(",") if name.strip()]
        if not names:
            raise SettingError("lora_target_modules", "names no layer; use all-linear, or names as in q_proj,v_proj")
        return names[0] if names == ["all-linear"] else names

    @property
    def needle_sizes(self) -> tuple[int, ...]:
        return tuple(_tokens("needle_lengths", length) for length in (self.needle_lengths or "").split(",") if length)

    def optimizer_options(self) -> dict[str, Any]:
        """What `--optim_args` says. Small updates are kept exactly unless told otherwise."""
        try:
            return {"state_dtype": "float32", "master_weights": True, **parse_optim_args(self.optim_args)}
        except ValueError as error:
            raise SettingError("optim_args", str(error)) from None


def own_fields() -> list[Field[Any]]:
    """All fields but the engine's."""
    return [described for described in fields(TrainSettings) if described.name != "engine"]


def check_value(key: str, value: Any) -> None:
    """For commands that take some of the settings. Raises `SettingError`."""
    _check(next(described for described in own_fields() if described.name == key), value)


def plain_type(annotation: Any) -> tuple[type, bool]:
    """(type, whether None will do) of an annotation such as `int | None`."""
    if get_origin(annotation) in (types.UnionType, Union):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0], True
    return annotation, False


TYPES: dict[str, tuple[type, bool]] = {
    name: plain_type(hint) for name, hint in get_type_hints(TrainSettings).items() if name != "engine"
}
ENGINE_TYPES: dict[str, tuple[type, bool]] = {
    name: plain_type(get_args(annotation)[0]) for name, (annotation, _) in ENGINE_OPTIONS.items()
}
KNOWN = {**TYPES, **ENGINE_TYPES}
"""Every key of a run's YAML file."""


def as_setting(key: str, value: Any) -> Any:
    """A value from a YAML file as the key's type. Raises `SettingError` where it is of another."""
    kind, optional = KNOWN[key]
    special = next((f.metadata["kind"] for f in own_fields() if f.name == key), None)
    if special == "checkpoint" and isinstance(value, bool):
        return LATEST if value else None
    if special == "words" and isinstance(value, list) and all(isinstance(word, str) for word in value):
        return ",".join(value)
    if special == "strategy" and value is False:
        return "no"  # which is how YAML reads it
    if value is None:
        if optional:
            return None
        raise SettingError(key, f"is empty; it must be {_name_of(kind)}")
    if key in ENGINE_TYPES and kind is str and isinstance(value, bool):
        # YAML reads off as false.
        return "off" if value is False and "off" in CHOICES.get(key, ()) else str(value).lower()
    if key == "packing" and isinstance(value, bool):
        return str(value).lower()
    if special == "tokens":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise SettingError(key, f"is {value!r}; it must be a number of tokens, 16384 or 16K")
        return _tokens(key, value)
    converted = _converted(kind, value)
    if converted is None:
        raise SettingError(key, f"is {value!r}; it must be {_name_of(kind)}")
    return converted


def _converted(kind: type, value: Any) -> Any:
    if kind is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if kind is int:
        return value if isinstance(value, int) else None
    if kind is float and isinstance(value, int | float | str):
        # YAML reads 1e-5, without a point, as text.
        try:
            return float(value)
        except ValueError:
            return None
    if kind is str and isinstance(value, str | int | float):
        return str(value)
    return None


def _tokens(key: str, value: int | str) -> int:
    try:
        return parse_tokens(str(value), f"--{key}")
    except ValueError as error:
        raise SettingError(key, str(error).removeprefix(f"--{key} ")) from None


def from_flag(key: str, value: Any) -> Any:
    """A value from the command line, which has its type already, but for tokens."""
    described = next((f for f in own_fields() if f.name == key), None)
    if described is not None and described.metadata["kind"] == "tokens":
        return _tokens(key, value)
    return value


def _name_of(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _check(described: Field[Any], value: Any) -> None:
    if value is None:
        return
    key, limits = described.name, described.metadata
    least, below, choices = limits["least"], limits["below"], limits["choices"]
    if key == "packing" and str(value).lower() in PACKING_IN_TRL:
        word = str(value).lower()
        raise SettingError(key, f"takes a word here: {PACKING_IN_TRL[word]} is what {word} is in TRL, or use auto")
    if choices is not None and value not in choices:
        raise SettingError(key, f"{value!r} is unknown; use one of {', '.join(choices)}")
    # Written so that NaN, which compares as false, is refused.
    if least is not None and not value >= least:
        raise SettingError(key, f"is {value}; it must be {least} or more")
    if below is not None and not value < below:
        raise SettingError(key, f"is {value}; it must be below {below}")


def by_panel(settings: TrainSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """(panel, its keys and values), the engine's last."""
    values = asdict(settings)
    for panel in PANELS:
        yield panel, {f.name: values[f.name] for f in own_fields() if f.metadata["panel"] == panel}
    defaults = asdict(Config())
    yield ENGINE, {name: defaults[name] for name in ENGINE_OPTIONS} | settings.engine


def settings_table() -> str:
    """Every setting as Markdown, for docs/train.md."""
    rows: dict[str, list[str]] = {panel: [] for panel in (*PANELS, ENGINE)}
    for described in own_fields():
        rows[described.metadata["panel"]].append(_row(described.name, described.default, described.metadata["help"]))
    for name, (annotation, default) in ENGINE_OPTIONS.items():
        rows[ENGINE].append(_row(name, default, get_args(annotation)[1].help))
    head = "| setting | default | meaning |\n|---|---|---|\n"
    return "\n\n".join(f"### {panel}\n\n{head}" + "\n".join(lines) for panel, lines in rows.items()) + "\n"


def _row(name: str, default: Any, meaning: str) -> str:
    shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    return f"| `{name}` | {shown} | {meaning} |"
