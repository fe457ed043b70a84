"""Documents from files of any supported format, as Arrow strings in batches.

A document is a text, or a prompt and its answer. Every format becomes one stream of `pyarrow`
string arrays of bounded size, without nulls or empty documents, so that no later code depends on
where a document came from. What cannot be read raises `DataError` that names the file and the row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import (
    BATCH_BYTES,
    BATCH_DOCUMENTS,
    Reading,
    read_range,
)
from infini_model.data.sources.pairs.arrays import alternate, answers
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.runtime.errors import DataError

# Called with the bytes done so far and the total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of one or several files: no nulls, none empty, `texts` valid UTF-8.

    Prompts and answers alternate, and a prompt may be empty. `skipped` counts the documents that
    were left out since the batch before.
    """

    texts: pa.StringArray
    skipped: int


def read_documents(
    ranges: Iterable[FileRange], reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[DocumentBatch]:
    """The documents of ranges of files, in order, in batches of about `batch_bytes`.

    Small files share a batch. The last batch comes even if it is empty, so that `skipped` adds up.

    Raises `DataError` in one line that names the file and, in a file of several documents, the
    row, the line or the byte.
    """
    pending: list[pa.Array] = []
    size = rows = 0
    for part in ranges:
        with file_errors(part.file.address):
            for texts in read_range(part, reading, batch_bytes):
                pending.append(texts)
                size += texts.nbytes
                rows += len(texts)
                # Half, since an array has somewhat less than it was asked for, and is then copied.
                if 2 * size >= batch_bytes or 2 * rows >= BATCH_DOCUMENTS:
                    yield from _batches(pending, reading.min_characters)
                    pending, size, rows = [], 0, 0
    yield from _batches(pending, reading.min_characters)


def _batches(pending: list[pa.Array], min_characters: int) -> Iterator[DocumentBatch]:
    """Concatenate the arrays, or yield them one by one if a single array could not hold them."""
    if len(pending) > 1 and sum(array.nbytes for array in pending) < MAX_OFFSET:
        pending = [pa.concat_arrays(pending)]
    for array in pending or [pa.array([], pa.string())]:
        kept = _drop_short(array, min_characters)
        texts = alternate(kept) if pa.types.is_struct(kept.type) else kept
        yield DocumentBatch(texts, len(array) - len(kept))


def _drop_short(documents: pa.Array, min_characters: int) -> pa.Array:
    texts = answers(documents) if pa.types.is_struct(documents.type) else documents
    shortest = max(1, min_characters)
    # Bytes are cheaper to count than code points, and tell an empty document as well.
    length = pc.utf8_length(texts) if shortest > 1 else pc.binary_length(texts)
    keep = pc.fill_null(pc.greater_equal(length, shortest), False)
    return documents if pc.all(keep).as_py() else documents.filter(keep)


@contextlib.contextmanager
def file_errors(address: str) -> Iterator[None]:
    """Turn errors of Arrow and of the operating system into one line that names the file."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{address}: cannot be read: {_first_line(error)}") from error
    except FileNotFoundError as error:
        raise DataError(f"{address}: does not exist") from error
    except ConnectionError:
        raise  # worth a retry, and it names the address
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise DataError(f"{address}: cannot be read: {reason}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
