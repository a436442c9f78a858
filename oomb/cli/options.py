"""What the commands share: their options, and how sizes are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

MODEL, DATA, MACHINE, OPTIMIZER, OUTPUT, ENGINE = "Model", "Data", "Machine", "Optimizer", "Output", "Engine"
"""The panels of `--help`."""

ChunkSize = Annotated[
    str,
    typer.Option(
        "--chunk_size", help="Tokens per chunk. More is faster on a GPU and takes more memory.", rich_help_panel=ENGINE
    ),
]
Kernels = Annotated[
    str, typer.Option("--kernels", help="Attention kernels: auto, cudnn, flash or torch.", rich_help_panel=ENGINE)
]
Fuse = Annotated[
    str,
    typer.Option("--fuse", help="Fusing by torch.compile: auto (on a GPU), compile or off.", rich_help_panel=ENGINE),
]
CheckpointLayers = Annotated[
    str,
    typer.Option(
        "--checkpoint_layers",
        help="Recompute each layer in a chunk's backward: auto (if its activations would not fit), true or false.",
        rich_help_panel=ENGINE,
    ),
]
KeepAttention = Annotated[
    str,
    typer.Option(
        "--keep_attention",
        help="Keep attention outputs from the fill pass, which saves time and takes memory that grows with the "
        "context: auto (as many as fit), true or false.",
        rich_help_panel=ENGINE,
    ),
]
GpuMemory = Annotated[
    str,
    typer.Option(
        "--gpu_memory",
        help="GPU memory for what grows with the context, as in 24GiB; the rest goes to host memory. 0: all "
        "goes there. auto: what is left beside weights, gradients, activations and AdamW.",
        rich_help_panel=ENGINE,
    ),
]
HostMemory = Annotated[
    str,
    typer.Option(
        "--host_memory",
        help="Pinned host memory for the same, when the GPU's share is full. 0: none. auto: most of what is free.",
        rich_help_panel=ENGINE,
    ),
]
PageBudget = Annotated[
    int | None,
    typer.Option(
        "--page_budget",
        help="Pages of the past that each tile of 128 queries reads; the work per token no longer grows with the "
        "context, and gradients are no longer exact. Default: all pages.",
        rich_help_panel=ENGINE,
    ),
]
PageRule = Annotated[
    str,
    typer.Option(
        "--page_rule", help="How pages are ranked when they are chosen: mass or paper.", rich_help_panel=ENGINE
    ),
]
PageSize = Annotated[
    int, typer.Option("--page_size", help="Tokens per page of K, V and their gradients.", rich_help_panel=ENGINE)
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv_dtype", help="Precision of K and V at rest: auto (the model's) or a dtype.", rich_help_panel=ENGINE
    ),
]
GradDtype = Annotated[
    str,
    typer.Option("--grad_dtype", help="Precision of their gradients at rest: auto or a dtype.", rich_help_panel=ENGINE),
]
ParamGradDtype = Annotated[
    str,
    typer.Option(
        "--param_grad_dtype",
        help="Sum parameter gradients over chunks in float32, or in the parameters' own dtype: auto, float32, param.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda or cuda:N.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (bfloat16 on a GPU, else float32), float64, float32, bfloat16 or float16.",
        rich_help_panel=MODEL,
    ),
]
TRUST_REMOTE_CODE = (
    "Run Python code that comes with a model or tokenizer, in its folder or on the hub. That code can do anything that "
    "you can. Default: refuse what needs it."
)
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust_remote_code/--no_trust_remote_code", help=TRUST_REMOTE_CODE, rich_help_panel=MODEL)
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        help="The GPU to plan for: its name (H200, H100, A100-80GB, RTX 4090, …) or its memory, as in 24GiB. "
        "Default: this machine's.",
        rich_help_panel=MACHINE,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host", help="Host memory that is free there, as in 64GiB. auto: this machine's.", rich_help_panel=MACHINE
    ),
]
OptimizerStates = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="Whose states to count: adamw, adamw_8bit, momentum, sgd, none; or in host memory offloaded_adamw, "
        "offloaded_adamw_bf16, offloaded_adamw_8bit.",
        rich_help_panel=OPTIMIZER,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw memory against context into this file (.png, .svg, .pdf); needs matplotlib.",
        rich_help_panel=OUTPUT,
    ),
]


ENGINE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "chunk_size": (ChunkSize, "4096"),
    "page_budget": (PageBudget, None),
    "checkpoint_layers": (CheckpointLayers, "auto"),
    "keep_attention": (KeepAttention, "auto"),
    "param_grad_dtype": (ParamGradDtype, "auto"),
    "kv_dtype": (KvDtype, "auto"),
    "grad_dtype": (GradDtype, "auto"),
    "gpu_memory": (GpuMemory, "auto"),
    "host_memory": (HostMemory, "auto"),
    "page_size": (PageSize, 128),
    "page_rule": (PageRule, "mass"),
    "kernels": (Kernels, "auto"),
    "fuse": (Fuse, "auto"),
}
"""The settings of the engine that commands take, and their defaults."""


def with_engine_options(*without: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the engine's options, all but those named; it gets their values as `engine`."""
    options = {
        name: (annotation, defaults.get(name, default))
        for name, (annotation, default) in ENGINE_OPTIONS.items()
        if name not in without
    }
    return with_options("engine", options)


def with_options(
    parameter: str, options: dict[str, tuple[Any, Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command these options, by name with annotation and default, in the place of one parameter, as which it
    gets their values. The command line is read off a function's parameters: this spares several commands the same."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            shared = {name: values.pop(name) for name in options}
            function(**values, **{parameter: shared})

        hints = get_type_hints(function, include_extras=True)
        parameters: list[Parameter] = []
        for name, own in signature(function).parameters.items():
            if name != parameter:
                parameters.append(own.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
                continue
            parameters += [
                Parameter(shared, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
                for shared, (annotation, default) in options.items()
            ]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {described.name: described.annotation for described in parameters}
        return command

    return decorate
