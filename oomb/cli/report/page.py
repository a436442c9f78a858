"""Write the page of a run: one HTML file that loads nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path

from oomb import __version__
from oomb.cli.report.charts import WHEN, training_charts
from oomb.cli.report.events import METRICS, Run, dictionary, number, read_eval, read_run
from oomb.cli.report.html import charts, compared, evaluation, samples, settings, steps, tiers
from oomb.cli.report.style import STYLE
from oomb.utils import files
from oomb.utils.units import gib, seconds

LAST_STEPS = 5
"""The final training loss is the mean over this many steps, since the loss of a single step is noisy."""


def write_report(
    run_dir: str | Path,
    *,
    before: str | Path | None = None,
    after: str | Path | None = None,
    output: str | Path | None = None,
) -> Path:
    """Write the page of a run, replacing an older one atomically, and return its path.

    Args:
        run_dir: The `output_dir` of `oomb train`.
        before: A JSON file from `oomb eval` of the model before training, for a run that recorded no evaluation.
        after: The same for the model after training.
        output: Where to write the page. Default: `report.html` in the folder of the run.

    Raises:
        ValueError: There is no run, a file is not from `oomb eval`, or `output` is a folder.
    """
    run = load(run_dir, before=before, after=after)
    path = Path(run_dir).expanduser() / "report.html" if output is None else Path(output).expanduser()
    if path.is_dir():
        raise ValueError(f"{path} is a folder: pass a file name, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_file(path) as file:
        # JSON can spell a lone surrogate, which UTF-8 cannot encode.
        file.write(page(run).encode("utf-8", errors="replace"))
    return path


def load(run_dir: str | Path, *, before: str | Path | None, after: str | Path | None) -> Run:
    """Read a run and add evaluations from files of `oomb eval`."""
    run = read_run(run_dir)
    for when, path in (("before", before), ("after", after)):
        if path is not None:
            found = read_eval(path)
            run.evals[when] = found
            if isinstance(found.get("sample"), dict):
                run.samples[when] = found["sample"]
    return run


def page(run: Run) -> str:
    """Return the page as HTML."""
    model, dataset = (str(run.settings.get(key, "?")) for key in ("model_name_or_path", "dataset"))
    sections = [
        _section("Training", charts(training_charts(run))),
        _section("Compared with standard training", compared(run)),
        _section("Memory by tier", tiers(run)),
        _section("Evaluation", evaluation(run)),
        _section("Text before and after", samples(run)),
        _section("Settings and machine", settings(run)),
        _section("Steps", steps(run)),
    ]
    title = escape(f"{run.name}: {model} on {dataset}")
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # The page contains text that a model wrote, so run no script and fetch nothing, whatever it says.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            'img-src data:">',
            f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>',
            f'<header>\n<h1>{escape(model)} on {escape(dataset)}</h1>\n<p class="soft">{escape(_subtitle(run))}</p>',
            *(f'<p class="note">{escape(note)}</p>' for note in _notes(run)),
            f"{_figures(run)}\n</header>\n<main>",
            *filter(None, sections),
            f"</main>\n<footer>Written by oomb {__version__} from {METRICS}.</footer>\n</body>\n</html>\n",
        ]
    )


def _subtitle(run: Run) -> str:
    parts = [f"run {run.name}", run.status]
    length = number(run.settings.get("max_length"))
    if length:
        parts.append(f"context of {length:,.0f} tokens")
    if run.resumed_at:
        parts.append("resumed at step " + ", ".join(f"{step:,}" for step in run.resumed_at))
    return " · ".join(parts)


def _notes(run: Run) -> list[str]:
    notes = []
    if run.error is not None:
        notes.append(f"An error ended training: {run.error}")
    if not run.steps:
        notes.append("This run has no finished step yet, so there are no curves.")
    if run.unread:
        where = ", ".join(map(str, run.unread[:5])) + (", …" if len(run.unread) > 5 else "")
        notes.append(f"{len(run.unread)} of the lines of {METRICS} could not be read and are left out (line {where}).")
    num_not_finite = sum(1 for _, loss in run.series("loss") if number(loss) is None)
    if num_not_finite:
        notes.append(f"The loss was not a finite number in {num_not_finite} of {len(run.steps)} steps.")
    return notes


def _figures(run: Run) -> str:
    """Return the key figures at the top of the page."""
    found: list[tuple[str, str, str]] = []
    losses = [loss for _, loss in run.series("loss") if number(loss) is not None]
    if losses:
        last = losses[-LAST_STEPS:]
        found.append(
            ("training loss", f"{losses[0]:.3f} → {sum(last) / len(last):.3f}", f"mean of the last {len(last)}")
        )
    if run.held_out:
        ends = [run.held_out[0], *run.held_out[1:][-1:]]
        where = " → ".join(f"{step:,}" for step, _ in ends)
        found.append(("held-out loss", " → ".join(f"{loss:.3f}" for _, loss in ends), f"at step {where}"))
    scores = {when: dictionary(run.evals[when].get("needle")) for when in WHEN if when in run.evals}
    accuracies = [value for score in scores.values() if (value := number(score.get("accuracy"))) is not None]
    if accuracies:
        chance = next((c for score in scores.values() if (c := number(score.get("chance"))) is not None), None)
        hint = "" if chance is None else f"chance is {chance:.0%}"
        found.append(("needles found", " → ".join(f"{value:.0%}" for value in accuracies), hint))
    if run.steps:
        found.append(("steps", f"{len(run.steps):,}", f"up to step {run.steps[-1]['step']:,}"))
    if run.num_tokens is not None:
        found.append(("tokens", f"{run.num_tokens:,}", "trained on"))
    if run.tokens_per_second is not None:
        found.append(("speed", f"{run.tokens_per_second:,.0f} tokens/s", "without the first step"))
    if run.seconds is not None:
        found.append(("time in steps", seconds(run.seconds), ""))
    peaks = [value for _, value in run.series("peak_memory_bytes") if number(value) is not None]
    if peaks:
        found.append(("peak memory", gib(max(peaks)), "GPU" if run.on_gpu else "process (RSS)"))
    rows = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(hint)}</small>' if hint else ''}</dd></div>"
        for name, value, hint in found
    )
    return f'<dl class="figures">{"".join(rows)}</dl>' if found else ""


def _section(title: str, body: str) -> str:
    key = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(title)}</h2>\n{body}\n</section>' if body else ""
