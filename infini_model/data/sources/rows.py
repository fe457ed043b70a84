"""Rows of files as Arrow arrays: JSON, comma- and tab-separated values, and Parquet.

A row is a text, or a conversation in pieces; which of the columns it is read from, `Reading` says.
What cannot be read raises `DataError` that names the file and the row.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import pyarrow as pa

from infini_model.data.sources.conversations import PIECES, Conversations
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.json_values import (
    checked_object,
    object_in,
    parse_by_arrow,
    values_in,
)
from infini_model.data.sources.text import (
    MARK,
    MAX_OFFSET,
    Errors,
    as_text,
    chunks,
    decompressed,
    read_blocks,
    text_of,
)
from infini_model.runtime.errors import DataError

BATCH_DOCUMENTS = 1 << 16
DICTIONARY_ROWS = 1 << 12
# Otherwise Arrow loads the whole column of a row group at once.
PARQUET_BUFFER_BYTES = 1 << 20
HOLDS_TEXT = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null),
)
# A field of a table may be a whole document; by default Python refuses more than 128 KiB.
csv.field_size_limit(MAX_OFFSET)


@dataclass(frozen=True)
class Reading:
    """How files become documents: the settings that decide what the documents are.

    `column` is the column of the text; `errors` says what to do with a document that is not UTF-8;
    documents of fewer than `min_characters` code points are skipped. `separator` separates the
    documents of a text file; None makes the file one document. With `conversations`, documents are
    these, and `min_characters` counts what is learned of one.
    """

    column: str = "text"
    errors: Errors = "fail"
    min_characters: int = 0
    separator: str | None = None
    conversations: Conversations | None = None

    @property
    def type(self) -> pa.DataType:
        """The type of a row."""
        return pa.string() if self.conversations is None else PIECES

    @property
    def decides(self) -> dict[str, object]:
        """The settings that are part of a key; what reads texts has none of conversations."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "conversations" or value is not None
        }


def read_json_lines(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    """The rows of the lines that begin in a range, each an object; blank lines are none."""
    address = part.file.address
    for start, data in read_blocks(file, part, b"\n", batch_bytes):
        if reading.conversations is None:
            texts = parse_by_arrow(data, reading.column)
            if texts is not None:
                yield texts
                continue
        rows = []
        for line in data.split(b"\n"):
            own = line.removeprefix(MARK)
            if own and not own.isspace():
                try:
                    row = object_in(own, reading.errors)
                    rows.append(None if row is None else _row_of(row, reading))
                except DataError as error:
                    before = chunks(decompressed(file, part.codec), start, batch_bytes)
                    number = 1 + sum(chunk.count(b"\n") for chunk in before)
                    raise DataError(f"{address}, line {number}: {error}") from error
            start += len(line) + 1
        yield pa.array(rows, reading.type)


def read_json(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    """The rows of a file that holds an array of objects, or one after the other.

    A file whose first line is an object has lines, which are read faster.
    """
    data = chunks(decompressed(file, part.codec), math.inf, batch_bytes)
    head = next(data, b"")
    line = head.removeprefix(MARK).lstrip().partition(b"\n")[0]
    if line.startswith(b"{"):
        try:
            object_in(line, "replace")
        except DataError:
            pass  # the object has several lines, or is the first of an error that is named below
        else:
            yield from read_json_lines(file, part, reading, batch_bytes)
            return
    rows = map(checked_object, values_in(chain([head], data)))
    yield from _of_objects(rows, part.file.address, reading, batch_bytes)


def read_csv(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int, *, delimiter: str
) -> Iterator[pa.Array]:
    """The rows of a table whose first line names the columns (RFC 4180)."""
    content = decompressed(file, part.codec)
    lines = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)

    def objects() -> Iterator[dict[str, str | None]]:
        try:
            names = next(rows, [])
            for name in filter(None, names):
                if names.count(name) > 1:
                    raise DataError(f"has {names.count(name)} columns {name!r}")
            for row in filter(None, rows):
                if len(row) > len(names):
                    raise DataError(f"has {len(row)} fields, {len(names)} columns are named")
                yield dict(zip_longest(names, row))
        except csv.Error as error:
            raise DataError(f"at line {rows.line_num}: {error}") from error

    yield from _of_objects(objects(), part.file.address, reading, batch_bytes)


def _of_objects(
    objects: Iterator[dict[str, Any]],
    address: str,
    reading: Reading,
    batch_bytes: int,
    number: int = 0,
) -> Iterator[pa.Array]:
    """The rows of objects in arrays of about `batch_bytes`; errors tell the number of an object.

    `number` objects of the file come before these.
    """
    rows: list[str | list[str] | None] = []
    size = 0
    while True:
        try:
            number += 1
            if (found := next(objects, None)) is None:
                break
            rows.append(_row_of(found, reading))
        except DataError as error:
            raise DataError(f"{address}, row {number}: {error}") from error
        row = rows[-1]
        size += len(row) if isinstance(row, str) else sum(map(len, row or ()))
        if size >= batch_bytes:
            yield pa.array(rows, reading.type)
            rows, size = [], 0
    yield pa.array(rows, reading.type)


def _row_of(row: Mapping[str, Any], reading: Reading) -> str | list[str] | None:
    """The text of a row or the pieces of its conversation, None if it is skipped.

    Raises `DataError` that tells what is wrong with the row, but not which row it is.
    """
    if reading.conversations is not None:
        pieces = reading.conversations.pieces(row, reading.errors)
        learned = sum(map(len, pieces[1::2])) if pieces else 0
        return pieces if learned >= max(1, reading.min_characters) else None
    column = reading.column
    if column not in row:
        raise _missing_column(column, row)
    return text_of(row[column], f"column {column!r}", reading.errors)


def _missing_column(column: str, present: Iterable[str], where: str = "") -> DataError:
    return DataError(f"{where}has no column {column!r}; it has: {', '.join(present) or 'none'}")


def text_columns(address: str, schema: pa.Schema, reading: Reading) -> list[str]:
    """The columns to read; raises `DataError` that names the file if one is missing or no text."""
    names, column, chats = schema.names, reading.column, reading.conversations
    columns = [column] if chats is None else chats.columns_in(names, f"{address}: ")
    for each in columns:
        if names.count(each) > 1:
            raise DataError(
                f"{address}: has {names.count(each)} columns {each!r}; rename all but one"
            )
    if chats is not None:
        return columns
    if column not in names:
        raise _missing_column(column, names, f"{address}: ")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(test(value) for test in HOLDS_TEXT):
        raise DataError(f"{address}: column {column!r} is {kind}, not text")
    return [column]


def read_parquet(
    source: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    """The rows of a range of row groups."""
    import pyarrow.parquet as pq

    address = part.file.address
    with pq.ParquetFile(source, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES) as file:
        columns = text_columns(address, file.schema_arrow, reading)
        groups = range(file.num_row_groups)[part.start : part.stop]
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        end = math.inf if part.rows is None else row + part.rows
        for group in groups:
            rows = _batch_rows(file.metadata, group, reading, batch_bytes)
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            ):
                yield from _rows(batch.slice(0, min(end - row, len(batch))), reading, address, row)
                row += batch.num_rows
                if row >= end:
                    return


def text_bytes(metadata: Any, group: int, reading: Reading) -> int:
    """The bytes of the texts of a row group of Parquet; of conversations, those of all columns."""
    if reading.conversations is not None:
        return int(metadata.row_group(group).total_byte_size)
    return int(_text_chunk(metadata, group, reading.column).total_uncompressed_size)


def _text_chunk(metadata: Any, group: int, column: str) -> Any:
    # Not by the names of the chunks: to ask an encrypted one for anything ends the process.
    paths = [metadata.schema.column(each).path for each in range(metadata.num_columns)]
    return metadata.row_group(group).column(paths.index(column))


def _batch_rows(metadata: Any, group: int, reading: Reading, batch_bytes: int) -> int:
    """How many rows of a row group have about `batch_bytes` of text."""
    count = metadata.row_group(group).num_rows
    rows: int = batch_bytes * count // max(1, text_bytes(metadata, group, reading))
    most = BATCH_DOCUMENTS
    # A dictionary has each text once, so that the rows may have far more.
    if (
        reading.conversations is not None
        or _text_chunk(metadata, group, reading.column).has_dictionary_page
    ):
        most = DICTIONARY_ROWS
    return max(1, min(most, rows))


def _rows(
    batch: pa.RecordBatch, reading: Reading, address: str, first_row: int
) -> Iterator[pa.Array]:
    """The rows of a table as valid UTF-8, in arrays that 31-bit offsets can address."""
    if reading.conversations is not None:
        batch.validate(full=True)
        yield from _of_objects(iter(batch.to_pylist()), address, reading, MAX_OFFSET, first_row)
        return
    array = batch.column(reading.column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are read as bytes.
    array = array.cast(pa.large_binary())
    if len(array) > 1 and array.nbytes > MAX_OFFSET:
        half = len(array) // 2
        yield from _rows(batch.slice(0, half), reading, address, first_row)
        yield from _rows(batch.slice(half), reading, address, first_row + half)
        return
    if (texts := as_text(array.cast(pa.binary()))) is not None:
        yield texts
        return
    array.validate(full=True)
    rows = ({reading.column: text} for text in array.to_pylist())
    yield from _of_objects(rows, address, reading, MAX_OFFSET, first_row)
