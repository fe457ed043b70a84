"""Datasets in an object store: shards below `.partitions/<key>/`, and the manifest of each dataset.

What is missing there is made and uploaded, what is missing on a machine is downloaded: into the
`.partitions/` of its working folder, which is a folder of datasets like any other.

Keys are hashes of what decides the content, so objects never change. No locks are needed: whoever
makes a partition a second time puts the same objects there again. Shards come first, the record
that vouches for them last. Nothing is deleted but the record of a damaged partition, which then
counts as never made.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path

from infini_model.config.locations import is_url
from infini_model.data.datasets import RECORD, Datasets, describe, link, no_latest
from infini_model.data.make_partition import Advance, make_partition
from infini_model.data.manifest import (
    LATEST,
    ORIGIN,
    PARTITIONS,
    Manifest,
    Origin,
    Shard,
    metadata_files,
    parse_manifest,
    read_manifest,
    read_origin,
)
from infini_model.data.partitions import PartitionRecord, PartitionSpec
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.tokenizers.trained import TokenizerStore
from infini_model.data.verify import Progress, Verified, find_faults
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
from infini_model.runtime.fact_cache import fact_cache_here
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.records import parse_record, write_record
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

GIGABYTE = 10**9
# A record is a few kilobytes: reading one is waiting for an answer.
READ_AT_ONCE = 32
PARTITIONS_AT_ONCE = 16
POLL_SECONDS = 0.1
# An object that differs is read again before it is called damaged: that withdraws its partition.
ATTEMPTS = 2


class StoredDatasets(Datasets):
    """The datasets below `address`, with local copies of what describes them in `folder`.

    Every method raises `StoreError` and `UnreachableError`, and `UserError` on a full disk.
    """

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(folder)
        self.address = address
        self.tokenizers = TokenizerStore(folder, address)
        self._store = ObjectStore(address)

    @property
    def place(self) -> str:
        """The address."""
        return self.address

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The size of every object of all partitions, `<key>/<name>`, by one listing."""
        return self._list()

    def _list(self, key: str = "") -> dict[str, int]:
        below = ObjectStore(f"{self.address}/{PARTITIONS}").list_below(key)
        return {each.key: each.bytes for each in below}

    def partition_keys(self) -> set[str]:
        """The keys of all partitions that are finished now; their shards are not looked at."""
        vars(self).pop("_sizes", None)
        names = (key.split("/") for key in self._sizes)
        return {name[0] for name in names if name[1:] == [RECORD]}

    def find_partitions(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The finished partitions of these keys whose shards are as large as their records say.

        A partition with a fault is named in the log, and its record withdrawn. Checksums are
        compared when shards are downloaded. What is made later is not looked for here.
        """
        there = [key for key in dict.fromkeys(keys) if f"{key}/{RECORD}" in self._sizes]
        records: dict[str, PartitionRecord] = {}
        for key, record in self._read_records(there).items():
            fault = next(self._shard_faults(record.files()), None)
            if fault is not None:
                # Another machine may have made it again since the listing.
                self._sizes.update(self._list(key))
                fault = next(self._shard_faults(record.files()), None)
            if fault is None:
                records[key] = record
            else:
                log.warning("%s; rebuilding its partition", fault)
                self._invalidate(key)
        return records

    def find_made(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The partitions of these keys, which were made after the listing."""
        return self._read_records(keys)

    def _read_records(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        def read(key: str) -> PartitionRecord | None:
            name = f"{PARTITIONS}/{key}/{RECORD}"
            try:
                content, _ = self._store.read(name)
                return parse_record(content, self._store.address_of(name), PartitionRecord)
            except ObjectMissingError:
                return None  # Withdrawn since the listing.
            except StoreError:
                raise
            except DataError as error:
                log.warning("%s; rebuilding the partition", error)
                self._invalidate(key)
                return None

        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            found = zip(keys, pool.map(read, keys), strict=True)
            return {key: record for key, record in found if record is not None}

    def _invalidate(self, key: str) -> None:
        self._store.delete([f"{PARTITIONS}/{key}/{RECORD}"])

    def _shard_faults(self, shards: Iterator[Shard]) -> Iterator[str]:
        """What the listing says is wrong with shards, one line for each."""
        for shard in shards:
            size = self._sizes.get(shard.path)
            place = f"{self.address}/{PARTITIONS}/{shard.path}"
            if size is None:
                yield f"{place}: is missing"
            elif size != shard.bytes:
                yield f"{place}: has {size} bytes, its record says {shard.bytes}"

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec` and upload it, unless it stands there by now.

        Nothing of it stays on this machine.
        """
        record_name = f"{PARTITIONS}/{spec.key}/{RECORD}"
        self._remove_leftovers_once()
        with (
            storage.lock(self.partitions / ".locks" / spec.key),
            storage.named_os_errors(self.partitions),
            tempfile.TemporaryDirectory(
                prefix=f"{storage.TEMPORARY}{spec.key}-",
                dir=self.partitions,
                ignore_cleanup_errors=True,
            ) as folder,
        ):
            if self._store.find(record_name) is not None:
                return
            record = make_partition(spec, tokenizer, Path(folder), advance)
            if self._store.find(record_name) is not None:
                return  # Another machine was faster, and may already have readers.
            for shard in record.files():
                self._store.upload(f"{PARTITIONS}/{shard.path}", Path(folder, shard.file))
            self._store.write(record_name, record.model_dump_json(indent=2).encode())

    def find(self, name: str) -> Manifest | None:
        """A dataset that is complete, described by its local folder from now on; None without one.

        Objects are listed, and no shard is read. Raises `DataError` that names what is missing.
        """
        manifest = self._read_manifest(name)
        if manifest is None:
            return None
        for fault in self._faults(name, manifest):
            raise DataError(fault)
        if not self._is_described(self.folder / name, manifest):
            self._describe(name, manifest)
        return manifest

    def examine(self, name: str, progress: Progress) -> Verified:
        """Find every object of a dataset that is missing or damaged; all its shards are read.

        The records of damaged partitions are withdrawn, so that the next build makes them again.
        `progress(done, total)` counts bytes. Raises `DataError` if there is no such dataset.
        """
        manifest = self._read_manifest(name)
        if manifest is None:
            raise no_dataset(f"{self.address}/{name}")
        faults = list(self._faults(name, manifest))
        shards = {shard.path: shard for _, shard in manifest.files()}
        whole = [each for each in shards.values() if self._sizes.get(each.path) == each.bytes]
        done, total = 0, sum(shard.bytes for shard in whole)
        with ThreadPoolExecutor(PARTITIONS_AT_ONCE) as pool:
            for shard, fault in zip(whole, pool.map(self._damage, whole), strict=True):
                faults += [fault] if fault else []
                done += shard.bytes
                progress(done, total)
        return Verified(manifest, faults)

    def _damage(self, shard: Shard) -> str | None:
        fault = ""
        for _ in range(ATTEMPTS):
            try:
                if self._store.sha256(f"{PARTITIONS}/{shard.path}") == shard.sha256:
                    return None
            except ObjectMissingError as error:
                return str(error)
            except ObjectChangedError as error:
                fault = str(error)
            else:
                fault = ""
        if fault:
            return fault
        # Whoever may only read has found the damage all the same.
        with contextlib.suppress(StoreError, UnreachableError):
            self._invalidate(shard.path.partition("/")[0])
        place = f"{self.address}/{PARTITIONS}/{shard.path}"
        return f"{place}: is damaged: its checksum differs from its record"

    def _read_manifest(self, name: str) -> Manifest | None:
        try:
            content, _ = self._store.read(f"{name}/{storage.MANIFEST}")
        except ObjectMissingError:
            return None
        return parse_manifest(content, f"{self.address}/{name}")

    def _faults(self, name: str, manifest: Manifest) -> Iterator[str]:
        """What listings say is wrong with a dataset, one line for each object."""
        there = {each.key for each in self._store.list_below(name)}
        for file in metadata_files(manifest):
            if f"{name}/{file}" not in there:
                yield f"{self.address}/{name}/{file}: is missing"
        for key in dict.fromkeys(manifest.partitions):
            if f"{key}/{RECORD}" not in self._sizes:
                yield f"{self.address}/{PARTITIONS}/{key}/{RECORD}: is missing"
        shards = {shard.path: shard for _, shard in manifest.files()}
        yield from self._shard_faults(iter(shards.values()))

    def _is_described(self, folder: Path, manifest: Manifest) -> bool:
        """Whether a local folder describes the same shards, whoever has put them together."""
        try:
            there, origin = read_manifest(folder), read_origin(folder)
        except DataError:
            return False
        same = (there.splits, there.tokenizer) == (manifest.splits, manifest.tokenizer)
        complete = all((folder / name).is_file() for name in metadata_files(manifest))
        return same and complete and origin == Origin(datasets=self.address)

    def _describe(self, name: str, manifest: Manifest, tokenizer: Tokenizer | None = None) -> None:
        """Make the local folder of a dataset anew, with the shards that are on this machine."""
        # Not the lock of the build: the caller may hold that.
        with storage.lock(self.folder / ".locks" / f"{name}.pull"):
            storage.remove_leftovers(self.folder, name)
            with storage.atomic_folder(self.folder / name) as temporary:
                describe(temporary, manifest)
                # A training may be reading what has been downloaded before.
                for file, shard in manifest.files():
                    here = self.partitions / shard.path
                    if here.is_file() and here.stat().st_size == shard.bytes:
                        link(here, temporary / file)
                if tokenizer is not None:
                    tokenizer.save(temporary)
                elif manifest.tokenizer.spec != "bytes":
                    self._store.download(f"{name}/{TOKENIZER_FILE}", temporary / TOKENIZER_FILE)
                write_record(temporary / ORIGIN, Origin(datasets=self.address))

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Put a dataset of finished partitions together: its local folder, then the store."""
        name = manifest.folder_name
        self._describe(name, manifest, tokenizer)
        for file in [*metadata_files(manifest), storage.MANIFEST]:
            self._store.write(f"{name}/{file}", (self.folder / name / file).read_bytes())

    def names(self) -> list[str]:
        """The names of the finished datasets, the one made last first."""
        folders = (name for name in self._store.folders() if not name.startswith("."))
        manifests = {name: self._store.find(f"{name}/{storage.MANIFEST}") for name in folders}
        made = {name: found.modified for name, found in manifests.items() if found is not None}
        return sorted(made, key=made.__getitem__, reverse=True)

    def point_latest(self, name: str) -> None:
        """Make this dataset the newest one, for all machines and on this one."""
        self._store.write(LATEST, name.encode())
        super().point_latest(name)

    def newest(self) -> str:
        """The name of the dataset that was asked for last. Raises `DataError` if there is none."""
        try:
            return self._store.read(LATEST)[0].decode().strip()
        except ObjectMissingError:
            raise no_latest(self.address) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.address}/{LATEST}: is damaged: {error.reason}") from error


def datasets_at(place: Path | str, address: str | None = None) -> Datasets:
    """The datasets of a folder, or those at an address.

    `address` is what the folder is a working copy of; an address as the place is only read.
    """
    if is_url(place):
        return StoredDatasets(str(place), Path())
    return Datasets(Path(place)) if address is None else StoredDatasets(address, Path(place))


def no_dataset(address: str) -> DataError:
    """The error to raise if there is no dataset at an address."""
    return DataError(f"{address}: is not a dataset: it has no {storage.MANIFEST}")


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

    Raises `DataError` that names an object that is missing or damaged, and withdraws the record of
    its partition, so that the preprocess stage makes it again; `UserError` if the disk has no room
    for them; `StoreError` and `UnreachableError`.
    """
    origin = read_origin(folder)
    if origin is None:
        return
    listed = list(read_manifest(folder).files())
    paths, facts = [f"{folder}/{name}" for name, _ in listed], fact_cache_here(folder.parent)
    faults = find_faults(paths, [shard for _, shard in listed], facts)
    lacking = {name: shard for (name, shard), fault in zip(listed, faults, strict=True) if fault}
    if lacking:
        here = Datasets(folder.parent)
        keys = {shard.path.partition("/")[0] for shard in lacking.values()}
        partitions: dict[str, dict[str, Shard]] = {key: {} for key in sorted(keys)}
        for _, shard in listed:
            if (key := shard.path.partition("/")[0]) in keys:
                partitions[key][shard.path] = shard
        _download_missing(origin.datasets, here, partitions, progress, tell, stop)
        # Nobody else links, or describes the dataset anew, meanwhile.
        with (
            storage.lock(folder.parent / ".locks" / f"{folder.name}.pull"),
            storage.named_os_errors(folder),
        ):
            for name, shard in lacking.items():
                temporary = folder / f"{name}.new"
                temporary.unlink(missing_ok=True)
                link(here.partitions / shard.path, temporary)
                temporary.replace(folder / name)
                # A rename onto another link to the same file does nothing.
                temporary.unlink(missing_ok=True)
    facts.save()


def _download_missing(
    address: str,
    here: Datasets,
    partitions: dict[str, dict[str, Shard]],
    progress: OnProgress,
    tell: Callable[[str], None],
    stop: Callable[[], Exception | None],
) -> None:
    """Download those partitions, by key and with their shards by path, that are not here."""
    there = here.find_partitions(list(partitions))
    missing = {
        key: shards
        for key, shards in partitions.items()
        if not (key in there and _has(there[key], shards))
    }
    if not missing:
        return
    size = sum(shard.bytes for found in missing.values() for shard in found.values())
    free = shutil.disk_usage(here.folder).free
    if size > free:
        raise UserError(
            f"{here.partitions}: {size / GIGABYTE:.3g} GB of {address} are to be downloaded, "
            f'{free / GIGABYTE:.3g} GB are free; "A dataset larger than the disk" in '
            "docs/data.md says how to train without a copy"
        )
    count = f"{len(missing):,} of {len(partitions):,} partitions"
    tell(f"downloading {count}, {size / GIGABYTE:.3g} GB, from {address}")
    _download_all(address, here, missing, size, progress, stop)
    # Their checksums were compared on the way.
    here.find_partitions(list(missing))


def _download_all(
    address: str,
    here: Datasets,
    missing: dict[str, dict[str, Shard]],
    total: int,
    progress: OnProgress,
    stop: Callable[[], Exception | None],
) -> None:
    """Download partitions, many at once. Raises the first error; the others end."""
    done, store = 0, ObjectStore(f"{address}/{PARTITIONS}")
    with ThreadPoolExecutor(PARTITIONS_AT_ONCE, thread_name_prefix="download") as pool:
        downloads: dict[Future[None], int] = {
            pool.submit(_download, store, here, key, shards): sum(
                shard.bytes for shard in shards.values()
            )
            for key, shards in missing.items()
        }
        pending = set(downloads)
        try:
            while pending:
                finished, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
                for download in finished:
                    download.result()
                    done += downloads[download]
                _end_if(stop)
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _has(record: PartitionRecord, shards: dict[str, Shard]) -> bool:
    """Whether a partition is the one in the store, not one that another version has made."""
    sums = {shard.path: shard.sha256 for shard in record.files()}
    return all(sums.get(path) == shard.sha256 for path, shard in shards.items())


def _end_if(stop: Callable[[], Exception | None]) -> None:
    if reason := stop():
        raise reason


def _download(store: ObjectStore, here: Datasets, key: str, shards: dict[str, Shard]) -> None:
    """Download a partition, unless another process has by now."""
    target = here.partitions / key
    with storage.lock(here.partitions / ".locks" / key):
        there = here.find_partitions([key])
        if there and _has(there[key], shards):
            return
        storage.remove_leftovers(here.partitions, key)
        with storage.atomic_folder(target) as folder:
            for path, shard in shards.items():
                _download_shard(store, path, folder / Path(path).name, shard.sha256)
            _download_shard(store, f"{key}/{RECORD}", folder / RECORD, None)


def _download_shard(store: ObjectStore, name: str, target: Path, sha256: str | None) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            store.download(name, target, sha256)
        except ObjectChangedError:
            if attempt == ATTEMPTS:
                raise
        except (ObjectDamagedError, ObjectMissingError) as error:
            if attempt == ATTEMPTS:
                with contextlib.suppress(StoreError, UnreachableError):
                    store.delete([f"{name.partition('/')[0]}/{RECORD}"])
                advice = "run the preprocess stage again, which rebuilds its partition"
                raise DataError(f"{error}; {advice}") from error
        else:
            return
