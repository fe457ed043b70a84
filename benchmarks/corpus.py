"""Real text that every machine has: the Python sources of this interpreter and its packages."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# So that a file can be read by several processes, in parts of a size that Parquet is used with.
ROWS_OF_A_GROUP = 1000


def write_corpus(path: Path, megabytes: float) -> int:
    """Write at most so many megabytes of different documents as column `text`; returns bytes."""
    texts: list[str] = []
    total = 0
    for text in _sources():
        size = len(text.encode())
        if total + size > megabytes * 1e6:
            break
        texts.append(text)
        total += size
    pq.write_table(pa.table({"text": texts}), path, row_group_size=ROWS_OF_A_GROUP)
    return total


def _sources() -> Iterator[str]:
    """The documents that are UTF-8 and not empty, each once, in the same order every time."""
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
