"""Where byte-level BPE cuts text before it merges: the GPT-2 and Llama-3 patterns without a regex.

Every alternative of these patterns is local to runs of characters of one class, so all cuts of all
documents are found at once by comparing each character with its neighbours. The same operations
run on the CPU and on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN
from infini_model.data.tokenizers.gpu import character_classes as cc

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A text is followed by so many zero bytes at least, so that whole words of it can be read.
PADDING = 16


class Pattern(NamedTuple):
    """A way of cutting. `digits` is the longest row of digits in one piece, in the family of
    Llama 3; None is GPT-2, which gives digits and letters a space before them, nothing else.
    """

    digits: int | None


# Qwen's pattern is that of Llama 3 with every digit by itself.
PATTERNS = {
    GPT2_PATTERN: Pattern(None),
    LLAMA3_PATTERN: Pattern(3),
    LLAMA3_PATTERN.replace("{1,3}", ""): Pattern(1),
}


class Octets(NamedTuple):
    """Text on a device: `padded` uint8 [a multiple of 8], of which the first `size` are UTF-8."""

    padded: torch.Tensor
    size: int


class _Characters(NamedTuple):
    """All characters of a text, C in number, and what stands before them.

    `kinds` and `classes` uint8 [C]; `first` bool [C], whether a section begins here; `border`
    bool [C], whether a run of one class does; `spaced` bool [C], whether the character before is
    a space of the same section.
    """

    kinds: torch.Tensor
    classes: torch.Tensor
    first: torch.Tensor
    border: torch.Tensor
    spaced: torch.Tensor


class Cutter:
    """Cuts text on `device` by a pattern."""

    def __init__(self, pattern: Pattern, device: torch.device) -> None:
        self._pattern = pattern
        llama = pattern.digits is not None
        table = cc.kinds(newlines=llama, any_case=llama)
        self._table = torch.from_numpy(table).to(device)

    def cut(self, text: Octets, sections: torch.Tensor) -> torch.Tensor:
        """The bytes at which pieces begin, ascending: int64 [pieces].

        `sections` int64 [S] are the bytes where a document, or a part of one to be cut by itself,
        begins; the first is 0. Such a part may be empty.
        """
        octets = text.padded[: text.size]
        at = torch.nonzero((octets & 0xC0) != 0x80).squeeze(1)
        opens = torch.zeros(text.size + 1, dtype=torch.bool, device=octets.device)
        opens[sections] = True
        characters = _characters(self._table.index_select(0, _code_points(text, at)), opens[at])
        if self._pattern.digits is None:
            starts = _gpt2(characters)
        else:
            starts = _llama3(characters, self._pattern.digits)
        return at[_contract(characters, starts)]


def _code_points(text: Octets, at: torch.Tensor) -> torch.Tensor:
    """The code points whose first bytes are at `at` int64 [C]: int32 [C]."""
    points = text.padded[at].int()
    several = torch.nonzero(points >= 0x80).squeeze(1)
    points[several] = _decode(text, at[several])
    return points


def _decode(text: Octets, at: torch.Tensor) -> torch.Tensor:
    """The same of code points that have two, three or four bytes."""
    one, two, three, four = (text.padded[at + place].int() for place in range(4))
    two, three, four = two & 0x3F, three & 0x3F, four & 0x3F
    wide = torch.where(
        one < 0xF0,
        (one & 0x0F) << 12 | two << 6 | three,
        (one & 0x07) << 18 | two << 12 | three << 6 | four,
    )
    return torch.where(one < 0xE0, (one & 0x1F) << 6 | two, wide)


def _before(values: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """What stands `steps` places before each element; zero before the first."""
    moved = torch.zeros_like(values)
    moved[steps:] = values[: max(0, len(values) - steps)]
    return moved


def _after(values: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """What stands `steps` places after each element; zero after the last."""
    moved = torch.zeros_like(values)
    moved[: max(0, len(values) - steps)] = values[steps:]
    return moved


def _characters(kinds: torch.Tensor, first: torch.Tensor) -> _Characters:
    classes = kinds & cc.CLASS
    border = first | (classes != _before(classes))
    return _Characters(kinds, classes, first, border, (_before(kinds) == cc.SPACE) & ~first)


def _last_blank(text: _Characters) -> torch.Tensor:
    """Where the last blank of a run stands before a visible character: it parts from the others."""
    blank = text.classes >= cc.WHITE
    ends = torch.ones_like(text.first)
    ends[:-1] = text.first[1:]
    return (text.classes == cc.WHITE) & ~_after(blank) & ~ends


def _gpt2(text: _Characters) -> torch.Tensor:
    """Runs, each with one space before it: bool [C]."""
    visible = text.classes < cc.WHITE
    return (text.border & ~(text.spaced & visible)) | _last_blank(text)


def _llama3(text: _Characters, digits: int) -> torch.Tensor:
    """The pieces of Llama 3, contractions not regarded: bool [C]."""
    classes, border = text.classes, text.border
    before = _before(classes)
    inside = ~text.first
    # A letter takes the character before it: a blank, or the only one of its run of others unless
    # that has a space before it.
    lone = _before((classes == cc.OTHER) & border & ~text.spaced)
    taken = (classes == cc.LETTER) & inside & ((before == cc.WHITE) | lone)
    # Others take a space before them and the newlines after; newlines take the blanks before.
    taken |= (classes == cc.OTHER) & text.spaced
    taken |= (classes == cc.NEWLINE) & inside & ((before == cc.WHITE) | (before == cc.OTHER))
    starts = (border & ~taken) | _last_blank(text)
    starts[_blanks_between_newlines(text)] = False
    number = torch.nonzero(classes == cc.NUMBER).squeeze(1)
    starts[number] = _every(number, border[number], digits)
    return starts


def _every(places: torch.Tensor, border: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the characters at `places` int64 [n] are the first of `count`, from a border on."""
    run = torch.cumsum(border, 0) - 1
    return (places - places[border][run]) % count == 0


def _blanks_between_newlines(text: _Characters) -> torch.Tensor:
    """The runs of blanks that newlines take, though newlines stand before them: int64 [n].

    White space up to its last newline is one piece, but for the newlines that others took.
    """
    runs = torch.nonzero(text.border).squeeze(1)
    classes = text.classes[runs]
    first = text.first[runs]
    before = _before(classes).masked_fill(first, 0)
    two_before = _before(before).masked_fill(first, 0)
    after = _after(classes.masked_fill(first, 0))
    between = (classes == cc.WHITE) & (before == cc.NEWLINE) & (after == cc.NEWLINE)
    return runs[between & (two_before != cc.OTHER)]


def _contract(text: _Characters, starts: torch.Tensor) -> torch.Tensor:
    """Cut contractions at their end, where an apostrophe begins a piece by itself."""
    kinds = text.kinds
    inside = ~text.first
    one, two = (_after(kinds.masked_fill(text.first, 0), steps) for steps in (1, 2))
    opens = (kinds == cc.APOSTROPHE) & text.border & ~text.spaced
    short = opens & (one == cc.ALONE)
    pair = ((one == cc.TWICE) & (two == cc.TWICE)) | ((one == cc.BEFORE_E) & (two == cc.E))
    long = opens & pair
    starts = starts & ~(_before(short | long) & inside)
    return starts | _before(short, 2) | _before(long, 3)
