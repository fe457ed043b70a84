"""The GPU tokenizer splits text where the regex of `tokenizers` does, and gives its ids."""

import functools
import json
import os
import random
import sysconfig
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from corpora import adversarial_texts, make_texts
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference
from triton_interpreter import mend

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, BPETokenizer
from infini_model.data.tokenizers.gpu import (
    DIGITS,
    GPT2_PATTERN,
    UnsupportedTokenizerError,
    device,
    merges,
    pretokenize,
    words,
)
from infini_model.data.tokenizers.gpu.device import DeviceTokenizer, put_on_device
from infini_model.data.tokenizers.gpu.pretokenize import PreTokenizer, upload
from infini_model.data.tokenizers.tokenizer import PROBE, ByteTokenizer

pytestmark = pytest.mark.cuda
TEXTS = make_texts(60)
SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
]


@pytest.fixture(scope="module", autouse=True)
def _large_programs() -> Iterator[None]:
    """For the interpreter, in which each costs a tenth of a second whatever it does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    whole = BPETokenizer.vocabulary
    with pytest.MonkeyPatch.context() as patch:
        mend(patch)
        patch.setattr(pretokenize, "BYTES", 1 << 16)
        patch.setattr(words, "WORDS", 1 << 13)
        patch.setattr(merges, "SYMBOLS", 1 << 16)
        # The words with which a tokenizer fills its table at first; it adds others as they come.
        patch.setattr(BPETokenizer, "vocabulary", lambda tokenizer: whole(tokenizer)[-9:])
        yield


@functools.cache
def train(expression: str, added: tuple[AddedToken, ...] = ()) -> str:
    """The tokenizer.json of a real vocabulary, trained on real text."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = Reference(models.BPE())
    if expression == GPT2_PATTERN:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([*TEXTS, *SOURCES[::9]], trainer)
    model.add_tokens(list(added))
    return model.to_str()


def ignoring_merges(definition: str) -> str:
    """The same, with whole words in the vocabulary that no merge produces."""
    tree = json.loads(definition)
    vocabulary = tree["model"]["vocab"]
    for word in ("Ġimport", "Ġself", "''''", "0123", "naÃ¯ve", "ĠĠĠĠĠĠĠ", "xyzzy", "qqq"):
        vocabulary.setdefault(word, 5000 + len(vocabulary))
    tree["model"]["ignore_merges"] = True
    return json.dumps(tree)


def on_device(definition: str, device: torch.device, slots: int = 1 << 16) -> DeviceTokenizer:
    return DeviceTokenizer(BPETokenizer("x", definition), device, slots)


def again(tokenizer: DeviceTokenizer, slots: int = 1 << 16) -> DeviceTokenizer:
    """The same with an empty table, on the same device."""
    return on_device(tokenizer.reference().definition(), tokenizer.device, slots)


def assert_exact(tokenizer: DeviceTokenizer, texts: list[str]) -> None:
    """Ids and offsets are those of the reference, document by document."""
    ragged = tokenizer.encode_batch(texts)
    expected = tokenizer.reference().encode_batch(texts)
    assert [part.dtype for part in ragged] == [np.int32, np.int64]
    assert np.array_equal(ragged.offsets, expected.offsets)
    assert np.array_equal(ragged.ids, expected.ids)


@pytest.fixture(scope="module")
def llama(gpu):
    return on_device(train(LLAMA3_PATTERN), gpu)


every_pattern = pytest.mark.parametrize("expression", DIGITS, ids=["gpt2", "llama3", "qwen"])


@every_pattern
def test_adversarial_strings(expression, gpu):
    large = gpu.type == "cuda"
    texts = adversarial_texts(300_000, 7) if large else adversarial_texts(100, 7, longest=9)
    assert_exact(on_device(train(expression), gpu), texts)


def test_real_text(llama, gpu):
    sources = SOURCES[: 40 if gpu.type == "cuda" else 1]
    texts = [*TEXTS[:5], *PROBE, *sources, "", "a", "\n", "0", " ", ""]
    assert_exact(llama, texts)
    assert_exact(llama, texts)  # all words known
    for nothing in ([], [""], ["", ""]):
        ids, offsets = llama.encode_batch(nothing)
        assert (len(ids), offsets.tolist()) == (0, [0] * (len(nothing) + 1))


def test_whole_words_of_a_vocabulary_that_ignores_merges(llama, gpu):
    ignoring = on_device(ignoring_merges(train(LLAMA3_PATTERN)), gpu, 64)
    words = ["import", " self.qqq", "'''' xyzzy", "naïve 0123", "        x"]
    assert_exact(ignoring, words)
    count = 100_000 if gpu.type == "cuda" else 40
    assert_exact(ignoring, [*words, *TEXTS[:3], *adversarial_texts(count, 3, longest=5)])
    assert not np.array_equal(llama.encode_batch(words).ids, ignoring.encode_batch(words).ids)


def test_a_tokenizer_that_gives_other_ids_is_refused(monkeypatch, gpu):
    monkeypatch.setattr(device, "PROBE", PROBE[:5])
    host = BPETokenizer("x", train(LLAMA3_PATTERN))
    assert isinstance(put_on_device(host, str(gpu)), DeviceTokenizer)
    monkeypatch.setattr(BPETokenizer, "same_ids", lambda *_: False)
    with pytest.raises(UnsupportedTokenizerError, match=f"{gpu} and tokenizers disagree on x"):
        put_on_device(host, str(gpu))
    with pytest.raises(UnsupportedTokenizerError, match="tokenizer bytes is not supported"):
        put_on_device(ByteTokenizer(), str(gpu))


# Tokens that are prefixes or parts of others, or contain blanks or parts of contractions.
RAW = ("<|a|>", "<|a|><|b|>", "<|b|>", "<|", "|>", "日本", "a b", "'s", "\n!", "z")
SOFT = (">x", "b|", "本語", " !", "z'", "aa", "🦊")


def test_documents_that_spell_added_tokens_are_left_to_the_cpu(gpu, monkeypatch):
    added = [AddedToken(token, normalized=False, special=True) for token in RAW]
    added += [AddedToken(token, normalized=True) for token in SOFT]
    chance, count = random.Random(0), 10_000 if gpu.type == "cuda" else 300
    parts = [*RAW, *SOFT, *"<|>ab s\n1日語"]
    texts = ["".join(chance.choices(parts, k=chance.randrange(5))) for _ in range(count)]
    tokenizer = on_device(train(GPT2_PATTERN, tuple(added)), gpu)
    assert_exact(tokenizer, texts)

    taken, encode = [], BPETokenizer.encode_batch

    def noted(host, texts):
        taken.extend(texts.to_pylist())
        return encode(host, texts)

    monkeypatch.setattr(BPETokenizer, "encode_batch", noted)
    tokenizer.encode(texts)
    assert taken == [text for text in texts if any(token in text for token in (*RAW, *SOFT))]
    assert len(texts) > len(taken) > 0


# Around the ends of what a key holds and of what the smaller kernel merges.
NEAR = [*range(10), *range(13, 19), *range(29, 36)]
LENGTHS = ["a" * length + tail for length in NEAR for tail in ("", "b", " c", "\0")]
LENGTHS += ["\0" * length for length in range(1, 40, 3)]
LONGEST = ["!" * length for length in (64, 255, 256, 257, 300)]
# Words of one piece, equal in their first bytes and of the same hash.
ALIKE = ["a" * length + tail for length in (7, 8, 14, 15, 16, 17, 31) for tail in "abcd"]


def test_words_of_every_length(llama):
    assert_exact(again(llama), [*LENGTHS, *LENGTHS, "".join(LENGTHS[:60]), *LONGEST, *LONGEST])


def test_every_word_has_the_same_hash(monkeypatch, gpu):
    """And probes from the same slot; words of more than 15 bytes have the same key."""
    monkeypatch.setattr(words, "MULTIPLIER", 0)
    # The table is empty at first: each word is compared with all that came before.
    monkeypatch.setattr(BPETokenizer, "vocabulary", lambda _: [])
    poor = on_device(train(LLAMA3_PATTERN), gpu, 1 << 10)
    assert_exact(poor, ALIKE[::2])
    assert_exact(poor, [*ALIKE[::-1], *ALIKE])


def test_a_full_table_is_emptied(llama):
    small, text = again(llama, 64), TEXTS[0][:300]
    for texts in ([text], LENGTHS[:9], [text]):
        assert_exact(small, texts)
        assert small._words.words <= 32


def test_threads_that_ask_while_the_device_is_busy_are_answered_together(monkeypatch, llama):
    tokenizer, encode, batches = again(llama), DeviceTokenizer.encode, []
    is_encoding, others_wait = threading.Event(), threading.Event()

    def noted(self, texts):
        batches.append(len(texts))
        is_encoding.set()
        others_wait.wait()
        if "fail" in texts.to_pylist():
            raise RuntimeError("lost")
        return encode(self, texts)

    monkeypatch.setattr(DeviceTokenizer, "encode", noted)
    # The last part finds no room in the batch of the others.
    monkeypatch.setattr(device, "_MAX_BYTES", 1000)
    parts = [["first"], ["a", "b c"], [], ["x", "yz", ""], ["long " * 300]]
    with ThreadPoolExecutor(7) as pool:
        first = pool.submit(tokenizer.encode_batch, parts[0])
        is_encoding.wait()
        rest = []
        for part in parts[1:]:
            rest.append(pool.submit(tokenizer.encode_batch, part))
            while len(tokenizer._waiting) < len(rest):
                time.sleep(0.001)
        others_wait.set()
        answers = [future.result() for future in (first, *rest)]
        failing = [pool.submit(tokenizer.encode_batch, [text]) for text in ("fail", "fail")]
        for future in failing:
            with pytest.raises(RuntimeError, match="lost"):
                future.result()
    assert batches[:3] == [1, 5, 1]
    for part, ragged in zip(parts, answers, strict=True):
        expected = tokenizer.reference().encode_batch(part)
        assert np.array_equal(ragged.offsets, expected.offsets)
        assert np.array_equal(ragged.ids, expected.ids)


def test_running_out_of_memory_halves_the_batches(monkeypatch, llama, caplog):
    fresh = again(llama)
    encode = fresh._encode

    def limited(texts):
        if sum(len(text.as_py().encode()) for text in texts) > 9000:
            raise torch.OutOfMemoryError
        return encode(texts)

    monkeypatch.setattr(fresh, "_encode", limited)
    with caplog.at_level("INFO"):
        assert_exact(fresh, [*TEXTS[:10], "x" * 9001, *TEXTS[:4]])
    assert fresh.batch_bytes <= 9000
    assert "halving the batch size" in caplog.text
    assert "out of memory: tokenising a document on the CPU" in caplog.text


def assert_split(expression: str, texts: list[str], device: torch.device) -> None:
    """Every document is split as by the regex."""
    text, documents = upload(pa.array(texts), device)
    pre_tokenizer = PreTokenizer(DIGITS[expression], torch.zeros(1 << 16), device)
    *starts, end = pre_tokenizer.split(text, documents)[0].tolist()
    bounds = documents.cpu().numpy()
    assert end == text.size
    rows = np.split(starts, np.searchsorted(starts, bounds[1:-1]))
    regex = pre_tokenizers.Split(Regex(expression), "isolated")
    for one, row, first in zip(texts, rows, bounds, strict=False):
        pieces = [len(piece.encode()) for piece, _ in regex.pre_tokenize_str(one)]
        assert (row - first).tolist() == np.cumsum([0, *pieces])[:-1].tolist(), repr(one)


@every_pattern
def test_programs_see_what_is_beyond_their_bytes(expression, gpu, monkeypatch):
    monkeypatch.setattr(pretokenize, "BYTES", 64)
    texts = ["x'll 12345", "é" * 9 + "1" * 90, "a\n" + " " * 40 + "\n b", "!\n\n" * 9 + "  \n c"]
    for shift in (0,) if gpu.type == "cpu" else range(64):
        assert_split(expression, ["y" * shift, *texts], gpu)


@every_pattern
def test_all_short_strings_with_one_character_per_class(expression, gpu):
    letters, longest = ["a", "1", " ", "\t", "\n", "!", "'", "s"], 5 if gpu.type == "cuda" else 3
    texts = [""]
    for _ in range(longest):
        texts += [text + letter for text in texts[-(8 ** len(texts[-1])) :] for letter in letters]
    assert len(texts) == sum(8**length for length in range(longest + 1))
    assert_split(expression, ["|x\nx|".join(texts)], gpu)


# Two of them have the same table of characters.
@pytest.mark.parametrize("expression", [GPT2_PATTERN, LLAMA3_PATTERN], ids=["gpt2", "llama3"])
def test_every_kind_is_that_of_the_regex(expression, gpu):
    # Above are ideographs and unassigned code points.
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 997)]
    if gpu.type == "cpu":
        points = [*range(0x300), *points[0x300::61]]
    context = "a{0}b|1{0}2 {0} '{0}\n{0}"
    texts = ["|x|".join(context.format(chr(point)) for point in points[at::9]) for at in range(9)]
    assert_split(expression, texts, gpu)
