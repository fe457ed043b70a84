"""Documents from files of any supported format, as Arrow strings in batches.

A document is a text, or a prompt and its answer. Every format becomes one stream of `pyarrow`
string arrays of bounded size, without nulls or empty documents, so that no later code depends on
where a document came from. What cannot be read raises `DataError` that names the file and the row.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.files import FileRange, file_errors, open_source, read_source
from infini_model.data.sources.json_lines import missing_column, parse_lines, read_json_lines
from infini_model.data.sources.pairs import (
    alternate,
    answers,
    pair_columns,
    pairs_of_rows,
    parse_pairs,
)
from infini_model.data.sources.text import (
    MAX_OFFSET,
    Block,
    Errors,
    check_whole,
    clean,
    decode_rows,
    one_row,
    read_text,
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
    documents of a text file; None makes the file one document. With a `template`, in which a
    message of a conversation becomes text, documents are prompts and answers.
    """

    column: str = "text"
    errors: Errors = "fail"
    min_characters: int = 0
    separator: str | None = None
    template: str | None = None

    @property
    def decides(self) -> dict[str, object]:
        """The settings that are part of a key; what reads texts has none of a template."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != "template" or value is not None
        }


@dataclass(frozen=True)
class DocumentBatch:
    """Documents of one or several files: no nulls, none empty, `texts` valid UTF-8.

    Prompts and answers alternate, and a prompt may be empty. `skipped` counts the documents that
    were left out since the batch before.
    """

    texts: pa.StringArray
    skipped: int


def suffix(address: str) -> str:
    """The extension that decides the format, such as `.jsonl.gz`; empty if it is not supported."""
    name = address.lower()
    return next((known for known in (*TEXT, *ROWS) if name.endswith(known)), "")


@functools.lru_cache(1 << 16)  # asked several times for each file, and for each range of one
def format_of(address: str) -> str:
    """How a file is read: `text`, or the extension of its format such as `jsonl.gz`."""
    extension = suffix(address)
    return "text" if extension in TEXT else extension.removeprefix(".")


def content_of(part: FileRange) -> str:
    """What decides the documents of a range, besides the settings: neither name nor place."""
    file = part.file
    # In place of the last word stood a limit of rows; with it, partitions keep their keys.
    return f"{file.fingerprint} {format_of(file.address)} {part.start} {part.stop} None"


def check_format(name: str, address: str | None = None) -> None:
    """Raise `DataError` if the extension of `name` is not supported; `address` tells more."""
    if not suffix(name):
        known = " ".join((*TEXT, *ROWS))
        raise DataError(f"{address or name}: unknown file format; takes {known}")


def check_rows(part: FileRange, reading: Reading) -> None:
    """Raise `DataError` if prompts and answers are asked for of a file without rows."""
    if reading.template is not None and format_of(part.file.address) == "text":
        raise DataError(
            f"{part.file.address}: is a text; data.source.pairs takes files of rows: "
            f"{' '.join(ROWS)}"
        )


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
        is_pairs = pa.types.is_struct(array.type)
        texts = answers(array) if is_pairs else array
        # Bytes are cheaper to count than code points, and tell an empty document as well.
        length = pc.utf8_length(texts) if min_characters > 1 else pc.binary_length(texts)
        keep = pc.fill_null(pc.greater_equal(length, max(1, min_characters)), False)
        kept = array if pc.all(keep).as_py() else array.filter(keep)
        yield DocumentBatch(alternate(kept) if is_pairs else kept, len(array) - len(kept))


def read_range(
    part: FileRange, reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[pa.Array]:
    """The rows of a range, in arrays of about `batch_bytes` and at most `BATCH_DOCUMENTS` rows.

    They are strings or, with `reading.template`, structs of two strings: `prompt` and `answer`. A
    row is null if it has no text or is skipped. Only a single row need fit into memory.

    Raises `DataError` that names the file and the row, `pa.ArrowException` and `OSError` where
    the file is damaged or missing, `ValueError` if the file cannot be read by ranges.
    """
    kind, separator = format_of(part.file.address), reading.separator
    if kind == "text" and separator is None:
        yield _read_whole(part, reading.errors)
        return
    with open_source(part.file) as file:
        if kind == "text" and separator:
            found = read_text(file, part, separator, reading.errors, batch_bytes)
        elif kind == "parquet":
            found = _read_parquet(file, part, reading, batch_bytes)
        elif kind == "arrow":
            found = _read_arrow(file, part, reading, batch_bytes)
        else:
            parse = functools.partial(_parse_lines, reading=reading)
            found = read_json_lines(file, part, parse, batch_bytes)
        for rows in found:
            for start in range(0, len(rows), BATCH_DOCUMENTS):
                yield rows[start : start + BATCH_DOCUMENTS]


def _read_whole(part: FileRange, errors: Errors) -> pa.StringArray:
    check_whole(part)
    address, size = part.file.address, part.file.bytes
    if size > MAX_OFFSET:
        raise DataError(f"{address}: has {size} bytes; a document has at most {MAX_OFFSET}")
    text = clean(read_source(part.file), address, errors)
    return pa.nulls(1, pa.string()) if text is None else one_row(text).view(pa.string())


def _parse_lines(block: Block, reading: Reading) -> pa.Array:
    if reading.template is None:
        return parse_lines(block, reading.column, reading.errors)
    return parse_pairs(block, reading.template, reading.errors)


def text_columns(address: str, schema: pa.Schema, reading: Reading) -> list[str]:
    """The columns to read; raises `DataError` that names the file if one is missing or no text."""
    if reading.template is not None:
        return pair_columns(schema.names, f"{address}: ")
    column = reading.column
    if column not in schema.names:
        raise missing_column(column, schema.names, f"{address}: ")
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
            rows = _batch_rows(file.metadata.row_group(group), reading, batch_bytes)
            for batch in file.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            ):
                yield from _rows(batch, reading, address, row)
                row += batch.num_rows


def text_bytes(group: Any, reading: Reading) -> int:
    """The bytes of the texts of a row group of Parquet; of pairs, those of all columns."""
    size: int = group.total_byte_size
    if reading.template is None:
        size = _text_chunk(group, reading.column).total_uncompressed_size
    return size


def _text_chunk(group: Any, column: str) -> Any:
    columns = (group.column(index) for index in range(group.num_columns))
    return next(each for each in columns if each.path_in_schema == column)


def _batch_rows(group: Any, reading: Reading, batch_bytes: int) -> int:
    """How many rows of a row group have about `batch_bytes` of text."""
    rows: int = batch_bytes * group.num_rows // max(1, text_bytes(group, reading))
    is_plain = reading.template is None
    # A dictionary has each text once, so that the rows may have far more.
    if is_plain and not _text_chunk(group, reading.column).has_dictionary_page:
        return max(1, min(BATCH_DOCUMENTS, rows))
    return max(1, min(DICTIONARY_ROWS, rows))


def _read_arrow(
    source: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    check_whole(part)
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
    if reading.template is not None:
        yield pairs_of_rows(batch, reading.template, reading.errors, address, first_row)
        return
    array = batch.column(0)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if len(array) > 1 and array.nbytes > MAX_OFFSET:
        half = len(array) // 2
        yield from _rows(batch.slice(0, half), reading, address, first_row)
        yield from _rows(batch.slice(half), reading, address, first_row + half)
        return
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are validated as bytes.
    yield decode_rows(array.cast(pa.binary()), address, first_row, reading.errors)
