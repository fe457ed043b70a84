"""A folder of datasets, and of the partitions that they share.

A partition is a folder `.partitions/<key>/`: shards, and the record that vouches for them. A
dataset is a folder `<name>-<key>/`: its manifest, links to the shards of its partitions, and what
`datasets.load_from_disk` reads beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from infini_model.data.make_partition import Advance, features, make_partition, write_shard
from infini_model.data.manifest import ASSEMBLED, LATEST, PARTITIONS, SPLITS, Manifest
from infini_model.data.partitions import PartitionRecord, PartitionSpec
from infini_model.data.tokenizers.tokenizer import Ragged, Tokenizer
from infini_model.data.tokenizers.trained import TokenizerStore
from infini_model.data.verify import examine_dataset, find_faults
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.records import Record, read_record, write_record

log = logging.getLogger(__name__)

RECORD = "partition.json"
EMPTY_SHARD = "data-00000-of-00001.arrow"


class Datasets:
    """The datasets in `folder`. Processes that share the folder may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # What all machines know the datasets by: the folder or the address.
        self.place = str(folder)
        self.partitions = folder / PARTITIONS
        self.tokenizers = TokenizerStore(folder)
        self._facts = fact_cache(folder)

    def count_missing(self, keys: Iterable[str]) -> int:
        """Count the partitions of these keys that are not finished; no file is looked at."""
        return len(set(keys) - {path.name for path in self.partitions.glob("*")})

    def find_partitions(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The partitions of these keys that are finished and intact, as far as `find_faults` looks.

        A damaged one is named in the log.
        """
        records, faults = self._look_at(keys)
        for fault in faults:
            log.warning("%s; rebuilding its partition", fault)
        return records

    def find_intact(self, key: str) -> PartitionRecord | None:
        """The partition of a key, as `find_partitions` finds it, which has named the damage."""
        return self._look_at([key])[0].get(key)

    def _look_at(self, keys: Sequence[str]) -> tuple[dict[str, PartitionRecord], list[str]]:
        """The intact partitions of these keys, and what is wrong with others, in a line each."""
        records: dict[str, PartitionRecord] = {}
        written: dict[str, int] = {}
        faults: list[str] = []
        for key in dict.fromkeys(keys):
            path = self.partitions / key / RECORD
            try:
                written[key] = path.stat().st_mtime_ns
                records[key] = read_record(path, PartitionRecord)
            except FileNotFoundError:
                continue
            except DataError as error:
                faults.append(str(error))
        found = [(key, shard) for key, record in records.items() for shard in record.files()]
        damage = find_faults(
            [(f"{self.partitions}/{shard.path}", shard) for _, shard in found],
            [written[key] for key, _ in found],
            self._facts,
        )
        for (key, _), fault in zip(found, damage, strict=True):
            if fault is not None:
                faults.append(fault)
                records.pop(key, None)
        self._facts.save()
        return records, faults

    def read_records(self, keys: Sequence[str]) -> dict[str, PartitionRecord]:
        """The partitions of these keys, which were made a moment ago."""
        return self.find_partitions(keys)

    def make(self, spec: PartitionSpec, tokenizer: Tokenizer, advance: Advance) -> None:
        """Make the partition of `spec`, unless it stands by now; another process waits for it.

        Raises as `make_partition` does, and `UserError` on a full disk.
        """
        with storage.lock(self.partitions / ".locks" / spec.key):
            if self.find_intact(spec.key) is not None:
                return
            with storage.atomic_folder(self.partitions / spec.key) as folder:
                record = make_partition(spec, tokenizer, folder, advance)
                write_record(folder / RECORD, record)

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left of partitions; looks at all of these."""
        for path in self.partitions.glob(f"{storage.TEMPORARY}*"):
            key = path.name.removeprefix(storage.TEMPORARY).partition("-")[0]
            with storage.lock(self.partitions / ".locks" / key, wait=False) as is_idle:
                if is_idle:
                    storage.remove_leftovers(self.partitions, key)

    def find(self, name: str) -> Manifest | None:
        """A dataset that is intact, or None if there is none.

        Raises `DataError` in one line that names the first file that is missing or damaged.
        """
        if not (self.folder / name).exists():
            return None
        manifest, faults = examine_dataset(self.folder / name)
        if faults:
            raise DataError(faults[0])
        return manifest

    def write(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        """Put the folder of a dataset together from finished partitions. Raises `UserError`."""
        folder = self.folder / manifest.folder_name
        storage.remove_leftovers(self.folder, folder.name)
        with storage.atomic_folder(folder) as temporary:
            describe(temporary, manifest)
            for name, shard in manifest.files():
                storage.link(self.partitions / shard.path, temporary / name)
            tokenizer.save(temporary)

    def names(self) -> list[str]:
        """The names of the finished datasets, the one made last first."""
        folders = [manifest.parent for manifest in self.folder.glob(f"[!.]*/{storage.MANIFEST}")]
        folders = [folder for folder in folders if not folder.is_symlink()]
        ordered = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
        return [folder.name for folder in ordered]

    def newest(self) -> str:
        """The name of the dataset that was asked for last. Raises `DataError` if there is none."""
        path = self.folder / LATEST
        if not os.path.exists(path):  # noqa: PTH110 - False where nothing can be read
            raise no_latest(self.place)
        # In a store, of which the folder may be a mounted bucket, it is an object and not a link.
        return path.read_text().strip() if path.is_file() else path.resolve().name

    def point_latest(self, name: str) -> None:
        """Make this dataset the newest one."""
        storage.point_latest(self.folder / name)


def no_latest(place: str) -> DataError:
    """The error to raise if there are no datasets in a folder or at an address."""
    return DataError(
        f"{place}/{LATEST}: there is no finished dataset yet; run the preprocess stage first"
    )


def describe(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and what `datasets` reads beside the shards. Raises `OSError`.

    The shards themselves and the tokenizer are left to the caller.
    """
    dtype = np.dtype(manifest.tokenizer.dtype)
    for split, record in manifest.splits.items():
        sizes = {name: part.stop - part.start for name, part in record.slices().items()}
        # `datasets` fills the column that shards of texts lack with nulls, if there are others.
        has_turns = any(sizes[name] or not record.shards for name in manifest.conversations)
        (folder / split).mkdir()
        files = [shard.file for shard in record.shards]
        if not files:
            # `datasets` cannot open a split without files.
            files = [EMPTY_SHARD]
            empty = Ragged(np.zeros(0, dtype), np.zeros(1, np.int64))
            learnt = np.zeros(0, bool) if has_turns else None
            write_shard(folder / split / EMPTY_SHARD, empty, np.zeros(0, np.uint64), learnt)
        state: dict[str, object] = {
            "_data_files": [{"filename": file} for file in files],
            "_fingerprint": hashlib.sha256(f"{manifest.key} {split}".encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        info = {"features": features(dtype, conversations=has_turns)}
        (folder / split / "state.json").write_text(json.dumps(state, indent=2))
        (folder / split / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / ASSEMBLED).write_text(json.dumps({"splits": list(SPLITS)}))
    write_record(folder / storage.MANIFEST, manifest)


# What datasets are made from, and which of them are in use now: whoever is about to use a dataset
# registers that first, under the lock that `infini_model.cleaning` holds while it decides what
# nothing refers to. So a build is seen in time, or starts after the removal and finds what is left.


class Build(Record):
    """What a dataset is made from: the name of its listing's file, and its partitions."""

    listing: str
    partitions: list[str]


def build_lock(folder: Path) -> Path:
    """The lock that a process holds while it builds the dataset of this folder."""
    return folder.parent / ".locks" / folder.name


def build_file(folder: Path) -> Path:
    """Where the `Build` of a dataset folder is registered."""
    return folder.parent / ".builds" / f"{folder.name}.json"


def removals(datasets_dir: Path) -> AbstractContextManager[bool]:
    """The lock of whoever removes something; held for moments only. Names have no leading dot."""
    return storage.lock(datasets_dir / ".locks" / ".removals")


def register_build(folder: Path, build: Build) -> None:
    """Register what a dataset is made from, before any of it is looked for. Raises `UserError`."""
    with removals(folder.parent):
        storage.remove_leftovers(build_file(folder).parent)
        write_record(build_file(folder), build)


def register_use(folder: Path) -> None:
    """Register that an existing dataset is about to be used, if its folder can be written.

    Where nobody has locked anything yet, such as beside a copy of a dataset, no lock is left.
    """
    with contextlib.suppress(OSError, UserError), contextlib.ExitStack() as held:
        if (folder.parent / ".locks").exists():
            held.enter_context(removals(folder.parent))
        os.utime(folder / storage.MANIFEST)
