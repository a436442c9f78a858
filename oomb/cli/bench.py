"""Define `oomb bench`, which measures a training step with oomb and with standard training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oomb.cli.errors import EXIT_NOT_TRUSTED, one_clear_message, quiet
from oomb.cli.options import Dtype, train_options, with_engine_options, with_options
from oomb.cli.train.schema import engine_settings
from oomb.models import load, presets
from oomb.utils import dtypes
from oomb.utils.units import parse_list, parse_tokens


@with_engine_options()
@with_options("loading", train_options("device", "trust_remote_code"))
def bench(
    model_name_or_path: Annotated[
        str | None,
        typer.Option(
            "--model_name_or_path",
            "--model",
            help="A preset, a folder or a hub id. Default: qwen2.5-7b on a GPU, demo on a CPU.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option("--contexts", help="Contexts, for example 32K,64K,1M. Default: 32K,64K on a GPU, 2K,4K on a CPU."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            "--modes", help="What to measure: oomb, standard (whole sequence, activation checkpointing), or both."
        ),
    ] = "oomb,standard",
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters only; needs peft.")] = False,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Timed steps per result, after a warm-up step; the median is reported.")
    ] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write results, settings and machine to this JSON file.")
    ] = None,
    selection_map: Annotated[
        Path | None,
        typer.Option(
            "--selection_map",
            help="With --page_budget: plot which pages of a text one layer reads, and save the plot to this file. "
            "Needs matplotlib.",
        ),
    ] = None,
    selection_layer: Annotated[int, typer.Option("--selection_layer", help="The layer to plot.")] = 0,
    selection_text: Annotated[
        str,
        typer.Option(
            "--selection_text", help="Text to plot for: a file, a folder, or stdlib (the source of Python's library)."
        ),
    ] = "stdlib",
    dtype: Dtype = "auto",
    *,
    loading: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Measure time, tokens/s, MFU and peak memory of a training step, with oomb and with standard training.

    A step is the forward and backward of one sequence of random tokens, without the optimizer. The gradients of both
    are compared.
    """
    with one_clear_message():
        settings = engine_settings(engine)
        chunk_size = settings.pop("chunk_size")
        if repeats < 1:
            raise ValueError(f"--repeats is {repeats}; it must be 1 or more")
        mode_list = parse_list(modes, str.strip)
        for mode in mode_list:
            if mode not in ("oomb", "standard"):
                raise ValueError(f"--modes has {mode!r}; use oomb, standard or both")
        place = dtypes.resolve_device(loading["device"])
        on_gpu = place.type == "cuda"
        name = model_name_or_path or ("qwen2.5-7b" if on_gpu else "demo")
        load.check_model_name(name)
        lengths = parse_list(contexts or ("32K,64K" if on_gpu else "2K,4K"), parse_tokens)
        precision = str(dtypes.resolve_dtype(dtype, place)).removeprefix("torch.")
        quiet()
        from oomb.eval import bench as bench_module

        console, finish = Console(), None
        trust: dict[str, Any] = {"trust_remote_code": loading["trust_remote_code"]}
        if selection_map is not None:
            from oomb.cli.plotting import check_picture
            from oomb.eval import selection_map as selection

            check_picture(selection_map, "--selection_map")
            num_layers = load.load_config(name, **trust).get_text_config(decoder=True).num_hidden_layers
            selection.check(num_layers, selection_layer, settings.get("page_budget"))
            tokenizer = None if presets.is_preset(name) else load.load_tokenizer(name, **trust)
            ids = selection.text_ids(tokenizer, max(lengths), selection_text)

            def finish(engine: Any) -> None:
                found = selection.record(engine, ids, selection_layer)
                pages = ", ".join(f"{page} ({share:.0%})" for page, share in found.most_read[:5])
                console.print(f"layer {selection_layer}: most read pages: {pages}", highlight=False, soft_wrap=True)
                console.print(f"written to {selection.draw(found, selection_map)}", highlight=False, soft_wrap=True)

        report = bench_module.run(
            name,
            lengths,
            modes=mode_list,
            chunk_size=chunk_size,
            dtype=precision,
            device=str(place),
            lora=lora,
            repeats=repeats,
            settings=settings,
            finish=finish,
            **trust,
            on_row=lambda row: console.print(f"measured {row.mode} at {row.context:,} tokens", style="dim"),
        )
    console.print(report.table())
    if output is not None:
        report.save(output)
        console.print(f"written to {output}", highlight=False, soft_wrap=True)
    if not report.is_right:
        console.print("[bold red]some gradients are wrong, so their timings are meaningless[/]")
        raise typer.Exit(EXIT_NOT_TRUSTED)
