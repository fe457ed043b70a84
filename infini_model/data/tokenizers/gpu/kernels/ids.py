"""Kernels from the values of words to their ids."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _counts(values: tl.tensor, index: tl.tensor, count: tl.tensor) -> tl.tensor:
    """The values of words, and how many ids each has."""
    value = tl.load(values + index, index < count, other=0)
    return value, ((value & 0xFFFFFFFF) >> 1).to(tl.int32)


@triton.jit
def count_ids(values: tl.tensor, count: tl.tensor, totals: tl.tensor, WORDS: tl.constexpr) -> None:
    """How many ids each program's `WORDS` words have; `totals` int32 [programs]."""
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    _, ids = _counts(values, index, count)
    tl.store(totals + tl.program_id(0), tl.sum(ids))


@triton.jit
def emit(
    values: tl.tensor,
    count: tl.tensor,
    offsets: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    places: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Write the `ids` int32 of words, and to `places` int32 [W] where those of each start.

    `offsets` int64 [programs] is where a program writes.
    """
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    value, number = _counts(values, index, count)
    first = value >> 32
    place = tl.load(offsets + tl.program_id(0)) + tl.cumsum(number, 0) - number
    tl.store(places + index, place.to(tl.int32), index < count)
    step = 0
    most = tl.max(number)
    while step < most:
        more = step < number
        kept = tl.load(pool + first + step, more & (number > 1), other=0)
        tl.store(ids + place + step, tl.where(number == 1, first.to(tl.int32), kept), more)
        step += 1
