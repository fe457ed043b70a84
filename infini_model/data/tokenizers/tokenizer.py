"""The tokenizer protocol, from Arrow strings to ids, and the byte tokenizer.

Every implementation returns the ids as one array with the offsets of the documents in it, and
exactly the ids of `tokenizers.Tokenizer.encode(text, add_special_tokens=False)`.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import TokenizerSample
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.text import string_buffers
from infini_model.runtime.errors import ConfigError, UserError
from infini_model.runtime.storage import content_key

log = logging.getLogger(__name__)

Texts: TypeAlias = list[str] | pa.StringArray
# What an incomplete UTF-8 sequence decodes to; the next token may complete it.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Ragged(NamedTuple):
    """Token ids of documents: document i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` int32 [N], or uint8 [N] for bytes; `offsets` int64 [documents + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray


class Tokenizer(Protocol):
    """What the data stages, training and generation need of a tokenizer.

    Attributes:
        spec: The name that the tokenizer was loaded by.
        vocab_size: One more than the largest id.
        eos_token_id: The id of the end-of-text token, which ends every document.
        end_token_ids: It and the other tokens that end what a model says, such as a turn.
        bos_token_id: The id of the beginning-of-text token, which begins every document; None
            without one.
        fingerprint: Hash of what decides the ids of a text.
        files: The names of the files that `save` writes.
        chat_template: The form of a conversation that it states, None if it states none.
    """

    spec: str
    vocab_size: int
    eos_token_id: int
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fingerprint: str

    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def chat_template(self) -> str | None: ...

    def chat(self, template: str | None = None) -> ChatTemplate:
        """The form of a conversation: `template`, or the tokenizer's own, or else the plain one."""

    def state_chat(self, template: ChatTemplate) -> None:
        """State from now on that conversations have this form."""

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document, without added tokens."""

    def decode(self, ids: Any) -> str:
        """The text of ids (any sequence of integers).

        A beginning-of-text token at the start and an end-of-text token at the end are left out.
        """

    def byte_lengths(self) -> np.ndarray:
        """The number of UTF-8 bytes of each token, int32 [vocab_size]; 0 if it is special."""

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        """Whether the reference implementation gives `ids` for `text`, which is UTF-8."""

    def reference(self) -> Tokenizer:
        """The same tokenizer in its reference implementation."""

    def save(self, folder: Path) -> None:
        """Write to `folder` what `load_saved` needs."""


# Texts on which tokenizers differ. An implementation must give the ids of `tokenizers` for them
# before it is used.
PROBE = (
    "",
    "a",
    " ",
    "\n\n  \n",
    "Hello, world! It's 2024's 3.14159 we'LL\tsee…  \r\n\r\n  done ",
    "The quick brown fox doesn't jump over 12 lazy dogs; INTERNATIONALISATION costs $3,456.78",
    "naïve café — Ünïcödé, Ελλάδα, Москва, 日本語の文章。한국어 हिन्दी العربية",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and e\u0301 combined, \u00a0\u2003\u3000spaces\u200b",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # comment\n\n\n",
    "control \x00\x01\x7f \ufeff \ufffd ſ 'ſ 'S",
)


def sample_of(tokenizer: Tokenizer) -> TokenizerSample:
    """What the ids of `PROBE` say: the same for tokenizers that agree, whatever their files."""
    ids, offsets = tokenizer.encode_batch(list(PROBE))
    hashed = content_key([ids.tolist(), offsets.tolist()])
    return TokenizerSample(fingerprint=tokenizer.fingerprint, ids=hashed)


def check_tokenizer(
    weights: str, own: TokenizerSample | None, tokenizer: Tokenizer, place: str
) -> None:
    """Raise `ConfigError` if the `tokenizer` of `place` gives other ids than `weights` know.

    Warns if these bring no tokenizer of their `own`.
    """
    if own is None:
        log.warning(
            "model.initial_weights: %s brings no tokenizer to compare with that of the dataset",
            weights,
        )
        return
    found = sample_of(tokenizer)
    if found.ids != own.ids:
        raise ConfigError(
            f"{place}: its tokenizer ({found.fingerprint[:12]}) gives other ids than that of "
            f"{weights} ({own.fingerprint[:12]}); "
            "data.tokenizer.spec=model makes a dataset for these weights, "
            "model.ignore_tokenizer=true trains them anyway"
        )


def as_array(texts: Texts) -> pa.StringArray:
    """Documents as Arrow strings."""
    return texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())


class ByteTokenizer:
    """Each UTF-8 byte is a token; 255, which never occurs in UTF-8, is the end-of-text token."""

    spec = "bytes"
    vocab_size = 256
    eos_token_id = 255
    end_token_ids: tuple[int, ...] = (255,)
    bos_token_id: int | None = None
    fingerprint = hashlib.sha256(b"bytes, end of text 255").hexdigest()
    files: tuple[str, ...] = ()
    chat_template: str | None = None

    def chat(self, template: str | None = None) -> ChatTemplate:
        return ChatTemplate(template or PLAIN_TEMPLATE)

    def state_chat(self, template: ChatTemplate) -> None:
        """Do nothing: no file states it."""

    def encode_batch(self, texts: Texts) -> Ragged:
        offsets, data = string_buffers(as_array(texts))
        wide = offsets.astype(np.int64)
        return Ragged(data[wide[0] : wide[-1]], wide - wide[0])

    def decode(self, ids: Any) -> str:
        """The text of bytes, with U+FFFD for what is not UTF-8 but the end-of-text token."""
        values = without_ends(ids, None, self.eos_token_id).astype(np.uint8).tobytes()
        return values.replace(b"\xff", b"<|end_of_text|>").decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        lengths = np.ones(self.vocab_size, np.int32)
        lengths[self.eos_token_id] = 0
        return lengths

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        return np.array_equal(np.frombuffer(text, np.uint8), ids)

    def reference(self) -> Self:
        return self

    def save(self, folder: Path) -> None:
        """Write nothing: the name is enough."""


def without_ends(ids: Any, bos_token_id: int | None, eos_token_id: int) -> np.ndarray:
    """Ids as int64 [N], without the token that begins a document and the one that ends it."""
    values = np.asarray(ids, dtype=np.int64)
    if bos_token_id is not None and len(values) and values[0] == bos_token_id:
        values = values[1:]
    return values[:-1] if len(values) and values[-1] == eos_token_id else values


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, follows: bool = False) -> list[int]:
    """Return the ids of a prompt, which follows a text or begins with the beginning-of-text token.

    Raises `UserError` for a text that is not Unicode.
    """
    try:
        ids: list[int] = tokenizer.encode_batch([prompt]).ids.tolist()
    except UnicodeEncodeError as error:
        raise UserError("the text has half of a character (a lone surrogate)") from error
    begin = None if follows else tokenizer.bos_token_id
    return ids if begin is None else [begin, *ids]


def last_ids(tokenizer: Tokenizer, ids: list[int], count: int) -> list[int]:
    """The last `count` ids, or up to three more where these begin inside a character.

    A run of byte tokens that begins inside a character decodes to nothing but U+FFFD.
    """
    tails = [ids[-more:] for more in range(count, count + 4)]
    whole = (tail for tail in tails if not tokenizer.decode(tail).startswith(REPLACEMENT))
    return next(whole, tails[0])
