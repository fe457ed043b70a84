"""The documents of a corpus, sorted into one temporary file a bucket, in one pass.

A spill file is a row of Arrow streams, one for each time its bucket was flushed, so that thousands
of buckets need neither thousands of open files nor memory beyond the buffer.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model.data.corpus import buckets_of, hash_documents
from infini_model.data.documents import Part, Reading, parts_of, read_part
from infini_model.data.threads import Tell, for_each

BUFFER_BYTES = 64 << 20
SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64()), ("text", pa.string())])


def spill_path(folder: Path, bucket: int) -> Path:
    """Where the documents of a bucket are spilled to."""
    return folder / f"{bucket:05d}.arrows"


def spill_documents(
    paths: Iterable[Path],
    reading: Reading,
    folder: Path,
    bucket_count: int,
    wanted: Collection[int],
    threads: int,
    tell: Tell,
) -> None:
    """Write the documents of the `wanted` buckets into `folder`; memory stays flat.

    `tell` is told the bytes of text as they are read. Raises `DataError` as `read_part` does,
    `OSError` as the disk does.
    """
    buckets = _Buckets(folder, bucket_count, wanted)

    def read(part: Part, tell: Tell) -> None:
        for batch in read_part(part, reading):
            tell(buckets.add(batch.texts))

    for_each(parts_of(paths), [read] * threads, tell)
    buckets.flush()


class _Buckets:
    """Takes documents from several threads and writes those of a bucket one after another."""

    def __init__(self, folder: Path, count: int, wanted: Collection[int]) -> None:
        self._folder = folder
        self._wanted = np.zeros(count, bool)
        self._wanted[list(wanted)] = True
        self._buffer: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        self._buffered = 0
        self._filling, self._writing = threading.Lock(), threading.Lock()

    def add(self, texts: pa.StringArray) -> int:
        """Keep the documents of wanted buckets; returns their bytes."""
        hashes = hash_documents(texts)
        buckets = buckets_of(hashes, len(self._wanted))
        order = np.argsort(buckets, kind="stable")
        order = order[self._wanted[buckets[order]]]
        chosen = pa.RecordBatch.from_arrays(
            [hashes[order, 0], hashes[order, 1], texts.take(pa.array(order))], schema=SCHEMA
        )
        present, firsts, counts = np.unique(buckets[order], return_index=True, return_counts=True)
        with self._filling:
            for bucket, first, count in zip(present, firsts, counts, strict=True):
                self._buffer[int(bucket)].append(chosen.slice(first, count))
            self._buffered += chosen.nbytes
            is_full = self._buffered >= BUFFER_BYTES
        if is_full:
            self.flush()
        return int(chosen.column(2).nbytes)

    def flush(self) -> None:
        """Write the buffer, while others fill a new one."""
        with self._writing:
            with self._filling:
                buffer, self._buffer, self._buffered = self._buffer, defaultdict(list), 0
            for bucket, batches in buffer.items():
                with (
                    pa.OSFile(str(spill_path(self._folder, bucket)), "ab") as file,
                    pa.ipc.new_stream(file, SCHEMA) as out,
                ):
                    for batch in batches:
                        out.write_batch(batch)


@dataclass(frozen=True)
class Spilled:
    """The documents of one bucket: `hashes` uint64 [n, 2] and `texts`, in the same order."""

    hashes: np.ndarray
    texts: pa.ChunkedArray


def read_spill(path: Path) -> Spilled:
    """Map a spill file; its texts are read when they are used."""
    tables = []
    with pa.memory_map(str(path)) as source:
        while source.tell() < source.size():
            tables.append(pa.ipc.open_stream(source).read_all())
    table = pa.concat_tables(tables)
    high, low = (table.column(name).to_numpy() for name in ("high", "low"))
    return Spilled(np.stack([high, low], axis=1), table.column("text"))
