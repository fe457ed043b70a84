"""Byte-level BPE on a GPU: the ids of `tokenizers`, computed by Triton kernels.

Documents are copied to the device as one row of bytes and split into words by the kinds of
characters, the ids of each word are looked up in a table, and new words are encoded by merging
pairs. A document in which an added token is spelt out is left to the tokenizer on the CPU.

This module needs no Triton: it says which tokenizers are supported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from infini_model.data.tokenizers.bpe import DIGITS, GPT2_PATTERN, BPETokenizer
from infini_model.data.tokenizers.tokenizer import Texts, Tokenizer
from infini_model.runtime.errors import DataError

# The kernels keep the rank of a merge in 23 bits.
MAX_MERGES = (1 << 23) - 1


class UnsupportedTokenizerError(DataError):
    """The tokenizer cannot run on a GPU; the message names the part that is not supported."""


class Tokens(NamedTuple):
    """`Ragged` on a device: `ids` int32 [N], `offsets` int64 [documents + 1]."""

    ids: torch.Tensor
    offsets: torch.Tensor


@runtime_checkable
class EncodesOnDevice(Protocol):
    """A tokenizer whose ids can stay on its device."""

    def encode(self, texts: Texts) -> Tokens:
        """The ids of each document, left on the device."""


def check_supported(tokenizer: Tokenizer) -> tuple[BPETokenizer, dict[str, Any], int]:
    """The tokenizer itself, its `tokenizer.json`, and the longest run of digits in a word.

    Raises `UnsupportedTokenizerError` if the kernels would not give its ids, or cannot be compiled
    as Triton is missing.
    """
    if not isinstance(tokenizer, BPETokenizer):
        raise _unsupported(f"tokenizer {tokenizer.spec}")
    tree: dict[str, Any] = json.loads(tokenizer.definition())
    _check_model(tree["model"])
    # Of several tokens with one id the canonical form keeps one.
    if json.loads(tokenizer.text)["model"]["vocab"] != tree["model"]["vocab"]:
        raise _unsupported("a vocabulary in which two tokens have the same id")
    if tree["normalizer"] is not None:
        raise _unsupported(f"normalizer {tree['normalizer']['type']}")
    for token in tree["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise _unsupported(f"added token {token['content']!r} with {flag}")
        if token["content"].isspace():
            # Nearly every document has one, and would be left to the CPU.
            raise _unsupported(f"added token {token['content']!r} of white space")
    digits = _digits(tree)
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedTokenizerError("Triton, which a GPU needs to tokenise, is not installed")
    return tokenizer, tree, digits


def byte_of_character() -> dict[str, int]:
    """The byte that each character stands for in a vocabulary of byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def _unsupported(part: str) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError(f"{part} is not supported on a GPU")


def _check_model(model: Mapping[str, Any]) -> None:
    """Refuse what makes the ids of a word depend on more than its bytes and the merges."""
    if model["type"] != "BPE":
        raise _unsupported(f"model {model['type']}")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[setting]:
            raise _unsupported(f"BPE with {setting}")
    if not model["vocab"].keys() >= byte_of_character().keys():
        raise _unsupported("a vocabulary without some bytes")
    if len(model["merges"]) >= MAX_MERGES:
        raise _unsupported(f"a vocabulary of {MAX_MERGES} merges or more")


def _digits(tree: Mapping[str, Any]) -> int:
    """The entry of `DIGITS` of a pre-tokenizer, which must be ByteLevel with or without a Split."""
    whole = tree["pre_tokenizer"] or {"pretokenizers": []}
    steps, expression = whole.get("pretokenizers", [whole]), None
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
    if expression not in DIGITS:
        raise _unsupported(f"pre-tokenizer Split by {expression!r}")
    return DIGITS[expression]
