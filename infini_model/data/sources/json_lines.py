"""JSON lines: each line an object with the text in one of its fields.

What counts is Python's parser, line by line, which also names errors. Arrow's reads a block several
times faster and without Python's lock, so it goes first; its result is taken where it is known to
be the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from infini_model.data.sources.files import FileRange
from infini_model.data.sources.text import (
    MAX_OFFSET,
    Block,
    Errors,
    chunks,
    decode,
    decompressed,
    is_utf8,
    join_surrogates,
    read_blocks,
)
from infini_model.runtime.errors import DataError

LEFT_BRACE, RIGHT_BRACE, NEWLINE, RETURN = b"{}\n\r"
# Numbers to Arrow and not to Python, and what ends one.
UNKNOWN_NUMBERS, ENDS = (b"Inf", b"-NaN"), list(b" \t\r\n,]}")
T = TypeVar("T")


class LineError(Exception):
    """Where a line that cannot be read starts, counted in bytes, and the reason."""


def read_json_lines(
    file: pa.NativeFile, part: FileRange, parse: Callable[[Block], pa.Array], batch_bytes: int
) -> Iterator[pa.Array]:
    """What `parse` makes of the lines that begin in a range; it may raise `LineError`.

    Raises `DataError` that names the file and the line, `pa.ArrowException` and `OSError` where
    the file is damaged.
    """
    for block in read_blocks(file, part, b"\n", batch_bytes):
        try:
            yield parse(block)
        except LineError as error:
            start, reason = error.args
            before = chunks(decompressed(file, part.file.address), start, batch_bytes)
            line = 1 + sum(chunk.count(b"\n") for chunk in before)
            raise DataError(f"{part.file.address}, line {line}: {reason}") from error


def parse_lines(block: Block, column: str, errors: Errors) -> pa.StringArray:
    """The texts of whole lines, null where a line has none or is skipped. Raises `LineError`."""
    texts = _parse_block(block.data, column)
    return parse_each(block, column, errors) if texts is None else texts


def _parse_block(data: bytes, column: str) -> pa.StringArray | None:
    """The texts of a block by Arrow; None if Python's parser might see any of them otherwise.

    Arrow reads objects, not lines. Where each line begins and ends with a brace none spans two
    lines, since no object continues with an opening one; and where there are no more objects than
    lines none holds two. A field that is missing is null to it.
    """
    from pyarrow import json as arrow_json

    codes = np.frombuffer(data, np.uint8)
    ends = np.append(np.flatnonzero(codes == NEWLINE), len(codes))
    starts = np.append(0, ends[:-1] + 1)
    starts, ends = starts[ends > starts], ends[ends > starts]
    ends -= codes[ends - 1] == RETURN
    starts, ends = starts[ends > starts], ends[ends > starts]
    are_objects = (codes[starts] == LEFT_BRACE) & (codes[ends - 1] == RIGHT_BRACE)
    if not len(starts) or not are_objects.all() or b"\0" in data or not is_utf8(data):
        return None
    if any(_holds_number(codes, name) for name in UNKNOWN_NUMBERS):
        return None
    schema = pa.schema([(column, pa.string())])
    reading = arrow_json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, MAX_OFFSET))
    parsing = arrow_json.ParseOptions(schema, unexpected_field_behavior="ignore")
    try:
        table = arrow_json.read_json(pa.BufferReader(data), reading, parsing)
    except pa.ArrowException:
        return None
    texts = table.column(0).combine_chunks()
    return None if texts.null_count or len(texts) != len(starts) else texts


def _holds_number(codes: np.ndarray, name: bytes) -> bool:
    # Twenty times as fast as a search in bytes, which holds Python's lock besides.
    found = np.flatnonzero(codes[: -len(name)] == name[0])
    for place in range(1, len(name)):
        found = found[codes[found + place] == name[place]]
    return bool(np.isin(codes[found + len(name)], ENDS).any())


def parse_each(block: Block, column: str, errors: Errors) -> pa.StringArray:
    """The texts of whole lines as Python's parser sees them. Raises `LineError`."""

    def text_of(row: dict[str, Any]) -> str | None:
        if column not in row:
            raise missing_column(column, row)
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise DataError(f"column {column!r} is {type(text).__name__}, not text")
        return None if text is None else join_surrogates(text, errors)

    return pa.array(map_rows(block, text_of, errors), pa.string())


def map_rows(
    block: Block, parse: Callable[[dict[str, Any]], T | None], errors: Errors
) -> list[T | None]:
    """What `parse` makes of the object in each line that is not blank, None if it is skipped.

    A whole number stands there by its length, beyond a limit of which Python reads none. Raises
    `LineError` where a line holds no object, or `parse` raises `DataError`.
    """
    parsed: list[T | None] = []
    start = block.start
    for line in block.data.split(b"\n"):
        if line and not line.isspace():
            try:
                text = decode(line, errors)
                parsed.append(None if text is None else parse(_object(text)))
            except DataError as error:
                raise LineError(start, str(error)) from error
        start += len(line) + 1
    return parsed


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_int=len)
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError("is not JSON: it is nested too deeply") from error
    if not isinstance(row, dict):
        raise DataError(f"holds {type(row).__name__}, needs an object")
    return row


def missing_column(column: str, present: Iterable[str], where: str = "") -> DataError:
    """The error of a row without the column of the text; it names those that are `present`."""
    return DataError(f"{where}has no column {column!r}; it has: {', '.join(present) or 'none'}")
