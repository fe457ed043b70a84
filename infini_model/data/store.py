"""Datasets in an object store: shards below `.partitions/<key>/`, and the manifest of each dataset.

What is missing there is made and uploaded. A machine that trains downloads what it lacks
(`infini_model.data.downloads`).

Keys are hashes of what decides the content, so objects never change. No locks are needed: whoever
makes a partition a second time puts the same objects there again. Shards come first, the record
that vouches for them last. Nothing is deleted but the record of a damaged partition, which then
counts as never made.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from infini_model.config.locations import is_url, working_folder
from infini_model.data.datasets import RECORD, Datasets, describe, no_latest
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
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.tokenizers.trained import TokenizerStore
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, ObjectMissingError
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.records import parse_record, write_record

log = logging.getLogger(__name__)

# A record is a few kilobytes: reading one is waiting for an answer.
READ_AT_ONCE = 32


class StoredDatasets(Datasets):
    """The datasets below `address`, with local copies of what describes them in `folder`.

    Every method raises `StoreError` and `UnreachableError`, and `UserError` on a full disk.
    """

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(folder)
        self.place = address
        self.tokenizers = TokenizerStore(folder, address)
        self._store = ObjectStore(address)
        self._shards = ObjectStore(f"{address}/{PARTITIONS}")

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """The size of every object of all partitions, by the hash of `<key>/<name>`; one listing.

        Of 100,000 partitions the names themselves would take 50 MB more.
        """
        return self._list()

    def _list(self, key: str = "") -> dict[int, int]:
        sizes: dict[int, int] = {}
        self._shards.visit_below(key, lambda each: sizes.update({hash(each.key): each.bytes}))
        return sizes

    def count_missing(self, keys: Iterable[str]) -> int:
        there = self._list()
        return sum(hash(f"{key}/{RECORD}") not in there for key in set(keys))

    def find_partitions(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The finished partitions of these keys whose shards are as large as their records say.

        A partition with a fault is named in the log, and its record invalidated. Checksums are
        compared when shards are downloaded. What is made later is not looked for here.
        """
        there = [key for key in dict.fromkeys(keys) if hash(f"{key}/{RECORD}") in self._sizes]
        records: dict[str, PartitionRecord] = {}
        for key, record in self.read_records(there).items():
            fault = next(self._shard_faults(record.files()), None)
            if fault is not None:
                # Another machine may have made it again since the listing.
                self._sizes.update(self._list(key))
                fault = next(self._shard_faults(record.files()), None)
            if fault is None:
                records[key] = record
            else:
                log.warning("%s; rebuilding its partition", fault)
                self._shards.delete([f"{key}/{RECORD}"])
        return records

    def read_records(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The partitions of these keys, which were made after the listing."""

        def read(key: str) -> PartitionRecord | None:
            name = f"{key}/{RECORD}"
            try:
                content, _ = self._shards.read(name)
                return parse_record(content, self._shards.address_of(name), PartitionRecord)
            except ObjectMissingError:
                return None  # Invalidated since the listing.
            except DataError as error:
                log.warning("%s; rebuilding its partition", error)
                self._shards.delete([name])
                return None

        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            found = zip(keys, pool.map(read, keys), strict=True)
            return {key: record for key, record in found if record is not None}

    def _shard_faults(self, shards: Iterable[Shard]) -> Iterator[str]:
        """What the listing says is wrong with shards, one line for each."""
        for shard in shards:
            size = self._sizes.get(hash(shard.path))
            if size is None:
                yield f"{self._shards.address}/{shard.path}: is missing"
            elif size != shard.bytes:
                place = f"{self._shards.address}/{shard.path}"
                yield f"{place}: has {size} bytes, its record says {shard.bytes}"

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec` and upload it, unless it stands there by now.

        Nothing of it stays on this machine.
        """
        record_name = f"{spec.key}/{RECORD}"
        with (
            storage.lock(self.partitions / ".locks" / spec.key),
            storage.named_os_errors(self.partitions),
            tempfile.TemporaryDirectory(
                prefix=f"{storage.TEMPORARY}{spec.key}-",
                dir=self.partitions,
                ignore_cleanup_errors=True,
            ) as folder,
        ):
            if self._shards.find(record_name) is not None:
                return
            record = make_partition(spec, tokenizer, Path(folder), advance)
            if self._shards.find(record_name) is not None:
                return  # Another machine was faster, and may already have readers.
            for shard in record.files():
                self._shards.upload(shard.path, Path(folder, shard.file))
            self._shards.write(record_name, record.model_dump_json(indent=2).encode())

    def find(self, name: str) -> Manifest | None:
        """A dataset that is complete, described by its local folder from now on; None without one.

        Objects are listed, and no shard is read. Raises `DataError` that names what is missing.
        """
        manifest = self._read_manifest(name)
        if manifest is None:
            return None
        # Not after the listing: the second manifest and that would be in memory at once.
        is_described = self._is_described(self.folder / name, manifest)
        for fault in self._faults(name, manifest):
            raise DataError(fault)
        if not is_described:
            self._describe(name, manifest)
        return manifest

    def _read_manifest(self, name: str) -> Manifest | None:
        try:
            content, _ = self._store.read(f"{name}/{storage.MANIFEST}")
        except ObjectMissingError:
            return None
        return parse_manifest(content, f"{self.place}/{name}")

    def _faults(self, name: str, manifest: Manifest) -> Iterator[str]:
        """What listings say is wrong with a dataset, one line for each object."""
        there = {each.key for each in self._store.list_below(name)}
        for file in metadata_files(manifest):
            if f"{name}/{file}" not in there:
                yield f"{self.place}/{name}/{file}: is missing"
        for key in dict.fromkeys(manifest.partitions):
            if hash(f"{key}/{RECORD}") not in self._sizes:
                yield f"{self._shards.address}/{key}/{RECORD}: is missing"
        shards = {shard.path: shard for _, shard in manifest.files()}
        yield from self._shard_faults(shards.values())

    def _is_described(self, folder: Path, manifest: Manifest) -> bool:
        """Whether a local folder describes the same shards, whoever has put them together."""
        try:
            there, origin = read_manifest(folder), read_origin(folder)
        except DataError:
            return False
        same = (there.splits, there.tokenizer) == (manifest.splits, manifest.tokenizer)
        complete = all((folder / name).is_file() for name in metadata_files(manifest))
        return same and complete and origin == self.place

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
                        storage.link(here, temporary / file)
                if tokenizer is not None:
                    tokenizer.save(temporary)
                elif manifest.tokenizer.spec != "bytes":
                    for file in manifest.tokenizer.files:
                        self._store.download(f"{name}/{file}", temporary / file)
                write_record(temporary / ORIGIN, Origin(datasets=self.place))

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Put a dataset of finished partitions together: its local folder, then the store."""
        name = manifest.folder_name
        self._describe(name, manifest, tokenizer)
        for file in [*metadata_files(manifest), storage.MANIFEST]:
            self._store.write(f"{name}/{file}", (self.folder / name / file).read_bytes())

    def names(self) -> list[str]:
        folders = (name for name in self._store.folders() if not name.startswith("."))
        manifests = {name: self._store.find(f"{name}/{storage.MANIFEST}") for name in folders}
        made = {name: found.modified for name, found in manifests.items() if found is not None}
        return sorted(made, key=made.__getitem__, reverse=True)

    def point_latest(self, name: str) -> None:
        """Make this dataset the newest one, for all machines and on this one."""
        self._store.write(LATEST, name.encode())
        super().point_latest(name)

    def newest(self) -> str:
        try:
            return self._store.read(LATEST)[0].decode().strip()
        except ObjectMissingError:
            raise no_latest(self.place) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.place}/{LATEST}: is damaged: {error.reason}") from error


def datasets_at(place: Path | str, address: str | None = None) -> Datasets:
    """Return the datasets at an address, or of a folder, perhaps the working copy of `address`."""
    if is_url(place):
        return StoredDatasets(str(place), working_folder(str(place)))
    return Datasets(Path(place)) if address is None else StoredDatasets(address, Path(place))


def no_dataset(address: str) -> DataError:
    """The error to raise if there is no dataset at an address."""
    return DataError(f"{address}: is not a dataset: it has no {storage.MANIFEST}")
