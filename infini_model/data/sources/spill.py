"""The text of a corpus on disk, from which any bucket's documents can be had: an external sort.

Documents are written in runs of some megabytes, each sorted by content hash, so that a bucket is
one stretch of every run, however many buckets there are to be. A spill is never trusted: whoever
reads documents from it compares their hashes with those of the corpus, and a spill that is torn,
gone or of other documents is written anew from the source.

    texts      the UTF-8 of the documents, run after run
    entries    of each run the high words, the low words and the ends in it of its documents, uint64
    runs.json  the number of documents of each run, written last
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

from infini_model.data.sources.content import bucket_starts, buckets_of, hash_documents, in_order
from infini_model.data.sources.documents import (
    LARGEST_DOCUMENT,
    Batch,
    Part,
    Reading,
    read_part,
    string_buffers,
)
from infini_model.data.threads import Tell, for_each
from infini_model.runtime import storage

TEXTS, ENTRIES, RUNS = "texts", "entries", "runs.json"
# Runs are longer where the files are larger, so that a bucket is not too many small stretches.
SHORT_RUN, LONG_RUN, MANY_RUNS = 4 << 20, 64 << 20, 1024


class UnusableSpillError(Exception):
    """A spill is gone, torn, or holds other documents than those that are asked of it."""


@dataclass(frozen=True)
class Written:
    """What went into a spill: documents and bytes of text; `skipped` documents were left out."""

    documents: int
    bytes: int
    skipped: int


def write_spill(
    parts: Collection[Part],
    reading: Reading,
    folder: Path,
    threads: int,
    tell: Tell,
    wanted: np.ndarray | None = None,
) -> Written:
    """Read files in so many threads and leave a spill of their documents in `folder`.

    Of the buckets those that are true in `wanted`, bool [bucket_count]; None is all. `tell` is
    told the bytes of the files. Raises `DataError` as `read_part` does, `OSError` as the disk does.
    """
    run_bytes = max(SHORT_RUN, min(LONG_RUN, sum(part.bytes for part in parts) // MANY_RUNS))
    writer = _Writer(folder, run_bytes, wanted)

    def read(part: Part, tell: Tell) -> None:
        for batch in read_part(part, reading):
            writer.add(batch)
            tell(0)
        tell(part.bytes)

    for_each(parts, [read] * threads, tell)
    written = writer.close()
    # What the threads have used would otherwise lie beside what tokenising is about to use.
    pa.default_memory_pool().release_unused()
    return written


class _Writer:
    """Takes batches from several threads."""

    def __init__(self, folder: Path, run_bytes: int, wanted: np.ndarray | None) -> None:
        self._folder, self._run_bytes, self._wanted = folder, run_bytes, wanted
        self._lock = threading.Lock()
        self._waiting: list[pa.StringArray] = []
        self._waiting_bytes = self._bytes = self._skipped = 0
        self._runs: list[int] = []
        for name in (TEXTS, ENTRIES):
            (folder / name).touch()

    def add(self, batch: Batch) -> None:
        with self._lock:
            self._skipped += batch.skipped
        if batch.texts.nbytes >= self._run_bytes:
            self._write([batch.texts])
            return
        with self._lock:
            self._waiting.append(batch.texts)
            self._waiting_bytes += batch.texts.nbytes
            if self._waiting_bytes < self._run_bytes:
                return
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._write(waiting)

    def close(self) -> Written:
        self._write(self._waiting)
        storage.dump_json(self._folder / RUNS, self._runs)
        return Written(sum(self._runs), self._bytes, self._skipped)

    def _write(self, arrays: list[pa.StringArray]) -> None:
        """Sort the documents and append them as one run."""
        if not arrays:
            return
        texts = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        hashes = hash_documents(texts)
        order = in_order(hashes)
        if self._wanted is not None:
            order = order[self._wanted[buckets_of(hashes[order], len(self._wanted))]]
        if not len(order):
            return
        offsets, octets = string_buffers(texts.take(pa.array(order)))
        ends = offsets[1:].astype(np.uint64)
        with self._lock:
            start = self._bytes
            self._bytes += int(ends[-1])
            self._runs.append(len(order))
            with (self._folder / ENTRIES).open("ab") as file:
                file.write(np.stack([hashes[order, 0], hashes[order, 1], ends]).data)
        with (self._folder / TEXTS).open("r+b") as file:
            file.seek(start)
            file.write(octets[: offsets[-1]].data)


class Spill:
    """What `write_spill` left in `folder`, open: it stays readable when the folder goes.

    A context. Raises `UnusableSpillError` where the files are not there or do not fit each other.
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
            raise UnusableSpillError("its text is not kept") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UnusableSpillError(f"its text is damaged: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._texts.close()

    def entries(self, bucket: int, bucket_count: int) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of a bucket's documents, uint64 [n, 2], and their bytes, int64 [n]."""
        none = _Stretch(np.empty((0, 2), np.uint64), np.empty(0, np.int64), 0)
        stretches = [none, *self._stretches(bucket, bucket_count)]
        return (
            np.concatenate([stretch.hashes for stretch in stretches]),
            np.concatenate([stretch.sizes for stretch in stretches]),
        )

    def texts(self, bucket: int, bucket_count: int) -> pa.ChunkedArray:
        """The documents of a bucket as they were written: their hashes are still to be compared.

        Raises `UnusableSpillError` if there are fewer.
        """
        arrays: list[pa.StringArray] = []
        waiting: list[_Stretch] = []
        size = 0
        for stretch in self._stretches(bucket, bucket_count):
            if waiting and size + stretch.bytes > LARGEST_DOCUMENT:
                arrays.append(self._read(waiting, size))
                waiting, size = [], 0
            waiting.append(stretch)
            size += stretch.bytes
        if waiting:
            arrays.append(self._read(waiting, size))
        return pa.chunked_array(arrays, pa.string())

    def _stretches(self, bucket: int, bucket_count: int) -> Iterator[_Stretch]:
        """The rows of a bucket in each run that has any."""
        starts = bucket_starts(bucket_count)
        for run in self._runs:
            first, last = int(np.searchsorted(run.high, starts[bucket])), len(run.high)
            if bucket + 1 < bucket_count:
                last = int(np.searchsorted(run.high, starts[bucket + 1]))
            if first < last:
                hashes = np.stack([run.high[first:last], run.low[first:last]], axis=1)
                before = int(run.ends[first - 1]) if first else 0
                sizes = np.diff(run.ends[first:last].astype(np.int64), prepend=before)
                yield _Stretch(hashes, sizes, run.start + before)

    def _read(self, stretches: list[_Stretch], size: int) -> pa.StringArray:
        """The documents of stretches of so many bytes in all, joined."""
        sizes = np.concatenate([stretch.sizes for stretch in stretches])
        if sizes.min() < 0 or size > LARGEST_DOCUMENT:
            raise UnusableSpillError("its text is damaged: impossible sizes")
        octets = np.empty(size, np.uint8).data
        done = 0
        for stretch in stretches:
            part = octets[done : done + stretch.bytes]
            _read_fully(self._texts.fileno(), part, stretch.start)
            done += stretch.bytes
        offsets = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(octets))


def _read_fully(descriptor: int, target: memoryview, position: int) -> None:
    """Fill `target`; several threads may do it on one descriptor."""
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
    """Documents by their hashes: uint64 [n] each; the text of the first one begins at `start`."""

    high: np.ndarray
    low: np.ndarray
    ends: np.ndarray
    start: int


@dataclass(frozen=True)
class _Stretch:
    """Some documents of a run: `hashes` uint64 [n, 2], `sizes` int64 [n]; they begin at `start`."""

    hashes: np.ndarray
    sizes: np.ndarray
    start: int

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())
