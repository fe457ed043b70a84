"""Cleaning an output folder: find what nothing refers to, say so, then remove it.

What is found is looked at once more under the locks of those who might use it, and renamed to a
temporary name there, in moments; only then is it deleted. So nobody ever sees half a dataset, and a
build, a download or another cleaning at the same time does no harm.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infini_model.cleaning.datasets import read_contents, staged_copies, unneeded_data
from infini_model.cleaning.downloads import unneeded_downloads
from infini_model.cleaning.removal import cannot_be_removed, remove
from infini_model.cleaning.runs import (
    needed_datasets,
    run_folders,
    run_locks,
    unneeded_checkpoints,
    unneeded_notes,
    unneeded_pictures,
)
from infini_model.cleaning.unneeded import Findings, Kind, Scope, Unneeded
from infini_model.data.builds import removals
from infini_model.data.keeping.holds import cache_lock
from infini_model.data.sources.download import raw_files_lock
from infini_model.runtime import storage
from infini_model.runtime.errors import UserError
from infini_model.runtime.runs import is_finished
from infini_model.training.checkpoints.folders import checkpoints_dir

# A dataset goes last, for what it refers to is found through it: after a kill, the next cleaning
# goes on where this one was.
ORDER = (
    Kind.RAW,
    Kind.PICTURE,
    Kind.LEFTOVER,
    Kind.PARTITION,
    Kind.TOKENIZER,
    Kind.RECORD,
    Kind.DATASET,
    Kind.LOCK,
)


@dataclass
class Cleaned:
    """What a cleaning removed.

    Attributes:
        bytes: Space that was freed.
        counts: How many things of each kind are gone.
        failures: One line for each file or folder that could not be removed.
        notes: One line for each thing that had to be left alone.
    """

    bytes: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_unneeded(scope: Scope) -> Findings:
    """All that a cleaning would remove. Changes nothing."""
    found = _unneeded_data(scope)
    if scope.only is None:
        found += unneeded_checkpoints(scope)
    return found


def clean(scope: Scope, found: Findings) -> Cleaned:
    """Remove what was found, unless somebody has come to need it since.

    Raises `UserError` if a lock cannot be taken because its folder cannot be written.
    """
    cleaned = Cleaned(notes=list(found.notes))
    for retire in (_retire_data, _retire_checkpoints):
        # All of it is renamed, and the locks are free again, before anything is deleted.
        for kind, path in list(retire(scope, found.items, cleaned)):
            removed = remove(path)
            cleaned.bytes += removed.bytes
            cleaned.failures += removed.failures
            cleaned.counts[kind] += not removed.failures
    return cleaned


def _unneeded_data(scope: Scope) -> Findings:
    found = Findings()
    if not scope.datasets_dir.is_dir():
        return found
    needed, unreadable = needed_datasets(scope)
    if unreadable:
        found.notes += [
            f"{run_dir / 'run.json'}: cannot be read; no data is removed, since the run may need it"
            for run_dir in unreadable
        ]
        return found
    contents = read_contents(scope, needed)
    found += unneeded_data(scope, contents)
    found += unneeded_downloads(scope, contents)
    found += unneeded_notes(scope)
    if scope.only is None:
        found += unneeded_pictures(scope)
    return found


def _retire_data(scope: Scope, items: Collection[Unneeded], cleaned: Cleaned) -> Iterator[Unneeded]:
    """Take what nobody needs out of everybody's sight, under the locks of those who make it."""
    wanted = {item for item in items if item.kind in ORDER}
    if not wanted or not scope.datasets_dir.is_dir():
        return
    copies = staged_copies(scope)
    with (
        removals(scope.datasets_dir),
        _nobody(raw_files_lock(scope.output_dir)) as is_idle,
        _nobody(cache_lock(copies)) as is_settled,
    ):
        if not is_idle and any(kind is Kind.RAW for kind, _ in wanted):
            cleaned.notes.append(
                f"{scope.output_dir / 'raw'}: downloads stay, since one is under way"
            )
        if not is_settled and any(path.parent == copies for _, path in wanted):
            cleaned.notes.append(f"{copies}: copies of shards stay, since some are being copied")
        still = wanted & {*_unneeded_data(scope).items}
        if not is_settled:
            still = {item for item in still if item.path.parent != copies}
        for kind in ORDER:
            if kind is not Kind.RAW or is_idle:
                yield from _retire(sorted(item for item in still if item.kind is kind), cleaned)


@contextlib.contextmanager
def _nobody(path: Path) -> Iterator[bool]:
    """Keep those who need a lock from starting; yields False if one of them is at work."""
    if not path.parent.is_dir():
        yield True
        return
    with storage.lock(path, wait=False) as is_idle:
        yield is_idle


def _retire_checkpoints(
    scope: Scope, items: Collection[Unneeded], cleaned: Cleaned
) -> Iterator[Unneeded]:
    """The same for old checkpoints, while nobody works in their run."""
    for run_dir in run_folders(scope.output_dir / "runs"):
        folder = checkpoints_dir(run_dir)
        wanted = [item for item in items if item.path.parent == folder]
        if not wanted:
            continue
        try:
            with contextlib.ExitStack() as stack:
                locks = [storage.lock(path, wait=False) for path in run_locks(run_dir)]
                if all(map(stack.enter_context, locks)) and is_finished(run_dir):
                    yield from _retire(wanted, cleaned)
        except UserError as error:
            cleaned.failures.append(str(error))


def _retire(items: Collection[Unneeded], cleaned: Cleaned) -> Iterator[Unneeded]:
    """Give what is to be deleted a temporary name, unless it has one; a lock if it is free."""
    for kind, path in items:
        if path.name.startswith(storage.TEMPORARY):
            yield Unneeded(kind, path)
            continue
        free = storage.lock(path, wait=False) if kind is Kind.LOCK else contextlib.nullcontext(True)
        try:
            with free as is_free:
                if is_free:
                    yield Unneeded(kind, storage.retire(path))
        except FileNotFoundError:
            continue
        except UserError as error:
            cleaned.failures.append(str(error))
        except OSError as error:
            cleaned.failures.append(cannot_be_removed(path, error))
