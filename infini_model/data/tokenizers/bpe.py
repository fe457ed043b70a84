"""Byte-pair encoding: loading a `tokenizer.json`, and training one.

`gigatoken` encodes if it is installed and gives the same ids as `tokenizers`; otherwise
`tokenizers` does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infini_model.data.sources.string_arrays import string_buffers
from infini_model.data.tokenizers.tokenizer import Ragged, Texts, as_array, without_eos
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# The end-of-text token is the first of these in the vocabulary.
END_OF_TEXT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
TOKENIZER_FILE = "tokenizer.json"
BYTES = 256
# How Llama 3 splits text into the pieces inside which bytes are merged.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizers` is slow, so of a long text only both ends are compared, each of END_BYTES. END_MARGIN
# tokens next to the cut are ignored, since the missing text could change them.
END_BYTES, END_MARGIN = 1 << 15, 32
# Text on which an implementation must give the ids of `tokenizers` before it is used.
PROBE = (
    "",
    "a",
    " ",
    "\n\n  \n",
    "Hello, world! It's 2024's 3.14159 we'LL\tsee…  \r\n\r\n  done ",
    "naïve café — Ünïcödé, Ελλάδα, Москва, 日本語の文章。한국어 हिन्दी العربية",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and e\u0301 combined, \u00a0\u2003\u3000spaces\u200b",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # comment\n\n\n",
    "control \x00\x01\x7f \ufeff \ufffd ſ 'ſ 'S",
)


class BPETokenizer:
    """A `tokenizer.json`.

    `fast` is a `gigatoken.Tokenizer` of the same file, or None to use only `tokenizers`.
    """

    def __init__(self, spec: str, text: str, *, fast: Any = None) -> None:
        from tokenizers import Tokenizer as Reference

        self.spec = spec
        try:
            self._reference = Reference.from_str(text)
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise DataError(f"{spec}: is not a tokenizer.json: {_first_line(error)}") from error
        # A file may enable truncation or padding; a corpus needs neither.
        self._reference.no_truncation()
        self._reference.no_padding()
        self._text = text
        self._fast = fast
        vocabulary: dict[str, int] = self._reference.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        found = next((vocabulary[name] for name in END_OF_TEXT if name in vocabulary), None)
        if found is None:
            raise DataError(
                f"{spec}: has no end-of-text token; its vocabulary needs one of "
                f"{' '.join(END_OF_TEXT)}"
            )
        self.eos_token_id = found
        self.fingerprint = self._fingerprint()

    def definition(self) -> str:
        """The file in canonical form: JSON with every field."""
        text: str = self._reference.to_str()
        return text

    def vocabulary(self) -> list[str]:
        """The text of every id, with U+FFFD for bytes that are not UTF-8."""
        rows = [[number] for number in range(self.vocab_size)]
        texts: list[str] = self._reference.decode_batch(rows, skip_special_tokens=False)
        return texts

    def _fingerprint(self) -> str:
        """Content key of the parts of the file that decide the ids, in canonical form."""
        tree = json.loads(self.definition())
        deciding = {
            part: tree[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")
        }
        deciding["end_of_text"] = self.eos_token_id
        return storage.content_key(deciding)

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document; special tokens spelt out in the text become their ids."""
        array = as_array(texts)
        if not len(array):
            return Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))
        if self._fast is not None:
            return _encode_fast(self._fast, array)
        encodings = self._reference.encode_batch_fast(array.to_pylist(), add_special_tokens=False)
        rows = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return Ragged(np.concatenate(rows), offsets)

    def decode(self, ids: Any) -> str:
        """The text of ids, special tokens spelt out."""
        values = without_eos(ids, self.eos_token_id).tolist()
        text: str = self._reference.decode(values, skip_special_tokens=False)
        return text

    def same_ids(self, text: memoryview | bytes, ids: np.ndarray) -> bool:
        """Whether `tokenizers` gives `ids` for `text`, which is UTF-8.

        A long text is compared at both ends, and as a whole if they differ.
        """
        if len(text) > 2 * END_BYTES:
            head = self._expected(text[:END_BYTES])[:-END_MARGIN]
            tail = self._expected(text[-END_BYTES:])[END_MARGIN:]
            ends = np.concatenate([ids[: len(head)], ids[len(ids) - len(tail) :]])
            if len(head) and len(tail) and np.array_equal(ends, [*head, *tail]):
                return True
        return np.array_equal(ids, self._expected(text))

    def _expected(self, text: memoryview | bytes) -> list[int]:
        # There may be half a character at the cut, and nowhere else.
        decoded = str(text, "utf-8", "ignore")
        # A batch of one, since only batches release Python's lock.
        (encoding,) = self._reference.encode_batch_fast([decoded], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def reference(self) -> BPETokenizer:
        """The same file, encoded by `tokenizers` alone."""
        return BPETokenizer(self.spec, self._text)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, the bytes that were loaded."""
        (folder / TOKENIZER_FILE).write_text(self._text, encoding="utf-8")

    def use_gigatoken(self) -> None:
        """Encode with `gigatoken` from now on, if it is installed and agrees on the probe."""
        try:
            from gigatoken import Tokenizer as Fast
        except ImportError:
            return
        try:
            fast = Fast.from_json(self._text)
            ragged = _encode_fast(fast, as_array(list(PROBE)))
        except Exception as error:  # noqa: BLE001 -- whatever it cannot do, `tokenizers` can
            log.info("%s: not using gigatoken: %s", self.spec, _first_line(error))
            return
        rows = np.split(ragged.ids, ragged.offsets[1:-1])
        if all(self.same_ids(text.encode(), ids) for text, ids in zip(PROBE, rows, strict=True)):
            self._fast = fast
        else:
            log.warning("%s: not using gigatoken: tokenizers gives other ids", self.spec)


def _encode_fast(fast: Any, texts: pa.StringArray) -> Ragged:
    """Encode with `gigatoken`, which reads Arrow's buffers through an awkward array."""
    import awkward as ak  # type: ignore[import-untyped]

    offsets, data = string_buffers(texts)
    characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets.astype(np.int64)), characters, parameters={"__array__": "string"}
    )
    layout = fast.encode_batch(ak.Array(strings)).layout
    return Ragged(
        np.asarray(layout.content.data).view(np.int32),
        np.asarray(layout.offsets.data, dtype=np.int64),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def train_tokenizer(documents: Iterable[Texts], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE with the Llama-3 pattern and `<|end_of_text|>` on batches of texts.

    The result depends on the documents as a multiset and on `vocab_size`. A small corpus may give
    fewer entries. Raises `DataError` if `vocab_size` is too small for the bytes.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Reference

    if vocab_size < BYTES + 1:
        raise DataError(f"data.tokenizer.vocab_size: got {vocab_size}: takes {BYTES + 1} or more")
    model = Reference(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((as_array(batch).to_pylist() for batch in documents), trainer)
    tokenizer = BPETokenizer("train", model.to_str(pretty=True))
    tokenizer.use_gigatoken()
    return tokenizer
