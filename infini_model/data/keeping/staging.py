"""Copying the shards of a stored dataset to this machine, compared with their checksums on the way.

Copies are kept by partition, `<cache>/<partition>/<shard>`, and the dataset folder links to them:
the next dataset copies only its new partitions. A shard has its name only when it is complete and
undamaged, so what is interrupted goes on with the next shard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from infini_model.data.keeping.holds import cache_lock, held_partitions, hold
from infini_model.data.keeping.stored_partitions import ATTEMPTS, SHARDS_AT_ONCE, withdraw
from infini_model.data.manifest import Manifest, Shard, read_manifest, read_origin
from infini_model.data.verification import find_faults, remember
from infini_model.runtime import storage
from infini_model.runtime.errors import (
    DataError,
    ObjectChangedError,
    ObjectDamagedError,
    ObjectMissingError,
    StoreError,
)
from infini_model.runtime.fact_cache import FactCache, fact_cache_here
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

GIGABYTE = 10**9
POLL_SECONDS = 0.1


@contextlib.contextmanager
def staged_dataset(
    folder: Path,
    cache_dir: Path | None = None,
    cache_gigabytes: float | None = None,
    *,
    progress: OnProgress = lambda _done, _total: None,
    tell: Callable[[str], None] = log.info,
    stop: Callable[[], Exception | None] = lambda: None,
) -> Iterator[None]:
    """Copy the shards that a dataset folder lacks from its origin, and link them into the folder.

    While the block runs nobody removes the copies. Waits while another process copies to the same
    folder.

    A folder without an origin has all its shards. `cache_dir` defaults to `.staged/` beside the
    folder. If the dataset, with the others that are in use, has more than `cache_gigabytes`,
    nothing is copied. `progress(done, total)` counts bytes, ten times a second. `tell` receives
    what is being done, in a line each. `stop` is polled as often; what it returns ends the staging.

    Raises `DataError` that names an object that is missing or damaged, and withdraws the record of
    its partition, so that the preprocess stage makes it again; `UserError` on a full disk;
    `StoreError` and `UnreachableError`.
    """
    origin = read_origin(folder)
    if origin is None:
        yield
        return
    cache = (cache_dir or folder.parent / ".staged").absolute()

    def on_copied(done: int, total: int) -> None:
        _end_if(stop)
        progress(done, total)

    with contextlib.ExitStack() as stack:
        with _only_copier(cache, tell, stop):
            manifest = read_manifest(folder)
            stack.enter_context(hold(cache, manifest.partitions))
            _stage(folder, manifest, origin.partitions, cache, cache_gigabytes, on_copied, tell)
        yield


@contextlib.contextmanager
def _only_copier(
    cache: Path, tell: Callable[[str], None], stop: Callable[[], Exception | None]
) -> Iterator[None]:
    """Hold the lock of the cache; say so once if it has to be waited for."""
    told = False
    while True:
        with storage.lock(cache_lock(cache), wait=False) as is_free:
            if is_free:
                yield
                return
        if not told:
            tell(f"waiting for another process that copies shards to {cache}")
            told = True
        _end_if(stop)
        time.sleep(POLL_SECONDS)


def _end_if(stop: Callable[[], Exception | None]) -> None:
    if reason := stop():
        raise reason


def _stage(
    folder: Path,
    manifest: Manifest,
    partitions: str,
    cache: Path,
    cache_gigabytes: float | None,
    progress: OnProgress,
    tell: Callable[[str], None],
) -> None:
    # Equal partitions share their shards.
    shards = {shard.path: shard for _, shard in manifest.files()}
    total = sum(shard.bytes for shard in shards.values())
    facts = fact_cache_here(folder.parent)
    missing = _missing(list(shards.values()), cache, facts, tell)
    limit = None if cache_gigabytes is None else int(cache_gigabytes * GIGABYTE)
    if limit is not None and total > limit:
        tell(
            f"dataset {folder.name} has {total / GIGABYTE:.3g} GB, more than "
            f"data.cache_gigabytes={cache_gigabytes:g}: its shards stay in {partitions}"
        )
        return
    if missing:
        size = sum(shard.bytes for shard in missing)
        if limit is not None:
            held = held_partitions(cache)
            others = sum(_size(cache / key) for key in held.difference(manifest.partitions))
            if total + others > limit:
                tell(
                    f"dataset {folder.name} has {total / GIGABYTE:.3g} GB and others that are in "
                    f"use {others / GIGABYTE:.3g} GB, more than "
                    f"data.cache_gigabytes={cache_gigabytes:g}: its shards stay in {partitions}"
                )
                return
            _make_room(cache, limit - size, held)
        count = f"{len(missing):,} of {len(shards):,} shards"
        tell(f"copying {count}, {size / GIGABYTE:.3g} GB, from {partitions}")
        _copy(missing, ObjectStore(partitions), cache, progress)
    for shard in missing:
        remember(cache / shard.path, shard, facts)
    facts.save()
    _link(folder, manifest, cache)


def _missing(
    shards: Sequence[Shard], cache: Path, facts: FactCache, tell: Callable[[str], None]
) -> list[Shard]:
    """The shards of which the cache has no intact copy; damaged ones are removed."""
    there = [shard for shard in shards if (cache / shard.path).exists()]
    faults = find_faults(cache, [(shard.path, shard) for shard in there], facts)
    intact = set()
    for shard, fault in zip(there, faults, strict=True):
        if fault is None:
            intact.add(shard.path)
        else:
            tell(f"{fault}; copying it again")
            (cache / shard.path).unlink(missing_ok=True)
    return [shard for shard in shards if shard.path not in intact]


def _copy(shards: Sequence[Shard], store: ObjectStore, cache: Path, progress: OnProgress) -> None:
    """Copy shards into the cache, several at once. Raises the first error; the others end."""
    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="staging") as pool:
        copies: dict[Future[None], int] = {
            pool.submit(_copy_one, shard, store, cache): shard.bytes for shard in shards
        }
        pending = set(copies)
        try:
            while pending:
                finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                for copy in finished:
                    copy.result()
                    done += copies[copy]
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy_one(shard: Shard, store: ObjectStore, cache: Path) -> None:
    target = cache / shard.path
    storage.make_folder(target.parent)
    # Nobody else writes here: the caller holds the lock of the cache.
    storage.remove_leftovers(target.parent, target.name)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            store.download(shard.path, target, shard.sha256)
        except ObjectMissingError as error:
            raise _withdrawn(store, shard, error) from error
        except (ObjectChangedError, ObjectDamagedError) as error:
            if attempt < ATTEMPTS:
                continue
            if isinstance(error, ObjectDamagedError):
                raise _withdrawn(store, shard, error) from error
            raise
        return


def _withdrawn(store: ObjectStore, shard: Shard, error: StoreError) -> DataError:
    """The error to raise after the record of a shard's partition has been deleted."""
    withdraw(store, shard)
    return DataError(f"{error}; run the preprocess stage again, which rebuilds its partition")


def _link(folder: Path, manifest: Manifest, cache: Path) -> None:
    """Link the cached shards into the dataset folder, and note that they are used now.

    Symbolic links: the cache may be another disk, and a shard that is dropped frees its space.
    """
    for key in manifest.partitions:
        with contextlib.suppress(OSError):
            os.utime(cache / key)
    with storage.named_os_errors(folder):
        for name, shard in manifest.files():
            link, target = folder / name, cache / shard.path
            if link.is_symlink() and link.readlink() == target:
                continue
            temporary = link.with_name(f"{storage.TEMPORARY}{link.name}-{os.getpid()}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.replace(link)


def _make_room(cache: Path, allowed: int, held: Collection[str]) -> None:
    """Drop the partitions that were used longest ago until the cache has `allowed` bytes.

    Those that are held stay, this dataset's among them: a training that found all its shards here
    looks for none of them in the store.
    """
    folders = [path for path in cache.glob("[!.]*") if path.is_dir()]
    used = {path: _size(path) for path in folders}
    left = sum(used.values())
    for path in sorted(folders, key=lambda path: path.stat().st_mtime):
        if left <= allowed:
            return
        if path.name not in held:
            shutil.rmtree(path, ignore_errors=True)
            left -= used[path]


def _size(folder: Path) -> int:
    """The bytes of the files in a folder; none if there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except FileNotFoundError:
        return 0
