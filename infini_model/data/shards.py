"""From a corpus to a dataset folder: token shards that anyone can map, and a manifest.

The work is done partition by partition and each is kept by its content, so that only what changed
is made again; the dataset folder is links to the partitions' files, and appears when complete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infini_model import storage
from infini_model.config import DataConfig, SplitsConfig
from infini_model.data.documents import Progress
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
from infini_model.data.partitions import (
    PartitionRecord,
    PartitionTask,
    features,
    find_partition,
    id_dtype,
    partition_key,
    shard_path,
)
from infini_model.data.sources import reading_of
from infini_model.data.spill import spill_documents, spill_path
from infini_model.data.stream import TokenStream, open_split
from infini_model.data.threads import thread_count
from infini_model.data.tokenizers import Tokenizer
from infini_model.data.vocabulary import corpus_tokenizer
from infini_model.data.workers import make_partitions, worker_devices
from infini_model.errors import DataError

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
    ingredients = _ingredients(corpus, tokenizer, splits)
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


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
    with storage.lock(datasets_dir / ".locks" / folder.name):
        manifest = _standing(folder)
        if manifest is None:
            storage.remove_leftovers(datasets_dir, folder.name)
            began = time.monotonic()
            partitions = _partitions(corpus, tokenizer, config, folder, progress)
            manifest = _describe(corpus, tokenizer, config, key, partitions)
            manifest = manifest.model_copy(update={"seconds": round(time.monotonic() - began, 3)})
            _assemble(folder, manifest, tokenizer)
        storage.point_latest(folder)
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
    progress: Progress | None,
) -> Partitions:
    """The partitions of the corpus by bucket, with their keys; those that are missing are made."""
    partitions_dir = folder.parent / ".partitions"
    keys = {
        number: partition_key(bucket, tokenizer, config.splits)
        for number, bucket in enumerate(corpus.buckets)
        if bucket.documents
    }
    found = {key: find_partition(partitions_dir, key) for key in keys.values()}
    records = {key: record for key, record in found.items() if record is not None}
    missing = [number for number, key in keys.items() if key not in records]
    if missing:
        with _scratch(folder) as spill:
            tell = _counter(2 * sum(corpus.buckets[number].bytes for number in missing), progress)
            spill_documents(
                [file.path for file in corpus.files],
                reading_of(config),
                spill,
                len(corpus.buckets),
                missing,
                thread_count(config.workers),
                tell,
            )
            tasks = _tasks(missing, keys, corpus, config, spill, partitions_dir)
            records |= make_partitions(tasks, tokenizer, worker_devices(config, tokenizer), tell)
    logger.info(
        "dataset %s: %d of %d partitions made, %d reused",
        folder,
        len(missing),
        len(keys),
        len(keys) - len(missing),
    )
    return [(key, records[key]) for key in keys.values()]


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for spilled text that does not outlast the block, nor a killed block's successor."""
    scratch = folder.parent / f"{storage.TEMPORARY}{folder.name}-spill"
    with storage.named_os_errors(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        storage.make_folder(scratch)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Adds up bytes that are handled twice, once as text and once as tokens, and reports halves."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        if progress is not None:
            progress(done // 2, total // 2)

    return tell


def _tasks(
    missing: Sequence[int],
    keys: dict[int, str],
    corpus: Corpus,
    config: DataConfig,
    spill: Path,
    partitions_dir: Path,
) -> list[PartitionTask]:
    return [
        PartitionTask(
            key=keys[number],
            digest=corpus.buckets[number].digest,
            spill=spill_path(spill, number),
            partitions_dir=partitions_dir,
            splits=config.splits,
            batch_size=config.batch_size,
        )
        for number in missing
    ]


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
