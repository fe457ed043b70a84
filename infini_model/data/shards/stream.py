"""The token stream of a split: its shards, one after the other, read like a single array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from infini_model.data.manifest import SPLITS, Shard, read_manifest, read_origin
from infini_model.data.shards.shard_files import ShardFiles
from infini_model.data.shards.stored.shards import StoredShards
from infini_model.runtime.errors import DataError


class Span(NamedTuple):
    """Tokens of one document: `first` to `last` (exclusive) in shard number `shard`.

    `row` is the document's number in the shard, `document` its number in the split, `start` where
    it starts in the shard.
    """

    shard: int
    row: int
    document: int
    first: int
    last: int
    start: int


class Tokens(Protocol):
    """Rows of tokens that were asked for."""

    def find(self, shard: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some tokens of a shard, and where in them the tokens `places`, int64 [N], are.

        As many follow each of them as follow it in the row that was asked for. Waits until they are
        there, and raises what reading them raised.
        """


class Shards(Protocol):
    """The shards of a split, wherever they are: `ShardFiles` in a folder, `StoredShards` elsewhere.

    `documents` and `tokens`, int64 [shards], count those of each; `dtype` is the type of the
    tokens. `distant` tells whether a read takes so long that it is worth beginning it early.
    """

    documents: np.ndarray
    tokens: np.ndarray
    dtype: np.dtype
    distant: bool

    def begin(self, starts: np.ndarray, length: int, pool: Executor | None = None) -> Tokens:
        """Ask for rows of `length` tokens, by their `starts` in the stream, int64 [rows].

        What takes long is done by the threads of `pool`, or before this returns.
        """

    def values(self, shard: int, first: int, last: int) -> np.ndarray:
        """Tokens `first` to `last` (exclusive) of a shard."""

    def offsets(self, shard: int) -> np.ndarray:
        """Where the documents of a shard start: int32 [documents + 1]."""

    def lengths(self) -> Iterator[np.ndarray]:
        """The number of tokens of every document, in order, as arrays of part of a shard each."""

    def prompts(self) -> Iterator[np.ndarray]:
        """The number of tokens of every prompt, in order, as an int32 array for each shard.

        Only if the documents are prompts and answers.
        """

    def keep_offsets(self) -> None:
        """Get ready to give the offsets of any shard at any time."""


class TokenStream:
    """Consecutive shards, read on demand; opening it reads none of them.

    Attributes:
        shards: The tokens and document offsets of each shard.
        eos_token_id: The token that ends each document.
        pairs: Whether each document is a prompt and its answer.
        token_starts: int64 [shards + 1], tokens before each shard, and in all.
        document_starts: int64 [shards + 1], documents before each shard, and in all.
    """

    def __init__(self, shards: Shards, eos_token_id: int, *, pairs: bool = False) -> None:
        self.shards = shards
        self.eos_token_id = eos_token_id
        self.pairs = pairs
        self.token_starts = _starts(shards.tokens)
        self.document_starts = _starts(shards.documents)

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
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        shard = int(np.searchsorted(self.document_starts, index, side="right")) - 1
        first, last = self.shards.offsets(shard)[index - self.document_starts[shard] :][:2]
        return self.shards.values(shard, int(first), int(last))

    def tokens_of(self, span: Span) -> np.ndarray:
        """The tokens of a span."""
        return self.shards.values(span.shard, span.first, span.last)

    def lengths(self) -> Iterator[np.ndarray]:
        """The number of tokens of every document, in order, as arrays of part of a shard each.

        Reads the offsets of all shards and keeps none.
        """
        return self.shards.lengths()

    def offsets_at(self, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Where documents start in their shards.

        `shards` int64 [N], in which to look, in ascending order; `places` int64 [N, K], numbers of
        documents in these shards. Returns int32 [N, K]; a place past the last document gives the
        end of the shard.
        """
        found = np.empty(places.shape, np.int32)
        for shard, here in _runs(shards):
            self.shards.offsets(shard).take(places[here], out=found[here], mode="clip")
        return found

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The tokens from `start` to `stop` (exclusive), document by document."""
        shard = int(np.searchsorted(self.token_starts, start, side="right")) - 1
        while start < stop:
            origin, end = (int(edge) for edge in self.token_starts[shard : shard + 2])
            offsets = self.shards.offsets(shard)
            row = int(np.searchsorted(offsets, start - origin, side="right")) - 1
            while start < min(stop, end):
                last = min(stop - origin, int(offsets[row + 1]))
                document = int(self.document_starts[shard]) + row
                yield Span(shard, row, document, start - origin, last, int(offsets[row]))
                start, row = origin + last, row + 1
            shard += 1

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens from each of `starts`: [rows, length] in the stored type.

        A row that would run past the end of the stream repeats the last token.
        """
        return self.begin(starts, length)()

    def begin(
        self, starts: np.ndarray, length: int, pool: Executor | None = None
    ) -> Callable[[], np.ndarray]:
        """Begin what `gather` does, with the threads of `pool`; the result finishes it."""
        return partial(self._collect, self.shards.begin(starts, length, pool), starts, length)

    def _collect(self, tokens: Tokens, starts: np.ndarray, length: int) -> np.ndarray:
        rows = np.empty((len(starts), length), self.shards.dtype)
        shards = np.searchsorted(self.token_starts, starts, side="right") - 1
        within = starts - self.token_starts[shards]
        whole = starts + length <= self.token_starts[shards + 1]
        inside = np.flatnonzero(whole)
        inside = inside[np.argsort(shards[inside])]
        for shard, run in _runs(shards[inside]):
            here = inside[run]
            values, places = tokens.find(shard, within[here])
            rows[here] = _every_row(values, length)[places]
        crossing = np.flatnonzero(~whole)
        if len(crossing):
            rows[crossing] = self._collect_crossing(tokens, starts[crossing], length)
        return rows

    def _collect_crossing(self, tokens: Tokens, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows that cross from one shard into the next, token by token."""
        positions = np.minimum(starts[:, None] + np.arange(length), self.tokens - 1).reshape(-1)
        shards = np.searchsorted(self.token_starts, positions, side="right") - 1
        rows = np.empty(positions.shape, self.shards.dtype)
        order = np.argsort(shards)
        for shard, run in _runs(shards[order]):
            here = order[run]
            values, places = tokens.find(shard, positions[here] - self.token_starts[shard])
            rows[here] = values[places]
        return rows.reshape(len(starts), length)


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


def open_split(dataset_dir: Path, split: str) -> TokenStream:
    """Open one split (`train`, `validation` or `test`) of a dataset folder.

    Shards that are not in a folder with an origin are read from there, when they are used.

    Raises `DataError` if the folder is missing, incomplete or not a dataset, if the split is
    unknown, or if a shard is missing or differs in size from the manifest.
    """
    manifest = read_manifest(dataset_dir)
    name = next((known for known in SPLITS if known == split), None)
    if name is None:
        raise DataError(f"split {split!r} is unknown; there are: {', '.join(SPLITS)}")
    shards = manifest.splits[name].shards
    dtype = np.dtype(manifest.tokenizer.dtype)
    return TokenStream(
        _open_shards(dataset_dir, split, shards, dtype),
        manifest.tokenizer.eos_token_id,
        pairs=manifest.pairs,
    )


def _open_shards(dataset_dir: Path, split: str, shards: list[Shard], dtype: np.dtype) -> Shards:
    folder = dataset_dir / split
    origin = read_origin(dataset_dir)
    if origin is not None:
        elsewhere = np.array([not (folder / shard.file).exists() for shard in shards], bool)
        if elsewhere.any():
            return StoredShards(folder, shards, dtype, origin.partitions, elsewhere)
    return ShardFiles(folder, shards, dtype)
