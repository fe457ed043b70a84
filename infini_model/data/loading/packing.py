"""Packing a token stream into windows: arithmetic on document offsets, without reading tokens.

A window of context length C predicts C tokens from the C before them, so it reads C + 1 tokens of
the stream, or fewer at the end of a document. Every mode is a table of rows, each with a start in
the stream and a number of predicting positions. A window is one row (`packed`, `document`) or one
row per segment (`aligned`, so that each document that needs more than one starts on a boundary).

A row that a document does not fill is shared with the next documents as far as they fit in whole:
most texts of the web are shorter than a segment that a GPU computes efficiently. What shares a row
is consecutive in the stream and sees each other, as in `packed`; a mask would take the fused
kernels from all segments for the sake of a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infini_model.config import PackingConfig, Remainder
from infini_model.data.loading.stream import DOCUMENTS_AT_ONCE, TokenStream

# Documents of a block, in which rows are counted anew for each row that is located there. What
# shares rows is of one block, so a block has some 16 rows, but at most so many documents; all
# numbers of them divide `DOCUMENTS_AT_ONCE`.
FEWEST_IN_BLOCK, MOST_IN_BLOCK = 16, 1024
ROWS_OF_BLOCK = 16


class Rows(NamedTuple):
    """Rows of the stream.

    `starts` int64 [R]: start of each row in the stream. `valid` int64 [R]: number of positions that
    predict a token of the row's own documents. `first` bool [R]: whether a document starts here,
    at the row's first token.
    """

    starts: np.ndarray
    valid: np.ndarray
    first: np.ndarray


class StreamPacking:
    """Windows over a range of the stream: C + 1 tokens with stride C, across documents."""

    rows_per_window = 1

    def __init__(self, tokens: range, context_length: int) -> None:
        self.row_length = context_length
        self.windows = max(0, len(tokens) - 1) // context_length
        self._first = tokens.start

    def locate(self, windows: np.ndarray) -> Rows:
        """Row w starts at token w × C and is full."""
        places = windows.astype(np.int64) * self.row_length
        return Rows(self._first + places, np.full_like(places, self.row_length), places == 0)


def documents_of_block(tokens: int, documents: int, row_length: int) -> int:
    """The number of documents of a block: 16 · 2^k, which make some `ROWS_OF_BLOCK` rows."""
    block = FEWEST_IN_BLOCK
    while block < MOST_IN_BLOCK and block * tokens < ROWS_OF_BLOCK * row_length * documents:
        block *= 2
    return block


class DocumentPacking:
    """Windows of some shards whose rows begin with a document or continue the one before.

    A document of L tokens has L - 1 positions. A last row that it does not fill is shared with the
    documents after it that fit, padded, or dropped, as `remainder` says. Documents that share rows
    are counted as one, which has as many rows as its first.

    Rows are numbered through all documents. Only the number of rows before each block of
    `block` documents of a shard is kept, half a byte a document or less; within a block, rows are
    counted when they are located.
    """

    def __init__(
        self,
        documents: TokenStream,
        shards: slice,
        row_length: int,
        remainder: Remainder,
        *,
        rows_per_window: int = 1,
    ) -> None:
        self.row_length = row_length
        self.rows_per_window = rows_per_window
        self._documents = documents
        self._shards = shards
        self._remainder = remainder
        self.block = FEWEST_IN_BLOCK
        if remainder == "share":
            self.block = documents_of_block(*documents.sizes(shards), row_length)
        starts = documents.document_starts[shards.start : shards.stop + 1]
        blocks = -(-np.diff(starts) // self.block)
        self._block_starts = np.concatenate([[0], np.cumsum(blocks)])
        self._row_starts = self._count_rows()
        self.windows = int(self._row_starts[-1]) // rows_per_window

    def locate(self, windows: np.ndarray) -> Rows:
        """Row k of a document starts k × row_length tokens after the document's start."""
        inner = np.arange(self.rows_per_window)
        rows = (windows.astype(np.int64)[:, None] * self.rows_per_window + inner).reshape(-1)
        blocks = np.sort(np.searchsorted(self._row_starts[1:], rows, side="right"))
        # The rows of a window are consecutive, and often in the same block.
        blocks = blocks[np.append(True, blocks[1:] != blocks[:-1])[: len(blocks)]]
        shards = np.searchsorted(self._block_starts, blocks, side="right") - 1
        first = (blocks - self._block_starts[shards]) * self.block
        shards += self._shards.start
        places = first[:, None] + np.arange(self.block + 1)
        offsets = self._documents.offsets_at(shards, places)
        lengths = offsets[:, 1:] - offsets[:, :-1]
        begins = self._begins(lengths)
        firsts = np.flatnonzero(begins)
        counts = self._rows_of(lengths, begins).reshape(-1)[firsts]
        # The documents of these blocks are searched as if there were no others: `ends` counts their
        # rows, and the rows that are skipped before each block.
        ends = np.cumsum(counts)
        skipped = self._row_starts[blocks] - (ends - counts)[firsts % self.block == 0]
        ends += skipped[firsts // self.block]
        found = np.searchsorted(ends, rows, side="right")
        document = firsts[found]
        block = document // self.block
        place = (rows - ends[found] + counts[found]) * self.row_length
        start = offsets.reshape(-1)[document + block] + self._documents.token_starts[shards[block]]
        left = np.add.reduceat(lengths.reshape(-1), firsts)[found] - 1 - place
        return Rows(start + place, np.minimum(left, self.row_length), place == 0)

    def _begins(self, lengths: np.ndarray) -> np.ndarray:
        """Mark the documents that begin a row, as the first of each block does.

        `lengths` int32 [blocks, block], 0 past the last; returns bool of that shape.
        """
        if self._remainder != "share":
            return np.ones(lengths.shape, bool)
        begins = np.empty(lengths.T.shape, bool)
        # Positions that are left in the last row of each document, if it begins one.
        lengths = np.ascontiguousarray(lengths.T)
        left = (1 - lengths) % self.row_length
        room = np.full(len(lengths[0]), -1, left.dtype)
        for place in range(self.block):
            np.greater(lengths[place], room, out=begins[place])
            room = np.where(begins[place], left[place], room - lengths[place])
        return begins.T

    def _rows_of(self, lengths: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """The number of rows that documents of these lengths begin: int64."""
        rows = lengths.astype(np.int64)
        rows += -1 if self._remainder == "drop" else self.row_length - 2
        rows //= self.row_length
        # A document has at least its end-of-text token; a place past the last document has none.
        rows *= begins
        return np.maximum(rows, 0, out=rows)

    def _count_rows(self) -> np.ndarray:
        """The number of rows before each block, and in all: int64 [blocks + 1]."""
        starts = np.zeros(int(self._block_starts[-1]) + 1, np.int64)
        done = 1
        for parts in _together(self._documents.lengths(self._shards)):
            lengths = _blocks_of(parts, self.block)
            rows = self._rows_of(lengths, self._begins(lengths)).sum(axis=1)
            starts[done : done + len(rows)] = rows
            done += len(rows)
        return np.cumsum(starts, out=starts)


def _together(arrays: Iterator[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The arrays in groups of at least `DOCUMENTS_AT_ONCE` numbers, but for the last.

    So small shards are counted many at a time.
    """
    group: list[np.ndarray] = []
    waiting = 0
    for array in arrays:
        group.append(array)
        waiting += len(array)
        if waiting >= DOCUMENTS_AT_ONCE:
            yield group
            group, waiting = [], 0
    if group:
        yield group


def _blocks_of(parts: list[np.ndarray], block: int) -> np.ndarray:
    """The numbers of each array in blocks of their own, filled up with 0: int32 [blocks, block]."""
    sizes = np.array([len(part) for part in parts])
    blocks = -(-sizes // block)
    shift = (np.cumsum(blocks) - blocks) * block - (np.cumsum(sizes) - sizes)
    filled = np.zeros(int(blocks.sum()) * block, np.int32)
    filled[np.arange(int(sizes.sum())) + np.repeat(shift, sizes)] = np.concatenate(parts)
    return filled.reshape(-1, block)


class Packing:
    """The windows of a stream, one source after the other; none is of two.

    There are `windows` of them, each with `rows_per_window` rows of `row_length` positions.
    `window_starts` are the windows before those of each source, and all: [sources + 1].
    """

    def __init__(self, parts: Sequence[StreamPacking | DocumentPacking]) -> None:
        """`parts` are those of the sources."""
        self.row_length, self.rows_per_window = parts[0].row_length, parts[0].rows_per_window
        self.window_starts = [0, *itertools.accumulate(part.windows for part in parts)]
        self.windows = self.window_starts[-1]
        self._parts = parts

    def locate(self, windows: np.ndarray) -> Rows:
        """The rows of these windows, in order: R = len(windows) × rows_per_window."""
        if len(self._parts) == 1:
            return self._parts[0].locate(windows)
        shape = (len(windows), self.rows_per_window)
        rows = Rows(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, bool))
        sources = np.searchsorted(self.window_starts[1:], windows, side="right")
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            own = self._parts[source].locate(windows[here] - self.window_starts[source])
            for array, part in zip(rows, own, strict=True):
                array[here] = part.reshape(len(here), -1)
        return Rows._make(array.reshape(-1) for array in rows)


def pack(documents: TokenStream, config: PackingConfig, segment_length: int) -> Packing:
    """The windows of a stream of documents in the mode set in `config`, source by source.

    In `aligned` mode the segments of all documents are concatenated, and a partial last window is
    dropped.
    """
    length, starts = config.context_length, documents.token_starts
    row = segment_length if config.mode == "aligned" else length
    return Packing(
        [
            StreamPacking(range(starts[shards.start], starts[shards.stop]), length)
            if config.mode == "packed"
            else DocumentPacking(
                documents, shards, row, config.remainder, rows_per_window=length // row
            )
            for shards in documents.sources.values()
        ]
    )
