"""The token stream of a split: its shards, one after the other, read like a single array.

A training reads windows from all over a split, so shards stay mapped; but the kernel limits the
mappings of a process, and a split may have more shards than that. A pass over the lengths of all
documents, to count windows, maps nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import (
    AGAIN,
    PARTITIONS,
    SPLITS,
    Shard,
    array_starts,
    has_own_shards,
    read_manifest,
)
from infini_model.runtime.errors import DataError

# Linux allows a process 65,530 mappings (vm.max_map_count). A training has two splits open: with
# this many each, half of the mappings are left for everything else in the process.
MAX_MAPPED = 1 << 14
# How many lengths are in memory at once in a pass over all documents.
DOCUMENTS_AT_ONCE = 1 << 16
# How many hashes are, 128 MiB, to count equal ones.
MOST_HASHES = 1 << 24


class ShardArrays(NamedTuple):
    """A shard: `values`, its tokens, and `offsets` int32 [documents + 1], where documents start.

    `learnt` uint8 [tokens / 8] has a bit for each token of conversations, the lowest first; it is
    empty if documents are none, of which all tokens are learned.
    """

    values: np.ndarray
    offsets: np.ndarray
    learnt: np.ndarray

    def learnt_at(self, places: np.ndarray) -> np.ndarray:
        """Whether the tokens at these places are learned: bool."""
        if not len(self.learnt):
            return np.ones(places.shape, bool)
        bits: np.ndarray = self.learnt[places >> 3] >> (places & 7) & 1
        return bits.astype(bool)


class _Listed(NamedTuple):
    """What a manifest says of the shards in `folder`; of the records only what is needed is kept.

    There may be a million of them. `sizes` int64 [3, shards] are the documents and the tokens of
    each, and where its arrays begin; `conversations` bool [shards], whether those tell what is
    learned.
    """

    folder: str
    files: list[str]
    dtype: np.dtype
    sizes: np.ndarray
    conversations: np.ndarray

    def path(self, shard: int) -> str:
        # No `Path`: making one takes longer than opening the file.
        return f"{self.folder}/{self.files[shard]}"

    def map(self, shard: int) -> ShardArrays:
        """The arrays of a shard, memory-mapped without a copy.

        Raises `DataError` that names the file if it is missing or not the shard in the manifest.
        """
        path = self.path(shard)
        documents, tokens, start = self.sizes[:, shard].tolist()
        offsets, values, learnt = array_starts(start, documents, tokens, self.dtype.itemsize)
        try:
            # The mapping outlives the file descriptor, so that thousands of shards can be open.
            with pa.memory_map(path) as file:
                mapped = file.read_buffer()
            arrays = ShardArrays(
                np.frombuffer(mapped, self.dtype, tokens, values),
                np.frombuffer(mapped, np.int32, documents + 1, offsets),
                np.frombuffer(mapped, np.uint8, -(-tokens // 8), learnt)
                if self.conversations[shard]
                else np.zeros(0, np.uint8),
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: is not the shard in the manifest: {error}; {AGAIN}"
            ) from error
        _check_ends(path, (int(arrays.offsets[0]), int(arrays.offsets[-1])), tokens)
        return arrays


def _check_ends(path: str, ends: tuple[int, int], tokens: int) -> None:
    """Raise `DataError` unless the documents of a shard begin at 0 and end with its tokens."""
    if ends != (0, tokens):
        raise DataError(
            f"{path}: is not the shard in the manifest: its documents have tokens {ends[0]} to "
            f"{ends[1]}, the manifest says 0 to {tokens}; {AGAIN}"
        )


class TokenStream:
    """Consecutive shards in `folder`, of which `files` has the names, read on demand.

    A shard is mapped at its first use. It is unmapped once `max_mapped` others have been used since
    and none of its arrays are referred to. Several threads may read.

    Attributes:
        dtype: The type of the tokens.
        eos_token_id: The token that ends each document.
        conversations: Whether some documents are conversations, of which not every token is
            learned.
        sources: The shards of each source, by its name; all of them if the source has none.
        token_starts: int64 [shards + 1], tokens before each shard, and in all.
        document_starts: int64 [shards + 1], documents before each shard, and in all.

    Raises `DataError` if a file is missing or differs in size from the manifest or, when it is
    first used, is not the shard in it.
    """

    def __init__(
        self,
        folder: Path | str,
        files: Sequence[str],
        shards: Sequence[Shard],
        dtype: np.dtype,
        eos_token_id: int,
        *,
        sources: Mapping[str, slice] | None = None,
        conversations: Collection[str] = (),
        max_mapped: int = MAX_MAPPED,
    ) -> None:
        self.dtype = dtype
        self.eos_token_id = eos_token_id
        self.sources = sources or {"": slice(0, len(shards))}
        self.conversations = bool(conversations)
        of_turns = np.zeros(len(shards), bool)
        for name in conversations:
            of_turns[self.sources[name]] = True
        names = ("documents", "tokens", "start")
        sizes = np.array([[getattr(shard, name) for shard in shards] for name in names], np.int64)
        self._listed = listed = _Listed(str(folder), list(files), dtype, sizes, of_turns)
        for number, shard in enumerate(shards):
            _check_size(listed.path(number), shard.bytes)
        self.document_starts, self.token_starts = map(_starts, sizes[:2])
        # Not a method, as a cycle through the cache would keep all files mapped until the garbage
        # collector finds it.
        self.shard: Callable[[int], ShardArrays] = lru_cache(max_mapped)(listed.map)

    def sizes(self, shards: slice) -> tuple[int, int]:
        """Count the tokens and the documents of consecutive shards."""
        starts = (self.token_starts, self.document_starts)
        tokens, documents = (int(each[shards.stop] - each[shards.start]) for each in starts)
        return tokens, documents

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream."""
        return int(self.token_starts[-1])

    @property
    def documents(self) -> int:
        """Number of documents in the stream."""
        return int(self.document_starts[-1])

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document with those that begin and end it."""
        shard, first, last = self._bounds(index)
        return shard.values[first:last]

    def learnt_of(self, index: int) -> np.ndarray:
        """Which tokens of one conversation are learned: bool [tokens]."""
        shard, first, last = self._bounds(index)
        return shard.learnt_at(np.arange(first, last))

    def _bounds(self, index: int) -> tuple[ShardArrays, int, int]:
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        number = int(np.searchsorted(self.document_starts, index, side="right")) - 1
        shard = self.shard(number)
        first, last = shard.offsets[index - self.document_starts[number] :][:2]
        return shard, int(first), int(last)

    def lengths(self, shards: slice = slice(None)) -> Iterator[np.ndarray]:
        """The number of tokens of every document of some shards, in order, without mapping any.

        Yields int32 arrays of `DOCUMENTS_AT_ONCE` documents; the last one of each shard is shorter.
        """
        listed, documents = self._listed, self._listed.sizes[0]
        numbers = np.arange(len(documents))[shards]
        for shard in numbers[documents[shards] > 0].tolist():
            yield from _read_lengths(listed.path(shard), *listed.sizes[:, shard].tolist())

    def content_hashes(self) -> Iterator[np.ndarray]:
        """8 bytes of the hash of every text, in order: uint64, an array a shard; none is mapped."""
        for shard in np.flatnonzero(self._listed.sizes[0]).tolist():
            yield _read_hashes(self._listed.path(shard))

    def offsets_at(self, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Where documents start in their shards.

        `shards` int64 [N], in which to look, in ascending order; `places` int64 [N, K], numbers of
        documents in these shards. Returns int32 [N, K]; a place past the last document gives the
        end of the shard.
        """
        found = np.empty(places.shape, np.int32)
        for shard, here in _runs(shards):
            self.shard(shard).offsets.take(places[here], out=found[here], mode="clip")
        return found

    def documents_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The shard and row of each document with a token from `start` to `stop` (exclusive)."""
        first, last = np.searchsorted(self.token_starts, (start, stop - 1), side="right") - 1
        for shard in range(first, last + 1):
            offsets = self.shard(shard).offsets + self.token_starts[shard]
            for row in np.flatnonzero((offsets[:-1] < stop) & (offsets[1:] > start)).tolist():
                yield shard, row

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens from each of `starts`: [rows, length] in the stored type.

        A row that would run past the end of the stream repeats the last token.
        """
        rows = np.empty((len(starts), length), self.dtype)
        shards = np.searchsorted(self.token_starts, starts, side="right") - 1
        within = starts - self.token_starts[shards]
        whole = starts + length <= self.token_starts[shards + 1]
        inside = np.flatnonzero(whole)
        inside = inside[np.argsort(shards[inside])]
        for shard, run in _runs(shards[inside]):
            here = inside[run]
            rows[here] = _every_row(self.shard(shard).values, length)[within[here]]
        crossing = np.flatnonzero(~whole)
        if len(crossing):
            rows[crossing] = self._gather_singly(
                starts[crossing], length, lambda shard, places: shard.values[places], self.dtype
            )
        return rows

    def gather_learnt(self, starts: np.ndarray, length: int) -> np.ndarray:
        """As `gather`, whether these tokens of conversations are learned: bool [rows, length]."""
        return self._gather_singly(starts, length, ShardArrays.learnt_at, np.dtype(bool))

    def _gather_singly(
        self,
        starts: np.ndarray,
        length: int,
        read: Callable[[ShardArrays, np.ndarray], np.ndarray],
        dtype: np.dtype,
    ) -> np.ndarray:
        """Rows that may cross from one shard into the next, token by token."""
        positions = np.minimum(starts[:, None] + np.arange(length), self.tokens - 1).reshape(-1)
        shards = np.searchsorted(self.token_starts, positions, side="right") - 1
        rows = np.empty(positions.shape, dtype)
        order = np.argsort(shards)
        for shard, run in _runs(shards[order]):
            here = order[run]
            rows[here] = read(self.shard(shard), positions[here] - self.token_starts[shard])
        return rows.reshape(len(starts), length)


def _check_size(path: str, expected: int) -> None:
    try:
        # A third of the time of `Path.stat`, which matters for 100,000 shards.
        size = os.stat(path).st_size  # noqa: PTH116
    except OSError as error:
        raise DataError(f"{path}: is missing; {AGAIN}") from error
    if size != expected:
        raise DataError(f"{path}: has {size} bytes, the manifest says {expected}; {AGAIN}")


def _read_lengths(path: str, documents: int, tokens: int, start: int) -> Iterator[np.ndarray]:
    """The lengths of the documents of a shard, whose offsets begin at byte `start`."""
    begin = end = 0
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            for first in range(0, documents, DOCUMENTS_AT_ONCE):
                offsets = np.empty(min(DOCUMENTS_AT_ONCE, documents - first) + 1, np.int32)
                read = os.preadv(file.fileno(), [offsets.data], start + first * offsets.itemsize)
                if read != offsets.nbytes:
                    raise DataError(f"{path}: ends within its documents; {AGAIN}")
                begin, end = (begin if first else int(offsets[0])), int(offsets[-1])
                # A third of the time of `np.diff` on a small shard.
                yield offsets[1:] - offsets[:-1]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {AGAIN}") from error
    _check_ends(path, (begin, end), tokens)


def _read_hashes(path: str) -> np.ndarray:
    """The column `content_hash` of a shard: uint64 [documents]."""
    try:
        with pa.memory_map(path) as file:
            batch = pa.ipc.open_stream(file).read_next_batch()
            hashes: np.ndarray = batch.column("content_hash").to_numpy().copy()
    except (OSError, ValueError, LookupError) as error:
        raise DataError(f"{path}: is not the shard in the manifest: {error}; {AGAIN}") from error
    return hashes


def _every_row(values: np.ndarray, length: int) -> np.ndarray:
    """The row of `length` values from each place on: [len(values) - length + 1, length], a view.

    `sliding_window_view` with a tenth of its overhead, which is paid for each shard of a batch.
    """
    shape, strides = (len(values) - length + 1, length), values.strides * 2
    return np.ndarray(shape, values.dtype, values, strides=strides)


def _starts(sizes: np.ndarray) -> np.ndarray:
    """The sum of the sizes before each, and of all: int64 [sizes + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _runs(shards: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each shard in `shards` [N], which ascend, with the places at which it is."""
    edges = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(shards)]
    if len(shards):
        for first, last in itertools.pairwise(edges):
            yield int(shards[first]), slice(first, last)


def count_duplicates(streams: Sequence[TokenStream]) -> tuple[int, bool]:
    """Count documents that have the text of an earlier one; true beside it if it is an estimate.

    Of too many documents those in one of several classes of hashes are compared. Raises `DataError`
    if a shard is missing or damaged.
    """
    classes = max(1, -(-sum(stream.documents for stream in streams) // MOST_HASHES))
    arrays = (hashes for stream in streams for hashes in stream.content_hashes())
    of_class = (hashes[hashes % classes == 0] for hashes in arrays)
    kept = np.sort(np.concatenate([np.zeros(0, np.uint64), *of_class]))
    return int(np.count_nonzero(kept[1:] == kept[:-1])) * classes, classes > 1


def open_split(dataset_dir: Path, split: str) -> TokenStream:
    """Open one split (`train`, `validation` or `test`) of a dataset folder.

    Raises `DataError` if the folder is missing, incomplete or not a dataset, if the split is
    unknown, or if a shard is missing or differs in size from the manifest.
    """
    manifest = read_manifest(dataset_dir)
    name = next((known for known in SPLITS if known == split), None)
    if name is None:
        raise DataError(f"split {split!r} is unknown; there are: {', '.join(SPLITS)}")
    record = manifest.splits[name]
    shards = record.shards
    if has_own_shards(dataset_dir):
        folder, files = dataset_dir / split, [shard.file for shard in shards]
    else:
        folder, files = dataset_dir.parent / PARTITIONS, [shard.path for shard in shards]
    return TokenStream(
        folder,
        files,
        shards,
        np.dtype(manifest.tokenizer.dtype),
        manifest.tokenizer.eos_token_id,
        sources=record.slices(),
        conversations=manifest.conversations,
    )
