"""The dataset folder: its manifest, links to the shards, and what `datasets` reads beside them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from infini_model.data.manifest import (
    FORMAT_VERSION,
    SPLITS,
    Corpus,
    CorpusRecord,
    Manifest,
    Shard,
    Split,
    SplitRecord,
    TokenizerRecord,
    write_record,
)
from infini_model.data.shards.partitions import PartitionRecord, features, id_dtype, shard_path
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage

Ingredients: TypeAlias = dict[str, str | int | float]


def make_manifest(
    name: str,
    ingredients: Ingredients,
    corpus: Corpus,
    tokenizer: Tokenizer,
    partitions: Sequence[PartitionRecord],
    seconds: float,
) -> Manifest:
    """The manifest of a dataset of these partitions, in the order of the token stream.

    `seconds` is how long it took to make those that were missing.
    """
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        key=storage.content_key(ingredients),
        ingredients=ingredients,
        corpus=CorpusRecord(
            fingerprint=corpus.fingerprint,
            documents=corpus.documents,
            bytes=corpus.bytes,
            skipped=corpus.skipped,
        ),
        tokenizer=TokenizerRecord(
            spec=tokenizer.spec,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            fingerprint=tokenizer.fingerprint,
            dtype=id_dtype(tokenizer.vocab_size).name,
        ),
        splits={split: _split_record(split, partitions) for split in SPLITS},
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )


def _split_record(split: Split, partitions: Sequence[PartitionRecord]) -> SplitRecord:
    shards = [record.shards[split] for record in partitions]
    # `datasets` cannot open a split without files, so an empty split keeps one empty shard.
    kept = [shard for shard in shards if shard.documents] or shards[:1]
    return SplitRecord(
        documents=sum(shard.documents for shard in kept),
        tokens=sum(shard.tokens for shard in kept),
        shards=[
            shard.model_copy(update={"file": f"data-{number:05d}-of-{len(kept):05d}.arrow"})
            for number, shard in enumerate(kept)
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
        for split, record in manifest.splits.items():
            (temporary / split).mkdir()
            for shard in record.shards:
                _link(
                    shard_path(partitions_dir, shard.partition, split),
                    temporary / split / shard.file,
                )
            _write_split_files(temporary / split, split, record.shards, manifest)
        (temporary / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        tokenizer.save(temporary)
        write_record(temporary / "manifest.json", manifest)


def _link(source: Path, target: Path) -> None:
    """Hard-link the file if the file system supports it, copy it otherwise."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_split_files(
    folder: Path, split: Split, shards: Sequence[Shard], manifest: Manifest
) -> None:
    """Write the files that `datasets.load_from_disk` reads beside the shards."""
    dtype = id_dtype(manifest.tokenizer.vocab_size)
    state: dict[str, object] = {
        "_data_files": [{"filename": shard.file} for shard in shards],
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
        "features": features(dtype),
        "homepage": "",
        "license": "",
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
