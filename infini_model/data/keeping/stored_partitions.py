"""Partitions in an object store: shards first, the record that vouches for them last.

Keys are hashes of what decides the content, so objects never change. No locks are needed: whoever
makes a partition a second time puts the same objects there again. A partition without a record is
one that was never finished, and is made again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infini_model.data.keeping.scratch import scratch_folder
from infini_model.data.manifest import Shard
from infini_model.data.shards.partition_store import PARTITIONS, RECORD, planned_tokenizer
from infini_model.data.shards.partitions import PartitionRecord, PartitionSpec, make_partition
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.shelf import Shelf
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.verification import Progress
from infini_model.runtime.errors import DataError, ObjectMissingError, StoreError, UnreachableError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.records import parse_record
from infini_model.runtime.storage import named_os_errors

log = logging.getLogger(__name__)

# A record is a few kilobytes: reading one is waiting for an answer.
READ_AT_ONCE = 32
SHARDS_AT_ONCE = 8
# An object that differs is read again before it is called damaged: that withdraws its partition.
ATTEMPTS = 2


class StoredPartitions:
    """The partitions below `<datasets>/.partitions/`, where `datasets` is an address.

    `working_dir` is the local folder for what is being made, one partition for each thread, and for
    copies of tokenizers. Processes on all machines may share the store, and need nothing else.

    Every method raises `StoreError` and `UnreachableError`.
    """

    def __init__(self, datasets: str, working_dir: Path) -> None:
        self.place = f"{datasets}/{PARTITIONS}"
        self._store = ObjectStore(self.place)
        self._scratch = working_dir / ".scratch"
        self._shelf = Shelf(working_dir, datasets)

    def sizes(self, key: str = "") -> dict[str, int]:
        """The size of every object of all partitions, or of one, by its key: `<partition>/<name>`.

        One listing; nothing is read.
        """
        return {each.key: each.bytes for each in self._store.list_below(key)}

    def keys(self) -> set[str]:
        """The keys of all finished partitions; their shards are not looked at."""
        names = (key.split("/") for key in self.sizes())
        return {name[0] for name in names if name[1:] == [RECORD]}

    def find(self, keys: Sequence[str], *, every: bool | None = None) -> dict[str, PartitionRecord]:  # noqa: ARG002
        """The partitions of these keys that are finished, their shards as large as their records.

        Checksums are compared when shards are copied to a machine. A partition with a fault is
        named in the log.
        """
        asked = list(dict.fromkeys(keys))
        sizes = self.sizes(asked[0] if len(asked) == 1 else "")
        there = [key for key in asked if f"{key}/{RECORD}" in sizes]
        records: dict[str, PartitionRecord] = {}
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            for key, record in zip(there, pool.map(self._read, there), strict=True):
                if record is None:
                    continue
                fault = next(self.faults(_shards(record), sizes), None)
                if fault is None:
                    records[key] = record
                else:
                    log.warning("%s; rebuilding its partition", fault)
        return records

    def _read(self, key: str) -> PartitionRecord | None:
        name = f"{key}/{RECORD}"
        try:
            content, _ = self._store.read(name)
            return parse_record(content, self._store.address_of(name), PartitionRecord)
        except ObjectMissingError:
            # Withdrawn since the listing.
            return None
        except StoreError:
            raise
        except DataError as error:
            log.warning("%s; rebuilding the partition", error)
            return None

    def faults(self, shards: Iterator[Shard], sizes: dict[str, int]) -> Iterator[str]:
        """What a listing says is wrong with shards, one line for each."""
        for shard in shards:
            size = sizes.get(shard.path)
            if size is None:
                yield f"{self.place}/{shard.path}: is missing"
            elif size != shard.bytes:
                yield f"{self.place}/{shard.path}: has {size} bytes, its record says {shard.bytes}"

    def tokenizer(self, spec: PartitionSpec) -> Tokenizer:
        """The tokenizer of a partition, on the CPU. Raises `DataError` if it is damaged."""
        return planned_tokenizer(self._shelf, spec)

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec` in a scratch folder and upload it, unless it stands by now.

        Raises as `make_partition` does, and `UserError` on a full disk.
        """
        if self.find([spec.key]):
            return
        with scratch_folder(self._scratch) as folder, named_os_errors(folder):
            record = make_partition(spec, tokenizer, folder, advance)
            if self.find([spec.key]):
                # Another machine was faster, and may already have readers.
                return
            for shard in _shards(record):
                self._store.upload(shard.path, folder / shard.file)
        content = record.model_dump_json(indent=2).encode()
        self._store.write(f"{spec.key}/{RECORD}", content)

    def damages(self, shards: Sequence[Shard], progress: Progress) -> list[str]:
        """What is wrong with the content of shards, one line for each; all of them are read.

        The records of damaged ones are withdrawn. `progress(done, total)` counts bytes.
        """
        faults, done, total = [], 0, sum(shard.bytes for shard in shards)
        with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            for shard, fault in zip(shards, pool.map(self._damage, shards), strict=True):
                faults += [fault] if fault else []
                done += shard.bytes
                progress(done, total)
        return faults

    def _damage(self, shard: Shard) -> str | None:
        for _ in range(ATTEMPTS):
            if self._store.sha256(shard.path) == shard.sha256:
                return None
        withdraw(self._store, shard)
        return f"{self.place}/{shard.path}: is damaged: its checksum differs from its record"


def withdraw(store: ObjectStore, shard: Shard) -> None:
    """Delete the record of a shard's partition, if the store allows it.

    Without it the partition counts as never finished: the preprocess stage makes it again.
    """
    with contextlib.suppress(StoreError, UnreachableError):
        store.delete([f"{shard.path.partition('/')[0]}/{RECORD}"])


def _shards(record: PartitionRecord) -> Iterator[Shard]:
    for shards in record.shards.values():
        yield from shards
