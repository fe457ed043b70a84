"""Comparison of runs: a table and sentences in the terminal, and all results in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from flows.runs import PIPE_WIDTH
from infini_model.config import Config
from infini_model.evaluation.compare import SEED, compare
from infini_model.evaluation.comparison_page import MISSING, findings, result, write_comparison
from infini_model.runtime.runs import VALIDATION_LOSS

# Of the results, those in the terminal; the file has all.
SHOWN = {
    VALIDATION_LOSS: "Validation loss",
    "evaluation/test_loss": "Test loss",
    "evaluation/validation_loss_without_memory": "Without memory",
    "evaluation/validation_loss_without_window": "Without window",
    "steps": "Steps",
    "tokens": "Tokens",
    "tokens per second": "Tokens/s",
}


def show_comparison(config: Config, run_dirs: Sequence[Path], failures: Sequence[str] = ()) -> Path:
    """Compare runs, and print a row for each and what was found; returns the Markdown file.

    `failures` are sentences on runs that are left out.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    comparison = compare(run_dirs, failures)
    file = write_comparison(comparison, config.run.output_dir / "comparisons")
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(box=None, pad_edge=False)
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
    for sentence in (*findings(comparison), *comparison.notes):
        typer.echo(sentence)
    typer.echo(f"Comparison: {file}")
    return file
