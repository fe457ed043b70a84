"""The model of a `tokenizer.json` on a device: from a word to its ids, by merging pairs of symbols.

What the kernel does not do exactly, or a word that is too long for it, is left to `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from infini_model.data.tokenizers.gpu.kernels.launch import MULTIPLIER, launch, programs
from infini_model.data.tokenizers.gpu.kernels.merging import NO_RANK, merge
from infini_model.data.tokenizers.gpu.pretokens import PADDING
from infini_model.data.tokenizers.gpu.ragged import ranges
from infini_model.data.tokenizers.gpu.words import Pool, Words, values_of, words_of

# The longest words of the kernel's two sizes, and the symbols of one program.
SIZES = (32, 256)
SYMBOLS = 2048


class _Merges(NamedTuple):
    """`symbols` int32 [256] of bytes, and a hash table of `pairs` int64 [n, 2], as `merge` has."""

    symbols: torch.Tensor
    pairs: torch.Tensor

    def encode(self, words: Words, which: torch.Tensor, pool: Pool, size: int) -> torch.Tensor:
        """The values of the words `which`, int32 [n], of at most `size` bytes: int64 [n]."""
        lengths = words.lengths(which)
        values, firsts = torch.empty_like(lengths), pool.reserve(lengths)
        each = SYMBOLS // size
        launch(
            merge,
            programs(len(which), each),
            *(words.text.padded, words.starts, which, len(which)),
            *(self.symbols, self.pairs, len(self.pairs) - 1, MULTIPLIER),
            *(firsts, pool.values, values),
            WORDS=each,
            LENGTH=size,
        )
        return values


class WordModel:
    """Encodes words by the model of `tree`, a `tokenizer.json`, on `device`.

    `whole` are the words that are tokens whatever the merges are, with their values; or None.
    """

    def __init__(self, tree: Mapping[str, Any], device: torch.device) -> None:
        self._encode_on_host = _host_encoder(tree)
        self._merges = _read_merges(tree["model"], device)
        self.whole = _whole_words(tree["model"], device)

    def encode(self, words: Words, which: torch.Tensor, pool: Pool) -> torch.Tensor:
        """Encode the words `which`, int32 [n], into `pool`; returns their values, int64 [n].

        None of them is one of `whole`, but those that are longer than the kernel's words may be.
        """
        lengths = words.lengths(which)
        values = torch.empty_like(lengths)
        done = 0
        for size in SIZES:
            if self._merges is None:
                break
            chosen = torch.nonzero((lengths > done) & (lengths <= size)).squeeze(1)
            if len(chosen):
                values[chosen] = self._merges.encode(words, which[chosen], pool, size)
            done = size
        chosen = torch.nonzero(lengths > done).squeeze(1)
        if len(chosen):
            values[chosen] = self._append(words, which[chosen], pool)
        return values

    def _append(self, words: Words, which: torch.Tensor, pool: Pool) -> torch.Tensor:
        """The same by `tokenizers`."""
        rows = self._encode_on_host(words.strings(which))
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows])
        counts = torch.tensor([len(row) for row in rows]).to(which.device)
        firsts = pool.reserve(counts)
        pool.values[ranges(firsts, counts)] = torch.from_numpy(ids).to(which.device)
        return values_of(torch.where(counts == 1, pool.values[firsts].long(), firsts), counts)


def _host_encoder(tree: Mapping[str, Any]) -> Any:
    """A function from words to their ids, by the model of a `tokenizer.json` alone."""
    from tokenizers import Tokenizer as Reference
    from tokenizers.pre_tokenizers import ByteLevel

    alone = dict.fromkeys(tree) | {"version": tree["version"], "model": tree["model"]}
    model = Reference.from_str(json.dumps(alone | {"added_tokens": []}))
    # Maps bytes to the characters that represent them in the vocabulary; splits nothing.
    model.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(words: list[str]) -> list[list[int]]:
        return [row.ids for row in model.encode_batch_fast(words, add_special_tokens=False)]

    return encode


def _byte_characters() -> dict[str, int]:
    """The byte that each character stands for in a vocabulary of byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def _whole_words(
    model: Mapping[str, Any], device: torch.device
) -> tuple[Words, torch.Tensor] | None:
    """With `ignore_merges`, a word of the vocabulary is one token."""
    if not model["ignore_merges"]:
        return None
    bytes_of = _byte_characters()
    contents, ids = [], []
    for token, number in model["vocab"].items():
        content = [bytes_of.get(character, -1) for character in token]
        if content and min(content) >= 0 and len(content) <= SIZES[-1]:
            contents.append(bytes(content))
            ids.append(number)
    numbers = torch.tensor(ids, device=device)
    return words_of(contents, PADDING, device), values_of(numbers, torch.ones_like(numbers))


def _read_merges(model: Mapping[str, Any], device: torch.device) -> _Merges | None:
    """The merges of a model; None if the kernel's ids would not be those of `tokenizers`."""
    vocab: Mapping[str, int] = model["vocab"]
    symbols = {byte: vocab.get(character, -1) for character, byte in _byte_characters().items()}
    if (
        min(symbols.values()) < 0
        or len(set(vocab.values())) < len(vocab)
        or len(model["merges"]) >= NO_RANK
        or model["continuing_subword_prefix"]
        or model["end_of_word_suffix"]
    ):
        return None
    found = {
        vocab[left] << 32 | vocab[right]: rank << 32 | vocab[left + right]
        for rank, (left, right) in enumerate(model["merges"])
    }
    return _Merges(
        torch.tensor([symbols[byte] for byte in range(256)], dtype=torch.int32, device=device),
        torch.from_numpy(_hash_table(found)).to(device),
    )


def _hash_table(found: Mapping[int, int]) -> np.ndarray:
    """Open addressing by `mix`, at most half full: int64 [a power of two, 2], −1 where free."""
    table = np.full((triton.next_power_of_2(2 * len(found) + 1), 2), -1)
    keys = np.fromiter(found.keys(), np.int64, len(found))
    at = _mix(keys.view(np.uint64)) & np.uint64(len(table) - 1)
    at = at.astype(np.int64)
    pending = np.arange(len(keys))
    while len(pending):
        free = pending[table[at[pending], 0] == -1]
        # Of several keys with the same slot, the last one stays.
        table[at[free], 0] = keys[free]
        pending = pending[table[at[pending], 0] != keys[pending]]
        at[pending] = (at[pending] + 1) & (len(table) - 1)
    table[at, 1] = np.fromiter(found.values(), np.int64, len(found))
    return table


def _mix(numbers: np.ndarray) -> np.ndarray:
    """The function of this name in the kernels."""
    mixed: np.ndarray = (numbers ^ (numbers >> np.uint64(31))) * np.uint64(MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    return mixed
