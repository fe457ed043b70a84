"""A hash table on a device from words to their token ids, so that each word is encoded once.

A word is a piece of text inside which bytes are merged. Its key is two numbers: the bytes of a word
of up to 15 bytes, or a hash of a longer one, whose bytes are compared as well. The table uses open
addressing, has a fixed size and is emptied when half full. Words that are too long to keep, or for
which there is no room, are encoded each time they occur.
"""

from __future__ import annotations

import torch
import triton

from infini_model.data.tokenizers.gpu.kernels.ids import count_ids, emit
from infini_model.data.tokenizers.gpu.kernels.launch import MULTIPLIER, WORDS, launch, programs
from infini_model.data.tokenizers.gpu.kernels.words import (
    MAX_EXACT_BYTES,
    MAX_KEPT_BYTES,
    claim,
    fill,
    probe,
)
from infini_model.data.tokenizers.gpu.ragged import starts_of
from infini_model.data.tokenizers.gpu.word_model import WordModel
from infini_model.data.tokenizers.gpu.words import Pool, Words


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
        self._kept = Pool(torch.int64, self._device)
        self.words, self._lasting = 0, 0
        if self._model.whole is not None:
            words, values = self._model.whole
            everything = torch.arange(len(words), dtype=torch.int32, device=self._device)
            slots = self._claim(words, everything)
            self._fill(words, everything, slots, values)

    def look_up(self, words: Words) -> torch.Tensor:
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

    def write_ids(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of words with these values: int32 [N], and where those of each start.

        The latter are int32 [W + 1].
        """
        grid = programs(len(values), WORDS)
        totals = values.new_empty(grid, dtype=torch.int32)
        launch(count_ids, grid, values, len(values), totals, WORDS=WORDS)
        offsets = starts_of(totals)
        ids = totals.new_empty(int(offsets[-1]))
        places = totals.new_empty(len(values) + 1)
        places[-1] = len(ids)
        launch(
            emit,
            grid,
            *(values, len(values), offsets, self._ids.values, ids, places),
            WORDS=WORDS,
        )
        return ids, places

    def _probe(
        self, words: Words, listed: torch.Tensor | None, values: torch.Tensor
    ) -> torch.Tensor:
        """Look up all words, or those listed, int32 [n]; returns those that are missing."""
        count = len(words) if listed is None else len(listed)
        missing = words.starts.new_empty(count)
        missed = words.starts.new_zeros(1)
        launch(
            probe,
            programs(count, WORDS),
            *(self._table, self._slots - 1, self._kept.values),
            *(words.text.padded.view(torch.int64), words.starts),
            *(words.starts if listed is None else listed, count, MULTIPLIER),
            *(values, missing, missed),
            LISTED=listed is not None,
            WORDS=WORDS,
        )
        return missing[: int(missed)]

    def _add(self, words: Words, new: torch.Tensor) -> None:
        """Encode these words, int32 [n], which are not in the table, and keep them."""
        try:
            slots = self._claim(words, new)
            owners = torch.nonzero(slots >= 0).squeeze(1)
            new, slots = new[owners], slots[owners]
            self._fill(words, new, slots, self._model.encode(words, new, self._ids))
            self._lasting = self._ids.used
        except BaseException:
            self._clear()  # there may be slots without ids: out of memory, an interrupt
            raise

    def _claim(self, words: Words, new: torch.Tensor) -> torch.Tensor:
        """The slots that these words claim, int32 [n]; −1 for repetitions of a word."""
        slots = torch.empty_like(new)
        launch(
            claim,
            programs(len(new), WORDS),
            *(self._table, self._slots - 1, words.text.padded.view(torch.int64), words.starts),
            *(new, len(new), MULTIPLIER, slots),
            WORDS=WORDS,
        )
        return slots

    def _fill(
        self, words: Words, new: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write distinct words with their values into the slots that they claimed."""
        lengths = words.lengths(new)
        chunks = self._kept.reserve(torch.where(lengths > MAX_EXACT_BYTES, (lengths + 7) >> 3, 0))
        launch(
            fill,
            programs(len(new), WORDS),
            *(self._table, self._kept.values, words.text.padded.view(torch.int64), words.starts),
            *(new, len(new), MULTIPLIER, slots, values, chunks),
            WORDS=WORDS,
        )
        self.words += len(new)
