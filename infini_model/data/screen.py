"""Screening: the texts that datatrove's filters and its MinHash deduplication leave of a source.

A partition is filtered by itself, with the signatures of what is left, into a folder that is keyed
by what decides it: a file more costs one partition. Then the signatures of all are compared, and of
texts that resemble each other one is kept.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import multiprocessing
import os
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.config import MEBIBYTE, DataConfig
from infini_model.config.data import MinHashConfig, ScreenConfig, Source
from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.files import FileRange, Listing, brief, fingerprint, local_files
from infini_model.data.sources.formats import content_of, read_documents, whole_file
from infini_model.data.sources.listing import named_settings, reading_of
from infini_model.data.sources.rows import Reading
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, StageError, UserError
from infini_model.runtime.fact_cache import FactCache, fact_cache
from infini_model.runtime.machine import available_cores
from infini_model.runtime.processes import die_with_parent
from infini_model.runtime.records import Record, read_record, write_record
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

FOLDER, KEPT, RECORD = ".screened", "kept.parquet", "record.json"
# They decide how texts are cut into words.
LIBRARIES = ("datatrove", "spacy")
SCHEMA, ROWS = pa.schema([("text", pa.string())]), 256
SKIPPED, DUPLICATES = "empty, too short or not UTF-8", "near-duplicates"


class ScreenSpec(Record):
    """The decisive settings and files of a screened partition, and its `key`; `bytes` are text."""

    key: str
    ranges: tuple[FileRange, ...]
    reading: Reading
    screen: ScreenConfig
    bytes: int


class Screened(Record):
    """The number of documents read and kept of a partition or a source, and dropped, by reason.

    `sha256` is that of the file of what is kept of a partition.
    """

    documents: int
    kept: int
    dropped: dict[str, int]
    sha256: str = ""


def screen_sources(
    listing: Listing, config: DataConfig, datasets_dir: Path, progress: OnProgress
) -> tuple[Listing, dict[str, Screened]]:
    """Replace the files of each source that has `screen` by those of the texts that are left.

    They are below `<datasets_dir>/.screened/`, and made once. `progress(done, total)` counts bytes
    of text.

    Raises `DataError` in one line if datatrove is not installed or refuses the settings, for a file
    that cannot be read and for a source of which nothing is left; `StageError` if a process dies.
    """
    sources, found = dict(listing.sources), dict[str, Screened]()
    facts, root = fact_cache(datasets_dir), storage.make_folder(datasets_dir / FOLDER)
    for name, source in config.named_sources.items():
        if source.screen is None:
            continue
        with named_settings(name), _processes(config) as pool:
            _check(source.screen)
            specs = _specs(listing.sources[name], source, source.screen, config, facts)
            _screen_all(specs, root, pool, facts, progress)
            minhash = source.screen.minhash
            sources[name], found[name] = _deduplicate(specs, minhash, root, pool, facts)
    facts.save()
    return Listing(sources=sources), found


def _check(screen: ScreenConfig) -> None:
    """Find a mistake before any text is read."""
    try:
        from datatrove.utils.word_tokenizers import load_word_tokenizer

        load_word_tokenizer(screen.language)
        _filters(screen)
    except ImportError as error:
        needs = "needs datatrove and spaCy: pip install 'infini-model[screen]'"
        message = f"data.source.screen: {needs} ({brief(error)})"
        raise DataError(message) from error
    except (TypeError, ValueError) as error:
        raise DataError(f"data.source.screen: {brief(error)}") from error


def _filters(screen: ScreenConfig) -> list[Any]:
    from datatrove.pipeline import filters

    return [
        getattr(filters, name)(**arguments, language=screen.language)
        for name, arguments in screen.filters.items()
    ]


def _specs(
    files: Sequence[FileRange],
    source: Source,
    screen: ScreenConfig,
    config: DataConfig,
    facts: FactCache,
) -> list[ScreenSpec]:
    """The partitions of a source in the order of their keys, which names do not change."""
    reading = reading_of(source.updated(screen=None))
    versions = [importlib.metadata.version(each) for each in LIBRARIES]
    common = storage.content_key([*versions, screen.model_dump(mode="json"), reading.decides])
    specs = [
        ScreenSpec(
            key=storage.content_key([common, sorted(map(content_of, ranges))])[:32],
            ranges=ranges,
            reading=reading,
            screen=screen,
            bytes=size,
        )
        for ranges, size in plan_partitions(
            files, reading, config.partition_megabytes * MEBIBYTE, facts
        )
    ]
    return sorted(specs, key=lambda spec: spec.key)


@contextlib.contextmanager
def _processes(config: DataConfig) -> Iterator[Executor]:
    """Processes of this machine, since filters are Python; they end with the block or with us."""
    workers, context = config.workers or available_cores(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin_process, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise StageError("screen: a process died, perhaps for want of memory") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process(parent: int) -> None:
    die_with_parent(parent)
    # Without datatrove's own messages.
    os.environ["TQDM_DISABLE"] = "1"
    from loguru import logger

    logger.disable("datatrove")


def _screen_all(
    specs: Sequence[ScreenSpec],
    root: Path,
    pool: Executor,
    facts: FactCache,
    progress: OnProgress,
) -> None:
    """Screen the partitions that are missing or damaged, the largest first."""
    wanted = {each.key: each for each in specs}  # Equal files make equal partitions.
    missing = {key: each for key, each in wanted.items() if _find(root / key, facts) is None}
    done, total = 0, sum(each.bytes for each in missing.values())
    log.info("%d of %d partitions to screen", len(missing), len(wanted))
    largest_first = sorted(missing.values(), key=lambda each: -each.bytes)
    tasks = {pool.submit(screen_partition, root, each): each.bytes for each in largest_first}
    for task in as_completed(tasks):
        task.result()
        done += tasks[task]
        progress(done, total)


def _find(folder: Path, facts: FactCache) -> Screened | None:
    """A partition that is screened and intact; it counts as used now, so that it is kept."""
    try:
        record = read_record(folder / RECORD, Screened)
        os.utime(folder / RECORD)
        (file,) = fingerprint(local_files([str(folder / KEPT)]), facts)
    except (FileNotFoundError, DataError):
        return None
    return record if file.fingerprint == f"sha256:{record.sha256}" else None


def screen_partition(root: Path, spec: ScreenSpec) -> None:
    """Filter a partition to `<root>/<key>/`: the texts that are kept, signatures and a record.

    Another process that does so is waited for.
    """
    with storage.lock(root / ".locks" / spec.key):
        if _find(root / spec.key, fact_cache(root.parent)) is None:
            with storage.atomic_folder(root / spec.key) as folder:
                write_record(folder / RECORD, _screen(spec, folder))


def _screen(spec: ScreenSpec, folder: Path) -> Screened:
    """Write the texts that are kept, and their signatures."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

    screen, counts = spec.screen, Counter[str]()

    def read() -> Iterator[Document]:
        for batch in read_documents(spec.ranges, spec.reading):
            counts[SKIPPED] += batch.skipped
            counts["documents"] += len(batch.texts) + batch.skipped
            for text in batch.texts.to_pylist():
                yield Document(text=text, id="")

    documents, filters = read(), _filters(screen)
    for name, each in zip(screen.filters, filters, strict=True):
        documents = _filtered(documents, name, each)
    documents = _written(documents, folder / KEPT, counts)
    if screen.minhash is None:
        deque(documents, maxlen=0)
    else:
        config = _configured(screen.minhash)
        MinhashDedupSignature(str(folder), config, screen.language).run(documents)
    dropped = {SKIPPED: counts[SKIPPED]}
    for name, each in zip(screen.filters, filters, strict=True):
        for reason, count in each.stats.stats.items():
            if reason.startswith("dropped_"):
                dropped[f"{name}: {reason.removeprefix('dropped_')}"] = int(count.total)
    return Screened(
        documents=counts["documents"],
        kept=counts[KEPT],
        dropped=dropped,
        sha256=storage.sha256(folder / KEPT),
    )


def _filtered(documents: Iterable[Any], name: str, step: Any) -> Iterator[Any]:
    """Pass on the documents that a filter keeps. Raises `DataError` if it fails on one."""
    try:
        yield from step.run(documents)
    except UserError:
        raise  # of a file that cannot be read, or of the filter before
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"data.source.screen.filters.{name}: {brief(error)}") from error


def _configured(minhash: MinHashConfig) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    # Of its two functions, the one that needs no other package.
    return MinhashConfig(**minhash.model_dump(), hash_config=HashConfig(hash_fc="sha1"))


def _written(documents: Iterable[Any], path: Path, counts: Counter[str]) -> Iterator[Any]:
    """Pass documents on, and write their texts."""
    from datatrove.utils.batching import batched

    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as file:
        for some in batched(documents, ROWS):
            file.write_table(pa.table([[each.text for each in some]], SCHEMA))
            counts[KEPT] += len(some)
            yield from some


def _deduplicate(
    specs: Sequence[ScreenSpec],
    minhash: MinHashConfig | None,
    root: Path,
    pool: Executor,
    facts: FactCache,
) -> tuple[list[FileRange], Screened]:
    """The files of what is left of a source, and its counts."""
    folders = [root / each.key for each in specs]
    records = [read_record(folder / RECORD, Screened) for folder in folders]
    removed = _near_duplicates(root, folders, minhash, pool) if minhash and folders else {}
    dropped = Counter({DUPLICATES: sum(map(len, removed.values()))})
    tasks = {number: pool.submit(_without, folders[number], removed[number]) for number in removed}
    paths = []
    for number, (folder, record) in enumerate(zip(folders, records, strict=True)):
        dropped.update(record.dropped)
        path = tasks[number].result() if number in tasks else folder / KEPT
        if record.kept > len(removed.get(number, ())):
            paths.append(str(path))
    documents, reasons = sum(each.documents for each in records), dict((+dropped).most_common())
    if not paths:
        why = "".join(f"; {reason}: {count:,}" for reason, count in reasons.items())
        raise DataError(f"data.source.screen: none of {documents:,} documents is left{why}")
    files, kept = fingerprint(local_files(paths), facts), documents - dropped.total()
    return [*map(whole_file, files)], Screened(documents=documents, kept=kept, dropped=reasons)


def _near_duplicates(
    root: Path, folders: Sequence[Path], minhash: MinHashConfig, pool: Executor
) -> dict[int, np.ndarray]:
    """The rows of each partition, uint32 in order, that another document makes needless."""
    from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets, MinhashDedupCluster

    config = _configured(minhash)
    with (
        storage.named_os_errors(root),
        tempfile.TemporaryDirectory(prefix=f"{storage.TEMPORARY}pairs-", dir=root) as place,
    ):
        signed, pairs, clusters = (Path(place, each) for each in ("signed", "pairs", "clusters"))
        tasks = []
        for bucket in range(minhash.num_buckets):
            folder = signed / f"bucket_{bucket:03d}"
            folder.mkdir(parents=True)
            for number, partition in enumerate(folders):
                signatures = partition / folder.name / "00000.minhash.sig"
                (folder / f"{number:05d}.minhash.sig").symlink_to(signatures.resolve())
            match = MinhashDedupBuckets(str(signed), str(pairs), config=config)
            tasks.append(pool.submit(match.run, None, bucket, minhash.num_buckets))
        for task in tasks:
            task.result()
        pool.submit(MinhashDedupCluster(str(pairs), str(clusters), config).run).result()
        files = {number: clusters / f"{number:06d}.remove" for number in range(len(folders))}
        return {
            number: np.fromfile(file, np.uint32) for number, file in files.items() if file.exists()
        }


def _without(folder: Path, rows: np.ndarray) -> Path:
    """The file of what a partition keeps but for some rows, which name it."""
    path, first = folder / f"kept-{storage.content_key(rows.tolist())[:16]}.parquet", 0
    if path.exists():
        return path
    with storage.atomic_file(path) as temporary, pq.ParquetWriter(temporary, SCHEMA) as file:
        for batch in pq.ParquetFile(folder / KEPT).iter_batches(ROWS):
            numbers = np.arange(first, first + len(batch))
            file.write_batch(batch.filter(pa.array(~np.isin(numbers, rows))))
            first += len(batch)
    return path
