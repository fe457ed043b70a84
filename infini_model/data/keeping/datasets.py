"""The datasets of a folder or of an object store, behind one interface."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from infini_model.data.keeping.stored_datasets import LATEST, StoredDatasets, no_latest
from infini_model.data.manifest import Manifest
from infini_model.data.shards.folder import write_folder
from infini_model.data.shards.partition_store import LocalPartitions, PartitionStore
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.verification import verify_dataset
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError


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

    def names(self) -> list[str]:
        """The names of the finished datasets, the one made last first."""

    def newest(self) -> str:
        """The name of the dataset that was asked for last. Raises `DataError` if there is none."""

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

    def names(self) -> list[str]:
        """The names of the dataset folders, the one written last first."""
        folders = [manifest.parent for manifest in self._folder.glob(f"[!.]*/{storage.MANIFEST}")]
        folders = [folder for folder in folders if not folder.is_symlink()]
        ordered = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
        return [folder.name for folder in ordered]

    def newest(self) -> str:
        """The name of the dataset that the link `latest` points to. Raises `DataError`."""
        link = self._folder / LATEST
        if not os.path.exists(link):  # noqa: PTH110 - False where nothing can be read
            raise no_latest(self._folder)
        return link.resolve().name

    def point_latest(self, name: str) -> None:
        """Point the link `latest` to the dataset."""
        storage.point_latest(self._folder / name)


def datasets_in(folder: Path, store: str | None) -> Datasets:
    """The datasets of a folder, or of the address `store` that it is the working folder of."""
    return LocalDatasets(folder) if store is None else StoredDatasets(store, folder)


def make_newest(datasets: Datasets, name: str, previous: str | None) -> None:
    """Make a dataset the newest one: that which was asked for last.

    `previous` is what the same schedule asked for before, None if this is not for a schedule. One
    that asks for the same again changes nothing, so that it takes the place of nobody's choice.
    """
    if name == previous:
        with contextlib.suppress(DataError):
            datasets.newest()
            return
    datasets.point_latest(name)
