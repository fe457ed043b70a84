"""The SHA-256 of local source files, computed again only if a file is new or was written since."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from infini_model.data.sources.files import SourceFile, local_version
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.machine import available_cores

# A file written this recently could be written again without another timestamp.
SETTLED_NANOSECONDS = 2_000_000_000


def fingerprint(paths: Sequence[str], facts: FactCache) -> list[SourceFile]:
    """The files with their sizes and SHA-256. Raises `DataError` that names an unreadable file."""
    stats = [_stat(path) for path in paths]
    versions = [local_version(stat) for stat in stats]
    checksums = [facts.get(version) for version in versions]
    new = [number for number, checksum in enumerate(checksums) if checksum is None]
    # To hand a small file to a thread takes longer than to read it.
    large = [number for number in new if stats[number].st_size >= storage.SMALL_BYTES]
    small = [number for number in new if stats[number].st_size < storage.SMALL_BYTES]
    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        read_by_threads = pool.map(_checksum, [paths[number] for number in large])
        read_here = [_checksum(paths[number]) for number in small]
        found = chain(read_here, read_by_threads)
        for number, checksum in zip([*small, *large], found, strict=True):
            checksums[number] = checksum
            if (
                _is_settled(stats[number])
                and local_version(_stat(paths[number])) == versions[number]
            ):
                facts.put(versions[number], checksum)
    return [
        SourceFile(
            address=path,
            bytes=stat.st_size,
            fingerprint=f"sha256:{checksum}",
            version=version,
        )
        for path, stat, checksum, version in zip(paths, stats, checksums, versions, strict=True)
    ]


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _checksum(path: str) -> str:
    try:
        return storage.sha256(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _is_settled(stat: os.stat_result) -> bool:
    """Whether another write would surely change the timestamps, whose steps may be coarse."""
    return time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > SETTLED_NANOSECONDS
