"""A tokenizer on a GPU, which encodes as many documents at a time as its memory holds.

For each byte of text about 44 bytes move through memory, with words of 4.5 bytes and one token
each: 5 GB of text a second need 220 GB/s. Triton's interpreter runs all of it on CPU tensors, for
tests.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from infini_model.data.sources.text import string_buffers
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.gpu import Tokens, UnsupportedTokenizerError, check_supported
from infini_model.data.tokenizers.gpu.merges import WordModel, Words, rows_of, starts_of
from infini_model.data.tokenizers.gpu.pretokenize import PreTokenizer, upload
from infini_model.data.tokenizers.gpu.words import WordTable
from infini_model.data.tokenizers.tokenizer import PROBE, Ragged, Texts, Tokenizer, as_array

log = logging.getLogger(__name__)

# Memory per byte of text, where each is a word that is not known; running out of it means starting
# over with half the batch.
_MEMORY_PER_BYTE = 128
# Places in a batch are 32-bit integers.
_MAX_BYTES = 1 << 30


class _Call(NamedTuple):
    """Documents that a thread wants encoded, and the ids that it waits for."""

    texts: pa.StringArray
    answer: Future[Ragged]


class DeviceTokenizer(BPETokenizer):
    """A `tokenizer.json` of byte-level BPE whose texts are encoded on `device`.

    `slots`, a power of two, is the size of the word table. By default the free memory of the
    device decides it, as well as how many bytes of text are encoded at a time.

    Raises `UnsupportedTokenizerError`, which names the part that is not supported.
    """

    def __init__(self, host: Tokenizer, device: torch.device, slots: int | None = None) -> None:
        supported, tree, digits = check_supported(host)
        super().__init__(
            supported.spec,
            supported.text,
            stated=supported.stated,
            eos_token=supported.eos_token_id,
        )
        self.device = device
        added = [token["content"] for token in tree["added_tokens"] if token["content"]]
        self._added = "|".join(map(re.escape, added))
        self._pre_tokenizer = PreTokenizer(digits, _prefixes(added), device)
        model = WordModel(tree["model"], super().encode_batch, device)
        self.batch_bytes, default_slots = _sizes(device)
        self._words = WordTable(model, device, slots or default_slots)
        self._waiting: deque[_Call] = deque()
        self._turn = threading.Lock()
        # Fill the table with the words of the vocabulary.
        self.encode(self.vocabulary())

    def encode(self, texts: Texts) -> Tokens:
        """The ids of each document, left on the device."""
        parts = list(self._parts(as_array(texts)))
        if len(parts) == 1:
            return parts[0]
        nothing = torch.zeros(0, dtype=torch.int32, device=self.device)
        lengths = torch.cat([nothing.long(), *(part.offsets.diff() for part in parts)])
        return Tokens(torch.cat([nothing, *(part.ids for part in parts)]), starts_of(lengths))

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document; special tokens spelt out in the text become their ids.

        Threads may call it at once: what they ask for while the device is busy is encoded together.
        """
        call = _Call(as_array(texts), Future())
        self._waiting.append(call)
        with self._turn:
            while not call.answer.done():
                self._answer(self._next_calls())
        return call.answer.result()

    def _next_calls(self) -> list[_Call]:
        """The calls that wait, the first one and as many more as one batch may have."""
        calls = [self._waiting.popleft()]
        size = calls[0].texts.nbytes
        while self._waiting and size + self._waiting[0].texts.nbytes <= _MAX_BYTES:
            calls.append(self._waiting.popleft())
            size += calls[-1].texts.nbytes
        return calls

    def _answer(self, calls: Sequence[_Call]) -> None:
        try:
            ids, offsets = map(_on_host, self.encode(pa.concat_arrays([c.texts for c in calls])))
        except BaseException as error:  # noqa: BLE001 - each of the callers raises it
            for call in calls:
                call.answer.set_exception(error)
            return
        first = 0
        for call in calls:
            own = offsets[first : first + len(call.texts) + 1]
            call.answer.set_result(Ragged(ids[own[0] : own[-1]], own - own[0]))
            first += len(call.texts)

    def _parts(self, texts: pa.StringArray) -> Iterator[Tokens]:
        """Encode as many documents at a time as fit; halve the batch when memory runs out."""
        offsets, _ = string_buffers(texts)
        start = 0
        while start < len(texts):
            most = min(self.batch_bytes, _MAX_BYTES)
            fits = np.searchsorted(offsets, int(offsets[start]) + most, side="right")
            end = max(int(fits) - 1, start + 1)
            size, some = int(offsets[end] - offsets[start]), texts.slice(start, end - start)
            try:
                too_long = size > _MAX_BYTES
                yield self._encode_on_host(some, "too long") if too_long else self._encode(some)
            except torch.OutOfMemoryError:
                if end > start + 1:
                    self.batch_bytes = max(1, size // 2)
                    log.info("%s: out of memory: halving the batch size", self.device)
                    continue
                yield self._encode_on_host(some, "out of memory")
            start = end

    def _encode_on_host(self, texts: pa.StringArray, reason: str) -> Tokens:
        log.warning("%s: %s: tokenising a document on the CPU", self.device, reason)
        ids, offsets = super().encode_batch(texts)
        return Tokens(*(torch.from_numpy(part).to(self.device) for part in (ids, offsets)))

    def _encode(self, texts: pa.StringArray) -> Tokens:
        text, bounds = upload(texts, self.device)
        if not text.size:
            return Tokens(bounds.new_zeros(0, dtype=torch.int32), bounds)
        starts, candidates = self._pre_tokenizer.split(text, bounds)
        ids, places = self._words.ids(Words(text, starts))
        tokens = Tokens(ids, places[torch.searchsorted(starts, bounds.int())])
        documents = torch.unique(torch.searchsorted(bounds, candidates, right=True) - 1)
        return self._replace(tokens, texts, documents.cpu().numpy())

    def _replace(self, tokens: Tokens, texts: pa.StringArray, documents: np.ndarray) -> Tokens:
        """The same with those of `documents` that spell an added token encoded by `tokenizers`."""
        spelt = pc.match_substring_regex(texts.take(pa.array(documents)), self._added)
        documents = documents[spelt.to_numpy(zero_copy_only=False)]
        if not len(documents):
            return tokens
        ragged = super().encode_batch(texts.take(pa.array(documents)))
        theirs = Tokens(*(torch.from_numpy(part).to(self.device) for part in ragged))
        which = torch.from_numpy(documents).to(self.device)
        firsts, lengths = tokens.offsets[:-1].clone(), tokens.offsets.diff()
        firsts[which] = theirs.offsets[:-1] + len(tokens.ids)
        lengths[which] = theirs.offsets.diff()
        ids = rows_of(torch.cat([tokens.ids, theirs.ids]), firsts, lengths)
        return Tokens(ids, starts_of(lengths))


def put_on_device(tokenizer: Tokenizer, device: str) -> DeviceTokenizer:
    """`tokenizer` on `device`, checked against `tokenizers` on a probe text.

    Raises `UnsupportedTokenizerError` if the device cannot give the ids of `tokenizers`.
    """
    on_device = DeviceTokenizer(tokenizer, torch.device(device))
    ids, offsets = on_device.encode_batch(list(PROBE))
    rows = np.split(ids, offsets[1:-1])
    if not all(map(on_device.same_ids, map(str.encode, PROBE), rows)):
        raise UnsupportedTokenizerError(f"{device} and tokenizers disagree on {tokenizer.spec}")
    return on_device


def _on_host(values: torch.Tensor) -> np.ndarray:
    # A GPU copies to pinned memory at full speed, and PyTorch keeps that for the next batch.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    array: np.ndarray = host.copy_(values).numpy()
    return array


def _prefixes(added: list[str]) -> torch.Tensor:
    """Whether an added token starts with bytes b and c, for b * 256 + c: bool [65536]."""
    prefixes = torch.zeros(256, 256, dtype=torch.bool)
    for token in map(str.encode, added):
        prefixes[token[0], token[1] if len(token) > 1 else slice(None)] = True
    return prefixes.flatten()


def _sizes(device: torch.device) -> tuple[int, int]:
    """Bytes of text to encode at a time, and slots of the word table, a power of two.

    They take half of the free memory, and about an eightieth of it.
    """
    if device.type != "cuda":
        return 16 << 20, 1 << 16
    free, _ = torch.cuda.mem_get_info(device)
    slots = min(max(free // 4096, 1 << 16).bit_length() - 1, 24)
    return max(1, free // 2 // _MEMORY_PER_BYTE), 1 << slots
