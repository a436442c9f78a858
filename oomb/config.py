"""Declare the engine's settings, each described once: flags, YAML files and documentation are generated from here."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from oomb.utils.dtypes import DTYPES
from oomb.utils.units import parse_memory

ENGINE = "Engine"
"""The group of these settings in `--help`, config.yaml and the documentation."""

TILE_SIZE = 128
"""Queries that share a page selection: one program of the sparse kernels processes them together."""
MEANS_OF_RULE = {"mass": 2, "paper": 1}
"""Key means that stand for a page when pages are scored, by page rule."""

OFFLOADED_STATES = {
    "offloaded_adamw": "float32",
    "offloaded_adamw_bf16": "bfloat16",
    "offloaded_adamw_8bit": "8bit",
}
"""Optimizer names, and the `state_dtype` of `oomb.OffloadedAdamW` that each stands for."""
OFFLOADED_OPTIONS: dict[str, dict[str, Any]] = {
    "state_dtype": {name: name for name in OFFLOADED_STATES.values()},
    "master_weights": {"true": True, "false": False},
}
"""What `optim_args` accepts for it."""


class SettingError(ValueError):
    """A wrong value of a setting. It knows which one, so that the flag or the line of a file can be named.

    Args:
        key: Name of the setting.
        problem: What is wrong and what to write instead, as the rest of a sentence that starts with the key.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key} {problem}")
        self.key, self.problem = key, problem


def setting(
    default: Any,
    help: str,
    *,
    panel: str = ENGINE,
    choices: tuple[object, ...] | None = None,
    unit: Literal["tokens", "bytes"] | None = None,
    minimum: float | None = None,
    below: float | None = None,
    kind: str | None = None,
    has_flag: bool = True,
) -> Any:
    """Return a dataclass field that describes one setting.

    Args:
        default: Default value. None: it depends on the model and the data, or the setting is off.
        help: What the setting does, for `--help` and the documentation.
        panel: Group of settings it is listed in.
        choices: All accepted values.
        unit: "tokens" can be written 32K on the command line and in YAML, "bytes" 24GiB.
        minimum: Smallest number `TrainSettings` accepts. `Config` checks its own in `__post_init__`.
        below: Upper bound, not accepted itself; likewise.
        kind: How YAML values are read: "words" takes a list, "checkpoint" takes true, "strategy" takes no for false.
        has_flag: Whether commands have a flag for it.
    """
    metadata = {"help": help, "panel": panel, "choices": choices, "unit": unit, "minimum": minimum, "below": below}
    return field(default=default, metadata={**metadata, "kind": kind, "has_flag": has_flag})


@dataclass(kw_only=True, frozen=True)
class Config:
    """Settings of `oomb.Engine`: how it splits a sequence, stores keys and values, and computes.

    Every field has a default; "auto" lets the machine decide. docs/config.md describes them all.

    Raises:
        SettingError: A value is wrong. It is a ValueError, and names the field and the values that work.

    Examples:
        >>> import oomb
        >>> oomb.Config(chunk_size=1024, gpu_memory="24GiB").chunk_size
        1024
    """

    chunk_size: int = setting(
        4096,
        "Tokens per chunk. Activation memory grows with it; small chunks leave the GPU's tensor cores underused. "
        "Gradients do not depend on it.",
        unit="tokens",
    )
    page_size: int = setting(
        128,
        "Tokens per page, the unit in which memory for K, V and their gradients is allocated. Results do not depend "
        "on it.",
        unit="tokens",
    )
    gpu_memory: int | str = setting(
        "auto",
        "GPU memory for everything that grows with the context (pages and saved attention outputs), such as 24GiB; "
        "the rest goes to host memory. 0: all of it goes there. auto: whatever weights, gradients, activations and "
        "AdamW leave free.",
        unit="bytes",
    )
    host_memory: int | str = setting(
        "auto",
        "Pinned host memory for pages and saved attention outputs, used when the GPU's share is full. 0: none. auto: "
        "up to 90% of free host memory, of which attention outputs take at most 75%.",
        unit="bytes",
    )
    page_budget: int | None = setting(
        None,
        "Past pages that each tile of 128 queries reads, in addition to its own chunk. Default: all of them, which is "
        "exact. With a budget, the work per token stops growing with the context and gradients are "
        "approximate; chunk_size must then be a multiple of page_size.",
        minimum=1,
    )
    page_rule: Literal["mass", "paper"] = setting(
        "mass",
        "How pages are ranked for page_budget. mass: by estimated attention mass; the first page is always included. "
        "paper: as in arXiv 2602.02108, which does not always include the first page; for comparison.",
        choices=tuple(MEANS_OF_RULE),
    )
    kernels: Literal["auto", "cudnn", "flash", "torch"] = setting(
        "auto",
        "Attention backend. auto: the fastest that supports the layer. Any other value is used or refused; torch is "
        "the reference implementation.",
        choices=("auto", "cudnn", "flash", "torch"),
    )
    fuse: Literal["auto", "compile", "off"] = setting(
        "auto",
        "Fuse norms, RoPE, gated MLPs and the loss with torch.compile, layer by layer. auto: on a GPU.",
        choices=("auto", "compile", "off"),
    )
    checkpoint_layers: bool | Literal["auto"] = setting(
        "auto",
        "Recompute each layer in a chunk's backward pass instead of keeping its activations. auto: if activations or "
        "pages would not fit otherwise; with page_budget, also if that keeps enough of K and V on the GPU to save "
        "time.",
        choices=("auto", True, False),
    )
    keep_last_chunk: bool | Literal["auto"] = setting(
        "auto",
        "Keep the last chunk's activations from the fill pass instead of recomputing them. auto: if layers are not "
        "checkpointed and no other call of this engine holds such activations.",
        choices=("auto", True, False),
        has_flag=False,
    )
    keep_attention: bool | Literal["auto"] = setting(
        "auto",
        "Save attention outputs in the fill pass, so the gradient pass does not recompute the attention forward. This "
        "takes hidden size x layers x tokens of GPU or host memory: 200 KiB per token for a 7B model in bfloat16. "
        "auto: as many as fit, last tokens first.",
        choices=("auto", True, False),
    )
    kv_dtype: str = setting(
        "auto",
        "Precision in which K and V are stored. auto: as the model computes them. int8: one scale per token and head, "
        "51% of the size of 16 bits for heads of 128; gradients are then approximate.",
        choices=("auto", *DTYPES, "int8"),
    )
    grad_dtype: str = setting(
        "auto",
        "Precision in which gradients of K and V are stored. They are summed in float32; 16 bits and int8 use "
        "stochastic rounding. auto: as the model computes K and V.",
        choices=("auto", *DTYPES, "int8"),
    )
    param_grad_dtype: Literal["auto", "param", "float32"] = setting(
        "auto",
        "Precision in which parameter gradients are summed over a step's chunks; .grad keeps the parameter's dtype. "
        "param: the parameter's dtype, with stochastic rounding. float32: takes 4 bytes per trainable 16-bit parameter "
        "in the gradient pass. auto: float32 on a CPU, and on a GPU if it takes at most a quarter of the memory.",
        choices=("auto", "param", "float32"),
    )

    def __post_init__(self) -> None:
        for name in ("chunk_size", "page_size"):
            _check_count(name, getattr(self, name), "a whole number of tokens, 1 or more")
        if self.page_budget is not None:
            _check_count("page_budget", self.page_budget, "a number of pages, 1 or more, or None")
            if self.chunk_size % self.page_size:
                size = -(-self.chunk_size // self.page_size) * self.page_size
                raise SettingError(
                    "chunk_size",
                    f"{self.chunk_size} is not a multiple of page_size {self.page_size}, as page_budget requires: use "
                    f"chunk_size={size}",
                )
        for described in fields(self):
            _check_value(described, getattr(self, described.name))

    def keys_read(self, context: int) -> int:
        """Return the maximum number of tokens that one query reads: its own chunk and the pages it may select.

        Args:
            context: Tokens of the sequence.
        """
        if self.page_budget is None:
            return context
        return min(context, self.chunk_size + self.page_budget * self.page_size)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Config:
        """Return a Config from plain settings, such as those of a YAML file.

        Args:
            settings: Values by field name.

        Raises:
            ValueError: A key is unknown or a value is wrong.

        Examples:
            >>> Config.from_dict({"chunk_size": 1024}).page_size
            128
        """
        for key in settings:
            if key not in cls.field_names():
                raise ValueError(f"unknown setting {key!r}; the settings are {', '.join(cls.field_names())}")
        return cls(**settings)

    @classmethod
    def field_names(cls) -> list[str]:
        return [described.name for described in fields(cls)]

    @classmethod
    def flag_names(cls) -> list[str]:
        """Return the settings that commands have a flag for."""
        return [described.name for described in fields(cls) if described.metadata["has_flag"]]


def _check_count(name: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(name, f"is {value!r}; it must be {expected}")


def _check_value(described: Field[Any], value: Any) -> None:
    name, choices = described.name, described.metadata["choices"]
    if choices is not None and not any(value is one or (isinstance(one, str) and value == one) for one in choices):
        raise SettingError(name, f"is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    if described.metadata["unit"] == "bytes" and value != "auto":
        try:
            parse_memory(value, "")
        except ValueError as error:
            raise SettingError(name, str(error).strip()) from None


def means_per_page(rule: str, page_size: int) -> int:
    """Return how many of the rule's key means a page has: the most that divide it evenly, so 1 for a page of 7."""
    return max(m for m in range(1, MEANS_OF_RULE[rule] + 1) if page_size % m == 0)


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Return the options of `oomb.OffloadedAdamW` from a text such as "state_dtype=8bit,master_weights=true".

    Raises:
        SettingError: An option or its value is unknown.
    """
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if value not in OFFLOADED_OPTIONS.get(key, {}):
            known = "; ".join(f"{name}={'|'.join(values)}" for name, values in OFFLOADED_OPTIONS.items())
            raise SettingError("optim_args", f"{part!r} is unknown; it takes {known}")
        options[key] = OFFLOADED_OPTIONS[key][value]
    return options
