"""From a corpus to a dataset folder of memory-mapped token shards and a manifest.

The work is done partition by partition, and each partition is cached by content, so that only what
changed is made again. The dataset folder links to the partitions' files and appears when complete.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from infini_model.config import DataConfig, SplitsConfig
from infini_model.data.manifest import (
    FORMAT_VERSION,
    Corpus,
    Manifest,
    verify_dataset,
)
from infini_model.data.shards.folder import Ingredients, make_manifest, write_folder
from infini_model.data.shards.partitions import (
    PartitionRecord,
    PartitionTask,
    find_partition,
    partition_key,
)
from infini_model.data.shards.workers import make_partitions, worker_devices
from infini_model.data.sources.corpus import drop_spill
from infini_model.data.sources.documents import Progress, parts_of
from infini_model.data.sources.download import reading_of, spill_folder
from infini_model.data.sources.spill import Spill, UnusableSpillError, write_spill
from infini_model.data.threads import Advance, thread_count
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.tokenizers.vocabulary import corpus_tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError

log = logging.getLogger(__name__)


def dataset_key(corpus: Corpus, tokenizer: Tokenizer, splits: SplitsConfig) -> str:
    """Hash of what decides the content of a dataset folder, in hexadecimal."""
    return storage.content_key(_ingredients(corpus, tokenizer, splits))


def _ingredients(corpus: Corpus, tokenizer: Tokenizer, splits: SplitsConfig) -> Ingredients:
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
    """Build `<datasets_dir>/<name>-<key>/`, or reuse it, and point `latest` at it.

    `datasets_dir` defaults to `<output_dir>/datasets`.

    An existing folder is reused once the checksum of every shard verifies; only damaged or missing
    shards are made again. If two processes ask for the same dataset, one does the work.
    `progress(done, total)` counts the bytes of text to tokenise.

    Raises `DataError` in one line for a bad tokenizer or a source that changed, `UserError` for a
    full disk or a folder that cannot be written.
    """
    datasets_dir = datasets_dir or output_dir / "datasets"
    tokenizer = corpus_tokenizer(corpus, config, output_dir)
    ingredients = _ingredients(corpus, tokenizer, config.splits)
    folder = datasets_dir / f"{config.name}-{storage.content_key(ingredients)[:16]}"
    kept_spill = spill_folder(corpus, config, output_dir)
    with storage.lock(datasets_dir / ".locks" / folder.name):
        manifest = _find_intact(folder)
        if manifest is None:
            storage.remove_leftovers(datasets_dir, folder.name)
            began = time.monotonic()
            try:
                partitions = _partitions(corpus, tokenizer, config, folder, kept_spill, progress)
            except UserError:  # the disk may be full, and the fix may take the user long
                drop_spill(kept_spill)
                raise
            seconds = time.monotonic() - began
            manifest = make_manifest(
                config.name, ingredients, corpus, tokenizer, partitions, seconds
            )
            write_folder(folder, manifest, tokenizer, _partitions_dir(folder))
        storage.point_latest(folder)
    drop_spill(kept_spill)
    return manifest


def _partitions_dir(folder: Path) -> Path:
    return folder.parent / ".partitions"


def _find_intact(folder: Path) -> Manifest | None:
    """The manifest of an existing dataset folder that is intact, or None."""
    if not folder.exists():
        return None
    try:
        manifest = verify_dataset(folder)
    except DataError as error:
        log.warning("%s; rebuilding the dataset from its partitions", error)
        return None
    log.info("dataset %s: reused, all checksums verified", folder)
    return manifest


def _partitions(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: DataConfig,
    folder: Path,
    kept_spill: Path,
    progress: Progress | None,
) -> list[PartitionRecord]:
    """The partitions of the corpus, in the order of the buckets; makes those that are missing."""
    partitions_dir = _partitions_dir(folder)
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
        records |= _make_missing(missing, corpus, tokenizer, config, folder, kept_spill, progress)
    log.info(
        "dataset %s: %d of %d partitions made, %d reused",
        folder,
        len(missing),
        len(tasks),
        len(tasks) - len(missing),
    )
    return [records[task.key] for task in tasks]


def _make_missing(
    tasks: Sequence[PartitionTask],
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: DataConfig,
    folder: Path,
    kept_spill: Path,
    progress: Progress | None,
) -> dict[str, PartitionRecord]:
    """Make partitions from the spill of the scan, or read the source again if it is unusable."""
    devices = worker_devices(config, tokenizer)
    text_bytes = sum(task.bytes for task in tasks)
    try:
        with Spill(kept_spill) as spill:
            advance = _progress_counter(text_bytes, progress)
            return make_partitions(tasks, spill, tokenizer, devices, advance)
    except UnusableSpillError as error:
        log.info("dataset %s: reading the source again: %s", folder, error)
    drop_spill(kept_spill)
    source_bytes = sum(file.bytes for file in corpus.files)
    advance = _progress_counter(source_bytes + text_bytes, progress)
    buckets = [task.bucket for task in tasks]
    with _respilled(corpus, config, buckets, folder, advance) as spill:
        return make_partitions(tasks, spill, tokenizer, devices, advance)


@contextlib.contextmanager
def _respilled(
    corpus: Corpus, config: DataConfig, buckets: list[int], folder: Path, advance: Advance
) -> Iterator[Spill]:
    """Read the source again and spill some buckets, to a folder that is deleted on exit.

    Raises `DataError` if the source has changed since the scan, also when the block notices.
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
            write_spill(parts, reading_of(config), scratch, threads, advance, wanted)
            with Spill(scratch) as spill:
                yield spill
        except UnusableSpillError as error:
            raise DataError("data.source: a file changed while it was read; run again") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _progress_counter(total: int, progress: Progress | None) -> Advance:
    """Sum up the bytes done and pass them to `progress` with their total."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        if progress is not None:
            progress(done, total)

    return advance
