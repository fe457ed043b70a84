"""Comparing shards with what their records say.

Sizes and times tell, without reading: a shard is as old as its record, or older. The checksum of
one that was written later is compared, and those of all on demand (`infini verify`). A machine
finds that out for all that see the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infini_model.data.manifest import (
    ASSEMBLED,
    PARTITIONS,
    Manifest,
    Shard,
    has_own_shards,
    metadata_files,
    read_manifest,
    read_origin,
)
from infini_model.runtime import storage
from infini_model.runtime.fact_cache import FactCache, fact_cache
from infini_model.runtime.machine import available_cores
from infini_model.runtime.stage_protocol import OnProgress


def find_faults(
    files: Sequence[tuple[str, Shard]],
    recorded: Sequence[int],
    facts: FactCache,
    *,
    reads_all: bool = False,
    progress: OnProgress = lambda _done, _total: None,
) -> list[str | None]:
    """What is wrong with each file in one line, or None if it is what its record says.

    `recorded` is when the record of each was written, in ns since the epoch; checksums of files
    that were written later are compared, or those of all. `progress(done, total)` counts the bytes
    of these files.
    """
    faults: list[str | None] = [None] * len(files)
    to_hash: list[int] = []
    for number, (path, shard) in enumerate(files):
        try:
            stat = os.stat(path)  # noqa: PTH116 - paths take longer to make than to ask for
        except OSError as error:
            faults[number] = _unreadable(path, error)
            continue
        if stat.st_size != shard.bytes:
            faults[number] = f"{path}: has {stat.st_size} bytes, its record says {shard.bytes}"
            continue
        known = facts.get(_version(stat))
        is_older = known is None and stat.st_mtime_ns <= recorded[number]
        if reads_all or (known != shard.sha256 and not is_older):
            to_hash.append(number)

    def fault_of(number: int) -> str | None:
        path, shard = files[number]
        try:
            version = _version(os.stat(path))  # noqa: PTH116
            checksum = storage.sha256(path)
        except OSError as error:
            return _unreadable(path, error)
        is_whole = checksum == shard.sha256
        # That of a damaged file, too: nobody takes it for what its record says.
        if not (is_whole and reads_all):
            facts.put(version, checksum)
        return None if is_whole else f"{path}: is damaged: its checksum differs from its record"

    done, total = 0, sum(files[number][1].bytes for number in to_hash)
    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        for number, fault in zip(to_hash, pool.map(fault_of, to_hash), strict=True):
            faults[number] = fault
            done += files[number][1].bytes
            progress(done, total)
    return faults


def _version(stat: os.stat_result) -> str:
    """Describe a shard by what changes when it is written, and is the same on all machines.

    Not by ctime, which making a hard link changes too.
    """
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _unreadable(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: is missing"
    return f"{path}: cannot be read: {error.strerror}"


def examine_dataset(
    folder: Path,
    *,
    reads_all: bool = False,
    progress: OnProgress = lambda _done, _total: None,
) -> tuple[Manifest, list[str]]:
    """Find every file of a dataset folder that is missing or damaged: a line for each.

    `reads_all` and `progress` are those of `find_faults`. Shards that are not in the folder but
    beside it, as in a mounted bucket, are only read if all are. A working copy of a dataset in a
    store may lack shards.

    Raises `DataError` in one line if the folder is not a dataset or its manifest is damaged.
    """
    manifest = read_manifest(folder)
    faults = [
        f"{folder / name}: is missing"
        for name in metadata_files(manifest)
        if not (folder / name).is_file()
    ]
    files = [(f"{folder}/{name}", shard) for name, shard in manifest.files()]
    recorded, facts = assembled_at(folder), fact_cache(folder.parent)
    if not has_own_shards(folder):
        beside, recorded = folder.parent / PARTITIONS, sys.maxsize
        files = [(f"{beside}/{shard.path}", shard) for _, shard in files]
    if read_origin(folder) is not None:
        files = [(path, shard) for path, shard in files if os.path.exists(path)]  # noqa: PTH110
    times = [recorded] * len(files)
    found = find_faults(files, times, facts, reads_all=reads_all, progress=progress)
    facts.save()
    return manifest, faults + [fault for fault in found if fault]


def assembled_at(folder: Path) -> int:
    """Look up when a dataset folder was put together, in ns since the epoch; 0 if it is unknown.

    That is not its manifest's time, which is that of the last use.
    """
    try:
        return (folder / ASSEMBLED).stat().st_mtime_ns
    except OSError:
        return 0
