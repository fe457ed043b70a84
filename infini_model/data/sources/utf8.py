"""Text that must be UTF-8: validate it, and fail, skip or replace where it is not.

The errors of single documents say what is wrong and where in the document; the caller, who knows
which document it is, puts that in front.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa

from infini_model.runtime.errors import DataError

# Below this a Python string is made faster than an array.
SMALL_BYTES = 1 << 16
Errors = Literal["fail", "skip", "replace"]


def clean(data: bytes, errors: Errors, start: int = 0) -> bytes | None:
    """A document of a text file as valid UTF-8, or None to skip it; it begins at byte `start`.

    Raises `DataError` that tells the byte but not the file.
    """
    if b"\0" in data:
        if errors != "skip":
            position = start + data.index(0)
            raise DataError(f"is binary, not text: it has a NUL at byte {position}")
        return None
    # A valid document need not become a Python string, which takes up to four times the memory.
    if is_utf8(data):
        return data
    text = decode(data, errors, start)
    return None if text is None else text.encode()


def is_utf8(data: bytes) -> bool:
    """Whether `data`, of at most `MAX_OFFSET` bytes, is valid UTF-8."""
    try:
        if len(data) < SMALL_BYTES:
            data.decode()
            return True
        one_row(data).view(pa.string()).validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return False
    return True


def one_row(data: bytes) -> pa.BinaryArray:
    """An array of one row that shares the memory of `data`, of at most `MAX_OFFSET` bytes."""
    offsets = np.array([0, len(data)], np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.BinaryArray.from_buffers(pa.binary(), 1, buffers)


def decode(data: bytes, errors: Errors, start: int = 0) -> str | None:
    """The text of `data`, which begins at byte `start`, or None to skip it.

    Raises `DataError` that tells the byte.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "fail":
            raise DataError(
                f"is not UTF-8: {error.reason} at byte {start + error.start}; "
                "data.source.errors takes skip or replace"
            ) from error
    return data.decode("utf-8", "replace") if errors == "replace" else None


def join_surrogates(text: str, errors: Errors) -> str | None:
    """`text` without lone surrogates, which JSON can spell but UTF-8 cannot; None to skip it.

    Raises `DataError` that tells the character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "fail":
            raise DataError(
                f"is not UTF-8: a lone surrogate at character {error.start}; "
                "data.source.errors takes skip or replace"
            ) from error
        if errors == "skip":
            return None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def decode_rows(
    rows: pa.BinaryArray, address: str, first_row: int, errors: Errors
) -> pa.StringArray:
    """Rows of bytes as strings, null where a row is skipped; `first_row` counts from zero.

    Raises `DataError` that names the file and the row, `pa.ArrowInvalid` if the array is damaged.
    """
    rows.validate(full=True)
    try:
        return rows.cast(pa.string())
    except pa.ArrowInvalid:
        return _decode_each(rows, address, first_row, errors)


def _decode_each(
    rows: pa.BinaryArray, address: str, first_row: int, errors: Errors
) -> pa.StringArray:
    def decode_row(row: int, value: bytes | None) -> str | None:
        try:
            return None if value is None else decode(value, errors)
        except DataError as error:
            raise DataError(f"{address}, row {row + 1}: {error}") from error

    values: list[bytes | None] = rows.to_pylist()
    return pa.array(
        [decode_row(row, value) for row, value in enumerate(values, first_row)], pa.string()
    )
