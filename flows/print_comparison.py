"""Comparison of runs: a row for each, and sentences on what was found."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

import typer

from flows.runs import PIPE_WIDTH
from infini_model.evaluation.compare import ComparedRun, Comparison, Difference
from infini_model.evaluation.pages import estimate
from infini_model.runtime.runs import VALIDATION_BITS, VALIDATION_LOSS

# The results that have a column.
SHOWN = {
    VALIDATION_LOSS: "Validation loss",
    VALIDATION_BITS: "Bits per byte",
    "evaluation/test_loss": "Test loss",
    "evaluation/validation_loss_without_memory": "Without memory",
    "evaluation/validation_loss_without_window": "Without window",
    "evaluation/validation_loss_from_segment_2": "Validation from segment 2",
    "evaluation/test_loss_from_segment_2": "Test from segment 2",
    "steps": "Steps",
    "tokens": "Tokens",
    "tokens per second": "Tokens/s",
}
WHOLE_NUMBERS = ("steps", "tokens", "tokens per second")
# Up to this many differing settings have a column; more have a line each below the table.
FEW_SETTINGS = 4
# Of a run without a value.
MISSING = "–"


def print_comparison(comparison: Comparison) -> None:
    """Print the rows as a table, and below it the sentences."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = comparison_rows(comparison)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(box=None, pad_edge=False)
    for title in rows[0]:
        table.add_column(
            title, overflow="fold", justify="right" if title in SHOWN.values() else "left"
        )
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print(table)
    for sentence in comparison_sentences(comparison):
        typer.echo(sentence)


def comparison_rows(comparison: Comparison) -> list[dict[str, str]]:
    """A row for each run, by column: its name, settings that differ, and results."""
    runs, settings = comparison.runs, comparison.differing
    if len(settings) > FEW_SETTINGS:
        settings = {}
    results = [name for name in SHOWN if any(name in run.results for run in runs)]
    return [
        {"Run": comparison.names[number]}
        | {key: values[number] or MISSING for key, values in settings.items()}
        | {SHOWN[name]: _result(run, name) for name in results}
        for number, run in enumerate(runs)
    ]


def comparison_sentences(comparison: Comparison) -> Iterator[str]:
    """What was found and how far to trust it, and why runs are not compared."""
    yield from map(_verdict, comparison.differences)
    if comparison.differences and all(len(each.by_seed) == 1 for each in comparison.differences):
        yield (
            "One seed each says little: repeat the runs with other seeds before you rely on a "
            "small difference."
        )
    if not any(run.loss is not None for run in comparison.runs):
        yield "No run has been evaluated yet, so there are no losses to compare."
    yield from comparison.notes
    if len(comparison.differing) > FEW_SETTINGS:
        for key, values in comparison.differing.items():
            yield f"{key}: {'; '.join(value or MISSING for value in values)}"


def _verdict(difference: Difference) -> str:
    """A sentence on the losses of a group against those of the control."""
    values = list(difference.by_seed.values())
    mean = statistics.fmean(values)
    word = "lower" if mean < 0 else "higher"
    size = f"{abs(mean):.4f}"
    found = "the same to four places as" if float(size) == 0.0 else f"{size} {word} than"
    name = "loss" if difference.metric == VALIDATION_LOSS else "loss in bits per byte"
    sentence = (
        f"The validation {name} of {difference.group.label} is {found} that of "
        f"{difference.control.label}"
    )
    if len(values) == 1:
        return f"{sentence}, with the same seed."
    agreeing = sum((value < 0) == (mean < 0) for value in values)
    return (
        f"{sentence}, on average over {len(values)} seeds ({min(values):+.4f} to "
        f"{max(values):+.4f}); it is {word} with {agreeing} of {len(values)}."
    )


def _result(run: ComparedRun, metric: str) -> str:
    """A result of a run as text, with its interval if it has one."""
    if metric not in run.results:
        return MISSING
    digits = 0 if metric in WHOLE_NUMBERS else 4
    return estimate(run.results[metric], run.intervals.get(metric, ()), digits)
