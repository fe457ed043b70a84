"""The token stream of a split: its memory-mapped shards, read like a single array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import SPLITS, SplitRecord, read_manifest
from infini_model.runtime.errors import DataError


class Span(NamedTuple):
    """Tokens of one document: `first` to `last` (exclusive) in shard number `shard`.

    `row` is the document's number in the shard, `document` its number in the split.
    """

    shard: int
    row: int
    document: int
    first: int
    last: int


class TokenStream:
    """Consecutive shards: `values` holds the tokens of each, `offsets` its document starts.

    Opening it copies nothing. `tokens` and `documents` count the whole stream.
    """

    def __init__(
        self, values: Sequence[np.ndarray], offsets: Sequence[np.ndarray], eos_token_id: int
    ) -> None:
        self.values = list(values)
        self.offsets = list(offsets)
        self.eos_token_id = eos_token_id
        self._token_starts = _starts([len(shard) for shard in self.values])
        self._document_starts = _starts([len(shard) - 1 for shard in self.offsets])
        self.tokens = int(self._token_starts[-1])
        self.documents = int(self._document_starts[-1])

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """Where each document starts in the stream, and its end: int64 [documents + 1]."""
        parts = [
            shard[:-1].astype(np.int64) + start
            for shard, start in zip(self.offsets, self._token_starts, strict=False)
        ]
        return np.concatenate([*parts, self._token_starts[-1:]])

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document with its end-of-text token, without a copy."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        shard = int(np.searchsorted(self._document_starts, index, side="right")) - 1
        first, last = self.offsets[shard][index - self._document_starts[shard] :][:2]
        return self.values[shard][first:last]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The tokens from `start` to `stop` (exclusive), document by document."""
        shard = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        while start < stop:
            origin, end = (int(edge) for edge in self._token_starts[shard : shard + 2])
            offsets = self.offsets[shard]
            row = int(np.searchsorted(offsets, start - origin, side="right")) - 1
            while start < min(stop, end):
                last = min(stop - origin, int(offsets[row + 1]))
                document = int(self._document_starts[shard]) + row
                yield Span(shard, row, document, start - origin, last)
                start, row = origin + last, row + 1
            shard += 1

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens from each of `starts`: [rows, length] in the stored type.

        A row that would run past the end of the stream repeats the last token.
        """
        dtype = self.values[0].dtype
        rows = np.empty((len(starts), length), dtype)
        shards = np.searchsorted(self._token_starts, starts, side="right") - 1
        whole = starts + length <= self._token_starts[shards + 1]
        for shard in np.unique(shards[whole]).tolist():
            here = np.flatnonzero(whole & (shards == shard))
            windows = np.lib.stride_tricks.sliding_window_view(self.values[shard], length)
            rows[here] = windows[starts[here] - self._token_starts[shard]]
        crossing = np.flatnonzero(~whole)
        if len(crossing):
            rows[crossing] = self._gather_crossing(starts[crossing], length)
        return rows

    def _gather_crossing(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows that cross from one shard into the next, token by token."""
        positions = np.minimum(starts[:, None] + np.arange(length), self.tokens - 1)
        shards = np.searchsorted(self._token_starts, positions, side="right") - 1
        rows = np.empty(positions.shape, self.values[0].dtype)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            rows[here] = self.values[shard][positions[here] - self._token_starts[shard]]
        return rows


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def map_shard(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document offsets of a shard file, memory-mapped without a copy.

    Raises `DataError` that names the file if it is not a shard.
    """
    try:
        # The mapping outlives the file descriptor, so that thousands of shards can be open.
        with pa.memory_map(str(path)) as source:
            column = pa.ipc.open_stream(source).read_next_batch().column(0)
    except (OSError, pa.ArrowException, StopIteration) as error:
        raise DataError(f"{path}: is not a shard: {str(error).splitlines()[:1]}") from error
    offsets = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1]
    values = column.values
    data = values.buffers()[1]
    dtype = values.type.to_pandas_dtype()
    if not len(values):
        return np.zeros(0, dtype), np.zeros(1, np.int32)
    return np.frombuffer(data, dtype)[: len(values)], offsets


def open_split(dataset_dir: Path, split: str) -> TokenStream:
    """Map the shards of one split (`train`, `validation` or `test`) of a dataset folder.

    Raises `DataError` if the folder is missing, incomplete or not a dataset, if the split is
    unknown, or if a shard is missing or differs in size from the manifest.
    """
    manifest = read_manifest(dataset_dir)
    name = next((known for known in SPLITS if known == split), None)
    if name is None:
        raise DataError(f"split {split!r} is unknown; there are: {', '.join(SPLITS)}")
    record = manifest.splits[name]
    _check_sizes(dataset_dir / split, record)
    mapped = [map_shard(dataset_dir / split / shard.file) for shard in record.shards]
    return TokenStream(
        [values for values, _ in mapped],
        [offsets for _, offsets in mapped],
        manifest.tokenizer.eos_token_id,
    )


def _check_sizes(folder: Path, record: SplitRecord) -> None:
    for shard in record.shards:
        path = folder / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: is missing; run the preprocess stage again") from error
        if size != shard.bytes:
            raise DataError(
                f"{path}: has {size} bytes, the manifest says {shard.bytes}; "
                "run the preprocess stage again"
            )
