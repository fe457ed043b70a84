"""What each code point is to the patterns of byte-level BPE: letter, number, white space or other.

The installed `tokenizers` is asked, once a process: Python's own tables are of another version of
Unicode. The tables need no place in a dataset's key: they are right or wrong, and where they are
right the ids are those of `tokenizers`.
"""

from __future__ import annotations

import functools

import numpy as np

CODE_POINTS = 0x110000
# The low bits of a kind are its class; zero is no character at all.
CLASS = 0b111
OTHER, LETTER, NUMBER, WHITE, NEWLINE = range(1, 6)
# The kinds that patterns name: characters with a part of their own.
SPACE = WHITE | 1 << 3
APOSTROPHE = OTHER | 1 << 3
# In 's 't 'm 'd; in 'll; the first letter and the second of 're and 've.
ALONE, TWICE, BEFORE_E, E = (LETTER | part << 3 for part in range(1, 5))
_CONTRACTED = {ALONE: "stmd", TWICE: "l", BEFORE_E: "rv", E: "e"}
_BLOCK = 1 << 12


@functools.cache
def _classes() -> np.ndarray:
    """The class of every code point, NEWLINE for CR and LF alone: uint8 [0x110000]."""
    classes = np.full(CODE_POINTS, OTHER, np.uint8)
    # All but the surrogates, which are no characters.
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, CODE_POINTS))))
    for expression, number in ((r"\p{L}+", LETTER), (r"\p{N}+", NUMBER), (r"\s+", WHITE)):
        classes[_matching(expression, every)] = number
    classes[[ord("\r"), ord("\n")]] = NEWLINE
    return classes


def _matching(expression: str, characters: str) -> np.ndarray:
    """Which `characters` `tokenizers` finds to match `expression`: bool [0x110000]."""
    from tokenizers import Regex
    from tokenizers.normalizers import Replace

    erase = Replace(Regex(expression), "")
    matching = np.ones(CODE_POINTS, bool)
    for start in range(0, len(characters), _BLOCK):
        left = erase.normalize_str(characters[start : start + _BLOCK])
        matching[np.frombuffer(left.encode("utf-32-le"), np.uint32)] = False
    return matching


def kinds(*, newlines: bool, any_case: bool) -> np.ndarray:
    """The kind of every code point: uint8 [0x110000].

    `newlines` keeps CR and LF apart from the other white space; `any_case` lets contractions have
    capitals, and U+017F (ſ) stand for s, as a pattern without regard to case does.
    """
    table = _classes().copy()
    if not newlines:
        table[table == NEWLINE] = WHITE
    table[ord(" ")] = SPACE
    table[ord("'")] = APOSTROPHE
    for kind, letters in _CONTRACTED.items():
        folded = letters + letters.upper() if any_case else letters
        table[[ord(letter) for letter in folded]] = kind
    if any_case:
        table[0x17F] = ALONE
    return table
