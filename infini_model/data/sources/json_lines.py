"""JSON lines, plain or compressed: each line an object with the text in one of its fields.

What counts is the parser of Python, line by line, which also names errors. Arrow's parser reads
blocks several times faster and without Python's lock, so it goes first; its result is taken only
where it is known to be the same, and where it refuses a block, halves of it are tried, so that one
unusual line costs no more than its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from infini_model.data.sources.files import FileRange
from infini_model.data.sources.separated import (
    Block,
    check_whole,
    read_blocks,
    split_blocks,
)
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.data.sources.utf8 import Errors, decode, is_utf8, join_surrogates
from infini_model.runtime.errors import DataError

CODECS = {".gz": "gzip", ".zst": "zstd"}
CHUNK_BYTES = 1 << 20
# Shorter blocks that Arrow refuses are left to Python.
HALVED_BYTES = 1 << 15
# What begins a value, or a number in it, within a few spaces; and what ends one.
BEFORE, SPACES, AFTER = b":,[", 8, b" \t\r\n,]}"
T = TypeVar("T")
LEFT_BRACE, RIGHT_BRACE, NEWLINE, RETURN = b"{}\n\r"


class LineError(Exception):
    """The line at `start`, counted in bytes, cannot be read."""

    def __init__(self, start: int, reason: str) -> None:
        super().__init__(reason)
        self.start = start


def read_json_lines(
    file: pa.NativeFile,
    part: FileRange,
    parse: Callable[[Block], Iterator[pa.Array]],
    batch_bytes: int,
) -> Iterator[pa.Array]:
    """What `parse` makes of the lines that begin in a range; a compressed file is read whole.

    `parse` gets whole lines and may raise `LineError`.

    Raises `DataError` that names the file and the line, `pa.ArrowException` and `OSError` where
    the file is damaged.
    """
    address = part.file.address
    codec = next((CODECS[end] for end in CODECS if address.lower().endswith(end)), None)
    if codec is not None:
        check_whole(part)
        content = _content(file, codec)  # kept, since it closes `file` when it is deleted
        blocks = split_blocks(_chunks(content, batch_bytes), 0, b"\n", address)
    else:
        blocks = read_blocks(file, part, b"\n", batch_bytes)
    for block in blocks:
        try:
            yield from parse(block)
        except LineError as error:
            line = 1 + _newlines(_content(file, codec), error.start)
            raise DataError(f"{address}, line {line}: {error}") from error


def _content(file: pa.NativeFile, codec: str | None) -> pa.NativeFile:
    """The file from its start, decompressed."""
    file.seek(0)
    if codec is None:
        return file
    # Arrow decompresses 64 KiB at a time, which would be as many requests to a remote store.
    return pa.CompressedInputStream(pa.BufferedInputStream(file, CHUNK_BYTES), codec)


def _chunks(content: pa.NativeFile, chunk_bytes: int) -> Iterator[bytes]:
    while chunk := content.read(chunk_bytes):
        yield chunk


def _newlines(content: pa.NativeFile, stop: int) -> int:
    """How many lines end in the first `stop` bytes."""
    lines = 0
    while stop and (chunk := content.read(min(stop, CHUNK_BYTES))):
        lines += chunk.count(b"\n")
        stop -= len(chunk)
    return lines


def parse_lines(block: Block, column: str, errors: Errors) -> Iterator[pa.StringArray]:
    """The texts of whole lines, null where a line has none or is skipped. Raises `LineError`."""
    start, data = block
    parsed = _parse_block(data, column)
    if parsed is not None:
        for line in _doubtful(parsed, data):
            first, last = int(parsed.starts[line]), int(parsed.ends[line])
            parse_each(Block(start + first, data[first:last]), column, errors)
        yield parsed.texts
        return
    middle = _middle(data)
    if len(data) <= HALVED_BYTES or not middle:
        yield parse_each(block, column, errors)
        return
    yield from parse_lines(Block(start, data[:middle]), column, errors)
    yield from parse_lines(Block(start + middle, data[middle:]), column, errors)


def _middle(data: bytes) -> int:
    """Where a line near the middle starts; 0 if there is only one line."""
    half = len(data) // 2
    return data.rfind(b"\n", 0, half) + 1 or data.find(b"\n", half, len(data) - 1) + 1


class _Lines(NamedTuple):
    """The lines of a block that are not blank: where each starts and ends, and its text or null."""

    starts: np.ndarray
    ends: np.ndarray
    texts: pa.StringArray


def _doubtful(lines: _Lines, data: bytes) -> Iterable[int]:
    """The lines that Arrow read and Python may refuse.

    Arrow makes no difference between null and a field that is missing, and knows more numbers.
    """
    nulls = np.flatnonzero(lines.texts.is_null())
    numbers = list(_numbers_of_arrow(data))
    return sorted({*nulls, *(np.searchsorted(lines.starts, numbers, side="right") - 1)})


def _numbers_of_arrow(data: bytes) -> Iterator[int]:
    """Where there may be Inf, -Inf or -NaN; Python refuses them, but knows NaN and Infinity."""
    codes = np.frombuffer(data, np.uint8)
    for name in (b"Inf", b"NaN"):
        # Twenty times as fast as `bytes.find`, which holds the lock besides.
        starts = np.flatnonzero(codes == name[0])
        for place in (1, 2):
            starts = starts[codes.take(starts + place, mode="clip") == name[place]]
        for start in starts.tolist():
            before = data[max(0, start - SPACES) : start]
            is_value = (
                before.rstrip(b" \t\r-")[-1:] in BEFORE and data[start + 3 : start + 4] in AFTER
            )
            if is_value and (name == b"Inf" or before.endswith(b"-")):
                yield start


def _parse_block(data: bytes, column: str) -> _Lines | None:
    """The lines of a block, or None if Python's parser might see any of them otherwise.

    Arrow reads objects, not lines. Where each line begins and ends with a brace none spans two
    lines, since no object continues with an opening one; and where there are no more objects than
    lines none holds two.
    """
    starts, ends = _filled_lines(data)
    if not len(starts):
        return _Lines(starts, ends, pa.array([], pa.string()))
    codes = np.frombuffer(data, np.uint8)
    are_objects = (codes[starts] == LEFT_BRACE) & (codes[ends - 1] == RIGHT_BRACE)
    if not are_objects.all() or b"\0" in data or not is_utf8(data):
        return None
    texts = _arrow_parse(data, column)
    if texts is None or len(texts) != len(starts):
        return None
    return _Lines(starts, ends, texts)


def _filled_lines(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the lines that are not empty start and end, line ends of either kind left out."""
    codes = np.frombuffer(data, np.uint8)
    ends = np.append(np.flatnonzero(codes == NEWLINE), len(codes))
    starts = np.concatenate([[0], ends[:-1] + 1])
    filled = ends > starts
    starts, ends = starts[filled], ends[filled]
    ends -= codes[ends - 1] == RETURN
    filled = ends > starts
    return starts[filled], ends[filled]


def _arrow_parse(data: bytes, column: str) -> pa.StringArray | None:
    from pyarrow import json as arrow_json

    try:
        table = arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, MAX_OFFSET)),
            arrow_json.ParseOptions(
                explicit_schema=pa.schema([(column, pa.string())]),
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowException:
        return None
    return table.column(0).combine_chunks()


def parse_each(block: Block, column: str, errors: Errors) -> pa.StringArray:
    """The texts of whole lines as Python's parser sees them. Raises `LineError`."""
    texts = map_lines(block, lambda line: _parse_line(line, column, errors))
    return pa.array(texts, pa.string())


def map_lines(block: Block, parse: Callable[[bytes], T]) -> list[T]:
    """What `parse` makes of each line that is not blank.

    Raises `LineError` where it raises `DataError`.
    """
    parsed: list[T] = []
    start = block.start
    for line in block.data.split(b"\n"):
        if line and not line.isspace():
            try:
                parsed.append(parse(line))
            except DataError as error:
                raise LineError(start, str(error)) from error
        start += len(line) + 1
    return parsed


def parse_object(text: str) -> dict[str, Any]:
    """A line that holds a JSON object.

    Raises `DataError` that tells what is wrong, `RecursionError` or `ValueError` beyond the limits
    of Python.
    """
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise DataError(f"holds {type(row).__name__}, needs an object")
    return row


def _parse_line(line: bytes, column: str, errors: Errors) -> str | None:
    decoded = decode(line, errors)
    if decoded is None:
        return None
    try:
        row = parse_object(decoded)
    except DataError:
        raise
    except (RecursionError, ValueError) as error:
        return _parse_beyond_limits(decoded, column, error)
    if column not in row:
        raise missing_column(column, row)
    text = row[column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(f"column {column!r} is {type(text).__name__}, not text")
    return join_surrogates(text, errors)


def _parse_beyond_limits(line: str, column: str, error: Exception) -> str:
    """The text of a line with numbers too long, or values nested too deeply, for Python.

    These limits are not those of JSON and depend on Python's version and stack; where the values
    are beside the text, Arrow reads the line as it does in a block.
    """
    parsed = _parse_block(line.encode(), column)
    if parsed is None or parsed.texts.null_count:
        raise beyond_limits(error) from error
    text: str = parsed.texts[0].as_py()
    return text


def beyond_limits(error: Exception) -> DataError:
    """The error of a line that only a limit of Python keeps from being read."""
    is_deep = isinstance(error, RecursionError)
    return DataError(f"is not JSON: {'it is nested too deeply' if is_deep else error}")


def missing_column(column: str, present: Iterable[str]) -> DataError:
    """The error of a row without the column of the text; it names those that are `present`."""
    return DataError(f"has no column {column!r}; it has: {', '.join(present) or 'none'}")
