"""The command line: `oomb train`, `oomb plan`, `oomb verify`, `oomb bench`. Thin: torch comes once a command runs."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from oomb import __version__, presets
from oomb.config import Config
from oomb.options import (
    DATA,
    MODEL,
    OPTIMIZER,
    OUTPUT,
    Device,
    Dtype,
    Gpu,
    Host,
    OptimizerStates,
    Plot,
    parse_list,
    parse_tokens,
    with_engine_options,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train Hugging Face causal language models on very long contexts, on one GPU, with exact gradients.\n\n"
    "[bold]oomb train[/] alone runs a small built-in example. [bold]oomb plan[/] says what will fit, before anything "
    "is allocated. [bold]oomb verify MODEL[/] checks the gradients of your own model. [bold]oomb bench[/] measures "
    "time and memory beside standard training.",
)

EXIT_NOT_TRUSTED = 1
EXIT_DOES_NOT_FIT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
PRESET_NAMES = ", ".join(presets.PRESETS)


@contextmanager
def _one_clear_message() -> Iterator[None]:
    """Errors a person can act on are one message and exit code 2; OOMB_DEBUG=1 shows the traceback as well. So are all
    others, with the traceback: exit code 1 is for gradients that were compared and found wrong."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]ended by Ctrl-C[/]")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or type(error).__name__, error)
    except Exception as error:
        # torch.OutOfMemoryError; importing torch here to name it would slow every command.
        if type(error).__name__ == "OutOfMemoryError":
            reason = str(error).splitlines()[0]
            _fail(f"the GPU ran out of memory ({reason}); lower --chunk_size, the batch or the context", error)
        _fail(f"{type(error).__name__}: {error}", error, unexpected=True)


def _fail(message: str, error: Exception, *, unexpected: bool = False) -> NoReturn:
    if unexpected or os.environ.get("OOMB_DEBUG"):
        traceback.print_exception(error)
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_BAD_INPUT) from error


def _quiet() -> None:
    """transformers logs advice on standard error that does not apply to a run of ours, and would tear the bar. The
    hub's client logs every attempt to reach it."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel(ERROR)


def _engine_settings(options: dict[str, Any]) -> dict[str, Any]:
    """A command's options as settings of `oomb.Config`, checked."""
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen["chunk_size"] = parse_tokens(chosen["chunk_size"], "--chunk_size")
    words: dict[str, Any] = {"true": True, "false": False, **presets.SHORT_DTYPES}
    chosen = {
        name: words.get(value.lower(), value) if isinstance(value, str) else value for name, value in chosen.items()
    }
    Config(**chosen)
    return chosen


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"oomb {__version__}")
        raise typer.Exit


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose help is its docstring, each paragraph one line for the terminal to wrap."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(function)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@_command
@with_engine_options()
def train(
    model_name_or_path: Annotated[
        str,
        typer.Option(
            "--model_name_or_path",
            "--model",
            help=f"A folder that save_pretrained wrote, a hub id (owner/name), or a preset with random weights: "
            f"{PRESET_NAMES}.",
            rich_help_panel=MODEL,
        ),
    ] = "demo",
    tokenizer_name: Annotated[
        str | None,
        typer.Option(
            "--tokenizer_name",
            help="Folder or hub id of a tokenizer, if not the model's. Presets read bytes.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            help="A text file, a folder of text files, or stdlib: Python's own library source.",
            rich_help_panel=DATA,
        ),
    ] = "stdlib",
    max_length: Annotated[
        str,
        typer.Option(
            "--max_length",
            help="Context: tokens per training window. 16384 and 16K are the same.",
            rich_help_panel=DATA,
        ),
    ] = "16384",
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max_steps",
            help="Optimizer steps. Default: one epoch; the demo: 20, with a GPU 200.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning_rate",
            help="Peak learning rate of AdamW. Default: 5e-5; the demo: 4e-3.",
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            "--warmup_steps", help="Steps to reach it. Default: a tenth, at most 100.", rich_help_panel=OPTIMIZER
        ),
    ] = None,
    lr_scheduler_type: Annotated[
        str,
        typer.Option(
            "--lr_scheduler_type",
            help="What the rate does then: cosine, linear, constant, …",
            rich_help_panel=OPTIMIZER,
        ),
    ] = "cosine",
    weight_decay: Annotated[
        float, typer.Option("--weight_decay", help="AdamW's weight decay.", rich_help_panel=OPTIMIZER)
    ] = 0.0,
    max_grad_norm: Annotated[
        float, typer.Option("--max_grad_norm", help="Clip gradients to this norm; 0: never.", rich_help_panel=OPTIMIZER)
    ] = 1.0,
    per_device_train_batch_size: Annotated[
        int, typer.Option("--per_device_train_batch_size", help="Windows computed at once.", rich_help_panel=OPTIMIZER)
    ] = 1,
    gradient_accumulation_steps: Annotated[
        int,
        typer.Option("--gradient_accumulation_steps", help="Batches per optimizer step.", rich_help_panel=OPTIMIZER),
    ] = 1,
    max_eval_samples: Annotated[
        int,
        typer.Option(
            "--max_eval_samples",
            help="Windows held out, the first of the text, for a loss before and after. 0: none.",
            rich_help_panel=DATA,
        ),
    ] = 1,
    output_dir: Annotated[
        str | None,
        typer.Option("--output_dir", help="Where to save. Default: a new folder under runs/.", rich_help_panel=OUTPUT),
    ] = None,
    overwrite_output_dir: Annotated[
        bool,
        typer.Option(
            "--overwrite_output_dir",
            help="Write into an --output_dir that holds an earlier run.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    save_steps: Annotated[
        int | None,
        typer.Option(
            "--save_steps",
            help="Write a checkpoint to resume from every so many steps. Default: none, only the model at the end.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume_from_checkpoint: Annotated[
        str | None,
        typer.Option(
            "--resume_from_checkpoint",
            help="A checkpoint-N folder to go on from. --output_dir is then its run, if not named.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of weights, order and dropout.", rich_help_panel=OPTIMIZER)
    ] = 42,
    dtype: Dtype = "auto",
    device: Device = "auto",
    *,
    engine: dict[str, Any],
) -> None:
    """Train a causal language model on long windows of text.

    Without arguments: the built-in example, a small byte-level model from scratch on the source of Python's standard
    library at a 16K-token context. It takes a few minutes on two CPU cores.

    With your own: [bold]oomb train --model_name_or_path FOLDER --dataset FOLDER --max_length 128K[/]

    The model goes to OUTPUT_DIR/model, a JSON line per step to OUTPUT_DIR/metrics.jsonl. Ctrl-C stops at the next
    chunk and saves.
    """
    with _one_clear_message():
        settings = {**locals(), "max_length": parse_tokens(max_length, "--max_length")}
        settings["engine"] = _engine_settings(engine)
        presets.check_model_name(model_name_or_path)
        _quiet()
        from oomb.train import Settings, run

        code = run(Settings(**settings), Console())
    raise typer.Exit(code)


@_command
@with_engine_options("kernels")
def plan(
    model_name_or_path: Annotated[
        str,
        typer.Option(
            "--model_name_or_path",
            "--model",
            help=f"A folder with a config.json, a hub id, or a preset: {PRESET_NAMES}. No weights are read.",
            rich_help_panel=MODEL,
        ),
    ] = "qwen2.5-7b",
    context: Annotated[
        str, typer.Option("--context", help="Tokens per sequence, as in 128K or 1M.", rich_help_panel=DATA)
    ] = "128K",
    batch_size: Annotated[
        int, typer.Option("--batch_size", help="Sequences computed at once.", rich_help_panel=DATA)
    ] = 1,
    gpu: Gpu = None,
    host: Host = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="LoRA of rank 16 on all linear layers; needs peft.", rich_help_panel=MODEL)
    ] = False,
    optimizer: OptimizerStates = "adamw",
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the plan to this JSON file.", rich_help_panel=OUTPUT)
    ] = None,
    plot: Plot = None,
    dtype: Dtype = "bfloat16",
    *,
    engine: dict[str, Any],
) -> None:
    """Predict memory and time of a training step, for this machine or another. Needs no GPU and no weights.

    [bold]oomb plan --model qwen2.5-7b --context 1M --gpu H200 --host 512GiB[/]

    --gpu and --host describe the machine; --gpu_memory and --host_memory are settings of training on it. Ends with exit
    code 0 if it fits, 1 if it does not, 2 for bad input.
    """
    with _one_clear_message():
        settings = _engine_settings(engine)
        length = parse_tokens(context, "--context")
        presets.check_model_name(model_name_or_path)
        _quiet()
        from oomb import planner

        if plot is not None:
            planner.check_plotting(plot)
        forecast = planner.plan(
            model_name_or_path,
            length,
            planner.find_machine(gpu, host),
            batch_size=batch_size,
            dtype=dtype,
            lora=lora,
            optimizer=optimizer,
            settings=settings,
        )
        console = Console()
        console.print(forecast.table())
        for line in forecast.lines():
            console.print(line, highlight=False, soft_wrap=True)
        for path, write in ((output, forecast.save), (plot, forecast.plot)):
            if path is not None:
                console.print(f"written to {write(path)}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if forecast.plan.fits else EXIT_DOES_NOT_FIT)


@_command
@with_engine_options("page_budget", "page_rule", chunk_size="512")
def verify(
    model: Annotated[
        str, typer.Argument(help=f"A folder that save_pretrained wrote, a hub id, or a preset: {PRESET_NAMES}.")
    ],
    context: Annotated[str, typer.Option("--context", help="Tokens to compare on.")] = "2048",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="float64, float32, bfloat16 or float16. Half precisions are compared to a float32 reference.",
        ),
    ] = "float32",
    device: Device = "auto",
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Keep only the first N layers: for models too large for this machine."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random tokens, and of a preset's weights.")] = 0,
    *,
    engine: dict[str, Any],
) -> None:
    """Compare chunked with whole-sequence gradients, for every parameter of your model, on your machine.

    Whole-sequence training is the model's ordinary forward and autograd. Dropout is off. Ends with one line, and with
    exit code 0 for "trust it", 1 for "do not trust", 2 where the comparison could not be made.
    """
    with _one_clear_message():
        settings = _engine_settings(engine)
        chunk_size = settings.pop("chunk_size")
        presets.check_model_name(model)
        _quiet()
        from oomb.verify import verify as compare

        comparison = compare(
            model,
            context=parse_tokens(context, "--context"),
            chunk_size=chunk_size,
            dtype=dtype,
            device=device,
            num_layers=layers,
            settings=settings,
            seed=seed,
        )
        console = Console()
        console.print(comparison.table())
        console.print(
            f"loss: {comparison.loss:.8f} in chunks, {comparison.whole_loss:.8f} as a whole, "
            f"difference {abs(comparison.loss - comparison.whole_loss):.1e}",
            highlight=False,
            soft_wrap=True,
        )
        color = "green" if comparison.trusted else "red"
        console.print(f"[bold {color}]{escape(comparison.verdict)}[/]", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if comparison.trusted else EXIT_NOT_TRUSTED)


@_command
@with_engine_options()
def bench(
    model_name_or_path: Annotated[
        str | None,
        typer.Option(
            "--model_name_or_path",
            "--model",
            help="A preset, folder or hub id. Default: qwen2.5-7b on a GPU, else demo.",
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option("--contexts", help="Contexts, as in 32K,64K,1M. Default: 32K,64K on a GPU, else 2K,4K."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option("--modes", help="What to measure: oomb, standard (whole sequence, checkpointed layers), or both."),
    ] = "oomb,standard",
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters only; needs the peft package.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed steps per row, after one that warms up.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the figures and the machine to this JSON file.")
    ] = None,
    selection_map: Annotated[
        Path | None,
        typer.Option(
            "--selection_map",
            help="With --page_budget: draw the pages that a layer reads of a text into this file; needs matplotlib.",
        ),
    ] = None,
    selection_layer: Annotated[int, typer.Option("--selection_layer", help="The layer to draw.")] = 0,
    selection_text: Annotated[
        str, typer.Option("--selection_text", help="A text file or folder, or stdlib, the source of Python.")
    ] = "stdlib",
    dtype: Dtype = "auto",
    device: Device = "auto",
    *,
    engine: dict[str, Any],
) -> None:
    """Measure time, tokens/s, MFU and peak memory of a training step, with standard training beside it.

    Forward and backward of one sequence of random tokens, all gradients, no optimizer.
    """
    with _one_clear_message():
        settings = _engine_settings(engine)
        chunk_size = settings.pop("chunk_size")
        if repeats < 1:
            raise ValueError(f"--repeats is {repeats}; it must be 1 or more")
        chosen_modes = parse_list(modes, str.strip)
        for mode in chosen_modes:
            if mode not in ("oomb", "standard"):
                raise ValueError(f"--modes has {mode!r}; the modes are oomb and standard")
        place = presets.resolve_device(device)
        on_gpu = place.type == "cuda"
        name = model_name_or_path or ("qwen2.5-7b" if on_gpu else "demo")
        presets.check_model_name(name)
        lengths = parse_list(contexts or ("32K,64K" if on_gpu else "2K,4K"), parse_tokens)
        precision = str(presets.resolve_dtype(dtype, place)).removeprefix("torch.")
        _quiet()
        from oomb import bench as benchmark

        console, finish = Console(), None
        if selection_map is not None:
            from oomb import selection

            num_layers = presets.load_config(name).get_text_config(decoder=True).num_hidden_layers
            selection.check(num_layers, selection_layer, settings.get("page_budget"), selection_map)
            tokenizer = None if presets.is_preset(name) else presets.load_tokenizer(name)
            ids = selection.text_ids(tokenizer, max(lengths), selection_text)

            def finish(engine: Any) -> None:
                found = selection.record(engine, ids, selection_layer)
                pages = ", ".join(f"{page} ({share:.0%})" for page, share in found.most_read[:5])
                console.print(f"layer {selection_layer} reads most: page {pages}", highlight=False, soft_wrap=True)
                console.print(f"written to {selection.draw(found, selection_map)}", highlight=False, soft_wrap=True)

        report = benchmark.run(
            name,
            lengths,
            modes=chosen_modes,
            chunk_size=chunk_size,
            dtype=precision,
            device=str(place),
            lora=lora,
            repeats=repeats,
            settings=settings,
            finish=finish,
            on_row=lambda row: console.print(f"measured {row.mode} at {row.context:,} tokens", style="dim"),
        )
    console.print(report.table())
    if output is not None:
        report.save(output)
        console.print(f"written to {output}", highlight=False, soft_wrap=True)
    if not report.is_right:
        console.print("[bold red]a row's gradients are wrong; its time means nothing[/]")
        raise typer.Exit(EXIT_NOT_TRUSTED)


if __name__ == "__main__":
    app()
