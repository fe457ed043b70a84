"""A corpus, known by the content of its documents.

Each document has a 16-byte hash. Its first bits choose the bucket and its last bits the split, so
both depend on the document alone. One pass over the files writes the hashes to a few spill files
by their first byte; sorting one at a time gives all hashes in order with flat memory, and with them
the fingerprint of the corpus and the digest of every bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model import storage
from infini_model.config import SplitsConfig
from infini_model.data import documents
from infini_model.data.documents import Progress, Reading, string_buffers
from infini_model.data.manifest import (
    FORMAT_VERSION,
    Bucket,
    Corpus,
    RawFile,
    read_record,
    write_record,
)
from infini_model.errors import DataError

HASH_BYTES = 16
# One entry of a spill file: the hash as two words, the first of them the high one, and the
# document's length.
ENTRY = np.dtype([("high", np.uint64), ("low", np.uint64), ("bytes", np.int64)])
SPILL_ENTRIES = 1 << 16


def hash_documents(texts: pa.StringArray) -> np.ndarray:
    """The content hashes of documents: uint64 [n, 2], the high word and the low word."""
    offsets, octets = string_buffers(texts)
    data = octets.data
    hashes = bytearray()
    for start, end in pairwise(offsets.tolist()):
        hashes += hashlib.blake2b(data[start:end], digest_size=HASH_BYTES).digest()
    return np.frombuffer(hashes, ">u8").reshape(-1, 2).astype(np.uint64)


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
    """The hashes as they came from blake2b, on machines of either byte order."""
    return hashes.astype(">u8").tobytes()


def scan(
    files: Sequence[RawFile],
    reading: Reading,
    partition_bytes: int,
    corpora_dir: Path,
    progress: Progress | None = None,
) -> Corpus:
    """Read every document once and say what the corpus holds.

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
            with storage.named_os_errors(spill):
                total, skipped = _spill_hashes(files, reading, spill, progress)
            corpus = _summarise(spill, list(files), skipped, _bucket_count(total, partition_bytes))
        finally:
            shutil.rmtree(spill, ignore_errors=True)
        if not corpus.documents:
            raise DataError(_nothing_left(files, reading, skipped))
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
    count = 1
    while total_bytes > count * partition_bytes:
        count *= 2
    return count


def _spill_hashes(
    files: Sequence[RawFile], reading: Reading, spill: Path, progress: Progress | None
) -> tuple[int, int]:
    """Write an entry for every document into `spill`; returns (bytes, documents left out)."""
    total = skipped = waiting = 0
    entries: list[np.ndarray] = []
    for batch in documents.read_documents(_announced(files, progress), reading):
        hashes = hash_documents(batch.texts)
        entry = np.empty(len(hashes), ENTRY)
        entry["high"], entry["low"] = hashes[:, 0], hashes[:, 1]
        entry["bytes"] = np.diff(string_buffers(batch.texts)[0])
        entries.append(entry)
        total += int(entry["bytes"].sum())
        skipped += batch.skipped
        waiting += len(entry)
        if waiting >= SPILL_ENTRIES:
            _append_entries(entries, spill)
            entries, waiting = [], 0
    _append_entries(entries, spill)
    return total, skipped


def _announced(files: Sequence[RawFile], progress: Progress | None) -> Iterator[Path]:
    """The paths in turn; asking for one says that those before it have been read."""
    total = sum(file.bytes for file in files)
    done = 0
    for file in files:
        yield file.path
        done += file.bytes
        if progress is not None:
            progress(done, total)


def _append_entries(entries: list[np.ndarray], spill: Path) -> None:
    if not entries:
        return
    joined = np.concatenate(entries)
    first_byte = (joined["high"] >> np.uint64(56)).astype(np.uint8)
    joined = joined[np.argsort(first_byte, kind="stable")]
    counts = np.bincount(first_byte, minlength=256)
    ends = np.cumsum(counts)
    for byte in np.flatnonzero(counts).tolist():
        with (spill / f"{byte:02x}").open("ab") as file:
            file.write(joined[ends[byte] - counts[byte] : ends[byte]].tobytes())


def _summarise(spill: Path, files: list[RawFile], skipped: int, bucket_count: int) -> Corpus:
    """Go through all hashes in order, one spill file at a time."""
    whole = hashlib.sha256()
    digests = [hashlib.sha256() for _ in range(bucket_count)]
    counts = np.zeros(bucket_count, np.int64)
    sizes = np.zeros(bucket_count, np.int64)
    for part in sorted(spill.iterdir()):
        entries = np.fromfile(part, ENTRY)
        entries = entries[np.lexsort((entries["low"], entries["high"]))]
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
