"""Documents that stand in a file one after another, with a separator between them.

The documents of a file are those of `whole.split(separator)`. A file can be cut anywhere into
ranges of bytes that are read apart: the cuts move to the next separator that a reader from the
start of the file would find as well, so that together the ranges hold each document exactly once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.files import FileRange, read_source
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.data.sources.utf8 import Errors, clean, one_row
from infini_model.runtime.errors import DataError

SEARCH_BYTES = 1 << 18
CODECS = {".gz": "gzip", ".zst": "zstd"}


class Block(NamedTuple):
    """Whole documents with the separators between them; `start` is their place in the file."""

    start: int
    data: bytes


def read_whole(part: FileRange, errors: Errors) -> pa.StringArray:
    """A text file as one document, null if it is skipped.

    Raises `DataError` that names the file and the byte, `OSError` if it cannot be read.
    """
    check_whole(part)
    address, size = part.file.address, part.file.bytes
    if size > MAX_OFFSET:
        raise DataError(f"{address}: has {size} bytes; a document has at most {MAX_OFFSET}")
    text = _clean(read_source(part.file), address, errors, 0)
    return pa.nulls(1, pa.string()) if text is None else one_row(text).view(pa.string())


def read_text(
    file: pa.NativeFile, part: FileRange, separator: str, errors: Errors, batch_bytes: int
) -> Iterator[pa.StringArray]:
    """The documents of a text file.

    Raises `DataError` that names the file and the byte, `OSError` if it cannot be read.
    """
    for block in read_blocks(file, part, separator.encode(), batch_bytes):
        yield _documents(block, separator, part.file.address, errors)


def _documents(block: Block, separator: str, address: str, errors: Errors) -> pa.StringArray:
    rows = pc.split_pattern(one_row(block.data), pattern=separator).flatten()
    if b"\0" not in block.data:
        with contextlib.suppress(pa.ArrowInvalid):
            return rows.cast(pa.string())
    documents: list[bytes | None] = []
    start = block.start
    for document in rows.to_pylist():
        documents.append(_clean(document, address, errors, start))
        start += len(document) + len(separator.encode())
    return pa.array(documents, pa.string())


def _clean(document: bytes, address: str, errors: Errors, start: int) -> bytes | None:
    try:
        return clean(document, errors, start)
    except DataError as error:
        raise DataError(f"{address}: {error}") from error


def check_whole(part: FileRange) -> None:
    """Raise `ValueError` if the range of a file that can only be read whole is not all of it."""
    if part.start or (part.stop is not None and part.stop < part.file.bytes):
        raise ValueError(f"{part.file.address}: cannot be read by ranges, only whole")


def read_blocks(
    file: pa.NativeFile, part: FileRange, separator: bytes, chunk_bytes: int
) -> Iterator[Block]:
    """The documents that begin in a range, in blocks of about `chunk_bytes` or one document.

    The blocks, each split at its separators, are the documents. Raises `DataError` if a document
    is too long, `OSError` if the file cannot be read.
    """
    address, size = part.file.address, part.file.bytes
    content = decompressed(file, address)
    if content is not file:
        check_whole(part)
        yield from split_blocks(chunks(content, math.inf, chunk_bytes), 0, separator, address)
        return
    first = _next_document(file, part.start, separator, size)
    after = None if part.stop is None else _next_document(file, part.stop, separator, size)
    if first is None or first == after:
        return
    file.seek(first)
    end = size if after is None else after - len(separator)
    yield from split_blocks(chunks(file, end - first, chunk_bytes), first, separator, address)


def decompressed(file: pa.NativeFile, address: str) -> pa.NativeFile:
    """The content from its start: `file` itself unless its extension is that of a codec.

    What decompresses it closes `file` when it is deleted.
    """
    file.seek(0)
    codec = next((CODECS[end] for end in CODECS if address.lower().endswith(end)), None)
    if codec is None:
        return file
    # Arrow decompresses 64 KiB at a time, which would be as many requests to a remote store.
    return pa.CompressedInputStream(pa.BufferedInputStream(file, 1 << 20), codec)


def chunks(file: pa.NativeFile, count: float, chunk_bytes: int) -> Iterator[bytes]:
    """The next `count` bytes of a file, or fewer at its end."""
    while count and (chunk := file.read(min(count, chunk_bytes))):
        count -= len(chunk)
        yield chunk


def split_blocks(
    chunks: Iterator[bytes], start: int, separator: bytes, address: str
) -> Iterator[Block]:
    """Join chunks of a file from byte `start` on, where a document begins, and cut them anew.

    Raises `DataError` if a document is too long.
    """
    pending: list[bytes] = []
    size = 0
    across = len(separator) - 1
    last = b""  # what a separator that ends in the next chunk can begin in
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_OFFSET:
            raise DataError(
                f"{address}: the document at byte {start} has more than {size - len(chunk)} bytes; "
                f"a document has at most {MAX_OFFSET}"
            )
        pending.append(chunk)
        if separator not in chunk and separator not in last + chunk[:across]:
            last = (last + chunk[-across:])[-across:] if across else b""
            continue
        data = b"".join(pending)
        end = _last_separator(data, separator)
        yield Block(start, data[:end])
        rest = data[end + len(separator) :]
        pending, size, start = [rest], len(rest), start + end + len(separator)
        last = rest[-across:] if across else b""
    yield Block(start, b"".join(pending))


def _last_separator(data: bytes, separator: bytes) -> int:
    """Where the last separator begins that a search from the left finds."""
    widths = range(1, len(separator))
    if not any(separator.startswith(separator[-width:]) for width in widths):
        return data.rindex(separator)
    return len(data) - len(data.split(separator)[-1]) - len(separator)


def _next_document(file: pa.NativeFile, cut: int, separator: bytes, size: int) -> int | None:
    """The first document from byte `cut` on where every reader sees one begin; None if none does.

    It begins after a separator that no earlier one overlaps: such a separator is found by any
    search from the left, wherever it starts, as long as it starts with a document.
    """
    if not cut:
        return 0
    if cut >= size:
        return None
    width = len(separator)
    earliest = max(0, cut - width)
    start = max(0, earliest - width + 1)
    window = b""
    chunk: bytes
    file.seek(start)
    while chunk := file.read(SEARCH_BYTES):
        window += chunk
        found: int = window.find(separator, earliest - start)
        while found >= 0:
            if window.find(separator, max(0, found - width + 1), found + width - 1) < 0:
                return start + found + width
            found = window.find(separator, found + 1)
        # Keep what a separator across the end can begin in, and what can overlap that one.
        earliest = max(earliest, start + len(window) - width + 1)
        dropped = max(0, earliest - start - width + 1)
        start, window = start + dropped, window[dropped:]
    return None
