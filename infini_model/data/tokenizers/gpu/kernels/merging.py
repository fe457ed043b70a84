"""The kernel that encodes words by merging pairs of symbols, as byte-pair encoding defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from infini_model.data.tokenizers.gpu.kernels.words import mix

# Ranks are below this one, which no pair has, so that a rank and a place fit into 31 bits.
NO_RANK = (1 << 23) - 1

_NO_RANK = tl.constexpr(NO_RANK)


@triton.jit
def _look_up(
    pairs: tl.tensor,
    last: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    active: tl.tensor,
    multiplier: tl.tensor,
) -> tl.tensor:
    """The rank of each pair of symbols, and the symbol that it becomes."""
    key = left.to(tl.int64) << 32 | right.to(tl.int64)
    mixed = mix(key.to(tl.uint64, bitcast=True), multiplier)
    at = (mixed & last.to(tl.uint64)).to(tl.int64)
    rank, merged = tl.full(left.shape, _NO_RANK, tl.int32), tl.zeros_like(left)
    while tl.max(active.to(tl.int32)) > 0:
        there = tl.load(pairs + at * 2, active, other=-1)
        same = active & (there == key)
        found = tl.load(pairs + at * 2 + 1, same, other=0)
        rank = tl.where(same, (found >> 32).to(tl.int32), rank)
        merged = tl.where(same, found.to(tl.int32), merged)
        active = active & ~same & (there != -1)
        at = (at + 1) & last
    return rank, merged


@triton.jit
def merge(
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    symbols: tl.tensor,
    pairs: tl.tensor,
    last: tl.tensor,
    multiplier: tl.tensor,
    firsts: tl.tensor,
    pool: tl.tensor,
    values: tl.tensor,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    """Encode the words `listed`, of at most `LENGTH` bytes: the pair of lowest rank first.

    `text` uint8; `symbols` int32 [256], of bytes; `pairs` int64 [last + 1, 2]: −1 or a pair, and
    its rank and result. Writes the ids to `pool` int32 from `firsts` int64 [count], and `values`
    int64 [count].
    """
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    within = index < count
    word = tl.load(listed + index, within, other=0)
    start = tl.load(starts + word, within, other=0)
    length = tl.load(starts + word + 1, within, other=0) - start
    place = tl.arange(0, LENGTH)[None, :]
    alive = within[:, None] & (place < length[:, None])
    byte = tl.load(text + start[:, None] + place, alive, other=0)
    after = tl.load(text + start[:, None] + place + 1, alive, other=0)
    ids = tl.load(symbols + byte.to(tl.int32))
    pair = alive & (place + 1 < length[:, None])
    ranks, results = _look_up(
        pairs, last, ids, tl.load(symbols + after.to(tl.int32)), pair, multiplier
    )
    best = tl.min(ranks << 8 | place, axis=1)
    while tl.min(best) < (_NO_RANK << 8):
        # In words that are finished, no place is that of a pair.
        at = tl.where(best < (_NO_RANK << 8), best & 255, -1)
        here = place == at[:, None]
        result = tl.sum(tl.where(here, results, 0), axis=1)
        right = tl.min(tl.where(alive & (place > at[:, None]), place, LENGTH), axis=1)
        gone = (place == right[:, None]) & (at >= 0)[:, None]
        ids = tl.where(here, result[:, None], ids)
        alive = alive & ~gone
        # The merged symbol has a new pair with each of its neighbours.
        right = tl.min(tl.where(alive & (place > at[:, None]), place, LENGTH), axis=1)
        left = tl.max(tl.where(alive & (place < at[:, None]), place, -1), axis=1)
        behind = tl.sum(tl.where(place == right[:, None], ids, 0), axis=1)
        before = tl.sum(tl.where(place == left[:, None], ids, 0), axis=1)
        follows = (at >= 0) & (right < LENGTH)
        rank, merged = _look_up(pairs, last, result, behind, follows, multiplier)
        ranks = tl.where(here, rank[:, None], tl.where(gone, _NO_RANK, ranks))
        results = tl.where(here, merged[:, None], results)
        rank, merged = _look_up(pairs, last, before, result, left >= 0, multiplier)
        here = (place == left[:, None]) & (at >= 0)[:, None]
        ranks = tl.where(here, rank[:, None], ranks)
        results = tl.where(here, merged[:, None], results)
        best = tl.min(ranks << 8 | place, axis=1)
    number = tl.sum(alive.to(tl.int32), axis=1)
    first = tl.load(firsts + index, within, other=0)
    rank = tl.cumsum(alive.to(tl.int32), 1) - 1
    tl.store(pool + first[:, None] + rank, ids, alive)
    # The only id of a word is in its value.
    only = tl.sum(tl.where(place == 0, ids, 0), axis=1).to(tl.int64)
    kept = tl.where(number == 1, only, first)
    tl.store(values + index, kept << 32 | (number.to(tl.int64) << 1) | 1, within)
