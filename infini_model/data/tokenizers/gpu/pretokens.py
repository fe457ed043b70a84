"""Pre-tokenization for byte-level BPE: the GPT-2 and Llama-3 patterns without a regex.

Every alternative of these patterns is local to runs of characters of one class, so all splits of
all documents are found at once by comparing each character with its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from infini_model.data.tokenizers.gpu import character_classes as cc
from infini_model.data.tokenizers.gpu.kernels.bits import count_bits, place_bits
from infini_model.data.tokenizers.gpu.kernels.characters import (
    CONTINUED,
    FIRST,
    MARGIN,
    classify,
    cut,
)
from infini_model.data.tokenizers.gpu.kernels.launch import BYTES, launch, programs
from infini_model.data.tokenizers.gpu.patterns import Pattern
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of

# At least this many zero bytes follow a text, so that 8-byte reads stay inside the buffer.
PADDING = 16
_PAGE = 256


class TextBytes(NamedTuple):
    """Text on a device: the first `size` bytes of `padded`, uint8 [a multiple of 8], are UTF-8."""

    padded: torch.Tensor
    size: int


class Classified(NamedTuple):
    """The kinds of a text's bytes, uint8 [MARGIN + size + MARGIN], with the marks of sections.

    `candidates` int32 [C] are where an added token may start, ascending.
    """

    kinds: torch.Tensor
    candidates: torch.Tensor

    def mark_sections(self, starts: torch.Tensor) -> None:
        """Split the text at byte offsets int64 [S], such as those of documents; one must be 0."""
        places = starts + MARGIN
        self.kinds[places] = self.kinds[places] | FIRST

    def mark_pieces(self, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Make each of these parts, int64 [M], one piece of its own; parts do not overlap."""
        self.mark_sections(starts + lengths)
        self.kinds[ranges(starts + 1 + MARGIN, lengths - 1)] = CONTINUED
        self.kinds[starts + MARGIN] = FIRST


class PreTokenizer:
    """Splits text on `device` by a pattern.

    `prefixes` bool [65536] is true for b * 256 + c if an added token may start with bytes b and c.
    """

    def __init__(self, pattern: Pattern, prefixes: torch.Tensor, device: torch.device) -> None:
        llama = pattern.digits is not None
        kinds = cc.kinds(newlines=llama, any_case=llama).reshape(-1, _PAGE)
        # Most pages of code points are the same: the table fits into the cache next to the cores.
        blocks, pages = np.unique(kinds, axis=0, return_inverse=True)
        self._digits = pattern.digits or 0
        self._blocks = torch.from_numpy(blocks).to(device)
        self._pages = torch.from_numpy(pages.reshape(-1).astype(np.int16)).to(device)
        self._prefixes = prefixes.to(torch.uint8).to(device)

    def classify(self, text: TextBytes) -> Classified:
        """The kinds of a text's bytes, before any section is marked."""
        kinds = text.padded.new_empty(text.size + 2 * MARGIN)
        kinds[:MARGIN] = 0
        kinds[-MARGIN:] = FIRST
        found = _new_bits(text)
        launch(
            classify,
            len(found) * 32 // BYTES,
            *(text.padded, text.size, self._pages, self._blocks, self._prefixes, kinds, found),
            BYTES=BYTES,
        )
        return Classified(kinds, _places(found, text.size)[:-1])

    def split(self, text: TextBytes, classified: Classified) -> torch.Tensor:
        """The byte offsets at which pieces start, ascending, and the size: int32 [pieces + 1]."""
        found = _new_bits(text)
        launch(
            cut,
            len(found) * 32 // BYTES,
            *(classified.kinds, text.size, found),
            DIGITS=self._digits,
            BYTES=BYTES,
        )
        return _places(found, text.size)


def _new_bits(text: TextBytes) -> torch.Tensor:
    """A bit for each byte of a text and up to the end of the last program's bytes, int32."""
    return text.padded.new_zeros(programs(text.size, BYTES) * BYTES // 32, dtype=torch.int32)


def _places(bits: torch.Tensor, size: int) -> torch.Tensor:
    """The indices of bits that are set, and `size`: int32 [n + 1]."""
    blocks = len(bits) * 32 // BYTES
    counts = bits.new_empty(blocks)
    launch(count_bits, blocks, bits, counts, BYTES=BYTES)
    offsets = starts_of(counts)
    places = bits.new_empty(int(offsets[-1]) + 1)
    places[-1] = size
    launch(place_bits, blocks, bits, offsets, places, BYTES=BYTES)
    return places
