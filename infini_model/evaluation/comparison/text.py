"""A comparison as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from infini_model.evaluation.comparison.compare import Comparison, Difference, Spread
from infini_model.evaluation.comparison.runs import ComparedRun
from infini_model.evaluation.reporting.markdown import picture, table
from infini_model.runtime.runs import VALIDATION_LOSS

# Of a run without a value.
MISSING = "–"
EVALUATION = "evaluation/"
LOSSES = ("_loss", "/loss")
WHOLE_NUMBERS = ("steps", "tokens", "tokens per second")


def markdown(comparison: Comparison, curves: Path | None, folder: Path) -> str:
    """The comparison as Markdown, for a file in `folder`; `curves` is the picture of the losses."""
    runs = comparison.runs
    sections = [f"# Comparison of {len(runs)} runs" if len(runs) > 1 else f"# {runs[0].name}"]
    sections += [_bullets(list(_summary(comparison)))]
    if comparison.notes:
        sections += ["## Not finished or not comparable", _bullets(comparison.notes)]
    sections += ["## Settings that differ", _settings(comparison)]
    if comparison.has_seeds:
        sections += ["## Results by settings", _by_settings(comparison)]
    if curves is not None:
        sections += ["## Curves", picture("Validation and training loss", curves, folder)]
    sections += ["## Results by run", _results(comparison), "## Repeat", _command(comparison)]
    return "\n\n".join(filter(None, sections)) + "\n"


def _command(comparison: Comparison) -> str:
    """The command that writes the comparison anew, with runs by name if they share a folder."""
    folders = {run.run_dir.parent for run in comparison.runs}
    words = [str(run.run_dir) for run in comparison.runs]
    if len(folders) == 1:
        words = [run.name for run in comparison.runs]
        words += ["--output-dir", str(folders.pop().parent)]
    return f"```sh\n{shlex.join(['infini', 'compare', *words])}\n```"


def result(run: ComparedRun, metric: str) -> str:
    """A result of a run as text, with its interval if it has one."""
    if metric not in run.results:
        return MISSING
    text = number(run.results[metric], metric)
    if metric not in run.intervals:
        return text
    low, high = run.intervals[metric]
    return f"{text} ({number(low, metric)} to {number(high, metric)})"


def number(value: float, metric: str) -> str:
    """A value of a metric as text."""
    return f"{value:,.0f}" if metric in WHOLE_NUMBERS else f"{value:,.4f}"


def verdict(difference: Difference) -> str:
    """A sentence on the losses of a group against those of the control."""
    values = list(difference.by_seed.values())
    spread = Spread.of(values)
    word = "lower" if spread.mean < 0 else "higher"
    size = f"{abs(spread.mean):.4f}"
    found = "the same to four places as" if float(size) == 0.0 else f"{size} {word} than"
    sentence = (
        f"The validation loss of {difference.group.label} is {found} that of "
        f"{difference.control.label}"
    )
    if len(values) == 1:
        return f"{sentence}, with the same seed."
    agreeing = sum((value < 0) == (spread.mean < 0) for value in values)
    return (
        f"{sentence}, on average over {len(values)} seeds ({spread.low:+.4f} to "
        f"{spread.high:+.4f}); it is {word} with {agreeing} of {len(values)}."
    )


def _summary(comparison: Comparison) -> Iterator[str]:
    yield from map(verdict, comparison.differences)
    if comparison.differences and not comparison.has_seeds:
        yield (
            "One seed each says little: repeat the runs with other seeds before you rely on a "
            "small difference."
        )
    if not any(VALIDATION_LOSS in run.results for run in comparison.runs):
        yield "No run has been evaluated yet, so there are no losses to compare."


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _cell(text: str) -> str:
    """Text for a cell of a table, as code."""
    return f"`{text}`".replace("|", "\\|") if text != MISSING else text


def _settings(comparison: Comparison) -> str:
    if not comparison.differing:
        return "All settings are the same, apart from names and places."
    rows = [
        [_cell(key), *(_cell(MISSING if value is None else value) for value in values)]
        for key, values in comparison.differing.items()
    ]
    return table(["Setting", *comparison.names], rows)


def metrics_of(comparison: Comparison) -> list[str]:
    """All metrics of the runs: what is compared first, then losses, then the other evaluations."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.results)

    def rank(name: str) -> tuple[bool, bool, bool]:
        is_loss = name.endswith(LOSSES)
        return name != VALIDATION_LOSS, not is_loss, not name.startswith(EVALUATION)

    return sorted(names, key=rank)


def _results(comparison: Comparison) -> str:
    rows = [
        [_cell(metric), *(result(run, metric) for run in comparison.runs)]
        for metric in metrics_of(comparison)
    ]
    return table(["Metric", *comparison.names], rows)


def _by_settings(comparison: Comparison) -> str:
    """Mean and range over seeds."""
    rows = []
    for metric in metrics_of(comparison):
        cells = []
        for group in comparison.groups:
            spread = group.spread(metric)
            if spread is None:
                cells.append(MISSING)
                continue
            mean, low, high = (number(value, metric) for value in spread)
            cells.append(mean if low == high else f"{mean} ({low} to {high})")
        rows.append([_cell(metric), *cells])
    seeds = ["Seeds", *(str(len(group.samples)) for group in comparison.groups)]
    labels = [group.label for group in comparison.groups]
    note = "Mean over the seeds, and the lowest and highest value."
    return f"{table(['Metric', *labels], [seeds, *rows])}\n\n{note}"
