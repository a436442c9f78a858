"""Settings of the engine: one keyword-only dataclass, "auto" wherever a machine decides better than a person."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from oomb.utils.units import parse_memory

DTYPES = ("float64", "float32", "bfloat16", "float16")

TILE_SIZE = 128
"""Queries that choose pages together: what a program of the sparse kernels does at once."""
MEANS_OF_RULE = {"mass": 2, "paper": 1}
"""Means of keys that stand for a page when pages are chosen, by rule."""

CHOICES: dict[str, tuple[object, ...]] = {
    "page_rule": tuple(MEANS_OF_RULE),
    "kernels": ("auto", "cudnn", "flash", "torch"),
    "fuse": ("auto", "compile", "off"),
    "checkpoint_layers": ("auto", True, False),
    "keep_last_chunk": ("auto", True, False),
    "keep_attention": ("auto", True, False),
    "kv_dtype": ("auto", *DTYPES, "int8"),
    "grad_dtype": ("auto", *DTYPES, "int8"),
    "param_grad_dtype": ("auto", "param", "float32"),
}

OFFLOADED_STATES = {
    "offloaded_adamw": "float32",
    "offloaded_adamw_bf16": "bfloat16",
    "offloaded_adamw_8bit": "8bit",
}
"""Names of `oomb.OffloadedAdamW`, by its `state_dtype`: how its states rest in host memory."""
OFFLOADED_OPTIONS: dict[str, dict[str, Any]] = {
    "state_dtype": {name: name for name in OFFLOADED_STATES.values()},
    "master_weights": {"true": True, "false": False},
}
"""What `optim_args` may say of it."""


@dataclass(kw_only=True, frozen=True)
class Config:
    """How `oomb.Engine` cuts, stores and computes. Every field has a sane default."""

    chunk_size: int = 4096
    """Tokens per recurrent step. Activation memory grows with it; small chunks leave a GPU's matrix units idle."""

    page_size: int = 128
    """Tokens per page, the unit in which memory for K, V and their gradients is handed out."""

    gpu_memory: int | str = "auto"
    """GPU memory for what grows with the context (pages, kept attention outputs): bytes, or a size such as "24GiB". The
    rest goes to host memory. 0: all of it. "auto": what is left beside weights, gradients, activations and AdamW."""

    host_memory: int | str = "auto"
    """Pinned host memory for the same, when the GPU's share is full. 0: none. "auto": most of what is free."""

    page_budget: int | None = None
    """Pages of the past that each tile of 128 queries reads; None: all of them, which is exact. With a budget the work
    per token no longer grows with the context. The own chunk and the first page are always read, the others are chosen
    by `page_rule`. Layers with a sliding window are not affected."""

    page_rule: Literal["mass", "paper"] = "mass"
    """How pages are ranked: by the attention that some queries give to means of their keys ("mass"), or as arXiv
    2602.02108 does it, without the first page, for comparison ("paper")."""

    kernels: Literal["auto", "cudnn", "flash", "torch"] = "auto"
    """Attention kernels. "auto" takes the fastest that can do what a layer asks for; a named one is used or refused."""

    fuse: Literal["auto", "compile", "off"] = "auto"
    """Fuse norms, RoPE, SwiGLU and the loss with torch.compile, layer by layer. "auto": on a GPU."""

    checkpoint_layers: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward of a chunk instead of keeping its activations (attention outputs are
    always kept). "auto": when a chunk's activations would not fit in free GPU memory, or nothing else would beside
    them."""

    keep_last_chunk: bool | Literal["auto"] = "auto"
    """Keep the last chunk's activations from the fill pass, which saves its recomputation. "auto": when layers are not
    checkpointed and no other call of this engine holds such activations."""

    keep_attention: bool | Literal["auto"] = "auto"
    """Keep every layer's attention output from the fill pass, so that the gradient pass computes no attention forward.
    Costs memory, host memory where it can, for each token: 200 KiB for a 7B model in bfloat16. "auto": as far as it
    fits, the last tokens first."""

    kv_dtype: str = "auto"
    """Precision of K and V at rest. "auto": as the model computes them. "int8": whole numbers with a scale for each
    token and head, about half of 16 bits."""

    grad_dtype: str = "auto"
    """Precision of the gradients of K and V at rest. They are added up in float32; 16-bit ones are rounded up or down
    at random, so that many small shares do not get lost. "auto": as the model computes them. "int8": as for K and V."""

    param_grad_dtype: Literal["auto", "param", "float32"] = "auto"
    """Precision in which a step's parameter gradients are summed over its chunks; `.grad` itself always has the
    parameter's dtype. "float32" takes 4 bytes per trainable parameter during the gradient pass; "auto" chooses it where
    that is at most a quarter of the GPU's memory. 16-bit sums are rounded up or down at random, so that many small
    shares do not get lost."""

    def __post_init__(self) -> None:
        for name in ("chunk_size", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of tokens, 1 or more")
        if self.page_budget is not None:
            if isinstance(self.page_budget, bool) or not isinstance(self.page_budget, int) or self.page_budget < 1:
                raise ValueError(
                    f"page_budget is {self.page_budget!r}; it must be a number of pages, 1 or more, or None"
                )
            if self.chunk_size % self.page_size:
                size = -(-self.chunk_size // self.page_size) * self.page_size
                raise ValueError(
                    f"with a page_budget, chunks are whole pages: chunk_size {self.chunk_size} is no multiple of "
                    f"page_size {self.page_size}; take chunk_size={size}"
                )
        for name in ("gpu_memory", "host_memory"):
            if getattr(self, name) != "auto":
                parse_memory(getattr(self, name), name)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")

    def keys_read(self, context: int) -> int:
        """Most tokens that a query reads: those of its own chunk, and those of the pages it may choose."""
        if self.page_budget is None:
            return context
        return min(context, self.chunk_size + self.page_budget * self.page_size)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Config:
        """A Config from plain settings, with a message that names the unknown key if there is one."""
        for key in settings:
            if key not in cls.field_names():
                raise ValueError(f"unknown setting {key!r}; the settings are {', '.join(cls.field_names())}")
        return cls(**settings)

    @classmethod
    def field_names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


def means_per_page(rule: str, page_size: int) -> int:
    """As many of the rule's means as share a page evenly: 1 of 2 for a page of 7."""
    return max(m for m in range(1, MEANS_OF_RULE[rule] + 1) if page_size % m == 0)


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Settings of `oomb.OffloadedAdamW` from a text such as "state_dtype=8bit,master_weights=true"."""
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if value not in OFFLOADED_OPTIONS.get(key, {}):
            known = "; ".join(f"{name}={'|'.join(values)}" for name, values in OFFLOADED_OPTIONS.items())
            raise ValueError(f"{part!r} is unknown; it takes {known}")
        options[key] = OFFLOADED_OPTIONS[key][value]
    return options
