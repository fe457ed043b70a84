"""Kernels from text to the kind of each byte, and from kinds to where pieces start.

Each byte has the kind of the character that it belongs to (see `character_classes`), so a neighbour
of a character is read at a fixed distance. Bits are packed 32 to an integer, lowest first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from infini_model.data.tokenizers.gpu import character_classes as cc

# What is added to a kind: a section starts here; not the first byte of a character.
FIRST, CONTINUED = 1 << 6, 1 << 7
# Bytes before and after the kinds of a text, so that neighbours are read without a mask.
MARGIN = 8

_CLASS, _KIND = tl.constexpr(cc.CLASS), tl.constexpr(FIRST - 1)
_FIRST, _CONTINUED, _MARGIN = (tl.constexpr(number) for number in (FIRST, CONTINUED, MARGIN))
_OTHER, _LETTER, _NUMBER = (tl.constexpr(number) for number in (cc.OTHER, cc.LETTER, cc.NUMBER))
_WHITE, _NEWLINE = tl.constexpr(cc.WHITE), tl.constexpr(cc.NEWLINE)
_SPACE, _APOSTROPHE = tl.constexpr(cc.SPACE), tl.constexpr(cc.APOSTROPHE)
_ALONE, _TWICE = tl.constexpr(cc.ALONE), tl.constexpr(cc.TWICE)
_BEFORE_E, _E = tl.constexpr(cc.BEFORE_E), tl.constexpr(cc.E)


@triton.jit
def _is_continued(byte: tl.tensor) -> tl.tensor:
    return (byte & 0xC0) == 0x80


@triton.jit
def _pack(bits: tl.tensor, BYTES: tl.constexpr) -> tl.tensor:
    """Booleans [BYTES] as int32 [BYTES / 32]."""
    rows = tl.reshape(bits.to(tl.uint32), (BYTES // 32, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1).to(tl.int32)


@triton.jit
def classify(
    text: tl.tensor,
    size: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    prefixes: tl.tensor,
    kinds: tl.tensor,
    candidates: tl.tensor,
    BYTES: tl.constexpr,
) -> None:
    """The kind of each byte, and the places where the first two bytes are those of a token.

    `text` uint8 is valid UTF-8, at least 4 zero bytes after it; the kind of a code point c is
    `blocks[pages[c >> 8], c & 255]`; `prefixes` uint8 [65536]. Writes `kinds` uint8
    [MARGIN + size + MARGIN] without the margins, and `candidates` int32 [programs * BYTES / 32].
    """
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    within = at < size
    byte = tl.load(text + at, within, other=0).to(tl.int32)
    continued = _is_continued(byte)
    start = at - continued.to(tl.int32)
    for _ in tl.static_range(2):
        back = continued & _is_continued(tl.load(text + start, within & continued, other=0))
        start -= back.to(tl.int32)
    one = tl.load(text + start, within, other=0).to(tl.int32)
    two = tl.load(text + start + 1, within, other=0).to(tl.int32)
    three = tl.load(text + start + 2, within & (one >= 0xE0), other=0).to(tl.int32) & 0x3F
    four = tl.load(text + start + 3, within & (one >= 0xF0), other=0).to(tl.int32) & 0x3F
    tail = two & 0x3F
    point = tl.where(one < 0xE0, (one & 0x1F) << 6 | tail, (one & 0x0F) << 12 | tail << 6 | three)
    point = tl.where(one < 0xF0, point, (one & 7) << 18 | tail << 12 | three << 6 | four)
    point = tl.where(one < 0x80, one, point)
    page = tl.load(pages + (point >> 8)).to(tl.int32)
    kind = tl.load(blocks + page * 256 + (point & 255)).to(tl.int32)
    kind = tl.where(continued, kind | _CONTINUED, kind)
    tl.store(kinds + _MARGIN + at, kind.to(tl.uint8), within)
    found = tl.load(prefixes + (byte << 8 | two), within & ~continued, other=0) != 0
    words = tl.program_id(0) * (BYTES // 32) + tl.arange(0, BYTES // 32)
    tl.store(candidates + words, _pack(found, BYTES))


@triton.jit
def _is_lone(before: tl.tensor, here: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Whether a character of class OTHER starts a run, and no space of its section is before it."""
    border = first | ((before & _CLASS) != _OTHER)
    spaced = ~first & ((before & _KIND) == _SPACE)
    return ((here & _CLASS) == _OTHER) & border & ~spaced


@triton.jit
def _within(kind: tl.tensor) -> tl.tensor:
    """A character's kind; 0 if it starts a section."""
    return tl.where((kind & _FIRST) != 0, 0, kind & _KIND)


@triton.jit
def _is_short(before: tl.tensor, here: tl.tensor, one: tl.tensor) -> tl.tensor:
    """Whether an apostrophe and one letter are a contraction."""
    mark = ((here & _KIND) == _APOSTROPHE) & _is_lone(before, here, (here & _FIRST) != 0)
    return mark & (_within(one) == _ALONE)


@triton.jit
def _is_long(before: tl.tensor, here: tl.tensor, one: tl.tensor, two: tl.tensor) -> tl.tensor:
    """Whether an apostrophe and two letters are a contraction."""
    mark = ((here & _KIND) == _APOSTROPHE) & _is_lone(before, here, (here & _FIRST) != 0)
    one, two = _within(one), _within(two)
    same = (one == _TWICE) & (two == _TWICE)
    return mark & (same | ((one == _BEFORE_E) & (two == _E)))


@triton.jit
def _is_between_newlines(kinds: tl.tensor, at: tl.tensor, active: tl.tensor) -> tl.tensor:
    """Whether blanks that start at `at`, after a newline, are followed by one and start no piece.

    White space up to its last newline is one piece, except for newlines that OTHERs take.
    """
    after, place, walking = tl.zeros_like(at), at, active
    while tl.max(walking.to(tl.int32)) > 0:
        place += walking.to(tl.int32)
        kind = tl.load(kinds + place, walking, other=0).to(tl.int32)
        ends = walking & (((kind & _CLASS) != _WHITE) | ((kind & _FIRST) != 0))
        after = tl.where(ends, _within(kind), after)
        walking = walking & ~ends
    found = active & ((after & _CLASS) == _NEWLINE)
    before, place, walking = tl.zeros_like(at), at - 1, found
    first = (tl.load(kinds + place, walking, other=0).to(tl.int32) & _FIRST) != 0
    walking = walking & ~first
    while tl.max(walking.to(tl.int32)) > 0:
        place -= walking.to(tl.int32)
        kind = tl.load(kinds + place, walking, other=0).to(tl.int32)
        same = (kind & _CLASS) == _NEWLINE
        before = tl.where(walking & ~same, kind & _CLASS, before)
        walking = walking & same & ((kind & _FIRST) == 0)
    return found & (before != _OTHER)


@triton.jit
def _mark_groups(
    kinds: tl.tensor, starts: tl.tensor, at: tl.tensor, walking: tl.tensor, DIGITS: tl.constexpr
) -> None:
    """Set the bit of every `DIGITS`-th character of the runs of numbers that start at `at`."""
    digits = tl.zeros_like(at)
    while tl.max(walking.to(tl.int32)) > 0:
        at += walking.to(tl.int32)
        kind = tl.load(kinds + at, walking, other=0).to(tl.int32)
        walking = walking & ((kind & _CLASS) == _NUMBER) & ((kind & _FIRST) == 0)
        digits += (walking & ((kind & _CONTINUED) == 0)).to(tl.int32)
        full = walking & (digits == DIGITS)
        bit = (tl.full(at.shape, 1, tl.uint32) << (at & 31).to(tl.uint32)).to(tl.int32)
        tl.atomic_or(starts + (at >> 5), bit, full, sem="relaxed")
        digits = tl.where(full, 0, digits)


@triton.jit
def cut(
    kinds: tl.tensor,
    size: tl.tensor,
    starts: tl.tensor,
    DIGITS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """Set the bits of `starts`, int32 [programs * BYTES / 32] and zero before, where pieces start.

    `DIGITS` is `Pattern.digits`, 0 for GPT-2. A run of characters is walked along, by the program
    in which it starts, only where the pattern depends on where it started or how it ends.
    """
    kinds += _MARGIN
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    within = at < size
    here = tl.load(kinds + at, within, other=_FIRST).to(tl.int32)
    last = tl.load(kinds + at - 1, within, other=0).to(tl.int32)
    last2 = tl.load(kinds + at - 2, within, other=0).to(tl.int32)
    last3 = tl.load(kinds + at - 3, within, other=0).to(tl.int32)
    last4 = tl.load(kinds + at - 4, within, other=0).to(tl.int32)
    next1 = tl.load(kinds + at + 1, within, other=_FIRST).to(tl.int32)
    next2 = tl.load(kinds + at + 2, within, other=_FIRST).to(tl.int32)
    next3 = tl.load(kinds + at + 3, within, other=_FIRST).to(tl.int32)
    number = here & _CLASS
    before = last & _CLASS
    first = (here & _FIRST) != 0
    border = first | (number != before)
    spaced = ~first & ((last & _KIND) == _SPACE)
    # No blank has more than three bytes.
    follows = tl.where((next2 & _CONTINUED) == 0, next2, next3)
    follows = tl.where((next1 & _CONTINUED) == 0, next1, follows)
    visible = ((follows & _CLASS) < _WHITE) & ((follows & _FIRST) == 0)
    begins = within & ((here & _CONTINUED) == 0)
    # The last blank of a run, before a visible character, starts a piece.
    last_blank = (number == _WHITE) & visible
    if DIGITS == 0:
        found = (border & ~(spaced & (number < _WHITE))) | last_blank
    else:
        # Letters take the character before them: a blank, or a lone OTHER.
        last5 = tl.load(kinds + at - 5, within, other=0).to(tl.int32)
        previous = tl.where((last3 & _CONTINUED) == 0, last3, last4)
        earlier = tl.where((last3 & _CONTINUED) == 0, last4, last5)
        earlier = tl.where((last2 & _CONTINUED) == 0, last3, earlier)
        previous = tl.where((last2 & _CONTINUED) == 0, last2, previous)
        earlier = tl.where((last & _CONTINUED) == 0, last2, earlier)
        previous = tl.where((last & _CONTINUED) == 0, last, previous)
        lone = _is_lone(earlier, previous, (previous & _FIRST) != 0)
        taken = (number == _LETTER) & ~first & ((before == _WHITE) | lone)
        # OTHERs take the space before and the newlines after them; newlines the blanks before.
        taken = taken | ((number == _OTHER) & spaced)
        taken = taken | ((number == _NEWLINE) & ~first & ((before == _WHITE) | (before == _OTHER)))
        found = (border & ~taken) | last_blank
        blanks = begins & border & ~first & (number == _WHITE) & (before == _NEWLINE)
        found = found & ~_is_between_newlines(kinds, at, blanks)
        if DIGITS == 1:
            found = found | (number == _NUMBER)
        else:
            _mark_groups(kinds, starts, at, begins & border & (number == _NUMBER), DIGITS)
    # A contraction is a piece, if its apostrophe is not part of another one.
    hidden = _is_short(last2, last, here) | _is_long(last2, last, here, next1)
    wide = (last & _CONTINUED) != 0
    after = _is_long(last4, last3, last2, last) | tl.where(
        wide, _is_short(last4, last3, last2), _is_short(last3, last2, last)
    )
    found = begins & ((found & ~hidden) | after)
    words = tl.program_id(0) * (BYTES // 32) + tl.arange(0, BYTES // 32)
    tl.atomic_or(starts + words, _pack(found, BYTES), sem="relaxed")
