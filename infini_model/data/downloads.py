"""The shards of a dataset in an object store, downloaded to a machine that trains on them.

They go into the `.partitions/` of its working folder, which is a folder of datasets like any other,
so a later dataset downloads no more than the partitions that are new.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from infini_model.data.datasets import RECORD, Datasets
from infini_model.data.manifest import ASSEMBLED, PARTITIONS, Shard, read_manifest, read_origin
from infini_model.data.partitions import PartitionRecord
from infini_model.data.verify import assembled_at, find_faults
from infini_model.runtime import storage
from infini_model.runtime.errors import (
    DataError,
    ObjectChangedError,
    ObjectDamagedError,
    ObjectMissingError,
    StoreError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

GIGABYTE = 10**9
PARTITIONS_AT_ONCE = 16
POLL_SECONDS = 0.1


def download_shards(
    folder: Path,
    *,
    progress: OnProgress = lambda _done, _total: None,
    tell: Callable[[str], None] = log.info,
    stop: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Download the partitions that a working copy of a dataset lacks, and link to their shards.

    Does nothing for a folder that is no copy. A partition appears when it is complete and its
    checksums were compared, so what is interrupted goes on with the next one. `progress(done,
    total)` counts bytes, ten times a second; `tell` receives what is being done, in a line each;
    `stop` is polled as often, and what it returns ends the download.

    Raises `DataError` that names an object that is missing or damaged, and invalidates the record
    of its partition, so that the preprocess stage makes it again; `UserError` if the disk has no
    room for them; `StoreError` and `UnreachableError`.
    """
    origin = read_origin(folder)
    if origin is None:
        return
    listed, facts = dict(read_manifest(folder).files()), fact_cache(folder.parent)
    files = [(f"{folder}/{name}", shard) for name, shard in listed.items()]
    faults = find_faults(files, [assembled_at(folder)] * len(files), facts)
    lacking = [name for name, fault in zip(listed, faults, strict=True) if fault]
    if lacking:
        partitions: dict[str, dict[str, Shard]] = {_key(listed[name]): {} for name in lacking}
        for shard in listed.values():
            if _key(shard) in partitions:
                partitions[_key(shard)][shard.path] = shard
        here = Datasets(folder.parent)
        _download_missing(origin, here, partitions, progress, tell, stop)
        # Nobody else links, or describes the dataset anew, meanwhile.
        with (
            storage.lock(folder.parent / ".locks" / f"{folder.name}.pull"),
            storage.named_os_errors(folder),
        ):
            for name in lacking:
                temporary = folder / f"{name}.new"
                temporary.unlink(missing_ok=True)
                storage.link(here.partitions / listed[name].path, temporary)
                temporary.replace(folder / name)
                # A rename onto another link to the same file does nothing.
                temporary.unlink(missing_ok=True)
            os.utime(folder / ASSEMBLED)
    facts.save()


def _key(shard: Shard) -> str:
    return shard.path.partition("/")[0]


def _download_missing(
    address: str,
    here: Datasets,
    partitions: dict[str, dict[str, Shard]],
    progress: OnProgress,
    tell: Callable[[str], None],
    stop: Callable[[], Exception | None],
) -> None:
    """Download those partitions, by key and with their shards by path, that are not here.

    Many are downloaded at once. The first error is raised; the others end.
    """
    there = here.find_partitions(list(partitions))
    missing = {
        key: shards for key, shards in partitions.items() if not _has(there.get(key), shards)
    }
    if not missing:
        return
    done, total = 0, sum(shard.bytes for shards in missing.values() for shard in shards.values())
    free = shutil.disk_usage(here.folder).free
    if total > free:
        raise UserError(
            f"{here.partitions}: {total / GIGABYTE:.3g} GB of {address} are to be downloaded, "
            f'{free / GIGABYTE:.3g} GB are free; "A dataset larger than the disk" in '
            "docs/data.md says how to train without a copy"
        )
    count = f"{len(missing):,} of {len(partitions):,} partitions"
    tell(f"downloading {count}, {total / GIGABYTE:.3g} GB, from {address}")
    store = ObjectStore(f"{address}/{PARTITIONS}")
    with ThreadPoolExecutor(PARTITIONS_AT_ONCE, thread_name_prefix="download") as pool:
        pending = {pool.submit(_download, store, here, *each) for each in missing.items()}
        try:
            while pending:
                finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                done += sum(download.result() for download in finished)
                if reason := stop():
                    raise reason
                progress(done, total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _has(record: PartitionRecord | None, shards: dict[str, Shard]) -> bool:
    """Whether a partition is the one in the store, not one that another version has made."""
    sums = {} if record is None else {shard.path: shard.sha256 for shard in record.files()}
    return all(sums.get(path) == shard.sha256 for path, shard in shards.items())


def _download(store: ObjectStore, here: Datasets, key: str, shards: dict[str, Shard]) -> int:
    """Download a partition, unless another process has by now; returns its bytes."""
    with storage.lock(here.partitions / ".locks" / key):
        if not _has(here.find_intact(key), shards):
            storage.remove_leftovers(here.partitions, key)
            with storage.atomic_folder(here.partitions / key) as folder:
                sums = {path: shard.sha256 for path, shard in shards.items()}
                for path, sha256 in [*sums.items(), (f"{key}/{RECORD}", None)]:
                    _read(store, path, folder / Path(path).name, sha256)
    return sum(shard.bytes for shard in shards.values())


def _read(store: ObjectStore, path: str, target: Path, sha256: str | None) -> None:
    """Download an object of a partition, again if it is not what its record says.

    If it is missing or damaged then too, the partition is invalidated. Raises `DataError`.
    """
    with contextlib.suppress(ObjectChangedError, ObjectDamagedError, ObjectMissingError):
        store.download(path, target, sha256)
        return
    try:
        store.download(path, target, sha256)
    except (ObjectDamagedError, ObjectMissingError) as error:
        # Whoever may only read has found the damage all the same.
        with contextlib.suppress(StoreError, UnreachableError):
            store.delete([f"{path.partition('/')[0]}/{RECORD}"])
        advice = "run the preprocess stage again, which rebuilds its partition"
        raise DataError(f"{error}; {advice}") from error
