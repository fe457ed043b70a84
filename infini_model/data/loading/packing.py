"""Packing a token stream into windows: arithmetic on document offsets, without reading tokens.

A window of context length C predicts C tokens from the C before them, so it reads C + 1 tokens of
the stream, or fewer at the end of a document. Every mode is a table of rows, each with a start in
the stream and a number of predicting positions. A window is one row (`packed`, `document`) or one
row per segment (`aligned`, so that each document starts on a segment boundary).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from infini_model.config import PackingConfig
from infini_model.data.loading.stream import DOCUMENTS_AT_ONCE, TokenStream

# Documents whose rows are counted anew for each row that is located in one of them; it divides
# `DOCUMENTS_AT_ONCE`.
BLOCK = 16
INSIDE = np.arange(BLOCK + 1)


class Rows(NamedTuple):
    """Rows of the stream.

    `starts` int64 [R]: start of each row in the stream. `valid` int64 [R]: number of positions that
    predict a token of the row's own document. `first` bool [R]: whether a document starts here.
    """

    starts: np.ndarray
    valid: np.ndarray
    first: np.ndarray


class Packing(Protocol):
    """The windows of one stream in one mode.

    There are `windows` of them, each with `rows_per_window` rows of `row_length` positions.
    """

    windows: int
    row_length: int
    rows_per_window: int

    def locate(self, windows: np.ndarray) -> Rows:
        """The rows of these windows, in order: R = len(windows) × rows_per_window."""


class StreamPacking:
    """Windows over the whole stream: C + 1 tokens with stride C, across documents."""

    rows_per_window = 1

    def __init__(self, tokens: int, context_length: int) -> None:
        self.row_length = context_length
        self.windows = max(0, tokens - 1) // context_length

    def locate(self, windows: np.ndarray) -> Rows:
        """Row w starts at token w × C and is full."""
        starts = windows.astype(np.int64) * self.row_length
        return Rows(starts, np.full_like(starts, self.row_length), starts == 0)


class DocumentPacking:
    """Windows whose rows never span two documents.

    A document of L tokens has L - 1 positions; a partial last row is dropped, or kept if `pad`.

    Rows are numbered through all documents. Only the number of rows before each block of
    `BLOCK` documents of a shard is kept, half a byte a document; within a block, rows are counted
    when they are located.
    """

    def __init__(
        self, documents: TokenStream, row_length: int, *, pad: bool, rows_per_window: int = 1
    ) -> None:
        self.row_length = row_length
        self.rows_per_window = rows_per_window
        self._documents = documents
        self._pad = pad
        blocks = -(-np.diff(documents.document_starts) // BLOCK)
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
        places = ((blocks - self._block_starts[shards]) * BLOCK)[:, None] + INSIDE
        offsets = self._documents.offsets_at(shards, places)
        lengths = (offsets[:, 1:] - offsets[:, :-1]).reshape(-1)
        counts = self._rows_of(lengths)
        # The documents of these blocks are searched as if there were no others: `ends` counts their
        # rows, and the rows that are skipped before each block.
        ends = np.cumsum(counts)
        skipped = self._row_starts[blocks] - (ends - counts)[::BLOCK]
        ends += np.repeat(skipped, BLOCK)
        document = np.searchsorted(ends, rows, side="right")
        block = document // BLOCK
        place = (rows - ends[document] + counts[document]) * self.row_length
        start = offsets.reshape(-1)[document + block] + self._documents.token_starts[shards[block]]
        left = lengths[document] - 1 - place
        return Rows(start + place, np.minimum(left, self.row_length), place == 0)

    def _rows_of(self, lengths: np.ndarray) -> np.ndarray:
        """The number of rows of documents of these lengths: int64."""
        rows = lengths.astype(np.int64)
        rows += self.row_length - 2 if self._pad else -1
        rows //= self.row_length
        # A document has at least its end-of-text token; a place past the last document has none.
        return np.maximum(rows, 0, out=rows)

    def _count_rows(self) -> np.ndarray:
        """The number of rows before each block, and in all: int64 [blocks + 1]."""
        starts = np.zeros(int(self._block_starts[-1]) + 1, np.int64)
        done = 1
        for parts in _together(self._documents.lengths()):
            sizes = np.array([len(part) for part in parts])
            rows = self._rows_of(np.concatenate(parts))
            sums = np.add.reduceat(rows, _block_firsts(sizes))
            starts[done : done + len(sums)] = sums
            done += len(sums)
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


def _block_firsts(sizes: np.ndarray) -> np.ndarray:
    """The first documents of the blocks of consecutive arrays of documents of these sizes."""
    blocks = -(-sizes // BLOCK)
    block_starts = np.cumsum(blocks) - blocks
    starts = np.cumsum(sizes) - sizes
    firsts: np.ndarray = np.repeat(starts - block_starts * BLOCK, blocks)
    return firsts + np.arange(len(firsts)) * BLOCK


def pack(documents: TokenStream, config: PackingConfig, segment_length: int) -> Packing:
    """The windows of a stream of documents in the mode set in `config`.

    In `aligned` mode the segments of all documents are concatenated, and a partial last window is
    dropped.
    """
    length = config.context_length
    if config.mode == "packed":
        return StreamPacking(int(documents.token_starts[-1]), length)
    if config.mode == "document":
        return DocumentPacking(documents, length, pad=config.remainder == "pad")
    return DocumentPacking(
        documents, segment_length, pad=True, rows_per_window=length // segment_length
    )
