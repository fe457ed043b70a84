"""A hash table on a device from words to their token ids, so that each word is encoded once.

A word is a piece of text inside which bytes are merged. Its key is two numbers: the bytes of a word
of up to 15 bytes, or a hash of a longer one, whose bytes are compared after the lookup. The table
uses open addressing, has a fixed size and is emptied when half full. Words that are too long to
keep, or whose key belongs to another word, are encoded each time they occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from infini_model.data.tokenizers.gpu.pretokens import TextBytes
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of

_MAX_EXACT_BYTES = 15
_MAX_KEPT_BYTES = 256
_HASHED = 0xFF
# Odd constants of SplitMix64 and xxHash.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


class Words(NamedTuple):
    """Words of a text: `starts` and `lengths` in bytes, int64 [W]; no word is empty."""

    text: TextBytes
    starts: torch.Tensor
    lengths: torch.Tensor

    def take(self, which: torch.Tensor | slice) -> Words:
        """The subset at indices `which` int64 [n], or where `which` bool [W] is true."""
        return Words(self.text, self.starts[which], self.lengths[which])


class Keys(NamedTuple):
    """The keys of words, two numbers each, int64 [W]; `high` is never zero."""

    low: torch.Tensor
    high: torch.Tensor

    def take(self, which: torch.Tensor) -> Keys:
        """The subset at indices `which` int64 [n], or where `which` bool [W] is true."""
        return Keys(self.low[which], self.high[which])


class Pieces(NamedTuple):
    """Token ids of words: `ids` int32 [N]; `counts` int64 [W] is how many each word has."""

    ids: torch.Tensor
    counts: torch.Tensor


class WordTable:
    """The ids of words; `encode` maps new words, as strings, to their ids.

    `slots`, a power of two, bounds the memory: about 50 bytes each, plus the words and their ids.
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
        self._masks = _signed_tensor([(1 << 8 * count) - 1 for count in range(9)]).to(device)
        self._low, self._high, self._length, self._first, self._count, self._chunk = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(6)
        )
        self._clear()

    def _clear(self) -> None:
        """Remove every word."""
        self._high.zero_()
        self._ids = _Pool(torch.int32, self._device)
        self._chunks = _Pool(torch.int64, self._device)
        self.words = 0

    def look_up(self, words: Words) -> Pieces:
        """The ids of all these words; new words are added."""
        step = self._slots // 4
        parts = [
            self._look_up(words.take(slice(start, start + step)))
            for start in range(0, max(1, len(words.starts)), step)
        ]
        return Pieces(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _look_up(self, words: Words) -> Pieces:
        keys = self._keys(words)
        keep = words.lengths <= _MAX_KEPT_BYTES
        slots = self._find(keys)
        new = torch.nonzero((slots < 0) & keep).squeeze(1)
        if len(new):
            if self._is_full(len(new)):
                self._clear()
                slots.fill_(-1)
                new = torch.nonzero(keep).squeeze(1)
            slots[new] = self._add(words.take(new), keys.take(new))
        firsts, counts = self._first[slots], self._count[slots]
        # Words that are not in the table: their ids are in the pool for this call only.
        absent = torch.nonzero(~self._is_match(words, slots)).squeeze(1)
        used = self._ids.used
        if len(absent):
            firsts[absent], counts[absent] = self._append(words.take(absent))
        ids = self._ids.values[ranges(firsts, counts)]
        self._ids.used = used
        return Pieces(ids, counts)

    def _is_full(self, more: int) -> bool:
        return self.words + more > self._slots // 2 or self._ids.used > 8 * self._slots

    def _keys(self, words: Words) -> Keys:
        low = self._load(words.text, words.starts, words.lengths)
        high = self._load(words.text, words.starts + 8, words.lengths - 8)
        high |= words.lengths << 56
        long = torch.nonzero(words.lengths > _MAX_EXACT_BYTES).squeeze(1)
        if len(long):
            low[long], high[long] = self._hash(words.take(long))
        return Keys(low, high)

    def _load(self, text: TextBytes, at: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """The 8 bytes of `text` at each of `at` int64 [n]; zero after the first `left` [n]."""
        aligned = text.padded.view(torch.int64)
        word, bits = at >> 3, (at & 7) << 3
        kept = self._masks[8 - (at & 7)]
        low = (aligned[word] >> bits) & kept
        high = aligned[word + 1] << (63 - bits) << 1
        return (low | high) & self._masks[left.clamp(0, 8)]

    def _chunks_of(self, words: Words) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Words as 8-byte chunks: the chunks, the word of each and its place in it, int64 [T]."""
        counts = (words.lengths + 7) >> 3
        place = ranges(torch.zeros_like(counts), counts)
        owner = torch.repeat_interleave(counts, output_size=len(place))
        at = words.starts[owner] + 8 * place
        return self._load(words.text, at, words.lengths[owner] - 8 * place), owner, place

    def _hash(self, words: Words) -> Keys:
        """A 120-bit hash of words of any length."""
        chunks, owner, place = self._chunks_of(words)
        sums = []
        for one, other in (_MULTIPLIERS[:2], _MULTIPLIERS[2:]):
            mixed = _mix(chunks ^ _mix(place + 1, one), other)
            total = words.lengths * _signed(one)
            sums.append(_mix(total.index_add(0, owner, mixed), other))
        low, high = sums
        return Keys(low, (high & ((1 << 56) - 1)) | _signed(_HASHED << 56))

    def _home(self, keys: Keys) -> torch.Tensor:
        """The first slot to probe for each key."""
        mixed = _mix(keys.low ^ _mix(keys.high, _MULTIPLIERS[0]), _MULTIPLIERS[1])
        return mixed & (self._slots - 1)

    def _find(self, keys: Keys) -> torch.Tensor:
        """The slot of each key, or -1: int64 [W]."""
        at = self._home(keys)
        slots = torch.full_like(at, -1)
        pending = torch.arange(len(at), device=at.device)
        while len(pending):
            high = self._high[at]
            same = (high == keys.high) & (self._low[at] == keys.low)
            slots[pending[same]] = at[same]
            rest = ~same & (high != 0)
            pending, keys = pending[rest], keys.take(rest)
            at = (at[rest] + 1) & (self._slots - 1)
        return slots

    def _insert(self, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Insert new keys; equal keys share a slot.

        Returns the slots int64 [W], and for each slot the index in `keys` of its owner.
        """
        at = self._home(keys)
        slots = torch.empty_like(at)
        claims = torch.empty(self._slots, dtype=torch.int64, device=self._device)
        owners = []
        pending = torch.arange(len(at), device=at.device)
        while len(pending):
            free = self._high[at] == 0
            # Every key writes its index to a free slot; the one whose index stays owns the slot.
            claims[at[free]] = pending[free]
            won = free & (claims[at] == pending)
            self._low[at[won]], self._high[at[won]] = keys.take(won)
            owners.append(pending[won])
            same = (self._high[at] == keys.high) & (self._low[at] == keys.low)
            slots[pending[same]] = at[same]
            rest = ~same
            pending, keys = pending[rest], keys.take(rest)
            at = (at[rest] + 1) & (self._slots - 1)
        return slots, torch.cat(owners)

    def _add(self, words: Words, keys: Keys) -> torch.Tensor:
        """Add new words with their ids; returns their slots int64 [W]."""
        try:
            slots, owners = self._insert(keys)
            self._fill(slots[owners], words.take(owners))
        except BaseException:
            self._clear()  # there may be keys without ids: out of memory, an interrupt
            raise
        return slots

    def _fill(self, slots: torch.Tensor, words: Words) -> None:
        """Store the ids of distinct words, and the bytes of those whose key is a hash."""
        self.words += len(slots)
        self._length[slots] = words.lengths
        self._first[slots], self._count[slots] = self._append(words)
        long = torch.nonzero(words.lengths > _MAX_EXACT_BYTES).squeeze(1)
        if len(long):
            chunks, _, place = self._chunks_of(words.take(long))
            first = torch.nonzero(place == 0).squeeze(1)
            self._chunk[slots[long]] = self._chunks.append(chunks) + first

    def _append(self, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode words and append their ids to the pool; returns where each starts and how many."""
        rows = self._encode(self._strings(words))
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
        first = self._ids.append(torch.from_numpy(ids).to(self._device))
        return (starts_of(counts)[:-1] + first).to(self._device), counts.to(self._device)

    def _strings(self, words: Words) -> list[str]:
        data = words.text.padded[ranges(words.starts, words.lengths)].cpu().numpy()
        offsets = starts_of(words.lengths.cpu()).numpy()
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        strings: list[str] = pa.Array.from_buffers(
            pa.large_string(), len(offsets) - 1, buffers
        ).to_pylist()
        return strings

    def _is_match(self, words: Words, slots: torch.Tensor) -> torch.Tensor:
        """Whether each word has a slot (not -1) that holds the same word: bool [W].

        Different words can have equal keys if these are hashes.
        """
        same = (slots >= 0) & (self._length[slots] == words.lengths)
        long = torch.nonzero(same & (words.lengths > _MAX_EXACT_BYTES)).squeeze(1)
        if len(long):
            chunks, owner, place = self._chunks_of(words.take(long))
            kept = self._chunks.values[self._chunk[slots[long]][owner] + place]
            same[long[owner[kept != chunks]]] = False
        return same


class _Pool:
    """A growing array, whose memory doubles when it is full."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(1 << 16, dtype=dtype, device=device)
        self.used = 0

    def append(self, values: torch.Tensor) -> int:
        """Append values [n]; returns the index of the first."""
        first, last = self.used, self.used + len(values)
        if last > len(self.values):
            larger = self.values.new_zeros(2 * last)
            larger[:first] = self.values[:first]
            self.values = larger
        self.values[first:last] = values
        self.used = last
        return first


def _signed(number: int) -> int:
    """`number` as a signed 64-bit integer with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _signed_tensor(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([_signed(number) for number in numbers])


def _mix(values: torch.Tensor, odd: int) -> torch.Tensor:
    """Mix the bits of each number: an xor-shift, a multiplication and another xor-shift."""
    values = (values ^ (values >> 31)) * _signed(odd)
    return values ^ (values >> 29)
