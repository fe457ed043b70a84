"""Commands that run the flows: from documents to a trained and evaluated model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from flows.cli.options import configured
from flows.presets import Invocation
from flows.runs import named_runs
from flows.terminal import run_flow


def show_report(result: Mapping[str, Any]) -> None:
    """Print where the report is that a flow has written."""
    if "report" not in result:  # The first of several machines writes it.
        typer.echo(f"Run: {result['run_dir']}")
        return
    typer.echo(f"Report: {result['report']}")
    typer.echo(f"Report for a browser: {result['html']}")


@configured
def run(asked: Invocation) -> None:
    """Download, shard, train and evaluate. Finished stages are reused."""
    show_report(run_flow("pipeline", asked))


@configured
def preprocess(asked: Invocation) -> None:
    """Build the dataset of the documents, or reuse an existing one."""
    dataset = run_flow("preprocess", asked)
    typer.echo(f"Dataset: {dataset['address'] or dataset['folder']}")


@configured
def train(asked: Invocation) -> None:
    """Train on a finished dataset, or resume an interrupted run.

    The dataset is that of --data-dir, or the newest.
    """
    typer.echo(f"Run: {run_flow('train', asked)['run_dir']}")


@configured
def evaluate(asked: Invocation) -> None:
    """Evaluate a run and write its report.

    It is run.name=NAME, or the newest.
    """
    show_report(run_flow("evaluate", asked))


@configured
def show(
    asked: Invocation,
    every: Annotated[
        bool, typer.Option("--all", help="Print all windows of the batch, from end to end.")
    ] = False,
) -> None:
    """Show what a training will see: its data and its first batch."""
    from flows.show import show

    show(asked.config, every=every)


@configured
def compare(asked: Invocation) -> None:
    """Compare runs: settings and results. --sweep runs them first."""
    named = named_runs(asked)  # Tells a mistake before anything slow is imported.
    if asked.config.comparison.sweep:
        run_flow("compare", asked)
        return
    from flows.print_comparison import print_comparison
    from infini_model.evaluation.compare import compare

    print_comparison(compare(named))
