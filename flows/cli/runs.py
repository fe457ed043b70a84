"""Commands on existing runs, however they were started, and on datasets."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flows import runs as existing
from flows.cli.options import ANY_SETTINGS, DataDir, OutputDir, RunOrNewest, config_at
from flows.cli.training import run_flow, show_report


def runs(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    output_dir: OutputDir = None,
) -> None:
    """List all runs: step, state and losses."""
    show = existing.show_runs_as_json if as_json else existing.show_runs
    show(config_at(output_dir).run)


def resume(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] KEY=VALUE",
            help="Name or folder of a run (default: the newest interrupted one), and overrides of "
            "settings that do not affect the weights, such as launch.gpus=0.",
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Resume an interrupted run, then evaluate it.

    It keeps its own settings, however it was started.
    """
    run_dir, asked = existing.to_resume(config_at(output_dir).run, arguments or [])
    if asked is None:
        typer.echo(f"{run_dir} is already finished; nothing to do")
        return
    typer.echo(f"Resuming {run_dir}")
    show_report(run_flow("pipeline", asked))


def branch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of the run.")],
    overrides: Annotated[list[str] | None, ANY_SETTINGS] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint (default: the newest).", min=1)
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Train a new run from a checkpoint of another.

    It has the settings and the dataset of the other run, but for those given, and is evaluated.
    """
    asked = existing.to_branch(config_at(output_dir).run, run, step, overrides or [])
    typer.echo(f"Branching from {asked.config.training.branch_of}")
    show_report(run_flow("pipeline", asked))


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")],
    output_dir: OutputDir = None,
) -> None:
    """Stop a run, however it was started. It saves a checkpoint first."""
    places = config_at(output_dir).run
    run_dir = existing.find_run_folder(places, run)
    typer.echo(f"Cancelled {run_dir.name}; {existing.cancel(run_dir, places.store)}")


def logs(
    run: RunOrNewest = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Print the logs of a run's processes."""
    places = config_at(output_dir).run
    run_dir = existing.find_run_folder(places, run)
    try:
        existing.print_logs(run_dir, places.store, follow=follow)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: discard what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def verify(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            help="Name, folder or address of a dataset (default: the newest).",
        ),
    ] = None,
    output_dir: OutputDir = None,
    data_dir: DataDir = None,
) -> None:
    """Compare every checksum of a dataset.

    Of one in a store, it compares the sizes of its objects there. Exits with status 2 if a file is
    missing or damaged.
    """
    from flows import dataset_commands

    dataset_commands.verify(config_at(output_dir, data_dir), dataset)


def clean(
    keep: Annotated[
        int, typer.Option(help="Datasets of each name to keep, those used last.", min=1)
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    output_dir: OutputDir = None,
    data_dir: DataDir = None,
) -> None:
    """Remove datasets, downloads and checkpoints that are unused.

    That is what nothing refers to; of checkpoints, only those of finished runs.
    """
    from flows import dataset_commands

    config = config_at(output_dir, data_dir)
    dataset_commands.clean(config, keep, dry_run=dry_run)
