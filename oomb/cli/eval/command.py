"""Define the command line of `oomb eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from oomb.cli.errors import PRESET_NAMES, CommandOfSettings, engine_settings, one_clear_message, quiet, train_options
from oomb.cli.options import DATA, OUTPUT, Device, Dtype, TrustRemoteCode, with_engine_options, with_options
from oomb.cli.train.settings import check_value
from oomb.models import load
from oomb.models.weight_files import holds_adapters
from oomb.utils.units import parse_list, parse_tokens

NEEDLES = "Needles in a haystack"


@with_engine_options("checkpoint_layers", "keep_attention", "param_grad_dtype", "grad_dtype")
@with_options("reading", train_options("tokenizer_name", "dataset", "packing", "dataset_join", "skip_dataset_check"))
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
    max_length: Annotated[
        str,
        typer.Option(
            "--max_length",
            help="Tokens per example; the limit for documents. 16384 and 16K are the same.",
            rich_help_panel=DATA,
        ),
    ] = "16384",
    max_eval_samples: Annotated[
        int,
        typer.Option(
            "--max_eval_samples",
            help="Number of examples, from the start of the dataset. They are those oomb train holds out if --packing, "
            "--dataset_join, --max_length and --seed are the same.",
            rich_help_panel=DATA,
        ),
    ] = 1,
    needle_lengths: Annotated[
        str | None,
        typer.Option(
            "--needle_lengths",
            help="Haystack lengths in tokens, for example 4K,16K. Default: no needles.",
            rich_help_panel=NEEDLES,
        ),
    ] = None,
    needle_depths: Annotated[
        int, typer.Option("--needle_depths", help="Parts of a text, with one question each.", rich_help_panel=NEEDLES)
    ] = 5,
    needle_candidates: Annotated[
        int,
        typer.Option(
            "--needle_candidates",
            help="Needles in each part, 2 to 9, that the model chooses from.",
            rich_help_panel=NEEDLES,
        ),
    ] = 4,
    needle_haystacks: Annotated[
        int,
        typer.Option("--needle_haystacks", help="Texts of each length; two passes each.", rich_help_panel=NEEDLES),
    ] = 4,
    sample_tokens: Annotated[
        int,
        typer.Option(
            "--sample_tokens",
            help="Generate this many tokens after the beginning of the text. 0: none.",
            rich_help_panel=OUTPUT,
        ),
    ] = 0,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", help="Write all results to this JSON file, which oomb report reads.", rich_help_panel=OUTPUT
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            help="Seed of the record order (as in oomb train), the needles, the sample and a preset's weights.",
            rich_help_panel=DATA,
        ),
    ] = 42,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
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
        length = parse_tokens(max_length, "--max_length")
        lengths = (
            ()
            if needle_lengths is None
            else tuple(parse_list(needle_lengths, lambda text: parse_tokens(text, "--needle_lengths")))
        )
        for name, value in reading.items():
            check_value(name, value)
        if not holds_adapters(model):
            load.check_model_name(model)
        quiet()
        from oomb.cli.eval.run import run
        from oomb.eval.needles import NeedleSettings
        from oomb.eval.run import EvalSettings

        counts = {"num_depths": needle_depths, "num_candidates": needle_candidates, "num_haystacks": needle_haystacks}
        needle = NeedleSettings(lengths=lengths, seed=seed, **counts) if lengths else None
        chosen = EvalSettings(
            model_name_or_path=model,
            **reading,
            max_length=length,
            max_eval_samples=max_eval_samples,
            needle=needle,
            sample_tokens=sample_tokens,
            seed=seed,
            output=output,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            engine=settings,
        )
        run(chosen, Console())


eval_.command_class = CommandOfSettings  # type: ignore[attr-defined]
