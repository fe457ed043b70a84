"""The page of a comparison: what was found, the settings that differ, and all results.

Markdown, the same as one HTML file, and a picture of the losses.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from infini_model.evaluation.compare import ComparedRun, Comparison, Difference, Group, spread
from infini_model.evaluation.pages import bullets, estimate, picture, table, write_pages
from infini_model.evaluation.plots import plot_runs
from infini_model.runtime.runs import VALIDATION_LOSS
from infini_model.runtime.storage import content_key

# Longest name of a folder that is made of the names of all runs.
NAME_LENGTH = 80
WHOLE_NUMBERS = ("steps", "tokens", "tokens per second")
# Of a run without a value.
MISSING = "–"


class Files(NamedTuple):
    """What was written: Markdown, HTML, and the picture of the losses if there are any."""

    markdown: Path
    html: Path
    curves: Path | None


def write_comparison(comparison: Comparison, comparisons_dir: Path) -> Files:
    """Write `comparison.md`, a self-contained `comparison.html` and `loss.png`.

    Their folder in `comparisons_dir` is named after the runs. Raises `UserError` if it cannot be
    written.
    """
    folder = comparisons_dir / comparison_name([run.name for run in comparison.runs])
    labels = comparison.names
    if comparison.has_seeds:
        labels = [
            each.label for run in comparison.runs for each in comparison.groups if run in each.runs
        ]
    drawn = [(label, run.lines) for label, run in zip(labels, comparison.runs, strict=True)]
    curves = plot_runs(drawn, folder / "loss.png")
    text = _text(comparison, curves, folder)
    title = text.partition("\n")[0].removeprefix("# ")
    files = Files(folder / "comparison.md", folder / "comparison.html", curves)
    write_pages(text, title, files.markdown, files.html, [curves] if curves else [])
    return files


def comparison_name(names: Sequence[str]) -> str:
    """A name for the comparison of these runs, which another set of runs does not have."""
    joined = "-vs-".join(names)
    if len(joined) <= NAME_LENGTH:
        return joined
    words = zip(*(name.split("-") for name in names), strict=False)
    common = "-".join(each[0] for each in takewhile(lambda each: len({*each}) == 1, words))
    key = content_key(list(names))[:8]
    return f"{(common or names[0])[:NAME_LENGTH]}-{len(names)}-runs-{key}"


def _text(comparison: Comparison, curves: Path | None, folder: Path) -> str:
    """The comparison as Markdown, for a file in `folder`; `curves` is the picture of the losses."""
    runs, metrics = comparison.runs, _metrics(comparison)
    sections = [f"# Comparison of {len(runs)} runs" if len(runs) > 1 else f"# {runs[0].name}"]
    sections += [bullets([*_summary(comparison)])]
    if comparison.notes:
        sections += ["## Not finished or not comparable", bullets(comparison.notes)]
    settings = "All settings are the same, apart from names and places."
    if comparison.differing:
        rows = [
            [_cell(key), *(_cell(MISSING if value is None else value) for value in values)]
            for key, values in comparison.differing.items()
        ]
        settings = table(["Setting", *comparison.names], rows)
    sections += ["## Settings that differ", settings]
    if comparison.has_seeds:
        counts = ["Seeds", *(str(len(group.samples)) for group in comparison.groups)]
        rows = [
            [_cell(metric), *(_spread(group, metric) for group in comparison.groups)]
            for metric in metrics
        ]
        header = ["Metric", *(group.label for group in comparison.groups)]
        note = "Mean over the seeds, and the lowest and highest value."
        sections += ["## Results by settings", table(header, [counts, *rows]), note]
    if curves is not None:
        sections += ["## Curves", picture("Validation and training loss", curves, folder)]
    rows = [[_cell(metric), *(result(run, metric) for run in runs)] for metric in metrics]
    sections += ["## Results by run", table(["Metric", *comparison.names], rows)]
    # Runs by name if they share a folder.
    folders, words = {run.run_dir.parent for run in runs}, [str(run.run_dir) for run in runs]
    if len(folders) == 1:
        words = [*(run.name for run in runs), "--output-dir", str(folders.pop().parent)]
    sections += ["## Repeat", f"```sh\n{shlex.join(['infini', 'compare', *words])}\n```"]
    return "\n\n".join(filter(None, sections)) + "\n"


def _metrics(comparison: Comparison) -> list[str]:
    """All metrics of the runs: what is compared first, then losses, then the other evaluations."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.results)

    def rank(name: str) -> tuple[bool, bool, bool]:
        is_loss = name.endswith(("_loss", "/loss"))
        return name != VALIDATION_LOSS, not is_loss, not name.startswith("evaluation/")

    return sorted(names, key=rank)


def _summary(comparison: Comparison) -> Iterator[str]:
    yield from map(verdict, comparison.differences)
    if comparison.differences and not comparison.has_seeds:
        yield (
            "One seed each says little: repeat the runs with other seeds before you rely on a "
            "small difference."
        )
    if not any(VALIDATION_LOSS in run.results for run in comparison.runs):
        yield "No run has been evaluated yet, so there are no losses to compare."


def verdict(difference: Difference) -> str:
    """A sentence on the losses of a group against those of the control."""
    values = list(difference.by_seed.values())
    mean, low, high = spread(values)
    word = "lower" if mean < 0 else "higher"
    size = f"{abs(mean):.4f}"
    found = "the same to four places as" if float(size) == 0.0 else f"{size} {word} than"
    sentence = (
        f"The validation loss of {difference.group.label} is {found} that of "
        f"{difference.control.label}"
    )
    if len(values) == 1:
        return f"{sentence}, with the same seed."
    agreeing = sum((value < 0) == (mean < 0) for value in values)
    return (
        f"{sentence}, on average over {len(values)} seeds ({low:+.4f} to {high:+.4f}); it is "
        f"{word} with {agreeing} of {len(values)}."
    )


def result(run: ComparedRun, metric: str) -> str:
    """A result of a run as text, with its interval if it has one."""
    if metric not in run.results:
        return MISSING
    return _shown(metric, run.results[metric], run.intervals.get(metric, ()))


def _spread(group: Group, metric: str) -> str:
    """The mean of a metric over the seeds, with its range if that is one."""
    if not (values := group.values(metric)):
        return MISSING
    mean, *ends = spread(values)
    is_one = _shown(metric, ends[0]) == _shown(metric, ends[1])
    return _shown(metric, mean, () if is_one else ends)


def _shown(metric: str, value: float, ends: Iterable[float] = ()) -> str:
    return estimate(value, ends, 0 if metric in WHOLE_NUMBERS else 4)


def _cell(text: str) -> str:
    """Text for a cell of a table, as code."""
    return f"`{text}`".replace("|", "\\|") if text != MISSING else text
