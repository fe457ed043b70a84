"""Byte-level BPE as an array program: the ids of `tokenizers`, computed where the tensors are.

Documents go to the device as one row of bytes. Added tokens are found, the rest is cut into words
by class of character, and each word's ids come out of a table; only words not seen before are
encoded by `tokenizers`, on the host. Nothing here asks which device it is but the memory limits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from infini_model.data.sources.documents import string_buffers
from infini_model.data.tokenizers.bpe import PROBE, BPETokenizer
from infini_model.data.tokenizers.gpu.added_tokens import AddedTokens, Matches
from infini_model.data.tokenizers.gpu.pretokens import (
    GPT2_PATTERN,
    PADDING,
    PATTERNS,
    Cutter,
    Octets,
    Pattern,
)
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of
from infini_model.data.tokenizers.gpu.word_table import Pieces, Words, WordTable
from infini_model.data.tokenizers.tokenizer import Ragged, Texts, Tokenizer, as_array
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# On the CPU 40 bytes a byte of text were seen at most; more is set apart, since a device that is
# asked for too much has to begin again with half.
_MEMORY_PER_BYTE = 256
# Where there is no telling how much memory is free.
_BATCH_BYTES = 16 << 20
_SLOTS = 1 << 22


class UnsupportedTokenizerError(DataError):
    """The tokenizer has a part that the array program does not know; the CPU one serves."""


class Tokens(NamedTuple):
    """`Ragged` on a device: `ids` int32 [N], `offsets` int64 [documents + 1]."""

    ids: torch.Tensor
    offsets: torch.Tensor


def close_documents(tokens: Tokens, eos_token_id: int) -> Tokens:
    """Put the end-of-text token after every document."""
    ids, offsets = tokens
    closed = offsets + torch.arange(len(offsets), device=offsets.device)
    values = ids.new_full((len(ids) + len(offsets) - 1,), eos_token_id)
    values[ranges(closed[:-1], offsets.diff())] = ids
    return Tokens(values, closed)


class DeviceTokenizer:
    """A `tokenizer.json` of byte-level BPE on `device`; `host` is the same file on the CPU.

    `slots`, a power of two, is the size of the table of words; the device's memory decides it
    where it is not given, as it decides how many bytes of text are encoded at a time.

    Raises `UnsupportedTokenizerError`, which names the part, where it cannot give the ids of
    `tokenizers`.
    """

    def __init__(self, host: BPETokenizer, device: torch.device, slots: int | None = None) -> None:
        tree, pattern = check_supported(host)
        self.spec = host.spec
        self.vocab_size = host.vocab_size
        self.eos_token_id = host.eos_token_id
        self.fingerprint = host.fingerprint
        self.device = device
        self._host = host
        self._added = AddedTokens(tree["added_tokens"], device)
        self._cutter = Cutter(pattern, device)
        self._words = WordTable(_word_encoder(tree), device, slots or _table_slots(device))
        self.batch_bytes = _batch_bytes(device)
        # The vocabulary's own words are known from the start.
        self.encode(host.vocabulary())

    def encode(self, texts: Texts) -> Tokens:
        """The ids of each document, left on the device."""
        parts = list(self._parts(as_array(texts)))
        lengths = [part.offsets.diff() for part in parts]
        nothing = torch.zeros(0, dtype=torch.int32, device=self.device)
        return Tokens(
            torch.cat([nothing, *(part.ids for part in parts)]),
            starts_of(torch.cat([nothing.long(), *lengths])),
        )

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document; special tokens spelt out in the text count as such."""
        ids, offsets = self.encode(texts)
        return Ragged(ids.cpu().numpy(), offsets.cpu().numpy())

    def decode(self, ids: Any) -> str:
        """The text of ids, special tokens spelt out."""
        return self._host.decode(ids)

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        """Whether `tokenizers` gives `ids` for `text`."""
        return self._host.same_ids(text, ids)

    def reference(self) -> BPETokenizer:
        """The same file, encoded by `tokenizers` alone."""
        return self._host.reference()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, the bytes that were loaded."""
        self._host.save(folder)

    def _parts(self, texts: pa.StringArray) -> Iterator[Tokens]:
        """Encode as many documents at a time as fit; fewer after the device ran out of memory."""
        offsets, _ = string_buffers(texts)
        start = 0
        while start < len(texts):
            fits = np.searchsorted(offsets, int(offsets[start]) + self.batch_bytes, side="right")
            end = max(int(fits) - 1, start + 1)
            try:
                yield self._encode(texts.slice(start, end - start))
            except torch.OutOfMemoryError:
                if end > start + 1:
                    self.batch_bytes = max(1, int(offsets[end] - offsets[start]) // 2)
                    log.info("%s: out of memory: batches are halved", self.device)
                    continue
                yield self._encode_on_host(texts.slice(start, 1))
            start = end

    def _encode_on_host(self, texts: pa.StringArray) -> Tokens:
        log.warning("%s: too small for a document; it is tokenised on the CPU", self.device)
        ids, offsets = self._host.encode_batch(texts)
        return Tokens(*(torch.from_numpy(part).to(self.device) for part in (ids, offsets)))

    def _encode(self, texts: pa.StringArray) -> Tokens:
        text, bounds = _upload(texts, self.device)
        added = self._added.find(text, bounds)
        sections = torch.cat([bounds[:-1], added.starts, added.starts + added.lengths])
        starts = self._cutter.cut(text, sections)
        starts = _without_inner(starts, added, text.size)
        lengths = torch.cat([starts, bounds[-1:]]).diff()
        ids, counts = self._merge(Words(text, starts, lengths), added)
        words_before = torch.searchsorted(starts, bounds)
        return Tokens(ids, starts_of(counts)[words_before])

    def _merge(self, words: Words, added: Matches) -> Pieces:
        """The ids of words, of which some are added tokens with an id of their own."""
        if not len(added.starts):
            return self._words.look_up(words)
        place = torch.searchsorted(words.starts, added.starts)
        plain = torch.ones_like(words.starts, dtype=torch.bool)
        plain[place] = False
        ids, plain_counts = self._words.look_up(words.take(plain))
        counts = torch.ones_like(words.starts)
        counts[plain] = plain_counts
        offsets = starts_of(counts)
        merged = ids.new_empty(int(offsets[-1]))
        merged[ranges(offsets[:-1][plain], plain_counts)] = ids
        merged[offsets[place]] = added.ids.int()
        return Pieces(merged, counts)


def check_supported(tokenizer: Tokenizer) -> tuple[dict[str, Any], Pattern]:
    """The definition of a tokenizer and how it cuts text, where the array program knows all of it.

    Raises `UnsupportedTokenizerError`, which names the part, where it does not.
    """
    if not isinstance(tokenizer, BPETokenizer):
        raise _refuse(f"tokenizer {tokenizer.spec}")
    tree: dict[str, Any] = json.loads(tokenizer.definition())
    _check(tree)
    return tree, _pattern(tree)


def put_on_device(host: BPETokenizer, device: str) -> Tokenizer:
    """`host` on `device`, or `host` itself where the device cannot give its ids; a log line says
    why.
    """
    try:
        tokenizer = DeviceTokenizer(host, torch.device(device))
    except UnsupportedTokenizerError as error:
        log.warning("%s: is tokenised on the CPU: %s", host.spec, error)
        return host
    ids, offsets = tokenizer.encode_batch(list(PROBE))
    rows = np.split(ids, offsets[1:-1])
    if not all(host.same_ids(text.encode(), row) for text, row in zip(PROBE, rows, strict=True)):
        log.warning("%s: %s gives other ids than tokenizers; not used", host.spec, device)
        return host
    return tokenizer


def _without_inner(starts: torch.Tensor, added: Matches, size: int) -> torch.Tensor:
    """The starts that lie in no added token, or at its beginning."""
    if not len(added.starts):
        return starts
    inner = torch.zeros(size, dtype=torch.bool, device=starts.device)
    inner[ranges(added.starts + 1, added.lengths - 1)] = True
    return starts[~inner[starts]]


def _upload(texts: pa.StringArray, device: torch.device) -> tuple[Octets, torch.Tensor]:
    """The bytes of documents on a device, and where each begins and the last ends."""
    offsets, octets = string_buffers(texts)
    first, last = int(offsets[0]), int(offsets[-1])
    size = last - first
    # Page-locked memory, from which a GPU copies at full speed.
    padded = torch.zeros(
        -(-size // 8) * 8 + PADDING, dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    padded[:size].numpy()[:] = octets[first:last]
    bounds = torch.from_numpy(offsets.astype(np.int64) - first)
    return Octets(padded.to(device, non_blocking=True), size), bounds.to(device)


def _batch_bytes(device: torch.device) -> int:
    """How much text a device takes at a time: what half its free memory allows."""
    if device.type != "cuda":
        return _BATCH_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, free // 2 // _MEMORY_PER_BYTE)


def _table_slots(device: torch.device) -> int:
    """The size of the table of words: a power of two, an eightieth of a device's free memory."""
    if device.type != "cuda":
        return _SLOTS
    free, _ = torch.cuda.mem_get_info(device)
    return int(1 << min(max(free // 4096, 1 << 16).bit_length() - 1, 24))


def _word_encoder(tree: Mapping[str, Any]) -> Any:
    """What encodes words by the model of a `tokenizer.json` alone: strings to their ids."""
    from tokenizers import Tokenizer as Reference
    from tokenizers.pre_tokenizers import ByteLevel

    alone = dict.fromkeys(tree) | {"version": tree["version"], "model": tree["model"]}
    model = Reference.from_str(json.dumps(alone | {"added_tokens": []}))
    # Bytes to the characters that stand for them in the vocabulary; nothing is cut.
    model.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(words: list[str]) -> list[list[int]]:
        return [row.ids for row in model.encode_batch_fast(words, add_special_tokens=False)]

    return encode


def _refuse(why: str) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError(f"{why} is not done on a GPU")


def _check(tree: Mapping[str, Any]) -> None:
    """Refuse what would make other ids than those of each word by itself."""
    model = tree["model"]
    if model["type"] != "BPE":
        raise _refuse(f"model {model['type']}")
    if model["dropout"]:
        raise _refuse("dropout of merges")
    if tree["normalizer"] is not None:
        raise _refuse(f"normalizer {tree['normalizer']['type']}")
    for token in tree["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise _refuse(f"added token {token['content']!r} with {flag}")


def _pattern(tree: Mapping[str, Any]) -> Pattern:
    """The pattern that a pre-tokenizer cuts by, which must be ByteLevel with or without a Split."""
    steps = _steps(tree["pre_tokenizer"])
    expression = None
    if len(steps) == 2 and steps[0]["type"] == "Split":
        split, *steps = steps
        if split["behavior"] != "Isolated" or split["invert"]:
            raise _refuse(f"pre-tokenizer Split with behavior {split['behavior']}")
        expression = split["pattern"].get("Regex")
    names = " and ".join(step["type"] for step in steps) or "none"
    if names != "ByteLevel":
        raise _refuse(f"pre-tokenizer {names}")
    (byte_level,) = steps
    if byte_level["add_prefix_space"]:
        raise _refuse("pre-tokenizer ByteLevel with add_prefix_space")
    if byte_level["use_regex"]:
        if expression is not None:
            raise _refuse("pre-tokenizer Split before ByteLevel with use_regex")
        expression = GPT2_PATTERN
    if expression not in PATTERNS:
        raise _refuse(f"pre-tokenizer Split by {expression!r}")
    return PATTERNS[expression]


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for one in pre_tokenizer["pretokenizers"] for step in _steps(one)]
    return [pre_tokenizer]
