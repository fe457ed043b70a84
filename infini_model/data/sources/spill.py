"""The text of a corpus on disk, sorted so that the documents of any bucket can be read back.

This is the first half of an external sort: documents are written in runs of some megabytes, each
sorted by content hash, so that a bucket is one contiguous slice of every run, whatever the number
of buckets. A spill is never trusted: readers compare the hashes of its documents with those of the
corpus, and a spill that is damaged, missing or out of date is written again from the source.

    texts      the UTF-8 of the documents, run after run
    entries    for each run the high words, low words and end offsets of its documents, uint64
    runs.json  the number of documents in each run, written last
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from infini_model.data.sources.content import bucket_starts, buckets_of, hash_documents, sort_order
from infini_model.data.sources.documents import DocumentBatch, Part, read_part
from infini_model.data.sources.formats import Reading
from infini_model.data.sources.string_arrays import MAX_OFFSET, string_buffers
from infini_model.data.threads import Advance, for_each
from infini_model.runtime import storage

TEXTS, ENTRIES, RUNS = "texts", "entries", "runs.json"
# Runs grow with the corpus, so that a bucket does not become too many small slices.
MIN_RUN_BYTES, MAX_RUN_BYTES, TARGET_RUNS = 4 << 20, 64 << 20, 1024


class UnusableSpillError(Exception):
    """A spill is missing, damaged, or holds other documents than the corpus."""


@dataclass(frozen=True)
class SpillSize:
    """What a spill holds: documents and bytes of text; `skipped` documents were left out."""

    documents: int
    bytes: int
    skipped: int


def write_spill(
    parts: Collection[Part],
    reading: Reading,
    folder: Path,
    threads: int,
    advance: Advance,
    wanted: np.ndarray | None = None,
    min_run_bytes: int = MIN_RUN_BYTES,
) -> SpillSize:
    """Read files with `threads` threads and write a spill of their documents to `folder`.

    `wanted`, bool [bucket_count], selects buckets; None selects all. `advance` receives the bytes
    read from the files. Raises `DataError` as `read_part` does, and `OSError` on disk errors.
    """
    source_bytes = sum(part.bytes for part in parts)
    run_bytes = max(min_run_bytes, min(MAX_RUN_BYTES, source_bytes // TARGET_RUNS))
    writer = _Writer(folder, run_bytes, wanted)

    def read(part: Part, advance: Advance) -> None:
        for batch in read_part(part, reading):
            writer.add(batch)
            advance(0)
        advance(part.bytes)

    for_each(parts, [read] * threads, advance)
    size = writer.close()
    # Otherwise Arrow keeps this memory while tokenisation allocates more.
    pa.default_memory_pool().release_unused()
    return size


class _Writer:
    """Sorts batches from several threads into runs; thread-safe."""

    def __init__(self, folder: Path, run_bytes: int, wanted: np.ndarray | None) -> None:
        self._folder, self._run_bytes, self._wanted = folder, run_bytes, wanted
        self._lock = threading.Lock()
        self._pending: list[pa.StringArray] = []
        self._pending_bytes = self._bytes = self._skipped = 0
        self._runs: list[int] = []
        for name in (TEXTS, ENTRIES):
            (folder / name).touch()

    def add(self, batch: DocumentBatch) -> None:
        with self._lock:
            self._skipped += batch.skipped
        if batch.texts.nbytes >= self._run_bytes:
            self._write([batch.texts])
            return
        with self._lock:
            self._pending.append(batch.texts)
            self._pending_bytes += batch.texts.nbytes
            if self._pending_bytes < self._run_bytes:
                return
            pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._write(pending)

    def close(self) -> SpillSize:
        self._write(self._pending)
        storage.dump_json(self._folder / RUNS, self._runs)
        return SpillSize(sum(self._runs), self._bytes, self._skipped)

    def _write(self, arrays: list[pa.StringArray]) -> None:
        """Sort the documents and append them as one run."""
        if not arrays:
            return
        texts = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        hashes = hash_documents(texts)
        order = sort_order(hashes)
        if self._wanted is not None:
            order = order[self._wanted[buckets_of(hashes[order], len(self._wanted))]]
        if not len(order):
            return
        offsets, data = string_buffers(texts.take(pa.array(order)))
        ends = offsets[1:].astype(np.uint64)
        with self._lock:
            start = self._bytes
            self._bytes += int(ends[-1])
            self._runs.append(len(order))
            with (self._folder / ENTRIES).open("ab") as file:
                file.write(np.stack([hashes[order, 0], hashes[order, 1], ends]).data)
        with (self._folder / TEXTS).open("r+b") as file:
            file.seek(start)
            file.write(data[: offsets[-1]].data)


class Spill:
    """The spill that `write_spill` wrote to `folder`; readable even after the folder is deleted.

    A context manager. Raises `UnusableSpillError` if files are missing or inconsistent.
    """

    def __init__(self, folder: Path) -> None:
        self._runs: list[_Run] = []
        try:
            counts = json.loads((folder / RUNS).read_bytes())
            entries = np.memmap(folder / ENTRIES, np.uint64, "r")
            first = start = 0
            for count in counts:
                high, low, ends = entries[3 * first : 3 * (first + count)].reshape(3, count)
                self._runs.append(_Run(high, low, ends, start))
                first, start = first + count, start + int(ends[-1])
            self._texts = (folder / TEXTS).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise UnusableSpillError("its text was not kept") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UnusableSpillError(f"its text is damaged: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._texts.close()

    def entries(self, bucket: int, bucket_count: int) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of a bucket's documents, uint64 [n, 2], and their bytes, int64 [n]."""
        none = _RunSlice(np.empty((0, 2), np.uint64), np.empty(0, np.int64), 0)
        slices = [none, *self._slices(bucket, bucket_count)]
        return (
            np.concatenate([part.hashes for part in slices]),
            np.concatenate([part.sizes for part in slices]),
        )

    def texts(
        self, bucket: int, bucket_count: int, array_bytes: int = MAX_OFFSET
    ) -> pa.ChunkedArray:
        """The documents of a bucket, in arrays of at most `array_bytes` unless one run has more.

        Their hashes are not verified. Raises `UnusableSpillError` if documents are missing.
        """
        arrays: list[pa.StringArray] = []
        pending: list[_RunSlice] = []
        size = 0
        for part in self._slices(bucket, bucket_count):
            if pending and size + part.bytes > array_bytes:
                arrays.append(self._read(pending, size))
                pending, size = [], 0
            pending.append(part)
            size += part.bytes
        if pending:
            arrays.append(self._read(pending, size))
        return pa.chunked_array(arrays, pa.string())

    def _slices(self, bucket: int, bucket_count: int) -> Iterator[_RunSlice]:
        """The slice of a bucket in each run that has documents of it."""
        starts = bucket_starts(bucket_count)
        for run in self._runs:
            first, last = int(np.searchsorted(run.high, starts[bucket])), len(run.high)
            if bucket + 1 < bucket_count:
                last = int(np.searchsorted(run.high, starts[bucket + 1]))
            if first < last:
                hashes = np.stack([run.high[first:last], run.low[first:last]], axis=1)
                before = int(run.ends[first - 1]) if first else 0
                sizes = np.diff(run.ends[first:last].astype(np.int64), prepend=before)
                yield _RunSlice(hashes, sizes, run.start + before)

    def _read(self, slices: list[_RunSlice], size: int) -> pa.StringArray:
        """The documents of slices of `size` bytes in total, as one array."""
        sizes = np.concatenate([part.sizes for part in slices])
        if sizes.min() < 0 or size > MAX_OFFSET:
            raise UnusableSpillError("its text is damaged: impossible sizes")
        buffer = np.empty(size, np.uint8).data
        done = 0
        for part in slices:
            _read_fully(self._texts.fileno(), buffer[done : done + part.bytes], part.start)
            done += part.bytes
        offsets = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(buffer))


def _read_fully(descriptor: int, target: memoryview, position: int) -> None:
    """Fill `target` from `position`; several threads may share one descriptor."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], position + done)
        except OSError as error:
            raise UnusableSpillError(str(error)) from error
        if not count:
            raise UnusableSpillError("its text is damaged: it ends too early")
        done += count


@dataclass(frozen=True)
class _Run:
    """The index of a run: hashes and end offsets, uint64 [n] each; its text begins at `start`."""

    high: np.ndarray
    low: np.ndarray
    ends: np.ndarray
    start: int


@dataclass(frozen=True)
class _RunSlice:
    """Consecutive documents of a run: `hashes` uint64 [n, 2], `sizes` int64 [n].

    Their text begins at byte `start` of the file.
    """

    hashes: np.ndarray
    sizes: np.ndarray
    start: int

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())
