"""Names that come along from scripts of Hugging Face and TRL: other names of a setting, and what to do instead of those
that are not here. For flags and for keys of YAML files alike."""

from __future__ import annotations

from oomb.config import SettingError

ALIASES = {"model_name_or_path": ("model",), "dataset": ("dataset_name",), "dtype": ("torch_dtype",)}
"""Other names of a setting."""
MEANT = {alias: name for name, aliases in ALIASES.items() for alias in aliases}

_RECOMPUTED = (
    "is not needed: all chunks but the last are computed again for their gradients in any case; leave it out "
    "(--checkpoint_layers recomputes each layer within a chunk too)"
)
_ONE_GPU = (
    "is for several GPUs, and oomb trains on one: leave it out. K, V and their gradients go to host memory by "
    "themselves, --optim offloaded_adamw puts AdamW there"
)
_ATTENTION = "is not needed: oomb computes attention itself; leave it out (--kernels chooses how)"
_LEARNT = "is not needed: of conversations and completions the answers alone are learnt; leave it out"
_MAX_LENGTH = "is called --max_length here"
_EVAL_BATCH = "is not there: held-out windows are computed --per_device_train_batch_size at once; leave it out"
_CHECKPOINTS = "is not there: --save_steps and --save_minutes say when checkpoints are written"

REMEDIES = {
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "fp16": "is not there: use --bf16, mixed precision in bfloat16",
    "deepspeed": _ONE_GPU,
    "fsdp": _ONE_GPU,
    "fsdp_config": _ONE_GPU,
    "attn_implementation": _ATTENTION,
    "use_flash_attention_2": _ATTENTION,
    "max_seq_length": _MAX_LENGTH,
    "block_size": _MAX_LENGTH,
    "per_device_eval_batch_size": _EVAL_BATCH,
    "evaluation_strategy": "is called --eval_strategy here",
    "save_strategy": _CHECKPOINTS,
    "torch_compile": "is not there: --fuse compile compiles layer by layer, which is the default on a GPU",
    "use_liger_kernel": "is not needed: --fuse does the like, by default on a GPU; leave it out",
    "load_in_8bit": "is not there: use --load_in_4bit",
    "train_file": "is called --dataset here",
    "dataset_text_field": 'is not there: name that column or key "text"',
    "assistant_only_loss": _LEARNT,
    "completion_only_loss": _LEARNT,
}
"""What to do instead of settings that oomb does not have."""


def setting_of(name: str) -> str:
    """The setting that a name means. Raises `SettingError`, with the remedy, where it is one of those not here."""
    plain = name.replace("-", "_")
    for foreign in (plain, plain.removeprefix("no_")):
        if foreign in REMEDIES:
            raise SettingError(name, REMEDIES[foreign])
    return MEANT.get(name, name)


def reject_foreign(args: list[str]) -> None:
    """Flags of settings that are not here."""
    for arg in args:
        if arg.startswith("--"):
            setting_of(arg[2:].partition("=")[0])


def reject_two_values(args: list[str]) -> None:
    """A command line on which a setting has two names and two values, as in `--dataset a --dataset_name b`. One that
    stands there twice by the same name has the last of its values, as everywhere."""
    given: dict[str, dict[str, str]] = {}
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, is_joined, value = arg.removeprefix("--").partition("=")
        setting = MEANT.get(name, name)
        if arg.startswith("--") and setting in ALIASES:
            given.setdefault(setting, {})[name] = value if is_joined else following
    for values in given.values():
        (first, one), *others = values.items()
        for name, other in others:
            if other != one:
                raise SettingError(
                    name, f"{other} and --{first} {one} say the same thing differently: give one of them"
                )
