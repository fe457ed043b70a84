"""From a corpus to a dataset folder: token shards that anyone can map, and a manifest.

The work is done partition by partition and each is kept by its content, so that only what changed
is made again; the dataset folder is links to the partitions' files, and appears when complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from infini_model.config import DataConfig, SplitsConfig
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
    latest_dataset,
    read_manifest,
    verify_dataset,
    write_record,
)
from infini_model.data.shards.partitions import (
    PartitionRecord,
    PartitionTask,
    features,
    find_partition,
    id_dtype,
    partition_key,
    shard_path,
)
from infini_model.data.shards.stream import TokenStream, open_split
from infini_model.data.shards.workers import make_partitions, worker_devices
from infini_model.data.sources.corpus import drop_spill
from infini_model.data.sources.documents import Progress, parts_of
from infini_model.data.sources.download import reading_of, spill_folder
from infini_model.data.sources.spill import Spill, UnusableSpillError, write_spill
from infini_model.data.threads import Tell, thread_count
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.tokenizers.vocabulary import corpus_tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError

__all__ = [
    "TokenStream",
    "build_dataset",
    "corpus_tokenizer",
    "dataset_key",
    "latest_dataset",
    "open_split",
    "read_manifest",
    "verify_dataset",
]

logger = logging.getLogger(__name__)


def dataset_key(corpus: Corpus, tokenizer: Tokenizer, splits: SplitsConfig) -> str:
    """Hash of what decides the content of a dataset folder, in hexadecimal."""
    return storage.content_key(_ingredients(corpus, tokenizer, splits))


def _ingredients(
    corpus: Corpus, tokenizer: Tokenizer, splits: SplitsConfig
) -> dict[str, str | int | float]:
    return {
        "corpus": corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "end_of_text": f"token {tokenizer.eos_token_id} after each document",
        "split_train": splits.train,
        "split_validation": splits.validation,
        "split_test": splits.test,
        "format_version": FORMAT_VERSION,
    }


def build_dataset(
    corpus: Corpus,
    config: DataConfig,
    output_dir: Path,
    *,
    datasets_dir: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Make `<datasets_dir>/<name>-<key>/`, or find it there, and point `latest` at it.

    `datasets_dir` is `<output_dir>/datasets` where it is not given.

    A folder that stands is believed after every shard has been checked; what is damaged or lost is
    made again, alone. Two processes that ask for the same dataset do the work once. `progress` is
    told bytes of text, of those that have to be tokenised.

    Raises `DataError` in one line for a bad tokenizer or a source that changed, `UserError` for a
    full disk or a folder that cannot be written.
    """
    datasets_dir = datasets_dir or output_dir / "datasets"
    tokenizer = corpus_tokenizer(corpus, config, output_dir)
    key = dataset_key(corpus, tokenizer, config.splits)
    folder = datasets_dir / f"{config.name}-{key[:16]}"
    kept_spill = spill_folder(corpus, config, output_dir)
    with storage.lock(datasets_dir / ".locks" / folder.name):
        manifest = _standing(folder)
        if manifest is None:
            storage.remove_leftovers(datasets_dir, folder.name)
            began = time.monotonic()
            try:
                partitions = _partitions(corpus, tokenizer, config, folder, kept_spill, progress)
            except UserError:  # the disk is full, perhaps; what has to be mended may take long
                drop_spill(kept_spill)
                raise
            manifest = _describe(corpus, tokenizer, config, key, partitions)
            manifest = manifest.model_copy(update={"seconds": round(time.monotonic() - began, 3)})
            _assemble(folder, manifest, tokenizer)
        storage.point_latest(folder)
    drop_spill(kept_spill)
    return manifest


def _standing(folder: Path) -> Manifest | None:
    """The manifest of a dataset folder that is there and whole, or None."""
    if not folder.exists():
        return None
    try:
        manifest = verify_dataset(folder)
    except DataError as error:
        logger.warning("%s; it is made again", error)
        return None
    logger.info("dataset %s: reused, all shards checked", folder)
    return manifest


Partitions = list[tuple[str, PartitionRecord]]


def _partitions(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: DataConfig,
    folder: Path,
    kept_spill: Path,
    progress: Progress | None,
) -> Partitions:
    """The partitions of the corpus by bucket, with their keys; those that are missing are made."""
    partitions_dir = folder.parent / ".partitions"
    tasks = [
        PartitionTask(
            key=partition_key(bucket, tokenizer, config.splits),
            bucket=number,
            bucket_count=len(corpus.buckets),
            bytes=bucket.bytes,
            digest=bucket.digest,
            partitions_dir=partitions_dir,
            splits=config.splits,
            batch_size=config.batch_size,
        )
        for number, bucket in enumerate(corpus.buckets)
        if bucket.documents
    ]
    found = {task.key: find_partition(partitions_dir, task.key) for task in tasks}
    records = {key: record for key, record in found.items() if record is not None}
    missing = [task for task in tasks if task.key not in records]
    if missing:
        records |= _make(missing, corpus, tokenizer, config, folder, kept_spill, progress)
    logger.info(
        "dataset %s: %d of %d partitions made, %d reused",
        folder,
        len(missing),
        len(tasks),
        len(tasks) - len(missing),
    )
    return [(task.key, records[task.key]) for task in tasks]


def _make(
    tasks: Sequence[PartitionTask],
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: DataConfig,
    folder: Path,
    kept_spill: Path,
    progress: Progress | None,
) -> dict[str, PartitionRecord]:
    """Make partitions of the text that the scan has kept, or else of the source once more."""
    devices = worker_devices(config, tokenizer)
    text_bytes = sum(task.bytes for task in tasks)
    try:
        with Spill(kept_spill) as spill:
            tell = _counter(text_bytes, progress)
            return make_partitions(tasks, spill, tokenizer, devices, tell)
    except UnusableSpillError as error:
        logger.info("dataset %s: the source is read again: %s", folder, error)
    drop_spill(kept_spill)
    tell = _counter(sum(file.bytes for file in corpus.files) + text_bytes, progress)
    buckets = [task.bucket for task in tasks]
    with _spilled_again(corpus, config, buckets, folder, tell) as spill:
        return make_partitions(tasks, spill, tokenizer, devices, tell)


@contextlib.contextmanager
def _spilled_again(
    corpus: Corpus, config: DataConfig, buckets: list[int], folder: Path, tell: Tell
) -> Iterator[Spill]:
    """The documents of some buckets, out of the source once more; gone when the block ends.

    Raises `DataError` where the source has changed since it was scanned, as in the block.
    """
    wanted = np.zeros(len(corpus.buckets), bool)
    wanted[buckets] = True
    scratch = folder.parent / f"{storage.TEMPORARY}{folder.name}-spill"
    with storage.named_os_errors(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        storage.make_folder(scratch)
        try:
            parts = list(parts_of(file.path for file in corpus.files))
            threads = thread_count(config.workers)
            write_spill(parts, reading_of(config), scratch, threads, tell, wanted)
            with Spill(scratch) as spill:
                yield spill
        except UnusableSpillError as error:
            raise DataError("data.source: a file changed while it was read; run again") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _counter(total: int, progress: Progress | None) -> Tell:
    """Adds up bytes and tells how many of how many there are."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        if progress is not None:
            progress(done, total)

    return tell


def _describe(
    corpus: Corpus, tokenizer: Tokenizer, config: DataConfig, key: str, partitions: Partitions
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        name=config.name,
        key=key,
        ingredients=_ingredients(corpus, tokenizer, config.splits),
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
        splits={split: _describe_split(split, partitions) for split in SPLITS},
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
    )


def _describe_split(split: Split, partitions: Partitions) -> SplitRecord:
    shards = [record.shards[split] for _, record in partitions]
    # A split without documents still needs a file, or `datasets` would not open it.
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


def _assemble(folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Link the partitions' shards into the dataset folder and write what describes them."""
    partitions_dir = folder.parent / ".partitions"
    with storage.atomic_folder(folder) as temporary:
        for split, record in manifest.splits.items():
            (temporary / split).mkdir()
            for shard in record.shards:
                _link(
                    shard_path(partitions_dir, shard.partition, split),
                    temporary / split / shard.file,
                )
            _write_dataset_files(temporary / split, split, record.shards, manifest)
        (temporary / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
        tokenizer.save(temporary)
        write_record(temporary / "manifest.json", manifest)


def _link(source: Path, target: Path) -> None:
    """Share the file where the file system can, copy it where not."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_dataset_files(
    folder: Path, split: Split, shards: Sequence[Shard], manifest: Manifest
) -> None:
    """What `datasets.load_from_disk` reads beside the shards."""
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
