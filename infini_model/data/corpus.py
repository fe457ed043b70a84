"""A corpus, known by the content of its documents.

Each document has a hash, the first 16 bytes of its SHA-256. Its first bits choose the bucket and
its last bits the split, so both depend on the document alone. One pass over the files writes the
hashes to a few spill files by their first byte; sorting one at a time gives all hashes in order
with flat memory, and with them the fingerprint of the corpus and the digest of every bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model import storage
from infini_model.config import SplitsConfig
from infini_model.data import documents
from infini_model.data.documents import Batch, Part, Progress, Reading, string_buffers
from infini_model.data.manifest import (
    FORMAT_VERSION,
    Bucket,
    Corpus,
    RawFile,
    read_record,
    write_record,
)
from infini_model.data.threads import Tell, for_each
from infini_model.errors import DataError

# One entry of a spill file: the hash as two words, the first of them the high one, and the
# document's length.
ENTRY = np.dtype([("high", np.uint64), ("low", np.uint64), ("bytes", np.int64)])
SPILL_ENTRIES = 1 << 20
# A corpus of less than many partitions of full size has smaller ones, down to this many bytes.
MANY_PARTITIONS, SMALL_PARTITION = 32, 8 << 20


def hash_documents(texts: pa.StringArray) -> np.ndarray:
    """The content hashes of documents: uint64 [n, 2], the high word and the low word."""
    offsets, octets = string_buffers(texts)
    data, sha256 = octets.data, hashlib.sha256
    # Processors have instructions for it: twice as fast as the hashes made to be fast without.
    digests = b"".join(
        [sha256(data[start:end]).digest() for start, end in pairwise(offsets.tolist())]
    )
    return np.frombuffer(digests, ">u8").reshape(-1, 4)[:, :2].astype(np.uint64)


def buckets_of(hashes: np.ndarray, bucket_count: int) -> np.ndarray:
    """The bucket of each hash, int64 [n]: its first log2(bucket_count) bits."""
    bits = bucket_count.bit_length() - 1
    if bits == 0:
        return np.zeros(len(hashes), np.int64)
    return (hashes[:, 0] >> np.uint64(64 - bits)).astype(np.int64)


def splits_of(hashes: np.ndarray, splits: SplitsConfig) -> np.ndarray:
    """The split of each hash, int64 [n]: 0 train, 1 validation, 2 test, by its last bits."""
    place = (hashes[:, 1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    validation_ends = 1.0 if splits.test == 0.0 else splits.train + splits.validation
    return (place >= splits.train).astype(np.int64) + (place >= validation_ends)


def digest(hashes: np.ndarray) -> str:
    """The SHA-256 of sorted hashes, [n, 2] in the order of their bytes."""
    return hashlib.sha256(_ordered_bytes(hashes)).hexdigest()


def _ordered_bytes(hashes: np.ndarray) -> bytes:
    """The hashes as they came from SHA-256, on machines of either byte order."""
    return hashes.astype(">u8").tobytes()


def scan(
    files: Sequence[RawFile],
    reading: Reading,
    partition_bytes: int,
    corpora_dir: Path,
    threads: int,
    progress: Progress | None = None,
) -> Corpus:
    """Read every document once, in so many threads, and say what the corpus holds.

    The answer is kept under `corpora_dir`, keyed by the contents of the files and by what decides
    the documents: an unchanged source is not read again, wherever its files have moved.

    Raises `DataError` in one line: a file that cannot be read, or no documents left.
    """
    path = corpora_dir / f"{_scan_key(files, reading, partition_bytes)}.json"
    with storage.lock(corpora_dir / ".locks" / path.stem):
        with contextlib.suppress(DataError):  # a damaged answer is as good as none
            return read_record(path, Corpus).model_copy(update={"files": list(files)})
        spill = corpora_dir / f"{storage.TEMPORARY}{path.stem}"
        shutil.rmtree(spill, ignore_errors=True)
        storage.remove_leftovers(corpora_dir, path.name)
        storage.make_folder(spill)
        try:
            entries = _Entries(spill)
            with storage.named_os_errors(spill):
                _read_hashes(files, reading, entries, threads, progress)
            count = _bucket_count(entries.bytes, partition_bytes)
            corpus = _summarise(entries.in_order(), list(files), entries.skipped, count)
        finally:
            shutil.rmtree(spill, ignore_errors=True)
        if not corpus.documents:
            raise DataError(_nothing_left(files, reading, corpus.skipped))
        write_record(path, corpus.model_copy(update={"files": []}))
    return corpus


def _scan_key(files: Sequence[RawFile], reading: Reading, partition_bytes: int) -> str:
    contents = sorted((documents.suffix(file.path), file.sha256) for file in files)
    ingredients = [
        FORMAT_VERSION,
        contents,
        reading.column,
        reading.errors,
        reading.min_characters,
        reading.separator,
        partition_bytes,
    ]
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]


def _bucket_count(total_bytes: int, partition_bytes: int) -> int:
    """A power of two: no partition is larger than that, and little text still has several."""
    count = 1
    while total_bytes > count * partition_bytes or (
        count < MANY_PARTITIONS and total_bytes > 2 * count * SMALL_PARTITION
    ):
        count *= 2
    return count


def _read_hashes(
    files: Sequence[RawFile],
    reading: Reading,
    entries: _Entries,
    threads: int,
    progress: Progress | None,
) -> None:
    """Add an entry for every document; `progress` is told bytes of the files."""
    total = sum(file.bytes for file in files)
    done = 0

    def read(part: Part, tell: Tell) -> None:
        for batch in documents.read_part(part, reading):
            entries.add(batch)
            tell(0)
        tell(part.bytes)

    def count(read_bytes: int) -> None:
        nonlocal done
        done += read_bytes
        if progress is not None and read_bytes:
            progress(done, total)

    for_each(documents.parts_of(file.path for file in files), [read] * threads, count)


class _Entries:
    """Hashes and sizes of documents from several threads; many are kept in spill files.

    Attributes:
        bytes: Of all documents so far.
        skipped: Documents left out on the way here.
    """

    def __init__(self, spill: Path) -> None:
        self.bytes = self.skipped = 0
        self._spill = spill
        self._lock = threading.Lock()
        self._waiting: list[np.ndarray] = []

    def add(self, batch: Batch) -> None:
        """Take the documents of a batch."""
        hashes = hash_documents(batch.texts)
        entry = np.empty(len(hashes), ENTRY)
        entry["high"], entry["low"] = hashes[:, 0], hashes[:, 1]
        entry["bytes"] = np.diff(string_buffers(batch.texts)[0])
        with self._lock:
            self.bytes += int(entry["bytes"].sum())
            self.skipped += batch.skipped
            self._waiting.append(entry)
            if sum(map(len, self._waiting)) >= SPILL_ENTRIES:
                self._flush()

    def in_order(self) -> Iterator[np.ndarray]:
        """All entries by their hashes, in several arrays; nobody may be adding meanwhile."""
        if any(self._spill.iterdir()):
            self._flush()
            for file in sorted(self._spill.iterdir()):
                yield _sorted(np.fromfile(file, ENTRY))
        elif self._waiting:
            yield _sorted(np.concatenate(self._waiting))

    def _flush(self) -> None:
        joined = np.concatenate([np.empty(0, ENTRY), *self._waiting])
        self._waiting.clear()
        first_byte = (joined["high"] >> np.uint64(56)).astype(np.uint8)
        joined = joined[np.argsort(first_byte, kind="stable")]
        counts = np.bincount(first_byte, minlength=256)
        ends = np.cumsum(counts)
        for byte in np.flatnonzero(counts).tolist():
            with (self._spill / f"{byte:02x}").open("ab") as file:
                file.write(joined[ends[byte] - counts[byte] : ends[byte]].tobytes())


def _sorted(entries: np.ndarray) -> np.ndarray:
    return entries[np.lexsort((entries["low"], entries["high"]))]


def _summarise(
    parts: Iterable[np.ndarray], files: list[RawFile], skipped: int, bucket_count: int
) -> Corpus:
    """Go through all entries, which come in order."""
    whole = hashlib.sha256()
    digests = [hashlib.sha256() for _ in range(bucket_count)]
    counts = np.zeros(bucket_count, np.int64)
    sizes = np.zeros(bucket_count, np.int64)
    for entries in parts:
        hashes = np.stack([entries["high"], entries["low"]], axis=1).astype(np.uint64)
        whole.update(_ordered_bytes(hashes))
        bucket = buckets_of(hashes, bucket_count)
        np.add.at(sizes, bucket, entries["bytes"])
        counts += np.bincount(bucket, minlength=bucket_count)
        for index in np.unique(bucket).tolist():
            first, last = np.searchsorted(bucket, [index, index + 1])
            digests[index].update(_ordered_bytes(hashes[first:last]))
    return Corpus(
        files=files,
        documents=int(counts.sum()),
        bytes=int(sizes.sum()),
        skipped=skipped,
        fingerprint=whole.hexdigest(),
        buckets=[
            Bucket(documents=int(count), bytes=int(size), digest=of.hexdigest())
            for count, size, of in zip(counts, sizes, digests, strict=True)
        ],
    )


def _nothing_left(files: Sequence[RawFile], reading: Reading, skipped: int) -> str:
    first = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    why = "empty"
    if reading.min_characters:
        why += f" or under data.source.min_characters {reading.min_characters}"
    if reading.errors == "skip":
        why += " or not UTF-8"
    return f"{first}: no documents left: {skipped} of {skipped} are {why}"
