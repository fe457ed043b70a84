"""Documents from files of any supported format, as Arrow strings in batches.

A document is a text, or a conversation in pieces. Every format becomes one stream of `pyarrow`
string arrays of bounded size, without nulls or empty documents, so that no later code depends on
where a document came from. What cannot be read raises `DataError` that names the file and the row.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.conversations import PIECES, Conversations
from infini_model.data.sources.files import FileRange, file_errors, open_source, read_source
from infini_model.data.sources.text import (
    MARK,
    MAX_OFFSET,
    WIDE,
    Block,
    Errors,
    as_bytes,
    as_text,
    as_utf8,
    chunks,
    decompressed,
    documents_in,
    object_in,
    parse_by_arrow,
    read_blocks,
    text_of,
)
from infini_model.runtime.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_DOCUMENTS = 1 << 16
DICTIONARY_ROWS = 1 << 12
# Otherwise Arrow loads the whole column of a row group at once.
PARQUET_BUFFER_BYTES = 1 << 20
TEXT = (".txt", ".md", ".rst", ".py")
HOLDS_TEXT = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null),
)
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")


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


class DocumentBatch(NamedTuple):
    """Documents of one or several files: no nulls, none empty, `texts` valid UTF-8.

    Document i is the texts from `edges[i]` to `edges[i + 1]`, of int64 [documents + 1]: one, or the
    pieces of a conversation, some of which may be empty. `skipped` counts the documents that were
    left out since the batch before.
    """

    texts: pa.StringArray
    edges: np.ndarray
    skipped: int


@functools.lru_cache(1 << 16)  # asked several times for each file, and for each range of one
def format_of(address: str) -> str:
    """How a file is read: `text`, or the extension of its format such as `jsonl.gz`.

    Empty if it is not supported.
    """
    name = address.lower()
    if name.endswith(TEXT):
        return "text"
    return next((known.removeprefix(".") for known in ROWS if name.endswith(known)), "")


def content_of(part: FileRange) -> str:
    """The identity of the documents of a range, besides the settings: neither name nor place."""
    # Marks and line ends of texts were once read otherwise.
    suffix = " marks" if format_of(part.file.address) == "text" else ""
    return f"{bytes_of(part)}{suffix}"


def bytes_of(part: FileRange) -> str:
    """The identity of the bytes of a range and of their format, however they are read."""
    # In place of the last word stood a limit of rows; with it, partitions keep order and keys.
    return f"{part.file.fingerprint} {format_of(part.file.address)} {part.start} {part.stop} None"


def check_format(name: str, address: str | None = None) -> None:
    """Raise `DataError` if the extension of `name` is not supported; `address` tells more."""
    if not format_of(name):
        known = " ".join((*TEXT, *ROWS))
        raise DataError(f"{address or name}: unknown file format; takes {known}")


def check_rows(part: FileRange, reading: Reading) -> None:
    """Raise `DataError` if conversations are asked for of a file without rows."""
    if reading.conversations is not None and format_of(part.file.address) == "text":
        raise DataError(
            f"{part.file.address}: is a text; data.source.pairs takes files of rows: "
            f"{' '.join(ROWS)}"
        )


def read_documents(
    ranges: Iterable[FileRange],
    reading: Reading,
    batch_bytes: int = BATCH_BYTES,
    whole: bool = True,
) -> Iterator[DocumentBatch]:
    """The documents of ranges of files, in order, in batches of about `batch_bytes`.

    Small files share a batch. A batch may be empty, so that `skipped` adds up.
    Whoever stops before the end says that the files are not needed `whole`, as in `open_source`.

    Raises `DataError` in one line that names the file and, in a file of several documents, the
    row, the line or the byte.
    """
    pending: list[pa.Array] = []
    size = rows = 0
    for part in ranges:
        with file_errors(part.file.address):
            for texts in read_range(part, reading, batch_bytes, whole):
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
    for array in pending:
        if pa.types.is_list(array.type):
            kept = array.drop_null()
            offsets = kept.offsets.to_numpy().astype(np.int64)
            yield DocumentBatch(kept.flatten(), offsets - offsets[0], len(array) - len(kept))
            continue
        # Bytes are cheaper to count than code points, and tell an empty document as well.
        length = pc.utf8_length(array) if min_characters > 1 else pc.binary_length(array)
        keep = pc.fill_null(pc.greater_equal(length, max(1, min_characters)), False)
        kept = array if pc.all(keep).as_py() else array.filter(keep)
        yield DocumentBatch(kept, np.arange(len(kept) + 1), len(array) - len(kept))


def read_range(
    part: FileRange, reading: Reading, batch_bytes: int = BATCH_BYTES, whole: bool = True
) -> Iterator[pa.Array]:
    """The rows of a range, in arrays of about `batch_bytes` and at most `BATCH_DOCUMENTS` rows.

    They are strings or, with `reading.conversations`, lists of strings. A row is null if it has no
    text or is skipped. Only a single row need fit into memory.

    Raises `DataError` that names the file and the row, `pa.ArrowException` and `OSError` where
    the file is damaged or missing.
    """
    address, separator, errors = part.file.address, reading.separator, reading.errors
    kind = format_of(address)
    if kind == "text" and separator is None:
        size = part.file.bytes
        if size > MAX_OFFSET:
            raise DataError(f"{address}: has {size} bytes; a document has at most {MAX_OFFSET}")
        yield documents_in(Block(0, as_utf8(read_source(part.file))), None, errors, address)
        return
    found: Iterator[pa.Array]
    with open_source(part.file, whole) as file:
        if kind in ("text", "jsonl") and (head := file.read(2)).startswith(WIDE):
            # Whole, by whoever reads the first range.
            if part.start:
                return
            file = pa.BufferReader(as_utf8(head + file.read()))
            part = part.model_copy(update={"stop": None})
        if kind == "text" and separator:
            blocks = read_blocks(file, part, separator.encode(), batch_bytes)
            found = (documents_in(block, separator, errors, address) for block in blocks)
        elif kind == "parquet":
            found = _read_parquet(file, part, reading, batch_bytes)
        elif kind == "arrow":
            found = _read_arrow(file, part, reading, batch_bytes)
        else:
            found = _read_json_lines(file, part, reading, batch_bytes)
        for rows in found:
            for start in range(0, len(rows), BATCH_DOCUMENTS):
                yield rows[start : start + BATCH_DOCUMENTS]


def _read_json_lines(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    """The rows of the lines that begin in a range, each an object; blank lines are none.

    What counts is Python's parser, line by line, which also names errors. Arrow's reads a block
    several times faster and without Python's lock, so it goes first.
    """
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
                    before = chunks(decompressed(file, address), start, batch_bytes)
                    number = 1 + sum(chunk.count(b"\n") for chunk in before)
                    raise DataError(f"{address}, line {number}: {error}") from error
            start += len(line) + 1
        yield pa.array(rows, reading.type)


def _row_of(row: Mapping[str, Any], reading: Reading) -> str | list[str] | None:
    """The text of a row or the pieces of its conversation, None if it is skipped.

    Raises `DataError` that tells what is wrong with the row, but not which row it is.
    """
    if reading.conversations is not None:
        pieces = reading.conversations.pieces(row, reading.errors)
        learned = sum(map(len, pieces[1::2])) if pieces else 0
        return pieces if learned >= max(1, reading.min_characters) else None
    if reading.column not in row:
        raise _missing_column(reading.column, row)
    return text_of(row[reading.column], f"column {reading.column!r}", reading.errors)


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


def _read_parquet(
    source: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    import pyarrow.parquet as pq

    address = part.file.address
    with pq.ParquetFile(source, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES) as file:
        columns = text_columns(address, file.schema_arrow, reading)
        groups = range(file.num_row_groups)[part.start : part.stop]
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        for group in groups:
            rows = _batch_rows(file.metadata, group, reading, batch_bytes)
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            ):
                yield from _rows(batch, reading, address, row)
                row += batch.num_rows


def text_bytes(metadata: Any, group: int, reading: Reading) -> int:
    """The bytes of the texts of a row group of Parquet; of conversations, those of all columns."""
    if reading.conversations is not None:
        return int(metadata.row_group(group).total_byte_size)
    return int(_text_chunk(metadata, group, reading.column).total_uncompressed_size)


def _text_chunk(metadata: Any, group: int, column: str) -> Any:
    # Not by the names of the chunks: to ask an encrypted one for anything ends the process.
    columns = range(metadata.num_columns)
    index = next(each for each in columns if metadata.schema.column(each).path == column)
    return metadata.row_group(group).column(index)


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


def _read_arrow(
    source: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    address = part.file.address
    if isinstance(source, pa.OSFile) and part.file.bytes:
        mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(mapped))
    # An IPC file or, as `datasets` writes them, an IPC stream.
    is_file = source.read(6) == b"ARROW1"
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    source.seek(0)
    schema = opened(source).schema
    if not schema.names:
        return  # so `datasets` writes no rows at all
    columns = text_columns(address, schema, reading)
    fields = [schema.names.index(column) for column in columns]
    source.seek(0)
    reader = opened(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
    row = 0
    for batch in batches:
        count = batch.num_rows
        rows = max(1, min(BATCH_DOCUMENTS, batch_bytes * count // max(1, batch.nbytes)))
        for start in range(0, count, rows):
            yield from _rows(batch.slice(start, rows), reading, address, row + start)
        row += count


def _rows(
    batch: pa.RecordBatch, reading: Reading, address: str, first_row: int
) -> Iterator[pa.Array]:
    """The rows of a table as valid UTF-8, in arrays that 31-bit offsets can address."""
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are read as bytes.
    columns = {name: as_bytes(batch.column(name)) for name in batch.schema.names}
    if reading.conversations is None:
        (array,) = columns.values()
        if len(array) > 1 and array.nbytes > MAX_OFFSET:
            half = len(array) // 2
            yield from _rows(batch.slice(0, half), reading, address, first_row)
            yield from _rows(batch.slice(half), reading, address, first_row + half)
            return
        texts = as_text(array.cast(pa.binary()))
        if texts is not None:
            yield texts
            return
        array.validate(full=True)
    rows = []
    for number, row in enumerate(pa.RecordBatch.from_pydict(columns).to_pylist(), first_row + 1):
        try:
            rows.append(_row_of(row, reading))
        except DataError as error:
            raise DataError(f"{address}, row {number}: {error}") from error
    yield pa.array(rows, reading.type)
