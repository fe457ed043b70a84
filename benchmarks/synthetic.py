"""Datasets that exist in their records alone: as many partitions as wanted, without any text.

The files of the source and the shards are sparse: they have the sizes that the records say and no
content. Each is remembered as one whose checksum this machine has compared, so that a stage that
looks at what stands reads neither. Whatever reads one of them anyway finds another checksum.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from infini_model.config import Config
from infini_model.data.manifest import SPLITS, Shard
from infini_model.data.shards.dataset import requested_dataset
from infini_model.data.shards.folder import make_manifest, write_folder
from infini_model.data.shards.partition_store import RECORD, LocalPartitions
from infini_model.data.shards.partitions import PartitionRecord, PartitionSpec
from infini_model.data.sources.download import download
from infini_model.data.sources.files import local_version
from infini_model.data.verification import remember
from infini_model.runtime.remembered import Remembered, remembered_here

PARTITIONS_OF_A_FILE = 100
# All shards together exceed `verification.SMALL_BYTES` from a few hundred partitions on.
SHARD_BYTES = dict(zip(SPLITS, (12 << 20, 1 << 20, 1 << 20), strict=True))


def write_source(folder: Path, config: Config, partitions: int) -> None:
    """Sparse JSON lines in `folder` that become so many partitions."""
    folder.mkdir(parents=True)
    partition_bytes = config.data.partition_megabytes << 20
    remembered = remembered_here(config.run.datasets_dir)
    for number, start in enumerate(range(0, partitions, PARTITIONS_OF_A_FILE)):
        path = folder / f"{number:05d}.jsonl"
        count = min(PARTITIONS_OF_A_FILE, partitions - start)
        _write_sparse(path, count * partition_bytes)
        remembered.put(local_version(path.stat()), _checksum(path.name))
    remembered.save()


def write_dataset(config: Config) -> None:
    """The partitions and the dataset folder that `config` asks for, as if they had been made."""
    datasets_dir = config.run.datasets_dir
    listing = download(config.data, config.run.output_dir, datasets_dir=datasets_dir)
    wanted = requested_dataset(listing, config.data, datasets_dir)
    store, remembered = LocalPartitions(datasets_dir), remembered_here(datasets_dir)
    records = [_write_partition(store.folder, spec, remembered) for spec in wanted.specs()]
    remembered.save()
    manifest = make_manifest(
        config.data.name, wanted.partition_keys, wanted.recipe.tokenizer, records, 0.0
    )
    write_folder(wanted.folder, manifest, wanted.tokenizer, store.folder)


def _write_partition(store: Path, spec: PartitionSpec, remembered: Remembered) -> PartitionRecord:
    folder = store / spec.key
    folder.mkdir(parents=True)
    shards = list(_write_shards(store, spec.key, remembered))
    record = PartitionRecord(
        documents=sum(shard.documents for shard in shards),
        bytes=spec.bytes,
        skipped=0,
        shards={split: [shard] for split, shard in zip(SPLITS, shards, strict=True)},
    )
    (folder / RECORD).write_text(record.model_dump_json(indent=2))
    return record


def _write_shards(store: Path, key: str, remembered: Remembered) -> Iterator[Shard]:
    for split, size in SHARD_BYTES.items():
        name = f"{split}-0.arrow"
        path = f"{key}/{name}"
        _write_sparse(store / path, size)
        shard = Shard(
            file=name,
            path=path,
            documents=1000,
            tokens=size // 2,
            bytes=size,
            sha256=_checksum(path),
        )
        remember(store / path, shard, remembered)
        yield shard


def _write_sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def _checksum(name: str) -> str:
    """In place of a checksum: no file has this one."""
    return hashlib.sha256(name.encode()).hexdigest()
