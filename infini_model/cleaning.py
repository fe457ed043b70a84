"""Find what nothing in an output folder refers to any more, and remove it.

Runs and the last datasets of each name refer to datasets; these, and builds that are under way or
were registered within a week, to partitions and listings; listings to downloads and screened texts.
Of the runs that are finished, only checkpoints go.

What is removed gets a temporary name, under the locks of those who might begin to use it, and is
only then deleted. So nobody ever sees half a dataset, and builds, downloads and other cleanings at
the same time do no harm.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from infini_model.data.datasets import Build, build_file, build_lock, removals
from infini_model.data.manifest import PARTITIONS
from infini_model.data.sources.files import Listing
from infini_model.data.sources.listing import raw_files_lock
from infini_model.runtime import runs, storage
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.records import read_record
from infini_model.runtime.runs import CHECKPOINTS
from infini_model.runtime.storage import MANIFEST, TEMPORARY, is_locked

# A training may be about to start on a dataset that was used this recently.
HOUR_SECONDS = 3600.0
# What an interrupted build or download has finished is kept for this long, to go on from there.
WEEK_SECONDS = 7 * 86_400.0
# NAME-KEY; any other folder is not ours.
DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{16}")
BLOCK_BYTES = 512


class Garbage(NamedTuple):
    """Folders that nobody needs, the kind of each, and the bytes they take.

    `problems` has a line for each that cannot be removed.
    """

    kinds: dict[Path, str]
    bytes: int
    problems: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Count those of each kind."""
        return Counter(self.kinds.values())


def remove_garbage(
    output_dir: Path, datasets_dir: Path, keep: int, *, only: str | None, dry_run: bool = False
) -> Garbage:
    """Remove datasets, partitions, downloads and checkpoints that nobody needs, or only find them.

    The `keep` datasets of each name that were used last stay; with the name `only`, also all those
    of other names, and all checkpoints.

    Raises `DataError`, before anything is removed, for something damaged that may refer to data;
    `UserError` if the folder of the datasets or of the downloads cannot be written.
    """
    output_dir, datasets_dir = output_dir.resolve(), datasets_dir.resolve()
    kinds, retired, problems = dict[Path, str](), list[Path](), list[str]()

    def retire(found: Iterable[Path], kind: str) -> None:
        for path in found:
            try:
                is_retired = dry_run or path.name.startswith(TEMPORARY)
                retired.append(path if is_retired else storage.retire(path))
                kinds[path] = kind
            except OSError as error:
                problems.append(f"{path}: cannot be removed: {error.strerror}")

    if datasets_dir.is_dir():
        raw_lock = storage.lock(raw_files_lock(output_dir), wait=False)
        with removals(datasets_dir), raw_lock as is_idle:
            needed, superseded = _find_datasets(output_dir, datasets_dir, keep, only)
            needed |= _read_records(output_dir, datasets_dir, superseded)
            retire(_unneeded(datasets_dir / PARTITIONS, needed, HOUR_SECONDS), "partition")
            retire(_unneeded(datasets_dir / ".screened", needed, WEEK_SECONDS), "partition")
            if is_idle:
                retire(_unneeded(output_dir / "raw", needed, WEEK_SECONDS), "download")
            # Last, since a cleaning after a kill finds through them what they are made from.
            others = {path.name for path in datasets_dir.iterdir()} - superseded
            retire(_unneeded(datasets_dir, others, HOUR_SECONDS), "dataset")
            for path in [*datasets_dir.glob(".builds/*"), *datasets_dir.glob(".listings/*")]:
                if not dry_run and path.name not in needed and _is_older(path, WEEK_SECONDS):
                    path.unlink()
    finished = filter(runs.is_finished, runs.run_folders(output_dir / "runs"))
    for run_dir in finished if only is None else ():
        locks = [run_dir / runs.LOCK, run_dir / CHECKPOINTS / ".lock"]
        try:
            with contextlib.ExitStack() as held:
                if all(held.enter_context(storage.lock(each, wait=False)) for each in locks):
                    retire(_old_checkpoints(run_dir), "checkpoint")
        except UserError as error:
            problems.append(str(error))
    size = sum(map(_size, retired))
    for path in () if dry_run else retired:
        shutil.rmtree(path, ignore_errors=True)  # as another cleaning may do meanwhile
        if path.exists():
            problems.append(f"{path}: cannot be removed")
    return Garbage(kinds, size, problems)


def _find_datasets(
    output_dir: Path, datasets_dir: Path, keep: int, only: str | None
) -> tuple[set[str], set[str]]:
    """The keys of the partitions of the datasets that stay, and the names of the others.

    Raises `DataError` if a manifest, or a run, which refers to a dataset, cannot be read.
    """
    started = filter(runs.is_started, runs.run_folders(output_dir / "runs"))
    # The name ends in the key, by which a dataset is known even if its folder was moved since.
    referred = {runs.read_run(path).dataset.name for path in started}
    referred.add((datasets_dir / "latest").resolve().name)
    used = {}
    for folder in datasets_dir.glob("[!.]*/"):
        files = [path for path in (folder / MANIFEST, build_file(folder)) if path.is_file()]
        if DATASET_NAME.fullmatch(folder.name) and folder / MANIFEST in files:
            with contextlib.suppress(FileNotFoundError):  # It is just being replaced.
                used[folder] = max(path.stat().st_mtime for path in files)
    needed, superseded, newer = set[str](), set[str](), Counter[str]()
    for folder in sorted(used, key=used.__getitem__, reverse=True):
        name = folder.name.rpartition("-")[0]
        newer[name] += 1
        if (
            newer[name] > keep
            and only in (None, name)
            and folder.name not in referred
            and time.time() - used[folder] > HOUR_SECONDS
            and not is_locked(build_lock(folder))
        ):
            superseded.add(folder.name)
            continue
        try:
            needed.update(json.loads((folder / MANIFEST).read_bytes())["partitions"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{folder / MANIFEST}: is damaged") from error
    return needed, superseded


def _read_records(output_dir: Path, datasets_dir: Path, superseded: Collection[str]) -> set[str]:
    """The keys of what all other datasets and young builds are made from, and their records' names.

    Raises `DataError` if a record is damaged.
    """
    needed = set[str]()
    for path in (datasets_dir / ".builds").glob("[!.]*"):
        folder = datasets_dir / path.stem
        is_live = folder.exists() or is_locked(build_lock(folder))
        if folder.name not in superseded and (is_live or not _is_older(path, WEEK_SECONDS)):
            build = read_record(path, Build)
            needed |= {path.name, build.listing, *build.partitions}
    # Another folder of datasets may have been made from the same downloads.
    for place in {datasets_dir, output_dir / "datasets"}:
        for path in (place / ".listings").glob("[!.]*"):
            if path.name in needed or place != datasets_dir or not _is_older(path, WEEK_SECONDS):
                for part in read_record(path, Listing).ranges:
                    # The folder of a file is named by a key.
                    needed.update(Path(part.file.address).parts)
    return needed


def _unneeded(folder: Path, needed: Collection[str], seconds: float) -> list[Path]:
    """The folders in one that nobody needs, has locked or has written to for so long.

    Among them are those with the temporary names of killed writers and cleanings.
    """
    found = []
    for path in sorted(folder.glob("*/")):
        name, is_temporary = path.name, path.name.startswith(TEMPORARY)
        if is_temporary:
            name = name.removeprefix(TEMPORARY).rpartition("-")[0]
        elif name in needed or name.startswith("."):
            continue
        is_free = not path.is_symlink() and not is_locked(folder / ".locks" / name)
        if is_free and _is_older(path, seconds):
            found.append(path)
    return found


def _old_checkpoints(run_dir: Path) -> list[Path]:
    """All but the newest, the newest that is intact, and the one with the lowest loss."""
    folder, found = run_dir / CHECKPOINTS, {*runs.superseded_checkpoints(run_dir, keep=1)}
    if found:
        found -= {runs.newest_checkpoint(run_dir)}
    return sorted([*found, *folder.glob("damaged-step-*"), *folder.glob(f"{TEMPORARY}*")])


def _is_older(path: Path, seconds: float) -> bool:
    """Return whether all files of a folder, or a file, are older; False if it is gone.

    A folder's own time counts only if it is empty, since it changes while the folder is deleted.
    """
    try:
        files = [each for each in path.rglob("*") if not each.is_dir()] or [path]
        return all(time.time() - each.lstat().st_mtime > seconds for each in files)
    except OSError:
        return False


def _size(folder: Path) -> int:
    """Bytes that its files take; those of datasets are links to the shards of partitions."""
    size = 0
    with contextlib.suppress(OSError):  # Another cleaning may delete it at the same time.
        for entry in map(Path.lstat, folder.rglob("*")):
            if entry.st_nlink == 1 or folder.parent.name == PARTITIONS:
                size += entry.st_blocks * BLOCK_BYTES
    return size
