"""The model of a `tokenizer.json` on a device: from a word to its ids, by merging pairs of symbols.

A word that is too long for the kernel is left to the tokenizer on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import triton
import triton.language as tl

from infini_model.data.tokenizers.gpu import MAX_MERGES, byte_of_character
from infini_model.data.tokenizers.gpu.pretokenize import PADDING, TextBytes, launch, upload
from infini_model.data.tokenizers.tokenizer import Ragged, Texts

# The longest words of the kernel's two sizes, and the symbols of one program.
SIZES = (32, 256)
SYMBOLS = 2048
# An odd number by which hashes are mixed; a positive int64, as kernels take their arguments.
MULTIPLIER = 0x1E3779B97F4A7C15


class Words(NamedTuple):
    """The W words of a text: `starts` int32 [W + 1] in bytes; each ends where the next starts."""

    text: TextBytes
    starts: torch.Tensor

    def __len__(self) -> int:
        """W."""
        return len(self.starts) - 1

    def lengths(self, which: torch.Tensor) -> torch.Tensor:
        """The lengths in bytes of words int [n], as int64 [n]."""
        return (self.starts[which + 1] - self.starts[which]).long()

    def content(self, which: torch.Tensor) -> torch.Tensor:
        """The bytes of words int [n], one after another: uint8 [N]."""
        return rows_of(self.text.padded, self.starts[which], self.lengths(which))


class Pool:
    """A growing array on a device, whose memory at least doubles when it is full."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(1 << 16, dtype=dtype, device=device)
        self.used = 0

    def reserve(self, lengths: torch.Tensor) -> torch.Tensor:
        """Room for rows of these lengths, int64 [n]; returns where each starts, int64 [n]."""
        offsets = starts_of(lengths) + self.used
        last = int(offsets[-1])
        if last + PADDING > len(self.values):
            larger = self.values.new_zeros(triton.next_power_of_2(last + PADDING))
            larger[: self.used] = self.values[: self.used]
            self.values = larger
        self.used = last
        return offsets[:-1]

    def append(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Keep rows of these lengths, one after another in `rows`; returns where each starts."""
        firsts = self.reserve(lengths)
        self.values[self.used - len(rows) : self.used] = rows
        return firsts


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """The offsets of rows with these lengths [n]: int64 [n + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def rows_of(values: torch.Tensor, firsts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The rows of `values` that begin at `firsts` [n], of these lengths [n], one after another."""
    shift = (firsts - starts_of(lengths)[:-1]).repeat_interleave(lengths)
    return values[shift + torch.arange(len(shift), device=shift.device)]


def values_of(firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The values of words: how many ids each has, and where in the pool they are, int64 [n].

    Instead of its place, the first number of a word with one id is the id itself.
    """
    return firsts << 32 | counts << 1 | 1


class WordModel:
    """Encodes words on `device` by the `model` of a `tokenizer.json`.

    `encode_on_host` gives the ids of texts by the same file. `whole` are the words that are tokens
    whatever the merges are, with their values; or None.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        encode_on_host: Callable[[Texts], Ragged],
        device: torch.device,
    ) -> None:
        self._encode_on_host = encode_on_host
        vocab: Mapping[str, int] = model["vocab"]
        symbols = [0] * 256
        for character, byte in byte_of_character().items():
            symbols[byte] = vocab[character]
        self._symbols = torch.tensor(symbols, dtype=torch.int32, device=device)
        pairs = {
            vocab[left] << 32 | vocab[right]: rank << 32 | vocab[left + right]
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._pairs = torch.from_numpy(_hash_table(pairs)).to(device)
        self.whole = _whole_words(vocab, device) if model["ignore_merges"] else None

    def encode(self, words: Words, which: torch.Tensor, pool: Pool) -> torch.Tensor:
        """Encode the words `which`, int32 [n], into `pool`; returns their values, int64 [n].

        None of them is one of `whole`, but those that are longer than the kernel's words may be.
        """
        lengths = words.lengths(which)
        values = torch.empty_like(lengths)
        done = 0
        for size in SIZES:
            chosen = torch.nonzero((lengths > done) & (lengths <= size)).view(-1)
            if len(chosen):
                values[chosen] = self._merge(words, which[chosen], pool, size)
            done = size
        chosen = torch.nonzero(lengths > done).view(-1)
        if len(chosen):
            values[chosen] = self._append(words, which[chosen], pool)
        return values

    def _merge(self, words: Words, which: torch.Tensor, pool: Pool, size: int) -> torch.Tensor:
        """The values of the words `which`, int32 [n], of at most `size` bytes: int64 [n]."""
        firsts = pool.reserve(words.lengths(which))
        values, each = torch.empty_like(firsts), SYMBOLS // size
        arguments = words.text.padded, words.starts, which, len(which)
        tables = self._symbols, self._pairs, len(self._pairs) - 1, MULTIPLIER
        outputs = firsts, pool.values, values
        launch(merge, len(which), each, *arguments, *tables, *outputs, WORDS=each, LENGTH=size)
        return values

    def _append(self, words: Words, which: torch.Tensor, pool: Pool) -> torch.Tensor:
        """The same on the host: the ids of a word are those of a text that consists of it alone."""
        offsets, data = starts_of(words.lengths(which)).int(), words.content(which)
        buffers = [pa.py_buffer(part.cpu().numpy()) for part in (offsets, data)]
        ids, ends = self._encode_on_host(pa.StringArray.from_buffers(len(which), *buffers))
        counts = torch.from_numpy(np.diff(ends)).to(which.device)
        firsts = pool.append(torch.from_numpy(ids).to(which.device), counts)
        return values_of(torch.where(counts == 1, pool.values[firsts].long(), firsts), counts)


def _whole_words(vocab: Mapping[str, int], device: torch.device) -> tuple[Words, torch.Tensor]:
    """With `ignore_merges`, a word of the vocabulary is one token."""
    bytes_of = byte_of_character()
    contents, ids = [], []
    for token, number in vocab.items():
        content = [bytes_of.get(character, -1) for character in token]
        if content and min(content) >= 0 and len(content) <= SIZES[-1]:
            contents.append(bytes(content))
            ids.append(number)
    text, bounds = upload(pa.array(contents, pa.binary()), device)
    numbers = torch.tensor(ids, device=device)
    return Words(text, bounds.int()), values_of(numbers, torch.ones_like(numbers))


def _hash_table(found: Mapping[int, int]) -> np.ndarray:
    """Open addressing by `mix`, at most half full: int64 [a power of two, 2], −1 where free.

    It mixes here as the function of this name does in the kernels.
    """
    table = np.full((triton.next_power_of_2(2 * len(found) + 1), 2), -1)
    keys = np.fromiter(found.keys(), np.int64, len(found))
    mixed = keys.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    at = (mixed & np.uint64(len(table) - 1)).astype(np.int64)
    pending = np.arange(len(keys))
    while len(pending):
        free = pending[table[at[pending], 0] == -1]
        # Of several keys with the same slot, the last one stays.
        table[at[free], 0] = keys[free]
        pending = pending[table[at[pending], 0] != keys[pending]]
        at[pending] = (at[pending] + 1) & (len(table) - 1)
    table[at, 1] = np.fromiter(found.values(), np.int64, len(found))
    return table


@triton.jit
def mix(number: tl.tensor, multiplier: tl.tensor) -> tl.tensor:
    """Mix the bits of uint64 numbers: an xor-shift, a multiplication and another xor-shift."""
    number = (number ^ (number >> 31)) * multiplier.to(tl.uint64)
    return number ^ (number >> 29)


@triton.jit
def listed_words(
    starts: tl.tensor, listed: tl.tensor, count: tl.tensor, LISTED: tl.constexpr, N: tl.constexpr
) -> tl.tensor:
    """A program's `N` of the `count` words that are listed, or of all.

    Returns their places in the list, whether they are in it, their numbers, starts and lengths.
    """
    index = tl.program_id(0) * N + tl.arange(0, N)
    within = index < count
    word = index
    if LISTED:
        word = tl.load(listed + index, within, other=0)
    start = tl.load(starts + word, within, other=0)
    return index, within, word, start, tl.load(starts + word + 1, within, other=0) - start


# Ranks are below this one, so that a rank and a place fit into 31 bits.
_NO_RANK = tl.constexpr(MAX_MERGES)


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
    index, within, _, start, length = listed_words(starts, listed, count, True, WORDS)
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
