"""Documents from files of any supported format, as Arrow strings in batches.

Every format becomes one stream of `pyarrow` string arrays of bounded size, without nulls or empty
documents, so that no later code depends on where a document came from. What cannot be read raises
`DataError` that names the file and the row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.formats import (
    BATCH_BYTES,
    BATCH_DOCUMENTS,
    Reading,
    read_file,
    suffix,
)
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.runtime.errors import DataError

# Called with the bytes done so far and the total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of one or several files: no nulls, none empty, `texts` valid UTF-8.

    `skipped` counts the documents that were left out since the batch before.
    """

    texts: pa.StringArray
    skipped: int


@dataclass(frozen=True)
class Part:
    """What one thread reads at a time: several small files, or row groups of a Parquet file.

    `bytes` is their share of the files; `groups` are the row groups of the only path, None for all.
    """

    paths: tuple[Path, ...]
    bytes: int
    groups: range | None = None


def parts_of(paths: Iterable[Path], batch_bytes: int = BATCH_BYTES) -> Iterator[Part]:
    """The files in parts of about `batch_bytes` where possible. Raises as `read_part` does."""
    small: list[Path] = []
    pending = 0
    for path in paths:
        with _file_errors(path):
            size = path.stat().st_size
            is_parquet = suffix(path) == ".parquet"
            pieces = list(_row_groups(path, size, batch_bytes)) if is_parquet else []
        if small and (pieces or pending + size > batch_bytes):
            yield Part(tuple(small), pending)
            small, pending = [], 0
        if pieces:
            yield from pieces
        else:
            small.append(path)
            pending += size
    if small:
        yield Part(tuple(small), pending)


def _row_groups(path: Path, size: int, batch_bytes: int) -> Iterator[Part]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    count, first, pending = metadata.num_row_groups, 0, 0
    for group in range(count):
        pending += metadata.row_group(group).total_byte_size
        if pending >= batch_bytes or group == count - 1:
            share = size * (group + 1) // count - size * first // count
            yield Part((path,), share, range(first, group + 1))
            first, pending = group + 1, 0


def read_documents(
    paths: Iterable[Path], reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[DocumentBatch]:
    """The documents of `paths`, in order, as `read_part` yields them."""
    for part in parts_of(paths, batch_bytes):
        yield from read_part(part, reading, batch_bytes)


def read_part(
    part: Part, reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[DocumentBatch]:
    """The documents of a part, in order, in batches of about `batch_bytes`.

    Small files share a batch. Raises `DataError` in one line that names the file (and the row).
    """
    pending: list[pa.StringArray] = []
    size = rows = skipped = 0
    for path in part.paths:
        with _file_errors(path):
            for raw in read_file(path, reading, part.groups, batch_bytes):
                texts = _drop_short(raw, reading.min_characters)
                skipped += len(raw) - len(texts)
                if len(texts):
                    pending.append(texts)
                size += texts.nbytes
                rows += len(raw)
                if size >= batch_bytes or rows >= BATCH_DOCUMENTS:
                    yield from _batches(pending, skipped)
                    pending, size, rows, skipped = [], 0, 0, 0
    yield from _batches(pending, skipped)


def _batches(pending: list[pa.StringArray], skipped: int) -> Iterator[DocumentBatch]:
    """Concatenate the arrays, or yield them one by one if a single array could not hold them."""
    if len(pending) > 1 and sum(array.nbytes for array in pending) < MAX_OFFSET:
        pending = [pa.concat_arrays(pending)]
    for array in pending or [pa.array([], pa.string())]:
        yield DocumentBatch(array, skipped)
        skipped = 0


def _drop_short(texts: pa.StringArray, min_characters: int) -> pa.StringArray:
    shortest = max(1, min_characters)
    # Bytes are cheaper to count than code points, and tell an empty document as well.
    length = pc.utf8_length(texts) if shortest > 1 else pc.binary_length(texts)
    keep = pc.fill_null(pc.greater_equal(length, shortest), False)
    return texts if pc.all(keep).as_py() else texts.filter(keep)


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn errors of Arrow and of the operating system into one line that names the file."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read: {_first_line(error)}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist") from error
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
