"""The page of a comparison, in Markdown: findings, the settings that differ, and all results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from infini_model.evaluation.compare import ComparedRun, Comparison, Difference, Group, spread
from infini_model.evaluation.pages import bullets, estimate, table
from infini_model.runtime.runs import VALIDATION_LOSS
from infini_model.runtime.storage import atomic_file, content_key

# Longest name of a folder that is made of the names of all runs.
NAME_LENGTH = 80
WHOLE_NUMBERS = ("steps", "tokens", "tokens per second")
# Of a run without a value.
MISSING = "–"


def write_comparison(comparison: Comparison, comparisons_dir: Path) -> Path:
    """Write `comparison.md` into a folder of `comparisons_dir` named after the runs.

    Raises `UserError` if it cannot be written.
    """
    folder = comparisons_dir / comparison_name([run.name for run in comparison.runs])
    with atomic_file(folder / "comparison.md") as temporary:
        temporary.write_text(_text(comparison), encoding="utf-8")
    return folder / "comparison.md"


def comparison_name(names: Sequence[str]) -> str:
    """A name for the comparison of these runs, which another set of runs does not have."""
    joined = "-vs-".join(names)
    if len(joined) <= NAME_LENGTH:
        return joined
    key = content_key(list(names))[:8]
    return f"{names[0][:NAME_LENGTH]}-and-{len(names) - 1}-more-{key}"


def _text(comparison: Comparison) -> str:
    """The comparison as Markdown: what was found, the settings that differ, and all results."""
    runs, groups = comparison.runs, comparison.groups
    sections = [f"# Comparison of {len(runs)} runs" if len(runs) > 1 else f"# {runs[0].name}"]
    sections += [bullets([*findings(comparison)])]
    if comparison.notes:
        sections += ["## Not finished or not comparable", bullets(comparison.notes)]
    settings = "All settings are the same, apart from names and places."
    if comparison.differing:
        rows = [
            [_code(key), *(MISSING if value is None else _code(value) for value in values)]
            for key, values in comparison.differing.items()
        ]
        settings = table(["Setting", *comparison.names], rows)
    sections += ["## Settings that differ", settings]
    metrics = _metrics(runs)
    if comparison.has_seeds:
        rows = [["Seeds", *(str(len(group.samples)) for group in groups)]]
        rows += [[_code(metric), *(_spread(each, metric) for each in groups)] for metric in metrics]
        note = "Mean over the seeds, and the lowest and highest value."
        header = ["Metric", *(group.label for group in groups)]
        sections += ["## Results by settings", table(header, rows), note]
    rows = [[_code(metric), *(result(run, metric) for run in runs)] for metric in metrics]
    sections += ["## Results by run", table(["Metric", *comparison.names], rows)]
    return "\n\n".join(filter(None, sections)) + "\n"


def _metrics(runs: Sequence[ComparedRun]) -> list[str]:
    """All metrics of the runs: what is compared first, then losses, then the other evaluations."""
    names = dict.fromkeys(name for run in runs for name in run.results)

    def rank(name: str) -> tuple[bool, bool, bool]:
        is_loss = name.endswith(("_loss", "/loss"))
        return name != VALIDATION_LOSS, not is_loss, not name.startswith("evaluation/")

    return sorted(names, key=rank)


def findings(comparison: Comparison) -> Iterator[str]:
    """Sentences on what was found and how far to trust it."""
    yield from map(_verdict, comparison.differences)
    if comparison.differences and not comparison.has_seeds:
        yield (
            "One seed each says little: repeat the runs with other seeds before you rely on a "
            "small difference."
        )
    if not any(run.loss is not None for run in comparison.runs):
        yield "No run has been evaluated yet, so there are no losses to compare."


def _verdict(difference: Difference) -> str:
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


def _spread(group: Group, metric: str) -> str:
    """The mean of a metric over the seeds, with its range if that is one."""
    if not (values := group.values(metric)):
        return MISSING
    mean, *ends = spread(values)
    is_one = _shown(metric, ends[0]) == _shown(metric, ends[1])
    return _shown(metric, mean, () if is_one else ends)


def result(run: ComparedRun, metric: str) -> str:
    """A result of a run as text, with its interval if it has one."""
    if metric not in run.results:
        return MISSING
    return _shown(metric, run.results[metric], run.intervals.get(metric, ()))


def _shown(metric: str, value: float, ends: Iterable[float] = ()) -> str:
    return estimate(value, ends, 0 if metric in WHOLE_NUMBERS else 4)


def _code(text: str) -> str:
    """Text for a cell of a table, as code."""
    return f"`{text}`".replace("|", "\\|")
