"""Text that must be UTF-8: validate it, and fail, skip or replace where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from infini_model.runtime.errors import DataError

Errors = Literal["fail", "skip", "replace"]


def clean_file(data: bytes, path: Path, errors: Errors) -> bytes | None:
    """The content of a text file as valid UTF-8, or None to skip it.

    Raises `DataError` that names the file and the byte.
    """
    if b"\0" in data:
        if errors != "skip":
            raise DataError(f"{path}: is binary, not text: it has a NUL at byte {data.index(0)}")
        return None
    # A valid file need not become a Python string, which takes up to four times the memory.
    if _is_utf8(data):
        return data
    text = decode(data, str(path), errors)
    return None if text is None else text.encode()


def _is_utf8(data: bytes) -> bool:
    offsets = np.array([0, len(data)], np.int32)
    whole = pa.StringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(data))
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def decode(data: bytes, where: str, errors: Errors) -> str | None:
    """The text of `data`, or None to skip it. Raises `DataError` that names `where`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "fail":
            raise DataError(
                f"{where}: is not UTF-8: {error.reason} at byte {error.start}; "
                "data.source.errors takes skip or replace"
            ) from error
    return data.decode("utf-8", "replace") if errors == "replace" else None


def join_surrogates(text: str, where: str, errors: Errors) -> str | None:
    """`text` without lone surrogates, which JSON can spell but UTF-8 cannot; None to skip it.

    Raises `DataError` that names `where`.
    """
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


def decode_rows(rows: pa.BinaryArray, path: Path, first_row: int, errors: Errors) -> pa.StringArray:
    """Rows of bytes as strings, null where a row is skipped; `first_row` counts from zero.

    Raises `DataError` that names the file and the row.
    """
    try:
        texts = rows.cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        texts = _decode_each(rows, path, first_row, errors)
    return texts


def _decode_each(
    rows: pa.BinaryArray, path: Path, first_row: int, errors: Errors
) -> pa.StringArray:
    def decode_row(row: int, value: bytes | None) -> str | None:
        return None if value is None else decode(value, f"{path}, row {row + 1}", errors)

    values: list[bytes | None] = rows.to_pylist()
    return pa.array(
        [decode_row(row, value) for row, value in enumerate(values, first_row)], pa.string()
    )
