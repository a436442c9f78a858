"""How well training with chosen pages keeps the gradient of dense training: SmolLM2-135M on real text.

    python benchmarks/fidelity.py                    # about 90 seconds on an H200
    python benchmarks/fidelity.py --tokens 2048 --samples 1 --rules mass --budgets 8    # to try it on a CPU
    python benchmarks/fidelity.py --summaries float8    # pages are chosen by means in 8 bits, as in 16-bit models

The engine with a budget of pages against the same engine without one, in float32: cosine and relative error of the
gradient of all parameters, cosine of that of attention's q and k weights, difference of the loss. The weights are 4-bit
weights of the Instruct model, dequantised (benchmarks/smollm2.py says where to get them). The source is that of modules
of the standard library, the prose is the language reference that comes with Python: both are on every machine, and
differ a little from one version of Python to the next. `--prose FILE` takes other prose.

Prints a table, writes a JSON and a picture beside it. Ends with exit code 1 if a budget that covers every page does not
give the dense gradient, or if the cosine is below what is asked for.
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
"""A sample of source is the start of these, one after the other."""
MEASURES = ("cosine", "error", "qk_cosine", "loss_difference")
ASKED_TOKENS = 8192
ASKED = (("mass", 16, SOURCE, 0.965), ("mass", 8, SOURCE, 0.93), ("mass", 8, PROSE, 0.90))
"""Rule, budget, kind of text and the least cosine, at so many tokens."""
MOST_ERROR = 1e-4
"""Of the gradient and of the loss, relative, where every page is read: some twenty times float32's rounding there."""
FUSE = "off"
"""Forty steps of a small model are over before compiling its layers would be."""
COLORS = {"mass": "tab:blue", "paper": "tab:orange"}
LINES = {SOURCE: "-", PROSE: "--"}
SUMMARIES = {"float32": torch.float32, "float8": torch.float8_e4m3fn}
"""What the means of keys are stored in by which pages are chosen: as the model computes, or as where it computes in 16
bits."""
OUTS = {name: OUT / f"fidelity_smollm2{end}.json" for name, end in zip(SUMMARIES, ("", "_float8"))}


@dataclass(frozen=True)
class Text:
    kind: str
    name: str
    ids: Tensor

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "sha256_of_ids": sha256(self.ids.numpy().tobytes()).hexdigest()}


@dataclass(kw_only=True)
class Row:
    """A rule with a budget on one kind of text, sample by sample."""

    rule: str
    budget: int
    kind: str
    reads_all: bool
    """The budget covers every page: to be dense to rounding."""
    samples: list[dict[str, float]] = field(default_factory=list)

    def mean(self, measure: str) -> float:
        return statistics.fmean(sample[measure] for sample in self.samples)

    @property
    def is_dense(self) -> bool:
        # Written so that NaN, which compares as false, counts as wrong.
        return all(
            s["error"] <= MOST_ERROR and abs(s["loss_difference"]) <= MOST_ERROR * s["loss"] for s in self.samples
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": {measure: self.mean(measure) for measure in MEASURES}}


def source(sample: int) -> str:
    return "\n\n".join(inspect.getsource(import_module(name)) for name in MODULES[sample])


def python_prose() -> str:
    """The paragraphs of Python's language reference that are sentences: no code, no headings, nothing twice."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python comes without its language reference; name some prose with --prose") from None
    paragraphs: dict[str, None] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            words = paragraph.split()
            if len(words) >= 20 and words[0][0].isupper() and words[-1].endswith("."):
                paragraphs[" ".join(words)] = None
    return "\n\n".join(paragraphs)


def read_texts(tokenizer: Any, num_tokens: int, num_samples: int, prose_file: Path | None) -> list[Text]:
    """Samples of both kinds, `num_tokens` each; those of prose follow one another in one text."""
    if not 1 <= num_samples <= len(MODULES):
        raise ValueError(f"--samples {num_samples}: there are 1 to {len(MODULES)} of each kind")
    prose = python_prose() if prose_file is None else prose_file.read_text(encoding="utf-8")
    prose_name = "Python's language reference" if prose_file is None else prose_file.name
    encoded = [(SOURCE, ", ".join(MODULES[i]), source(i), 0) for i in range(num_samples)]
    encoded += [(PROSE, f"{prose_name}, part {i + 1}", prose, i * num_tokens) for i in range(num_samples)]
    texts = []
    for kind, name, text, start in encoded:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][:, start:]
        if ids.shape[1] < num_tokens:
            raise ValueError(
                f"{name}: {ids.shape[1]} tokens from token {start} on, and {num_tokens} are needed; take fewer with "
                "--tokens or --samples, or a longer text with --prose"
            )
        texts.append(Text(kind, name, ids[:, :num_tokens]))
    return texts


def store_summaries(engine: Engine, dtype: torch.dtype) -> None:
    """Has the engine store them so. It is no setting: the engine takes what suits the precision of the model."""
    allocator: Any = engine.allocator
    selection_spec = allocator._selection_spec

    def with_dtype(layers: Any) -> Any:
        spec = selection_spec(layers)
        return None if spec is None else replace(spec, means_dtype=dtype)

    allocator._selection_spec = with_dtype


def gradient(
    network: nn.Module, ids: Tensor, config: Config, summaries: torch.dtype | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the engine, with summaries of pages in a given precision or as it decides."""
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
    """Of all parameters as one vector: its cosine with the reference and its relative error; cosine of q and k."""

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
    """Every rule with every budget, and "mass" with all pages, against dense training on the same text."""
    shape = {"chunk_size": chunk_size, "page_size": page_size, "fuse": FUSE}
    # Only whole chunks are ever behind a query.
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
    """What is asked for, and whether it is reached; None where that was not measured."""
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
    return f"{row.rule}, everything" if row.reads_all else f"{row.rule}, {row.budget}"


def table(rows: Sequence[Row], title: str) -> Table:
    shown = Table(title=title)
    for column in ("text", "rule, pages", "cosine", "lowest", "error", "cosine of q, k", "loss, more"):
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
    """Cosine against budget, a line for each rule and kind of text."""
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
    axes.set_xlabel(f"pages of {settings['page_size']} tokens that a tile reads, beside its own chunk")
    axes.set_ylabel("cosine with the dense gradient")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw(record: dict[str, Any], out: Path, log: Log) -> None:
    try:
        plot(record, out.with_suffix(".png"))
    except ImportError:
        log.console.print(f"no picture without matplotlib: pip install matplotlib, then --redraw --out {out}")
    else:
        log.console.print(f"drawn in {out.with_suffix('.png')}")


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of a sample; the model was made for 8192.")] = ASKED_TOKENS,
    samples: Annotated[int, typer.Option(help=f"Samples of each kind of text, up to {len(MODULES)}.")] = 2,
    rules: Annotated[str, typer.Option(help=f"Some of {','.join(MEANS_OF_RULE)}.")] = "mass,paper",
    budgets: Annotated[str, typer.Option(help="Numbers of pages.")] = "4,8,16,32",
    chunk_size: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 512,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    summaries: Annotated[
        str, typer.Option(help=f"How the means that pages are chosen by are stored: {' or '.join(SUMMARIES)}.")
    ] = "float32",
    gguf: Gguf = None,
    prose: Annotated[Path | None, typer.Option(help="Prose; without it, that which comes with Python.")] = None,
    device: Device = "auto",
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the picture of --out again.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Where to write. Default: {OUTS['float32']}, or {OUTS['float8'].name} there.")
    ] = None,
) -> None:
    log = Log(width=130)
    if summaries not in SUMMARIES:
        raise typer.BadParameter(f"--summaries is {summaries!r}; it must be {' or '.join(SUMMARIES)}")
    out = out or OUTS[summaries]
    if redraw:
        return draw(json.loads(out.read_text()), out, log)
    # Rounded products would be a difference of their own.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    shape = {"chunk_size": chunk_size, "page_size": page_size}
    try:
        chosen_rules, chosen_budgets = parse_list(rules, str.strip), parse_list(budgets, int)
        # What is no rule, no budget or no size is refused before weights are loaded.
        for rule, budget in product(chosen_rules, chosen_budgets):
            Config.from_dict({**shape, "page_rule": rule, "page_budget": budget})
        if tokens <= chunk_size:
            raise ValueError(f"{tokens} tokens are one chunk of {chunk_size}, without a past; take more with --tokens")
        network, tokenizer = smollm2.load(gguf, device)
        texts = read_texts(tokenizer, tokens, samples, prose)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    log("weights and texts are loaded")
    rows = measure(network, texts, rules=chosen_rules, budgets=chosen_budgets, summaries=summaries, on_sample=log,
                   **shape)  # fmt: skip
    answers = asked(rows, tokens)
    settings = {"tokens": tokens, "samples": samples, "rules": chosen_rules, "budgets": chosen_budgets, **shape,
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
    log.console.print(table(rows, f"SmolLM2-135M, {tokens:,} tokens: the gradient against that of dense training"))
    for answer in answers:
        said = {True: "reached", False: "NOT REACHED", None: "not measured"}[answer["reached"]]
        log.console.print("{rule}, {budget} pages, {kind}: cosine of {at_least} or more: ".format(**answer) + said)
    log.console.print(f"written to {out} after {log.seconds:.0f} s")
    draw(record, out, log)
    raise typer.Exit(0 if record["is_right"] else 1)


if __name__ == "__main__":
    typer.run(main)
