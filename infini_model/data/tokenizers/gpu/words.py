"""A hash table on a device from words to their token ids, so that each word is encoded once.

A word is a piece of text inside which bytes are merged. Its key is two numbers: the bytes of a word
of up to 15 bytes, or a hash of a longer one, whose bytes are compared as well. The table uses open
addressing, has a fixed size and is emptied when half full. Words that are too long to keep, or for
which there is no room, are encoded each time they occur.

A slot is four int64: the two numbers of the key, the value, and for a word whose key is a hash
where its bytes are kept. A value is 0 where a slot is free, −1 − w where word w of the batch has
claimed it, and else that of `values_of`, which is odd.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from infini_model.data.tokenizers.gpu.merges import (
    MULTIPLIER,
    Pool,
    WordModel,
    Words,
    listed_words,
    mix,
    starts_of,
)
from infini_model.data.tokenizers.gpu.pretokenize import launch

# Words that one program of a kernel handles.
WORDS = 256
# A word of this many bytes is its own key; no longer word is in the table.
MAX_EXACT_BYTES, MAX_KEPT_BYTES = 15, 256


class WordTable:
    """The values of words (see `values_of`), encoded by `model` when they are new.

    `slots`, a power of two, bounds the memory: 32 bytes each, plus the words and their ids. There
    are more if the model has words of its own.
    """

    def __init__(self, model: WordModel, device: torch.device, slots: int) -> None:
        self._model, self._device = model, device
        whole = 0 if model.whole is None else len(model.whole[0])
        self._slots: int = max(slots, triton.next_power_of_2(4 * whole))
        self._table = torch.zeros(self._slots, 4, dtype=torch.int64, device=device)
        self._clear()

    def _clear(self) -> None:
        """Remove every word but those of the model."""
        self._table.zero_()
        self._ids = Pool(torch.int32, self._device)
        self._kept = Pool(torch.uint8, self._device)
        self.words, self._lasting = 0, 0
        if self._model.whole is not None:
            words, values = self._model.whole
            everything = torch.arange(len(words), dtype=torch.int32, device=self._device)
            self._fill(words, everything, self._claim(words, everything), values)

    def ids(self, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of all words, int32 [N], and where those of each start, int64 [W + 1]."""
        values = self._look_up(words)
        places = starts_of((values & 0xFFFFFFFF) >> 1)
        ids = torch.empty(int(places[-1]), dtype=torch.int32, device=self._device)
        arguments = values, places, len(values), self._ids.values, ids
        launch(emit, len(values), WORDS, *arguments, WORDS=WORDS)
        return ids, places

    def _look_up(self, words: Words) -> torch.Tensor:
        """The values of all words, valid until the next call: int64 [W]."""
        if self.words >= self._slots // 2 or self._lasting > 8 * self._slots:
            self._clear()
        self._ids.used = self._lasting
        values = torch.empty(len(words), dtype=torch.int64, device=self._device)
        missing = self._probe(words, None, values)
        while len(missing):
            room = self._slots // 2 - self.words
            new = missing[words.lengths(missing) <= MAX_KEPT_BYTES][:room]
            if not len(new):
                values[missing] = self._model.encode(words, missing, self._ids)
                break
            self._add(words, new)
            missing = self._probe(words, missing, values)
        return values

    def _shared(self, words: Words, listed: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
        """The first arguments of every kernel of the table."""
        text = words.text.padded.view(torch.int64)
        return self._table, MULTIPLIER, text, words.starts, listed

    def _probe(
        self, words: Words, listed: torch.Tensor | None, values: torch.Tensor
    ) -> torch.Tensor:
        """Look up all words, or those listed, int32 [n]; returns those that are missing."""
        count = len(words) if listed is None else len(listed)
        missing, missed = words.starts.new_empty(count), words.starts.new_zeros(1)
        where = words.starts if listed is None else listed
        kept = self._kept.values.view(torch.int64)
        arguments = count, self._slots - 1, kept, values, missing, missed
        shared = self._shared(words, where)
        launch(probe, count, WORDS, *shared, *arguments, LISTED=listed is not None, WORDS=WORDS)
        return missing[: int(missed)]

    def _add(self, words: Words, new: torch.Tensor) -> None:
        """Encode these words, int32 [n], which are not in the table, and keep them."""
        try:
            slots = self._claim(words, new)
            owners = slots >= 0
            new, slots = new[owners], slots[owners]
            self._fill(words, new, slots, self._model.encode(words, new, self._ids))
            self._lasting = self._ids.used
        except BaseException:
            self._clear()  # there may be slots without ids: out of memory, an interrupt
            raise

    def _claim(self, words: Words, new: torch.Tensor) -> torch.Tensor:
        """The slots that these words claim, int32 [n]; −1 for repetitions of a word."""
        slots = torch.empty_like(new)
        arguments = len(new), self._slots - 1, slots
        launch(claim, len(new), WORDS, *self._shared(words, new), *arguments, WORDS=WORDS)
        return slots

    def _fill(
        self, words: Words, new: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Complete the slots that distinct words have claimed, by their values and places."""
        lengths = words.lengths(new)
        hashed = lengths > MAX_EXACT_BYTES
        content = words.content(new[hashed])
        places = self._kept.append(content, torch.where(hashed, lengths, 0))
        self._table[slots, 2:] = torch.stack([values, places << 9 | lengths], 1)
        self.words += len(new)


_EXACT, _KEPT = tl.constexpr(MAX_EXACT_BYTES), tl.constexpr(MAX_KEPT_BYTES)
_HASHED = tl.constexpr(0xFF << 56)
_OTHER_MULTIPLIER = tl.constexpr(0x94D049BB133111EB)
_ROW = tl.constexpr(4)


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
def probe(
    table: tl.tensor,
    multiplier: tl.tensor,
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    last: tl.tensor,
    kept: tl.tensor,
    values: tl.tensor,
    missing: tl.tensor,
    missed: tl.tensor,
    LISTED: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Look up all words, or those that are `listed`: `values` int64 [W], 0 if not in the table.

    Those are listed in `missing` int32, in any order; `missed` int32 [1], zero before, counts them.
    """
    _, within, word, start, length = listed_words(starts, listed, count, LISTED, WORDS)
    active = within & (length <= _KEPT)
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
    tl.store(values + word, found, within)
    absent = (within & (found == 0)).to(tl.int32)
    total = tl.sum(absent)
    if total > 0:
        place = tl.atomic_add(missed, total, sem="relaxed") + tl.cumsum(absent, 0) - 1
        tl.store(missing + place, word, absent == 1)


@triton.jit
def claim(
    table: tl.tensor,
    multiplier: tl.tensor,
    text: tl.tensor,
    starts: tl.tensor,
    listed: tl.tensor,
    count: tl.tensor,
    last: tl.tensor,
    slots: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Claim a slot for each of the words `listed`, which are not in the table, and write its key.

    `slots` int32 [count] is the slot, or −1 where an equal word of the list has claimed it.
    """
    index, active, word, start, length = listed_words(starts, listed, count, True, WORDS)
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
        tl.store(table + at * _ROW, low, won)
        tl.store(table + at * _ROW + 1, high, won)
        taken = active & (value < 0)
        other = tl.where(taken, -1 - value, 0).to(tl.int32)
        there = tl.load(starts + other, taken, other=0)
        same = taken & (tl.load(starts + other + 1, taken, other=0) - there == length)
        same = _same_bytes(text, start, text, there, length, same)
        active = active & ~won & ~same
        at = (at + 1) & last
    tl.store(slots + index, slot, index < count)


@triton.jit
def emit(
    values: tl.tensor,
    places: tl.tensor,
    count: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Write the `ids` int32 of words from `places` int64 [count], those of several from `pool`."""
    index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    value = tl.load(values + index, index < count, other=0)
    place = tl.load(places + index, index < count, other=0)
    first, number = value >> 32, ((value & 0xFFFFFFFF) >> 1).to(tl.int32)
    step = 0
    most = tl.max(number)
    while step < most:
        more = step < number
        kept = tl.load(pool + first + step, more & (number > 1), other=0)
        tl.store(ids + place + step, tl.where(number == 1, first.to(tl.int32), kept), more)
        step += 1
