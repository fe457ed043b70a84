"""Which tokens to ask a store for: rows that are close together are one block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# A request takes tens of milliseconds; in one of them a connection transfers far more than this, so
# it is read rather than skipped. Not more, as small windows of a small split are all this close.
GAP_BYTES = 16 << 10
# Longer blocks are cut, so that several connections share them.
BLOCK_BYTES = 1 << 20


class Pieces(NamedTuple):
    """Tokens `firsts` to `lasts` (exclusive) of `shards`: each int64 [N]."""

    shards: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray

    def where(self, chosen: np.ndarray) -> Pieces:
        """Those that are marked in `chosen`, bool [N], or whose numbers are in it."""
        return Pieces(self.shards[chosen], self.firsts[chosen], self.lasts[chosen])


class Block(NamedTuple):
    """Tokens `first` to `last` (exclusive) of a shard, to be read together."""

    shard: int
    first: int
    last: int


def pieces_of_rows(starts: np.ndarray, length: int, token_starts: np.ndarray) -> Pieces:
    """The parts in each shard of rows of `length` tokens from `starts`, int64 [rows], on.

    `token_starts`, int64 [shards + 1], counts the tokens before each shard, and in all. A row ends
    with the stream, and has at least its last token.
    """
    total = token_starts[-1]
    begins = np.minimum(starts, total - 1)
    ends = np.minimum(starts + length, total)
    parts = []
    while len(begins):
        shards = np.searchsorted(token_starts, begins, side="right") - 1
        origins, borders = token_starts[shards], token_starts[shards + 1]
        parts.append(Pieces(shards, begins - origins, np.minimum(ends, borders) - origins))
        more = ends > borders
        begins, ends = borders[more], ends[more]
    if not parts:
        return Pieces(*np.zeros((3, 0), np.int64))
    return Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def join(pieces: Pieces, itemsize: int) -> Iterator[Block]:
    """Blocks in ascending order that cover the pieces.

    Each piece is within the last block that begins where it does or before.
    """
    gap, most = GAP_BYTES // itemsize, BLOCK_BYTES // itemsize
    order = np.lexsort((pieces.firsts, pieces.shards))
    block: Block | None = None
    for shard, first, last in zip(*(each[order].tolist() for each in pieces), strict=True):
        if block is not None and block.shard == shard:
            near = first <= block.last + gap and last - block.first <= most
            if near or last <= block.last:
                block = block._replace(last=max(block.last, last))
                continue
        if block is not None:
            yield block
        block = Block(shard, first, last)
    if block is not None:
        yield block
