"""`infini compare` without Prefect: what the terminal shows of a comparison, and its files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from flows.runs import PIPE_WIDTH
from infini_model.config import Config
from infini_model.evaluation.compare import SEED, Comparison, compare
from infini_model.evaluation.comparison_page import (
    MISSING,
    Files,
    result,
    verdict,
    write_comparison,
)
from infini_model.runtime.runs import VALIDATION_LOSS

# Of the results, those in the terminal; the files have all.
SHOWN = {
    VALIDATION_LOSS: "Validation loss",
    "evaluation/test_loss": "Test loss",
    "evaluation/validation_loss_without_memory": "Without memory",
    "steps": "Steps",
    "tokens": "Tokens",
    "tokens per second": "Tokens/s",
}


def comparisons_dir(config: Config) -> Path:
    return config.run.output_dir / "comparisons"


def compare_existing(config: Config, named: Sequence[Path]) -> None:
    """Compare the runs in the folders `named`, two or more."""
    comparison = compare(named)
    show(comparison, write_comparison(comparison, comparisons_dir(config)))


def show(comparison: Comparison, files: Files) -> None:
    """Print a comparison: a row for each run, what was found, and where the files are."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else PIPE_WIDTH)
    table = Table() if is_terminal else Table(box=None, pad_edge=False)
    keys = [key for key in comparison.differing if key != SEED]
    keys = keys if len(keys) <= 3 else []
    having = {name: sum(name in run.results for run in comparison.runs) for name in SHOWN}
    # What a single one of several has is not compared.
    shown = [name for name in SHOWN if having[name] >= min(2, len(comparison.runs))]
    for title in ("Run", *keys, *(SHOWN[name] for name in shown)):
        table.add_column(
            title, overflow="fold", justify="right" if title in SHOWN.values() else "left"
        )
    for number, run in enumerate(comparison.runs):
        values = [comparison.differing[key][number] or MISSING for key in keys]
        cells = [comparison.names[number], *values, *(result(run, name) for name in shown)]
        table.add_row(*map(escape, cells))
    console.print(table)
    for sentence in (*map(verdict, comparison.differences), *comparison.notes):
        typer.echo(sentence)
    typer.echo(f"Comparison: {files.markdown}\n            {files.html}")
