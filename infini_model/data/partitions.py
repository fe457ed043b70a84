"""Partitions: the parts of a source that are tokenised by themselves, and kept by content.

The files of a source are divided by a pure function of the set of files.

A file with more text than a partition may have is cut into ranges, each a partition of its own.
The others are gathered by a hash of their fingerprints: a group whose files outgrow a partition is
divided by the next bit of the hash. So a file more, or less, touches the group that it falls into
and nothing else, and neither the names nor the order of the files matter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from infini_model.config import SplitsConfig
from infini_model.data.manifest import FORMAT_VERSION, Shard, Split, TokenizerRecord
from infini_model.data.sources.files import FileRange, SourceFile, file_errors, open_source
from infini_model.data.sources.formats import (
    bytes_of,
    content_of,
    cut_of,
    text_of_file,
)
from infini_model.data.sources.rows import Reading, text_bytes, text_columns
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.records import Record

HASH_BITS = 256
FOOTERS_AT_ONCE = 16
FOOTER_ENDS = 8  # bytes of a Parquet file that follow its footer: the length of that, a magic word
# Consecutive row groups of a Parquet file: where they stop, their rows and their bytes of text.
_Groups: TypeAlias = tuple[int, int, int]


class Partition(NamedTuple):
    """Files, or a range of one, and an estimate of the bytes of their text."""

    ranges: tuple[FileRange, ...]
    bytes: int


class PartitionSpec(Record):
    """What decides a partition, and its `key`.

    `bytes`, an estimate of the text, changes nothing in the result.
    """

    key: str
    ranges: tuple[FileRange, ...]
    reading: Reading
    tokenizer: TokenizerRecord
    splits: SplitsConfig
    bytes: int


class PartitionRecord(Record):
    """A finished partition: its documents, the bytes of their text, and the shards of each split.

    `skipped` counts the documents that were left out.
    """

    documents: int
    bytes: int
    skipped: int
    shards: dict[Split, list[Shard]]

    def files(self) -> Iterator[Shard]:
        """The shards of all splits."""
        for shards in self.shards.values():
            yield from shards


class CommonSpec(NamedTuple):
    """The part of a `PartitionSpec` that all partitions of a source share, under its names."""

    reading: Reading
    tokenizer: TokenizerRecord
    splits: SplitsConfig

    def keyed(self, partitions: Sequence[Partition]) -> list[tuple[str, Partition]]:
        """The partitions with their keys, in the order of these.

        A key is a hash of exactly what decides the content: not of paths, nor of the files' order.
        """
        common = [FORMAT_VERSION, self.tokenizer.fingerprint, self.tokenizer.eos_token_id]
        common += [self.splits.model_dump(), self.reading.decides]
        if self.tokenizer.bos_token_id is not None:
            common += [self.tokenizer.bos_token_id]
        prefix = storage.content_key(common)
        contents = (sorted(map(content_of, partition.ranges)) for partition in partitions)
        keys = [storage.content_key([prefix, content])[:32] for content in contents]
        return sorted(zip(keys, partitions, strict=True), key=itemgetter(0))


def plan_partitions(
    ranges: Sequence[FileRange], reading: Reading, target_bytes: int, facts: FactCache
) -> list[Partition]:
    """The partitions of these files, of about `target_bytes` of text each.

    Of a Parquet file the footer is read, unless it is among the facts. Raises `DataError` that
    names a file that cannot be read or has no such column.
    """
    for part in ranges:
        if reading.conversations is not None and part.kind == "text":
            raise DataError(f"{part.file.address}: is text; data.source.pairs takes files of rows")
    parquet = [part.file for part in ranges if cut_of(part, reading) == "row groups"]
    groups = _all_groups(parquet, reading, target_bytes, facts)
    partitions: list[Partition] = []
    small: list[tuple[FileRange, int]] = []
    for part in ranges:
        pieces = list(_pieces(part, reading, target_bytes, groups))
        if len(pieces) > 1 or text_of_file(part) > target_bytes:
            partitions += [Partition((piece,), size) for piece, size in pieces]
        else:
            small += pieces
    return partitions + list(bucket_small_files(small, target_bytes))


def _pieces(
    part: FileRange,
    reading: Reading,
    target_bytes: int,
    groups: dict[str, list[_Groups]],
) -> Iterator[tuple[FileRange, int]]:
    """A file cut into ranges, each with the bytes of its text; some formats cannot be cut."""
    file, cut = part.file, cut_of(part, reading)
    if cut == "row groups":
        start, left = 0, math.inf if part.rows is None else part.rows
        for stop, rows, size in groups[file.fingerprint]:
            if left > 0:
                place = {"start": start, "stop": stop, "rows": left if left < rows else None}
                yield part.model_copy(update=place), size
            start, left = stop, left - rows
    elif cut == "bytes":
        for start in range(0, max(1, file.bytes), target_bytes):
            stop = start + target_bytes
            last = stop >= file.bytes
            piece = part.model_copy(update={"start": start, "stop": None if last else stop})
            yield piece, min(stop, file.bytes) - start
    else:
        yield part, text_of_file(part)


def _all_groups(
    files: Sequence[SourceFile], reading: Reading, target_bytes: int, facts: FactCache
) -> dict[str, list[_Groups]]:
    """The row groups of Parquet files, by fingerprint, gathered to about `target_bytes`."""
    columns = reading.column if reading.conversations is None else "a conversation"
    keys = {
        file.fingerprint: f"row groups {file.fingerprint} {columns} {target_bytes}"
        for file in files
    }
    new = {file.fingerprint: file for file in files if facts.get(keys[file.fingerprint]) is None}
    read = partial(_groups, reading=reading, target_bytes=target_bytes)
    with ThreadPoolExecutor(max_workers=FOOTERS_AT_ONCE) as pool:
        for fingerprint, found in zip(new, pool.map(read, new.values()), strict=True):
            facts.put(keys[fingerprint], found)
    return {fingerprint: facts.get(key) or [] for fingerprint, key in keys.items()}


def _groups(file: SourceFile, reading: Reading, target_bytes: int) -> list[_Groups]:
    """The row groups of one file, gathered to about `target_bytes`; reads its footer."""
    import pyarrow.parquet as pq

    with file_errors(file.address), open_source(file, whole=False) as opened:
        metadata = pq.read_metadata(opened)
        columns = text_columns(file.address, metadata.schema.to_arrow_schema(), reading)
        opened.seek(file.bytes - FOOTER_ENDS)
        # A signature behind the footer: columns are encrypted, of which only reading them can tell.
        is_signed = int.from_bytes(opened.read(4), "little") != metadata.serialized_size
        if is_signed and metadata.num_row_groups:
            whole = pq.ParquetFile(opened, pre_buffer=False, buffer_size=1 << 12)
            for column in columns:
                with file_errors(f"{file.address}: column {column!r}"):
                    next(whole.iter_batches(1, row_groups=[0], columns=[column]), None)
    gathered: list[_Groups] = []
    rows = size = 0
    for number in range(metadata.num_row_groups):
        rows += metadata.row_group(number).num_rows
        size += text_bytes(metadata, number, reading)
        if size >= target_bytes or number == metadata.num_row_groups - 1:
            gathered.append((number + 1, rows, size))
            rows = size = 0
    return gathered


def bucket_small_files(
    small: Sequence[tuple[FileRange, int]], target_bytes: int
) -> Iterator[Partition]:
    """Files that are not cut, in groups of at most `target_bytes` unless a group is one file."""
    hashes = (hashlib.sha256(bytes_of(part).encode()).digest() for part, _ in small)
    hashed = [(int.from_bytes(each), *part) for each, part in zip(hashes, small, strict=True)]
    pending = [(sorted(hashed, key=lambda member: member[0]), HASH_BITS)]
    while pending:
        members, bits = pending.pop()
        total = sum(size for _, _, size in members)
        if not bits or len(members) < 2 or total <= target_bytes:
            if members:
                yield Partition(tuple(part for _, part, _ in members), total)
            continue
        bit = 1 << (bits - 1)
        pending.append(([member for member in members if member[0] & bit], bits - 1))
        pending.append(([member for member in members if not member[0] & bit], bits - 1))
