"""Commands that run the flows: from documents to a trained and evaluated model."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from flows.cli.options import configured
from flows.presets import Invocation
from flows.runs import named_runs


def run_flow(name: str, asked: Invocation) -> Any:
    """Run the flow `name` of `flows.<name>` and return its result.

    Raises what the flow raises, `typer.Exit` if it was ended from the Prefect UI, and, before
    anything slow is imported, `DeviceError` as `choose_gpus` does; Ray chooses those of a training.
    """
    from flows.serving.connection import prefect_api
    from infini_model.training.launch.devices import choose_gpus

    config = asked.config
    if name != "preprocess" and (name == "evaluate" or config.launch.launcher == "local"):
        choose_gpus(config.launch.gpus)
    with prefect_api(config) as wait_until_up:
        from prefect.exceptions import Abort, Pause

        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        for logger in map(logging.getLogger, ("prefect.flow_runs", "prefect.task_runs")):
            logger.setLevel(config.run.log_level.upper())
        # Its warning about unsent events would come last, after what matters.
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)
        wait_until_up()
        try:
            return flow(**asked.parameters)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # The terminal may have been closed.
                typer.echo("interrupted; the same command resumes where this one stopped", err=True)
            raise
        except (Abort, Pause) as end:
            typer.echo("stopped from the Prefect UI; the same command resumes", err=True)
            raise typer.Exit(1) from end


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
