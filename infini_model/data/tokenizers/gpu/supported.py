"""Which tokenizers the GPU's kernels support: byte-level BPE with a known pattern."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.gpu.patterns import GPT2_PATTERN, PATTERNS, Pattern
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.errors import DataError


class UnsupportedTokenizerError(DataError):
    """The tokenizer cannot run on a GPU; the message names the part that is not supported."""


def check_supported(tokenizer: Tokenizer) -> tuple[dict[str, Any], Pattern]:
    """The definition of a tokenizer, as in `tokenizer.json`, and the pattern that splits text.

    Raises `UnsupportedTokenizerError` if the kernels would not give its ids, or cannot be compiled
    as Triton is missing.
    """
    tree: dict[str, Any] = json.loads(require_bpe(tokenizer).definition())
    _check_model(tree)
    pattern = _pattern(tree)
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedTokenizerError("Triton, which a GPU needs to tokenise, is not installed")
    return tree, pattern


def require_bpe(tokenizer: Tokenizer) -> BPETokenizer:
    """`tokenizer` itself. Raises `UnsupportedTokenizerError` if it has no `tokenizer.json`."""
    if not isinstance(tokenizer, BPETokenizer):
        raise _unsupported(f"tokenizer {tokenizer.spec}")
    return tokenizer


def _unsupported(part: str) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError(f"{part} is not supported on a GPU")


def _check_model(tree: Mapping[str, Any]) -> None:
    """Refuse what makes the ids of a word depend on more than the word."""
    model = tree["model"]
    if model["type"] != "BPE":
        raise _unsupported(f"model {model['type']}")
    if model["dropout"]:
        raise _unsupported("dropout of merges")
    if tree["normalizer"] is not None:
        raise _unsupported(f"normalizer {tree['normalizer']['type']}")
    for token in tree["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise _unsupported(f"added token {token['content']!r} with {flag}")


def _pattern(tree: Mapping[str, Any]) -> Pattern:
    """The pattern of a pre-tokenizer, which must be ByteLevel with or without a Split."""
    steps = _steps(tree["pre_tokenizer"])
    expression = None
    if len(steps) == 2 and steps[0]["type"] == "Split":
        split, *steps = steps
        if split["behavior"] != "Isolated" or split["invert"]:
            raise _unsupported(f"pre-tokenizer Split with behavior {split['behavior']}")
        expression = split["pattern"].get("Regex")
    names = " and ".join(step["type"] for step in steps) or "none"
    if names != "ByteLevel":
        raise _unsupported(f"pre-tokenizer {names}")
    (byte_level,) = steps
    if byte_level["add_prefix_space"]:
        raise _unsupported("pre-tokenizer ByteLevel with add_prefix_space")
    if byte_level["use_regex"]:
        if expression is not None:
            raise _unsupported("pre-tokenizer Split before ByteLevel with use_regex")
        expression = GPT2_PATTERN
    if expression not in PATTERNS:
        raise _unsupported(f"pre-tokenizer Split by {expression!r}")
    return PATTERNS[expression]


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for one in pre_tokenizer["pretokenizers"] for step in _steps(one)]
    return [pre_tokenizer]
