"""Settings of the engine: one keyword-only dataclass, "auto" wherever a machine decides better than a person."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

DTYPES = ("float64", "float32", "bfloat16", "float16")

CHOICES: dict[str, tuple[object, ...]] = {
    "kernels": ("auto", "cudnn", "flash", "torch"),
    "fuse": ("auto", "compile", "off"),
    "checkpoint_layers": ("auto", True, False),
    "keep_last_chunk": ("auto", True, False),
    "keep_attention": (True, False),
    "kv_dtype": ("auto", *DTYPES),
    "grad_dtype": ("auto", *DTYPES),
    "param_grad_dtype": ("auto", "param", "float32"),
}


@dataclass(kw_only=True, frozen=True)
class Config:
    """How `oomb.Engine` cuts, stores and computes. Every field has a sane default."""

    chunk_size: int = 4096
    """Tokens per recurrent step. Activation memory grows with it; small chunks leave a GPU's matrix units idle."""

    kernels: Literal["auto", "cudnn", "flash", "torch"] = "auto"
    """Attention kernels. "auto" takes the fastest that can do what a layer asks for; a named one is used or refused."""

    fuse: Literal["auto", "compile", "off"] = "auto"
    """Fuse norms, RoPE, SwiGLU and the loss with torch.compile, layer by layer. "auto": on a GPU."""

    checkpoint_layers: bool | Literal["auto"] = "auto"
    """Recompute each layer in the backward of a chunk instead of keeping its activations (attention outputs are
    always kept). "auto": when a chunk's activations would not fit in free GPU memory."""

    keep_last_chunk: bool | Literal["auto"] = "auto"
    """Keep the last chunk's activations from the fill pass, which saves its recomputation. "auto": when layers are not
    checkpointed and no other call of this engine holds such activations."""

    keep_attention: bool = False
    """Keep every layer's attention output from the fill pass, so that the gradient pass computes no attention forward.
    Costs GPU memory for each token: 200 KiB for a 7B model in bfloat16."""

    kv_dtype: str = "auto"
    """Precision of K and V at rest. "auto": as the model computes them."""

    grad_dtype: str = "auto"
    """Precision in which the gradients of K and V accumulate. "auto": as the model computes them."""

    param_grad_dtype: Literal["auto", "param", "float32"] = "auto"
    """Precision in which a step's parameter gradients are summed over its chunks; `.grad` itself always has the
    parameter's dtype. "float32" takes 4 bytes per trainable parameter during the gradient pass; "auto" chooses it where
    that is at most a quarter of the GPU's memory."""

    def __post_init__(self) -> None:
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size!r}; it must be a whole number of tokens, 1 or more")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")

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
