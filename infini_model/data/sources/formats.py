"""The formats of files, and documents from files of any of them as Arrow strings in batches.

A document is a text, or a conversation in pieces. Every format becomes one stream of `pyarrow`
string arrays of bounded size, without nulls or empty documents, so that no later code depends on
where a document came from. What cannot be read raises `DataError` that names the file and the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.files import (
    FileRange,
    SourceFile,
    file_errors,
    open_source,
    read_source,
)
from infini_model.data.sources.rows import (
    BATCH_DOCUMENTS,
    Reading,
    read_csv,
    read_json,
    read_json_lines,
    read_parquet,
)
from infini_model.data.sources.text import (
    MAX_OFFSET,
    WIDE,
    Block,
    chunks,
    decompressed,
    documents_in,
    read_blocks,
)
from infini_model.runtime.errors import DataError

BATCH_BYTES = 4 << 20
Cut: TypeAlias = Literal["bytes", "row groups", "whole"]
Reader: TypeAlias = Callable[[pa.NativeFile, FileRange, Reading, int], Iterator[pa.Array]]


def _read_text(
    file: pa.NativeFile, part: FileRange, reading: Reading, batch_bytes: int
) -> Iterator[pa.Array]:
    """The documents of a text: one, unless `reading.separator` divides it."""
    address, separator, errors = part.file.address, reading.separator, reading.errors
    if separator is not None:
        for block in read_blocks(file, part, separator.encode(), batch_bytes):
            yield documents_in(block, separator, errors, address)
        return
    content = b"".join(chunks(decompressed(file, part.codec), MAX_OFFSET + 1, batch_bytes))
    if len(content) > MAX_OFFSET:
        raise DataError(f"{address}: is a document of more than {MAX_OFFSET} bytes")
    yield documents_in(Block(0, content), None, errors, address)


class Format(NamedTuple):
    """A format of files, with their suffixes in lower case.

    `cut` is the unit of ranges; a file that is compressed is read whole, unless it has row groups.
    `read` gives the rows of a range, as `read_range` does.
    """

    suffixes: tuple[str, ...]
    cut: Cut
    read: Reader


TEXTS = (".txt", ".text", ".md", ".rst", ".adoc", ".org", ".tex")
CODE = (
    *(".py", ".pyi", ".r", ".jl", ".m", ".lua", ".pl", ".rb", ".php", ".sh", ".bash", ".ps1"),
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".cs", ".f90", ".asm"),
    *(".go", ".rs", ".zig", ".swift", ".java", ".kt", ".scala", ".clj", ".ex", ".erl", ".hs"),
    *(".ml", ".dart", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".vue", ".html", ".css", ".sql"),
)
FORMATS: dict[str, Format] = {
    "text": Format((*TEXTS, *CODE), "bytes", _read_text),
    "jsonl": Format((".jsonl", ".ndjson"), "bytes", read_json_lines),
    "json": Format((".json",), "whole", read_json),
    "csv": Format((".csv",), "whole", functools.partial(read_csv, delimiter=",")),
    "tsv": Format((".tsv",), "whole", functools.partial(read_csv, delimiter="\t")),
    "parquet": Format((".parquet",), "row groups", read_parquet),
}
# Text for each byte of a file that is compressed as a whole.
EXPANSION = 4
COMPRESSED = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}


class DocumentBatch(NamedTuple):
    """Documents of one or several files: no nulls, none empty, `texts` valid UTF-8.

    Document i is the texts from `edges[i]` to `edges[i + 1]`, of int64 [documents + 1]: one, or the
    pieces of a conversation, some of which may be empty. `skipped` counts the documents that were
    left out since the batch before.
    """

    texts: pa.StringArray
    edges: np.ndarray
    skipped: int


@functools.lru_cache(1 << 16)  # asked again once the file is listed
def format_of(name: str, given: str | None = None) -> str:
    """The format of a file as `FileRange.format` has it; empty if it is not supported.

    It is `given`, or told by the suffix; the codec of a compressed file is always told by that.
    """
    codec, stem = codec_of(name), name.lower()
    stem = stem.rpartition(".")[0] if codec else stem
    kind = given or next((k for k, each in FORMATS.items() if stem.endswith(each.suffixes)), "")
    if not codec or not kind:
        return kind
    return "" if kind == "parquet" else f"{kind}.{codec}"  # which compresses its columns


def codec_of(name: str) -> str:
    """The codec of a compressed file, as `FileRange.codec` has it; empty for any other."""
    return COMPRESSED.get(name[name.rfind(".") :].lower(), "")


def check_format(name: str, given: str | None, address: str | None = None) -> None:
    """Raise `DataError` if the format of `name` is not supported; `address` says where it is."""
    if not format_of(name, given):
        known = " ".join(each.suffixes[0] for each in FORMATS.values())
        raise DataError(
            f"{address or name}: unsupported format; supported: {known}, source code, and all but "
            ".parquet also as .gz or .zst; for other suffixes set data.source.format"
        )


def whole_file(file: SourceFile, given: str | None = None) -> FileRange:
    """All of a file, which has a supported format."""
    return FileRange(file=file, format=format_of(file.address, given))


def cut_of(part: FileRange, reading: Reading) -> Cut:
    """The unit by which a file can be divided."""
    if part.codec or (part.kind == "text" and reading.separator is None):
        return "whole"
    return FORMATS[part.kind].cut


def text_of_file(part: FileRange) -> int:
    """Estimate the bytes of text in a whole file by its size."""
    return part.file.bytes * (EXPANSION if part.codec else 1)


def content_of(part: FileRange) -> str:
    """The identity of the documents of a range, besides the settings: neither name nor place."""
    # Marks and line ends of texts were once read otherwise.
    suffix = " marks" if part.kind == "text" else ""
    return f"{bytes_of(part)}{suffix}"


def bytes_of(part: FileRange) -> str:
    """The identity of the bytes of a range and of their format, however they are read."""
    return f"{part.file.fingerprint} {part.format} {part.start} {part.stop} {part.rows}"


def read_documents(
    ranges: Iterable[FileRange], reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[DocumentBatch]:
    """The documents of ranges of files, in order, in batches of about `batch_bytes`.

    Small files share a batch. A batch may be empty, so that `skipped` adds up.

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
    part: FileRange, reading: Reading, batch_bytes: int = BATCH_BYTES
) -> Iterator[pa.Array]:
    """The rows of a range, in arrays of about `batch_bytes` and at most `BATCH_DOCUMENTS` rows.

    They are strings or, with `reading.conversations`, lists of strings. A row is null if it has no
    text or is skipped. Only a single row need fit into memory.

    Raises `DataError` that names the file and the row, `pa.ArrowException` and `OSError` where
    the file is damaged or missing.
    """
    address = part.file.address
    if part.format == "text" and reading.separator is None:
        size = part.file.bytes
        if size > MAX_OFFSET:
            raise DataError(f"{address}: has {size} bytes; a document has at most {MAX_OFFSET}")
        yield documents_in(Block(0, read_source(part.file)), None, reading.errors, address)
        return
    with open_source(part.file, part.whole) as file:
        if part.kind in ("jsonl", "json", "csv", "tsv") and file.read(2) in WIDE:
            raise DataError(f"{address}: is UTF-16, not UTF-8: convert it by iconv -f utf-16")
        for rows in FORMATS[part.kind].read(file, part, reading, batch_bytes):
            for start in range(0, len(rows), BATCH_DOCUMENTS):
                yield rows[start : start + BATCH_DOCUMENTS]
