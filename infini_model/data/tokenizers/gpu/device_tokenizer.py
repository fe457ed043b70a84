"""Byte-level BPE as an array program: the ids of `tokenizers`, computed on a device.

Documents are copied to the device as one row of bytes. Added tokens are found, the rest is split
into words by character class, and the ids of each word are looked up in a table; only new words
are encoded by `tokenizers`, on the host. Only the memory limits depend on the kind of device.
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

from infini_model.data.sources.string_arrays import string_buffers
from infini_model.data.tokenizers.bpe import PROBE, BPETokenizer
from infini_model.data.tokenizers.gpu.added_tokens import AddedTokens, Matches
from infini_model.data.tokenizers.gpu.pretokens import PADDING, PreTokenizer, TextBytes
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of
from infini_model.data.tokenizers.gpu.supported import (
    UnsupportedTokenizerError,
    check_supported,
    require_bpe,
)
from infini_model.data.tokenizers.gpu.word_table import Pieces, Words, WordTable
from infini_model.data.tokenizers.tokenizer import Ragged, Texts, Tokenizer, as_array

log = logging.getLogger(__name__)

# Memory per byte of text. At most 40 bytes were measured on the CPU; the reserve is generous since
# running out of memory means starting over with half the batch.
_MEMORY_PER_BYTE = 256
# For devices that do not report their free memory.
_BATCH_BYTES = 16 << 20
_SLOTS = 1 << 22


class Tokens(NamedTuple):
    """`Ragged` on a device: `ids` int32 [N], `offsets` int64 [documents + 1]."""

    ids: torch.Tensor
    offsets: torch.Tensor


def close_documents(tokens: Tokens, eos_token_id: int) -> Tokens:
    """The same documents with the end-of-text token after each."""
    ids, offsets = tokens
    closed = offsets + torch.arange(len(offsets), device=offsets.device)
    values = ids.new_full((len(ids) + len(offsets) - 1,), eos_token_id)
    values[ranges(closed[:-1], offsets.diff())] = ids
    return Tokens(values, closed)


class DeviceTokenizer:
    """A `tokenizer.json` of byte-level BPE on `device`; `host` is the same file on the CPU.

    `slots`, a power of two, is the size of the word table. By default the free memory of the
    device decides it, as well as how many bytes of text are encoded at a time.

    Raises `UnsupportedTokenizerError`, which names the part that is not supported.
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
        self._pre_tokenizer = PreTokenizer(pattern, device)
        self._words = WordTable(_word_encoder(tree), device, slots or _table_slots(device))
        self.batch_bytes = _batch_bytes(device)
        # Fill the table with the words of the vocabulary.
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
        """The ids of each document; special tokens spelt out in the text become their ids."""
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
        """Encode as many documents at a time as fit; halve the batch when memory runs out."""
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
                    log.info("%s: out of memory: halving the batch size", self.device)
                    continue
                yield self._encode_on_host(texts.slice(start, 1))
            start = end

    def _encode_on_host(self, texts: pa.StringArray) -> Tokens:
        log.warning("%s: out of memory: tokenising a document on the CPU", self.device)
        ids, offsets = self._host.encode_batch(texts)
        return Tokens(*(torch.from_numpy(part).to(self.device) for part in (ids, offsets)))

    def _encode(self, texts: pa.StringArray) -> Tokens:
        text, bounds = _upload(texts, self.device)
        added = self._added.find(text, bounds)
        sections = torch.cat([bounds[:-1], added.starts, added.starts + added.lengths])
        starts = self._pre_tokenizer.split(text, sections)
        starts = _drop_inside_added(starts, added, text.size)
        lengths = torch.cat([starts, bounds[-1:]]).diff()
        ids, counts = self._merge(Words(text, starts, lengths), added)
        words_before = torch.searchsorted(starts, bounds)
        return Tokens(ids, starts_of(counts)[words_before])

    def _merge(self, words: Words, added: Matches) -> Pieces:
        """The ids of words, some of which are added tokens."""
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


def put_on_device(tokenizer: Tokenizer, device: str) -> DeviceTokenizer:
    """`tokenizer` on `device`, checked against `tokenizers` on a probe text.

    Raises `UnsupportedTokenizerError` if the device cannot give the ids of `tokenizers`.
    """
    host = require_bpe(tokenizer)
    on_device = DeviceTokenizer(host, torch.device(device))
    ids, offsets = on_device.encode_batch(list(PROBE))
    rows = np.split(ids, offsets[1:-1])
    if not all(host.same_ids(text.encode(), row) for text, row in zip(PROBE, rows, strict=True)):
        raise UnsupportedTokenizerError(f"{device} and tokenizers disagree on {host.spec}")
    return on_device


def _drop_inside_added(starts: torch.Tensor, added: Matches, size: int) -> torch.Tensor:
    """The starts that are not inside an added token; its first byte is kept."""
    if not len(added.starts):
        return starts
    inner = torch.zeros(size, dtype=torch.bool, device=starts.device)
    inner[ranges(added.starts + 1, added.lengths - 1)] = True
    return starts[~inner[starts]]


def _upload(texts: pa.StringArray, device: torch.device) -> tuple[TextBytes, torch.Tensor]:
    """The bytes of documents on a device, and their offsets: int64 [documents + 1]."""
    offsets, data = string_buffers(texts)
    first, last = int(offsets[0]), int(offsets[-1])
    size = last - first
    # A GPU copies from pinned memory at full speed.
    padded = torch.zeros(
        -(-size // 8) * 8 + PADDING, dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    padded[:size].numpy()[:] = data[first:last]
    bounds = torch.from_numpy(offsets.astype(np.int64) - first)
    return TextBytes(padded.to(device, non_blocking=True), size), bounds.to(device)


def _batch_bytes(device: torch.device) -> int:
    """Bytes of text to encode at a time: what half of the free memory allows."""
    if device.type != "cuda":
        return _BATCH_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, free // 2 // _MEMORY_PER_BYTE)


def _table_slots(device: torch.device) -> int:
    """Slots of the word table: a power of two, about an eightieth of the free memory."""
    if device.type != "cuda":
        return _SLOTS
    free, _ = torch.cuda.mem_get_info(device)
    return int(1 << min(max(free // 4096, 1 << 16).bit_length() - 1, 24))


def _word_encoder(tree: Mapping[str, Any]) -> Any:
    """A function from words to their ids, by the model of a `tokenizer.json` alone."""
    from tokenizers import Tokenizer as Reference
    from tokenizers.pre_tokenizers import ByteLevel

    alone = dict.fromkeys(tree) | {"version": tree["version"], "model": tree["model"]}
    model = Reference.from_str(json.dumps(alone | {"added_tokens": []}))
    # Maps bytes to the characters that represent them in the vocabulary; splits nothing.
    model.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(words: list[str]) -> list[list[int]]:
        return [row.ids for row in model.encode_batch_fast(words, add_special_tokens=False)]

    return encode
