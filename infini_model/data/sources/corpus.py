"""The scan of a corpus: its documents read once and fingerprinted by content.

One pass over the files spills the documents (see `spill`). Their sorted hashes give the fingerprint
of the corpus and the digest of every bucket. The spill is kept for building the dataset, so that
the files need not be decoded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from infini_model.data.manifest import (
    FORMAT_VERSION,
    Bucket,
    Corpus,
    RawFile,
    read_record,
    write_record,
)
from infini_model.data.sources.content import big_endian_bytes, digest, sort_order
from infini_model.data.sources.documents import Progress, parts_of
from infini_model.data.sources.formats import Reading, suffix
from infini_model.data.sources.spill import Spill, write_spill
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

# A small corpus gets smaller partitions, down to this size, so that several cores share the work.
TARGET_PARTITIONS, SMALL_PARTITION_BYTES = 64, 8 << 20
SPILL = ".spill"


def scan(
    files: Sequence[RawFile],
    reading: Reading,
    partition_bytes: int,
    corpora_dir: Path,
    threads: int,
    progress: Progress | None = None,
) -> Corpus:
    """Read every document once, with `threads` threads, and describe the corpus.

    The result is cached under `corpora_dir`, keyed by the contents of the files and the settings
    that decide the documents: an unchanged source is not read again, even if its files were moved.
    Reading a source leaves its spill at `spill_folder` and deletes older spills.

    Raises `DataError` in one line if a file cannot be read or no documents are left.
    """
    key = _scan_key(files, reading, partition_bytes)
    path = corpora_dir / f"{key}.json"
    with storage.lock(corpora_dir / ".locks" / key):
        known = None
        with contextlib.suppress(DataError):  # a missing or damaged record means a new scan
            known = read_record(path, Corpus).model_copy(update={"files": list(files)})
        for kept in corpora_dir.glob(f"*{SPILL}"):
            was_killed = not kept.with_suffix(".json").exists()
            if known is None or was_killed:
                drop_spill(kept)
        if known is not None:
            return known
        storage.remove_leftovers(corpora_dir, path.name)
        folder = corpora_dir / f"{key}{SPILL}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            corpus = _read(files, reading, partition_bytes, folder, threads, progress)
            write_record(path, corpus.model_copy(update={"files": []}))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return corpus


def spill_folder(
    files: Sequence[RawFile], reading: Reading, partition_bytes: int, corpora_dir: Path
) -> Path:
    """Where a scan with these arguments leaves its spill."""
    return corpora_dir / f"{_scan_key(files, reading, partition_bytes)}{SPILL}"


def drop_spill(folder: Path) -> None:
    """Delete a spill, unless a scan is still writing it."""
    if not folder.is_dir():
        return
    with storage.lock(folder.parent / ".locks" / folder.stem, wait=False) as is_idle:
        if is_idle:
            shutil.rmtree(folder, ignore_errors=True)


def _scan_key(files: Sequence[RawFile], reading: Reading, partition_bytes: int) -> str:
    contents = sorted((suffix(file.path), file.sha256) for file in files)
    ingredients = [
        FORMAT_VERSION,
        contents,
        reading.column,
        reading.errors,
        reading.min_characters,
        reading.separator,
        partition_bytes,
    ]
    return storage.content_key(ingredients)[:32]


def _bucket_count(total_bytes: int, partition_bytes: int) -> int:
    """The number of buckets: a power of two, so that none has more text than a partition may."""
    count = 1
    while total_bytes > count * partition_bytes or (
        count < TARGET_PARTITIONS and total_bytes > 2 * count * SMALL_PARTITION_BYTES
    ):
        count *= 2
    return count


def _read(
    files: Sequence[RawFile],
    reading: Reading,
    partition_bytes: int,
    folder: Path,
    threads: int,
    progress: Progress | None,
) -> Corpus:
    """Spill every document; `progress` counts bytes of the files."""
    total = sum(file.bytes for file in files)
    done = 0

    def advance(read_bytes: int) -> None:
        nonlocal done
        done += read_bytes
        if progress is not None and read_bytes:
            progress(done, total)

    with storage.named_os_errors(storage.make_folder(folder)):
        parts = list(parts_of(file.path for file in files))
        spilled = write_spill(parts, reading, folder, threads, advance)
    if not spilled.documents:
        raise DataError(_no_documents_message(files, reading, spilled.skipped))
    fingerprint = hashlib.sha256()
    buckets = []
    bucket_count = _bucket_count(spilled.bytes, partition_bytes)
    with Spill(folder) as spill:
        for number in range(bucket_count):
            hashes, sizes = spill.entries(number, bucket_count)
            hashes = hashes[sort_order(hashes)]
            fingerprint.update(big_endian_bytes(hashes))
            buckets.append(
                Bucket(documents=len(sizes), bytes=int(sizes.sum()), digest=digest(hashes))
            )
    return Corpus(
        files=list(files),
        documents=spilled.documents,
        bytes=spilled.bytes,
        skipped=spilled.skipped,
        fingerprint=fingerprint.hexdigest(),
        buckets=buckets,
    )


def _no_documents_message(files: Sequence[RawFile], reading: Reading, skipped: int) -> str:
    first = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    why = "empty"
    if reading.min_characters:
        why += f" or under data.source.min_characters {reading.min_characters}"
    if reading.errors == "skip":
        why += " or not UTF-8"
    return f"{first}: no documents left: {skipped} of {skipped} are {why}"
