"""Words and their token ids, kept on a device: each distinct word is encoded once.

A word is a piece of text inside which bytes are merged. Its key has two numbers: of up to 15 bytes
the bytes themselves, of longer ones a hash, after which the bytes are compared. The table is
open-addressed, of fixed size, and is emptied when it is half full; words too long to keep, and
those whose key another word has, are encoded each time they occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from infini_model.data.tokenizers.gpu.pretokens import Octets
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of

_EXACT = 15
_LONGEST = 256
_HASHED = 0xFF
# Odd numbers without pattern: those of SplitMix64 and of xxHash.
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


class Words(NamedTuple):
    """Words of a text: `starts` and `lengths` in bytes, int64 [W], no length zero."""

    text: Octets
    starts: torch.Tensor
    lengths: torch.Tensor

    def take(self, which: torch.Tensor | slice) -> Words:
        """Those at the places `which` int64 [n], or where `which` bool [W] is true."""
        return Words(self.text, self.starts[which], self.lengths[which])


class Keys(NamedTuple):
    """Two numbers for each word, int64 [W]; `high` is never zero."""

    low: torch.Tensor
    high: torch.Tensor

    def take(self, which: torch.Tensor) -> Keys:
        """Those at the places `which` int64 [n], or where `which` bool [W] is true."""
        return Keys(self.low[which], self.high[which])


class Pieces(NamedTuple):
    """Token ids of words: `ids` int32 [N], `counts` int64 [W], how many belong to each word."""

    ids: torch.Tensor
    counts: torch.Tensor


class WordTable:
    """The ids of words, from `encode` where they are new: it takes strings and gives their ids.

    `slots`, a power of two, bounds the memory: about 50 bytes each and what the words hold.
    """

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        device: torch.device,
        slots: int,
    ) -> None:
        self._encode = encode
        self._device = device
        self._slots = slots
        self._masks = _wrapped([(1 << 8 * count) - 1 for count in range(9)]).to(device)
        self._low, self._high, self._length, self._first, self._count, self._chunk = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(6)
        )
        self._clear()

    def _clear(self) -> None:
        """Forget every word."""
        self._high.zero_()
        self._ids = _Pool(torch.int32, self._device)
        self._chunks = _Pool(torch.int64, self._device)
        self.words = 0

    def look_up(self, words: Words) -> Pieces:
        """The ids of all these words; the new ones are learnt."""
        step = self._slots // 4
        parts = [
            self._look_up(words.take(slice(start, start + step)))
            for start in range(0, max(1, len(words.starts)), step)
        ]
        return Pieces(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _look_up(self, words: Words) -> Pieces:
        keys = self._keys(words)
        keep = words.lengths <= _LONGEST
        slots = self._find(keys)
        new = torch.nonzero((slots < 0) & keep).squeeze(1)
        if len(new):
            if self._is_full(len(new)):
                self._clear()
                slots.fill_(-1)
                new = torch.nonzero(keep).squeeze(1)
            slots[new] = self._learn(words.take(new), keys.take(new))
        firsts, counts = self._first[slots], self._count[slots]
        apart = torch.nonzero(~self._same(words, slots)).squeeze(1)
        mark = self._ids.used
        if len(apart):
            firsts[apart], counts[apart] = self._append(words.take(apart))
        ids = self._ids.values[ranges(firsts, counts)]
        self._ids.used = mark
        return Pieces(ids, counts)

    def _is_full(self, more: int) -> bool:
        return self.words + more > self._slots // 2 or self._ids.used > 8 * self._slots

    def _keys(self, words: Words) -> Keys:
        low = self._load(words.text, words.starts, words.lengths)
        high = self._load(words.text, words.starts + 8, words.lengths - 8)
        high |= words.lengths << 56
        long = torch.nonzero(words.lengths > _EXACT).squeeze(1)
        if len(long):
            low[long], high[long] = self._hash(words.take(long))
        return Keys(low, high)

    def _load(self, text: Octets, at: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """The eight bytes of `text` from `at` int64 [n] on, those past `left` int64 [n] as zero."""
        aligned = text.padded.view(torch.int64)
        word, bits = at >> 3, (at & 7) << 3
        kept = self._masks[8 - (at & 7)]
        low = (aligned[word] >> bits) & kept
        high = aligned[word + 1] << (63 - bits) << 1
        return (low | high) & self._masks[left.clamp(0, 8)]

    def _chunks_of(self, words: Words) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Words as rows of eight bytes each: the rows int64 [T], and for each row the number of
        its word and its place in it, int64 [T].
        """
        counts = (words.lengths + 7) >> 3
        place = ranges(torch.zeros_like(counts), counts)
        owner = torch.repeat_interleave(counts, output_size=len(place))
        at = words.starts[owner] + 8 * place
        return self._load(words.text, at, words.lengths[owner] - 8 * place), owner, place

    def _hash(self, words: Words) -> Keys:
        """120 bits of hash of words of any length."""
        chunks, owner, place = self._chunks_of(words)
        sums = []
        for one, other in (_MIX[:2], _MIX[2:]):
            mixed = _scramble(chunks ^ _scramble(place + 1, one), other)
            total = words.lengths * _signed(one)
            sums.append(_scramble(total.index_add(0, owner, mixed), other))
        low, high = sums
        return Keys(low, (high & ((1 << 56) - 1)) | _signed(_HASHED << 56))

    def _home(self, keys: Keys) -> torch.Tensor:
        """The first slot to look at for each key."""
        mixed = _scramble(keys.low ^ _scramble(keys.high, _MIX[0]), _MIX[1])
        return mixed & (self._slots - 1)

    def _find(self, keys: Keys) -> torch.Tensor:
        """The slot of each key, or -1: int64 [W]."""
        at = self._home(keys)
        slots = torch.full_like(at, -1)
        open_ = torch.arange(len(at), device=at.device)
        while len(open_):
            high = self._high[at]
            same = (high == keys.high) & (self._low[at] == keys.low)
            slots[open_[same]] = at[same]
            on = ~same & (high != 0)
            open_, keys, at = open_[on], keys.take(on), (at[on] + 1) & (self._slots - 1)
        return slots

    def _insert(self, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Give each key a slot, equal keys the same one.

        Returns the slots int64 [W], and for each new slot the place in `keys` of one that has it.
        """
        at = self._home(keys)
        slots = torch.empty_like(at)
        claims = torch.empty(self._slots, dtype=torch.int64, device=self._device)
        owners = []
        open_ = torch.arange(len(at), device=at.device)
        while len(open_):
            free = self._high[at] == 0
            # Whoever finds a slot empty writes its number there; the one whose number stays has it.
            claims[at[free]] = open_[free]
            won = free & (claims[at] == open_)
            self._low[at[won]], self._high[at[won]] = keys.take(won)
            owners.append(open_[won])
            same = (self._high[at] == keys.high) & (self._low[at] == keys.low)
            slots[open_[same]] = at[same]
            on = ~same
            open_, keys, at = open_[on], keys.take(on), (at[on] + 1) & (self._slots - 1)
        return slots, torch.cat(owners)

    def _learn(self, words: Words, keys: Keys) -> torch.Tensor:
        """Take up words that are not there, with their ids; returns their slots int64 [W]."""
        try:
            slots, owners = self._insert(keys)
            self._fill(slots[owners], words.take(owners))
        except BaseException:
            self._clear()  # of keys without ids, whatever it was: out of memory, an interrupt
            raise
        return slots

    def _fill(self, slots: torch.Tensor, words: Words) -> None:
        """Keep the ids of words, all different, and what tells long ones apart."""
        self.words += len(slots)
        self._length[slots] = words.lengths
        self._first[slots], self._count[slots] = self._append(words)
        long = torch.nonzero(words.lengths > _EXACT).squeeze(1)
        if len(long):
            chunks, _, place = self._chunks_of(words.take(long))
            begins = torch.nonzero(place == 0).squeeze(1)
            self._chunk[slots[long]] = self._chunks.append(chunks) + begins

    def _append(self, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode words and put their ids into the pool: where each begins, and how many it has."""
        rows = self._encode(self._strings(words))
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
        first = self._ids.append(torch.from_numpy(ids).to(self._device))
        return (starts_of(counts)[:-1] + first).to(self._device), counts.to(self._device)

    def _strings(self, words: Words) -> list[str]:
        octets = words.text.padded[ranges(words.starts, words.lengths)].cpu().numpy()
        offsets = starts_of(words.lengths.cpu()).numpy()
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(octets)]
        strings: list[str] = pa.Array.from_buffers(
            pa.large_string(), len(offsets) - 1, buffers
        ).to_pylist()
        return strings

    def _same(self, words: Words, slots: torch.Tensor) -> torch.Tensor:
        """Whether a word has a slot, not -1, and is the one that the slot keeps: bool [W].

        Keys that are hashes may be equal where the words are not.
        """
        same = (slots >= 0) & (self._length[slots] == words.lengths)
        long = torch.nonzero(same & (words.lengths > _EXACT)).squeeze(1)
        if len(long):
            chunks, owner, place = self._chunks_of(words.take(long))
            kept = self._chunks.values[self._chunk[slots[long]][owner] + place]
            same[long[owner[kept != chunks]]] = False
        return same


class _Pool:
    """Numbers added one after another, in memory that doubles when it is full."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(1 << 16, dtype=dtype, device=device)
        self.used = 0

    def append(self, values: torch.Tensor) -> int:
        """Add values [n]; returns where they begin."""
        first, last = self.used, self.used + len(values)
        if last > len(self.values):
            larger = self.values.new_zeros(2 * last)
            larger[:first] = self.values[:first]
            self.values = larger
        self.values[first:last] = values
        self.used = last
        return first


def _signed(number: int) -> int:
    """The 64-bit integer of the same bits as `number`."""
    return number - (1 << 64) if number >> 63 else number


def _wrapped(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([_signed(number) for number in numbers])


def _scramble(values: torch.Tensor, odd: int) -> torch.Tensor:
    """Mix the bits of each number with all others of it."""
    values = (values ^ (values >> 31)) * _signed(odd)
    return values ^ (values >> 29)
