"""Define the command line of `oomb eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from oomb.cli.errors import one_clear_message, quiet
from oomb.cli.options import (
    DATA,
    OUTPUT,
    PRESET_NAMES,
    Dtype,
    SettingsCommand,
    checked,
    train_options,
    with_engine_options,
    with_options,
)
from oomb.cli.train.schema import engine_settings
from oomb.cli.train.settings import token_list
from oomb.models import load
from oomb.models.weight_files import holds_adapters

LOADING = ("tokenizer_name", "device", "trust_remote_code")
READING = ("dataset", "max_length", "packing", "dataset_join", "skip_dataset_check", "seed", "sample_tokens")
NEEDLES = ("needle_lengths", "needle_depths", "needle_candidates", "needle_haystacks")


@with_engine_options("checkpoint_layers", "keep_attention", "param_grad_dtype", "grad_dtype")
@with_options("reading", train_options(*LOADING, *READING, sample_tokens=0))
@with_options("needles", train_options(*NEEDLES))
def eval_(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder written by save_pretrained, a folder of LoRA adapters (needs peft), a hub id, or a preset: "
            f"{PRESET_NAMES}."
        ),
    ],
    *,
    reading: dict[str, Any],
    max_eval_samples: Annotated[
        int,
        typer.Option(
            "--max_eval_samples",
            help="Number of examples, from the start of the dataset. They are those oomb train holds out if --packing, "
            "--dataset_join, --max_length and --seed are the same.",
            rich_help_panel=DATA,
        ),
    ] = 1,
    needles: dict[str, Any],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", help="Write all results to this JSON file, which oomb report reads.", rich_help_panel=OUTPUT
        ),
    ] = None,
    dtype: Dtype = "auto",
    engine: dict[str, Any],
) -> None:
    """Measure how a model uses a long context: perplexity by position, and needles in a haystack.

    [bold]oomb eval runs/demo/model --max_length 64K --needle_lengths 4K,16K,64K --output eval.json[/]

    Perplexity that falls with the position shows that the model uses its context. A needle is a sentence hidden in the
    text, such as "The code of amber falcon is 48213."; at the end the model chooses between this code and others hidden
    nearby. Only forward passes run, so contexts can be several times as long as in training.

    The settings of a training run are not read. To evaluate on the data a run held out, pass the same flags.
    """
    with one_clear_message():
        settings = engine_settings(engine)
        reading, needles = checked(reading), checked(needles)
        lengths = token_list("needle_lengths", needles["needle_lengths"])
        if not holds_adapters(model):
            load.check_model_name(model)
        quiet()
        from oomb.cli.eval.run import run
        from oomb.eval.needles import NeedleSettings
        from oomb.eval.run import EvalSettings

        counts = {name.replace("needle_", "num_"): needles[name] for name in NEEDLES[1:]}
        needle = NeedleSettings(lengths=lengths, seed=reading["seed"], **counts) if lengths else None
        eval_settings = EvalSettings(
            model_name_or_path=model,
            **reading,
            max_eval_samples=max_eval_samples,
            needle=needle,
            output=output,
            dtype=dtype,
            engine=settings,
        )
        run(eval_settings, Console())


eval_.command_class = SettingsCommand  # type: ignore[attr-defined]
