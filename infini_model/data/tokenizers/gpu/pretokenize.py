"""Where text is split into words: the patterns of GPT-2, Llama 3 and Qwen without a regex.

Every alternative of these patterns is local to runs of characters of one class, so all splits of
all documents are found at once by comparing each character with its neighbours. Each byte has the
kind of the character that it belongs to, so a neighbour is read at a fixed distance.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import triton
import triton.language as tl

from infini_model.data.sources.text import string_buffers

# Bytes of text that one program of a kernel handles.
BYTES = 1024
# At least this many zero bytes follow a text, so that 8-byte reads stay inside the buffer.
PADDING = 16
# Bytes before and after the kinds of a text, so that neighbours are read without a mask.
MARGIN = 8
CODE_POINTS = 0x110000
_PAGE = 256

# The low bits of a kind are its class; zero is not a character.
CLASS = 0b111
OTHER, LETTER, NUMBER, WHITE, NEWLINE = range(1, 6)
# Kinds of characters that the patterns mention explicitly.
SPACE = WHITE | 1 << 3
APOSTROPHE = OTHER | 1 << 3
# In 's 't 'm 'd; in 'll; the first letter and the second of 're and 've.
ALONE, TWICE, BEFORE_E, E = (LETTER | part << 3 for part in range(1, 5))
_CONTRACTED = {ALONE: "stmd", TWICE: "l", BEFORE_E: "rv", E: "e"}
# What is added to a kind: a document starts here; not the first byte of a character.
FIRST, CONTINUED = 1 << 6, 1 << 7


class TextBytes(NamedTuple):
    """Text on a device: the first `size` bytes of `padded`, uint8 [a multiple of 8], are UTF-8."""

    padded: torch.Tensor
    size: int


def upload(texts: pa.StringArray, device: torch.device) -> tuple[TextBytes, torch.Tensor]:
    """The bytes of documents on a device, and their offsets: int64 [documents + 1]."""
    offsets, data = string_buffers(texts)
    first, last = int(offsets[0]), int(offsets[-1])
    size = last - first
    # A GPU copies from pinned memory at full speed.
    padded = torch.empty(
        -(-size // 8) * 8 + PADDING, dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    padded[:size].numpy()[:] = data[first:last]
    padded[size:] = 0
    bounds = torch.from_numpy(offsets.astype(np.int64) - first)
    return TextBytes(padded.to(device, non_blocking=True), size), bounds.to(device)


def launch(kernel: Any, count: int, each: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first argument, one program for `each` of `count` items."""
    if count:
        with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
            kernel[triton.cdiv(count, each),](*arguments, **constants)


class PreTokenizer:
    """Splits text on `device`; `digits` is the longest run of digits in a word, as in Llama 3.

    0 is GPT-2, where each run of letters, digits or others takes one space before it. `prefixes`
    bool [65536] is true for b * 256 + c if an added token may start with bytes b and c.
    """

    def __init__(self, digits: int, prefixes: torch.Tensor, device: torch.device) -> None:
        kinds = _kinds(like_llama=digits > 0).reshape(-1, _PAGE)
        # Most pages of code points are the same: the table fits into the cache next to the cores.
        blocks, pages = np.unique(kinds, axis=0, return_inverse=True)
        self._digits = digits
        self._blocks = torch.from_numpy(blocks).to(device)
        self._pages = torch.from_numpy(pages.reshape(-1).astype(np.int16)).to(device)
        self._prefixes = prefixes.to(torch.uint8).to(device)

    def split(self, text: TextBytes, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where words start, and where added tokens may.

        `bounds` int64 [documents + 1] ascend from 0 to the size of the text. Returns the offsets of
        the words and the size, int32 [words + 1], and those of the added tokens, int64 [C].
        """
        kinds = text.padded.new_empty(text.size + 2 * MARGIN)
        kinds[:MARGIN] = 0
        kinds[-MARGIN:] = FIRST
        starts, candidates = (text.padded.new_zeros(text.size) for _ in range(2))
        tables = self._pages, self._blocks, self._prefixes
        launch(
            classify,
            *(text.size, BYTES, text.padded, text.size, *tables, kinds, candidates),
            BYTES=BYTES,
        )
        kinds[bounds + MARGIN] = kinds[bounds + MARGIN] | FIRST
        launch(cut, text.size, BYTES, kinds, text.size, starts, DIGITS=self._digits, BYTES=BYTES)
        end = bounds.new_tensor([text.size])
        return torch.cat([starts.nonzero().view(-1), end]).int(), candidates.nonzero().view(-1)


@functools.cache
def _kinds(*, like_llama: bool) -> np.ndarray:
    """The kind of every code point: uint8 [0x110000].

    Classes are those of the installed `tokenizers`, since Python's tables may be of another version
    of Unicode. They are not part of a dataset's key: if they are correct, the ids are those of
    `tokenizers`. Llama 3 distinguishes CR and LF from other white space, and its contractions are
    case insensitive, where U+017F (ſ) counts as s.
    """
    from tokenizers import Regex
    from tokenizers.normalizers import Replace

    kinds = np.full(CODE_POINTS, OTHER, np.uint8)
    # All code points except surrogates, which are not characters.
    characters = "".join(map(chr, (*range(0xD800), *range(0xE000, CODE_POINTS))))
    blocks = [characters[start : start + 4096] for start in range(0, len(characters), 4096)]
    for expression, number in ((r"\p{L}+", LETTER), (r"\p{N}+", NUMBER), (r"\s+", WHITE)):
        erase = Replace(Regex(expression), "")
        left = "".join(map(erase.normalize_str, blocks))
        matching = np.ones(CODE_POINTS, bool)
        matching[np.frombuffer(left.encode("utf-32-le"), np.uint32)] = False
        kinds[matching] = number
    kinds[[ord(" "), ord("'")]] = SPACE, APOSTROPHE
    for kind, letters in _CONTRACTED.items():
        folded = letters + letters.upper() if like_llama else letters
        kinds[[ord(letter) for letter in folded]] = kind
    if like_llama:
        kinds[[ord("\r"), ord("\n"), ord("ſ")]] = NEWLINE, NEWLINE, ALONE
    return kinds


_CLASS, _KIND = tl.constexpr(CLASS), tl.constexpr(FIRST - 1)
_FIRST, _CONTINUED, _MARGIN = (tl.constexpr(number) for number in (FIRST, CONTINUED, MARGIN))
_OTHER, _LETTER, _NUMBER = (tl.constexpr(number) for number in (OTHER, LETTER, NUMBER))
_WHITE, _NEWLINE = tl.constexpr(WHITE), tl.constexpr(NEWLINE)
_SPACE, _APOSTROPHE = tl.constexpr(SPACE), tl.constexpr(APOSTROPHE)
_ALONE, _TWICE, _BEFORE_E, _E = (tl.constexpr(kind) for kind in _CONTRACTED)


@triton.jit
def _is_continued(byte: tl.tensor) -> tl.tensor:
    return (byte & 0xC0) == 0x80


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
    [MARGIN + size + MARGIN] without the margins, and 1 to `candidates` uint8 [size], zero before.
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
    tl.store(candidates + at, 1, found)


@triton.jit
def _is_lone(before: tl.tensor, here: tl.tensor) -> tl.tensor:
    """Whether a character of class OTHER starts a run, with no space of its document before it."""
    first = (here & _FIRST) != 0
    border = first | ((before & _CLASS) != _OTHER)
    spaced = ~first & ((before & _KIND) == _SPACE)
    return ((here & _CLASS) == _OTHER) & border & ~spaced


@triton.jit
def _within(kind: tl.tensor) -> tl.tensor:
    """A character's kind; 0 if it starts a document."""
    return tl.where((kind & _FIRST) != 0, 0, kind & _KIND)


@triton.jit
def _contractions(before: tl.tensor, here: tl.tensor, one: tl.tensor, two: tl.tensor) -> tl.tensor:
    """Tell if an apostrophe and one letter are a contraction, and if it and two letters are."""
    mark = ((here & _KIND) == _APOSTROPHE) & _is_lone(before, here)
    one, two = _within(one), _within(two)
    same = (one == _TWICE) & (two == _TWICE)
    return mark & (one == _ALONE), mark & (same | ((one == _BEFORE_E) & (two == _E)))


@triton.jit
def _is_between_newlines(kinds: tl.tensor, at: tl.tensor, active: tl.tensor) -> tl.tensor:
    """Whether blanks that start at `at`, after a newline, are followed by one and start no word.

    White space up to its last newline is one word, except for newlines that OTHERs take.
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
    """Set every `DIGITS`-th character of the runs of numbers that start at `at`."""
    digits = tl.zeros_like(at)
    while tl.max(walking.to(tl.int32)) > 0:
        at += walking.to(tl.int32)
        kind = tl.load(kinds + at, walking, other=0).to(tl.int32)
        walking = walking & ((kind & _CLASS) == _NUMBER) & ((kind & _FIRST) == 0)
        digits += (walking & ((kind & _CONTINUED) == 0)).to(tl.int32)
        full = walking & (digits == DIGITS)
        tl.store(starts + at, 1, full)
        digits = tl.where(full, 0, digits)


@triton.jit
def cut(
    kinds: tl.tensor, size: tl.tensor, starts: tl.tensor, DIGITS: tl.constexpr, BYTES: tl.constexpr
) -> None:
    """Write 1 to `starts`, uint8 [size] and zero before, where words start.

    `DIGITS` as `PreTokenizer` has it. A run of characters is walked along, by the program in which
    it starts, only where the pattern depends on where it started or how it ends.
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
    # The last blank of a run, before a visible character, starts a word.
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
        lone = _is_lone(earlier, previous)
        taken = (number == _LETTER) & ~first & ((before == _WHITE) | lone)
        # OTHERs take the space before and the newlines after them; newlines the blanks before.
        taken = taken | ((number == _OTHER) & spaced)
        taken = taken | ((number == _NEWLINE) & ~first & ((before == _WHITE) | (before == _OTHER)))
        found = (border & ~taken) | last_blank
        blanks = begins & border & ~first & (number == _WHITE) & (before == _NEWLINE)
        found = found & ~_is_between_newlines(kinds, at, blanks)
        _mark_groups(kinds, starts, at, begins & border & (number == _NUMBER), DIGITS)
    # A contraction is a word, if its apostrophe is not part of another one.
    short, long = _contractions(last2, last, here, next1)
    found = found & ~(short | long)
    wide, long = _contractions(last4, last3, last2, last)
    short, _ = _contractions(last3, last2, last, here)
    after = long | tl.where((last & _CONTINUED) != 0, wide, short)
    tl.store(starts + at, 1, begins & (found | after))
