"""The dataset folder: its manifest, links to the shards, and what `datasets` reads beside them."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from infini_model.data.manifest import (
    FORMAT_VERSION,
    SPLITS,
    CorpusRecord,
    Manifest,
    Split,
    SplitRecord,
    TokenizerRecord,
)
from infini_model.data.shards.partitions import PartitionRecord
from infini_model.data.shards.writing import features, write_shard
from infini_model.data.tokenizers.tokenizer import Ragged, Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.records import write_record

# Another disk, a file system without hard links, or a file that may have no more of them.
UNLINKABLE = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
EMPTY_SHARD = "data-00000-of-00001.arrow"


def make_manifest(
    name: str,
    keys: Sequence[str],
    tokenizer: TokenizerRecord,
    records: Sequence[PartitionRecord],
    seconds: float,
    *,
    pairs: bool = False,
) -> Manifest:
    """The manifest of a dataset of these partitions, in the order of the token stream.

    `seconds` is how long it took to make those that were missing; `pairs` tells whether documents
    are prompts and answers.
    """
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        key=dataset_key(keys),
        partitions=list(keys),
        corpus=CorpusRecord(
            documents=sum(record.documents for record in records),
            bytes=sum(record.bytes for record in records),
            skipped=sum(record.skipped for record in records),
        ),
        pairs=pairs,
        tokenizer=tokenizer,
        splits={split: _split_record(split, records) for split in SPLITS},
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )


def dataset_key(keys: Sequence[str]) -> str:
    """The key of a dataset, in hexadecimal: a hash of the sorted keys of its partitions."""
    return storage.content_key(list(keys))


def _split_record(split: Split, records: Sequence[PartitionRecord]) -> SplitRecord:
    shards = [shard for record in records for shard in record.shards[split]]
    return SplitRecord(
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=[
            dataclasses.replace(shard, file=f"data-{number:05d}-of-{len(shards):05d}.arrow")
            for number, shard in enumerate(shards)
        ],
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("infini-llama", "numpy", "pyarrow", "tokenizers", "gigatoken"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def write_folder(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, partitions_dir: Path
) -> None:
    """Link the shards of the partitions into `folder` and write its other files, atomically.

    Raises `UserError` if the disk is full or the folder cannot be written.
    """
    with storage.atomic_folder(folder) as temporary:
        describe(temporary, manifest)
        for name, shard in manifest.files():
            _link(partitions_dir / shard.path, temporary / name)
        tokenizer.save(temporary)


def describe(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and what `datasets` reads beside the shards. Raises `OSError`.

    The shards themselves and the tokenizer are left to the caller.
    """
    dtype = np.dtype(manifest.tokenizer.dtype)
    for split, record in manifest.splits.items():
        (folder / split).mkdir()
        files = [shard.file for shard in record.shards]
        if not files:
            # `datasets` cannot open a split without files.
            files = [EMPTY_SHARD]
            empty = Ragged(np.zeros(0, dtype), np.zeros(1, np.int64))
            prompts = np.zeros(0, np.int32) if manifest.pairs else None
            write_shard(folder / split / EMPTY_SHARD, empty, prompts)
        _write_split_files(folder / split, split, files, manifest)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    write_record(folder / storage.MANIFEST, manifest)


def _link(source: Path, target: Path) -> None:
    """Hard-link the file if that is possible, copy it otherwise. Raises `OSError`."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        shutil.copyfile(source, target)


def _write_split_files(
    folder: Path, split: Split, files: Sequence[str], manifest: Manifest
) -> None:
    """Write the files that `datasets.load_from_disk` reads beside the shards."""
    state: dict[str, object] = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": hashlib.sha256(f"{manifest.key} {split}".encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    info = {
        "citation": "",
        "description": "",
        "features": features(np.dtype(manifest.tokenizer.dtype), pairs=manifest.pairs),
        "homepage": "",
        "license": "",
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
