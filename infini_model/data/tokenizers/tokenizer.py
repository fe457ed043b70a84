"""What a tokenizer is: documents in as Arrow strings, ids out; and the plainest one, of bytes.

All keep one contract: the ids come out as one array and the offsets of the documents in it, and
they are exactly those of `tokenizers.Tokenizer.encode(text, add_special_tokens=False)`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import pyarrow as pa

from infini_model.data.sources.documents import string_buffers

Texts: TypeAlias = list[str] | pa.StringArray


class Ragged(NamedTuple):
    """Documents of ids: document i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` int32 [N], of bytes uint8 [N]; `offsets` int64 [documents + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray


class Tokenizer(Protocol):
    """What the data stage, training and generation rely on."""

    @property
    def spec(self) -> str:
        """What the tokenizer was asked for as."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_token_id(self) -> int:
        """The id that closes a document."""

    @property
    def fingerprint(self) -> str:
        """Hash of what decides the ids."""

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document, without any token added."""

    def decode(self, ids: Any) -> str:
        """The text of ids (any sequence of integers); one end-of-text token at the end is cut."""

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        """Whether the reference implementation gives `ids` for `text`, which is UTF-8."""

    def reference(self) -> Tokenizer:
        """The same tokenizer in its reference implementation."""

    def save(self, folder: Path) -> None:
        """Leave in `folder` what `load_saved` needs."""


def as_array(texts: Texts) -> pa.StringArray:
    """Documents as Arrow strings, if they are not."""
    return texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())


class ByteTokenizer:
    """Each UTF-8 byte is a token; 0xFF never occurs in UTF-8, so 255 is free to end a text."""

    spec = "bytes"
    vocab_size = 256
    eos_token_id = 255
    fingerprint = hashlib.sha256(b"bytes, end of text 255").hexdigest()

    def encode_batch(self, texts: Texts) -> Ragged:
        """The bytes of each document as ids."""
        offsets, octets = string_buffers(as_array(texts))
        wide = offsets.astype(np.int64)
        return Ragged(octets[wide[0] : wide[-1]], wide - wide[0])

    def decode(self, ids: Any) -> str:
        """The text of bytes; what is not UTF-8 becomes U+FFFD."""
        values = without_eos(ids, self.eos_token_id)
        return values.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        """Whether `ids` are the bytes of `text`."""
        return np.array_equal(np.frombuffer(text, np.uint8), ids)

    def reference(self) -> Self:
        """Itself."""
        return self

    def save(self, folder: Path) -> None:
        """Nothing: the name is enough."""


def without_eos(ids: Any, eos_token_id: int) -> np.ndarray:
    """Ids without one end-of-text token at their end, as int64 [N]."""
    values = np.asarray(ids, dtype=np.int64)
    return values[:-1] if len(values) and values[-1] == eos_token_id else values
