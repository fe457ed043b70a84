"""The supported file formats: which reader a file needs, and the readers of Parquet and Arrow.

Each reader yields the rows of a range as Arrow strings, or as prompts and answers; a row is null if
it has no text or is skipped.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from infini_model.data.sources.files import FileRange, open_source
from infini_model.data.sources.json_lines import missing_column, parse_lines, read_json_lines
from infini_model.data.sources.pairs.arrays import columns_of, pairs_of_rows, parse_pairs
from infini_model.data.sources.separated import Block, check_whole, read_text, read_whole
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.data.sources.utf8 import Errors, decode_rows
from infini_model.runtime.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_DOCUMENTS = 1 << 16
DICTIONARY_ROWS = 1 << 12
# Otherwise Arrow loads the whole column of a row group at once.
PARQUET_BUFFER_BYTES = 1 << 20
TEXT = (".txt", ".md", ".rst", ".py")
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
    return f"{file.fingerprint} {format_of(file.address)} {part.start} {part.stop} {part.rows}"


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


def read_range(
    part: FileRange, reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[pa.Array]:
    """The rows of a range, in arrays of about `batch_bytes` and at most `BATCH_DOCUMENTS` rows.

    They are strings or, with `reading.template`, structs of two strings: `prompt` and `answer`.
    Only a single row need fit into memory.

    Raises `DataError` that names the file and the row, `pa.ArrowException` and `OSError` where
    the file is damaged or missing, `ValueError` if the file cannot be read by ranges.
    """
    if reading.separator is None and format_of(part.file.address) == "text":
        yield read_whole(part, reading.errors)
        return
    left = part.rows
    with open_source(part.file) as file:
        for rows in _rows(file, part, reading, batch_bytes):
            texts = rows[:left]
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                yield texts[start : start + BATCH_DOCUMENTS]
            if left is not None:
                left -= len(texts)
                if not left:
                    break


def _rows(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    kind = format_of(part.file.address)
    if kind == "text" and reading.separator:
        return read_text(file, part, reading.separator, reading.errors, batch_bytes)
    if kind == "parquet":
        return _read_parquet(file, part, reading, batch_bytes)
    if kind == "arrow":
        return _read_arrow(file, part, reading, batch_bytes)
    return read_json_lines(file, part, partial(_parse_lines, reading), batch_bytes)


def _parse_lines(reading: Reading, block: Block) -> pa.Array:
    if reading.template is None:
        return parse_lines(block, reading.column, reading.errors)
    return parse_pairs(block, reading.template, reading.errors)


class _Table(NamedTuple):
    """The `columns` to read of a table, and what makes rows of a batch, by its first row."""

    columns: list[str]
    rows: Callable[[pa.RecordBatch, int], Iterator[pa.Array]]


def text_columns(address: str, schema: pa.Schema, reading: Reading) -> list[str]:
    """The columns to read; raises `DataError` that names the file if one is missing or no text."""
    return _table(address, schema, reading).columns


def _table(address: str, schema: pa.Schema, reading: Reading) -> _Table:
    """Raises `DataError` if a column is missing or holds no text."""
    template = reading.template
    if template is not None:
        return _Table(
            columns_of(address, schema),
            lambda batch, row: iter([pairs_of_rows(batch, template, reading.errors, address, row)]),
        )
    kind = _column_type(address, schema, reading.column)
    return _Table(
        [reading.column],
        lambda batch, row: _strings(batch.column(0), kind, address, row, reading.errors),
    )


def _read_parquet(
    source: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    import pyarrow.parquet as pq

    address = part.file.address
    with pq.ParquetFile(source, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES) as file:
        table = _table(address, file.schema_arrow, reading)
        groups = range(file.num_row_groups)[part.start : part.stop]
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        for group in groups:
            for batch in file.iter_batches(
                _batch_rows(file.metadata.row_group(group), reading, batch_bytes),
                row_groups=[group],
                columns=table.columns,
                use_threads=False,
            ):
                yield from table.rows(batch, row)
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
    table = _table(address, schema, reading)
    fields = [schema.names.index(column) for column in table.columns]
    source.seek(0)
    reader = opened(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
    row = 0
    for batch in batches:
        count = batch.num_rows
        rows = max(1, min(BATCH_DOCUMENTS, batch_bytes * count // max(1, batch.nbytes)))
        for start in range(0, count, rows):
            slice_ = batch.slice(start, rows)
            yield from table.rows(slice_, row)
            row += slice_.num_rows


def _column_type(address: str, schema: pa.Schema, column: str) -> pa.DataType:
    """The type of the texts in a column. Raises `DataError` if it is missing or holds no text."""
    if column not in schema.names:
        raise DataError(f"{address}: {missing_column(column, schema.names)}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    raw = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
    if not any(test(value) for test in (*text, *raw)):
        raise DataError(f"{address}: column {column!r} is {kind}, not text")
    return value


def _strings(
    array: pa.Array, kind: pa.DataType, address: str, first_row: int, errors: Errors
) -> Iterator[pa.StringArray]:
    """The rows of a column as valid UTF-8, in arrays that 31-bit offsets can address."""
    if array.type != kind:
        array = array.cast(kind)
    if len(array) > 1 and array.nbytes > MAX_OFFSET:
        half = len(array) // 2
        yield from _strings(array.slice(0, half), kind, address, first_row, errors)
        yield from _strings(array.slice(half), kind, address, first_row + half, errors)
        return
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are validated as bytes.
    yield decode_rows(array.cast(pa.binary()), address, first_row, errors)
