"""Commands that keep the datasets in order: verify their checksums, remove what is not needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.filesize import decimal

from infini_model.cleaning import Garbage, remove_garbage
from infini_model.config import Config
from infini_model.config.locations import is_url
from infini_model.data.lookup import resolve_dataset, stored_dataset
from infini_model.data.manifest import read_origin
from infini_model.data.store import no_dataset
from infini_model.data.verify import examine_dataset
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.stage_protocol import OnProgress


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def verify(config: Config, name: str | None) -> None:
    """Compare every checksum of a dataset and print each file that is missing or damaged.

    `name` is a dataset's name, path or address (see `resolve_dataset`); None is the newest. Of a
    dataset in a store the objects are listed, and the shards on this machine are read.

    Raises `DataError` if there is no such dataset, or a file of it is missing or damaged, and as
    `ObjectStore` does.
    """
    began = time.monotonic()
    advice = "infini preprocess makes their partitions again, and no others"
    place = resolve_dataset(name, config.run)
    if is_url(place):
        datasets, stored = stored_dataset(place, config.run)
        if datasets.find(stored) is None:
            raise no_dataset(place)
        folder = datasets.folder / stored
    else:
        folder = Path(place).resolve()
    place, origin = str(folder), read_origin(folder)
    with _bar(folder.name) as progress:
        manifest, faults = examine_dataset(folder, reads_all=True, progress=progress)
    shards = dict(manifest.files())
    if origin is not None:
        typer.echo(f"note: only the shards on this machine are verified, not {origin}")
        # What is in a store is not here until a training needs it.
        shards = {name: shard for name, shard in shards.items() if Path(place, name).exists()}
        advice = "the next training downloads them again"
    seconds = time.monotonic() - began
    for fault in faults:
        typer.echo(fault)
    size = decimal(sum(shard.bytes for shard in shards.values()))
    verified = f"verified {counted(len(shards), 'shard')}, {size}, in {seconds:.1f} s"
    if faults:
        damage = f"{counted(len(faults), 'file')} missing or damaged"
        raise DataError(f"{place}: {damage} ({verified}); {advice}")
    typer.echo(f"{place}: intact ({verified})")


@contextmanager
def _bar(title: str) -> Iterator[OnProgress]:
    """A progress bar in bytes on stderr, which shows nothing if that is not a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    description, bar, _, remaining = Progress.get_default_columns()
    columns = (description, bar, DownloadColumn(), remaining)
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def clean(config: Config, keep: int, *, dry_run: bool) -> None:
    """Remove what nothing refers to, or only find it, and print it and its size.

    Raises `UserError` if something cannot be removed, once all the rest is.
    """
    run = config.run
    if run.datasets_store is not None:
        typer.echo(f"note: only the copies on this machine are cleaned, not {run.datasets_store}")
    found = remove_garbage(run.output_dir, run.datasets_dir, keep, only=None, dry_run=dry_run)
    for path, kind in found.kinds.items():
        if kind in ("dataset", "checkpoint"):
            typer.echo(path)
    typer.echo(summary(found, "To remove" if dry_run else "Removed"))
    for problem in found.problems:
        typer.echo(problem, err=True)
    if found.problems:
        raise UserError(f"{counted(len(found.problems), 'folder')} could not be removed")


def summary(found: Garbage, done: str) -> str:
    """`Removed: 1 partition, 2 datasets: 3.4 MB`, where `done` is the first word."""
    counts = ", ".join(counted(count, kind) for kind, count in found.counts.items())
    return f"{done}: {counts}: {decimal(found.bytes)}" if counts else "Nothing to remove"
