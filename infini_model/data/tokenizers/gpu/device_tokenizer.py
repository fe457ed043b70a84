"""Byte-level BPE on a GPU: the ids of `tokenizers`, computed by Triton kernels.

Documents are copied to the device as one row of bytes. Added tokens are found, the rest is split
into words by the kinds of characters, the ids of each word are looked up in a table, and new words
are encoded by merging pairs; `tokenizers` encodes only what the kernels cannot. What moves through
memory, in bytes for each byte of text with words of w bytes and t tokens to a word:

| step | reads | writes |
| --- | --- | --- |
| the text, from the host | | 1 |
| `classify`: the kind of each byte, places of added tokens | 1 | 1 + 1/8 |
| those places | 1/4 | |
| `cut`: where words start | 1 | 1/8 + 1/8 |
| `count_bits`, `place_bits`: the starts of words | 1/4 | 4/w |
| `probe`: a slot of the table, and the value of each word | 1 + 4/w + 32/w | 8/w |
| `count_ids`, `emit`: ids | 16/w + 4t/w | 4/w + 4t/w |

With words of 4.5 bytes and one token each it is 23, so 5 GB of text a second need 115 GB/s.
Triton's interpreter runs all of it on CPU tensors, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from infini_model.data.sources.text import string_buffers
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.gpu.added_tokens import AddedTokens
from infini_model.data.tokenizers.gpu.pretokens import PADDING, PreTokenizer, TextBytes
from infini_model.data.tokenizers.gpu.ragged import starts_of
from infini_model.data.tokenizers.gpu.supported import (
    UnsupportedTokenizerError,
    check_supported,
    require_bpe,
)
from infini_model.data.tokenizers.gpu.tokens import Tokens
from infini_model.data.tokenizers.gpu.word_model import WordModel
from infini_model.data.tokenizers.gpu.word_table import WordTable
from infini_model.data.tokenizers.gpu.words import Words, values_of
from infini_model.data.tokenizers.tokenizer import PROBE, Ragged, Texts, Tokenizer, as_array

log = logging.getLogger(__name__)

# Memory per byte of text, where each is a word that is not known; running out of it means starting
# over with half the batch.
_MEMORY_PER_BYTE = 128
# Places in a batch are 32-bit integers.
_MAX_BYTES = 1 << 30
# For devices that do not report their free memory.
_BATCH_BYTES = 16 << 20
_SLOTS = 1 << 16


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
        self.bos_token_id = host.bos_token_id
        self.fingerprint = host.fingerprint
        self.device = device
        self._host = host
        self._added = AddedTokens(tree["added_tokens"], device)
        self._pre_tokenizer = PreTokenizer(pattern, self._added.prefixes, device)
        self._words = WordTable(WordModel(tree, device), device, slots or _table_slots(device))
        self.batch_bytes = _batch_bytes(device)
        # Fill the table with the words of the vocabulary.
        self.encode(host.vocabulary())

    def encode(self, texts: Texts) -> Tokens:
        """The ids of each document, left on the device."""
        parts = list(self._parts(as_array(texts)))
        if len(parts) == 1:
            return parts[0]
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
        """The text of ids, special tokens spelt out but those that begin and end a document."""
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
            most = min(self.batch_bytes, _MAX_BYTES)
            fits = np.searchsorted(offsets, int(offsets[start]) + most, side="right")
            end = max(int(fits) - 1, start + 1)
            if int(offsets[end] - offsets[start]) > _MAX_BYTES:
                yield self._encode_on_host(texts.slice(start, 1), "too long")
                start = end
                continue
            try:
                yield self._encode(texts.slice(start, end - start))
            except torch.OutOfMemoryError:
                if end > start + 1:
                    self.batch_bytes = max(1, int(offsets[end] - offsets[start]) // 2)
                    log.info("%s: out of memory: halving the batch size", self.device)
                    continue
                yield self._encode_on_host(texts.slice(start, 1), "out of memory")
            start = end

    def _encode_on_host(self, texts: pa.StringArray, reason: str) -> Tokens:
        log.warning("%s: %s: tokenising a document on the CPU", self.device, reason)
        ids, offsets = self._host.encode_batch(texts)
        return Tokens(*(torch.from_numpy(part).to(self.device) for part in (ids, offsets)))

    def _encode(self, texts: pa.StringArray) -> Tokens:
        text, bounds = _upload(texts, self.device)
        if not text.size:
            return Tokens(bounds.new_zeros(0, dtype=torch.int32), bounds)
        classified = self._pre_tokenizer.classify(text)
        added = self._added.find(text, classified.candidates, bounds)
        classified.mark_sections(bounds)
        if len(added.starts):
            classified.mark_pieces(added.starts, added.lengths)
        words = Words(text, self._pre_tokenizer.split(text, classified))
        values = self._words.look_up(words)
        if len(added.starts):
            place = torch.searchsorted(words.starts, added.starts.int())
            values[place] = values_of(added.ids, torch.ones_like(added.ids))
        ids, places = self._words.write_ids(values)
        return Tokens(ids, places[torch.searchsorted(words.starts, bounds.int())].long())


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
