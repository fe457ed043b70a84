"""A corpus available on every machine: the Python sources of this interpreter and its packages.

And its shards, made with this project's pipeline.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.config import DataConfig
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources

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
                texts = _distinct(texts, copy)
            write_parquet(folder / f"{copy:02d}-{number:03d}.parquet", texts)
            written += sum(len(text.encode()) for text in texts)
        total += written
    return total


def write_parquet(path: Path, texts: Sequence[str], rows_of_a_group: int = ROWS_OF_A_GROUP) -> None:
    """Write documents to a Parquet file."""
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rows_of_a_group)


def write_as_json_lines(corpus: Path, folder: Path) -> None:
    """Write each Parquet file of `corpus` as JSON lines."""
    folder.mkdir(parents=True)
    for path in sorted(corpus.glob("*.parquet")):
        with (folder / f"{path.stem}.jsonl").open("w", encoding="utf-8") as file:
            for text in pq.read_table(path)["text"].to_pylist():
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def write_as_texts(corpus: Path, folder: Path) -> None:
    """Write each document of the Parquet files of `corpus` to a text file of its own."""
    folder.mkdir(parents=True)
    for number, text in enumerate(pq.read_table(corpus)["text"].to_pylist()):
        (folder / f"{number:06d}.txt").write_bytes(text.encode())


def text_to_shards(
    corpus: Path, spec: str, folder: Path, pattern: str = "*.parquet", device: str = "cpu"
) -> None:
    """Make shards of the files in `corpus` with the tokenizer `spec`, in `folder`."""
    source, tokenizer = {"paths": [str(corpus / pattern)]}, {"spec": spec}
    config = DataConfig.model_validate({"source": source, "tokenizer": tokenizer, "device": device})
    build_dataset(list_sources(config, folder), config, folder / "datasets")


def documents_of_size(size: float) -> Iterator[list[str]]:
    """Lists of about `size` bytes of distinct documents each, without end."""
    for copy in itertools.count():
        texts: list[str] = []
        left = size
        for text in _sources():
            texts.append(text)
            left -= len(text.encode())
            if left <= 0:
                yield _distinct(texts, copy)
                texts, left = [], size


def _distinct(texts: Iterable[str], copy: int) -> list[str]:
    return [f"# Copy {copy}\n{text}" for text in texts]


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
