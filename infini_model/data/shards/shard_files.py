"""The shard files of a split as arrays: mapped when they are used, and not all at the same time.

A training reads windows from all over a split, so shards stay mapped; but the kernel limits the
mappings of a process, and a split may have more shards than that. A pass over the lengths of all
documents, to count windows, maps nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import Shard
from infini_model.runtime.errors import DataError

# Linux allows a process 65,530 mappings (vm.max_map_count). A training has two splits open: with
# this many each, half of the mappings are left for everything else in the process.
MAX_MAPPED = 1 << 14
# How many lengths are in memory at once in a pass over all documents.
DOCUMENTS_AT_ONCE = 1 << 16
# More than the two headers in front of a shard's offsets, which take less than 1 KiB.
HEADER_BYTES = 1 << 14
AGAIN = "run the preprocess stage again"
# What Arrow and the system raise for a file that is damaged or cannot be read.
UNREADABLE = (OSError, EOFError, pa.ArrowException, StopIteration)


class ShardArrays(NamedTuple):
    """A shard: `values`, its tokens, and `offsets` int32 [documents + 1], where documents start.

    `prompts` int32 [documents] counts the tokens of each prompt; None if documents have none.
    """

    values: np.ndarray
    offsets: np.ndarray
    prompts: np.ndarray | None = None


class Layout(NamedTuple):
    """What a shard's header says: counts, the type of the tokens, and where the buffers begin.

    `prompts` is None if documents have no prompts.
    """

    documents: int
    tokens: int
    dtype: np.dtype
    offsets: int
    values: int
    prompts: int | None


class ShardFiles:
    """The shards in `folder` that a manifest lists, in its order.

    `documents` and `tokens`, int64 [shards], count those of each shard; `dtype` is the type of the
    tokens. A shard is mapped at its first use. It is unmapped once `max_mapped` others have been
    used since and none of its arrays are referred to. Several threads may read.

    `elsewhere`, bool [shards], marks shards that are not in the folder; these must not be read.

    Raises `DataError` if a file is missing or differs in size from the manifest or, when it is
    first used, in its number of documents or tokens.
    """

    distant = False

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        dtype: np.dtype,
        *,
        max_mapped: int = MAX_MAPPED,
        elsewhere: np.ndarray | None = None,
    ) -> None:
        # The records themselves are not kept: there may be a million of them.
        listed = _Listed(
            str(folder),
            [shard.file for shard in shards],
            np.array([shard.documents for shard in shards], np.int64),
            np.array([shard.tokens for shard in shards], np.int64),
        )
        for number, shard in enumerate(shards):
            if elsewhere is None or not elsewhere[number]:
                _check_size(listed.path(number), shard.bytes)
        self.documents = listed.documents
        self.tokens = listed.tokens
        self.dtype = dtype
        self._listed = listed
        self._largest = max((shard.bytes for shard in shards), default=0)
        # Not a method, as a cycle through the cache would keep all files mapped until the garbage
        # collector finds it.
        self._map = lru_cache(max_mapped)(partial(_map_listed, listed))

    def __getitem__(self, shard: int) -> ShardArrays:
        return self._map(shard)

    def offsets(self, shard: int) -> np.ndarray:
        """Where the documents of a shard start: int32 [documents + 1], a view of the file."""
        return self._map(shard).offsets

    def values(self, shard: int, first: int, last: int) -> np.ndarray:
        """Tokens `first` to `last` (exclusive) of a shard, a view of the file."""
        return self._map(shard).values[first:last]

    def prompts(self) -> Iterator[np.ndarray]:
        """The number of tokens of every prompt, in order, as an int32 array for each shard."""
        for shard in np.flatnonzero(self.documents).tolist():
            yield self.prompts_of(shard)

    def prompts_of(self, shard: int) -> np.ndarray:
        """The number of tokens of the prompt of each document of a shard: int32 [documents]."""
        found = self._map(shard).prompts
        if found is None:
            raise without_prompts(self._listed.path(shard))
        return found

    def keep_offsets(self) -> None:
        """Do nothing: the offsets are in the files."""

    def begin(self, starts: np.ndarray, length: int, pool: Executor | None = None) -> Self:  # noqa: ARG002
        """Do nothing: the operating system reads a file when its mapping is used."""
        return self

    def find(self, shard: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All tokens of a shard, a view of the file, and `places`, where they are in it."""
        return self._map(shard).values, places

    def lengths(self) -> Iterator[np.ndarray]:
        """The number of tokens of every document, in order, without mapping any shard.

        Yields int32 arrays of `DOCUMENTS_AT_ONCE` documents; the last one of each shard is shorter.
        """
        header = Header(self._largest)
        for shard in np.flatnonzero(self.documents).tolist():
            path = self._listed.path(shard)
            yield from _read_lengths(path, int(self.documents[shard]), header)


class _Listed(NamedTuple):
    """What a manifest says of the shards in `folder`."""

    folder: str
    files: list[str]
    documents: np.ndarray
    tokens: np.ndarray

    def path(self, shard: int) -> str:
        # No `Path`: making one takes longer than opening the file.
        return f"{self.folder}/{self.files[shard]}"


def _check_size(path: str, expected: int) -> None:
    try:
        # A third of the time of `Path.stat`, which matters for 100,000 shards.
        size = os.stat(path).st_size  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{path}: is missing; {AGAIN}") from error
    check_counts(path, "bytes", size, expected)


def check_counts(path: str, unit: str, found: int, expected: int) -> None:
    """Raise `DataError` if a shard, by its path or address, is not what the manifest says."""
    if found != expected:
        raise DataError(f"{path}: has {found} {unit}, the manifest says {expected}; {AGAIN}")


def _map_listed(listed: _Listed, shard: int) -> ShardArrays:
    path = listed.path(shard)
    arrays = map_shard(path)
    check_counts(path, "documents", len(arrays.offsets) - 1, int(listed.documents[shard]))
    check_counts(path, "tokens", len(arrays.values), int(listed.tokens[shard]))
    return arrays


def map_shard(path: Path | str) -> ShardArrays:
    """Tokens and document offsets of a shard file, memory-mapped without a copy.

    Raises `DataError` that names the file if it is not a shard.
    """
    try:
        # The mapping outlives the file descriptor, so that thousands of shards can be open.
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_stream(source).read_next_batch()
            column, prompts = _documents(batch), _prompts(batch)
    except UNREADABLE as error:
        raise not_a_shard(path, error) from error
    counts = None if prompts is None else prompts.to_numpy()
    values = column.values
    dtype = np.dtype(str(values.type))
    if not len(values):
        return ShardArrays(np.zeros(0, dtype), np.zeros(len(column) + 1, np.int32), counts)
    offsets = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1]
    return ShardArrays(np.frombuffer(values.buffers()[1], dtype)[: len(values)], offsets, counts)


def _documents(batch: pa.RecordBatch) -> pa.ListArray:
    """The first column of the only batch of a shard: the tokens of a document a row."""
    return batch.column(0)


def _prompts(batch: pa.RecordBatch) -> pa.Int32Array | None:
    """The second column, if there is one: the number of tokens of each document's prompt."""
    return batch.column(1) if batch.num_columns > 1 else None


def without_prompts(path: Path | str) -> DataError:
    """The error that names a shard without prompts in a dataset that has some."""
    return DataError(f"{path}: has no prompts, the manifest says it has; {AGAIN}")


def not_a_shard(path: Path | str, error: BaseException) -> DataError:
    """The error that names a shard, by its path or address, which cannot be read."""
    return DataError(f"{path}: is not a shard: {str(error).splitlines()[:1]}")


class Header:
    """Finds the offsets in a shard by reading nothing but its beginning.

    Arrow is given an address space of the size of the largest shard, of which only the beginning is
    ever filled. It parses the header, and the address of the offsets is their place in the file.
    Mapping and unmapping each shard instead takes three times as long.
    """

    def __init__(self, largest: int) -> None:
        self._space = mmap.mmap(-1, max(largest, HEADER_BYTES))
        self._buffer = pa.py_buffer(self._space)
        self._beginning = memoryview(self._space)[:HEADER_BYTES]
        self._schema: pa.Schema | None = None
        self._schema_bytes = b""

    def read(self, file: int) -> tuple[int, int]:
        """The number of documents in an open shard, and the place of its first offset."""
        os.preadv(file, [self._beginning], 0)
        column = _documents(self._batch())
        return len(column), self._place(column.buffers()[1])

    def layout(self, beginning: bytes) -> Layout:
        """The layout of a shard that begins with these bytes, at most `HEADER_BYTES`.

        Raises what Arrow raises if it is not a shard.
        """
        self._beginning[: len(beginning)] = beginning
        batch = self._batch()
        column, prompts = _documents(batch), _prompts(batch)
        values = column.values
        return Layout(
            len(column),
            len(values),
            np.dtype(str(values.type)),
            self._place(column.buffers()[1]),
            self._place(values.buffers()[1]),
            None if prompts is None else self._place(prompts.buffers()[1]),
        )

    def _place(self, buffer: pa.Buffer | None) -> int:
        """Where in the file a buffer begins; an empty one may be nowhere."""
        return buffer.address - self._buffer.address if buffer else 0

    def _batch(self) -> pa.RecordBatch:
        # Nearly always that of the shard before: to compare it takes a tenth of reading it.
        if self._schema is None or self._space[: len(self._schema_bytes)] != self._schema_bytes:
            source = pa.BufferReader(self._buffer)
            self._schema = pa.ipc.read_schema(source)
            self._schema_bytes = self._space[: source.tell()]
        return pa.ipc.read_record_batch(self._buffer[len(self._schema_bytes) :], self._schema)


def _read_lengths(path: str, documents: int, header: Header) -> Iterator[np.ndarray]:
    """The lengths of the `documents` documents of a shard."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            found, start = header.read(file)
            check_counts(path, "documents", found, documents)
            for first in range(0, documents, DOCUMENTS_AT_ONCE):
                offsets = np.empty(min(DOCUMENTS_AT_ONCE, documents - first) + 1, np.int32)
                read = os.preadv(file, [offsets.data], start + first * offsets.itemsize)
                check_counts(path, "bytes of offsets", read, offsets.nbytes)
                # A third of the time of `np.diff` on a small shard.
                yield offsets[1:] - offsets[:-1]
        finally:
            os.close(file)
    except UNREADABLE as error:
        raise not_a_shard(path, error) from error
