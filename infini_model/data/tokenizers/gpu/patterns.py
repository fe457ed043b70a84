"""The patterns by which supported tokenizers split text into words."""

from __future__ import annotations

from typing import NamedTuple

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


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
