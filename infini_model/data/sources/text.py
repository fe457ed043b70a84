"""Texts from bytes: valid UTF-8 in Arrow string arrays, and documents with a separator.

The documents of a file are those of `whole.split(separator)`, where a line may end with a carriage
return. A file can be cut anywhere into ranges of bytes that are read apart: the cuts move to the
next separator that a reader from the start of the file would find as well, so that together the
ranges hold each document exactly once.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import logging
import math
import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.config import SplitsConfig
from infini_model.data.sources.files import FileRange
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# Offsets into an Arrow string array, or a list array, are signed 32-bit integers.
MAX_OFFSET = (1 << 31) - 1
SEARCH_BYTES = 1 << 18
# Arrow's and HTTP's names of what `FileRange.codec` names.
CODECS = {"gz": "gzip", "zst": "zstd"}
ADVICE = "data.source.errors takes skip or replace"
Errors = Literal["fail", "skip", "replace"]
NEWLINE, RETURN = b"\n\r"
# What Windows programs write in front of UTF-8, and of UTF-16, which is not read.
MARK, WIDE = codecs.BOM_UTF8, (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Of the documents that are left out, the first are named; all are counted elsewhere.
NAMED = 3
_left_out = itertools.count()


class Block(NamedTuple):
    """Whole documents with the separators between them; `start` is their place in the file."""

    start: int
    data: bytes


def string_buffers(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """The buffers of a string array, without a copy: offsets int32 [n + 1] into bytes uint8."""
    if not len(texts):
        return np.zeros(1, np.int32), np.zeros(0, np.uint8)
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset :][: len(texts) + 1]
    return bounds, np.frombuffer(data or b"", np.uint8)


def hash_documents(texts: pa.StringArray) -> np.ndarray:
    """Content hashes, uint64 [n, 2]: the first 16 bytes of the SHA-256 of each document's UTF-8.

    The high word comes first.
    """
    offsets, buffer = string_buffers(texts)
    data, sha256 = buffer.data, hashlib.sha256
    # With the processor's SHA instructions it is twice as fast as hashes designed for speed.
    digests = b"".join(
        [sha256(data[start:end]).digest() for start, end in pairwise(offsets.tolist())]
    )
    return np.frombuffer(digests, ">u8").reshape(-1, 4)[:, :2].astype(np.uint64)


def splits_of(hashes: np.ndarray, splits: SplitsConfig) -> np.ndarray:
    """The split of each hash, by its last bits: int64 [n], 0 train, 1 validation, 2 test."""
    place = (hashes[:, 1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    validation_ends = 1.0 if splits.test == 0.0 else splits.train + splits.validation
    return (place >= splits.train).astype(np.int64) + (place >= validation_ends)


def one_row(data: bytes) -> pa.BinaryArray:
    """An array of one row that shares the memory of `data`, of at most `MAX_OFFSET` bytes."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(data)])


def as_text(rows: pa.BinaryArray) -> pa.StringArray | None:
    """Rows of bytes as strings, without a copy; None if one of them is not UTF-8."""
    texts = rows.view(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return texts


def decode(data: bytes, errors: Errors, start: int = 0) -> str | None:
    """The text of `data`, which begins at byte `start`, or None to skip it.

    Raises `DataError` that tells the byte, but not of which document.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "fail":
            reason = f"{error.reason} at byte {start + error.start}"
            raise DataError(f"is not UTF-8: {reason}; {ADVICE}") from error
    return data.decode("utf-8", "replace") if errors == "replace" else None


def text_of(value: Any, what: str, errors: Errors) -> str | None:
    """The text of a field, a string or bytes; None if it is null or skipped.

    JSON can spell lone surrogates, but UTF-8 cannot. Raises `DataError` that tells what is wrong
    with `what`, the field, but not of which document.
    """
    if isinstance(value, bytes):
        return decode(value, errors)
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"{what} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "fail":
            reason = f"a lone surrogate at character {error.start}"
            raise DataError(f"is not UTF-8: {reason}; {ADVICE}") from error
        if errors == "skip":
            return None
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def documents_in(
    block: Block, separator: str | None, errors: Errors, address: str
) -> pa.StringArray:
    """The documents of a text file in a block, null where one is skipped; without separator, one.

    Byte-order marks at the start of a line are dropped, so that files can be joined. Raises
    `DataError` that names the file and the byte.
    """
    data, rows = block.data, one_row(block.data)
    plain = None if separator is None else separator.replace("\r\n", "\n")
    has_crlf = plain is not None and "\n" in plain and b"\r" in data
    if not has_crlf and b"\0" not in data and MARK not in data:
        if plain is not None:
            rows = pc.split_pattern(rows, pattern=plain).flatten()
        if (texts := as_text(rows)) is not None:
            return texts
    documents: list[str | None] = []
    separators = [] if plain is None else [*_separators(data, plain.encode())]
    for (_, start), (end, _) in pairwise([(0, 0), *separators, (len(data), 0)]):
        is_binary = (nul := data.find(0, start, end)) >= 0
        if is_binary and errors != "skip":
            reason = f"is binary or UTF-16, not UTF-8: it has a NUL at byte {block.start + nul}"
            raise DataError(f"{address}: {reason}")
        try:
            text = None if is_binary else decode(data[start:end], errors, block.start + start)
        except DataError as error:
            raise DataError(f"{address}: {error}") from error
        if text is None and next(_left_out) < NAMED:
            log.warning("%s: a document is left out, as it is not UTF-8", address)
        documents.append(text and text.replace("\n\ufeff", "\n").removeprefix("\ufeff"))
    return pa.array(documents, pa.string())


def read_blocks(
    file: pa.NativeFile, part: FileRange, separator: bytes, chunk_bytes: int
) -> Iterator[Block]:
    """The documents that begin in a range, in blocks of about `chunk_bytes` or one document.

    The blocks, each split at its separators, are the documents. A compressed file is read whole.
    Lines of the separator and of the file may end with CRLF.

    Raises `DataError` if a document is too long, `OSError` if the file cannot be read.
    """
    content = decompressed(file, part.codec)
    separator, first, left = separator.replace(b"\r\n", b"\n"), 0, math.inf
    if content is file:
        size = part.file.bytes
        begins = _next_document(file, part.start, separator, size)
        after = None if part.stop is None else _next_document(file, part.stop, separator, size)
        if begins is None or begins == after:
            return
        first, left = begins[1], math.inf if after is None else after[0] - begins[1]
        file.seek(first)
    yield from _split(chunks(content, left, chunk_bytes), first, separator, part.file.address)


def decompressed(file: pa.NativeFile, codec: str) -> pa.NativeFile:
    """The content from its start: `file` itself if `codec` is empty.

    What decompresses it closes `file` when it is deleted.
    """
    file.seek(0)
    if not codec:
        return file
    # Arrow decompresses 64 KiB at a time, which would be as many requests to a remote store.
    return pa.CompressedInputStream(pa.BufferedInputStream(file, 1 << 20), CODECS[codec])


def chunks(file: pa.NativeFile, count: float, chunk_bytes: int) -> Iterator[bytes]:
    """The next `count` bytes of a file, or fewer at its end."""
    while count and (chunk := file.read(min(count, chunk_bytes))):
        count -= len(chunk)
        yield chunk


def _split(chunks: Iterator[bytes], start: int, separator: bytes, address: str) -> Iterator[Block]:
    """Chunks of a file from byte `start` on, where a document begins, as blocks."""
    pattern, width = _pattern(separator)
    pending = bytearray()
    for chunk in chunks:
        if len(pending) + len(chunk) > MAX_OFFSET:
            raise DataError(
                f"{address}: the document at byte {start} has more than {len(pending)} bytes; "
                f"a document has at most {MAX_OFFSET}"
            )
        searched = max(0, len(pending) - width + 1)
        pending += chunk
        if pattern.search(pending, searched):
            end, begin = _last_separator(pending, separator)
            yield Block(start, bytes(memoryview(pending)[:end]))
            pending = pending[begin:]
            start += begin
    yield Block(start, bytes(pending))


def _pattern(separator: bytes) -> tuple[re.Pattern[bytes], int]:
    """The pattern of a separator whose lines end with LF or CRLF, and the most bytes it has.

    It leaves out a first carriage return, as what begins with a literal is found much faster.
    """
    pattern = re.escape(separator).replace(b"\\\n", b"\\r?\\n").removeprefix(b"\\r?")
    return re.compile(pattern), len(separator) + separator.count(b"\n")


def _end_before(data: bytes | bytearray, found: re.Match[bytes]) -> int:
    """The end of the document that a separator follows."""
    begin = found.start()
    return begin - (begin > 0 and data[begin] == NEWLINE and data[begin - 1] == RETURN)


def _separators(data: bytes | bytearray, separator: bytes) -> Iterator[tuple[int, int]]:
    """The end of the document before each separator, and the start of the next one."""
    for found in _pattern(separator)[0].finditer(data):
        yield _end_before(data, found), found.end()


def _last_separator(data: bytearray, separator: bytes) -> tuple[int, int]:
    """The last one of `_separators`."""
    overlaps = any(separator.startswith(separator[-width:]) for width in range(1, len(separator)))
    if overlaps or RETURN in data:
        return deque(_separators(data, separator), maxlen=1)[0]
    return (end := data.rindex(separator)), end + len(separator)


def _next_document(
    file: pa.NativeFile, cut: int, separator: bytes, size: int
) -> tuple[int, int] | None:
    """The separator before the first document from byte `cut` on where every reader sees one begin.

    Where the document before it ends, and where that one begins; None if none does. No earlier
    separator overlaps it: so it is found by any search from the left, wherever it starts, as long
    as it starts with a document.
    """
    if not cut or cut >= size:
        return None if cut else (0, 0)
    pattern, width = _pattern(separator)
    earliest = max(0, cut - width)
    start = max(0, earliest - width)
    window = b""
    chunk: bytes
    file.seek(start)
    while chunk := file.read(SEARCH_BYTES):
        window += chunk
        place = earliest - start
        while found := pattern.search(window, place):
            place, end = found.start() + 1, found.end()
            overlapping = pattern.search(window, max(0, place - width), end - 1)
            if start + end >= cut and not overlapping:
                return start + _end_before(window, found), start + end
        # Keep what a separator across the end can begin in, and what can overlap that one.
        earliest = max(earliest, start + len(window) - width + 1)
        dropped = max(0, earliest - start - width)
        start, window = start + dropped, window[dropped:]
    return None
