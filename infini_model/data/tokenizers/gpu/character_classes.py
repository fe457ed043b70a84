"""The class of each code point in the patterns of byte-level BPE: letter, number, blank or other.

The installed `tokenizers` is queried once per process, since Python's tables may be of another
version of Unicode. The tables are not part of a dataset's key: if they are correct, the ids are
those of `tokenizers`.
"""

from __future__ import annotations

import functools

import numpy as np

CODE_POINTS = 0x110000
# The low bits of a kind are its class; zero is not a character.
CLASS = 0b111
OTHER, LETTER, NUMBER, WHITE, NEWLINE = range(1, 6)
# Kinds of characters that the patterns mention explicitly.
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
    # All code points except surrogates, which are not characters.
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, CODE_POINTS))))
    for expression, number in ((r"\p{L}+", LETTER), (r"\p{N}+", NUMBER), (r"\s+", WHITE)):
        classes[_matching(expression, every)] = number
    classes[[ord("\r"), ord("\n")]] = NEWLINE
    return classes


def _matching(expression: str, characters: str) -> np.ndarray:
    """Which `characters` match `expression` according to `tokenizers`: bool [0x110000]."""
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

    `newlines` distinguishes CR and LF from other white space; `any_case` makes contractions case
    insensitive, where U+017F (ſ) counts as s.
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
