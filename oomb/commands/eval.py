"""`oomb eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from oomb import presets
from oomb.commands.shared import PRESET_NAMES, engine_settings, one_clear_message, quiet
from oomb.options import DATA, MODEL, OUTPUT, Device, Dtype, parse_list, parse_tokens, with_engine_options

NEEDLES = "Needles in a haystack"


@with_engine_options("checkpoint_layers", "keep_attention", "param_grad_dtype", "grad_dtype")
def eval_(
    model: Annotated[
        str, typer.Argument(help=f"A folder that save_pretrained wrote, a hub id, or a preset: {PRESET_NAMES}.")
    ],
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
            help="What to read, as for oomb train: a text file, a folder of them, or stdlib.",
            rich_help_panel=DATA,
        ),
    ] = "stdlib",
    max_length: Annotated[
        str, typer.Option("--max_length", help="Tokens per window. 16384 and 16K are the same.", rich_help_panel=DATA)
    ] = "16384",
    max_eval_samples: Annotated[
        int,
        typer.Option(
            "--max_eval_samples",
            help="Windows, the first of the text: those that oomb train holds out.",
            rich_help_panel=DATA,
        ),
    ] = 1,
    needle_lengths: Annotated[
        str | None,
        typer.Option(
            "--needle_lengths",
            help="Hide needles in texts of so many tokens, as in 4K,16K, and ask for them. Default: no needles.",
            rich_help_panel=NEEDLES,
        ),
    ] = None,
    needle_depths: Annotated[
        int, typer.Option("--needle_depths", help="Parts of a text that are asked about.", rich_help_panel=NEEDLES)
    ] = 5,
    needle_candidates: Annotated[
        int,
        typer.Option(
            "--needle_candidates",
            help="Needles in each part, 2 to 9: what the model chooses from.",
            rich_help_panel=NEEDLES,
        ),
    ] = 4,
    needle_haystacks: Annotated[
        int,
        typer.Option("--needle_haystacks", help="Texts of each length, two passes for each.", rich_help_panel=NEEDLES),
    ] = 4,
    sample_tokens: Annotated[
        int,
        typer.Option(
            "--sample_tokens",
            help="Write so many tokens on from the beginning of the text. 0: none.",
            rich_help_panel=OUTPUT,
        ),
    ] = 0,
    output: Annotated[
        str | None, typer.Option("--output", help="Write all figures to this JSON file.", rich_help_panel=OUTPUT)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            help="Seed of the order of records, as in oomb train, of needles, sample, and a preset's weights.",
            rich_help_panel=DATA,
        ),
    ] = 42,
    dtype: Dtype = "auto",
    device: Device = "auto",
    *,
    engine: dict[str, Any],
) -> None:
    """Measure how a model uses a long context: perplexity by position, and needles in a haystack.

    [bold]oomb eval runs/demo/model --max_length 64K --needle_lengths 4K,16K,64K --output eval.json[/]

    Perplexity that falls with the position shows that the context is used. A needle is a sentence hidden in the text,
    "The code of amber falcon is 48213."; the model is asked for the code at the end, and chooses between codes that are
    hidden nearby. Only forward passes are made: what fits is several times what can be trained.
    """
    with one_clear_message():
        settings = engine_settings(engine)
        length = parse_tokens(max_length, "--max_length")
        lengths = (
            ()
            if needle_lengths is None
            else tuple(parse_list(needle_lengths, lambda text: parse_tokens(text, "--needle_lengths")))
        )
        presets.check_model_name(model)
        quiet()
        from oomb import evaluate

        needle = None
        if lengths:
            needle = evaluate.NeedleSettings(
                lengths=lengths,
                num_depths=needle_depths,
                num_candidates=needle_candidates,
                num_haystacks=needle_haystacks,
                seed=seed,
            )
        chosen = evaluate.Settings(
            model_name_or_path=model,
            tokenizer_name=tokenizer_name,
            dataset=dataset,
            max_length=length,
            max_eval_samples=max_eval_samples,
            needle=needle,
            sample_tokens=sample_tokens,
            seed=seed,
            output=output,
            dtype=dtype,
            device=device,
            engine=settings,
        )
        evaluate.run(chosen, Console())
