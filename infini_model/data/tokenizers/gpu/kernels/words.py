"""Kernels of the word table: look up words, claim slots for new ones, fill the slots.

A slot is four int64: the two numbers of the key, the value, and for a word whose key is a hash
where its bytes are kept. A value is 0 where a slot is free, −1 − w where word w of the batch has
claimed it, and else odd: the number of the word's ids, and where they are. The hash of a word never
decides alone: bytes are compared.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A word of this many bytes is its own key; no longer word is in the table.
MAX_EXACT_BYTES, MAX_KEPT_BYTES = 15, 256

_EXACT, _KEPT = tl.constexpr(MAX_EXACT_BYTES), tl.constexpr(MAX_KEPT_BYTES)
_HASHED = tl.constexpr(0xFF << 56)
_OTHER_MULTIPLIER = tl.constexpr(0x94D049BB133111EB)
_ROW = tl.constexpr(4)


@triton.jit
def mix(number: tl.tensor, multiplier: tl.tensor) -> tl.tensor:
    """Mix the bits of uint64 numbers: an xor-shift, a multiplication and another xor-shift."""
    number = (number ^ (number >> 31)) * multiplier.to(tl.uint64)
    return number ^ (number >> 29)


@triton.jit
def _chunk(text: tl.tensor, at: tl.tensor, left: tl.tensor) -> tl.tensor:
    """The 8 bytes at offsets `at` of `text`, int64, as uint64; zero after the first `left`."""
    some = left > 0
    bits = ((at & 7) << 3).to(tl.uint64)
    one = tl.load(text + (at >> 3), some, other=0).to(tl.uint64, bitcast=True)
    two = tl.load(text + (at >> 3) + 1, some, other=0).to(tl.uint64, bitcast=True)
    whole = (one >> bits) | (two << (63 - bits) << 1)
    empty = (8 - tl.maximum(tl.minimum(left, 8), 1)) << 3
    kept = tl.full(at.shape, 0xFFFFFFFFFFFFFFFF, tl.uint64) >> empty.to(tl.uint64)
    return tl.where(some, whole & kept, tl.zeros_like(whole))


@triton.jit
def _key(
    text: tl.tensor, start: tl.tensor, length: tl.tensor, active: tl.tensor, multiplier: tl.tensor
) -> tl.tensor:
    """The two numbers of a word's key: its bytes and length, or a hash of 120 bits."""
    length = tl.where(active, length, 0)
    low = _chunk(text, start, length)
    high = _chunk(text, start + 8, length - 8)
    hashed = length > _EXACT
    one, two = length.to(tl.uint64), length.to(tl.uint64)
    done = 0
    longest = tl.max(tl.where(hashed, length, 0))
    while done < longest:
        chunk = _chunk(text, start + done, length - done)
        more = done < length
        one = tl.where(more, mix(one ^ chunk, multiplier), one)
        two = tl.where(more, mix(two + chunk, multiplier.to(tl.uint64) * _OTHER_MULTIPLIER), two)
        done += 8
    low = tl.where(hashed, one, low)
    high = tl.where(hashed, (two >> 8) | _HASHED, high | (length.to(tl.uint64) << 56))
    return low.to(tl.int64, bitcast=True), high.to(tl.int64, bitcast=True)


@triton.jit
def _home(low: tl.tensor, high: tl.tensor, last: tl.tensor, multiplier: tl.tensor) -> tl.tensor:
    """The first slot to probe for a key; `last` is the number of the last slot."""
    low, high = low.to(tl.uint64, bitcast=True), high.to(tl.uint64, bitcast=True)
    return (mix(low ^ mix(high, multiplier), multiplier) & last.to(tl.uint64)).to(tl.int64)


@triton.jit
def _same_bytes(
    text: tl.tensor,
    at: tl.tensor,
    other: tl.tensor,
    there: tl.tensor,
    length: tl.tensor,
    active: tl.tensor,
) -> tl.tensor:
    """Whether `length` bytes are the same at `at` of `text` and at `there` of `other`."""
    length = tl.where(active, length, 0)
    done = 0
    longest = tl.max(length)
    while done < longest:
        left = length - done
        active = active & (_chunk(text, at + done, left) == _chunk(other, there + done, left))
        done += 8
    return active


@triton.jit
def _find(
    table: tl.tensor,
    last: tl.tensor,
    kept: tl.tensor,
    text: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    active: tl.tensor,
    multiplier: tl.tensor,
) -> tl.tensor:
    """The values of words, 0 if they are not in the table."""
    low, high = _key(text, start, length, active, multiplier)
    at = _home(low, high, last, multiplier)
    found = tl.zeros_like(low)
    while tl.max(active.to(tl.int32)) > 0:
        slot = table + at * _ROW
        value = tl.load(slot + 2, active, other=0)
        same = active & (value > 0) & (tl.load(slot, active, other=0) == low)
        same = same & (tl.load(slot + 1, active, other=0) == high)
        hashed = same & (length > _EXACT)
        if tl.max(hashed.to(tl.int32)) > 0:
            place = tl.load(slot + 3, hashed, other=0)
            equal = hashed & ((place & 511) == length)
            equal = _same_bytes(text, start, kept, place >> 9, length, equal)
            same = same & (equal | ~hashed)
        found = tl.where(same, value, found)
        active = active & ~same & (value != 0)
        at = (at + 1) & last
    return found


@triton.jit
def probe(
    table: tl.tensor,
    last: tl.tensor,
    kept: tl.tensor,
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    multiplier: tl.tensor,
    values: tl.tensor,
    missing: tl.tensor,
    missed: tl.tensor,
    LISTED: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Look up all words, or those that are `listed`: `values` int64 [W], 0 if not in the table.

    Those are listed in `missing` int32, in any order; `missed` int32 [1], zero before, counts them.
    """
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    within = index < count
    word = index
    if LISTED:
        word = tl.load(listed + index, within, other=0)
    start = tl.load(starts + word, within, other=0)
    length = tl.load(starts + word + 1, within, other=0) - start
    active = within & (length <= _KEPT)
    found = _find(table, last, kept, text, start, length, active, multiplier)
    tl.store(values + word, found, within)
    absent = (within & (found == 0)).to(tl.int32)
    total = tl.sum(absent)
    if total > 0:
        place = tl.atomic_add(missed, total, sem="relaxed") + tl.cumsum(absent, 0) - 1
        tl.store(missing + place, word, absent == 1)


@triton.jit
def claim(
    table: tl.tensor,
    last: tl.tensor,
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    multiplier: tl.tensor,
    slots: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Claim a slot for each of the words `listed`, which are not in the table.

    `slots` int32 [count] is the slot, or −1 where an equal word of the list has claimed it.
    """
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    active = index < count
    word = tl.load(listed + index, active, other=0)
    start = tl.load(starts + word, active, other=0)
    length = tl.load(starts + word + 1, active, other=0) - start
    low, high = _key(text, start, length, active, multiplier)
    at = _home(low, high, last, multiplier)
    slot = tl.full(index.shape, -1, tl.int32)
    claimed = -1 - word.to(tl.int64)
    while tl.max(active.to(tl.int32)) > 0:
        # No value is 2: a word that has its slot writes nothing.
        free = tl.where(active, 0, 2).to(tl.int64)
        value = tl.atomic_cas(table + at * _ROW + 2, free, claimed, sem="relaxed")
        won = active & (value == 0)
        slot = tl.where(won, at.to(tl.int32), slot)
        taken = active & (value < 0)
        other = tl.where(taken, -1 - value, 0).to(tl.int32)
        there = tl.load(starts + other, taken, other=0)
        same = taken & (tl.load(starts + other + 1, taken, other=0) - there == length)
        same = _same_bytes(text, start, text, there, length, same)
        active = active & ~won & ~same
        at = (at + 1) & last
    tl.store(slots + index, slot, index < count)


@triton.jit
def fill(
    table: tl.tensor,
    kept: tl.tensor,
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    multiplier: tl.tensor,
    slots: tl.tensor,
    values: tl.tensor,
    chunks: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Write the words `listed` with their `values` int64 [count] into the slots they claimed.

    The bytes of words whose key is a hash go to `kept` int64, from the chunk that `chunks` int64
    [count] names.
    """
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    active = index < count
    word = tl.load(listed + index, active, other=0)
    start = tl.load(starts + word, active, other=0)
    length = tl.load(starts + word + 1, active, other=0) - start
    low, high = _key(text, start, length, active, multiplier)
    place = tl.load(chunks + index, active, other=0)
    slot = table + tl.load(slots + index, active, other=0).to(tl.int64) * _ROW
    tl.store(slot, low, active)
    tl.store(slot + 1, high, active)
    tl.store(slot + 2, tl.load(values + index, active, other=0), active)
    tl.store(slot + 3, (place << 12) | length, active)
    length = tl.where(active & (length > _EXACT), length, 0)
    done = 0
    longest = tl.max(length)
    while done < longest:
        chunk = _chunk(text, start + done, length - done).to(tl.int64, bitcast=True)
        tl.store(kept + place + done // 8, chunk, done < length)
        done += 8
