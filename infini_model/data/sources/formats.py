"""Readers of the file formats: text, JSON lines, Parquet and Arrow.

Each yields the rows of one file as Arrow strings, null where a row has no text or is skipped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.data.sources.utf8 import (
    Errors,
    clean_file,
    decode,
    decode_rows,
    join_surrogates,
)
from infini_model.runtime.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_DOCUMENTS = 1 << 16
TEXT = (".txt", ".md", ".rst", ".py")
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")


@dataclass(frozen=True)
class Reading:
    """How files become documents: the settings that decide what the documents are.

    `column` is the column of the text; `errors` says what to do with a document that is not UTF-8;
    documents of fewer than `min_characters` code points are skipped. `separator` separates the
    documents of a text file; None makes the file one document.
    """

    column: str = "text"
    errors: Errors = "fail"
    min_characters: int = 0
    separator: str | None = None


def suffix(path: Path) -> str:
    """The extension that decides the format, such as `.jsonl.gz`; empty if it is not supported."""
    name = path.name.lower()
    return next((known for known in (*TEXT, *ROWS) if name.endswith(known)), "")


def check_format(path: Path, address: str | None = None) -> None:
    """Raise `DataError` if the extension of `path` is not supported; `address` names it better."""
    if not suffix(path):
        raise DataError(f"{address or path}: unknown file format; takes {' '.join((*TEXT, *ROWS))}")


def read_file(
    path: Path, reading: Reading, groups: range | None = None, batch_bytes: int = BATCH_BYTES
) -> Iterator[pa.StringArray]:
    """The rows of a file in arrays of about `batch_bytes`; of a Parquet file the row `groups`.

    Raises `DataError` that names the file and the row, `pa.ArrowException` and `OSError` where
    the file is damaged or missing.
    """
    kind = suffix(path)
    if kind in TEXT:
        return _read_text(path, reading)
    if kind == ".parquet":
        return _read_parquet(path, reading, groups, batch_bytes)
    if kind == ".arrow":
        return _read_arrow(path, reading)
    return _read_json_lines(path, reading, batch_bytes)


def _read_text(path: Path, reading: Reading) -> Iterator[pa.StringArray]:
    data = path.read_bytes()
    if len(data) > MAX_OFFSET:
        raise DataError(f"{path}: has {len(data)} bytes; a document has at most {MAX_OFFSET}")
    rows: list[bytes | None] = [clean_file(data, path, reading.errors)]
    if reading.separator is not None and rows[0] is not None:
        rows = [*rows[0].split(reading.separator.encode())]
    yield pa.array(rows, pa.binary()).view(pa.string())


def _open_lines(path: Path) -> BinaryIO:
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), codec), 1 << 20)


def _read_json_lines(path: Path, reading: Reading, batch_bytes: int) -> Iterator[pa.StringArray]:
    texts: list[str | None] = []
    size = 0
    with _open_lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            texts.append(_parse_line(line, f"{path}, line {number}", reading))
            size += len(line)
            if size >= batch_bytes or len(texts) >= BATCH_DOCUMENTS:
                yield pa.array(texts, pa.string())
                texts, size = [], 0
    yield pa.array(texts, pa.string())


def _parse_line(line: bytes, where: str, reading: Reading) -> str | None:
    decoded = decode(line, where, reading.errors)
    if decoded is None:
        return None
    try:
        row = json.loads(decoded)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "it is nested too deeply")
        raise DataError(f"{where}: is not JSON: {reason}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds {type(row).__name__}, needs an object")
    if reading.column not in row:
        raise _missing_column(where, reading.column, row)
    text = row[reading.column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(f"{where}: column {reading.column!r} is {type(text).__name__}, not text")
    return join_surrogates(text, where, reading.errors)


def _missing_column(where: str, column: str, present: Iterable[str]) -> DataError:
    return DataError(f"{where}: has no column {column!r}; it has: {', '.join(present) or 'none'}")


def _read_parquet(
    path: Path, reading: Reading, groups: range | None, batch_bytes: int
) -> Iterator[pa.StringArray]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        column = _column_type(path, file.schema_arrow, reading.column)
        groups = groups or range(file.num_row_groups)
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        for group in groups:
            metadata = file.metadata.row_group(group)
            bytes_per_row = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
            rows = min(BATCH_DOCUMENTS, max(1, batch_bytes // bytes_per_row))
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=[reading.column], use_threads=False
            ):
                yield from _strings(batch.column(0), column, path, row, reading.errors)
                row += batch.num_rows


def _read_arrow(path: Path, reading: Reading) -> Iterator[pa.StringArray]:
    with pa.memory_map(str(path)) as source:
        column = None
        row = 0
        for batch in _arrow_batches(source):
            column = column or _column_type(path, batch.schema, reading.column)
            for start in range(0, batch.num_rows, BATCH_DOCUMENTS):
                part = batch.column(reading.column).slice(start, BATCH_DOCUMENTS)
                yield from _strings(part, column, path, row, reading.errors)
                row += len(part)


def _arrow_batches(source: Any) -> Iterator[pa.RecordBatch]:
    """The record batches of an IPC file or, as `datasets` writes them, of an IPC stream."""
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
        return
    stream = pa.ipc.open_stream(source)
    if not stream.schema.names:
        return
    empty = pa.RecordBatch.from_pylist([], schema=stream.schema)
    yield empty
    yield from stream


def _column_type(path: Path, schema: pa.Schema, column: str) -> pa.DataType:
    if column not in schema.names:
        raise _missing_column(str(path), column, schema.names)
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    raw = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
    if not any(test(value) for test in (*text, *raw)):
        raise DataError(f"{path}: column {column!r} is {kind}, not text")
    return value


def _strings(
    array: pa.Array, kind: pa.DataType, path: Path, first_row: int, errors: Errors
) -> Iterator[pa.StringArray]:
    """The rows of a column as valid UTF-8, in arrays that 31-bit offsets can address."""
    if array.type != kind:
        array = array.cast(kind)
    if len(array) > 1 and array.nbytes > MAX_OFFSET:
        half = len(array) // 2
        yield from _strings(array.slice(0, half), kind, path, first_row, errors)
        yield from _strings(array.slice(half), kind, path, first_row + half, errors)
        return
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are validated as bytes.
    yield decode_rows(array.cast(pa.binary()), path, first_row, errors)
