"""The documents of a corpus, sorted into one temporary file a bucket, in one pass.

A spill file is a row of Arrow streams, one for each time its bucket was flushed, so that thousands
of buckets need neither thousands of open files nor memory beyond the buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model.data.corpus import buckets_of, hash_documents
from infini_model.data.documents import Reading, read_documents

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
    on_bytes: Callable[[int], None],
) -> None:
    """Write the documents of the `wanted` buckets into `folder`; memory stays flat.

    `on_bytes` is told the bytes of text as they are read. Raises `DataError` as `read_documents`
    does, `OSError` as the disk does.
    """
    of_interest = np.zeros(bucket_count, bool)
    of_interest[list(wanted)] = True
    buffer: dict[int, list[pa.RecordBatch]] = defaultdict(list)
    buffered = 0
    for batch in read_documents(paths, reading):
        hashes = hash_documents(batch.texts)
        buckets = buckets_of(hashes, bucket_count)
        order = np.argsort(buckets, kind="stable")
        order = order[of_interest[buckets[order]]]
        chosen = pa.RecordBatch.from_arrays(
            [hashes[order, 0], hashes[order, 1], batch.texts.take(pa.array(order))], schema=SCHEMA
        )
        present, firsts, counts = np.unique(buckets[order], return_index=True, return_counts=True)
        for bucket, first, count in zip(present, firsts, counts, strict=True):
            buffer[int(bucket)].append(chosen.slice(first, count))
        buffered += chosen.nbytes
        on_bytes(chosen.column(2).nbytes)
        if buffered >= BUFFER_BYTES:
            _flush(buffer, folder)
            buffered = 0
    _flush(buffer, folder)


def _flush(buffer: dict[int, list[pa.RecordBatch]], folder: Path) -> None:
    for bucket, batches in buffer.items():
        with spill_path(folder, bucket).open("ab") as file, pa.ipc.new_stream(file, SCHEMA) as out:
            for batch in batches:
                out.write_batch(batch)
    buffer.clear()


@dataclass(frozen=True)
class Spilled:
    """The documents of one bucket: `hashes` uint64 [n, 2] and `texts`, in the same order."""

    hashes: np.ndarray
    texts: pa.LargeStringArray


def read_spill(path: Path) -> Spilled:
    """Read a spill file back, whole."""
    tables = []
    with pa.memory_map(str(path)) as source:
        while source.tell() < source.size():
            tables.append(pa.ipc.open_stream(source).read_all())
    table = pa.concat_tables(tables)
    high, low = (table.column(name).to_numpy() for name in ("high", "low"))
    # 31-bit offsets could not address a large bucket in one array.
    texts = table.column("text").cast(pa.large_string()).combine_chunks()
    return Spilled(np.stack([high, low], axis=1), texts)
