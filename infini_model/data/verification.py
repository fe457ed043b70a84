"""Comparing shards with their checksums: always while that is cheap, else where something is new.

The checksum of a shard is computed if this machine has not seen the file before or the file was
written since, if all shards together are small, and on demand (`infini verify`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from infini_model.data.manifest import (
    Manifest,
    Shard,
    metadata_files,
    read_manifest,
    read_origin,
)
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache, fact_cache_here
from infini_model.runtime.machine import available_cores

# Below this many bytes in all, every checksum is compared every time: a second of work.
SMALL_BYTES = 2 << 30

# Called with the bytes that are done and those there are in all.
Progress = Callable[[int, int], None]


class Verified(NamedTuple):
    """A dataset that was verified, and what is wrong with it: one line for each damaged file."""

    manifest: Manifest
    faults: list[str]


def find_faults(
    folder: Path,
    files: Iterable[tuple[str, Shard]],
    facts: FactCache,
    *,
    every: bool | None = None,
    progress: Progress | None = None,
) -> list[str | None]:
    """What is wrong with each file of `folder` in one line, or None if it is what its record says.

    `every` compares all checksums, or only those that are not remembered; by default all where that
    is cheap. `progress(done, total)` counts the bytes of the files whose checksums are compared.
    """
    # Not paths: to make and to ask for 300,000 of them takes longer than the system's answers.
    listed = [(f"{folder}/{name}", shard) for name, shard in files]
    if every is None:
        every = sum(shard.bytes for _, shard in listed) < SMALL_BYTES
    faults: list[str | None] = [None] * len(listed)
    to_hash: list[int] = []
    for number, (path, shard) in enumerate(listed):
        try:
            stat = os.stat(path)  # noqa: PTH116
        except OSError as error:
            faults[number] = _unreadable(path, error)
            continue
        if stat.st_size != shard.bytes:
            faults[number] = f"{path}: has {stat.st_size} bytes, its record says {shard.bytes}"
        elif every or facts.get(_version(stat)) != shard.sha256:
            to_hash.append(number)

    def hashed(number: int) -> str | None:
        path, shard = listed[number]
        try:
            version = _version(Path(path).stat())
            checksum = storage.sha256(Path(path))
        except OSError as error:
            return _unreadable(path, error)
        if checksum == shard.sha256:
            facts.put(version, checksum)
            return None
        facts.forget(version)
        return f"{path}: is damaged: its checksum differs from its record"

    done, total = 0, sum(listed[number][1].bytes for number in to_hash)
    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        for number, fault in zip(to_hash, pool.map(hashed, to_hash), strict=True):
            faults[number] = fault
            done += listed[number][1].bytes
            if progress is not None:
                progress(done, total)
    return faults


def remember(path: Path, shard: Shard, facts: FactCache) -> None:
    """Remember the checksum of a shard that this process has just written."""
    facts.put(_version(path.stat()), shard.sha256)


def _version(stat: os.stat_result) -> str:
    """What changes when a shard is written; not ctime, which making a hard link changes too."""
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _unreadable(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: is missing"
    return f"{path}: cannot be read: {error.strerror}"


def verify_dataset(folder: Path) -> Manifest:
    """Check that a dataset folder is complete and its shards are what the manifest says.

    Raises `DataError` in one line that names the first file that is missing or damaged.
    """
    manifest, faults = examine_dataset(folder)
    if faults:
        raise DataError(faults[0])
    return manifest


def examine_dataset(
    folder: Path, *, every: bool | None = None, progress: Progress | None = None
) -> Verified:
    """Find every file of a dataset folder that is missing or damaged.

    `every` and `progress` are those of `find_faults`. What was found damaged is forgotten, so that
    the next build compares its checksum again, however large the dataset is. Shards that the folder
    leaves in an object store may be absent.

    Raises `DataError` in one line if the folder is not a dataset or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    faults = [
        f"{folder / name}: is missing"
        for name in metadata_files(manifest)
        if not (folder / name).is_file()
    ]
    facts = fact_cache_here(folder.parent)
    files = manifest.files()
    if read_origin(folder) is not None:
        files = (entry for entry in files if (folder / entry[0]).exists())
    found = find_faults(folder, files, facts, every=every, progress=progress)
    facts.save()
    return Verified(manifest, faults + [fault for fault in found if fault])
