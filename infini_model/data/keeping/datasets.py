"""The datasets of a folder or of an object store, behind one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from infini_model.data.keeping.stored_datasets import StoredDatasets
from infini_model.data.manifest import Manifest
from infini_model.data.shards.folder import write_folder
from infini_model.data.shards.partition_store import LocalPartitions, PartitionStore
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.verification import verify_dataset
from infini_model.runtime import storage


class Datasets(Protocol):
    """Keeps datasets by name; `partitions` has what they consist of."""

    @property
    def partitions(self) -> PartitionStore:
        """The partitions of all of them."""

    def place_of(self, name: str) -> str:
        """The folder or the address of a dataset, for messages."""

    def find(self, name: str) -> Manifest | None:
        """A dataset that is intact, or None if there is none.

        Raises `DataError` in one line that names what is missing or damaged.
        """

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Put a dataset together from finished partitions. Raises `UserError`."""

    def point_latest(self, name: str) -> None:
        """Make this dataset the newest one."""


class LocalDatasets:
    """The dataset folders in a folder; their shards are links to the partitions' files."""

    def __init__(self, folder: Path) -> None:
        self.partitions = LocalPartitions(folder)
        self._folder = folder

    def place_of(self, name: str) -> str:
        """The folder of a dataset."""
        return str(self._folder / name)

    def find(self, name: str) -> Manifest | None:
        """A dataset that passes `verify_dataset`, None if there is no folder."""
        folder = self._folder / name
        return verify_dataset(folder) if folder.exists() else None

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Write a dataset's folder, atomically. Raises `UserError`."""
        name = manifest.folder_name
        storage.remove_leftovers(self._folder, name)
        write_folder(self._folder / name, manifest, tokenizer, self.partitions.folder)

    def point_latest(self, name: str) -> None:
        """Point the link `latest` to the dataset."""
        storage.point_latest(self._folder / name)


def datasets_in(folder: Path, store: str | None) -> Datasets:
    """The datasets of a folder, or of the address `store` that it is the working folder of."""
    return LocalDatasets(folder) if store is None else StoredDatasets(store, folder)
