"""Define `oomb verify`, which compares chunked with whole-sequence gradients."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from oomb.cli.errors import EXIT_NOT_TRUSTED, one_clear_message, quiet
from oomb.cli.options import MODEL_HELP, train_options, with_engine_options, with_options
from oomb.cli.train.schema import engine_settings
from oomb.models import load
from oomb.utils.units import parse_tokens


@with_engine_options("page_budget", "page_rule", chunk_size=512)
@with_options("loading", train_options("device", "trust_remote_code", "parallel"))
def verify(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    context: Annotated[str, typer.Option("--context", help="Sequence length, in tokens.")] = "2048",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="float64, float32, bfloat16 or float16. Half precision is compared with a float32 reference.",
        ),
    ] = "float32",
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Keep only the first N layers, for models that are too large for this machine."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the random tokens, and for a preset's weights.")] = 0,
    *,
    loading: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Compare chunked with whole-sequence gradients for every parameter of your model, on your machine.

    The reference is the model's own forward and autograd, without dropout. The last line is the verdict. Exit code 0
    means "trust it", 1 "do not trust", and 2 that the comparison failed. Under torchrun, several GPUs compute the
    gradients, and each compares them.
    """
    with one_clear_message():
        settings = engine_settings(engine)
        chunk_size = settings.pop("chunk_size")
        load.check_model_name(model)
        quiet()
        from oomb.cli.train.ranks import check_parallel, own_console
        from oomb.distributed.watch import ending_together
        from oomb.eval.verify import verify as compare

        check_parallel(loading["parallel"])
        with ending_together():
            comparison = compare(
                model,
                context=parse_tokens(context, "--context"),
                chunk_size=chunk_size,
                dtype=dtype,
                num_layers=layers,
                settings=settings,
                seed=seed,
                **loading,
            )
        console = own_console(Console())
        console.print(comparison.table())
        console.print(
            f"loss: {comparison.loss:.8f} in chunks, {comparison.whole_loss:.8f} for the whole sequence, "
            f"difference {abs(comparison.loss - comparison.whole_loss):.1e}",
            highlight=False,
            soft_wrap=True,
        )
        color = "green" if comparison.trusted else "red"
        console.print(f"[bold {color}]{escape(comparison.verdict)}[/]", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if comparison.trusted else EXIT_NOT_TRUSTED)
