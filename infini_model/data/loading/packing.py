"""Packing a token stream into windows: arithmetic on document offsets, without reading tokens.

A window of context length C predicts C tokens from the C before them, so it reads C + 1 tokens of
the stream, or fewer at the end of a document. Every mode is a table of rows, each with a start in
the stream and a number of predicting positions. A window is one row (`packed`, `document`) or one
row per segment (`aligned`, so that each document starts on a segment boundary).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from infini_model.config import PackingConfig


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

    `document_offsets` int64 [documents + 1]. A document of L tokens has L - 1 positions; a partial
    last row is dropped, or kept if `pad`.
    """

    def __init__(
        self,
        document_offsets: np.ndarray,
        row_length: int,
        *,
        pad: bool,
        rows_per_window: int = 1,
    ) -> None:
        self.row_length = row_length
        self.rows_per_window = rows_per_window
        self._offsets = document_offsets
        positions = np.diff(document_offsets) - 1
        rows = (positions + (row_length - 1 if pad else 0)) // row_length
        # Cumulative rows at the end of each document, for finding a row's document by bisection.
        self._row_ends = np.cumsum(rows)
        total = int(self._row_ends[-1]) if len(rows) else 0
        self.windows = total // rows_per_window

    def locate(self, windows: np.ndarray) -> Rows:
        """Row k of a document starts k × row_length tokens after the document's start."""
        inner = np.arange(self.rows_per_window)
        rows = (windows.astype(np.int64)[:, None] * self.rows_per_window + inner).reshape(-1)
        document = np.searchsorted(self._row_ends, rows, side="right")
        before = np.where(document > 0, self._row_ends[document - 1], 0)
        place = (rows - before) * self.row_length
        left = self._offsets[document + 1] - self._offsets[document] - 1 - place
        return Rows(self._offsets[document] + place, np.minimum(left, self.row_length), place == 0)


def pack(
    tokens: int,
    document_offsets: Callable[[], np.ndarray],
    config: PackingConfig,
    segment_length: int,
) -> Packing:
    """The windows of a stream of `tokens` in the mode set in `config`.

    `document_offsets` is called only by the modes that need it. In `aligned` mode the segments of
    all documents are concatenated, and a partial last window is dropped.
    """
    length = config.context_length
    if config.mode == "packed":
        return StreamPacking(tokens, length)
    if config.mode == "document":
        return DocumentPacking(document_offsets(), length, pad=config.remainder == "pad")
    return DocumentPacking(
        document_offsets(), segment_length, pad=True, rows_per_window=length // segment_length
    )
