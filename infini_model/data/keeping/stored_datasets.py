"""Datasets in an object store, and the local folders that describe them.

A dataset is its manifest and a few small files; its shards are the objects of its partitions. The
manifest is put last. On each machine a folder of the same name has copies of these files, and
`origin.json` says where the shards are that it lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from infini_model.data.keeping.stored_partitions import StoredPartitions
from infini_model.data.manifest import (
    ORIGIN,
    Manifest,
    Origin,
    metadata_files,
    parse_manifest,
    read_manifest,
    read_origin,
)
from infini_model.data.shards.folder import describe
from infini_model.data.shards.partition_store import RECORD
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.verification import Progress, Verified
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, ObjectMissingError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.records import write_record

LATEST = "latest"


def no_latest(place: object) -> DataError:
    """The error to raise if there are no datasets in a folder or at an address."""
    return DataError(
        f"{place}/{LATEST}: there is no finished dataset yet; run the preprocess stage first"
    )


def no_dataset(address: str) -> DataError:
    """The error to raise if there is no dataset at an address."""
    return DataError(f"{address}: is not a dataset: it has no {storage.MANIFEST}")


class StoredDatasets:
    """The datasets below an address, with local copies of what describes them in `working_dir`.

    Every method raises `StoreError` and `UnreachableError`, and `UserError` on a full disk.
    """

    def __init__(self, address: str, working_dir: Path) -> None:
        self.partitions = StoredPartitions(address, working_dir)
        self._address = address
        self._store = ObjectStore(address)
        self._folder = working_dir

    def place_of(self, name: str) -> str:
        """The address of a dataset."""
        return f"{self._address}/{name}"

    def folder_of(self, name: str) -> Path:
        """The local folder that describes a dataset."""
        return self._folder / name

    def find(self, name: str) -> Manifest | None:
        """A dataset that is complete, described by its local folder from now on; None without one.

        Objects are listed, and no shard is read. Raises `DataError` that names what is missing.
        """
        manifest = self._manifest(name)
        if manifest is None:
            return None
        fault = next(self._faults(name, manifest, self.partitions.sizes()), None)
        if fault is not None:
            raise DataError(fault)
        if not self._is_described(self._folder / name, manifest):
            self._pull(name, manifest)
        return manifest

    def examine(self, name: str, progress: Progress) -> Verified:
        """Find every object of a dataset that is missing or damaged; all its shards are read.

        The records of damaged partitions are withdrawn, so that the next build makes them again.
        `progress(done, total)` counts bytes. Raises `DataError` if there is no such dataset.
        """
        manifest = self._manifest(name)
        if manifest is None:
            raise no_dataset(self.place_of(name))
        sizes = self.partitions.sizes()
        faults = list(self._faults(name, manifest, sizes))
        shards = {shard.path: shard for _, shard in manifest.files()}
        whole = [shard for shard in shards.values() if sizes.get(shard.path) == shard.bytes]
        return Verified(manifest, faults + self.partitions.damages(whole, progress))

    def _manifest(self, name: str) -> Manifest | None:
        try:
            content, _ = self._store.read(f"{name}/{storage.MANIFEST}")
        except ObjectMissingError:
            return None
        return parse_manifest(content, self.place_of(name))

    def _faults(self, name: str, manifest: Manifest, sizes: dict[str, int]) -> Iterator[str]:
        """What listings say is wrong with a dataset, one line for each object."""
        there = {each.key for each in self._store.list_below(name)}
        for file in metadata_files(manifest):
            if f"{name}/{file}" not in there:
                yield f"{self.place_of(name)}/{file}: is missing"
        for key in dict.fromkeys(manifest.partitions):
            if f"{key}/{RECORD}" not in sizes:
                yield f"{self.partitions.place}/{key}/{RECORD}: is missing"
        shards = {shard.path: shard for _, shard in manifest.files()}
        yield from self.partitions.faults(iter(shards.values()), sizes)

    def _is_described(self, folder: Path, manifest: Manifest) -> bool:
        """Whether a local folder describes the same shards, whoever has put them together."""
        try:
            there, origin = read_manifest(folder), read_origin(folder)
        except DataError:
            return False
        same = (there.splits, there.tokenizer) == (manifest.splits, manifest.tokenizer)
        complete = all((folder / name).is_file() for name in metadata_files(manifest))
        return same and complete and origin == self._origin()

    def _origin(self) -> Origin:
        return Origin(partitions=self.partitions.place)

    def _pull(self, name: str, manifest: Manifest) -> None:
        with self._replaced(name) as temporary:
            describe(temporary, manifest)
            if manifest.tokenizer.spec != "bytes":
                self._store.download(f"{name}/{TOKENIZER_FILE}", temporary / TOKENIZER_FILE)
            write_record(temporary / ORIGIN, self._origin())

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Put a dataset of finished partitions together: its local folder, then the store."""
        name = manifest.folder_name
        with self._replaced(name) as temporary:
            describe(temporary, manifest)
            tokenizer.save(temporary)
            write_record(temporary / ORIGIN, self._origin())
        for file in [*metadata_files(manifest), storage.MANIFEST]:
            self._store.write(f"{name}/{file}", (self._folder / name / file).read_bytes())

    @contextlib.contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """A new local folder of a dataset, which takes the place of the old one at the end."""
        # Not the lock of the build: the caller may hold that.
        with storage.lock(self._folder / ".locks" / f"{name}.pull"):
            storage.remove_leftovers(self._folder, name)
            with storage.atomic_folder(self._folder / name) as temporary:
                yield temporary

    def names(self) -> list[str]:
        """The names of the finished datasets, the one made last first."""
        folders = (name for name in self._store.folders() if not name.startswith("."))
        manifests = {name: self._store.find(f"{name}/{storage.MANIFEST}") for name in folders}
        made = {name: found.modified for name, found in manifests.items() if found is not None}
        return sorted(made, key=made.__getitem__, reverse=True)

    def point_latest(self, name: str) -> None:
        """Make this dataset the newest one, for all machines and on this one."""
        self._store.write(LATEST, name.encode())
        storage.point_latest(self._folder / name)

    def newest(self) -> str:
        """The name of the dataset that was asked for last. Raises `DataError` if there is none."""
        try:
            return self._store.read(LATEST)[0].decode().strip()
        except ObjectMissingError:
            raise no_latest(self._address) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self._address}/{LATEST}: is damaged: {error.reason}") from error
