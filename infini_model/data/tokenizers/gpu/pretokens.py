"""Pre-tokenization for byte-level BPE: the GPT-2 and Llama-3 patterns without a regex.

Every alternative of these patterns is local to runs of characters of one class, so all splits of
all documents are found at once by comparing each character with its neighbours. The same operations
run on the CPU and on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN
from infini_model.data.tokenizers.gpu import character_classes as cc

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# At least this many zero bytes follow a text, so that 8-byte reads stay inside the buffer.
PADDING = 16


class Pattern(NamedTuple):
    """How to split text. `digits` is the longest run of digits in a piece, for Llama 3 and its kin.

    None is GPT-2, where each run of letters, digits or others takes one space before it.
    """

    digits: int | None


# Qwen's pattern is that of Llama 3 with single digits.
PATTERNS = {
    GPT2_PATTERN: Pattern(None),
    LLAMA3_PATTERN: Pattern(3),
    LLAMA3_PATTERN.replace("{1,3}", ""): Pattern(1),
}


class TextBytes(NamedTuple):
    """Text on a device: the first `size` bytes of `padded`, uint8 [a multiple of 8], are UTF-8."""

    padded: torch.Tensor
    size: int


class _Characters(NamedTuple):
    """The C characters of a text and what precedes them.

    `kinds` and `classes` uint8 [C]; `first` bool [C], whether a section starts here; `border`
    bool [C], whether a run of one class starts here; `spaced` bool [C], whether the previous
    character is a space of the same section.
    """

    kinds: torch.Tensor
    classes: torch.Tensor
    first: torch.Tensor
    border: torch.Tensor
    spaced: torch.Tensor


class PreTokenizer:
    """Splits text on `device` by a pattern."""

    def __init__(self, pattern: Pattern, device: torch.device) -> None:
        self._pattern = pattern
        llama = pattern.digits is not None
        table = cc.kinds(newlines=llama, any_case=llama)
        self._table = torch.from_numpy(table).to(device)

    def split(self, text: TextBytes, sections: torch.Tensor) -> torch.Tensor:
        """The byte offsets at which pieces start, ascending: int64 [pieces].

        `sections` int64 [S] are the byte offsets of parts that are split independently, such as
        documents; the first is 0. Sections may be empty.
        """
        data = text.padded[: text.size]
        at = torch.nonzero((data & 0xC0) != 0x80).squeeze(1)
        is_start = torch.zeros(text.size + 1, dtype=torch.bool, device=data.device)
        is_start[sections] = True
        characters = _characters(self._table.index_select(0, _code_points(text, at)), is_start[at])
        if self._pattern.digits is None:
            starts = _gpt2(characters)
        else:
            starts = _llama3(characters, self._pattern.digits)
        return at[_split_contractions(characters, starts)]


def _code_points(text: TextBytes, at: torch.Tensor) -> torch.Tensor:
    """The code points whose first bytes are at `at` int64 [C]: int32 [C]."""
    points = text.padded[at].int()
    several = torch.nonzero(points >= 0x80).squeeze(1)
    points[several] = _decode(text, at[several])
    return points


def _decode(text: TextBytes, at: torch.Tensor) -> torch.Tensor:
    """The same for code points of two, three or four bytes."""
    one, two, three, four = (text.padded[at + place].int() for place in range(4))
    two, three, four = two & 0x3F, three & 0x3F, four & 0x3F
    wide = torch.where(
        one < 0xF0,
        (one & 0x0F) << 12 | two << 6 | three,
        (one & 0x07) << 18 | two << 12 | three << 6 | four,
    )
    return torch.where(one < 0xE0, (one & 0x1F) << 6 | two, wide)


def _before(values: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """The values shifted right by `steps`, with zeros first."""
    moved = torch.zeros_like(values)
    moved[steps:] = values[: max(0, len(values) - steps)]
    return moved


def _after(values: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """The values shifted left by `steps`, with zeros last."""
    moved = torch.zeros_like(values)
    moved[: max(0, len(values) - steps)] = values[steps:]
    return moved


def _characters(kinds: torch.Tensor, first: torch.Tensor) -> _Characters:
    classes = kinds & cc.CLASS
    border = first | (classes != _before(classes))
    return _Characters(kinds, classes, first, border, (_before(kinds) == cc.SPACE) & ~first)


def _last_blank(text: _Characters) -> torch.Tensor:
    """The last blank of a run before a visible character, where a new piece starts: bool [C]."""
    blank = text.classes >= cc.WHITE
    ends = torch.ones_like(text.first)
    ends[:-1] = text.first[1:]
    return (text.classes == cc.WHITE) & ~_after(blank) & ~ends


def _gpt2(text: _Characters) -> torch.Tensor:
    """Where pieces start: at runs, or at a single space before them: bool [C]."""
    visible = text.classes < cc.WHITE
    return (text.border & ~(text.spaced & visible)) | _last_blank(text)


def _llama3(text: _Characters, digits: int) -> torch.Tensor:
    """Where the pieces of Llama 3 start, ignoring contractions: bool [C]."""
    classes, border = text.classes, text.border
    before = _before(classes)
    inside = ~text.first
    # Letters take the character before them: a blank, or a lone OTHER without a space before it.
    lone = _before((classes == cc.OTHER) & border & ~text.spaced)
    taken = (classes == cc.LETTER) & inside & ((before == cc.WHITE) | lone)
    # OTHERs take the space before and the newlines after them; newlines take the blanks before.
    taken |= (classes == cc.OTHER) & text.spaced
    taken |= (classes == cc.NEWLINE) & inside & ((before == cc.WHITE) | (before == cc.OTHER))
    starts = (border & ~taken) | _last_blank(text)
    starts[_blanks_between_newlines(text)] = False
    number = torch.nonzero(classes == cc.NUMBER).squeeze(1)
    starts[number] = _group_starts(number, border[number], digits)
    return starts


def _group_starts(places: torch.Tensor, border: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each of the characters at `places` int64 [n] starts a group of `count` in its run."""
    run = torch.cumsum(border, 0) - 1
    return (places - places[border][run]) % count == 0


def _blanks_between_newlines(text: _Characters) -> torch.Tensor:
    """Where blanks between newlines start, which start no piece: int64 [n].

    White space up to its last newline is one piece, except for newlines that OTHERs take.
    """
    runs = torch.nonzero(text.border).squeeze(1)
    classes = text.classes[runs]
    first = text.first[runs]
    before = _before(classes).masked_fill(first, 0)
    two_before = _before(before).masked_fill(first, 0)
    after = _after(classes.masked_fill(first, 0))
    between = (classes == cc.WHITE) & (before == cc.NEWLINE) & (after == cc.NEWLINE)
    return runs[between & (two_before != cc.OTHER)]


def _split_contractions(text: _Characters, starts: torch.Tensor) -> torch.Tensor:
    """Make each contraction a piece, where its apostrophe is not part of another piece."""
    kinds = text.kinds
    inside = ~text.first
    one, two = (_after(kinds.masked_fill(text.first, 0), steps) for steps in (1, 2))
    apostrophe = (kinds == cc.APOSTROPHE) & text.border & ~text.spaced
    short = apostrophe & (one == cc.ALONE)
    pair = ((one == cc.TWICE) & (two == cc.TWICE)) | ((one == cc.BEFORE_E) & (two == cc.E))
    long = apostrophe & pair
    starts = starts & ~(_before(short | long) & inside)
    return starts | _before(short, 2) | _before(long, 3)
