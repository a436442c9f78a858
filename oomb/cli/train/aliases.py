"""Translate names from Hugging Face and TRL: aliases of settings, and remedies for settings that oomb does not have.

They apply to flags and YAML keys alike.
"""

from __future__ import annotations

from oomb.config import SettingError

ALIASES = {"model_name_or_path": ("model",), "dataset": ("dataset_name",), "dtype": ("torch_dtype",)}
"""Other names of a setting."""
NAME_OF = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
"""Settings by alias."""

_RECOMPUTED = (
    "is not needed: oomb always recomputes chunks for their gradients; leave it out (--checkpoint_layers also "
    "recomputes each layer within a chunk)"
)
_SHARDED = (
    "is not supported: leave it out. K, V and their gradients move to host memory as needed; --optim offloaded_adamw "
    "moves AdamW there; torchrun trains on several GPUs, each with the whole model"
)
_ATTENTION = "is not needed: oomb has its own attention; leave it out (--kernels selects the backend)"
_LOSS = "is not needed: the loss of conversations and completions covers the answers alone; leave it out"
_MAX_LENGTH = "is called --max_length here"
_EVAL_BATCH = "does not exist: evaluation uses --per_device_train_batch_size; leave it out"
_CHECKPOINTS = "does not exist: use --save_steps or --save_minutes"

REMEDIES = {
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "fp16": "does not exist: use --bf16, mixed precision in bfloat16",
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "attn_implementation": _ATTENTION,
    "use_flash_attention_2": _ATTENTION,
    "max_seq_length": _MAX_LENGTH,
    "block_size": _MAX_LENGTH,
    "per_device_eval_batch_size": _EVAL_BATCH,
    "evaluation_strategy": "is called --eval_strategy here",
    "save_strategy": _CHECKPOINTS,
    "torch_compile": "does not exist: --fuse compile compiles layer by layer, which is the default on a GPU",
    "use_liger_kernel": "is not needed: --fuse fuses the same operations, by default on a GPU; leave it out",
    "load_in_8bit": "does not exist: use --load_in_4bit",
    "train_file": "is called --dataset here",
    "dataset_text_field": 'does not exist: call that column or key "text"',
    "assistant_only_loss": _LOSS,
    "completion_only_loss": _LOSS,
}
"""What to do instead of settings that oomb does not have."""


def setting_of(name: str) -> str:
    """Return the setting that a name stands for.

    Raises:
        SettingError: oomb does not have it; the message says what to do instead.
    """
    plain = name.replace("-", "_")
    for foreign in (plain, plain.removeprefix("no_")):
        if foreign in REMEDIES:
            raise SettingError(name, REMEDIES[foreign])
    return NAME_OF.get(name, name)


def reject_foreign(args: list[str]) -> None:
    """Raise `SettingError` for flags of settings that oomb does not have."""
    for arg in args:
        if arg.startswith("--"):
            setting_of(arg[2:].partition("=")[0])


def reject_two_values(args: list[str]) -> None:
    """Raise `SettingError` if a setting has two values under two names, as in `--dataset a --dataset_name b`.

    For a flag that is repeated, the last value counts, as usual.
    """
    given: dict[str, dict[str, str]] = {}
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, is_joined, value = arg.removeprefix("--").partition("=")
        setting = NAME_OF.get(name, name)
        if arg.startswith("--") and setting in ALIASES:
            given.setdefault(setting, {})[name] = value if is_joined else following
    for values in given.values():
        (first, one), *others = values.items()
        for name, other in others:
            if other != one:
                raise SettingError(
                    name, f"{other} and --{first} {one} are the same setting with different values: give one of them"
                )
