"""Measure how close gradients of sparse attention are to dense ones: SmolLM2-135M on real text.

    python benchmarks/fidelity.py                    # about 90 seconds on an H200
    python benchmarks/fidelity.py --tokens 2048 --samples 1 --rules mass --budgets 8    # to try it on a CPU
    python benchmarks/fidelity.py --summaries float8    # page means in float8, as in 16-bit models

Compares the engine with a page budget to the same engine without one, in float32: cosine and relative error of all
parameter gradients, cosine of those of attention's q and k weights, and the difference of the loss. smollm2.py says
where the weights come from. The texts are modules of the standard library and the language reference that comes with
Python, so every machine has them, with small differences between versions. `--prose FILE` reads other prose.

Prints a table and writes fidelity_smollm2.json (or fidelity_smollm2_float8.json) with a plot. Exit code 1 if a budget
that covers every page does not give the dense gradient, or if a cosine misses its target.
"""

from __future__ import annotations

import inspect
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import smollm2
import torch
import typer
from common import OUT, Device, Gguf, Log, new_figure, save, save_figure
from rich.table import Table
from torch import Tensor, nn

from oomb.config import MEANS_OF_RULE, Config
from oomb.engine.engine import Engine
from oomb.utils import metrics
from oomb.utils.units import parse_list

SOURCE, PROSE = "source", "prose"
MODULES = (("argparse",), ("textwrap", "shlex", "string", "bisect", "configparser"), ("tarfile",))
"""Modules whose source makes up each sample."""
MEASURES = ("cosine", "error", "qk_cosine", "loss_difference")
ASKED_TOKENS = 8192
ASKED = (("mass", 16, SOURCE, 0.965), ("mass", 8, SOURCE, 0.93), ("mass", 8, PROSE, 0.90))
"""Targets at that number of tokens: rule, budget, kind of text and smallest cosine."""
MOST_ERROR = 1e-4
"""Largest relative error of gradient and loss if every page is read: about twenty times float32's rounding error."""
FUSE = "off"
"""Compiling would take longer than the forty steps of this small model."""
COLORS = {"mass": "tab:blue", "paper": "tab:orange"}
LINES = {SOURCE: "-", PROSE: "--"}
SUMMARIES = {"float32": torch.float32, "float8": torch.float8_e4m3fn}
"""Precision of the page means: that of the model, or the one used in 16-bit models."""
OUTS = {name: OUT / f"fidelity_smollm2{end}.json" for name, end in zip(SUMMARIES, ("", "_float8"))}


@dataclass(frozen=True)
class Text:
    """A tokenized sample of source or prose."""

    kind: str
    name: str
    ids: Tensor

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "sha256_of_ids": sha256(self.ids.numpy().tobytes()).hexdigest()}


@dataclass(kw_only=True)
class Row:
    """Results of a rule and budget on one kind of text."""

    rule: str
    budget: int
    kind: str
    reads_all: bool
    """The budget covers every page, so gradients must be dense except for rounding."""
    samples: list[dict[str, float]] = field(default_factory=list)

    def mean(self, measure: str) -> float:
        return statistics.fmean(sample[measure] for sample in self.samples)

    @property
    def is_dense(self) -> bool:
        # NaN compares as false, so it counts as wrong.
        return all(
            s["error"] <= MOST_ERROR and abs(s["loss_difference"]) <= MOST_ERROR * s["loss"] for s in self.samples
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": {measure: self.mean(measure) for measure in MEASURES}}


def source(sample: int) -> str:
    return "\n\n".join(inspect.getsource(import_module(name)) for name in MODULES[sample])


def python_prose() -> str:
    """Return the paragraphs of Python's language reference that are prose, without duplicates."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no language reference: pass a text file as --prose") from None
    paragraphs: dict[str, None] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            words = paragraph.split()
            if len(words) >= 20 and words[0][0].isupper() and words[-1].endswith("."):
                paragraphs[" ".join(words)] = None
    return "\n\n".join(paragraphs)


def read_texts(tokenizer: Any, num_tokens: int, num_samples: int, prose_file: Path | None) -> list[Text]:
    """Return samples of both kinds with `num_tokens` each. Prose samples are consecutive parts of one text."""
    if not 1 <= num_samples <= len(MODULES):
        raise ValueError(f"--samples is {num_samples}; it must be between 1 and {len(MODULES)}")
    prose = python_prose() if prose_file is None else prose_file.read_text(encoding="utf-8")
    prose_name = "Python's language reference" if prose_file is None else prose_file.name
    encoded = [(SOURCE, ", ".join(MODULES[i]), source(i), 0) for i in range(num_samples)]
    encoded += [(PROSE, f"{prose_name}, part {i + 1}", prose, i * num_tokens) for i in range(num_samples)]
    texts = []
    for kind, name, text, start in encoded:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][:, start:]
        if ids.shape[1] < num_tokens:
            raise ValueError(
                f"{name} has {ids.shape[1]} tokens from token {start} on, but a sample needs {num_tokens}: lower "
                "--tokens or --samples, or pass a longer text as --prose"
            )
        texts.append(Text(kind, name, ids[:, :num_tokens]))
    return texts


def store_summaries(engine: Engine, dtype: torch.dtype) -> None:
    """Make the engine store page means in `dtype`. It has no setting for this: it follows the model's precision."""
    allocator: Any = engine.allocator
    selection_spec = allocator._selection_spec

    def with_dtype() -> Any:
        spec = selection_spec()
        return None if spec is None else replace(spec, means_dtype=dtype)

    allocator._selection_spec = with_dtype


def gradient(
    network: nn.Module, ids: Tensor, config: Config, summaries: torch.dtype | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the engine's loss and gradients, with page means in a given precision or the engine's choice."""
    network.zero_grad(set_to_none=True)
    engine = Engine(network, config)
    if summaries is not None:
        store_summaries(engine, summaries)
    loss = engine.loss(ids)
    loss.backward()
    engine.release()
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return float(loss.detach()), grads


def compare(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Return cosine and relative error over all parameters, and the cosine over q and k weights."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dtype=torch.float64)

    sums = torch.stack(
        [
            torch.stack([dot(grads[name], ref), dot(grads[name], grads[name]), dot(ref, ref), dot(off, off)])
            for name, given in reference.items()
            for ref in [given.to(grads[name].device)]
            for off in [grads[name] - ref]
        ]
    ).cpu()
    is_qk = torch.tensor([".q_proj." in name or ".k_proj." in name for name in reference])
    along, length, ref_length, off = sums.sum(0)
    qk_along, qk_length, qk_ref_length, _ = sums[is_qk].sum(0)
    return {
        "cosine": float(along / (length * ref_length).sqrt()),
        "error": float((off / ref_length).sqrt()),
        "qk_cosine": float(qk_along / (qk_length * qk_ref_length).sqrt()),
    }


def measure(
    network: nn.Module,
    texts: Sequence[Text],
    *,
    rules: Sequence[str],
    budgets: Sequence[int],
    chunk_size: int,
    page_size: int,
    summaries: str = "float32",
    on_sample: Callable[[str], None] = lambda message: None,
) -> list[Row]:
    """Compare every rule and budget, and "mass" with all pages, with dense training on the same text."""
    shape = {"chunk_size": chunk_size, "page_size": page_size, "fuse": FUSE}
    # Past pages are those of complete chunks.
    all_pages = (max(text.ids.shape[1] for text in texts) - 1) // chunk_size * chunk_size // page_size
    settings = [*product(rules, budgets), ("mass", all_pages)]
    rows = [
        Row(rule=rule, budget=budget, kind=kind, reads_all=budget >= all_pages)
        for kind in dict.fromkeys(text.kind for text in texts)
        for rule, budget in dict.fromkeys(settings)
    ]
    for text in texts:
        dense_loss, dense = gradient(network, text.ids, Config.from_dict(shape))
        on_sample(f"{text.kind}, {text.name}: dense loss {dense_loss:.4f}")
        for row in (row for row in rows if row.kind == text.kind):
            config = Config.from_dict({**shape, "page_rule": row.rule, "page_budget": row.budget})
            loss, grads = gradient(network, text.ids, config, SUMMARIES[summaries])
            sample = {**compare(grads, dense), "loss_difference": loss - dense_loss, "loss": dense_loss}
            row.samples.append(sample)
            on_sample(
                f"{text.kind}, {text.name}: {row.rule}, {row.budget} pages: cosine {sample['cosine']:.5f}, "
                f"error {sample['error']:.2e}"
            )
    return rows


def asked(rows: Sequence[Row], num_tokens: int) -> list[dict[str, Any]]:
    """Return all targets and whether they are reached; None for those that were not measured."""
    answers: list[dict[str, Any]] = []
    for rule, budget, kind, at_least in ASKED:
        found = [row.mean("cosine") for row in rows if (row.rule, row.budget, row.kind) == (rule, budget, kind)]
        cosine = found[0] if found and num_tokens == ASKED_TOKENS else None
        reached = None if cosine is None else cosine >= at_least
        answers.append({"rule": rule, "budget": budget, "kind": kind, "tokens": ASKED_TOKENS,
                        "at_least": at_least, "cosine": cosine, "reached": reached})  # fmt: skip
    return answers


def is_right(rows: Sequence[Row], answers: Sequence[dict[str, Any]]) -> bool:
    return all(row.is_dense for row in rows if row.reads_all) and all(a["reached"] is not False for a in answers)


def name_of(row: Row) -> str:
    return f"{row.rule}, all pages" if row.reads_all else f"{row.rule}, {row.budget}"


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title)
    for column in ("text", "rule, pages", "cosine", "lowest", "error", "cosine of q, k", "loss difference"):
        shown.add_column(column, justify="left" if column in ("text", "rule, pages") else "right")
    for row in rows:
        wrong = " WRONG: not dense" if row.reads_all and not row.is_dense else ""
        shown.add_row(
            row.kind,
            name_of(row) + wrong,
            f"{row.mean('cosine'):.4f}",
            f"{min(sample['cosine'] for sample in row.samples):.4f}",
            f"{row.mean('error'):.4f}" if not row.reads_all else f"{row.mean('error'):.1e}",
            f"{row.mean('qk_cosine'):.4f}",
            f"{row.mean('loss_difference'):+.4f}",
            end_section=row.reads_all,
        )
    return shown


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot cosine over budget, with a line for each rule and kind of text."""
    settings = record["settings"]
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        if not row["reads_all"]:
            lines.setdefault((row["rule"], row["kind"]), []).append(row)
    for (rule, kind), rows in lines.items():
        rows.sort(key=lambda row: row["budget"])
        budgets = [row["budget"] for row in rows]
        cosines = [row["mean"]["cosine"] for row in rows]
        axes.plot(budgets, cosines, color=COLORS[rule], linestyle=LINES[kind], marker="o", label=f"{rule}, {kind}")
        for row in rows:
            values = [sample["cosine"] for sample in row["samples"]]
            axes.plot([row["budget"]] * len(values), values, ".", color=COLORS[rule], alpha=0.5, markersize=4)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["budget"] for rows in lines.values() for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_title(f"{record['model']}, {settings['tokens']:,} tokens")
    axes.set_xlabel(f"pages of {settings['page_size']} tokens that a query tile reads, besides its own chunk")
    axes.set_ylabel("cosine with the dense gradient")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw(record: dict[str, Any], out: Path, log: Log) -> None:
    try:
        plot(record, out.with_suffix(".png"))
    except ImportError:
        log.console.print(f"the plot needs matplotlib: pip install matplotlib, then run with --redraw --out {out}")
    else:
        log.console.print(f"written to {out.with_suffix('.png')}")


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of a sample; the model was trained for 8192.")] = ASKED_TOKENS,
    samples: Annotated[int, typer.Option(help=f"Samples of each kind of text, up to {len(MODULES)}.")] = 2,
    rules: Annotated[str, typer.Option(help=f"Page rules, of {','.join(MEANS_OF_RULE)}.")] = "mass,paper",
    budgets: Annotated[str, typer.Option(help="Page budgets.")] = "4,8,16,32",
    chunk_size: Annotated[int, typer.Option(help="Tokens per chunk.")] = 512,
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 64,
    summaries: Annotated[str, typer.Option(help=f"Precision of the page means: {' or '.join(SUMMARIES)}.")] = "float32",
    gguf: Gguf = None,
    prose: Annotated[Path | None, typer.Option(help="A text file. Default: Python's language reference.")] = None,
    device: Device = "auto",
    redraw: Annotated[bool, typer.Option("--redraw", help="Only plot the results in --out again.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Output file. Default: {OUTS['float32']} or {OUTS['float8'].name}.")
    ] = None,
) -> None:
    log = Log(width=130)
    if summaries not in SUMMARIES:
        raise typer.BadParameter(f"--summaries is {summaries!r}; it must be {' or '.join(SUMMARIES)}")
    out = out or OUTS[summaries]
    if redraw:
        return draw(json.loads(out.read_text()), out, log)
    # TF32 products would add an error of their own.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    shape = {"chunk_size": chunk_size, "page_size": page_size}
    try:
        rule_list, budget_list = parse_list(rules, str.strip), parse_list(budgets, int)
        # Check rules, budgets and sizes before loading the weights.
        for rule, budget in product(rule_list, budget_list):
            Config.from_dict({**shape, "page_rule": rule, "page_budget": budget})
        if tokens <= chunk_size:
            raise ValueError(f"{tokens} tokens are one chunk of {chunk_size} and have no past: increase --tokens")
        network, tokenizer = smollm2.load(gguf, device)
        texts = read_texts(tokenizer, tokens, samples, prose)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    log("loaded weights and texts")
    rows = measure(network, texts, rules=rule_list, budgets=budget_list, summaries=summaries, on_sample=log,
                   **shape)  # fmt: skip
    answers = asked(rows, tokens)
    settings = {"tokens": tokens, "samples": samples, "rules": rule_list, "budgets": budget_list, **shape,
                "summaries": summaries, "fuse": FUSE, "dtype": "float32", "tf32": False,
                "device": str(network.device)}  # fmt: skip
    record = {
        "model": "SmolLM2-135M",
        "weights": smollm2.WEIGHTS,
        "settings": settings,
        "asked": answers,
        "is_right": is_right(rows, answers),
        "texts": [text.as_dict() for text in texts],
        "rows": [row.as_dict() for row in rows],
        "machine": metrics.machine(),
    }
    save(record, out)
    log.console.print(table(rows, f"SmolLM2-135M, {tokens:,} tokens: sparse compared with dense gradients"))
    for answer in answers:
        verdict = {True: "reached", False: "NOT REACHED", None: "not measured"}[answer["reached"]]
        log.console.print("{rule}, {budget} pages, {kind}: target cosine {at_least}: ".format(**answer) + verdict)
    log.console.print(f"written to {out} after {log.seconds:.0f} s")
    draw(record, out, log)
    raise typer.Exit(0 if record["is_right"] else 1)


if __name__ == "__main__":
    typer.run(main)
