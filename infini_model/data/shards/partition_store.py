"""Where partitions are kept: found by key, and made where they are missing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from infini_model.data.shards.partitions import PartitionRecord, PartitionSpec, make_partition
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.shelf import Shelf
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.verification import find_faults, remember
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import fact_cache_here
from infini_model.runtime.records import read_record, write_record

log = logging.getLogger(__name__)

PARTITIONS, RECORD = ".partitions", "partition.json"


class PartitionStore(Protocol):
    """Keeps finished partitions; `place`, a folder or an address, has those of all datasets."""

    place: str

    def keys(self) -> set[str]:
        """The keys of all finished partitions; their files are not looked at."""

    def find(self, keys: Sequence[str], *, every: bool | None = None) -> dict[str, PartitionRecord]:
        """The partitions of these keys that are finished and, as far as it looks, intact.

        A damaged partition is named in the log.
        """

    def tokenizer(self, spec: PartitionSpec) -> Tokenizer:
        """The tokenizer of a partition, on the CPU. Raises `DataError` if it is damaged."""

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec`, unless it stands by now.

        Raises as `make_partition` does, and `UserError` on a full disk.
        """


def planned_tokenizer(shelf: Shelf, spec: PartitionSpec) -> Tokenizer:
    """The tokenizer of a partition from the shelf, on the CPU. Raises `DataError`."""
    tokenizer = shelf.load(spec.tokenizer_folder, spec.tokenizer.spec)
    if tokenizer.fingerprint != spec.tokenizer.fingerprint:
        place = shelf.place_of(spec.tokenizer_folder)
        raise DataError(f"{place}: is not the tokenizer that the partition was planned with")
    return tokenizer


class LocalPartitions:
    """The partitions in `<datasets_dir>/.partitions/`, a folder each."""

    def __init__(self, datasets_dir: Path) -> None:
        self.folder = datasets_dir / PARTITIONS
        self.place = str(self.folder)
        self._shelf = Shelf(datasets_dir)
        self._facts = fact_cache_here(datasets_dir)
        self._sweeping, self._is_swept = threading.Lock(), False

    def keys(self) -> set[str]:
        """The keys of all finished partitions; their files are not looked at."""
        try:
            with os.scandir(self.folder) as entries:
                return {entry.name for entry in entries if not entry.name.startswith(".")}
        except FileNotFoundError:
            return set()

    def find(self, keys: Sequence[str], *, every: bool | None = None) -> dict[str, PartitionRecord]:
        """The partitions of these keys that are finished and intact.

        Checksums are compared as `find_faults` says; a damaged partition is named in the log.
        """
        records: dict[str, PartitionRecord] = {}
        for key in dict.fromkeys(keys):
            path = self.folder / key / RECORD
            if not path.exists():
                continue
            try:
                records[key] = read_record(path, PartitionRecord)
            except DataError as error:
                log.warning("%s; rebuilding the partition", error)
        files = [
            (shard.path, shard)
            for record in records.values()
            for shards in record.shards.values()
            for shard in shards
        ]
        faults = find_faults(self.folder, files, self._facts, every=every)
        for (_, shard), fault in zip(files, faults, strict=True):
            if fault is not None:
                log.warning("%s; rebuilding its partition", fault)
                records.pop(shard.path.partition("/")[0], None)
        self._facts.save()
        return records

    def tokenizer(self, spec: PartitionSpec) -> Tokenizer:
        """The tokenizer of a partition, on the CPU. Raises `DataError` if it is damaged."""
        return planned_tokenizer(self._shelf, spec)

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec`, unless it stands by now; another process waits for it.

        Raises as `make_partition` does, and `UserError` on a full disk.
        """
        self._remove_leftovers_once()
        with storage.lock(self.folder / ".locks" / spec.key):
            if (self.folder / spec.key / RECORD).exists() and self.find([spec.key]):
                return
            with storage.atomic_folder(self.folder / spec.key) as folder:
                record = make_partition(spec, tokenizer, folder, advance)
                write_record(folder / RECORD, record)
        for shards in record.shards.values():
            for shard in shards:
                remember(self.folder / shard.path, shard, self._facts)

    def _remove_leftovers_once(self) -> None:
        """Remove what killed processes have left; once, since it looks at all partitions."""
        with self._sweeping:
            if self._is_swept:
                return
            self._is_swept = True
            for path in self.folder.glob(f"{storage.TEMPORARY}*"):
                key = path.name.removeprefix(storage.TEMPORARY).partition("-")[0]
                with storage.lock(self.folder / ".locks" / key, wait=False) as is_idle:
                    if is_idle:
                        storage.remove_leftovers(self.folder, key)
