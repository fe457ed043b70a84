"""The shards of a split of which some are not in the dataset folder, but in a store.

What is in the folder is mapped, as in a complete folder. Of the rest only what is asked for is
read: the rows of a batch, close ones together, each block by a thread of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from infini_model.data.manifest import Shard
from infini_model.data.shards.shard_files import DOCUMENTS_AT_ONCE, ShardFiles
from infini_model.data.shards.stored.blocks import Block, join, pieces_of_rows
from infini_model.data.shards.stored.kept_offsets import KeptOffsets
from infini_model.data.shards.stored.objects import ShardObjects
from infini_model.data.shards.stored.pool import AtOnce, in_order

# Shards of which the offsets are in memory, where no file keeps those of the split.
OFFSETS_IN_MEMORY = 2

Fetched: TypeAlias = dict[int, list[tuple[Block, Future[np.ndarray]]]]


class StoredShards:
    """The shards that a manifest lists, in `folder` or else at `<partitions>/<shard.path>`.

    `elsewhere`, bool [shards], marks those that are not in the folder; the rest is as in
    `ShardFiles`. Reading raises what `ShardFiles` and `ShardObjects` do.
    """

    distant = True

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        dtype: np.dtype,
        partitions: str,
        elsewhere: np.ndarray,
    ) -> None:
        self.dtype = dtype
        self._files = ShardFiles(folder, shards, dtype, elsewhere=elsewhere)
        self._objects = ShardObjects(partitions, shards, dtype)
        self.documents, self.tokens = self._files.documents, self._files.tokens
        self._elsewhere = elsewhere
        self._token_starts = np.concatenate([[0], np.cumsum(self.tokens)])
        self._kept = KeptOffsets(folder, self.documents)
        # Not a method; see `ShardFiles`.
        self._fetch_offsets = lru_cache(OFFSETS_IN_MEMORY)(
            partial(_all_offsets, self._objects, self.documents)
        )

    def begin(self, starts: np.ndarray, length: int, pool: Executor | None = None) -> FoundTokens:
        """Ask for rows of `length` tokens, by their `starts` in the stream, int64 [rows].

        The threads of `pool` read, or the caller now. The result waits for them.
        """
        executor = pool or AtOnce()
        pieces = pieces_of_rows(starts, length, self._token_starts)
        fetched: Fetched = {}
        for block in join(pieces.where(self._elsewhere[pieces.shards]), self.dtype.itemsize):
            future = executor.submit(self._objects.values, *block)
            fetched.setdefault(block.shard, []).append((block, future))
        return FoundTokens(self._files, fetched)

    def values(self, shard: int, first: int, last: int) -> np.ndarray:
        """Tokens `first` to `last` (exclusive) of a shard."""
        source = self._objects if self._elsewhere[shard] else self._files
        return source.values(shard, first, last)

    def offsets(self, shard: int) -> np.ndarray:
        """Where the documents of a shard start: int32 [documents + 1]."""
        if not self._elsewhere[shard]:
            return self._files.offsets(shard)
        kept = self._kept.of(shard)
        return self._fetch_offsets(shard) if kept is None else kept

    def keep_offsets(self) -> None:
        """Fetch the offsets of all shards into a file in the folder, unless it is there.

        To be called if most of them will be needed.
        """
        whole = (part if last else part[:-1] for part, last in self._offset_parts())
        self._kept.keep(whole)

    def lengths(self) -> Iterator[np.ndarray]:
        """The number of tokens of every document, in order, as `ShardFiles.lengths` yields them.

        Fetches ahead those that are not kept, and keeps none.
        """
        for offsets, _ in self._offset_parts():
            yield offsets[1:] - offsets[:-1]

    def prompts(self) -> Iterator[np.ndarray]:
        """The number of tokens of every prompt, in order, as `ShardFiles.prompts` yields them."""
        yield from in_order(self._prompts_of, np.flatnonzero(self.documents).tolist())

    def _prompts_of(self, shard: int) -> np.ndarray:
        source = self._objects if self._elsewhere[shard] else self._files
        return source.prompts_of(shard)

    def _offset_parts(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The offsets of `DOCUMENTS_AT_ONCE` documents and their end; whether a shard ends there.

        A shard without documents has one part, its only offset.
        """
        parts = [
            (shard, first, min(first + DOCUMENTS_AT_ONCE, documents))
            for shard, documents in enumerate(self.documents.tolist())
            for first in range(0, max(1, documents), DOCUMENTS_AT_ONCE)
        ]
        # What is kept is at hand: handing it over between threads would take longer.
        each = in_order if self._kept.of(0) is None else map
        for (shard, _, last), offsets in zip(parts, each(self._offset_part, parts), strict=True):
            yield offsets, last == self.documents[shard]

    def _offset_part(self, part: tuple[int, int, int]) -> np.ndarray:
        shard, first, last = part
        kept = self._kept.of(shard)
        if kept is not None:
            return kept[first : last + 1]
        if self._elsewhere[shard]:
            return self._objects.offsets(shard, first, last + 1)
        return self._files.offsets(shard)[first : last + 1]


def _all_offsets(objects: ShardObjects, documents: np.ndarray, shard: int) -> np.ndarray:
    return objects.offsets(shard, 0, int(documents[shard]) + 1)


class FoundTokens:
    """Rows that were asked for: those of `fetched` blocks, and whatever is in `files`."""

    def __init__(self, files: ShardFiles, fetched: Fetched) -> None:
        self._files, self._fetched = files, fetched

    def find(self, shard: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Some tokens of a shard, and where in them the tokens `places`, int64 [N], are.

        As many follow each of them as follow it in the row that was asked for. Waits until they are
        there, and raises what reading them raised.
        """
        blocks = self._fetched.get(shard)
        if blocks is None:
            return self._files.find(shard, places)
        parts = [future.result() for _, future in blocks]
        firsts = np.array([block.first for block, _ in blocks])
        before = np.array([0, *itertools.accumulate(len(part) for part in parts[:-1])])
        number = np.searchsorted(firsts, places, side="right") - 1
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return tokens, places - firsts[number] + before[number]
