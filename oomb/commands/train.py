"""`oomb train`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from oomb import presets
from oomb.commands.shared import PRESET_NAMES, engine_settings, one_clear_message, quiet
from oomb.options import DATA, MODEL, OPTIMIZER, OUTPUT, Device, Dtype, parse_tokens, with_engine_options


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
    with one_clear_message():
        settings = {**locals(), "max_length": parse_tokens(max_length, "--max_length")}
        settings["engine"] = engine_settings(engine)
        presets.check_model_name(model_name_or_path)
        quiet()
        from oomb.train import Settings, run

        code = run(Settings(**settings), Console())
    raise typer.Exit(code)
