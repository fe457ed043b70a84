"""Documents out of files: text, JSON lines, Parquet and Arrow, as Arrow strings in batches.

Every format comes down to one stream of `pyarrow` string arrays of bounded size, without nulls and
empty documents, so that nothing after this module knows where a document came from. What cannot be
read is a `DataError` that names the file and the row.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.runtime.errors import DataError

BATCH_BYTES = 4 << 20
BATCH_DOCUMENTS = 1 << 16
# An Arrow string array addresses its bytes with 31 bits.
LARGEST_DOCUMENT = (1 << 31) - 1
TEXT = (".txt", ".md", ".rst", ".py")
ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")

Errors = Literal["fail", "skip", "replace"]
# Called with what is done and what there is in all, in bytes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Reading:
    """How files become documents: the settings that decide what the documents are.

    `column` names the text of a row; `errors` says what to do about a document that is not UTF-8;
    documents of fewer than `min_characters` code points are left out. `separator` stands between
    the documents of a text file; None takes the file as one.
    """

    column: str = "text"
    errors: Errors = "fail"
    min_characters: int = 0
    separator: str | None = None


@dataclass(frozen=True)
class Batch:
    """Documents of one file or of several: no nulls, none empty, `texts` valid UTF-8.

    `skipped` counts the documents left out on the way here.
    """

    texts: pa.StringArray
    skipped: int


def string_buffers(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """The memory of a string array, not copied: offsets int32 [n + 1] into octets uint8."""
    if not len(texts):
        return np.zeros(1, np.int32), np.zeros(0, np.uint8)
    _, offsets, octets = texts.buffers()
    first = texts.offset
    return (
        np.frombuffer(offsets, np.int32)[first : first + len(texts) + 1],
        np.frombuffer(octets or b"", np.uint8),
    )


def suffix(path: Path) -> str:
    """The extension that decides the format, `.jsonl.gz` included; empty if it is none we read."""
    name = path.name.lower()
    return next((known for known in (*TEXT, *ROWS) if name.endswith(known)), "")


def check_format(path: Path) -> None:
    """Raise `DataError` if the extension of `path` is none that can be read."""
    if not suffix(path):
        raise DataError(f"{path}: cannot be read: takes {' '.join((*TEXT, *ROWS))}")


@dataclass(frozen=True)
class Part:
    """What one thread reads in one go: small files together, or row groups of a Parquet file.

    `bytes` is their share of the files; `groups` are those of the only path, None is all.
    """

    paths: tuple[Path, ...]
    bytes: int
    groups: range | None = None


def parts_of(paths: Iterable[Path]) -> Iterator[Part]:
    """The files in pieces of about 4 MiB where that can be. Raises as `read_part` does."""
    small: list[Path] = []
    waiting = 0
    for path in paths:
        with _readable(path):
            size = path.stat().st_size
            pieces = list(_row_groups(path, size)) if suffix(path) == ".parquet" else []
        if small and (pieces or waiting + size > BATCH_BYTES):
            yield Part(tuple(small), waiting)
            small, waiting = [], 0
        if pieces:
            yield from pieces
        else:
            small.append(path)
            waiting += size
    if small:
        yield Part(tuple(small), waiting)


def _row_groups(path: Path, size: int) -> Iterator[Part]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    count, first, waiting = metadata.num_row_groups, 0, 0
    for group in range(count):
        waiting += metadata.row_group(group).total_byte_size
        if waiting >= BATCH_BYTES or group == count - 1:
            share = size * (group + 1) // count - size * first // count
            yield Part((path,), share, range(first, group + 1))
            first, waiting = group + 1, 0


def read_documents(paths: Iterable[Path], reading: Reading) -> Iterator[Batch]:
    """The documents of `paths`, in their order, as `read_part` gives them."""
    for part in parts_of(paths):
        yield from read_part(part, reading)


def read_part(part: Part, reading: Reading) -> Iterator[Batch]:
    """The documents of a part, in their order, in batches of about 4 MiB.

    Small files share a batch. Raises `DataError` in one line that names the file (and the row).
    """
    pending: list[pa.StringArray] = []
    size = rows = skipped = 0
    for path in part.paths:
        with _readable(path):
            for raw in _read_file(path, reading, part.groups):
                texts = _clean(raw, reading)
                skipped += len(raw) - len(texts)
                if len(texts):
                    pending.append(texts)
                size += texts.nbytes
                rows += len(raw)
                if size >= BATCH_BYTES or rows >= BATCH_DOCUMENTS:
                    yield from _batches(pending, skipped)
                    pending, size, rows, skipped = [], 0, 0, 0
    yield from _batches(pending, skipped)


def _batches(pending: list[pa.StringArray], skipped: int) -> Iterator[Batch]:
    """Join the arrays into one, or hand them on one by one where one could not address them."""
    if len(pending) > 1 and sum(array.nbytes for array in pending) < LARGEST_DOCUMENT:
        pending = [pa.concat_arrays(pending)]
    for array in pending or [pa.array([], pa.string())]:
        yield Batch(array, skipped)
        skipped = 0


def _clean(texts: pa.StringArray, reading: Reading) -> pa.StringArray:
    shortest = max(1, reading.min_characters)
    # A character is at least one byte: counting bytes first spares counting code points.
    length = pc.utf8_length(texts) if shortest > 1 else pc.binary_length(texts)
    keep = pc.fill_null(pc.greater_equal(length, shortest), False)
    return texts if pc.all(keep).as_py() else texts.filter(keep)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what Arrow and the system say about a file into one line that names it."""
    try:
        yield
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read: {_first_line(error)}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or _first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_file(path: Path, reading: Reading, groups: range | None) -> Iterator[pa.StringArray]:
    kind = suffix(path)
    if kind in TEXT:
        return _read_text(path, reading)
    if kind == ".parquet":
        return _read_parquet(path, reading, groups)
    if kind == ".arrow":
        return _read_arrow(path, reading)
    return _read_json_lines(path, reading)


def _read_text(path: Path, reading: Reading) -> Iterator[pa.StringArray]:
    data = path.read_bytes()
    if len(data) > LARGEST_DOCUMENT:
        raise DataError(f"{path}: has {len(data)} bytes; a document has at most {LARGEST_DOCUMENT}")
    # What is found to be UTF-8 need not become Python's strings, of up to four times the memory.
    rows: list[bytes | None] = [_utf8(data, path, reading.errors)]
    if reading.separator is not None and rows[0] is not None:
        rows = [*rows[0].split(reading.separator.encode())]
    yield pa.array(rows, pa.binary()).view(pa.string())


def _utf8(data: bytes, path: Path, errors: Errors) -> bytes | None:
    """The text of a file, or None where it is to be left out."""
    if b"\0" in data:
        if errors != "skip":
            raise DataError(f"{path}: is binary, not text: it has a NUL at byte {data.index(0)}")
        return None
    if _is_utf8(data):
        return data
    text = _decode(data, str(path), errors)
    return None if text is None else text.encode()


def _is_utf8(data: bytes) -> bool:
    offsets = np.array([0, len(data)], np.int32)
    whole = pa.StringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(data))
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decode(data: bytes, where: str, errors: Errors) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "fail":
            raise DataError(
                f"{where}: is not UTF-8: {error.reason} at byte {error.start}; "
                "data.source.errors takes skip or replace"
            ) from error
    return data.decode("utf-8", "replace") if errors == "replace" else None


def _well_formed(text: str, where: str, errors: Errors) -> str | None:
    """`text` unless it holds half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "fail":
            raise DataError(
                f"{where}: is not UTF-8: a lone surrogate at character {error.start}; "
                "data.source.errors takes skip or replace"
            ) from error
        if errors == "skip":
            return None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _open_lines(path: Path) -> BinaryIO:
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if codec is None:
        return path.open("rb")
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), codec), 1 << 20)


def _read_json_lines(path: Path, reading: Reading) -> Iterator[pa.StringArray]:
    texts: list[str | None] = []
    size = 0
    with _open_lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            texts.append(_parse_line(line, f"{path}, line {number}", reading))
            size += len(line)
            if size >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
                yield pa.array(texts, pa.string())
                texts, size = [], 0
    yield pa.array(texts, pa.string())


def _parse_line(line: bytes, where: str, reading: Reading) -> str | None:
    decoded = _decode(line, where, reading.errors)
    if decoded is None:
        return None
    try:
        row = json.loads(decoded)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "it is nested too deeply")
        raise DataError(f"{where}: is no JSON: {reason}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds {type(row).__name__}, needs an object")
    if reading.column not in row:
        raise _missing_column(where, reading.column, row)
    text = row[reading.column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(f"{where}: column {reading.column!r} is {type(text).__name__}, not text")
    return _well_formed(text, where, reading.errors)


def _missing_column(where: str, column: str, present: Iterable[str]) -> DataError:
    names = ", ".join(present) or "none at all"
    return DataError(f"{where}: has no column {column!r}; there are: {names}")


def _read_parquet(path: Path, reading: Reading, groups: range | None) -> Iterator[pa.StringArray]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        column = _column_type(path, file.schema_arrow, reading.column)
        groups = groups or range(file.num_row_groups)
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        for group in groups:
            shape = file.metadata.row_group(group)
            bytes_of_row = max(1, shape.total_byte_size // max(1, shape.num_rows))
            rows = min(BATCH_DOCUMENTS, max(1, BATCH_BYTES // bytes_of_row))
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
    """The rows of a column as strings that are UTF-8, in arrays that 31 bits address."""
    if array.type != kind:
        array = array.cast(kind)
    if len(array) > 1 and array.nbytes > LARGEST_DOCUMENT:
        half = len(array) // 2
        yield from _strings(array.slice(0, half), kind, path, first_row, errors)
        yield from _strings(array.slice(half), kind, path, first_row + half, errors)
        return
    # Arrow believes a file's claim that its bytes are UTF-8, hence the check.
    octets = array.cast(pa.binary())
    try:
        texts = octets.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        texts = _decode_rows(octets, path, first_row, errors)
    yield texts


def _decode_rows(
    octets: pa.BinaryArray, path: Path, first_row: int, errors: Errors
) -> pa.StringArray:
    def decode(row: int, value: bytes | None) -> str | None:
        return None if value is None else _decode(value, f"{path}, row {row + 1}", errors)

    values: list[bytes | None] = octets.to_pylist()
    return pa.array(
        [decode(row, value) for row, value in enumerate(values, first_row)], pa.string()
    )
