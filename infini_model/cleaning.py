"""Find what nothing in an output folder refers to any more, and remove it.

Runs and the last datasets of each name refer to datasets; these, and builds that are under way or
were registered within a week, to partitions, listings and downloads. Every folder that holds some
is a `Place`. Of the runs that are finished, only checkpoints go.

What goes is renamed to a temporary name in moments, under the locks of those who might begin to use
it, and only then deleted. So nobody ever sees half a dataset, and builds, downloads and other
cleanings at the same time do no harm.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from infini_model.data.datasets import Build, build_file, build_lock, read_builds, removals
from infini_model.data.sources.listing import raw_files_lock
from infini_model.runtime import storage
from infini_model.runtime.errors import CheckpointError, DataError, UserError
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


class Item(NamedTuple):
    """A file or a folder that can be removed; `kind` is a noun in the singular."""

    kind: str
    path: Path


@dataclass
class Garbage:
    """What can be removed, or was.

    Attributes:
        items: Files and folders.
        notes: One line for each thing that had to be left alone.
        bytes: What the removed took on the disk.
        failures: One line for each thing that could not be removed.
    """

    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many things there are of each kind."""
        return dict(Counter(kind for kind, _ in self.items))


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


class Place(NamedTuple):
    """A folder of which each file or folder is referred to by its name.

    Attributes:
        kind: What it holds.
        folder: Its path.
        referred: Names that are referred to.
        freed: Names that were referred to only by what is removed too. They go whatever their age.
        age: Seconds after which others go that nobody refers to.
    """

    kind: str
    folder: Path
    referred: Collection[str]
    freed: Collection[str] = ()
    age: float = DAY_SECONDS

    def unreferenced(self, scope: Scope) -> Iterator[Path]:
        """What can be removed of it: nobody refers to it, and nobody has locked it."""
        for path in visible(self.folder):
            name = path.name
            if name in self.referred or is_locked(self.folder / ".locks" / name):
                continue
            if name in self.freed or scope.is_older(path, self.age):
                yield path

    def leftovers(self, scope: Scope) -> Iterator[Path]:
        """Temporary names whose writers are dead: their lock is free, or they are a day old."""
        for path in sorted(self.folder.glob(f"{TEMPORARY}*")):
            lock = self.folder / ".locks" / path.name.removeprefix(TEMPORARY).rpartition("-")[0]
            if not is_locked(lock) and (lock.is_file() or scope.is_older(path, DAY_SECONDS)):
                yield path


def find_garbage(scope: Scope) -> Garbage:
    """All that a cleaning would remove. Changes nothing."""
    found = _find_data(scope)
    for run_dir in run_folders(scope.output_dir / "runs") if scope.only is None else ():
        if not any(map(is_locked, _run_locks(run_dir))):
            checkpoints = _find_checkpoints(run_dir)
            found.items += checkpoints.items
            found.notes += checkpoints.notes
    return found


def remove_garbage(scope: Scope, found: Garbage) -> Garbage:
    """Remove what was found, unless somebody has come to need it since.

    Raises `UserError` if a lock cannot be taken because its folder cannot be written.
    """
    removed = Garbage(notes=list(found.notes))
    if scope.datasets_dir.is_dir() and found.items:
        _retire_data(scope, {*found.items}, removed)
    _retire_checkpoints(scope, {*found.items}, removed)
    removed.bytes = usage(path for _, path in removed.items)

    def fail(_: Any, path: str, error: Any) -> None:
        # Another cleaning may delete the same leftover.
        if not isinstance(error[1], FileNotFoundError):
            removed.failures.append(_cannot_be_removed(path, error[1]))

    for _, path in removed.items:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=fail)
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            removed.failures.append(_cannot_be_removed(path, error))
    removed.bytes -= usage(path for _, path in removed.items)
    return removed


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


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without names that begin with a dot; empty if there is none."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _tree(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def _find_data(scope: Scope) -> Garbage:
    found = Garbage()
    if not scope.datasets_dir.is_dir():
        return found
    try:
        places = list(_places(scope))
    except DataError as error:
        found.notes.append(f"{error}; no data is removed, since it may refer to any of it")
        return found
    for place in places:
        found.items += [Item("leftover", path) for path in place.leftovers(scope)]
        found.items += [Item(place.kind, path) for path in place.unreferenced(scope)]
    return found


def _places(scope: Scope) -> Iterator[Place]:
    """All places but those of checkpoints.

    The datasets come last, for what they refer to is found through them: after a kill, the next
    cleaning goes on where this one was.

    Raises `DataError` if something that may refer to others cannot be read.
    """
    root = scope.datasets_dir
    datasets = _read_datasets(root)
    gone = _superseded(datasets, scope)
    kept = [dataset for dataset in datasets if dataset not in gone]
    gone_names = {dataset.folder.name for dataset in gone}
    live, ended = _builds(scope, gone_names)

    needed = {key for dataset in kept for key in dataset.partitions}
    needed |= {key for build in live.values() for key in build.partitions}
    freed = {key for dataset in gone for key in dataset.partitions}
    yield Place("partition", root / ".partitions", needed, freed)
    yield from _downloads(scope, live.values(), ended.values())
    yield Place("record", root / ".builds", _in_json(live), _in_json(ended))
    yield Place("dataset", root, {path.name for path in visible(root)} - gone_names, gone_names)


def _builds(
    scope: Scope, gone_names: Collection[str]
) -> tuple[dict[Path, Build], dict[Path, Build]]:
    """The registered builds: those of datasets that stay or may still be made, and others."""
    live, ended = dict[Path, Build](), dict[Path, Build]()
    for folder, build in read_builds(scope.datasets_dir):
        is_under_way = is_locked(build_lock(folder)) or not scope.is_older(
            build_file(folder), UNFINISHED_SECONDS
        )
        is_live = folder.name not in gone_names and (folder.exists() or is_under_way)
        (live if is_live else ended)[folder] = build
    return live, ended


def _in_json(builds: Iterable[Path]) -> list[str]:
    return [build_file(folder).name for folder in builds]


def _downloads(scope: Scope, live: Iterable[Build], ended: Iterable[Build]) -> Iterator[Place]:
    """The downloaded files, and the listings that name them."""
    listings = Place(
        "record",
        scope.datasets_dir / ".listings",
        {build.listing for build in live},
        {build.listing for build in ended},
        UNFINISHED_SECONDS,
    )
    going = {*listings.unreferenced(scope)}
    # Another folder of datasets may have been made from the same downloads.
    places = {listings.folder, scope.output_dir / "datasets" / ".listings"}
    staying = {path for place in places for path in place.glob("*.json")} - going
    raw = scope.output_dir / "raw"
    yield Place("download", raw, _named_by(staying), _named_by(going), UNFINISHED_SECONDS)
    yield listings


class _Dataset(NamedTuple):
    """A finished dataset; `used` is when it was made or last asked for."""

    folder: Path
    partitions: frozenset[str]
    used: float


def _read_datasets(datasets_dir: Path) -> list[_Dataset]:
    """The datasets, those used last first. Raises `DataError` if a manifest is damaged."""
    found = []
    for folder in visible(datasets_dir):
        manifest = folder / MANIFEST
        if folder.is_symlink() or not DATASET_NAME.fullmatch(folder.name):
            continue
        try:
            tree = json.loads(manifest.read_bytes())
            keys = frozenset(tree["partitions"])
            used = manifest.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue  # No dataset, or another cleaning has just removed it.
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{manifest}: is damaged") from error
        with contextlib.suppress(FileNotFoundError):
            used = max(used, build_file(folder).stat().st_mtime)
        found.append(_Dataset(folder, keys, used))
    return sorted(found, key=lambda dataset: (dataset.used, dataset.folder), reverse=True)


def _superseded(datasets: Iterable[_Dataset], scope: Scope) -> list[_Dataset]:
    """Those that nothing refers to, not recent, and not among the newest of their name."""
    referred = _referred_by_runs(scope) | {(scope.datasets_dir / "latest").resolve().name}
    newer, found = Counter[str](), []
    for dataset in datasets:
        name = dataset.folder.name.rpartition("-")[0]
        newer[name] += 1
        if (
            newer[name] > scope.keep
            and dataset.folder.name not in referred
            and scope.now - dataset.used > RECENT_SECONDS
            and scope.only in (None, name)
            and not is_locked(build_lock(dataset.folder))
        ):
            found.append(dataset)
    return found


def _referred_by_runs(scope: Scope) -> set[str]:
    """The names of the dataset folders that the runs beside them, and of this output folder, use.

    A name ends in the dataset's key, so that it is enough to know a dataset by, even if the output
    folder was moved since. Raises `DataError` if a run cannot be read.
    """
    places = {scope.output_dir, scope.datasets_dir.parent}
    folders = [path for place in places for path in run_folders(place / "runs")]
    try:
        started = [path for path in folders if is_started(path)]
    except PermissionError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return {read_run(path).dataset.name for path in started}


def _named_by(listings: Iterable[Path]) -> set[str]:
    """All names in the paths of the listed files, among them those of the download folders.

    Such a name is the key of what was downloaded. Raises `DataError` for a damaged listing.
    """
    names: set[str] = set()
    for path in listings:
        try:
            for ranges in json.loads(path.read_bytes())["sources"].values():
                addresses = (each["file"]["address"] for each in ranges)
                names.update(part for address in addresses for part in Path(address).parts)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: is damaged") from error
    return names


def _run_locks(run_dir: Path) -> tuple[Path, Path]:
    """The locks of whoever works in a run folder, or writes its checkpoints."""
    return run_dir / LOCK, run_dir / CHECKPOINTS / ".lock"


def _find_checkpoints(run_dir: Path) -> Garbage:
    """The checkpoints of a finished run but the newest and the one with the lowest loss."""
    found, folder = Garbage(), run_dir / CHECKPOINTS
    if not is_finished(run_dir):
        return found
    found.items += [Item("leftover", path) for path in sorted(folder.glob(f"{TEMPORARY}*"))]
    old = [*superseded_checkpoints(run_dir, keep=1), *sorted(folder.glob("damaged-step-*"))]
    if old:
        try:
            for _, newest in list_checkpoints(run_dir)[:1]:
                verify_checkpoint(newest)
            found.items += [Item("checkpoint", path) for path in old]
        except CheckpointError as error:
            found.notes.append(f"{error}; the checkpoints before it are kept")
    return found


def _retire_data(scope: Scope, wanted: Collection[Item], removed: Garbage) -> None:
    """Take what nobody needs out of everybody's sight, under the locks of those who make it."""
    raw = scope.output_dir / "raw"
    with contextlib.ExitStack() as held:
        held.enter_context(removals(scope.datasets_dir))
        is_busy = raw.is_dir() and not held.enter_context(
            storage.lock(raw_files_lock(scope.output_dir), wait=False)
        )
        if is_busy:
            removed.notes.append(f"{raw}: is in use; nothing there is removed")
        for item in _find_data(scope).items:
            if item in wanted and not (is_busy and item.path.parent == raw):
                _retire(item, removed)


def _retire_checkpoints(scope: Scope, wanted: Collection[Item], removed: Garbage) -> None:
    """The same for old checkpoints, while nobody works in their run."""
    for run_dir in run_folders(scope.output_dir / "runs"):
        items = sorted(item for item in wanted if item.path.parent == run_dir / CHECKPOINTS)
        if not items:
            continue
        try:
            with contextlib.ExitStack() as held:
                locks = [storage.lock(path, wait=False) for path in _run_locks(run_dir)]
                if all(map(held.enter_context, locks)) and is_finished(run_dir):
                    for item in items:
                        _retire(item, removed)
        except UserError as error:
            removed.failures.append(str(error))


def _retire(item: Item, removed: Garbage) -> None:
    """Give what is to be deleted a temporary name, unless it has one."""
    path = item.path
    try:
        if not path.name.startswith(TEMPORARY):
            path = storage.retire(path)
        removed.items.append(Item(item.kind, path))
    except FileNotFoundError:
        return
    except OSError as error:
        removed.failures.append(_cannot_be_removed(path, error))


def _cannot_be_removed(path: Path | str, error: OSError) -> str:
    return f"{path}: cannot be removed: {error.strerror}"
