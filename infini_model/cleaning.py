"""Find what nothing in an output folder refers to any more, and remove it.

Runs and the last datasets of each name refer to datasets; these, and builds that are under way or
were registered within a week, to partitions, listings and downloads. Of the runs that are finished,
only checkpoints go.

What goes is renamed to a temporary name in moments, under the locks of those who might begin to use
it, and only then deleted. So nobody ever sees half a dataset, and builds, downloads and other
cleanings at the same time do no harm.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from infini_model.data.datasets import build_file, build_lock, read_builds, removals
from infini_model.data.sources.files import Listing
from infini_model.data.sources.listing import raw_files_lock
from infini_model.runtime import storage
from infini_model.runtime.errors import CheckpointError, DataError, UserError
from infini_model.runtime.records import read_record
from infini_model.runtime.runs import (
    CHECKPOINTS,
    LOCK,
    is_finished,
    is_started,
    list_checkpoints,
    read_run,
    run_folders,
    superseded_checkpoints,
    verify_checkpoint,
)
from infini_model.runtime.storage import MANIFEST, TEMPORARY, is_locked

# A training may be about to start on a dataset that was used this recently.
RECENT_SECONDS = 3600.0
# Others may be about to refer to what is younger, but for what a dataset had that is removed.
DAY_SECONDS = 86_400.0
# What an interrupted build or download has finished is kept for this long, to go on from there.
UNFINISHED_SECONDS = 7 * DAY_SECONDS
# NAME-KEY; any other folder is not ours.
DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{16}")
BLOCK_BYTES = 512


@dataclass
class Garbage:
    """Files and folders that nobody needs.

    Attributes:
        kinds: The kind of each, by its path: a noun in the singular.
        retired: The temporary names of those that are to be deleted.
        notes: One line for each thing that had to be left alone.
        failures: One line for each thing that could not be removed.
    """

    kinds: dict[Path, str] = field(default_factory=dict)
    retired: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many things there are of each kind."""
        return dict(Counter(self.kinds.values()))

    def retire(self, found: dict[Path, str]) -> None:
        """Give what is to be deleted a temporary name, unless it has one."""
        for path, kind in found.items():
            try:
                self.retired.append(path if _is_temporary(path) else storage.retire(path))
                self.kinds[path] = kind
            except OSError as error:
                self.fail(path, error)

    def fail(self, path: Path | str, error: OSError) -> None:
        """Note that something cannot be removed, unless another cleaning has removed it."""
        if not isinstance(error, FileNotFoundError):
            self.failures.append(f"{path}: cannot be removed: {error.strerror}")


@dataclass(frozen=True)
class Scope:
    """Where to look, and what to keep.

    Attributes:
        output_dir: Folder of the downloads and the runs.
        datasets_dir: Folder of the datasets.
        keep: Datasets of each name to keep, those used last, besides those that are referred to.
        only: Remove only datasets of this name, no checkpoints; None is everything.
        now: Seconds since the epoch, by which ages are judged.
    """

    output_dir: Path
    datasets_dir: Path
    keep: int = 2
    only: str | None = None
    now: float = field(default_factory=time.time)

    def is_older(self, path: Path, seconds: float) -> bool:
        """Whether all of a file or folder was written longer ago; False if it is gone."""
        try:
            return all(self.now - each.lstat().st_mtime > seconds for each in _tree(path))
        except FileNotFoundError:
            return False

    def runs(self) -> list[Path]:
        """The folders of the runs whose checkpoints are looked at."""
        return run_folders(self.output_dir / "runs") if self.only is None else []


def find_garbage(scope: Scope) -> Garbage:
    """All that a cleaning would remove. Changes nothing."""
    found = Garbage()
    found.kinds |= _find_data(scope, found.notes)
    for run_dir in scope.runs():
        found.kinds |= _find_checkpoints(run_dir, found.notes)
    return found


def retire_garbage(scope: Scope) -> Garbage:
    """Take what nobody needs out of sight, under the locks of those who might begin to use it.

    Raises `UserError` if the folder of the datasets or of the downloads cannot be written.
    """
    found, raw = Garbage(), scope.output_dir / "raw"
    with contextlib.ExitStack() as held:
        if scope.datasets_dir.is_dir():
            held.enter_context(removals(scope.datasets_dir))
        raw_lock = storage.lock(raw_files_lock(scope.output_dir), wait=False)
        is_busy = raw.is_dir() and not held.enter_context(raw_lock)
        data = _find_data(scope, found.notes)
        kept = [path for path in data if is_busy and path.parent == raw]
        found.retire({path: kind for path, kind in data.items() if path not in kept})
    if kept:
        found.notes.append(f"{raw}: is in use; nothing there is removed")
    for run_dir in scope.runs():
        # It reads a checkpoint, which takes long; the locks are held for moments only.
        checkpoints = _find_checkpoints(run_dir, found.notes)
        try:
            with contextlib.ExitStack() as held:
                locks = [storage.lock(path, wait=False) for path in _run_locks(run_dir)]
                if checkpoints and all(map(held.enter_context, locks)) and is_finished(run_dir):
                    found.retire(checkpoints)
        except UserError as error:
            found.failures.append(str(error))
    return found


def delete_garbage(garbage: Garbage) -> int:
    """Delete what was retired; returns the bytes that this freed."""

    def fail(_: object, path: str, error: Any) -> None:
        garbage.fail(path, error[1])

    before = usage(garbage.retired)
    for path in garbage.retired:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=fail)
            continue
        try:
            path.unlink()
        except OSError as error:
            garbage.fail(path, error)
    return before - usage(garbage.retired)


def usage(paths: Iterable[Path]) -> int:
    """Bytes that removing all of these frees, as `du` counts them.

    Datasets share their shards with the partitions by hard links: a file counts if all its links
    are among them.
    """
    size, links = 0, Counter[tuple[int, int]]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            for each in _tree(path):
                entry = each.lstat()
                links[entry.st_dev, entry.st_ino] += 1
                is_last = links[entry.st_dev, entry.st_ino] == entry.st_nlink
                if is_last or stat.S_ISDIR(entry.st_mode):
                    size += entry.st_blocks * BLOCK_BYTES
    return size


def _tree(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def _find_data(scope: Scope, notes: list[str]) -> dict[Path, str]:
    """Data that nothing refers to; none, and a note, if what may refer to it cannot be read."""
    if not scope.datasets_dir.is_dir():
        return {}
    try:
        return _unreferenced(scope)
    except (DataError, PermissionError) as error:
        notes.append(f"{error}; no data is removed, since it may refer to any of it")
        return {}


def _unreferenced(scope: Scope) -> dict[Path, str]:
    """Data that nothing refers to.

    The datasets come last, for what they refer to is found through them: after a kill, the next
    cleaning goes on where this one was.

    Raises `DataError` if something that may refer to others cannot be read.
    """
    root, raw = scope.datasets_dir, scope.output_dir / "raw"
    datasets = _read_datasets(root)
    gone = _superseded(datasets, scope)
    builds, live = dict(read_builds(root)), {}
    for folder, build in builds.items():
        is_young = not scope.is_older(build_file(folder), UNFINISHED_SECONDS)
        is_in_use = folder.exists() or is_young or is_locked(build_lock(folder))
        if folder.name not in gone and is_in_use:
            live[folder] = build

    needed = {key for build in live.values() for key in build.partitions}
    needed |= {key for each in datasets if each.folder.name not in gone for key in each.partitions}
    freed = {key for each in datasets for key in each.partitions}
    found = _unneeded(scope, "partition", root / ".partitions", needed, freed, DAY_SECONDS)

    needed, freed = ({each.listing for each in some.values()} for some in (live, builds))
    records = _unneeded(scope, "record", root / ".listings", needed, freed, UNFINISHED_SECONDS)
    # Another folder of datasets may have been made from the same downloads.
    folders = {root / ".listings", scope.output_dir / "datasets" / ".listings"}
    listings = {path for folder in folders for path in folder.glob("*.json")}
    going = listings & records.keys()
    needed, freed = _named_by(listings - going), _named_by(going)
    found |= _unneeded(scope, "download", raw, needed, freed, UNFINISHED_SECONDS) | records
    screened = root / ".screened"
    found |= _unneeded(scope, "screened text", screened, needed, freed, UNFINISHED_SECONDS)

    needed, freed = ({build_file(folder).name for folder in some} for some in (live, builds))
    found |= _unneeded(scope, "record", root / ".builds", needed, freed, DAY_SECONDS)
    # Any other folder there is not ours, however old.
    return found | _unneeded(scope, "dataset", root, (), gone, math.inf)


def _unneeded(
    scope: Scope,
    kind: str,
    folder: Path,
    needed: Collection[str],
    freed: Collection[str],
    seconds: float,
) -> dict[Path, str]:
    """Find what is in a folder under a name that nobody needs or has locked.

    A `freed` name goes whatever its age, others go after so many seconds. A temporary name goes if
    its writer is dead: the lock is free, or the name is a day old.
    """
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _is_temporary(path):
            name, age = path.name.removeprefix(TEMPORARY).rpartition("-")[0], DAY_SECONDS
            is_free = (folder / ".locks" / name).is_file()
        elif path.name in needed or path.name.startswith("."):
            continue
        else:
            name, age, is_free = path.name, seconds, path.name in freed
        if not is_locked(folder / ".locks" / name) and (is_free or scope.is_older(path, age)):
            found[path] = "leftover" if _is_temporary(path) else kind
    return found


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY)


class _Dataset(NamedTuple):
    """A finished dataset; `used` is when it was made or last asked for."""

    folder: Path
    partitions: frozenset[str]
    used: float


def _read_datasets(datasets_dir: Path) -> list[_Dataset]:
    """The datasets, those used last first. Raises `DataError` if a manifest is damaged."""
    found = []
    for folder in datasets_dir.iterdir():
        manifest = folder / MANIFEST
        if folder.is_symlink() or not DATASET_NAME.fullmatch(folder.name):
            continue
        try:
            keys = frozenset(json.loads(manifest.read_bytes())["partitions"])
            used = manifest.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue  # No dataset, or another cleaning has just removed it.
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{manifest}: is damaged") from error
        with contextlib.suppress(FileNotFoundError):
            used = max(used, build_file(folder).stat().st_mtime)
        found.append(_Dataset(folder, keys, used))
    return sorted(found, key=lambda dataset: (dataset.used, dataset.folder), reverse=True)


def _superseded(datasets: Iterable[_Dataset], scope: Scope) -> set[str]:
    """Names of those nothing refers to, not recent, and not among the newest of their `data.name`.

    Runs of this output folder, and those beside the datasets, refer to them. Raises `DataError` if
    one cannot be read.
    """
    places = {scope.output_dir, scope.datasets_dir.parent}
    runs = [path for place in places for path in run_folders(place / "runs") if is_started(path)]
    # The name ends in the key, by which a dataset is known even if its folder was moved since.
    needed = {read_run(path).dataset.name for path in runs}
    needed.add((scope.datasets_dir / "latest").resolve().name)
    newer, found = Counter[str](), set()
    for folder, _, used in datasets:
        name = folder.name.rpartition("-")[0]
        newer[name] += 1
        if (
            newer[name] > scope.keep
            and folder.name not in needed
            and scope.now - used > RECENT_SECONDS
            and scope.only in (None, name)
            and not is_locked(build_lock(folder))
        ):
            found.add(folder.name)
    return found


def _named_by(listings: Iterable[Path]) -> set[str]:
    """All names in the paths of the listed files, among them those of the download folders.

    Such a name is the key of what was downloaded. Raises `DataError` for a damaged listing.
    """
    files = [each.file for path in listings for each in read_record(path, Listing).ranges]
    return {part for file in files for part in Path(file.address).parts}


def _run_locks(run_dir: Path) -> tuple[Path, Path]:
    """The locks of whoever works in a run folder, or writes its checkpoints."""
    return run_dir / LOCK, run_dir / CHECKPOINTS / ".lock"


def _find_checkpoints(run_dir: Path, notes: list[str]) -> dict[Path, str]:
    """The checkpoints of a finished run but the newest and the one with the lowest loss."""
    if not is_finished(run_dir) or any(map(is_locked, _run_locks(run_dir))):
        return {}
    folder = run_dir / CHECKPOINTS
    found = dict.fromkeys(sorted(folder.glob(f"{TEMPORARY}*")), "leftover")
    old = [*superseded_checkpoints(run_dir, keep=1), *sorted(folder.glob("damaged-step-*"))]
    try:
        for _, newest in list_checkpoints(run_dir)[:1] if old else ():
            verify_checkpoint(newest)
        found |= dict.fromkeys(old, "checkpoint")
    except CheckpointError as error:
        notes.append(f"{error}; the checkpoints before it are kept")
    return found
