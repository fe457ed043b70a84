"""Byte-pair encoding: loading a `tokenizer.json`, and training one.

`gigatoken` encodes if it is installed and gives the same ids as `tokenizers`; otherwise
`tokenizers` does.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.files import brief
from infini_model.data.sources.text import string_buffers
from infini_model.data.tokenizers.stated import (
    END_OF_TEXT,
    NOTHING_STATED,
    TOKENIZER_FILE,
    StatedTokens,
)
from infini_model.data.tokenizers.tokenizer import PROBE, Ragged, Texts, as_array, without_ends
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# How Llama 3 splits text into the pieces inside which bytes are merged.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Patterns that split text into words, with the longest run of digits in a word; 0 for GPT-2, where
# a run may be of any length. Qwen's pattern is that of Llama 3 with single digits.
DIGITS = {GPT2_PATTERN: 0, LLAMA3_PATTERN: 3, LLAMA3_PATTERN.replace("{1,3}", ""): 1}
# `tokenizers` needs about a hundred bytes of memory for each byte of what it is given at once, so a
# long text is cut into parts of about so many characters.
PART = 1 << 20
# All `DIGITS` cut a text before a space, whatever follows; Llama 3's also after the end of a line.
BEFORE_SPACE = re.compile(r"(?<=\S)(?= )")
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")
# The trainer looks through a long word for each token that it learns.
LONGEST_WORD = 1 << 12
# A character that Arrow's version of Unicode does not know. The newest letters are letters to
# `gigatoken` and not yet to `tokenizers`; their UTF-8 begins with one of these bytes.
UNKNOWN, UNKNOWN_START = r"[^\pC\pL\pM\pN\pP\pS\pZ]", (0xE0, 0xE1, 0xEA, 0xF0)
# `tokenizers` is slow, so of a long text only both ends are compared, each of END_BYTES. END_MARGIN
# tokens next to the cut are ignored, since the missing text could change them.
END_BYTES, END_MARGIN = 1 << 12, 32
# A byte in a vocabulary of SentencePiece.
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class BPETokenizer:
    """A `tokenizer.json`, and what is `stated` beside it.

    `eos_token`, a text or an id, ends every document, whatever the files state.

    With `fast`, `checked_gigatoken` encodes if it can. It is made before the first text is encoded,
    since many tokenizers never encode any. With `parallel` false it encodes in the caller's thread,
    otherwise on all cores.
    """

    parallel: bool | None = None

    def __init__(
        self,
        spec: str,
        text: str,
        *,
        stated: StatedTokens = NOTHING_STATED,
        eos_token: str | int | None = None,
        fast: bool = False,
    ) -> None:
        from tokenizers import Tokenizer as Reference

        self.spec = spec
        try:
            self._reference = Reference.from_str(text)
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise DataError(f"{spec}: is not a tokenizer.json: {brief(error)}") from error
        # A file may enable truncation or padding; a corpus needs neither.
        self._reference.no_truncation()
        self._reference.no_padding()
        self.text, self.stated = text, stated
        self._may_be_fast = fast
        vocabulary: dict[str, int] = self._reference.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_token_ids = self._find_ends(vocabulary, eos_token)
        self.eos_token_id = self.end_token_ids[0]
        self.bos_token_id = self._find_bos()
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

    def _find_ends(self, vocabulary: dict[str, int], named: str | int | None) -> tuple[int, ...]:
        """The tokens that end a text: first the one that ends a document, then the others.

        Where the tokenizer's own closes the turns of a chat, a special token that is known to end
        a text ends documents. Raises `DataError` if no token is known to end one.
        """
        added = self._reference.get_added_tokens_decoder()
        special = {each.content: id_ for id_, each in added.items() if each.special}
        if isinstance(named, str) and named not in vocabulary:
            raise DataError(f"data.tokenizer.eos_token: {named!r} is not a token of {self.spec}")
        stated = list(self.stated.end_ids(vocabulary, added.keys()))
        known = [special[name] for name in END_OF_TEXT if name in special]
        if named is not None:
            first = vocabulary[named] if isinstance(named, str) else named
        elif stated:
            own, unknown = stated[0], special.get(self.stated.special_tokens().get("unk_token", ""))
            closes_turns = self.stated.closes_turns(self._spelling(own))
            others = [each for each in known if closes_turns and each != unknown]
            first = next((each for each in (*stated, *others) if each in known), own)
        elif known:
            first = known[0]
        else:
            raise DataError(
                f"{self.spec}: has no end-of-text token; data.tokenizer.eos_token names one of "
                f"its special tokens: {' '.join(list(special)[:10]) or 'there is none'}"
            )
        return tuple(dict.fromkeys([first, *stated]))

    def _find_bos(self) -> int | None:
        """The token that the file's post-processor puts in front of every text, if it is one."""
        framed, plain = (
            self._reference.encode("Hello, world", add_special_tokens=special).ids
            for special in (True, False)
        )
        # What it puts behind a text does not matter: an end-of-text token is there anyway.
        return framed[0] if plain and framed[1 : len(plain) + 1] == plain else None

    def special_tokens(self) -> dict[str, str]:
        """The texts of named tokens, under the names that `transformers` uses."""
        own = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        named = {name: self._spelling(number) for name, number in own.items() if number is not None}
        return named | self.stated.special_tokens()

    def described_ends(self) -> str:
        """The token that ends documents, and those that end an answer, for a log line."""
        end, *others = (f"{self._spelling(each)} ({each})" for each in self.end_token_ids)
        return end if not others else f"{end}; answers also with {', '.join(others)}"

    def _spelling(self, number: int) -> str:
        """A token as the vocabulary spells it."""
        return self._reference.id_to_token(number) or ""

    @property
    def chat_template(self) -> str | None:
        return self.stated.chat_template

    def chat(self, template: str | None = None) -> ChatTemplate:
        source = template or self.chat_template or PLAIN_TEMPLATE
        begin = "" if self.bos_token_id is None else self._spelling(self.bos_token_id)
        return ChatTemplate(source, self.special_tokens(), begin, self._spelling(self.eos_token_id))

    def state_chat(self, template: ChatTemplate) -> None:
        self.stated = replace(self.stated, chat_template=template.source)

    @cached_property
    def _fast(self) -> Any:
        return checked_gigatoken(self) if self._may_be_fast else None

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each document; special tokens spelt out in the text become their ids."""
        array = as_array(texts)
        if not len(array):
            return Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))
        fast = self._fast
        exactly = np.ones(len(array), bool) if fast is None else _with_unknown(array)
        borders = [0, *np.flatnonzero(np.diff(exactly)) + 1, len(array)]
        parts = [
            self._encode_exactly(array[start:end])
            if exactly[start]
            else _encode_fast(fast, array[start:end], parallel=self.parallel)
            for start, end in itertools.pairwise(borders)
        ]
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([[0], *(np.diff(part.offsets) for part in parts)])
        return Ragged(np.concatenate([part.ids for part in parts]), np.cumsum(lengths))

    def _encode_exactly(self, texts: pa.StringArray) -> Ragged:
        """Encode with `tokenizers`, in parts where these have the ids of the whole text."""
        documents = [
            list(cut(text, BEFORE_SPACE)) if len(text) > PART and self._may_be_cut else [text]
            for text in texts.to_pylist()
        ]
        rows, parts = [], list(itertools.chain.from_iterable(documents))
        sized = zip(itertools.accumulate(map(len, parts)), parts, strict=True)
        for _, some in itertools.groupby(sized, key=lambda each: each[0] // PART):
            encodings = self._reference.encode_batch_fast(
                [part for _, part in some], add_special_tokens=False
            )
            rows += [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        ends = np.cumsum([0, *map(len, rows)])
        return Ragged(np.concatenate(rows), ends[np.cumsum([0, *map(len, documents)])])

    @cached_property
    def _may_be_cut(self) -> bool:
        """Return True if a text has the ids of its parts when it is cut by `BEFORE_SPACE`."""
        tree = json.loads(self.definition())
        steps = tree["pre_tokenizer"] or {}
        # What the first step cuts, the others only cut further.
        first, pattern = (steps.get("pretokenizers") or [steps])[0], None
        if first.get("use_regex"):
            pattern = GPT2_PATTERN
        elif first.get("behavior") == "Isolated" and not first.get("invert"):
            pattern = first.get("pattern", {}).get("Regex")
        across = [t for t in tree["added_tokens"] if t["rstrip"] or re.search(r"\S ", t["content"])]
        # To NFC a space is never part of another character.
        return pattern in DIGITS and tree["normalizer"] in (None, {"type": "NFC"}) and not across

    def decode(self, ids: Any) -> str:
        """The text of ids, special tokens spelt out but those that begin and end a document."""
        values = without_ends(ids, self.bos_token_id, self.eos_token_id).tolist()
        text: str = self._reference.decode(values, skip_special_tokens=False)
        return text

    def byte_lengths(self) -> np.ndarray:
        def length(text: str) -> int:
            # As SentencePiece spells a byte and a space.
            return 1 if BYTE_TOKEN.fullmatch(text) else len(text.replace("▁", " ").encode())

        # A character of byte-level BPE is a byte.
        tree = json.loads(self.definition())
        is_level = "ByteLevel" in json.dumps([tree["decoder"], tree["pre_tokenizer"]])
        lengths = np.zeros(self.vocab_size, np.int32)
        for text, number in self._reference.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(text) if is_level else length(text)
        for number, added in self._reference.get_added_tokens_decoder().items():
            lengths[number] = 0 if added.special else length(added.content)
        return lengths

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

    def _expected(self, text: memoryview | bytes) -> np.ndarray:
        # There may be half a character at the cut, and nowhere else.
        decoded = str(text, "utf-8", "ignore")
        return self._encode_exactly(as_array([decoded])).ids

    def reference(self) -> BPETokenizer:
        """The same file, encoded by `tokenizers` alone."""
        return BPETokenizer(self.spec, self.text, stated=self.stated, eos_token=self.eos_token_id)

    @property
    def files(self) -> tuple[str, ...]:
        return (TOKENIZER_FILE, *self.stated.files)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, the bytes that were loaded, and what is stated beside it."""
        (folder / TOKENIZER_FILE).write_text(self.text, encoding="utf-8")
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens(),
        }
        self.stated.write(folder, self.bos_token_id, self.end_token_ids, fields)


def checked_gigatoken(tokenizer: BPETokenizer) -> Any:
    """`gigatoken` for the same file, or None if it is not installed or disagrees on the probe."""
    try:
        from gigatoken import Tokenizer as Fast
    except ImportError:
        return None
    try:
        fast = Fast.from_json(tokenizer.text)
        ragged = _encode_fast(fast, as_array(list(PROBE)), parallel=False)
    except Exception as error:  # noqa: BLE001 -- whatever it cannot do, `tokenizers` can
        log.info("%s: not using gigatoken: %s", tokenizer.spec, brief(error))
        return None
    rows = np.split(ragged.ids, ragged.offsets[1:-1])
    if all(tokenizer.same_ids(text.encode(), ids) for text, ids in zip(PROBE, rows, strict=True)):
        return fast
    log.warning("%s: not using gigatoken: tokenizers gives other ids", tokenizer.spec)
    return None


def _with_unknown(texts: pa.StringArray) -> np.ndarray:
    """Which texts hold a character that is `UNKNOWN`, bool [N]."""
    offsets, data = string_buffers(texts)
    octets = data[offsets[0] : offsets[-1]].tobytes()
    if not any(byte in octets for byte in UNKNOWN_START):  # fifty times as fast as the pattern
        return np.zeros(len(texts), bool)
    found: np.ndarray = pc.match_substring_regex(texts, UNKNOWN).to_numpy(zero_copy_only=False)
    return found


def cut(text: str, places: re.Pattern[str]) -> Iterator[str]:
    """`text` in parts of at least `PART` characters, but the last, each up to the next place."""
    start = 0
    while found := places.search(text, start + PART):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _encode_fast(fast: Any, texts: pa.StringArray, *, parallel: bool | None) -> Ragged:
    """Encode with `gigatoken`, which reads Arrow's buffers through an awkward array."""
    import awkward as ak  # type: ignore[import-untyped]

    offsets, data = string_buffers(texts)
    characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets.astype(np.int64)), characters, parameters={"__array__": "string"}
    )
    layout = fast.encode_batch(ak.Array(strings), parallel=parallel).layout
    return Ragged(
        np.asarray(layout.content.data).view(np.int32),
        np.asarray(layout.offsets.data, dtype=np.int64),
    )


def train_tokenizer(documents: Iterable[Texts], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE with the Llama-3 pattern and `<|end_of_text|>` on batches of texts.

    The result depends on the documents as a multiset and on `vocab_size`. A small corpus may give
    fewer entries. Words of more than `LONGEST_WORD` characters are cut, with a warning.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Reference

    model = Reference(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for batch in documents for text in as_array(batch).to_pylist())
    model.train_from_iterator(training_parts(texts, split), trainer)
    return BPETokenizer("train", model.to_str(pretty=True), fast=True)


def training_parts(texts: Iterable[str], split: Any) -> Iterator[str]:
    """`texts` in parts of bounded size, from which the same is learnt but for words that are long.

    `split` cuts a text into words. Where no word ends within `PART` characters, a part just ends.
    """
    longest = 0
    for part in itertools.chain.from_iterable(cut(text, BETWEEN_WORDS) for text in texts):
        for first in range(0, len(part), 2 * PART):
            some, start = part[first : first + 2 * PART], 0
            stretches = [each for each in some.split() if len(each) > LONGEST_WORD]
            words = [word for each in stretches for word, _ in split.pre_tokenize_str(each)]
            for word in (each for each in words if len(each) > LONGEST_WORD):
                longest = max(longest, len(word))
                before, start = start, some.index(word, start) + len(word)
                yield some[before : start - len(word)]
                for at in range(0, len(word), LONGEST_WORD):
                    yield word[at : at + LONGEST_WORD]
            yield some[start:]
    if longest:
        told = "tokenizer: the source has a word of %d characters; trained on parts of at most %d"
        log.warning(told, longest, LONGEST_WORD)
