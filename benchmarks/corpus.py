"""A corpus available on every machine: the Python sources of this interpreter and its packages."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Small enough that several processes each get a file, with row groups of a typical size.
FILE_BYTES = 25e6
ROWS_OF_A_GROUP = 1000


def write_corpus(folder: Path, megabytes: float, copies: int = 1) -> int:
    """Write up to `megabytes` of distinct documents to Parquet files with a column `text`.

    With several `copies`, a first line makes the documents of each copy distinct. Returns the bytes
    of text.
    """
    folder.mkdir(parents=True)
    total = 0
    for copy in range(copies):
        written = 0
        for number, texts in enumerate(_files(megabytes * 1e6)):
            if copy:
                texts = [f"# Copy {copy}\n{text}" for text in texts]
            path = folder / f"{copy:02d}-{number:03d}.parquet"
            pq.write_table(pa.table({"text": texts}), path, row_group_size=ROWS_OF_A_GROUP)
            written += sum(len(text.encode()) for text in texts)
        total += written
    return total


def _files(most: float) -> Iterator[list[str]]:
    """The documents of each file."""
    texts: list[str] = []
    total = waiting = 0
    for text in _sources():
        size = len(text.encode())
        if total + size > most:
            break
        texts.append(text)
        total += size
        waiting += size
        if waiting > FILE_BYTES:
            yield texts
            texts, waiting = [], 0
    if texts:
        yield texts


def _sources() -> Iterator[str]:
    """The non-empty UTF-8 documents, deduplicated, in a fixed order."""
    seen: set[bytes] = set()
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            data = path.read_bytes()
            content = hashlib.sha256(data).digest()
            if not data or content in seen:
                continue
            seen.add(content)
            try:
                yield data.decode()
            except UnicodeDecodeError:
                continue
